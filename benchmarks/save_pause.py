"""python -m benchmarks.save_pause: how long a save keeps training from going on.

A model whose weights and momentum take 400 MB is trained in this process. At each save the time in
which the training thread copies the state is measured, and next to it, on the same arrays, one
plain numpy copy of them, so that a machine that speeds up or slows down meets both. From the
steps' times comes what a save costs in all: the step that it falls into, less a usual one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

WIDTH = 7071  # squared, times two arrays, times four bytes: 400 MB


class Wide:
    """One large matrix, and as little to compute as that allows."""

    def build_model(self) -> Any:
        import keras

        inputs = keras.Input((WIDTH,))
        hidden = keras.layers.Dense(WIDTH, use_bias=False, name="wide")(inputs)
        return keras.Model(inputs, keras.layers.Dense(1)(hidden), name="wide")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return (y_true - y_pred[:, 0]) ** 2

    def metrics(self) -> list[Any]:
        return []

    def train_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(64, WIDTH)).astype(np.float32)
        return x, x[:, 0].copy()

    def eval_data(self) -> None:
        return None


@dataclass
class Seen:
    """Times in seconds, of `time.perf_counter`.

    Attributes:
        steps: when each step was handed in.
        copies: (when it began, seconds of the backend's copy, seconds of numpy's).
        writes: (begin, end) of what the writing thread did for each save.
        size: bytes of one state.
    """

    steps: list[float] = field(default_factory=list)
    copies: list[tuple[float, float, float]] = field(default_factory=list)
    writes: list[tuple[float, float]] = field(default_factory=list)
    size: int = 0


def watch(seen: Seen) -> None:
    """Have the trainer's parts note when they are called."""
    import hvps.saver as saver
    from hvps.backends.local import LocalBackend

    state, train_step, write = LocalBackend.state, LocalBackend.train_step, saver.write_checkpoint

    def timed_state(self: LocalBackend) -> dict[str, np.ndarray]:
        began = time.perf_counter()
        arrays = state(self)
        own = time.perf_counter() - began
        copied = {name: array.copy() for name, array in arrays.items()}
        seen.copies.append((began, own, time.perf_counter() - began - own))
        seen.size = sum(array.nbytes for array in copied.values())
        return arrays

    def timed_step(self: LocalBackend, *arguments: Any, **keywords: Any) -> Any:
        seen.steps.append(time.perf_counter())
        return train_step(self, *arguments, **keywords)

    def timed_write(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return write(*arguments)
        finally:
            seen.writes.append((began, time.perf_counter()))

    LocalBackend.state, LocalBackend.train_step = timed_state, timed_step  # type: ignore
    saver.write_checkpoint = timed_write


def report(seen: Seen) -> tuple[str, bool]:
    """The figures, and whether no save began before the one before it was done."""
    spans = list(zip(seen.steps[1:], seen.steps[2:], strict=False))  # the first one is traced
    free = [b - a for a, b in spans if not _touches(a, b, seen.writes)]
    beside = [b - a for a, b in spans if _within(a, b, seen.writes)]
    usual = statistics.median(free) if free else float("nan")
    pauses = [_pause(copy, spans, usual) for copy in seen.copies]
    pauses = [pause for pause in pauses if pause is not None]
    ratios = [own / plain for _, own, plain in seen.copies]
    writes = sorted(seen.writes)
    overlaps = sum(after[0] < before[1] for before, after in pairwise(writes))
    lines = {
        "state": f"{seen.size / 1e6:.0f} MB, {len(seen.writes)} saves",
        "step, no save under way": _milliseconds(free),
        "step, a save under way": _milliseconds(beside),
        "training thread's copy of the state": _milliseconds([c for _, c, _ in seen.copies]),
        "numpy's copy of the same arrays": _milliseconds([c for _, _, c in seen.copies]),
        "copy / numpy's copy, neighbours": _spread(ratios, 1.0, ""),
        "step with a save less a usual step": _milliseconds(pauses),
        "writing, beside the training": _milliseconds([b - a for a, b in seen.writes]),
        "saves that overlap": str(overlaps),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines.items()), not overlaps


def _pause(
    copy: tuple[float, float, float], spans: list[tuple[float, float]], usual: float
) -> float | None:
    """How much longer the step was into which a save fell, but for numpy's copy in it."""
    began, _, plain = copy
    return next((b - a - plain - usual for a, b in spans if a <= began < b), None)


def _touches(a: float, b: float, writes: list[tuple[float, float]]) -> bool:
    return any(begin < b and a < end for begin, end in writes)


def _within(a: float, b: float, writes: list[tuple[float, float]]) -> bool:
    return any(begin <= a and b <= end for begin, end in writes)


def _milliseconds(seconds: list[float]) -> str:
    return _spread(seconds, 1e3, " ms")


def _spread(values: list[float], factor: float, unit: str) -> str:
    if not values:
        return "none"
    median, most = statistics.median(values) * factor, max(values) * factor
    return f"median {median:.3g}{unit}, most {most:.3g}{unit} (n={len(values)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=12, help="steps between saves")
    options = parser.parse_args()
    from hvps.train import main as train

    seen = Seen()
    watch(seen)
    with tempfile.TemporaryDirectory(prefix="hvps-save-pause-") as folder:
        code = train(
            [
                "task=benchmarks.save_pause:Wide",
                f"run.dir={folder}",
                f"train.steps={options.steps}",
                "train.global_batch=8",
                "train.eval_every=0",
                "optimizer.name=sgd",
                "optimizer.momentum=0.9",
                "optimizer.learning_rate=0.0000001",
                f"checkpoint.every_steps={options.every}",
                "checkpoint.keep=1",
                "log.tensorboard=false",
                "log.progress=off",
                "backend.kind=local",
            ]
        )
    if code:
        return code
    text, separate = report(seen)
    print(text)
    return 0 if separate else 1


if __name__ == "__main__":
    sys.exit(main())
