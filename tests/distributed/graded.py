"""A task whose scores are known, and lie so that Keras's AUC is exact."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

GRID = 128


def graded_examples() -> tuple[np.ndarray, np.ndarray]:
    """1,000 scores, float32 [1000, 1], and labels that depend on them, with noise.

    The scores are the middles of `GRID` equal parts of [0, 1], so that GRID + 1 equally spaced
    thresholds lie between all of them; many examples share one.
    """
    rng = np.random.default_rng(11)
    x = (rng.integers(0, GRID, (1000, 1)) + 0.5).astype(np.float32) / GRID
    y = (rng.random(1000) < 0.2 + 0.6 * x[:, 0]).astype(np.float32)
    order = np.argsort(y + 0.3 * x[:, 0], kind="stable")  # the ranks' parts differ very much
    return x[order], y[order]


class Graded:
    """Gives each example the score that is its input: the gradient is zero."""

    def build_model(self) -> keras.Model:
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Model(inputs, layer(inputs), name="graded")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return tf.square(y_true - tf.stop_gradient(y_pred[:, 0])) + 0.0 * y_pred[:, 0]

    def metrics(self) -> list[keras.metrics.Metric]:
        return [
            keras.metrics.AUC(name="auc", num_thresholds=GRID + 1),
            keras.metrics.BinaryAccuracy(name="accuracy"),
        ]

    def train_data(self) -> Any:
        return graded_examples()

    def eval_data(self) -> Any:
        return graded_examples()
