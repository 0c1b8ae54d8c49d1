"""Clipping by norms of gradients that lie in parts, as Keras clips whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Gradient = Any  # a tensor or tf.IndexedSlices with each row once


class Clipper:
    """Scales for the parts of all variables.

    Args:
        clipnorm: largest norm of one variable's gradient, or None.
        global_clipnorm: largest norm of all of them together, or None.
    """

    def __init__(self, clipnorm: float | None, global_clipnorm: float | None) -> None:
        self._clipnorm, self._global_clipnorm = clipnorm, global_clipnorm

    @property
    def active(self) -> bool:
        return self._clipnorm is not None or self._global_clipnorm is not None

    def scales(self, squares: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """A factor for each variable's gradient.

        The formulas are Keras's, `clip_by_norm` and `clip_by_global_norm`.

        Args:
            squares: for each variable, the sums of squares of its gradient's parts.
        """
        sums = [part[0] if len(part) == 1 else tf.add_n(list(part)) for part in squares]
        if self._global_clipnorm is not None:
            limit = tf.constant(self._global_clipnorm, tf.float32)
            norm = tf.sqrt(tf.reduce_sum(tf.stack([tf.cast(s, tf.float32) for s in sums])))
            scale = limit * tf.minimum(1.0 / norm, 1.0 / limit)
            return [scale + (norm - norm)] * len(sums)  # what is not finite stays so
        assert self._clipnorm is not None
        return [
            tf.cast(self._clipnorm / tf.maximum(tf.sqrt(s), self._clipnorm), tf.float32)
            for s in sums
        ]


def sum_of_squares(gradient: Gradient) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(values))


def scaled(gradient: Gradient, scale: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(scale, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(scale, gradient.dtype)
