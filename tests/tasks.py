"""Tasks that the tests train."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def this_rank() -> int:
    return int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


class Regression:
    """A small network on random numbers; every variable gets a gradient.

    Args:
        examples: number of training examples.
        by_rank: give each rank data and initial weights of its own, so that only broadcast and
            reduction keep the ranks together.
        spike: index of an example whose gradient is infinite, -1 for none.
        fail_at: index of an example whose fetching raises, on rank 1; -1 for none.
    """

    def __init__(
        self, examples: int = 200, by_rank: bool = False, spike: int = -1, fail_at: int = -1
    ) -> None:
        self.examples, self.by_rank, self.spike, self.fail_at = examples, by_rank, spike, fail_at

    def build_model(self) -> keras.Model:
        if self.by_rank:  # and other initial weights, which only a broadcast makes equal
            keras.utils.set_random_seed(this_rank())
        inputs = keras.Input((6,))
        x = keras.layers.Dense(16, activation="tanh")(inputs)
        x = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(x)
        return keras.Model(inputs, keras.layers.Dense(1)(x), name="regression")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        marked = y_true > 100.0
        return tf.square(tf.where(marked, 0.0, y_true) - _exploding(y_pred[:, 0], marked))

    def metrics(self) -> list[keras.metrics.Metric]:
        return []

    def train_data(self) -> Any:
        rng = np.random.default_rng(this_rank() if self.by_rank else 0)
        x = rng.normal(size=(self.examples, 6)).astype(np.float32)
        y = np.sin(x.sum(axis=1)).astype(np.float32)
        if self.spike >= 0:
            y[self.spike] = 1000.0
        if self.fail_at >= 0:
            return _Failing(x, y, self.fail_at)
        return x, y

    def eval_data(self) -> Any:
        return None


@tf.custom_gradient
def _exploding(values: tf.Tensor, marked: tf.Tensor) -> Any:
    """The values as they are, with an infinite gradient where they are marked."""
    return values, lambda upstream: (tf.where(marked, np.inf, upstream), None)


class _Failing:
    def __init__(self, x: np.ndarray, y: np.ndarray, fail_at: int) -> None:
        self._x, self._y, self._fail_at = x, y, fail_at

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        if i == self._fail_at:
            raise OSError(f"example {i} cannot be read")
        return self._x[i], self._y[i]


class Tokens:
    """An embedding whose gradient is sparse.

    Args:
        vocabulary: rows of the embedding; few of them make the dense way the cheaper one.
    """

    def __init__(self, vocabulary: int = 5000) -> None:
        self.vocabulary = vocabulary

    def build_model(self) -> keras.Model:
        inputs = keras.Input((12,), dtype="int32")
        x = keras.layers.Embedding(self.vocabulary, 16)(inputs)
        x = keras.layers.GlobalAveragePooling1D()(x)
        return keras.Model(inputs, keras.layers.Dense(3)(x), name="tokens")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    def metrics(self) -> list[keras.metrics.Metric]:
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]

    def train_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.integers(0, self.vocabulary, (200, 12)).astype(np.int32)
        return x, (x.sum(axis=1) % 3).astype(np.int32)

    def eval_data(self) -> Any:
        x, y = self.train_data()
        return x[:50], y[:50]


class Counting:
    """Counts how often each example is used: example i moves weight i alone, by 1 / step size.

    With SGD at rate 1 weight i ends at minus the sum, over its uses, of one over the number of
    examples in that update.

    Args:
        examples: number of training examples.
        kind: what the data is given as: "arrays", "indexable", "dataset", or "stream", a dataset
            that does not know its length.
    """

    def __init__(self, examples: int = 37, kind: str = "arrays") -> None:
        self.examples, self.kind = examples, kind

    def build_model(self) -> keras.Model:
        inputs = keras.Input((self.examples,))
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="count")
        return keras.Model(inputs, layer(inputs), name="counting")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred[:, 0]

    def metrics(self) -> list[keras.metrics.Metric]:
        return []

    def train_data(self) -> Any:
        x = np.eye(self.examples, dtype=np.float32)
        y = np.zeros(self.examples, np.float32)
        if self.kind == "arrays":
            return x, y
        if self.kind == "indexable":
            return _Failing(x, y, -1)
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        if self.kind == "stream":
            return dataset.filter(lambda _x, _y: True)
        return dataset

    def eval_data(self) -> Any:
        return None


class Scored:
    """A fixed scorer for evaluation: 101 held-out examples, AUC and accuracy."""

    def build_model(self) -> keras.Model:
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")
        return keras.Model(inputs, layer(inputs), name="scored")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return keras.losses.binary_crossentropy(y_true[:, None], y_pred)

    def metrics(self) -> list[keras.metrics.Metric]:
        return [
            keras.metrics.AUC(name="auc", num_thresholds=1000),
            keras.metrics.BinaryAccuracy(name="accuracy"),
        ]

    def train_data(self) -> Any:
        return scored_examples()

    def eval_data(self) -> Any:
        return scored_examples()


def scored_examples() -> tuple[np.ndarray, np.ndarray]:
    """Scores float32 [101, 1] and labels float32 [101] that depend on them, with noise."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(101, 1)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=101) > 0.3).astype(np.float32)
    return x, y


