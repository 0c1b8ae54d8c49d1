"""Handwritten digits: real data that scikit-learn ships, no download.

1,797 images of 8 × 8 pixels (E. Alpaydin and C. Kaynak, UCI "Optical Recognition of Handwritten
Digits"), of which every fifth is held out.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import keras
import numpy as np


class Digits:
    """A small convolutional network on the digits.

    Args:
        dropout: rate before the last layer.
        batch_norm: put BatchNormalization after the convolutions.
        width: channels of the first convolution.
    """

    def __init__(self, dropout: float = 0.25, batch_norm: bool = False, width: int = 32) -> None:
        self.dropout, self.batch_norm, self.width = dropout, batch_norm, width

    def build_model(self) -> keras.Model:
        inputs = keras.Input((8, 8, 1))
        x = inputs
        for channels in (self.width, 2 * self.width):
            x = keras.layers.Conv2D(channels, 3, padding="same")(x)
            if self.batch_norm:
                x = keras.layers.BatchNormalization()(x)
            x = keras.layers.ReLU()(x)
            x = keras.layers.MaxPooling2D()(x)
        x = keras.layers.Flatten()(x)
        x = keras.layers.Dense(64, activation="relu")(x)
        if self.dropout:
            x = keras.layers.Dropout(self.dropout)(x)
        return keras.Model(inputs, keras.layers.Dense(10)(x), name="digits")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    def metrics(self) -> list[keras.metrics.Metric]:
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]

    def train_data(self) -> tuple[np.ndarray, np.ndarray]:
        return _digits(held_out=False)

    def eval_data(self) -> tuple[np.ndarray, np.ndarray]:
        return _digits(held_out=True)


def _digits(held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [n, 8, 8, 1] in [0, 1] and labels int32 [n]."""
    # The file is read where it lies: importing scikit-learn would cost every rank seconds.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the digits are a file of scikit-learn, which is not installed")
    table = np.loadtxt(
        Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"),
        dtype=np.float32,
        delimiter=",",
    )
    images, labels = table[:, :-1].reshape(-1, 8, 8, 1) / 16.0, table[:, -1].astype(np.int32)
    chosen = (np.arange(len(images)) % 5 == 4) == held_out
    return images[chosen], labels[chosen]
