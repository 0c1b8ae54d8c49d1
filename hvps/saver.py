"""When checkpoints are saved, and the thread that writes them; on the root alone.

The training thread pays for a copy of the state. The rest happens beside it, one save at a time:
what comes due while one is being written is saved after it.
"""

from __future__ import annotations

import errno
import queue
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hvps.callbacks import Monitor
from hvps.checkpoint import (
    Checkpoint,
    list_checkpoints,
    note_in_checkpoint,
    remove_checkpoint,
    remove_remains,
    write_checkpoint,
)
from hvps.errors import ConfigError, HvpsError, TrainingError
from hvps.log import logger
from hvps.position import Position

if TYPE_CHECKING:
    from hvps.config import CheckpointConfig

State: TypeAlias = dict[str, np.ndarray]


class Saver:
    """Saves states as they come due.

    Args:
        folder: `checkpoints` of the run.
        config: `checkpoint`.
        about: what each checkpoint says besides its state: configuration, versions, …
        start: step at which this process begins.
        monitor: says which evaluations are best; None where nothing is kept for that.

    Attributes:
        last: the newest checkpoint that was written by this process.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        about: Mapping[str, Any],
        start: int,
        monitor: Monitor | None,
    ) -> None:
        self._folder, self._config = folder, config
        self._about, self._monitor = about, monitor
        self._asked_at, self._saved_at = start, time.monotonic()
        self._evaluation: dict[str, float] | None = None
        self.last: Checkpoint | None = None
        self._start, self._own = start, set[Path]()
        self._failure: BaseException | None = None
        self._busy = threading.Event()
        self._idle = threading.Condition()
        self._work: queue.Queue[tuple[State, dict[str, Any]] | None] = queue.Queue()
        remove_remains(folder)
        threading.Thread(target=self._write_all, name="hvps-checkpoints", daemon=True).start()

    # --- when ---

    def due(self, step: int) -> bool:
        """Whether the state after `step` updates should be saved; asked once for each step."""
        config = self._config
        if self._busy.is_set():
            return False
        by_step = bool(config.every_steps) and (
            step // config.every_steps > self._asked_at // config.every_steps
        )
        minutes = (time.monotonic() - self._saved_at) / 60
        if by_step or 0 < config.every_minutes <= minutes:
            self._asked_at, self._saved_at = step, time.monotonic()
            return True
        return False

    def is_among_best(self, evaluation: Mapping[str, float]) -> bool:
        """Whether the state that was just evaluated so is to be kept for that."""
        if self._monitor is None:
            return False
        self._evaluation = dict(evaluation)
        value = self._monitor(evaluation)
        if value != value:
            return False
        best = sorted(self._best(self._readable()).values())
        return len(best) < self._config.keep_best or value < best[self._config.keep_best - 1]

    # --- saving ---

    def save(self, position: Position, state: State, loop: Mapping[str, Any]) -> None:
        """Have the state written, which nobody may change any more. Returns at once.

        Args:
            loop: what the checkpoint says of the training loop.
        """
        if not self._busy.is_set():
            self._hand_in(position, state, {"loop": dict(loop)})

    def save_best(self, position: Position, state: State, loop: Mapping[str, Any]) -> None:
        """The same for a state that `is_among_best`."""
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            self._wait()
            best = self._monitored(evaluation)
            self._hand_in(position, state, {"loop": dict(loop), "best": best})

    def note_last(self, evaluation: Mapping[str, float]) -> None:
        """The state that `save_last` has saved was evaluated so."""
        if self.last is not None and self.is_among_best(evaluation):
            self._wait()
            self._hand_in(Position(self.last.step), {}, {"best": self._monitored(evaluation)})

    def save_last(self, position: Position, state: State, loop: Mapping[str, Any]) -> None:
        """The same for the state at the end of the work; returns when it is on disk.

        Raises:
            TrainingError: it could not be written.
        """
        self._wait()
        self._failure = None
        self._hand_in(position, state, {"loop": dict(loop), "last": True})
        self._wait()
        if self._failure is not None:
            raise self._not_written(self._failure) from self._failure

    def _hand_in(self, position: Position, state: State, further: dict[str, Any]) -> None:
        self._busy.set()
        self._asked_at, self._saved_at = position.step, time.monotonic()
        if self.last is not None and self.last.step == position.step:  # it is the same state
            self._work.put(({}, further))
            return
        meta = {
            **self._about,
            "step": position.step,
            "position": position.as_json(),
            "time": time.time(),
            **further,
        }
        self._work.put((state, meta))

    def _wait(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._busy.is_set())

    def close(self) -> None:
        """Wait until nothing is being written."""
        self._wait()
        self._work.put(None)

    # --- the writing thread ---

    def _write_all(self) -> None:
        while (entry := self._work.get()) is not None:
            try:
                self.last = self._written(*entry)
                self._own.add(self.last.path)
            except BaseException as err:  # training goes on, and the next save may succeed
                self._failure = err
                logger.error("%s", self._not_written(err))
            else:
                self._remove_surplus()
            del entry  # the state's memory
            with self._idle:
                self._busy.clear()
                self._idle.notify_all()

    def _written(self, state: State, meta: dict[str, Any]) -> Checkpoint:
        if "step" in meta:
            return write_checkpoint(self._folder, state, meta)
        assert self.last is not None
        return note_in_checkpoint(self.last, meta)

    def _remove_surplus(self) -> None:
        try:
            found = self._readable()
            keep = {c.path for c in found[: self._config.keep]}
            best = self._best(found)
            keep |= set(sorted(best, key=lambda path: best[path])[: self._config.keep_best])
            for checkpoint in self._described():
                if checkpoint.path not in keep:
                    remove_checkpoint(checkpoint.path)
        except Exception as err:  # what was to be saved is saved
            logger.warning("checkpoint: surplus ones in %s are still there: %s", self._folder, err)

    def _readable(self) -> list[Checkpoint]:
        """Those that count. One of a later step than where this process began was passed over then:
        its description can be read, but not its state."""
        return [c for c in self._described() if c.step <= self._start or c.path in self._own]

    def _described(self) -> list[Checkpoint]:
        return [c for c in list_checkpoints(self._folder) if isinstance(c, Checkpoint)]

    def _best(self, found: list[Checkpoint]) -> dict[Path, float]:
        """The monitored value of those that have one; less is better."""
        assert self._monitor is not None or not self._config.keep_best
        if self._monitor is None:
            return {}
        marked = {c.path: c.meta.get("best") for c in found}
        return {
            path: self._monitor(best)
            for path, best in marked.items()
            if best is not None and self._monitor.name in best
        }

    def _monitored(self, evaluation: Mapping[str, float]) -> dict[str, float]:
        assert self._monitor is not None
        return {self._monitor.name: evaluation[self._monitor.name]}

    def _not_written(self, err: BaseException) -> HvpsError:
        full = isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT)
        try:
            newest = next(iter(self._readable()), None)
            kept = (
                f"the one of step {newest.step} is whole" if newest else "there is no earlier one"
            )
        except Exception as further:  # the folder cannot be looked at either
            kept = f"{type(further).__name__}: {further}"
        return TrainingError(
            f"checkpoint: could not be written to {self._folder}"
            + (": the disk is full" if full else ""),
            rule="a save that fails leaves the older checkpoints as they are",
            received=f"{type(err).__name__}: {err}; {kept}",
            do="free some space, or lower checkpoint.keep" if full else "look at that disk",
        )


def check_room(folder: Path, config: CheckpointConfig, state_bytes: int) -> None:
    """Look whether the disk has room for the checkpoints of a run.

    Args:
        state_bytes: of one of them.

    Raises:
        ConfigError: it has not.
    """
    there = len(list(list_checkpoints(folder)))
    # One more than are kept: the surplus one is removed when the new one is complete.
    needed = state_bytes * max(1, config.keep + config.keep_best + 1 - there)
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise ConfigError(
            "checkpoint: the disk is too small",
            rule=f"room for {config.keep + config.keep_best} checkpoints, and one being written",
            received=f"{_size(free)} free in {nearest}; one takes {_size(state_bytes)},"
            f" {there} are there",
            do="free some space, choose another run.dir, or lower checkpoint.keep (0 writes none)",
        )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
