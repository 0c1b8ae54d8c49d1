"""Evaluation over all ranks: every example once, metrics from summed state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends import Backend
from hvps.batches import Feed
from hvps.errors import ConfigError
from hvps.step import AnyBatch, forward, per_example_loss


class Evaluator:
    """Runs the model over this rank's part of the held-out data and adds the ranks' parts up.

    What is added up is the metrics' own state (sums and counts, confusion counts, …), never their
    results: a mean of means would weigh a smaller part too much, and no mean of AUCs is an AUC.

    Raises:
        ConfigError: two metrics share a name, or one's state does not begin at zero and so cannot
            be summed.
    """

    def __init__(
        self,
        *,
        model: keras.Model,
        loss: Callable[[Any, Any], Any],
        metrics: list[keras.metrics.Metric],
        feed: Feed,
        backend: Backend,
    ) -> None:
        self._model, self._loss, self._feed, self._backend = model, loss, feed, backend
        self._metrics = metrics
        self.names = ["loss", *(metric.name for metric in metrics)]
        taken = [name for name in ("kind", "step", "epoch", "time") if name in self.names]
        if taken or len(set(self.names)) != len(self.names):
            raise ConfigError(
                "task: metrics() gives a name that is taken",
                rule="names are unique; loss, kind, step, epoch and time are taken",
                received=", ".join(self.names[1:]),
                do="give each metric a name of its own",
            )
        self._loss_sum = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="eval_loss_sum")
        self._examples = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="eval_examples")
        self._step = AnyBatch(self._step_body)

    def _step_body(self, x: Any, y: Any) -> None:
        y_pred = forward(self._model, x, training=False)
        losses = per_example_loss(self._loss, y, y_pred)
        self._loss_sum.assign_add(tf.reduce_sum(tf.cast(losses, tf.float64)))
        self._examples.assign_add(tf.cast(tf.shape(losses)[0], tf.float64))
        for metric in self._metrics:
            metric.update_state(y, y_pred)

    def __call__(self) -> dict[str, float]:
        """Mean loss per example (without the model's penalties) and the metrics, by name."""
        state = self._reset()
        for batch in self._feed.eval_batches():
            self._step(batch.x, batch.y)
        sums = self._backend.reduce([np.asarray(variable) for variable in state])
        for variable, total in zip(state, sums, strict=True):
            variable.assign(total)
        results = {"loss": float(self._loss_sum / self._examples)}
        for metric in self._metrics:
            results.update(_as_floats(metric.name, metric.result()))
        return results

    def _reset(self) -> list[Any]:
        """Set everything to zero, and list what is to be summed, in the same order on all ranks."""
        self._loss_sum.assign(0.0)
        self._examples.assign(0.0)
        state: list[Any] = [self._loss_sum, self._examples]
        for metric in self._metrics:
            metric.reset_state()
            for variable in metric.variables:
                if np.any(np.asarray(variable)):
                    raise ConfigError(
                        f"task: the metric {metric.name} cannot be added up over ranks",
                        rule="a metric's state begins at zero and is a sum over examples",
                        received=f"{variable.path} begins at {np.asarray(variable)}",
                        do="use a metric whose state is made of sums, such as keras.metrics.Mean",
                    )
                state.append(variable)
        return state


def _as_floats(name: str, result: Any) -> dict[str, float]:
    """A scalar under the metric's name; a vector's or a dict's entries under `name/entry`."""
    if isinstance(result, dict):
        return {f"{name}/{key}": float(value) for key, value in result.items()}
    array = np.asarray(result)
    if array.ndim == 0:
        return {name: float(array)}
    return {f"{name}/{i}": float(value) for i, value in enumerate(array.reshape(-1))}
