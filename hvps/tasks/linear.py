"""A line to be found again: the smallest training there is, with a known answer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


class Linear:
    """`y = weight x + bias` on random x in [0, 1), without noise: both can be found exactly.

    Args:
        weight, bias: what training has to find.
        examples: number of training examples, and of held-out ones.
    """

    def __init__(self, weight: float = 0.1, bias: float = 0.3, examples: int = 100) -> None:
        self.weight, self.bias, self.examples = weight, bias, examples

    def build_model(self) -> keras.Model:
        inputs = keras.Input((1,))
        return keras.Model(inputs, keras.layers.Dense(1)(inputs), name="linear")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return keras.losses.mean_squared_error(y_true, y_pred)

    def metrics(self) -> list[keras.metrics.Metric]:
        return [keras.metrics.MeanAbsoluteError(name="mae")]

    def train_data(self) -> tuple[np.ndarray, np.ndarray]:
        return self._points(seed=0)

    def eval_data(self) -> tuple[np.ndarray, np.ndarray]:
        return self._points(seed=1)

    def _points(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """x and y, both float32 [examples, 1]."""
        x = np.random.default_rng(seed).random((self.examples, 1), dtype=np.float32)
        return x, np.float32(self.weight) * x + np.float32(self.bias)
