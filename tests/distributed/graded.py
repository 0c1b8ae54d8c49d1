"""A task whose scores are known, so that its metrics can be computed another way."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.exact_metrics import ExactAUC

EXAMPLES, GRID, CLASSES, TOP = 1000, 128, 10, 3
ON_GRID, SCORE, LOGITS = 0, 1, slice(2, 2 + CLASSES)
LABEL, CLASS = 0, 1


def graded_examples() -> tuple[np.ndarray, np.ndarray]:
    """Scores float32 [1000, 12] and labels float32 [1000, 2] that depend on them, with noise.

    The scores are a probability on a grid, the middles of `GRID` equal parts of [0, 1], so that
    GRID + 1 equally spaced thresholds lie between all of them; one that is not on a grid, but has
    ties as well; and logits of ten classes. The labels are 0 or 1, and a class.
    """
    rng = np.random.default_rng(11)
    x = rng.normal(size=(EXAMPLES, 2 + CLASSES)).astype(np.float32)
    x[:, ON_GRID] = (rng.integers(0, GRID, EXAMPLES) + 0.5) / GRID
    # So near one another that no thresholds of Keras's lie between them.
    x[:, SCORE] = 0.5 + 1e-5 * np.round(x[:, SCORE] + 3 * x[:, ON_GRID], 2)
    y = np.zeros((EXAMPLES, 2), np.float32)
    y[:, LABEL] = rng.random(EXAMPLES) < 0.2 + 0.6 * x[:, ON_GRID]
    y[:, CLASS] = np.argmax(x[:, LOGITS] + 1.5 * rng.normal(size=(EXAMPLES, CLASSES)), axis=1)
    order = np.lexsort((x[:, SCORE], y[:, LABEL]))  # the ranks' parts differ very much
    return x[order], y[order]


class _Score(ExactAUC):
    def per_example(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        return super().per_example(y_true[:, LABEL], y_pred[:, SCORE])


def _of(metric: keras.metrics.Metric, label: int, scores: int | slice) -> keras.metrics.Metric:
    """A metric of these columns."""
    update = metric.update_state
    metric.update_state = lambda y, p: update(y[:, label : label + 1], _matrix(p[:, scores]))
    return metric


def _matrix(scores: Any) -> Any:
    return scores if len(scores.shape) == 2 else scores[:, None]


class Graded:
    """Gives each example the scores that are its input: the gradient is zero."""

    def build_model(self) -> keras.Model:
        inputs = keras.Input((2 + CLASSES,))
        layer = keras.layers.Dense(2 + CLASSES, use_bias=False, kernel_initializer="identity")
        return keras.Model(inputs, layer(inputs), name="graded")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        error = y_true[:, LABEL] - tf.stop_gradient(y_pred[:, ON_GRID])
        return tf.square(error) + 0.0 * y_pred[:, ON_GRID]

    def metrics(self) -> list[keras.metrics.Metric]:
        named = keras.metrics
        counts = {
            "tp": named.TruePositives,
            "fp": named.FalsePositives,
            "tn": named.TrueNegatives,
            "fn": named.FalseNegatives,
        }
        top = named.SparseTopKCategoricalAccuracy(TOP, name="top")
        return [
            _of(named.AUC(name="auc", num_thresholds=GRID + 1), LABEL, ON_GRID),
            _Score("exact_auc"),
            _of(named.BinaryAccuracy(name="accuracy"), LABEL, ON_GRID),
            *(_of(metric(name=name), LABEL, ON_GRID) for name, metric in counts.items()),
            _of(named.F1Score(name="f1", threshold=0.5), LABEL, ON_GRID),
            _of(top, CLASS, LOGITS),
            _of(named.SparseCategoricalAccuracy(name="class_accuracy"), CLASS, LOGITS),
        ]

    def train_data(self) -> Any:
        return graded_examples()

    def eval_data(self) -> Any:
        return graded_examples()
