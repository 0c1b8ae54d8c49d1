"""Processes of this machine, as /proc knows them: their children, their session, whether they stand
still; and how all that a task has started is ended."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from hvps.errors import EXIT_FAILURE

_PR_SET_PDEATHSIG = 1
_SCANS = 5  # what is killed may just have started something


class Process(NamedTuple):
    """What /proc/PID/stat says of a process."""

    pid: int
    state: str
    parent: int
    session: int


def find(pid: int) -> Process | None:
    """A process, unless there is none of that number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # its name may hold anything
        return Process(pid, fields[0], int(fields[1]), int(fields[3]))
    except (OSError, IndexError, ValueError):
        return None


def find_all() -> Iterator[Process]:
    names: list[str] = []
    with suppress(OSError):  # only Linux has it
        names = os.listdir("/proc")
    for name in names:
        process = find(int(name)) if name.isdigit() else None
        if process is not None:
            yield process


def children(parent: int) -> list[int]:
    """Processes that `parent` has started and that still run."""
    return [p.pid for p in find_all() if p.parent == parent and p.state not in ("Z", "X")]


def arguments(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [os.fsdecode(part) for part in file.read().split(b"\0")[:-1]]
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether it was stopped by SIGSTOP or a debugger."""
    process = find(pid)
    return process is not None and process.state in ("T", "t")


def signal_group(leader: int, number: int) -> None:
    """Send a signal to a process and to those of its group."""
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(leader, number)


def kill_all_of(leader: int) -> None:
    """Kill all that the leader of a session has started, or has left behind.

    Its group alone would not do: Open MPI gives each rank a group of its own, MPICH a session, and
    a rank whose mpirun was killed lives on until it notices, or for ever if it stands still.
    """
    for _ in range(_SCANS):
        left = _all_of(leader)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return


def _all_of(leader: int) -> set[int]:
    """Members of its session, who remain that when their parents end, and their descendants."""
    living = [p for p in find_all() if p.state not in ("Z", "X")]
    found = {p.pid for p in living if p.session == leader}
    while further := {p.pid for p in living if p.parent in found} - found:
        found |= further
    return found


def end_with(launcher: int) -> Callable[[], None]:
    """What a new process does first: have itself killed when the launcher dies, however it does."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it has died already
                os._exit(EXIT_FAILURE)

    return prepare
