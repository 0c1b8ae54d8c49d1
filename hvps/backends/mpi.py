"""Collectives by mpi4py, for machines where Horovod cannot be built."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.mpi_settings import set_mpi_defaults
from hvps.cluster import Cluster
from hvps.errors import EXIT_FAILURE, ConfigError

_BUCKET_BYTES = 4 << 20


class MpiCollectives:
    """See `hvps.backends.collectives.Collectives`.

    Gradients are copied into buckets of about 4 MiB in the order in which the backward pass makes
    them; a bucket leaves as soon as it is full, while the rest of the backward pass runs. MPI
    matches calls by their order, so the buckets are chained: the same order on every rank.
    """

    engine = "mpi4py"

    def __init__(self, cluster: Cluster, *, stall_timeout: float) -> None:
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
        self.rank: int = self._comm.Get_rank()
        self._last_op: tf.Operation | None = None
        self._last_graph: Any = None
        self._watch = _Watchdog(stall_timeout, self.rank)

    # --- traced into the step ---

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        summed: list[tf.Tensor] = []
        for number, bucket in enumerate(_buckets(tensors)):
            flat = tf.concat([tf.reshape(t, [-1]) for t in bucket], 0)
            flat = self._chained(self._sum_in_place, flat, f"{name} {number}")
            pieces = tf.split(flat, [t.shape.num_elements() for t in bucket])
            summed += [tf.reshape(p, t.shape) for p, t in zip(pieces, bucket, strict=True)]
        return summed

    def gather_rows(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        rows = self._chained(self._gather, tensor, name)
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

    def _chained(
        self, call: Callable[[np.ndarray, str], np.ndarray], tensor: tf.Tensor, what: str
    ) -> tf.Tensor:
        """Run `call` on the tensor's memory, after the MPI call that was traced before it."""
        graph = tf.compat.v1.get_default_graph()
        travels = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
        with tf.control_dependencies(self._chain_end(graph)):
            result = tf.numpy_function(lambda a: call(a, what), [travels], travels.dtype)
        self._last_op, self._last_graph = result.op, graph
        return tf.cast(result, tensor.dtype)

    def _sum_in_place(self, array: np.ndarray, what: str) -> np.ndarray:
        result = np.empty_like(array)
        with self._watch.waiting(f"the sum of gradients {what!r}"):
            self._comm.Allreduce(array, result)
        return result

    def _gather(self, array: np.ndarray, what: str) -> np.ndarray:
        array = np.ascontiguousarray(array)
        with self._watch.waiting(f"gathering {what!r}"):
            counts = np.array(self._comm.allgather(array.size))
            result = np.empty(counts.sum(), array.dtype)
            self._comm.Allgatherv(array.reshape(-1), (result, counts))
        return result.reshape(-1, *array.shape[1:])

    # --- on the host, between steps ---

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        results = []
        for array in arrays:
            result = np.empty_like(array)
            with self._watch.waiting("a sum over the ranks"):
                self._comm.Allreduce(np.ascontiguousarray(array), result)
            results.append(result)
        return results

    def gather_objects(self, value: Any) -> list[Any]:
        with self._watch.waiting("gathering over the ranks"):
            return self._comm.allgather(value)

    def broadcast_object(self, value: Any) -> Any:
        with self._watch.waiting("rank 0's word"):
            return self._comm.bcast(value, root=0)

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        for variable in variables:
            value = np.array(variable, order="C")
            # As bytes: MPI has no name for bfloat16.
            with self._watch.waiting(f"rank 0's {variable.path}"):
                self._comm.Bcast(value.reshape(-1).view(np.uint8), root=0)
            variable.assign(value)

    def close(self) -> None:
        with self._watch.waiting("all ranks to finish"):
            self._comm.Barrier()
            self._mpi.Finalize()
        self._watch.stop()


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


class _Watchdog:
    """Ends this process when an MPI call has waited for too long: MPI itself waits for ever."""

    def __init__(self, timeout: float, rank: int) -> None:
        self._timeout, self._rank = timeout, rank
        self._waits: tuple[float, str] | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="hvps-mpi-watchdog", daemon=True).start()

    def waiting(self, what: str) -> _Watchdog:
        self._what = what
        return self

    def __enter__(self) -> None:
        self._waits = (time.monotonic(), self._what)

    def __exit__(self, *_: object) -> None:
        self._waits = None

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._timeout / 4)):
            waits = self._waits
            if waits and time.monotonic() - waits[0] > self._timeout:
                print(
                    f"hvps: error: rank {self._rank} waited {self._timeout:g} s for {waits[1]}:"
                    " a rank is missing or far behind\n"
                    "  do:       look into the logs of the other ranks; raise backend.stall_timeout"
                    " if they are only slow",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(EXIT_FAILURE)
