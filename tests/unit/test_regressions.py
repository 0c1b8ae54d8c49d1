"""Faults that were found once, each with the test that would have caught it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvps import data
from hvps.backends.local import LocalBackend, by_path
from hvps.callbacks import EarlyStopping
from hvps.cluster import detect_cluster
from hvps.config import EarlyStopConfig
from hvps.data import Feed, make_feed
from hvps.errors import ConfigError
from hvps.evaluation import Evaluator
from hvps.metrics import Csv, JsonLines
from hvps.run_directory import create_run_directory
from hvps.sampling import permuted
from hvps.step import AnyBatch, loss_and_gradients, per_example_loss


def test_an_error_for_the_user_leaves_the_traced_step_as_it_is() -> None:
    step = AnyBatch(lambda x: per_example_loss(lambda _y, p: tf.reduce_mean(p), x, x))
    with pytest.raises(ConfigError, match="single number"):
        step(tf.ones([4]))


def test_csv_takes_columns_that_come_up_later(tmp_path: Path) -> None:
    writer = Csv(tmp_path / "m.csv", ["loss"])
    writer.write("train", 1, 0, {"loss": 0.5})
    writer.write("eval", 2, 0, {"loss": 0.4, "f1/0": 0.1, "f1/1": 0.2})
    writer.write("train", 3, 0, {"loss": 0.3})
    writer.close()
    with open(tmp_path / "m.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows] == ["0.5", "0.4", "0.3"]
    assert [row["f1/1"] for row in rows] == ["", "0.2", ""]


def test_json_lines_are_json_whatever_the_numbers_are(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "m.jsonl")
    writer.write("train", 1, 0, {"loss": float("nan"), "norm": float("inf")})
    writer.close()

    def refused(name: str) -> Any:
        raise AssertionError(name)

    record = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refused)
    assert (record["loss"], record["norm"]) == ("nan", "inf")


class _Penalised(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(tf.zeros([5]))
        return x


def _gradients(model: keras.Model) -> list[np.ndarray]:
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    x = tf.ones([2, 3])
    found, _ = loss_and_gradients(
        model=model,
        optimizer=optimizer,
        loss=lambda _y, p: p[:, 0],
        x=x,
        y=x,
        weight=tf.ones([2]),
        examples=tf.constant(2.0),
        shares=1,
    )
    return [np.asarray(g) for g in found]


def test_a_penalty_of_several_numbers_counts_once() -> None:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(_Penalised()(inputs)))
    kernel, bias = _gradients(model)
    np.testing.assert_allclose(kernel, np.ones((3, 1)))
    np.testing.assert_allclose(bias, [1.0])


def test_penalties_of_different_precision_are_added() -> None:
    inputs = keras.Input((3,))
    layer = keras.layers.Dense(
        1, kernel_regularizer="l2", activity_regularizer="l2", dtype="mixed_float16"
    )
    assert all(np.isfinite(g).all() for g in _gradients(keras.Model(inputs, layer(inputs))))


class _Twins(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = keras.layers.Dense(2, name="d"), keras.layers.Dense(2, name="d")

    def call(self, x: Any) -> Any:
        return self.a(x) + self.b(x)


def test_state_holds_every_variable_and_a_refusal_changes_none() -> None:
    model = _Twins()
    model(np.ones((1, 3), np.float32))
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    backend = LocalBackend(detect_cluster({}), accumulate=1)
    backend.setup(model=model, optimizer=optimizer, loss=lambda y, p: p, identity={})
    assert len(by_path(model.variables)) == len(model.variables) == 4
    state = backend.state()
    assert len(state) == len(model.variables) + len(optimizer.variables)
    before = model.get_weights()
    wrong = {name: array + 1 for name, array in state.items()}
    wrong[list(wrong)[-1]] = np.zeros((7, 7), np.float32)
    with pytest.raises(ValueError, match="shape"):
        backend.load_state(wrong)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    backend.load_state({name: array + 1 for name, array in state.items()})
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a + 1, b)


def _feed(given: Any, **keywords: Any) -> Feed:
    settings: dict[str, Any] = {"what": "train_data", "global_batch": 4, "ranks": 1, "rank": 0}
    return make_feed(given, **{**settings, **keywords})


def test_a_dataset_with_nothing_in_it_ends() -> None:
    empty = tf.data.Dataset.from_tensor_slices((np.ones(3), np.ones(3))).filter(
        lambda *_: tf.constant(False)
    )
    assert list(_feed(empty).epoch(0)) == []


def test_every_kind_of_data_becomes_float32() -> None:
    x, y = np.ones((5, 2)), np.ones(5)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    for given in ((x, y), (x.tolist(), y.tolist()), dataset):
        batch = next(iter(_feed(given).epoch(0)))
        assert batch.micros[0].x.dtype == batch.micros[0].y.dtype == tf.float32
        assert batch.micros[0].x.shape == (4, 2)


@pytest.mark.parametrize(("accumulate", "first_step"), [(1, 0), (2, 0), (2, 70)])
def test_blocks_and_the_prefetching_thread_give_the_same_batches(
    monkeypatch: pytest.MonkeyPatch, accumulate: int, first_step: int
) -> None:
    x = np.arange(2 * 333, dtype=np.float32).reshape(333, 2)

    def batches() -> list[list[np.ndarray]]:
        feed = _feed((x, {"a": x[:, 0]}), accumulate=accumulate, ranks=2, rank=1)
        return [
            [np.asarray(t) for m in batch.micros for t in tf.nest.flatten((m.x, m.y, m.weight))]
            for batch in feed.epoch(3, first_step)
        ]

    at_once = batches()
    monkeypatch.setattr(data, "_INLINE_BYTES", 0)
    threaded = batches()
    assert len(at_once) == len(threaded) == 84 - first_step  # more than a block of 64 steps
    for a, b in zip(at_once, threaded, strict=True):
        for left, right in zip(a, b, strict=True):
            np.testing.assert_array_equal(left, right)


def test_a_run_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir"):
        create_run_directory(str(tmp_path / "file"), None, "x")
    (tmp_path / "runs" / "latest" / "inside").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run\.dir"):
        create_run_directory(str(tmp_path / "runs"), None, "x")
    assert not list((tmp_path / "runs").glob(".latest*"))


def test_neighbouring_seeds_and_epochs_share_nothing() -> None:
    # Once, the round keys of seed s + 1 were those of seed s, shifted by one round.
    def halves(seed: int, epoch: int, *, high: bool) -> list[Counter[int]]:
        order = permuted(np.arange(1024), 1024, seed, epoch)
        groups: list[Counter[int]] = [Counter() for _ in range(32)]
        for position, sample in enumerate(order.tolist()):
            groups[position // 32 if high else position % 32][
                sample // 32 if high else sample % 32
            ] += 1
        return groups

    for second in ((1, 0), (0, 1)):
        same = [a == b for a, b in zip(halves(0, 0, high=False), halves(*second, high=True))]  # noqa: B905
        assert sum(same) < 8


@pytest.mark.parametrize(("tasks", "node", "local_size"), [("2,4", 1, 4), ("4(x2),3", 2, 3)])
def test_slurm_under_another_process_manager(tasks: str, node: int, local_size: int) -> None:
    cluster = detect_cluster(
        {
            "PMI_RANK": "5",
            "PMI_SIZE": "12",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_TASKS_PER_NODE": tasks,
            "SLURM_NODEID": str(node),
        }
    )
    assert (cluster.local_rank, cluster.local_size) == (1, local_size)


@pytest.mark.parametrize(
    ("monitor", "larger_is_better"),
    [("precision_loss", False), ("previous_error", False), ("val_auc", True), ("f1/0", True)],
)
def test_the_direction_of_a_metric_is_read_by_words(monitor: str, larger_is_better: bool) -> None:
    config = EarlyStopConfig(monitor=monitor, patience=1)
    stop = EarlyStopping(config, [monitor.split("/")[0]])
    assert not stop({monitor: 0.5})
    assert stop({monitor: 0.6}) is not larger_is_better


@pytest.mark.parametrize("names", [["step"], ["a", "a"], ["loss"]])
def test_metrics_that_would_hide_one_another_are_refused(names: list[str]) -> None:
    model: Any = None
    with pytest.raises(ConfigError, match="of one name"):
        Evaluator(
            model=model,
            loss=lambda y, p: p,
            metrics=[keras.metrics.Mean(name=name) for name in names],
            feed=model,
            backend=model,
        )


WAITS = """
import sys, threading
from hvps.backends.watchdog import Watchdog
dog = Watchdog(1.0, rank=7)
with dog.waiting("nothing"):
    pass
for seconds in (1.5, 0.1, 0.1):  # the first one may take longer: it is traced
    with dog.step():
        threading.Event().wait(seconds)
with dog.waiting("the others"):
    threading.Event().wait(60)
"""


def test_a_wait_that_is_too_long_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "rank 7 waited 1 s for the others" in done.stderr
