"""The global step, on ps 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvps.backends.ps.shards import ps_device

v1 = tf.compat.v1


class Counters:
    """The global step and each worker's steps, on ps 0, counted with the updates themselves."""

    def __init__(self, num_workers: int, prefix: str) -> None:
        with v1.device(ps_device(0)):
            self.step = self._variable(f"{prefix}/global_step", [])
            self.by_worker = self._variable(f"{prefix}/worker_steps", [num_workers])
            self._lock = tf.CriticalSection(shared_name=f"{prefix}/step_lock")

    @staticmethod
    def _variable(name: str, shape: list[int]) -> Any:
        return v1.get_variable(
            name, shape=shape, dtype=tf.int64, use_resource=True, trainable=False,
            initializer=v1.zeros_initializer(),
        )  # fmt: skip

    def read(self) -> tf.Tensor:
        with v1.device(ps_device(0)):
            return self.step.read_value()

    def count(self, workers: Sequence[int]) -> tf.Tensor:
        """Add one update, to which `workers` contributed; gives the step before it, int64."""

        def add() -> tf.Tensor:
            before = tf.identity(self.step.read_value())
            with tf.control_dependencies([before]):
                adds = [self.step.assign_add(1, read_value=False)]
                ones = tf.IndexedSlices(
                    tf.ones([len(workers)], tf.int64), tf.constant(list(workers), tf.int64)
                )
                adds.append(self.by_worker.scatter_add(ones).op)
            with tf.control_dependencies(adds):
                return tf.identity(before)

        with v1.device(ps_device(0)):
            return self._lock.execute(add)
