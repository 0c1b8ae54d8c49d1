"""Collectives by Horovod, over MPI, Gloo or NCCL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.mpi_settings import set_mpi_defaults
from hvps.cluster import Cluster
from hvps.errors import ConfigError

# Horovod's kernels know these; others travel as float32.
_DTYPES = (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)


class HorovodCollectives:
    """See `hvps.backends.collectives.Collectives`.

    Args:
        stall_timeout: seconds after which Horovod names the ranks that some tensor waits for, and
            ends the job.
    """

    engine = "horovod"

    def __init__(self, cluster: Cluster, *, stall_timeout: float) -> None:
        set_mpi_defaults(cluster)
        _set_horovod_defaults(stall_timeout)
        try:
            import horovod.tensorflow as hvd
        except (ImportError, tf.errors.OpError, OSError) as err:
            raise ConfigError(
                "backend.engine: Horovod cannot be loaded",
                rule="it is built against exactly this TensorFlow and MPI",
                received=f"{type(err).__name__}: {err}",
                do="run `make install` again, or use backend.engine=mpi",
            ) from err
        hvd.init()
        self._hvd = hvd
        self.size: int = hvd.size()
        over = "MPI" if hvd.mpi_enabled() else "Gloo"
        self.engine = f"horovod over {over}"
        self._calls = 0

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        # One operation for each: it leaves as soon as its own gradient is there, while the rest of
        # the backward pass runs; Horovod fuses those that are ready together.
        return [
            self._sum(tensor, f"hvps_{name}_{index:04d}") for index, tensor in enumerate(tensors)
        ]

    def _sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        travels = tensor if tensor.dtype in _DTYPES else tf.cast(tensor, tf.float32)
        summed = self._hvd.mpi_ops._allreduce(
            travels, name=name, op=self._hvd.Sum, ignore_name_scope=True
        )
        return tf.cast(summed, tensor.dtype)

    def gather_rows(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._hvd.allgather(tensor, name=f"hvps_{name}", ignore_name_scope=True)

    def cond(self, predicate: tf.Tensor, true_fn: Any, false_fn: Any) -> Any:
        return tf.cond(predicate, true_fn, false_fn)

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        with tf.device("CPU:0"):
            return [
                self._sum(tf.convert_to_tensor(array), self._host_name()).numpy()
                for array in arrays
            ]

    def gather_objects(self, value: Any) -> list[Any]:
        return self._hvd.allgather_object(value, name=self._host_name())

    def broadcast_object(self, value: Any) -> Any:
        return self._hvd.broadcast_object(value, root_rank=0, name=self._host_name())

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        for variable in variables:
            value = tf.convert_to_tensor(variable.value)
            travels = value if value.dtype in _DTYPES else tf.cast(value, tf.float32)
            received = self._hvd.broadcast(travels, root_rank=0, name=self._host_name())
            variable.assign(tf.cast(received, value.dtype))

    def _host_name(self) -> str:
        """A name that is new, and the same on all ranks: they make the same calls in order."""
        self._calls += 1
        return f"hvps_host_{self._calls}"

    def close(self) -> None:
        self._hvd.shutdown()


def _set_horovod_defaults(stall_timeout: float) -> None:
    defaults = {
        # Warn at half of the time, end the job at all of it: by default Horovod waits for ever.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, int(stall_timeout / 2))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(2, int(stall_timeout))),
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    # horovod.run() exports the text of a Python tuple here (a stray comma upstream).
    if os.environ.get("HOROVOD_CYCLE_TIME", "").startswith("("):
        del os.environ["HOROVOD_CYCLE_TIME"]
