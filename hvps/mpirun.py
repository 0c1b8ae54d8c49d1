"""The command that starts ranks by MPI, and signals that reach them through it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvps.errors import ConfigError


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


def signal_ranks(process: subprocess.Popen[bytes], number: int) -> None:
    """Ask the ranks of an mpirun to stop.

    mpirun itself kills its ranks a second after SIGTERM or SIGINT, which is no time to save.
    """
    ranks = children(process.pid)
    for pid in ranks:
        try:
            os.kill(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        except ProcessLookupError:
            continue
    if not ranks:  # it has not started them yet
        process.send_signal(signal.SIGTERM)


def children(parent: int) -> list[int]:
    """Processes that `parent` has started and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(entry.name))
    return found
