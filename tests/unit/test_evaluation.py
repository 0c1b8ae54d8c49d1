"""Evaluation on one rank: what is refused, and what vectors are called."""

from __future__ import annotations

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
