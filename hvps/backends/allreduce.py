"""Synchronous data parallelism: gradients are summed over the ranks before the update."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends import StepOutput
from hvps.backends.changed_state import changed_so_far
from hvps.backends.collectives import Collectives
from hvps.backends.identity import compare, flattened
from hvps.backends.local import LocalBackend
from hvps.backends.watchdog import Watchdog
from hvps.backends.whole_state import by_path, optimizer_variables
from hvps.cluster import Cluster
from hvps.errors import PeerLostError, TrainingError
from hvps.step import Gradient, merge_rows

_SMALL_BYTES = 64 << 10  # gradients up to this size travel together, with the step's scalars


class AllreduceBackend(LocalBackend):
    """The local step with a sum over all ranks between gradients and optimizer."""

    name = "allreduce"

    def __init__(
        self,
        cluster: Cluster,
        *,
        accumulate: int,
        collectives: Collectives,
        watchdog: Watchdog,
    ) -> None:
        super().__init__(cluster, accumulate=accumulate)
        self._collectives, self._watchdog = collectives, watchdog
        self.engine = collectives.engine

    def setup(
        self,
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable[[Any, Any], Any],
        identity: dict[str, Any],
        example: tuple[Any, Any],
    ) -> None:
        super().setup(
            model=model, optimizer=optimizer, loss=loss, identity=identity, example=example
        )
        layout = {
            name: f"{v.dtype} {tuple(v.shape)}"
            for name, v in by_path(self._shared_variables()).items()
        }
        self._compare({**identity, "variables": layout})
        with self._together("rank 0's weights"):
            self._collectives.broadcast_variables(
                self._shared_variables() + self._replicated_state()
            )

    def _shared_variables(self) -> list[keras.Variable]:
        """What must be equal on all ranks after every step."""
        return [*self._model.trainable_variables, *optimizer_variables(self._optimizer)]

    def _replicated_state(self) -> list[keras.Variable]:
        """Non-trainable weights, such as BatchNormalization's statistics.

        Not `model.variables`: that also holds the states of seed generators, and with equal ones
        every rank would drop the same units.
        """
        return list(self._model.non_trainable_weights)

    def _float_state(self) -> list[keras.Variable]:
        return [v for v in self._replicated_state() if v.dtype.startswith(("float", "bfloat"))]

    # --- the step ---

    def train_step(self, batch: Any, *, learning_rate: float, stop: tuple[bool, bool]) -> tf.Tensor:
        with self._together(step=True):
            return super().train_step(batch, learning_rate=learning_rate, stop=stop)

    def read(self, output: tf.Tensor) -> StepOutput:
        with self._together(step=True):
            return super().read(output)

    @contextmanager
    def _together(self, what: str = "", *, step: bool = False) -> Iterator[None]:
        """What needs the other ranks: with a deadline, and errors that say when one is gone."""
        try:
            with self._watchdog.step() if step else self._watchdog.waiting(what):
                yield
        except (tf.errors.OpError, RuntimeError) as err:
            lost = _peer_lost(err)
            if lost is None:
                raise
            raise lost from err

    def _reduce(
        self, gradients: list[Gradient], scalars: tf.Tensor
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sum over the ranks, each gradient as soon as the backward pass has made it.

        What the forward pass has changed, such as BatchNormalization's statistics, is averaged in
        the same go: it is then the same on all ranks after every step, like the weights.
        """
        if self.cluster.size == 1:
            return gradients, scalars
        reduced: list[Any] = list(gradients)
        # The backward pass ends with the first layer, so the last gradient is ready first.
        backward = range(len(gradients) - 1, -1, -1)
        sparse = [i for i in backward if isinstance(gradients[i], tf.IndexedSlices)]
        dense = [i for i in backward if i not in sparse]
        small = [i for i in dense if _is_small(gradients[i])]
        large = [i for i in dense if i not in small]
        rows = self._total_rows({i: gradients[i] for i in sparse})
        for i, tensor in zip(
            large,
            self._collectives.sum_tensors([gradients[i] for i in large], "large"),
            strict=True,
        ):
            reduced[i] = tensor
        states = changed_so_far(self._float_state())
        parts = [gradients[i] for i in small] + [tf.cast(v.value, tf.float32) for v in states]
        packed = tf.concat([tf.reshape(part, [-1]) for part in parts] + [scalars], 0)
        (packed,) = self._collectives.sum_tensors([packed], "small")
        sizes = [part.shape.num_elements() for part in parts]
        *pieces, scalars = tf.split(packed, [*sizes, scalars.shape.num_elements()])
        for i, piece in zip(small, pieces[: len(small)], strict=True):
            reduced[i] = tf.reshape(piece, gradients[i].shape)
        for variable, total in zip(states, pieces[len(small) :], strict=True):
            mean = tf.reshape(total / self.cluster.size, variable.shape)
            variable.assign(tf.cast(mean, variable.dtype))
        for i in sparse:
            reduced[i] = self._reduce_sparse(gradients[i], rows[i], f"sparse_{i}")
        return reduced, scalars

    def _total_rows(self, slices: dict[int, tf.IndexedSlices]) -> dict[int, tf.Tensor]:
        """How many rows of each sparse gradient all ranks hold together.

        The rows are known from the inputs, so this small sum is done before the backward pass.
        """
        if not slices:
            return {}
        counts = tf.stack([tf.shape(s.indices)[0] for s in slices.values()])
        (counts,) = self._collectives.sum_tensors([counts], "rows")
        return dict(zip(slices, tf.unstack(counts), strict=True))

    def _reduce_sparse(
        self, slices: tf.IndexedSlices, total_rows: tf.Tensor, name: str
    ) -> tf.IndexedSlices:
        """Gather the rows, or sum the whole matrix, whichever moves fewer bytes.

        Gathering brings every rank all rows with their indices; a ring-allreduce moves twice the
        dense matrix. `total_rows` is the same everywhere, so all ranks take the same way.
        """
        rows, shape = int(slices.dense_shape[0]), [int(n) for n in slices.dense_shape]
        row_bytes = int(np.prod(shape[1:])) * slices.values.dtype.size
        gathered_bytes = tf.cast(total_rows, tf.float32) * (row_bytes + slices.indices.dtype.size)

        def gather() -> tuple[tf.Tensor, tf.Tensor]:
            every = tf.IndexedSlices(
                self._collectives.gather_rows(slices.values, f"{name}_values"),
                self._collectives.gather_rows(slices.indices, f"{name}_indices"),
                slices.dense_shape,
            )
            merged = merge_rows(every)
            return merged.values, merged.indices

        def densify() -> tuple[tf.Tensor, tf.Tensor]:
            whole = tf.scatter_nd(slices.indices[:, tf.newaxis], slices.values, shape)
            (whole,) = self._collectives.sum_tensors([whole], f"{name}_dense")
            return whole, tf.range(rows, dtype=slices.indices.dtype)

        values, indices = self._collectives.cond(
            gathered_bytes < 2.0 * rows * row_bytes, gather, densify
        )
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    # --- between steps ---

    def reduce(self, sums: Sequence[np.ndarray]) -> list[np.ndarray]:
        with self._together("a sum over the ranks"):
            return self._collectives.sum_arrays([np.asarray(value) for value in sums])

    def broadcast(self, value: Any) -> Any:
        with self._together("rank 0's word"):
            return self._collectives.broadcast_object(value)

    def _gather(self, value: Any) -> list[Any]:
        with self._together("every rank's word"):
            return self._collectives.gather_objects(value)

    def barrier(self) -> None:
        with self._together("all ranks to come this far"):
            self._collectives.sum_arrays([np.zeros(1, np.int32)])

    def check_weights(self) -> None:
        if self.cluster.size == 1:
            return
        variables = self._shared_variables() + self._float_state()
        sums = [zlib.crc32(np.ascontiguousarray(np.asarray(v)).tobytes()) for v in variables]
        by_rank = self._gather(sums)
        for index, variable in enumerate(variables):
            values = [rank_sums[index] for rank_sums in by_rank]
            if len(set(values)) > 1:
                raise TrainingError(
                    f"the ranks have drifted apart: {variable.path} differs",
                    rule="weights and optimizer state are equal on all ranks after every step",
                    received="checksums "
                    + ", ".join(f"{v:08x} on rank {r}" for r, v in enumerate(values)),
                    do="look for code that changes weights on some ranks only, or for bad memory",
                )

    def _compare(self, identity: dict[str, Any]) -> None:
        """Stop before the first step if the ranks were not started alike."""
        flat = flattened(identity)
        for rank, other in enumerate(self._gather(flat)):
            compare(other, flat, f"rank {rank}", f"rank {self.cluster.rank}")

    def close(self) -> None:
        with self._together("all ranks to finish"):
            self._collectives.close()
        self._watchdog.stop()


def _is_small(gradient: tf.Tensor) -> bool:
    size = gradient.shape.num_elements() * gradient.dtype.size
    return gradient.dtype == tf.float32 and size <= _SMALL_BYTES


def _peer_lost(err: Exception) -> PeerLostError | None:
    """The error in our words, where the library says that another rank is gone."""
    signs = (
        "Horovod has been shut down",
        "HorovodInternalError",
        "Connection closed by peer",
        "Connection reset by peer",
        "MPI_ERR",
    )
    said = [line for line in str(err).splitlines() if any(sign in line for sign in signs)]
    if not said:
        return None
    return PeerLostError(
        "lost contact with another rank",
        rule="all ranks take part in every step",
        received=said[0].strip()[:300],
        do="look for the first error among the other ranks",
    )
