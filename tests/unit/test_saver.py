"""When checkpoints are saved, which of them are kept, and what happens when the disk fails."""

from __future__ import annotations

import errno
import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvps import saver as module
from hvps.callbacks import Monitor
from hvps.checkpoint import Checkpoint, list_checkpoints, write_checkpoint
from hvps.config import CheckpointConfig
from hvps.errors import EXIT_FAILURE, ConfigError, TrainingError
from hvps.position import Position
from hvps.saver import Saver, check_room

pytestmark = pytest.mark.timeout(60)

MakeSaver = Callable[..., Saver]


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 5000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeSaver]:
    made: list[Saver] = []

    def saver(*, start: int = 0, names: tuple[str, ...] = ("loss", "accuracy"), **more: Any) -> Any:
        config = CheckpointConfig.model_validate(more)
        monitor = None
        if config.keep_best:
            monitor = Monitor("checkpoint.monitor", config.monitor, config.mode, names)
        about = {"config": {"a": 1}, "samples": 10}
        made.append(Saver(tmp_path, config, about=about, start=start, monitor=monitor))
        return made[-1]

    yield saver
    for each in made:
        each.close()


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"model/w": np.full(50, step, np.float32)}


def save(saver: Saver, step: int, **loop: Any) -> None:
    """One that is written when this returns."""
    saver.save(Position(step), state_of(step), loop)
    saver._wait()


def evaluated(saver: Saver, step: int, **evaluation: float) -> bool:
    """As the trainer does after an evaluation; whether it was saved for that."""
    best = saver.is_among_best(evaluation)
    if best:
        saver.save_best(Position(step), state_of(step), {})
        saver._wait()
    return best


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All, the first one first; none of them is damaged."""
    found = [each for each in list_checkpoints(folder) if isinstance(each, Checkpoint)]
    assert len(found) == len([*folder.glob("step-*")])
    for each in found:
        each.verify()
        assert each.arrays()["model/w"].tolist() == [each.step] * 50
    return found[::-1]


def steps(folder: Path) -> list[int]:
    return [each.step for each in checkpoints(folder)]


# --- when ---


def due_at(saver: Saver, last: int, first: int = 1) -> list[int]:
    return [step for step in range(first, last + 1) if saver.due(step)]


def test_saves_are_due_every_so_many_steps(make: MakeSaver) -> None:
    assert due_at(make(every_steps=4, every_minutes=0), 13) == [4, 8, 12]
    assert due_at(make(every_steps=1, every_minutes=0), 3) == [1, 2, 3]


def test_a_resumed_run_saves_at_the_same_steps(make: MakeSaver) -> None:
    assert due_at(make(every_steps=4, every_minutes=0, start=6), 13, first=7) == [8, 12]
    assert due_at(make(every_steps=4, every_minutes=0, start=8), 13, first=9) == [12]


def test_steps_that_are_not_asked_for_are_made_up_for(make: MakeSaver) -> None:
    """Asynchronously the root makes a part of the steps."""
    saver = make(every_steps=10, every_minutes=0)
    assert [step for step in range(0, 50, 7) if saver.due(step)] == [14, 21, 35, 42]


def test_saves_are_due_every_so_many_minutes(make: MakeSaver, clock: Clock) -> None:
    saver = make(every_minutes=2)
    found = []
    for step in range(1, 20):
        clock.now += 30
        if saver.due(step):
            found.append(step)
    assert found == [4, 8, 12, 16]


def test_steps_and_minutes_together(make: MakeSaver, clock: Clock) -> None:
    saver = make(every_steps=10, every_minutes=1)
    found = []
    for step in range(1, 31):
        clock.now += 4 if step <= 20 else 11
        if saver.due(step):
            found.append(step)
    # By steps; then by time, counted from the last save, whatever that was due to.
    assert found == [10, 20, 26, 30]


def test_neither_means_only_at_the_end(make: MakeSaver, clock: Clock) -> None:
    saver = make(every_steps=0, every_minutes=0)
    clock.now += 1e6
    assert due_at(saver, 1000) == []


def test_a_save_for_another_reason_counts(make: MakeSaver, clock: Clock, tmp_path: Path) -> None:
    saver = make(every_steps=0, every_minutes=1, keep_best=1)
    clock.now += 59
    assert not saver.due(1)
    assert evaluated(saver, 1, loss=1.0)
    clock.now += 59
    assert not saver.due(2)
    clock.now += 1
    assert saver.due(3)
    assert steps(tmp_path) == [1]


# --- saving ---


class SlowDisk:
    """Writes when it is allowed to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.threads: list[str] = []
        self.at_once = 0
        self._lock = threading.Lock()
        monkeypatch.setattr(module, "write_checkpoint", self._write)

    def _write(self, *arguments: Any) -> Checkpoint:
        with self._lock:
            self.at_once += 1
            assert self.at_once == 1
        self.threads.append(threading.current_thread().name)
        self.began.release()
        assert self.may_go_on.acquire(timeout=30)
        written = write_checkpoint(*arguments)
        with self._lock:
            self.at_once -= 1
        return written


