"""A run seen from outside: its checkpoints as they come, until it has ended."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hvps.checkpoint import Checkpoint, DamagedCheckpointError, list_checkpoints
from hvps.errors import TrainingError
from hvps.run_directory import is_run

_POLL_S = 1.0


def wait_for_run(run: Path, seconds: float) -> None:
    """Wait until the chief has made the run's folder.

    Raises:
        TrainingError: it did not in time.
    """
    deadline = time.monotonic() + seconds
    while not is_run(run):
        if time.monotonic() > deadline:
            raise TrainingError(
                f"evaluator: no run within {seconds:g} s (backend.stall_timeout)",
                rule="the chief makes the run's folder, on a disk that the evaluator sees as well",
                received=f"no {run}",
                do="see whether the chief has started; give it the same run.dir and run.name",
            )
        time.sleep(_POLL_S)


def new_checkpoints(
    run: Path, started: float, seconds: float
) -> Iterator[tuple[Checkpoint, dict[str, np.ndarray]]]:
    """Each newest checkpoint with its state, until the run has ended and its last one was given.

    Args:
        started: when this process was, by the clock.
        seconds: for which the result of an earlier end may stay before it counts, and for which
            nobody may be training before the run counts as broken off.

    Raises:
        TrainingError: the run was broken off.
    """
    seen: set[str] = set()
    patience = time.monotonic() + seconds
    life = _Life(run, seconds)
    while True:
        # First: what is saved before the result is then not missed.
        ended = _has_ended(run, started, time.monotonic() > patience)
        found = _newest(run / "checkpoints", seen)
        if found is not None:
            yield found
            life = _Life(run, seconds)
        elif ended:
            return
        else:
            life.check()
            time.sleep(_POLL_S)


class _Life:
    """Whether anybody trains a run: not if its lock is free and nothing in it has changed for
    `seconds`. There are disks on which another host's lock is not seen, hence the second."""

    def __init__(self, run: Path, seconds: float) -> None:
        self._run, self._seconds = run, seconds
        self._sign: tuple[float, ...] | None = None
        self._until = time.monotonic() + seconds

    def check(self) -> None:
        """Raises TrainingError if the run was broken off."""
        sign = _sign_of_life(self._run)
        if sign is None or sign != self._sign:
            self._sign, self._until = sign, time.monotonic() + self._seconds
        elif time.monotonic() > self._until:
            raise TrainingError(
                f"evaluator: nobody has been training the run for {self._seconds:g} s"
                " (backend.stall_timeout)",
                rule="a run ends with its result, or goes on",
                received=f"no {self._run / 'result.json'}",
                do="look for what ended the chief; start the evaluator again with the others",
            )


def _sign_of_life(run: Path) -> tuple[float, ...] | None:
    """None while somebody holds the run's lock. Else when what training changes was changed."""
    try:
        lock = os.open(run / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is taken, or the file system knows no locks
        return None
    finally:
        os.close(lock)
    places = (run, run / "logs", run / "checkpoints", run / "metrics.jsonl")
    return tuple(path.stat().st_mtime for path in places if path.exists())


def _has_ended(run: Path, started: float, is_late: bool) -> bool:
    """Whether the chief has written its result. One that is older than this process may be that of
    an earlier end, and the chief only about to go on with the run."""
    try:
        written = (run / "result.json").stat().st_mtime
    except FileNotFoundError:
        return False
    return is_late or written >= started


def _newest(folder: Path, seen: set[str]) -> tuple[Checkpoint, dict[str, np.ndarray]] | None:
    """The newest whole checkpoint, if it was not seen yet."""
    for found in list_checkpoints(folder):
        if isinstance(found, DamagedCheckpointError):
            continue
        key = f"{found.step} {found.meta['state_sha256']}"
        if key in seen:
            return None
        seen.add(key)
        try:
            found.verify()
            return found, found.arrays()
        except DamagedCheckpointError:  # or replaced by a newer one just now
            continue
    return None
