"""How the step is shared between processes.

`Backend` is the seam; `make_backend` is the only place that asks for `backend.kind`. Nothing
outside this package imports horovod or mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import keras

    from hvps.batches import Batch, Feed
    from hvps.cluster import Cluster
    from hvps.config import Config
    from hvps.position import Position
    from hvps.schedule import Schedule


# Takes where the run is, and its whole state as arrays by name.
AtBoundary = Callable[["Position", dict[str, np.ndarray]], None]


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


@dataclass(frozen=True)
class Interval:
    """What happened between two records.

    Attributes:
        loss_sum: sum of per-example losses, over `loss_examples` examples.
        steps: updates, of which `skipped` were left out.
        examples: true examples in the steps that were timed.
        seconds: that these steps took.
    """

    loss_sum: float
    loss_examples: int
    steps: int
    skipped: int
    examples: int
    seconds: float

    @property
    def loss(self) -> float:
        return self.loss_sum / self.loss_examples if self.loss_examples else float("nan")

    @property
    def examples_per_second(self) -> float:
        return self.examples / self.seconds if self.seconds else 0.0


class Backend(Protocol):
    """One way of running the same training step on the processes of the job.

    Attributes:
        name: the value of `backend.kind`.
        engine: what carries it, in words.
        stopped_by: why the work ended early, where another process asked for it.
        completes_dealt_steps: others wait for every step that `work` has given, also after `stop`.
        depth: outputs of `train_step` that may be left unread while further steps are handed in.
        train_share: (rank, ranks) among which each batch is divided.
        reading_share: the same for datasets, which can only be read in order.
        batch_parts: who divides a batch, in words, and into how many parts.
        eval_share: the same for held-out examples; None: this process does not evaluate.
    """

    name: str
    engine: str
    cluster: Cluster
    stopped_by: str | None
    completes_dealt_steps: bool

    @property
    def depth(self) -> int: ...

    @property
    def train_share(self) -> tuple[int, int]: ...

    @property
    def reading_share(self) -> tuple[int, int]: ...

    @property
    def eval_share(self) -> tuple[int, int] | None: ...

    @property
    def batch_parts(self) -> tuple[str, int]: ...

    def setup(
        self,
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable[[Any, Any], Any],
        identity: dict[str, Any],
        example: tuple[Any, Any],
    ) -> None:
        """Build the step and make all ranks start from rank 0's weights and optimizer state.

        Args:
            identity: what must be the same on all ranks (configuration, versions).
            example: x and y of one example, with the axis of the batch.

        Raises:
            ConfigError: the ranks differ in their model, configuration or versions, or the
                backend cannot run the model or the optimizer.
        """

    def work(
        self,
        feed: Feed,
        *,
        start: Position,
        total: int | None,
        epochs: int | None,
        schedule: Schedule,
    ) -> Iterator[Batch]:
        """The batches that this process computes, each with its step, until all work is done.

        Args:
            start: what was done before, by whomever.
            total: steps of the whole run, None when the data does not know its length.
            epochs: passes over the data, None when `total` alone counts.
        """

    def train_step(self, batch: Batch, *, learning_rate: float, stop: tuple[bool, bool]) -> Any:
        """Run one update; returns what `read` takes, not waited for."""

    def read(self, output: Any) -> StepOutput:
        """Wait for a step and read what it says."""

    def stop(self, reason: str) -> None:
        """Let `work` end soon, in all processes after the same updates."""

    def at_boundary(self, step: int, call: AtBoundary) -> None:
        """Root: have `call` get the whole state when `step` updates were made, or as soon after as
        it is the state after a number of whole updates: at once, or from another thread."""

    def settle(self) -> None:
        """The work has ended: wait until it is complete."""

    def finalize(self) -> None:
        """Give the optimizer its last word, after `settle`."""

    def interval(self, own: Interval) -> tuple[Interval, dict[str, float]]:
        """What is recorded, given what this process saw, and further values by name."""

    def totals(self) -> dict[str, int]:
        """`steps` and `examples` of the whole run, where this process has not counted them."""

    def report(self) -> dict[str, Any]:
        """Further entries of result.json; called on the root after `finalize`."""

    def agree(self, count: int) -> int:
        """Sum of a count over the processes that divide a batch."""

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
        """All that training changes as arrays by name, copies; see `hvps.backends.whole_state`."""

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
    if config.backend.kind == "ps":
        from hvps.backends.ps import make_ps_backend

        return make_ps_backend(config, cluster)
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


def meet(config: Config, cluster: Cluster) -> Cluster:
    """The cluster with the addresses of its tasks, where the processes tell them to one another.

    Under mpirun a parameter-server task knows its role but not where the others listen.
    """
    if config.backend.kind != "ps" or cluster.tasks is not None:
        return cluster
    from hvps.backends.ps.addresses import exchange_addresses

    return exchange_addresses(cluster)


def serves(config: Config, cluster: Cluster) -> bool:
    """Whether this process only serves others: a ps, or in-graph a worker that is not the chief."""
    in_graph = config.backend.kind == "ps" and config.backend.replication == "in_graph"
    return cluster.role == "ps" or (in_graph and not cluster.is_root)


def serve(config: Config, cluster: Cluster) -> int:
    """Serve until the chief has finished; returns the exit code."""
    from hvps.backends.ps import serve_cluster

    return serve_cluster(config, cluster)