def test_there_are_never_two_saves_at_once(
    make: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    saver = make(every_steps=2, every_minutes=0)
    assert saver.due(2)
    saver.save(Position(2), state_of(2), {})  # returns at once
    assert disk.began.acquire(timeout=30)
    # What comes due while it is being written waits for it.
    assert [saver.due(step) for step in (3, 4, 5)] == [False] * 3
    saver.save(Position(5), state_of(5), {})
    assert not disk.began.acquire(timeout=0.1)
    assert steps(tmp_path) == []
    disk.may_go_on.release()
    saver._wait()
    assert steps(tmp_path) == [2]
    assert saver.due(6)
    assert not saver.due(7)
    assert disk.threads == ["hvps-checkpoints"]


def test_the_last_save_waits_for_the_one_before(
    make: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    saver = make()
    saver.save(Position(2), state_of(2), {})
    assert disk.began.acquire(timeout=30)
    last = threading.Thread(target=saver.save_last, args=(Position(3), state_of(3), {"epoch": 4}))
    last.start()
    assert not disk.began.acquire(timeout=0.1)
    disk.may_go_on.release()
    assert disk.began.acquire(timeout=30)
    assert last.is_alive()
    disk.may_go_on.release()
    last.join(30)
    assert not last.is_alive()
    assert steps(tmp_path) == [2, 3]
    assert [each.meta.get("last") for each in checkpoints(tmp_path)] == [None, True]


def test_what_a_checkpoint_says(make: MakeSaver, tmp_path: Path, clock: Clock) -> None:
    position = Position(7, 2, 1, 70, (3, 4))
    saver = make()
    saver.save(position, state_of(7), {"epoch": 2})
    saver.close()
    (found,) = checkpoints(tmp_path)
    assert Position.from_json(found.meta["position"]) == position
    assert found.meta["loop"] == {"epoch": 2}
    assert found.meta["config"] == {"a": 1}
    assert found.meta["samples"] == 10
    assert found.meta["time"] == clock.time()
    assert saver.last is not None
    assert saver.last.path == found.path


def test_the_same_step_is_written_once(
    make: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step's state may have come due, or been among the best."""
    written = []

    def counted(*arguments: Any) -> Checkpoint:
        written.append(arguments[2]["step"])
        return write_checkpoint(*arguments)

    monkeypatch.setattr(module, "write_checkpoint", counted)
    saver = make(keep_best=1)
    save(saver, 3, epoch=0)
    assert evaluated(saver, 3, loss=0.5)
    saver.save_last(Position(3), state_of(3), {"epoch": 1})
    assert written == [3]
    (found,) = checkpoints(tmp_path)
    assert found.meta["loop"] == {"epoch": 1}
    assert found.meta["best"] == {"loss": 0.5}
    assert found.meta["last"] is True
    save(saver, 4)
    assert written == [3, 4]


def test_a_resumed_run_writes_the_step_that_it_began_at(make: MakeSaver, tmp_path: Path) -> None:
    """A run that is over is evaluated again; its checkpoint is not another run's business."""
    write_checkpoint(tmp_path, state_of(5), {"step": 5})
    saver = make(start=5)
    saver.save_last(Position(5), state_of(5), {"epoch": 1})
    (found,) = checkpoints(tmp_path)
    assert found.meta["loop"] == {"epoch": 1}


def test_remains_of_an_earlier_life_are_removed(make: MakeSaver, tmp_path: Path) -> None:
    for name in (".writing-5-123", ".removing-step-000000000004"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.npz").write_bytes(b"half")
    make()
    assert list(tmp_path.iterdir()) == []


# --- which are kept ---


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(make: MakeSaver, tmp_path: Path, keep: int) -> None:
    saver = make(keep=keep)
    for step in range(1, 6):
        save(saver, step)
        assert steps(tmp_path) == list(range(max(1, step - keep + 1), step + 1))


def test_an_earlier_life_counts(make: MakeSaver, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, state_of(step), {"step": step})
    saver = make(keep=2, start=30)
    assert steps(tmp_path) == [10, 20, 30]  # none goes before there is a new one
    save(saver, 40)
    assert steps(tmp_path) == [30, 40]


LOSSES = {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.1, 5: 0.4, 6: 0.8, 7: 0.7}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep_best": 1}, [4, 7]),
        ({"keep_best": 2}, [2, 4, 7]),
        ({"keep_best": 2, "mode": "max"}, [1, 6, 7]),
        ({"keep_best": 2, "monitor": "accuracy"}, [2, 4, 7]),
        ({"keep_best": 1, "monitor": "accuracy", "mode": "min"}, [1, 7]),
        ({"keep_best": 3, "keep": 2}, [2, 4, 5, 6, 7]),
    ],
)
def test_the_best_are_kept(
    make: MakeSaver, tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    saver = make(**{"keep": 1, **options})
    for step, loss in LOSSES.items():
        save(saver, step)
        evaluated(saver, step, loss=loss, accuracy=1 - loss)
    assert steps(tmp_path) == expected


def test_only_what_is_among_the_best_is_saved_for_that(make: MakeSaver, tmp_path: Path) -> None:
    saver = make(keep=1, keep_best=2)
    found = [evaluated(saver, step, loss=loss) for step, loss in LOSSES.items()]
    assert found == [True, True, True, True, False, False, False]
    assert steps(tmp_path) == [2, 4]
    assert [each.meta["best"] for each in checkpoints(tmp_path)] == [{"loss": 0.3}, {"loss": 0.1}]


def test_the_best_of_an_earlier_life_count(make: MakeSaver, tmp_path: Path) -> None:
    first = make(keep=1, keep_best=1)
    evaluated(first, 1, loss=0.2)
    save(first, 2)
    first.close()
    second = make(keep=1, keep_best=1, start=2)
    assert not evaluated(second, 3, loss=0.3)
    save(second, 3)
    assert steps(tmp_path) == [1, 3]
    assert evaluated(second, 4, loss=0.1)
    assert steps(tmp_path) == [4]


def test_best_by_another_metric_than_before(make: MakeSaver, tmp_path: Path) -> None:
    first = make(keep=1, keep_best=1)
    evaluated(first, 1, loss=0.2, accuracy=0.1)
    first.close()
    second = make(keep=1, keep_best=1, monitor="accuracy", start=1)
    assert evaluated(second, 2, loss=0.5, accuracy=0.05)
    assert steps(tmp_path) == [2]


def test_nan_is_not_among_the_best(make: MakeSaver, tmp_path: Path) -> None:
    saver = make(keep_best=3)
    assert not saver.is_among_best({"loss": math.nan})
    assert evaluated(saver, 2, loss=math.inf)
    assert evaluated(saver, 3, loss=1.0)


def test_nothing_is_best_where_none_are_kept(make: MakeSaver) -> None:
    assert not make().is_among_best({"loss": 0.0})


def test_the_last_evaluation_is_noted(make: MakeSaver, tmp_path: Path) -> None:
    saver = make(keep=1, keep_best=1)
    evaluated(saver, 1, loss=0.5)
    saver.save_last(Position(2), state_of(2), {})
    saver.note_last({"loss": 0.4})
    saver.close()
    assert [(each.step, each.meta["best"]) for each in checkpoints(tmp_path)] == [
        (2, {"loss": 0.4})
    ]


def test_a_last_evaluation_that_is_not_the_best(make: MakeSaver, tmp_path: Path) -> None:
    saver = make(keep=1, keep_best=1)
    evaluated(saver, 1, loss=0.5)
    saver.save_last(Position(2), state_of(2), {})
    saver.note_last({"loss": 0.6})
    saver.close()
    assert [(each.step, each.meta.get("best")) for each in checkpoints(tmp_path)] == [
        (1, {"loss": 0.5}),
        (2, None),
    ]


def test_later_ones_that_were_passed_over_do_not_take_the_place_of_good_ones(
    make: MakeSaver, tmp_path: Path
) -> None:
    """A run that goes on at step 20 because the state of step 30 is damaged."""
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, state_of(step), {"step": step, "best": {"loss": 0.0}})
    with open(tmp_path / "step-000000000030" / "state.npz", "r+b") as file:
        file.write(b"damaged")
    saver = make(keep=1, keep_best=1, start=20)
    # What was damaged is no better than others, either.
    assert saver._best(saver._readable()).keys() == {
        tmp_path / "step-000000000010",
        tmp_path / "step-000000000020",
    }
    save(saver, 25)
    assert steps(tmp_path)[-1] == 25
    assert 30 not in steps(tmp_path)
    saver.save_last(Position(26), state_of(26), {})
    assert steps(tmp_path)[-1] == 26


# --- a disk that fails ---


class BrokenDisk:
    """Fails as long as `error` says how."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
        self.error = error
        for name in ("write_checkpoint", "note_in_checkpoint", "remove_checkpoint"):
            monkeypatch.setattr(module, name, self._failing(getattr(module, name)))

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.error is not None:
                raise self.error
            return real(*arguments)

        return call


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_save_that_fails_is_logged_and_training_goes_on(
    make: MakeSaver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("hvps"), "propagate", True)
    disk = BrokenDisk(monkeypatch, None)
    saver = make()
    save(saver, 1)
    disk.error = FULL
    with caplog.at_level(logging.ERROR, "hvps"):
        save(saver, 2)
    (record,) = caplog.records
    message = record.getMessage()
    assert "the disk is full" in message
    assert "the one of step 1 is whole" in message
    assert "checkpoint.keep" in message
    assert steps(tmp_path) == [1]
    disk.error = None
    save(saver, 3)
    assert steps(tmp_path) == [1, 3]
    # An earlier failure is none of the last save.
    saver.save_last(Position(4), state_of(4), {})


@pytest.mark.parametrize(
    ("error", "says", "do"),
    [
        (FULL, "the disk is full", "free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full", "free some space"),
        (OSError(errno.EIO, "Input/output error"), "could not be written", "look at that disk"),
        (MemoryError(), "could not be written", "look at that disk"),
    ],
)
def test_a_last_save_that_fails_is_an_error(
    make: MakeSaver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    says: str,
    do: str,
) -> None:
    disk = BrokenDisk(monkeypatch, error)
    saver = make()
    with pytest.raises(TrainingError, match=says) as caught:
        saver.save_last(Position(2), state_of(2), {})
    assert caught.value.exit_code == EXIT_FAILURE
    assert type(error).__name__ in str(caught.value.received)
    assert "there is no earlier one" in str(caught.value.received)
    assert do in str(caught.value.do)
    assert str(tmp_path) in caught.value.what
    assert caught.value.rule
    disk.error = None
    saver.save_last(Position(2), state_of(2), {})
    assert steps(tmp_path) == [2]


def test_a_folder_that_cannot_be_listed_is_an_error_too(
    make: MakeSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may wait for a writer that has died of explaining what was wrong."""
    saver = make()

    def gone(folder: Path) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(module, "list_checkpoints", gone)
    monkeypatch.setattr(module, "write_checkpoint", lambda *_: gone(Path()))
    found: list[BaseException] = []

    def last() -> None:
        try:
            saver.save_last(Position(2), state_of(2), {})
        except BaseException as err:
            found.append(err)

    thread = threading.Thread(target=last, daemon=True)
    thread.start()
    thread.join(10)
    if thread.is_alive():
        saver._busy.clear()  # so that the fixture can end
    assert [type(err) for err in found] == [TrainingError]
    assert "Stale file handle" in str(found[0])


def test_a_disk_that_is_full_at_a_removal_fails_no_save(
    make: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is there; the surplus one goes another time."""
    saver = make(keep=1)
    save(saver, 1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "remove_checkpoint", lambda _path: (_ for _ in ()).throw(FULL))
        saver.save_last(Position(2), state_of(2), {})
    assert saver.last is not None
    assert saver.last.step == 2
    assert steps(tmp_path) == [1, 2]
    save(saver, 3)
    assert steps(tmp_path) == [3]


# --- room ---


@pytest.mark.parametrize(
    ("options", "there", "needed"),
    [
        ({"keep": 3}, 0, 4),
        ({"keep": 1}, 0, 2),
        ({"keep": 2, "keep_best": 3}, 0, 6),
        ({"keep": 3}, 2, 2),
        ({"keep": 3}, 3, 1),
        ({"keep": 1}, 7, 1),  # one is written before others are removed
    ],
)
def test_room_is_looked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, int],
    there: int,
    needed: int,
) -> None:
    folder = tmp_path / "not" / "yet"
    for step in range(there):
        write_checkpoint(folder, state_of(step), {"step": step})
    config, one, asked = CheckpointConfig.model_validate(options), 5_000_000, []

    def with_free(free: int) -> None:
        def usage(path: Path) -> Any:
            asked.append(path)
            return SimpleNamespace(free=free)

        monkeypatch.setattr(shutil, "disk_usage", usage)
        check_room(folder, config, one)

    with_free(needed * one)
    assert asked == [folder if there else tmp_path]
    with pytest.raises(ConfigError, match="the disk is too small") as caught:
        with_free(needed * one - 1)
    assert f"{config.keep + config.keep_best} checkpoints" in str(caught.value.rule)
    assert "5 MB" in str(caught.value.received)
    assert f"{there} are there" in str(caught.value.received)
    assert "checkpoint.keep" in str(caught.value.do)
