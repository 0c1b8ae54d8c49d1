"""The command that starts ranks by MPI, and signals that reach them through it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hvps.errors import ConfigError
from hvps.processes import arguments, children


def mpirun_command(ranks: int, command: Sequence[str]) -> list[str]:
    """mpirun with what a job on this machine needs.

    Raises:
        ConfigError: there is no mpirun.
    """
    program = _find_mpirun()
    options = ["-np", str(ranks)]
    if "Open MPI" in _version(program) or "Open RTE" in _version(program):
        options.append("--oversubscribe")  # more ranks than cores are slow, but no mistake
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")  # in a container there is nobody else
    return [program, *options, *command]


def _find_mpirun() -> str:
    """That of this environment, or the first on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ConfigError(
            "mpirun: not found",
            rule="backend.kind=allreduce on several ranks is started by MPI",
            received="no mpirun beside this Python and none on PATH",
            do="run `make install`, install Open MPI, or use backend.kind=local",
        )
    return found


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def signal_ranks(process: subprocess.Popen[bytes], number: int) -> bool:
    """Ask the ranks of an mpirun to stop; False if it has not started them yet.

    mpirun itself kills its ranks a second after SIGTERM or SIGINT, which is no time to save.
    """
    assert not isinstance(process.args, (str, bytes, os.PathLike))
    ranks = list(_ranks_below(process.pid, [os.fsdecode(part) for part in process.args]))
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    return bool(ranks)


def _ranks_below(pid: int, started: Sequence[str]) -> Iterator[int]:
    """Descendants that run what mpirun was told to start: the end of its own command line.

    They are its children in Open MPI, and children of a proxy in MPICH.
    """
    for child in children(pid):
        command = arguments(child)
        # A child that is mpirun still, and not yet what it becomes, has all of that line.
        if 0 < len(command) < len(started) and list(started[-len(command) :]) == command:
            yield child
        else:
            yield from _ranks_below(child, started)
