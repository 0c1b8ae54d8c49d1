"""Collectives by mpi4py, for machines where Horovod cannot be built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.mpi_settings import set_mpi_defaults
from hvps.cluster import Cluster
from hvps.errors import ConfigError

_BUCKET_BYTES = 4 << 20


class MpiCollectives:
    """See `hvps.backends.collectives.Collectives`.

    Gradients are copied into buckets of about 4 MiB in the order in which the backward pass makes
    them; a bucket leaves as soon as it is full, while the rest of the backward pass runs. MPI
    matches calls by their order, so the buckets are chained: the same order on every rank.
    """

    engine = "mpi4py"

    def __init__(self, cluster: Cluster) -> None:
        set_mpi_defaults(cluster)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as err:
            raise ConfigError(
                "backend.engine: mpi4py cannot be loaded",
                rule="mpi4py and an MPI library are installed",
                received=f"{type(err).__name__}: {err}",
                do="run `make install`, or use backend.kind=local for one process",
            ) from err
        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.size: int = self._comm.Get_size()
        self._last_op: tf.Operation | None = None
        self._last_graph: Any = None

    # --- traced into the step ---

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        summed: list[tf.Tensor] = []
        for bucket in _buckets(tensors):
            flat = tf.concat([tf.reshape(t, [-1]) for t in bucket], 0)
            flat = self._chained(self._sum, flat)
            pieces = tf.split(flat, [t.shape.num_elements() for t in bucket])
            summed += [tf.reshape(p, t.shape) for p, t in zip(pieces, bucket, strict=True)]
        return summed

    def gather_rows(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        rows = self._chained(self._gather, tensor)
        rows.set_shape([None, *tensor.shape[1:]])
        return rows

    def cond(self, predicate: tf.Tensor, true_fn: Any, false_fn: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        with tf.control_dependencies(self._chain_end(graph)):
            results = tf.cond(predicate, true_fn, false_fn)
        self._last_op, self._last_graph = tf.nest.flatten(results)[0].op, graph
        return results

    def _chain_end(self, graph: Any) -> list[tf.Operation]:
        """The call that the next one must follow; none at the beginning of a graph."""
        return [self._last_op] if self._last_op is not None and self._last_graph is graph else []

    def _chained(self, call: Callable[[np.ndarray], np.ndarray], tensor: tf.Tensor) -> tf.Tensor:
        """Run `call` on the tensor's memory, after the MPI call that was traced before it."""
        graph = tf.compat.v1.get_default_graph()
        travels = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
        with tf.control_dependencies(self._chain_end(graph)):
            result = tf.numpy_function(call, [travels], travels.dtype)
        self._last_op, self._last_graph = result.op, graph
        return tf.cast(result, tensor.dtype)

    def _sum(self, array: np.ndarray) -> np.ndarray:
        result = np.empty(array.shape, array.dtype)
        self._comm.Allreduce(np.ascontiguousarray(array), result)
        return result

    def _gather(self, array: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(array)
        counts = np.array(self._comm.allgather(array.size))
        result = np.empty(counts.sum(), array.dtype)
        self._comm.Allgatherv(array.reshape(-1), (result, counts))
        return result.reshape(-1, *array.shape[1:])

    # --- on the host, between steps ---

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [self._sum(array) for array in arrays]

    def gather_objects(self, value: Any) -> list[Any]:
        return self._comm.allgather(value)

    def broadcast_object(self, value: Any) -> Any:
        return self._comm.bcast(value, root=0)

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        for variable in variables:
            value = np.array(variable, order="C")
            # As bytes: MPI has no name for bfloat16.
            self._comm.Bcast(value.reshape(-1).view(np.uint8), root=0)
            variable.assign(value)

    def close(self) -> None:
        self._comm.Barrier()
        self._mpi.Finalize()


def _buckets(tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Neighbours of one dtype, together at most about `_BUCKET_BYTES`."""
    buckets: list[list[tf.Tensor]] = []
    filled = 0
    for tensor in tensors:
        size = tensor.shape.num_elements() * tensor.dtype.size
        fits = buckets and buckets[-1][0].dtype == tensor.dtype and filled + size <= _BUCKET_BYTES
        if fits:
            buckets[-1].append(tensor)
            filled += size
        else:
            buckets.append([tensor])
            filled = size
    return buckets