class Constant:
    """A loss whose gradient is the same whatever the weights are, so that every order of updates
    ends at the same weights.

    Args:
        size: number of weights; from 2 MiB on they are split over parameter servers.
    """

    def __init__(self, size: int = 1000) -> None:
        self.size = size

    def build_model(self) -> keras.Model:
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(self.size, use_bias=False, kernel_initializer="zeros")
        kept = keras.layers.Reshape((self.size,))(layer(inputs))
        return keras.Model(inputs, kept, name="constant")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return -tf.reduce_sum(y_pred, axis=1)

    def metrics(self) -> list[keras.metrics.Metric]:
        return []

    def train_data(self) -> Any:
        return np.ones((64, 1), np.float32), np.zeros(64, np.float32)

    def eval_data(self) -> Any:
        return None


class Watched:
    """BatchNormalization and dropout whose masks can be seen: with the mask's sum as the loss, and
    the recorded loss of each step, two equal masks in a row would show.
    """

    def build_model(self) -> keras.Model:
        inputs = keras.Input((8,))
        x = keras.layers.BatchNormalization()(inputs)
        x = keras.layers.Dense(4)(x)
        dropped = keras.layers.Dropout(0.5)(keras.layers.Lambda(_ones)(inputs))
        return keras.Model(inputs, [x, dropped], name="watched")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        weights = tf.range(1.0, 257.0)
        return tf.reduce_mean(tf.square(y_pred[0]), axis=1) * 1e-6 + tf.reduce_sum(
            y_pred[1] * weights, axis=1
        )

    def metrics(self) -> list[keras.metrics.Metric]:
        return []

    def train_data(self) -> Any:
        rng = np.random.default_rng(0)
        return rng.normal(3.0, 2.0, (64, 8)).astype(np.float32), np.zeros(64, np.float32)

    def eval_data(self) -> Any:
        return None


def _ones(x: Any) -> Any:
    return tf.ones([tf.shape(x)[0], 256])


class Paced:
    """Counting's data, each batch fetched after a pause of HVPS_TEST_PAUSE seconds, so that one
    task can be slower than others."""

    def __init__(self, examples: int = 64) -> None:
        self.examples = examples

    def build_model(self) -> keras.Model:
        return Counting(self.examples).build_model()

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred[:, 0]

    def metrics(self) -> list[keras.metrics.Metric]:
        return []

    def train_data(self) -> Any:
        return _Paced(self.examples)

    def eval_data(self) -> Any:
        return None


class _Paced:
    def __init__(self, examples: int) -> None:
        self._x = np.eye(examples, dtype=np.float32)
        self._pause = float(os.environ.get("HVPS_TEST_PAUSE", "0"))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self._pause)
        return self._x[i], np.float32(0)


class Staged(Regression):
    """Regression's examples at a pace of HVPS_TEST_PAUSE seconds each, so that there is time to do
    something to a task, until the current folder has a file "go".

    A process that has fetched 40 examples leaves a file "fetched.PID". With HVPS_TEST_FAIL_AT the
    example of that number, counted in this process, cannot be read; with HVPS_TEST_SAVE the model
    takes so many seconds to save.
    """

    def build_model(self) -> keras.Model:
        model = super().build_model()
        save, seconds = model.save, float(os.environ.get("HVPS_TEST_SAVE", "0"))

        def save_slowly(path: Any) -> None:
            time.sleep(seconds)
            save(path)

        object.__setattr__(model, "save", save_slowly)
        return model

    def train_data(self) -> Any:
        return _Staged(*super().train_data())


class _Staged:
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self._x, self._y, self._count = x, y, 0
        self._pause = float(os.environ.get("HVPS_TEST_PAUSE", "0"))
        self._fail_at = int(os.environ.get("HVPS_TEST_FAIL_AT", "-1"))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        self._count += 1
        if self._count == self._fail_at:
            raise OSError(f"example {i} cannot be read")
        if self._count == 40:
            Path(f"fetched.{os.getpid()}").touch()
        if not os.path.exists("go"):
            time.sleep(self._pause)
        return self._x[i], self._y[i]


class Resumable:
    """Regression's data for a network with all that a resumed run must find again.

    The examples are fetched one by one, and the one that is fetched as number HVPS_TEST_SIGNAL_AT
    in the process of rank HVPS_TEST_SIGNAL_RANK sends that process SIGTERM first, once per folder.
    Each takes HVPS_TEST_PAUSE seconds.

    Args:
        plain: without BatchNormalization and dropout, whose results depend on the number of ranks.
        width: of the hidden layer.
    """

    def __init__(self, examples: int = 200, plain: bool = False, width: int = 16) -> None:
        self.examples, self.plain, self.width = examples, plain, width

    def build_model(self) -> keras.Model:
        inputs = keras.Input((6,))
        x = keras.layers.Dense(self.width, activation="tanh")(inputs)
        if not self.plain:
            x = keras.layers.BatchNormalization()(x)
            x = keras.layers.Dropout(0.3)(x)
        return keras.Model(inputs, keras.layers.Dense(1)(x), name="resumable")

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        return tf.square(y_true - y_pred[:, 0])

    def metrics(self) -> list[keras.metrics.Metric]:
        return [keras.metrics.MeanAbsoluteError(name="mae")]

    def train_data(self) -> Any:
        return _Signalling(*Regression(self.examples).train_data())

    def eval_data(self) -> Any:
        x, y = Regression(self.examples).train_data()
        return x[:50], y[:50]


class _Signalling:
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self._x, self._y, self._count = x, y, 0
        self._at = int(os.environ.get("HVPS_TEST_SIGNAL_AT", "-1"))
        self._pause = float(os.environ.get("HVPS_TEST_PAUSE", "0"))
        if this_rank() != int(os.environ.get("HVPS_TEST_SIGNAL_RANK", "0")):
            self._at = -1

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        self._count += 1
        if self._count == self._at and not os.path.exists("signalled"):
            Path("signalled").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._pause)
        return self._x[i], self._y[i]
