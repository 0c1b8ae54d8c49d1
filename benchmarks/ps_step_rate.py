"""python -m benchmarks.ps_step_rate: steps per second of asynchronous parameter servers, hvps's and
TensorFlow's own.

The other side is `tf.distribute.ParameterServerStrategy` with a hand-written loop: a coordinator
that schedules a traced step on its workers, each with a dataset of its own. The same model, batch
and optimizer, 1 ps and 2 workers on loopback. Both clusters are started once and take turns; while
one works the other waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hvps.cluster import Cluster, Tasks
from hvps.ports import free_ports

MODELS = {
    "digits": "hvps.tasks.digits:Digits",
    "perceptron": "benchmarks.ps_step_rate:Perceptron",
}
BATCH = 64


class Perceptron:
    """0.9 million weights, so that most of the time goes into moving them."""

    def build_model(self) -> Any:
        import keras

        inputs = keras.Input((784,))
        x = keras.layers.Dense(784, activation="relu")(inputs)
        x = keras.layers.Dense(392, activation="relu")(x)
        return keras.Model(inputs, keras.layers.Dense(10)(x))

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        import keras

        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    def metrics(self) -> list[Any]:
        return []

    def train_data(self) -> Any:
        import numpy as np

        rng = np.random.default_rng(0)
        return rng.normal(size=(2048, 784)).astype("f"), rng.integers(0, 10, 2048).astype("i4")

    def eval_data(self) -> Any:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="digits")
    parser.add_argument("--steps", type=int, default=600, help="per turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, role, index = options.side
        {"hvps": run_hvps, "stock": run_stock}[side](role, int(index), options)
        sys.stdout.flush()
        os._exit(0)
    compare(options)


# --- the parent ---


def compare(options: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {"hvps": [], "stock": []}
    with tempfile.TemporaryDirectory() as folder:
        sides = {side: _start(side, options, Path(folder)) for side in rates}
        try:
            for turn in range(options.turns + 1):
                for side, (chief, _) in sides.items():
                    chief.stdin.write("go\n")
                    chief.stdin.flush()
                    rate = float(_answer(chief))
                    print(f"turn {turn} {side:>6}: {rate:8.1f} steps/s", flush=True)
                    if turn:  # the first is for warming up
                        rates[side].append(rate)
        finally:
            for chief, others in sides.values():
                for process in (chief, *others):
                    process.kill()
                    process.wait()
    ratios = [a / b for a, b in zip(rates["hvps"], rates["stock"], strict=True)]
    print(
        f"{options.model}: hvps {statistics.median(rates['hvps']):.1f} steps/s,"
        f" ParameterServerStrategy {statistics.median(rates['stock']):.1f}; ratio"
        f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def _start(side: str, options: argparse.Namespace, folder: Path) -> Any:
    ports = [f"127.0.0.1:{port}" for port in free_ports(4)]
    cluster = {"ps": ports[:1], "worker": ports[1:3], "chief": ports[3:]}
    if side == "hvps":
        del cluster["chief"]
    env = {**os.environ, "CLUSTER": json.dumps(cluster), "TF_CPP_MIN_LOG_LEVEL": "3"}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    tasks = [(role, i) for role in cluster for i in range(len(cluster[role]))]
    lead = ("worker", 0) if side == "hvps" else ("chief", 0)
    processes = {}
    for role, index in tasks:
        command = [sys.executable, "-m", "benchmarks.ps_step_rate", "--model", options.model]
        command += ["--steps", str(options.steps), "--turns", str(options.turns)]
        command += ["--side", side, role, str(index)]
        processes[role, index] = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(folder / f"{side}-{role}-{index}.err", "w"),  # noqa: SIM115
            text=True,
        )
    chief = processes.pop(lead)
    return chief, list(processes.values())


def _answer(process: Any) -> str:
    for line in process.stdout:
        if line.startswith("rate "):
            return str(line.split()[1])
    raise SystemExit("a process of the benchmark ended")


# --- hvps ---


def run_hvps(role: str, index: int, options: argparse.Namespace) -> None:
    from hvps.overrides import load_config
    from hvps.runtime import configure_tensorflow, prepare_environment, reset_keras

    spec = json.loads(os.environ["CLUSTER"])
    tasks = Tasks(tuple(spec["ps"]), tuple(spec["worker"]))
    size, local = len(spec[role]), index + (len(spec["ps"]) if role == "worker" else 0)
    cluster = Cluster(index, size, local, 3, "benchmark", role=role, tasks=tasks)  # type: ignore[arg-type]
    overrides = [
        "backend.kind=ps",
        f"task={MODELS[options.model]}",
        f"train.steps={options.steps}",
        f"train.global_batch={BATCH}",
        "train.eval_every=0",
        "log.every=50",
        "log.progress=off",
        "log.tensorboard=false",
        "log.level=error",
    ]
    prepare_environment(cluster)
    devices = configure_tensorflow(load_config(None, overrides).config, cluster)

    from hvps.backends.ps.backend import PsBackend
    from hvps.backends.ps.member import Member
    from hvps.backends.ps.serve import serve
    from hvps.session import Session
    from hvps.signals import StopSignals
    from hvps.task import load_task

    member = Member.start(load_config(None, overrides).config, cluster)
    if role == "ps":
        serve(member)
        return
    assert member.control is not None
    for turn in range(options.turns + 1):
        if index == 0:
            sys.stdin.readline()
            member.control.publish(f"go/{turn}", True)
        member.control.lookup(f"go/{turn}")
        loaded = load_config(None, [*overrides, f"run.name=turn-{turn}"])
        reset_keras(loaded.config)
        backend = PsBackend(member, loaded.config, turn)
        session = Session.open(loaded, cluster, backend)
        with StopSignals() as signals:
            trainer = session.trainer(load_task(loaded.config), devices, signals)
            session.finish(trainer.model, trainer.fit())
        if index == 0:
            lines = (session.folder.path / "metrics.jsonl").read_text().splitlines()
            records = [r for r in map(json.loads, lines) if "learning_rate" in r]
            rate = statistics.median(r["examples_per_second"] for r in records[1:]) / BATCH
            print(f"rate {rate}", flush=True)


# --- TensorFlow's strategy ---


def run_stock(role: str, index: int, options: argparse.Namespace) -> None:
    import time

    spec = json.loads(os.environ["CLUSTER"])
    os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": role, "index": index}})
    import keras
    import tensorflow as tf

    from hvps.overrides import load_config
    from hvps.task import load_task

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    if role != "chief":
        server = tf.distribute.Server(
            tf.train.ClusterSpec(spec), job_name=role, task_index=index, protocol="grpc"
        )
        server.join()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    task = load_task(load_config(None, [f"task={MODELS[options.model]}"]).config)
    with strategy.scope():
        model = task.build_model()
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
    x, y = task.train_data()

    def dataset() -> Any:
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat().batch(BATCH)

    batches = iter(coordinator.create_per_worker_dataset(dataset))

    @tf.function
    def step(iterator: Any) -> Any:
        def replica(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(task.loss(y, model(x, training=True)))
            variables = model.trainable_variables
            gradients = tape.gradient(loss, [v.value for v in variables])
            optimizer.apply(gradients, variables)
            return loss

        return strategy.run(replica, next(iterator))

    for _ in range(20):
        coordinator.schedule(step, args=(batches,))
    coordinator.join()
    for _ in range(options.turns + 1):
        sys.stdin.readline()
        begun = time.perf_counter()
        for _ in range(options.steps):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
        print(f"rate {options.steps / (time.perf_counter() - begun)}", flush=True)


if __name__ == "__main__":
    main()
