"""Running things on other hosts, by the `ssh` on PATH, as mpirun and horovodrun do."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hvps.ports import is_own_host

# Never ask for a password; notice a host that is gone. What ~/.ssh/config says of a host holds too.
SSH = (
    "ssh",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=8"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)
# What a job needs of this environment on the other hosts. What belongs to one machine or session
# (HOSTNAME, DISPLAY, TMPDIR, CUDA_VISIBLE_DEVICES) stays at home.
_FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "MPI4PY_LIBMPI", "OPAL_PREFIX")
_FORWARDED_PREFIXES = (
    *("HVPS_", "HOROVOD_", "NCCL_", "TF_", "XLA_", "KERAS_", "OMP_", "OMPI_MCA_"),
    *("OMPI_ALLOW_RUN_AS_ROOT", "PYTHONUNBUFFERED", "PYTHONWARNINGS"),
)
_NOT_FORWARDED = ("TF_CONFIG", "HOROVOD_RANK", "HOROVOD_SIZE")  # of one task


def forwarded(environment: Mapping[str, str] | None = None, also: Sequence[str] = ()) -> list[str]:
    """Names of the variables that other hosts get, sorted; `also` where they are set."""
    names = os.environ if environment is None else environment
    return sorted(
        name
        for name in names
        if name not in _NOT_FORWARDED
        and (name in _FORWARDED or name in also or name.startswith(_FORWARDED_PREFIXES))
    )


def is_here(host: str) -> bool:
    """Whether ssh is not needed."""
    return host in (socket.gethostname(), "localhost") or is_own_host(host)


def on_host(
    host: str, command: Sequence[str], variables: Sequence[str] = (), folder: str | None = None
) -> list[str]:
    """The command that runs `command` on a host: as it is on this one, else by ssh.

    Args:
        variables: names of variables of this environment that are set there too.
        folder: where to run it there; by default where ssh begins.
    """
    if is_here(host):
        return list(command)
    settings = [f"{name}={os.environ[name]}" for name in variables if name in os.environ]
    text = shlex.join(["exec", "env", *settings, *command])
    return [*SSH, host, text if folder is None else f"cd {shlex.quote(folder)} && {text}"]


def guarded(host: str, command: Sequence[str]) -> list[str]:
    """The command of a task on a host, in this folder, under a guard: see hvps.guard."""
    return on_host(host, [sys.executable, "-m", "hvps.guard", *command], forwarded(), os.getcwd())


def signal_guarded(process: subprocess.Popen[bytes], number: int) -> bool:
    """Ask what a guard runs to stop."""
    assert process.stdin is not None
    with suppress(OSError):  # it has ended
        process.stdin.write(b"%d\n" % (number if number == signal.SIGINT else signal.SIGTERM))
        process.stdin.flush()
    return True
