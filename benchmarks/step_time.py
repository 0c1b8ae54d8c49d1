"""python -m benchmarks.step_time : time per step of hvps against what people would use without it.

One process against `keras.Model.fit`, and two ranks against a bare Horovod loop
(`hvd.DistributedGradientTape` on `tf.Variable`s), each on the digits model and on a perceptron of
20 million parameters. The two sides take turns in one job, and what is compared is the ratio of
neighbouring turns, so that a machine that speeds up or slows down meets both.

hvps runs its own trainer here, with its data order, records and checks, as in any run; the other
side is given batches that are ready in memory, and keeps no records.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        task: "module:Class".
        global_batch: examples per step.
        epochs: passes over the data in one turn.
        turns: how often the sides take turns.
    """

    task: str
    global_batch: int
    epochs: int
    turns: int


CASES = {
    "digits": Case("hvps.tasks.digits:Digits", 64, 8, 40),
    "mlp-20m": Case("benchmarks.step_time:Perceptron", 128, 1, 12),
}


class Perceptron:
    """20,029,450 parameters in three dense layers, on random numbers."""

    def build_model(self) -> Any:
        import keras

        inputs = keras.Input((784,))
        x = keras.layers.Dense(4096, activation="relu")(inputs)
        x = keras.layers.Dense(4096, activation="relu")(x)
        return keras.Model(inputs, keras.layers.Dense(10)(x), name="perceptron")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        import keras

        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    def metrics(self) -> list[Any]:
        return []

    def train_data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(128 * 8, 784)).astype(np.float32)
        return x, rng.integers(0, 10, len(x)).astype(np.int32)

    def eval_data(self) -> Any:
        return None


def measure(name: str, folder: str) -> dict[str, float] | None:
    """Run one case in this process or rank; rank 0 returns milliseconds per step and ratios."""
    from hvps.cluster import detect_cluster
    from hvps.overrides import load_config
    from hvps.runtime import configure_tensorflow, prepare_environment

    case, cluster = CASES[name], detect_cluster()
    overrides = [
        f"task={case.task}",
        f"train.global_batch={case.global_batch}",
        f"train.epochs={case.epochs}",
        "train.eval_every=0",
        f"run.dir={folder}",
        "log.progress=off",
        "log.level=warning",
    ]
    loaded = load_config(None, overrides)
    prepare_environment(cluster)
    devices = configure_tensorflow(loaded.config, cluster)

    from hvps.backends import make_backend
    from hvps.session import Session
    from hvps.signals import StopSignals
    from hvps.task import load_task

    backend = make_backend(loaded.config, cluster)
    session = Session.open(loaded, cluster, backend)
    task = load_task(loaded.config)
    trainer = session.trainer(task, devices, StopSignals())
    steps = case.epochs * -(-len(task.train_data()[0]) // case.global_batch)

    def ours() -> None:
        trainer.train_epochs()

    make_other = keras_fit if cluster.size == 1 else bare_horovod
    other = make_other(task, case, cluster)
    for warm_up in (ours, other, ours, other):
        warm_up()
    times = take_turns(ours, other, case.turns)
    backend.close()
    if not cluster.is_root:
        return None
    per_step = [[1e3 * t / steps for t in side] for side in times]
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return {
        "hvps_ms": statistics.median(per_step[0]),
        "other_ms": statistics.median(per_step[1]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def take_turns(
    a: Callable[[], None], b: Callable[[], None], turns: int
) -> tuple[list[float], list[float]]:
    """Seconds of each turn of both sides; who goes first changes from turn to turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for side in ((0, 1), (1, 0))[turn % 2]:
            started = time.perf_counter()
            (a, b)[side]()
            times[side].append(time.perf_counter() - started)
    return times


def keras_fit(task: Any, case: Case, cluster: Any) -> Callable[[], None]:
    """The same model and data under `keras.Model.fit`, with no metrics and no output."""
    import keras

    model = task.build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x, y = task.train_data()

    def run() -> None:
        model.fit(x, y, batch_size=case.global_batch, epochs=case.epochs, verbose=0)

    return run


def bare_horovod(task: Any, case: Case, cluster: Any) -> Callable[[], None]:
    """What Horovod's own TensorFlow 2 example does, with Keras 3's variables unwrapped."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    model, optimizer = task.build_model(), keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    variables = [v.value for v in model.trainable_variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.broadcast_variables(variables, root_rank=0)

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(value, variables), model.trainable_variables)
        return value

    x, y = task.train_data()
    batches = []
    for first in range(0, len(x), case.global_batch):
        mine = slice(first + cluster.rank, first + case.global_batch, cluster.size)
        batches.append((tf.constant(x[mine]), tf.constant(y[mine])))

    def run() -> None:
        for _ in range(case.epochs):
            for batch_x, batch_y in batches:
                step(batch_x, batch_y)

    return run


def start(name: str, ranks: int) -> dict[str, Any]:
    """Measure one case in a job of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.step_time", "--one", name, str(output)]
        if ranks > 1:
            launcher = shutil.which("horovodrun")
            assert launcher, "horovodrun is not on PATH; start this with `make bench`"
            command = [launcher, "-np", str(ranks), *command]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        result: dict[str, Any] = json.loads(output.read_text())
        return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="only 1 or only 2 ranks")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "OUTPUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        result = measure(arguments.one[0], str(Path(arguments.one[1]).parent / "runs"))
        if result:
            Path(arguments.one[1]).write_text(json.dumps(result))
        return
    print(f"{'case':<10} {'ranks':>5} {'hvps ms':>9} {'other ms':>9} {'ratio':>6}  range")
    for ranks in (1, 2):
        for name in arguments.cases if arguments.ranks in (None, ranks) else []:
            r = start(name, ranks)
            print(
                f"{name:<10} {ranks:>5} {r['hvps_ms']:>9.2f} {r['other_ms']:>9.2f}"
                f" {r['ratio']:>6.2f}  {r['ratio_min']:.2f} to {r['ratio_max']:.2f}"
                f"  against {'keras.Model.fit' if ranks == 1 else 'a bare Horovod loop'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
