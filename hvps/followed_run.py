"""A run seen from outside: its checkpoints as they come, until it has ended."""

from __future__ import annotations

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
        seconds: for which the result of an earlier end may stay before it counts.
    """
    seen: set[str] = set()
    patience = time.monotonic() + seconds
    while True:
        # First: what is saved before the result is then not missed.
        ended = _has_ended(run, started, time.monotonic() > patience)
        found = _newest(run / "checkpoints", seen)
        if found is not None:
            yield found
        elif ended:
            return
        else:
            time.sleep(_POLL_S)


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
