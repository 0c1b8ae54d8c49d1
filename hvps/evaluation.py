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
from hvps.exact_metrics import ExampleMetric
from hvps.step import AnyBatch, forward, per_example_loss


class Evaluator:
    """Runs the model over this rank's part of the held-out data and adds the ranks' parts up.

    What is added up is the metrics' own state (sums and counts, confusion counts, …), never their
    results: a mean of means would weigh a smaller part too much, and no mean of AUCs is an AUC.
    Of an `ExampleMetric` the numbers of all examples are brought together.

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
        self._metrics = [m for m in metrics if not isinstance(m, ExampleMetric)]
        self._of_all = [m for m in metrics if isinstance(m, ExampleMetric)]
        self._no_rows: list[np.ndarray] | None = None
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

    def _step_body(self, x: Any, y: Any) -> list[tf.Tensor]:
        y_pred = forward(self._model, x, training=False)
        losses = per_example_loss(self._loss, y, y_pred)
        self._loss_sum.assign_add(tf.reduce_sum(tf.cast(losses, tf.float64)))
        self._examples.assign_add(tf.cast(tf.shape(losses)[0], tf.float64))
        for metric in self._metrics:
            metric.update_state(y, y_pred)
        return [tf.cast(m.per_example(y, y_pred), tf.float64) for m in self._of_all]

    def __call__(self) -> dict[str, float]:
        """Mean loss per example (without the model's penalties) and the metrics, by name."""
        if self._no_rows is None:
            self._no_rows = self._build()
        state = self._reset()
        rows = [[none] for none in self._no_rows]
        for batch in self._feed.eval_batches():
            for own, given in zip(rows, self._step(batch.x, batch.y), strict=True):
                own.append(np.asarray(given))
        sums = self._backend.reduce([np.asarray(variable) for variable in state])
        for variable, total in zip(state, sums, strict=True):
            variable.assign(total)
        results = {"loss": float(self._loss_sum / self._examples)}
        for metric in self._metrics:
            results.update(_as_floats(metric.name, metric.result()))
        for metric, own in zip(self._of_all, rows, strict=True):
            results.update(_as_floats(metric.name, metric.of_all(self._gather(own))))
        return results

    def _build(self) -> list[np.ndarray]:
        """Show one example to the metrics: some make their state only then, and a rank may get no
        other one. Gives the rows of no example for each `ExampleMetric`."""
        try:
            x, y = self._feed.example()
        except StopIteration:
            raise ConfigError(
                "task: eval_data() gives no examples",
                rule="at least one held-out example, or None instead of the data",
                received="an empty dataset",
                do="mend eval_data()",
            ) from None
        y_pred = forward(self._model, x, training=False)
        for metric in self._metrics:
            metric.update_state(y, y_pred)
        shapes = [m.per_example(y, y_pred).shape for m in self._of_all]
        return [np.zeros((0, *shape[1:])) for shape in shapes]

    def _gather(self, parts: list[np.ndarray]) -> np.ndarray:
        """The rows of all ranks: each puts its own into zeros, at its place, and these are added
        up. That is exact, and needs nothing of a backend but its sum."""
        share = self._backend.eval_share
        assert share is not None, "only who has a share of the examples evaluates"
        own, (rank, ranks) = np.concatenate(parts), share
        counts = np.zeros(ranks, np.int64)
        counts[rank] = len(own)
        (counts,) = self._backend.reduce([counts])
        every = np.zeros((counts.sum(), *own.shape[1:]))
        first = counts[:rank].sum()
        every[first : first + len(own)] = own
        return self._backend.reduce([every])[0]

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
