"""Running programs and telling the user: short lines, whole logs in files, no tracebacks."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

TAIL_LINES = 15
TERM_SECONDS = 5


class InstallError(Exception):
    """Why the installation cannot go on: what was wrong, the rule, what was found, what to do."""

    def __init__(
        self, what: str, *, rule: str | None = None, received: object = None, do: str | None = None
    ) -> None:
        super().__init__(what)
        lines = [what]
        for label, text in (("rule", rule), ("received", received), ("do", do)):
            if text is not None:
                lines.append(f"  {label + ':':<9} {text}")
        self.text = "\n".join(lines)

    def __str__(self) -> str:
        return self.text


def say(text: str) -> None:
    print(text, flush=True)


def fail(error: InstallError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    timeout: float | None = None,
) -> tuple[int, str]:
    """Runs a program to its end; returns its exit status and output (stdout and stderr).

    On a timeout and on Ctrl-C it is ended with all that it has started. A program that does not
    exist gives status 127, a timeout 124.
    """
    words = [str(word) for word in command]
    # A file rather than a pipe: the log can be followed, and a daemon that keeps the output open
    # (as MPI's may) does not hold up the reader.
    with open(log, "w+b") if log else tempfile.TemporaryFile() as output:
        output.write(f"$ {shlex.join(words)}\n".encode() if log else b"")
        output.flush()
        status = wait_for(words, output, env, cwd, timeout)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def wait_for(
    words: list[str],
    output: IO[bytes],
    env: Mapping[str, str] | None,
    cwd: Path | None,
    timeout: float | None,
) -> int:
    try:
        process = subprocess.Popen(
            words,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        output.write(f"{words[0]}: {error.strerror}\n".encode())
        return 127
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        end_family(process)
        return 124
    except BaseException:
        end_family(process)
        raise


def end_family(process: subprocess.Popen[bytes]) -> None:
    """Asks first: mpirun's ranks have groups of their own, and only mpirun can end them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_SECONDS)


def tail(output: str, lines: int = TAIL_LINES) -> str:
    """The last lines of a program's output, indented, to go under an error message."""
    kept = [line.rstrip() for line in output.splitlines() if line.strip()][-lines:]
    return "\n".join("    | " + line for line in kept) or "    | (no output)"


def clean_environment() -> dict[str, str]:
    """The user's environment without what would make Python or pip look elsewhere."""
    env = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "VIRTUAL_ENV"):
        env.pop(name, None)
    # Make's own options (-j, its job server) are not meant for the builds started here.
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        env.pop(name, None)
    env.update(PYTHONNOUSERSITE="1", PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    return env
