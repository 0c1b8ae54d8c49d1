"""A task that says at which instant the root is, and waits there for what is done to the job."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.tasks import Resumable

INSTANTS = ("before", "step", "save", "evaluation", "end")
_WAIT_S = 20.0  # for a sender that is slow
_AFTER_S = 1.0  # in which the signal has its effect


def at(instant: str) -> None:
    """In the root: leave a file `at.INSTANT` and wait a while, once per folder."""
    marker = Path(f"at.{instant}")
    if os.environ.get("HVPS_TEST_INSTANT") != instant or not _is_root():
        return
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    _wait_for_go()
    time.sleep(_AFTER_S)


def _wait_for_go() -> None:
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline and not os.path.exists("go"):
        time.sleep(0.02)


def _is_root() -> bool:
    rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    if rank is not None:
        return rank == "0"
    import sys

    words = sys.argv
    return "--role" not in words or words[words.index("--role") + 1 :][:3] == [
        "worker",
        "--index",
        "0",
    ]


def _stay_until_go() -> None:
    leave = os._exit

    def leave_later(code: int) -> None:
        _wait_for_go()
        leave(code)

    atexit.register(_wait_for_go)
    os._exit = leave_later  # type: ignore[assignment]  # how a task of a cluster ends


class Instants(Resumable):
    """Resumable without BatchNormalization and dropout, which stops at an instant."""

    def __init__(self, examples: int = 400) -> None:
        super().__init__(examples, plain=True)

    def build_model(self) -> keras.Model:
        at("before")
        if os.environ.get("HVPS_TEST_INSTANT") == "end" and not _is_root():
            _stay_until_go()  # else it may have ended before the root is at its end
        model = super().build_model()
        save = model.save

        def save_slowly(path: Any) -> None:
            at("end")
            save(path)

        object.__setattr__(model, "save", save_slowly)
        _slow_first_save()
        return model

    def train_data(self) -> Any:
        return _Marked(*self._arrays(), "step", 130)

    def eval_data(self) -> Any:
        x, y = self._arrays()
        return _Marked(x[:50], y[:50], "evaluation", 10)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.examples, 6)).astype(np.float32)
        return x, np.sin(x.sum(axis=1)).astype(np.float32)


class _Marked:
    def __init__(self, x: np.ndarray, y: np.ndarray, instant: str, count: int) -> None:
        self._x, self._y, self._instant, self._count = x, y, instant, count
        self._fetched = 0
        self._pause = float(os.environ.get("HVPS_TEST_PAUSE", "0"))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        self._fetched += 1
        if self._fetched == self._count:
            at(self._instant)
        time.sleep(self._pause)
        return self._x[i], self._y[i]


def _slow_first_save() -> None:
    """The root's disk takes its time over the second save, so that one is there before it."""
    from hvps import checkpoint

    write = checkpoint._write_arrays
    saves = [0]

    def write_slowly(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[int, str]:
        saves[0] += 1
        return write(path, _HalfWay(arrays) if saves[0] == 2 else arrays)

    checkpoint._write_arrays = write_slowly


class _HalfWay(Mapping[str, np.ndarray]):
    """Arrays that are handed out in two parts: the file is half written between them."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[str]:
        for number, name in enumerate(self._arrays):
            if number == len(self._arrays) // 2:
                at("save")
            yield name
