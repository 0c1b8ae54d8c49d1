"""What an evaluator sees of a run: each newest checkpoint once, until the run has ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hvps import evaluator_task, followed_run
from hvps.checkpoint import remove_checkpoint, write_checkpoint
from hvps.errors import TrainingError
from hvps.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(followed_run, "_POLL_S", 0.01)
    return tmp_path


def add(run: Path, step: int, value: float = 1.0) -> Path:
    arrays = {"w": np.full(3, value, np.float32)}
    return write_checkpoint(run / "checkpoints", arrays, {"step": step}).path


def end(run: Path, seconds_ago: float = 0.0) -> None:
    (run / "result.json").write_text("{}")
    at = time.time() - seconds_ago
    os.utime(run / "result.json", (at, at))


@pytest.mark.timeout(30)
def test_each_newest_one_comes_once(run: Path) -> None:
    for step in (1, 2):
        add(run, step, float(step))
    found = followed_run.new_checkpoints(run, time.time() - 60, 60)
    checkpoint, state = next(found)
    assert checkpoint.step == 2  # 1 was replaced before anybody looked
    np.testing.assert_array_equal(state["w"], np.full(3, 2.0))
    (add(run, 4) / "state.npz").write_bytes(b"damaged")
    third = add(run, 3)
    checkpoint, _ = next(found)
    assert checkpoint.step == 3
    remove_checkpoint(third)
    add(run, 5)
    end(run)  # and what was saved before is given all the same
    assert [c.step for c, _ in found] == [5]


@pytest.mark.timeout(30)
def test_a_step_that_is_done_again_otherwise_is_new(run: Path) -> None:
    add(run, 1, 1.0)
    found = followed_run.new_checkpoints(run, time.time() - 60, 60)
    assert next(found)[1]["w"][0] == 1.0
    add(run, 1, 2.0)
    assert next(found)[1]["w"][0] == 2.0
    end(run)
    assert list(found) == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_the_result_of_an_earlier_end_counts_later(run: Path, patience: float) -> None:
    """The chief may be about to go on with that run."""
    add(run, 1)
    end(run, seconds_ago=1000)
    begun = time.monotonic()
    assert len(list(followed_run.new_checkpoints(run, time.time(), patience))) == 1
    assert patience <= time.monotonic() - begun < patience + 5


@pytest.mark.timeout(30)
def test_a_run_that_was_broken_off(run: Path) -> None:
    add(run, 1)
    (run / ".lock").touch()  # the chief had it
    found = followed_run.new_checkpoints(run, time.time(), 0.3)
    assert next(found)[0].step == 1
    begun = time.monotonic()
    with pytest.raises(TrainingError, match=r"nobody has been training the run for 0\.3 s"):
        next(found)
    assert 0.3 <= time.monotonic() - begun < 5


@pytest.mark.timeout(30)
def test_who_trains_may_take_time(run: Path) -> None:
    """Its lock shows that it lives, however long nothing is written."""
    RunDirectory(run).lock()  # held as long as this process lives
    found = followed_run.new_checkpoints(run, time.time(), 0.1)
    threading.Timer(1.0, lambda: (add(run, 1), end(run))).start()
    assert [c.step for c, _ in found] == [1]


@pytest.mark.timeout(30)
def test_a_lock_that_is_not_seen_is_not_missed(run: Path) -> None:
    """Where only the files show that somebody trains on another host."""
    (run / ".lock").touch()
    found = followed_run.new_checkpoints(run, time.time(), 0.5)
    done = threading.Event()

    def train() -> None:
        for step in range(8):
            (run / "metrics.jsonl").write_text(f"{step}")
            done.wait(0.2)
        add(run, 1)
        end(run)

    threading.Thread(target=train).start()
    assert [c.step for c, _ in found] == [1]


@pytest.mark.timeout(30)
def test_a_run_that_does_not_begin(run: Path) -> None:
    with pytest.raises(TrainingError, match=r"no run within 0\.1 s") as caught:
        followed_run.wait_for_run(run / "absent", 0.1)
    assert "absent" in str(caught.value.received)
    (run / "config.yaml").touch()
    followed_run.wait_for_run(run, 0.1)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)]
)
def test_signals_end_it_with_their_code(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with evaluator_task._stopped_by_signals() as stop, pytest.raises(evaluator_task._StoppedError):
        _receive(number)
    assert stop == {"code": code}
    assert signal.getsignal(number) is before


def _receive(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)
