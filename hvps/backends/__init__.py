"""How the step is shared between processes.

`Backend` is the seam; `make_backend` is the only place that asks for `backend.kind`. Nothing
outside this package imports horovod or mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from hvps.cluster import Cluster
    from hvps.config import Config
    from hvps.data import Batch


class StepOutput(NamedTuple):
    """What one update says about itself, over all ranks.

    Attributes:
        loss_sum: sum of the per-example losses.
        stop_votes: ranks that were asked to stop by SIGTERM or SIGUSR1.
        interrupt_votes: ranks that were asked to stop by SIGINT.
        skipped: 1 if the update was left out because a float16 gradient was not finite.
    """

    loss_sum: float
    stop_votes: float
    interrupt_votes: float
    skipped: float


class Backend(Protocol):
    """One way of running the same training step on the processes of the job."""

    name: str
    engine: str
    cluster: Cluster

    def setup(
        self,
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable[[Any, Any], Any],
        identity: dict[str, Any],
    ) -> None:
        """Build the step and make all ranks start from rank 0's weights and optimizer state.

        Args:
            identity: what must be the same on all ranks (configuration, versions).

        Raises:
            ConfigError: the ranks differ in their model, configuration or versions.
        """

    def train_step(
        self, batch: Batch, *, learning_rate: float, stop: tuple[bool, bool]
    ) -> tf.Tensor:
        """Run one update; returns float32 [4], the fields of `StepOutput`, not waited for."""

    def read(self, output: tf.Tensor) -> StepOutput:
        """Wait for a step and read what it says."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""

    def reduce(self, sums: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Element-wise sums over the ranks."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (anything that can be pickled) on every rank."""

    def check_weights(self) -> None:
        """Compare the ranks' weights and optimizer state.

        Raises:
            TrainingError: they differ; names the variable and the ranks.
        """

    def state(self) -> dict[str, np.ndarray]:
        """Weights, optimizer slots and step as arrays by name."""

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Set what `state()` returned.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs.
        """

    def sync_model(self) -> None:
        """Make the eager model hold what evaluation and saving should see, on every rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the job in order."""


def make_backend(config: Config, cluster: Cluster) -> Backend:
    """Start the backend that `config.backend.kind` names.

    Raises:
        ConfigError: its library cannot be loaded, or sees other processes than the launcher.
    """
    if config.backend.kind == "local":
        from hvps.backends.local import LocalBackend

        return LocalBackend(cluster, accumulate=config.train.accumulate)
    from hvps.backends.allreduce import AllreduceBackend
    from hvps.backends.collectives import make_collectives
    from hvps.backends.watchdog import Watchdog

    watchdog = Watchdog(config.backend.stall_timeout, cluster.rank)
    return AllreduceBackend(
        cluster,
        accumulate=config.train.accumulate,
        collectives=make_collectives(config, cluster, watchdog),
        watchdog=watchdog,
    )
