"""Metrics that need all examples at once, exact on any number of ranks.

Most metrics are made of sums, which the ranks add up. An area under a curve, a median or a rank
correlation is not: Keras approximates the area by counts at thresholds. Here every example gives
a few numbers, and hvps brings those of all ranks together before anything is computed of them.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.errors import ConfigError


class ExampleMetric(keras.metrics.Metric):
    """What the evaluation of hvps computes from numbers of every example.

    A subclass says which numbers these are, and what comes of them all. They take eight bytes each,
    on every rank. It has no state of Keras's kind, so it is of no use in `model.compile`.
    """

    def per_example(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """The numbers of the examples in a batch, shape [rows, ...]; traced."""
        raise NotImplementedError

    def of_all(self, rows: np.ndarray) -> Any:
        """The result from the numbers of all examples, float64 [examples, ...], in any order.

        Returns:
            A number, a vector, or a dict of numbers.
        """
        raise NotImplementedError


class ExactAUC(ExampleMetric):
    """The area under the ROC curve, as scikit-learn's `roc_auc_score` has it.

    It is the probability that a positive example has a higher score than a negative one, ties
    counted half. Labels are 0 or 1; scores may be probabilities or logits. NaN if there are
    examples of one label only, or scores that are NaN.
    """

    def __init__(self, name: str = "auc") -> None:
        super().__init__(name=name)

    def per_example(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        for what, tensor in {"label": y_true, "score": y_pred}.items():
            shape = tf.TensorShape(getattr(tensor, "shape", None))
            if not isinstance(tensor, tf.Tensor) or shape[1:].num_elements() != 1:
                raise ConfigError(
                    f"task: the metric {self.name} needs one {what} per example",
                    rule="ExactAUC takes labels and scores of the shape [batch] or [batch, 1]",
                    received=f"{what}s of the shape {shape}",
                    do="give it a part of them, in a subclass with its own per_example()",
                )
        columns = [tf.reshape(tf.cast(tensor, tf.float64), [-1]) for tensor in (y_true, y_pred)]
        return tf.stack(columns, axis=1)

    def of_all(self, rows: np.ndarray) -> float:
        labels, scores = rows[:, 0], rows[:, 1]
        if not np.isin(labels, (0, 1)).all():
            raise ConfigError(
                f"task: the metric {self.name} is of two kinds of examples",
                rule="labels are 0 or 1",
                received=f"labels from {labels.min():g} to {labels.max():g}",
                do="give it such labels, in a subclass with its own per_example()",
            )
        if np.isnan(scores).any():
            return float("nan")
        different, place = np.unique(scores, return_inverse=True)
        positive = np.bincount(place[labels == 1], minlength=len(different)).astype(np.float64)
        negative = np.bincount(place[labels == 0], minlength=len(different)).astype(np.float64)
        pairs = positive.sum() * negative.sum()
        # Whole and half numbers: the sum is exact, and so the same in whatever order it is made.
        won = positive @ (np.cumsum(negative) - negative / 2)
        return float(won / pairs) if pairs else float("nan")
