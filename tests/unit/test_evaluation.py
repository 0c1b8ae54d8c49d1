"""Evaluation on one rank: what is refused, and what vectors are called."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvps.backends.local import LocalBackend
from hvps.cluster import Cluster
from hvps.data import make_feed
from hvps.errors import ConfigError
from hvps.evaluation import Evaluator
from hvps.exact_metrics import ExactAUC, ExampleMetric


def squared(y: Any, y_pred: Any) -> Any:
    return tf.square(y - y_pred)


def evaluator(metrics: list[Any], loss: Any = squared) -> Evaluator:
    inputs = keras.Input((2,))
    layer = keras.layers.Dense(2, use_bias=False, kernel_initializer="identity")
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    return Evaluator(
        model=keras.Model(inputs, layer(inputs)),
        loss=loss,
        metrics=metrics,
        feed=make_feed((x, x + 1), what="eval_data", global_batch=2, ranks=1, rank=0),
        backend=LocalBackend(Cluster(0, 1, 0, 1, "test"), accumulate=1),
    )


class PerColumn(keras.metrics.Metric):
    """Mean of the labels in each of two columns."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.total = self.add_weight(name="total", shape=(2,), initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(y_true, axis=0))
        self.rows.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self) -> Any:
        return self.total / self.rows


def test_the_entries_of_a_vector_are_numbered() -> None:
    found = evaluator([PerColumn("mean"), keras.metrics.MeanSquaredError(name="mse")])
    assert found.names == ["loss", "mean", "mse"]
    for _ in range(2):  # the second one begins at zero again
        assert found() == {"loss": 1.0, "mean/0": 5.0, "mean/1": 6.0, "mse": 1.0}


@pytest.mark.parametrize("name", ["kind", "step", "epoch", "time", "loss"])
def test_names_of_the_records_own_fields_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^task: metrics\(\)") as caught:
        evaluator([keras.metrics.MeanSquaredError(name=name)])
    assert caught.value.received == name
    assert name in str(caught.value.rule)
    assert caught.value.do


def test_two_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a name that is taken"):
        evaluator([PerColumn("mine"), keras.metrics.MeanSquaredError(name="mine")])


def test_a_scalar_loss_is_explained() -> None:
    found = evaluator([], loss=lambda y, p: tf.reduce_mean(squared(y, p)))
    with pytest.raises(ConfigError, match=r"^task: loss\(\) returned a single number"):
        found()


class Meeting:
    """Where ranks that are threads add up what they have."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._given: dict[int, Sequence[np.ndarray]] = {}

    def reduce(self, rank: int, sums: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._given[rank] = sums
        self._barrier.wait()
        total = [sum(parts) for parts in zip(*self._given.values(), strict=True)]
        self._barrier.wait()
        return [np.asarray(part) for part in total]


class Rank(LocalBackend):
    def __init__(self, rank: int, ranks: int, meeting: Meeting) -> None:
        super().__init__(Cluster(rank, ranks, rank, ranks, "test"), accumulate=1)
        self._meeting = meeting

    def reduce(self, sums: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._meeting.reduce(self.cluster.rank, sums)


class Median(ExampleMetric):
    """Of the scores, and the largest one."""

    def per_example(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred[:, 0]

    def of_all(self, rows: np.ndarray) -> dict[str, float]:
        assert rows.ndim == 1
        return {"middle": float(np.median(rows)), "largest": float(rows.max())}


def made_when_used() -> list[Any]:
    """Keras makes the state of these when they see the first examples."""
    return [
        keras.metrics.F1Score(name="f1", threshold=0.5),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.AUC(name="areas", multi_label=True, num_thresholds=33),
    ]


def over_ranks(ranks: int, examples: int) -> list[dict[str, float]]:
    """What each of so many ranks says at the end, twice; the second time is that of the first."""
    rng = np.random.default_rng(0)
    x = rng.random((examples, 1)).astype(np.float32)
    y = (x + 0.5 * rng.normal(size=x.shape) > 0.5).astype(np.float32)
    meeting = Meeting(ranks)

    def evaluate(rank: int) -> dict[str, float]:
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        found = Evaluator(
            model=keras.Model(inputs, layer(inputs)),
            loss=lambda y, p: squared(y, p)[:, 0],
            metrics=[*made_when_used(), ExactAUC("exact"), Median(name="score")],
            feed=make_feed((x, y), what="eval_data", global_batch=4, ranks=ranks, rank=rank),
            backend=Rank(rank, ranks, meeting),
        )
        first = found()
        assert found() == first
        return first

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(evaluate, range(ranks)))


@pytest.mark.timeout(120)
def test_state_that_is_made_late_is_summed_from_the_first_time_on() -> None:
    (alone,) = over_ranks(1, 23)
    each = over_ranks(3, 23)
    assert each[0] == each[1] == each[2]
    assert each[0] == pytest.approx(alone, abs=1e-6)
    for name in ("exact", "score/middle", "score/largest"):
        assert each[0][name] == alone[name]
    assert 0.5 < alone["exact"] < 1.0


@pytest.mark.timeout(120)
def test_a_rank_without_examples_takes_part() -> None:
    (alone,) = over_ranks(1, 2)
    each = over_ranks(3, 2)
    assert each[0] == each[1] == each[2] == pytest.approx(alone, abs=1e-6, nan_ok=True)


def test_no_examples_are_explained() -> None:
    found = evaluator([])
    empty = tf.data.Dataset.from_tensor_slices((np.zeros((4, 2)), np.zeros((4, 2))))
    nothing = empty.filter(lambda x, _y: x[0] > 0)
    found._feed = make_feed(nothing, what="eval_data", global_batch=2, ranks=1, rank=0)
    with pytest.raises(ConfigError, match=r"^task: eval_data\(\) gives no examples"):
        found()
