"""What the allreduce backend needs of a collective library, and which one it gets.

Horovod where it is built, else mpi4py; one process needs neither.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hvps.backends.congestion import choose, new_connections_use
from hvps.backends.watchdog import Watchdog
from hvps.cluster import Cluster
from hvps.errors import ConfigError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from hvps.config import Config

_FIRST_SUM = 1 << 18  # numbers; large enough to be summed as gradients are


class Collectives(Protocol):
    """Collective operations over all ranks.

    `sum_tensors` and `gather_rows` are traced into the step: they must be called in the same order
    with the same names on every rank, but run whenever their inputs are ready. The others run on
    the host, between steps.
    """

    engine: str
    size: int

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums over the ranks; given in the order in which the backward pass makes them."""

    def gather_rows(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenation over the ranks, in their order, on axis 0, whose length may differ."""

    def cond(self, predicate: tf.Tensor, true_fn: Any, false_fn: Any) -> Any:
        """`tf.cond` whose branches hold collectives; the predicate is the same on all ranks."""

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Sums over the ranks, in the arrays' own dtype."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value."""

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Rank 0's values into everyone's variables."""

    def close(self) -> None:
        """Leave the job in order."""


class SingleProcess:
    """A job of one rank: sums and gathers are what they are."""

    engine = "none needed"
    size = 1

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        return list(tensors)

    def gather_rows(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tensor

    def cond(self, predicate: tf.Tensor, true_fn: Any, false_fn: Any) -> Any:
        raise AssertionError("one process has nothing to decide")

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(array) for array in arrays]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        pass

    def close(self) -> None:
        pass


def make_collectives(config: Config, cluster: Cluster, watchdog: Watchdog) -> Collectives:
    """Load and start the collective library.

    Raises:
        ConfigError: it cannot be loaded, or it sees another number of processes than the launcher
            started: then every process would train alone and nobody would notice.
    """
    engine, timeout = config.backend.engine, config.backend.stall_timeout
    if engine == "auto" and cluster.size == 1:
        return SingleProcess()
    congestion = choose(config.backend.congestion_control)
    collectives: Collectives
    with watchdog.waiting("all ranks to start"), new_connections_use(congestion):
        if engine == "horovod" or (engine == "auto" and importlib.util.find_spec("horovod")):
            from hvps.backends.horovod import HorovodCollectives

            collectives = HorovodCollectives(cluster, stall_timeout=timeout)
        else:
            from hvps.backends.mpi import MpiCollectives

            collectives = MpiCollectives(cluster)
        if collectives.size == cluster.size:
            # Some connections are made when they are first used: those between neighbours, by this.
            collectives.sum_arrays([np.zeros(_FIRST_SUM, np.float32)])
    if collectives.size != cluster.size:
        raise ConfigError(
            f"backend.engine: {collectives.engine} sees another job than the launcher started",
            rule="the collective library and the launcher agree on the number of processes",
            received=f"{collectives.size} in {collectives.engine},"
            f" {cluster.size} by {cluster.source}",
            do="use the mpirun of the MPI that it was built with (`which mpirun`), or horovodrun;"
            " under `horovodrun --gloo` use backend.engine=horovod",
        )
    return collectives
