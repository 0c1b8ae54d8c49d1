"""One process: the reference that the other backends are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends import AtBoundary, Interval, StepOutput
from hvps.backends.whole_state import whole_state
from hvps.batches import Batch, Feed, consecutive
from hvps.cluster import Cluster
from hvps.fused_update import fuse_update
from hvps.position import START, Position
from hvps.step import AnyBatch, Gradient, loss_and_gradients

if TYPE_CHECKING:
    from hvps.schedule import Schedule


class LocalBackend:
    """Traces one `tf.function` per kind of step; subclasses override how gradients are reduced.

    Args:
        cluster: this process among its peers.
        accumulate: micro-batches whose gradients are added up before one update.
    """

    name = "local"
    engine = "none"
    stopped_by: str | None = None
    completes_dealt_steps = False
    depth = 1  # reading an output waits for its step; the next one is handed in first

    def __init__(self, cluster: Cluster, *, accumulate: int) -> None:
        self.cluster = cluster
        self._shares = accumulate * cluster.size
        self._accumulate = accumulate
        self._stop_asked = False
        self._position = START
        self._waiting: list[tuple[int, AtBoundary]] = []

    @property
    def train_share(self) -> tuple[int, int]:
        return self.cluster.rank, self.cluster.size

    @property
    def batch_parts(self) -> tuple[str, int]:
        size = self.cluster.size
        return f"{size} rank{'s' * (size > 1)}", size

    reading_share = train_share
    eval_share = train_share

    def setup(
        self,
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable[[Any, Any], Any],
        identity: dict[str, Any],
        example: tuple[Any, Any],
    ) -> None:
        self._model, self._optimizer, self._loss = model, optimizer, loss
        fuse_update(optimizer)
        self._buffers: list[tf.Variable] = []
        if self._accumulate > 1:
            self._buffers = [
                tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False, name=f"accumulated_{i}")
                for i, v in enumerate(model.trainable_variables)
            ]
        self._loss_buffer = tf.Variable(0.0, trainable=False, name="accumulated_loss")
        self._add = AnyBatch(self._add_body)
        self._update = AnyBatch(self._update_body)

    def work(
        self,
        feed: Feed,
        *,
        start: Position,
        total: int | None,
        epochs: int | None,
        schedule: Schedule,
    ) -> Iterator[Batch]:
        self._stop_asked = False
        self._position = start
        for batch in consecutive(feed, start=start, total=total, epochs=epochs):
            if self._stop_asked:
                return
            yield batch
            examples = self._position.examples + batch.examples
            self._position = Position(batch.step + 1, batch.epoch, batch.within + 1, examples)
            self._call_who_waits()

    def at_boundary(self, step: int, call: AtBoundary) -> None:
        self._waiting.append((step, call))
        self._call_who_waits()

    def _call_who_waits(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._position.step:
            _, call = self._waiting.pop(0)
            call(self._position, self.state())

    def stop(self, reason: str) -> None:
        """All ranks decide this after the same step."""
        self._stop_asked = True

    def settle(self) -> None:
        """Every step is complete when the next one is handed in, or its output read."""

    def finalize(self) -> None:
        # Some optimizers (weight averaging) have their last word here.
        self._optimizer.finalize_variable_values(self._model.trainable_variables)

    def interval(self, own: Interval) -> tuple[Interval, dict[str, float]]:
        return own, {}

    def totals(self) -> dict[str, int]:
        return {}

    def report(self) -> dict[str, Any]:
        return {}

    def agree(self, count: int) -> int:
        return int(self.reduce([np.asarray(count, np.int64)])[0])

    def train_step(
        self, batch: Batch, *, learning_rate: float, stop: tuple[bool, bool]
    ) -> tf.Tensor:
        controls = tf.constant([learning_rate, batch.examples, *stop], tf.float32)
        for micro in batch.micros[:-1]:
            self._add(micro.x, micro.y, micro.weight, controls)
        last = batch.micros[-1]
        return self._update(last.x, last.y, last.weight, controls)

    def _gradients(
        self, x: Any, y: Any, weight: tf.Tensor, controls: tf.Tensor
    ) -> tuple[list[Gradient], tf.Tensor]:
        return loss_and_gradients(
            model=self._model,
            optimizer=self._optimizer,
            loss=self._loss,
            x=x,
            y=y,
            weight=weight,
            examples=controls[1],
            shares=self._shares,
        )

    def _add_body(self, x: Any, y: Any, weight: tf.Tensor, controls: tf.Tensor) -> None:
        gradients, loss_sum = self._gradients(x, y, weight, controls)
        for buffer, gradient in zip(self._buffers, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                buffer.scatter_add(gradient)
            else:
                buffer.assign_add(gradient)
        self._loss_buffer.assign_add(loss_sum)

    def _update_body(self, x: Any, y: Any, weight: tf.Tensor, controls: tf.Tensor) -> tf.Tensor:
        controls.set_shape([4])
        gradients, loss_sum = self._gradients(x, y, weight, controls)
        if self._buffers:
            # Read before they are cleared: the gradients of this last micro-batch are added one by
            # one, so each can still be reduced as soon as its own backward pass is done.
            gradients = [
                buffer.read_value() + tf.convert_to_tensor(gradient)
                for buffer, gradient in zip(self._buffers, gradients, strict=True)
            ]
            loss_sum += self._loss_buffer.read_value()
            for buffer in (*self._buffers, self._loss_buffer):
                buffer.assign(tf.zeros_like(buffer))
        scalars = tf.stack([loss_sum, controls[2], controls[3]])
        gradients, scalars = self._reduce(gradients, scalars)
        # Reduced before the outermost optimizer, which may clip, or skip what is not finite: all
        # ranks then decide alike.
        self._optimizer.learning_rate.assign(controls[0])
        # Not `iterations`, which counts by accumulated updates where the optimizer accumulates.
        counter = getattr(self._optimizer, "inner_optimizer", self._optimizer)._iterations
        before = tf.identity(counter.value)
        self._optimizer.apply(gradients, self._model.trainable_variables)
        applied = tf.cast(counter.value - before, tf.float32)
        return tf.concat([scalars, [1.0 - applied]], 0)

    def _reduce(
        self, gradients: list[Gradient], scalars: tf.Tensor
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sum over the ranks; traced into the step."""
        return gradients, scalars

    def read(self, output: tf.Tensor) -> StepOutput:
        return StepOutput(*np.asarray(output).tolist())

    def reduce(self, sums: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(value) for value in sums]

    def broadcast(self, value: Any) -> Any:
        return value

    def check_weights(self) -> None:
        """Nobody to differ from."""

    def state(self) -> dict[str, np.ndarray]:
        variables = whole_state(self._model, self._optimizer)
        # `numpy()` copies once; numpy.asarray() of a Keras variable may copy twice.
        return {name: np.asarray(v.value.numpy()) for name, v in variables.items()}

    def sync_model(self) -> None:
        """The eager model is what was trained."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to leave."""
