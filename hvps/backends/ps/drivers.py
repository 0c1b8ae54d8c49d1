"""How one client runs a step, for each way of replicating and updating."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvps.backends.ps.graph import PsGraph
from hvps.backends.ps.member import Member
from hvps.backends.ps.rules import Handover, Rounds, apply_at_once, apply_together, hand_over
from hvps.backends.ps.towers import Replica, Towers
from hvps.batches import Batch, MicroBatch

if TYPE_CHECKING:
    from hvps.config import BackendConfig


@dataclass(frozen=True)
class Outcome:
    """What one step says about itself.

    Attributes:
        loss_sum: sum of per-example losses over the replicas of this client.
        staleness: updates by others between reading and counting; None where it has no meaning.
        rows: rows fetched from embedding tables.
        dropped: the gradient came too late for its round.
    """

    loss_sum: float
    staleness: int | None
    rows: int
    dropped: bool = False


class SeedStates:
    """States of the model's seed generators for one replica's steps, several of them in flight.

    A step moves them by a fixed amount, which the first step tells.
    """

    def __init__(self, initial: Sequence[np.ndarray]) -> None:
        self._next = [np.array(state) for state in initial]
        self._move: list[np.ndarray] | None = None
        self._first = threading.Lock()

    def run(self, step: Callable[[list[np.ndarray]], tuple[Any, list[np.ndarray]]]) -> Any:
        """Call `step` with the states; it gives its result and the states after it."""
        if not self._next:
            return step([])[0]
        with self._first:
            if self._move is None:
                result, after = step(self._next)
                self._move = [b - a for a, b in zip(self._next, after, strict=True)]
                self._next = list(after)
                return result
            mine = self._next
            self._next = [state + move for state, move in zip(mine, self._move, strict=True)]
        return step(mine)[0]

    @property
    def states(self) -> list[np.ndarray]:
        return self._next


class Driver:
    """Builds the part of the graph that one way of updating needs, and runs it.

    Attributes:
        lanes: steps that may be in flight.
        local: (variable, value) pairs of what lies on workers.
        shared: the same for what lies on ps and belongs to the rule of update.
    """

    lanes = 1

    def __init__(self, graph: PsGraph, seeds: list[list[np.ndarray]]) -> None:
        self.graph = graph
        self._towers = Towers(graph, graph.example)
        self.local: list[Any] = []
        self.shared: list[Any] = []
        self._seeds = [SeedStates(states) for states in seeds]

    @property
    def seed_states(self) -> list[np.ndarray]:
        """States of the first replica's seed generators."""
        return self._seeds[0].states

    def _replica(
        self,
        worker: int,
        devices: Sequence[str],
        through: Callable[[Any, str], Any] | None = None,
    ) -> Replica:
        replica, local = self._towers.add(worker, devices, through)
        self.local += local
        return replica

    def start(self, session: Any) -> None:
        """Prepare the calls of the session."""

    def run(self, lane: int, batch: Batch, learning_rate: float) -> Outcome:
        raise AssertionError("a subclass says how")


class _Call:
    """One replica's step as a call: feeds in, outcome out."""

    def __init__(self, session: Any, replica: Replica, result: Any, extra: Sequence[Any]) -> None:
        fetches = [replica.loss_sum, result, replica.rows, *replica.new_seeds]
        self._call = session.make_callable(fetches, [*replica.feeds.flat(), *extra])

    def __call__(
        self,
        micros: Sequence[MicroBatch],
        examples: float,
        learning_rate: float,
        seeds: list[np.ndarray],
        *extra: Any,
    ) -> tuple[Any, list[np.ndarray]]:
        feeds = [*_arrays(micros), np.float32(examples), np.float32(learning_rate), *seeds]
        loss_sum, result, rows, *after = self._call(*feeds, *extra)
        return (float(loss_sum), 0 if result is None else int(result), int(rows)), after


class AsyncDriver(Driver):
    """Between-graph: this worker's replica, whose gradients are applied when they arrive."""

    def __init__(
        self, graph: PsGraph, seeds: list[list[np.ndarray]], worker: int, config: BackendConfig
    ) -> None:
        super().__init__(graph, seeds)
        alone = graph.shape.num_workers == 1
        self._replica_ = self._replica(worker, config.devices)
        self._staleness = apply_at_once(graph, self._replica_, alone=alone)

    def start(self, session: Any) -> None:
        self._call = _Call(session, self._replica_, self._staleness, [])

    def run(self, lane: int, batch: Batch, learning_rate: float) -> Outcome:
        loss, stale, rows = self._seeds[0].run(
            lambda s: self._call(batch.micros, batch.examples, learning_rate, s)
        )
        return Outcome(loss, stale, rows)


class PipelinedDriver(Driver):
    """The same with several steps in flight: while one fetches weights, another sends gradients.

    A step has three stages, each a run of the session. What a stage has done waits in a queue on
    the worker, where the next stage takes what is first, of this step or of one that was faster.
    """

    def __init__(
        self, graph: PsGraph, seeds: list[list[np.ndarray]], worker: int, config: BackendConfig
    ) -> None:
        super().__init__(graph, seeds)
        self.lanes = config.pipeline

        def through(fetched: Any, device: str) -> Any:
            name = f"{graph.shape.prefix}/fetched_{worker}"
            handover = Handover(fetched, device=device, capacity=self.lanes, name=name)
            self._fetched = handover.put
            return handover.taken

        self._replica_ = self._replica(worker, config.devices, through)
        self._computed, replica = hand_over(graph, self._replica_, self.lanes)
        self._staleness = apply_at_once(graph, replica, alone=False)
        self._stages = [threading.Semaphore(max(1, self.lanes // 2)) for _ in range(3)]

    def start(self, session: Any) -> None:
        self._fetch = session.make_callable(self._fetched)
        self._compute = _Call(session, self._replica_, self._computed, [])
        self._send = session.make_callable(self._staleness)

    def run(self, lane: int, batch: Batch, learning_rate: float) -> Outcome:
        fetching, computing, sending = self._stages
        with fetching:
            self._fetch()
        with computing:
            loss, _, rows = self._seeds[0].run(
                lambda s: self._compute(batch.micros, batch.examples, learning_rate, s)
            )
        with sending:
            return Outcome(loss, int(self._send()), rows)


class SyncDriver(Driver):
    """Between-graph: this worker adds its gradients to the round that is open; on the chief a
    thread of its own applies the sum of each round."""

    def __init__(
        self, graph: PsGraph, seeds: list[list[np.ndarray]], worker: int, config: BackendConfig
    ) -> None:
        super().__init__(graph, seeds)
        self._replica_ = self._replica(worker, config.devices)
        self.rounds = Rounds(graph, backup=config.backup_workers > 0)
        self.shared = self.rounds.initial()
        self._round = self.rounds.push(self._replica_)
        self._applied = self.rounds.close() if worker == 0 else None

    def start(self, session: Any) -> None:
        rounds = self.rounds
        self._call = _Call(session, self._replica_, self._round, [rounds.round, rounds.needed])
        self._open = session.make_callable(rounds.open, [rounds.round])
        if self._applied is not None:
            self._close = session.make_callable(
                self._applied, [rounds.needed, rounds.learning_rate, rounds.all_examples]
            )

    def push(self, batch: Batch, learning_rate: float, round_: int, needed: int) -> Outcome:
        loss, taken, rows = self._seeds[0].run(
            lambda s: self._call(
                batch.micros, batch.examples, learning_rate, s, np.int64(round_), np.int32(needed)
            )
        )
        return Outcome(loss, None, rows, dropped=taken < 0)

    def open_round(self, round_: int) -> None:
        """Chief: gradients of rounds before `round_` come too late."""
        self._open(np.int64(round_))

    def close_round(self, needed: int, learning_rate: float, examples: int) -> int:
        """Chief: wait for the round's gradients and apply them; returns the round."""
        return int(self._close(np.int32(needed), np.float32(learning_rate), np.float32(examples)))


class InGraphAsyncDriver(Driver):
    """One client, a replica for every tower of every worker, each run by a thread of its own."""

    def __init__(
        self, graph: PsGraph, seeds: list[list[np.ndarray]], config: BackendConfig
    ) -> None:
        super().__init__(graph, seeds)
        towers = [
            (worker, [device] if device else [])
            for worker in range(graph.shape.num_workers)
            for device in (config.devices or [""])
        ]
        self.lanes = len(towers)
        alone = self.lanes == 1
        self._replicas = [self._replica(worker, devices) for worker, devices in towers]
        self._results = [apply_at_once(graph, r, alone=alone) for r in self._replicas]

    def start(self, session: Any) -> None:
        pairs = zip(self._replicas, self._results, strict=True)
        self._calls = [_Call(session, replica, result, []) for replica, result in pairs]

    def run(self, lane: int, batch: Batch, learning_rate: float) -> Outcome:
        loss, stale, rows = self._seeds[lane].run(
            lambda s: self._calls[lane](batch.micros, batch.examples, learning_rate, s)
        )
        return Outcome(loss, stale, rows)


class InGraphSyncDriver(Driver):
    """One client that runs all workers' towers at once and applies the sum of their gradients."""

    def __init__(
        self, graph: PsGraph, seeds: list[list[np.ndarray]], config: BackendConfig
    ) -> None:
        super().__init__(graph, seeds)
        workers = range(graph.shape.num_workers)
        self._replicas = [self._replica(worker, config.devices) for worker in workers]
        self._before = apply_together(graph, self._replicas)

    def start(self, session: Any) -> None:
        replicas = self._replicas
        with self.graph.graph.as_default(), tf.device("/job:worker/task:0"):
            loss = tf.add_n([r.loss_sum for r in replicas])
            rows = tf.add_n([r.rows for r in replicas])
        seeds = [seed for r in replicas for seed in r.new_seeds]
        feeds = [feed for r in replicas for feed in r.feeds.flat()]
        self._call = session.make_callable([loss, rows, self._before, *seeds], feeds)

    def run(self, lane: int, batch: Batch, learning_rate: float) -> Outcome:
        states = [s for seeds in self._seeds for s in seeds.states]
        per = len(self._seeds[0].states)
        feeds: list[Any] = []
        for i, seeds in enumerate(self._seeds):
            micros = [_rows_of(micro, i, len(self._seeds)) for micro in batch.micros]
            feeds += [*_arrays(micros), np.float32(batch.examples), np.float32(learning_rate)]
            feeds += seeds.states
        loss, rows, _, *after = self._call(*feeds)
        assert len(after) == len(states)
        for i, seeds in enumerate(self._seeds):
            seeds.run(lambda _s, i=i: (None, after[i * per : (i + 1) * per]))  # type: ignore[misc]
        return Outcome(float(loss), None, int(rows))


def _arrays(micros: Sequence[MicroBatch]) -> list[np.ndarray]:
    nests = [(m.x, m.y, m.weight) for m in micros]
    return [np.asarray(leaf) for leaf in tf.nest.flatten(nests)]


def _rows_of(micro: MicroBatch, index: int, count: int) -> MicroBatch:
    """One worker's rows of a batch; a worker for which none are left gets one of weight 0."""
    weight = np.asarray(micro.weight)
    start, stop = len(weight) * index // count, len(weight) * (index + 1) // count
    if start == stop:
        start, stop, weight = 0, 1, np.zeros_like(weight)
    x, y = tf.nest.map_structure(lambda t: np.asarray(t)[start:stop], (micro.x, micro.y))
    return MicroBatch(x, y, weight[start:stop])


def make_driver(
    graph: PsGraph, member: Member, config: BackendConfig, seeds: list[np.ndarray]
) -> Driver:
    """The driver that the configuration asks for, with a replica or several in the graph."""
    worker = member.cluster.rank
    if config.replication == "between_graph":
        # The session gave this rank random numbers of its own.
        if config.update == "sync":
            return SyncDriver(graph, [seeds], worker, config)
        kind = PipelinedDriver if config.pipeline > 1 else AsyncDriver
        return kind(graph, [seeds], worker, config)
    workers = graph.shape.num_workers
    if config.update == "sync":
        return InGraphSyncDriver(graph, [worker_seeds(seeds, i) for i in range(workers)], config)
    towers = workers * max(1, len(config.devices))
    return InGraphAsyncDriver(graph, [worker_seeds(seeds, i) for i in range(towers)], config)


def worker_seeds(seeds: list[np.ndarray], worker: int) -> list[np.ndarray]:
    """A worker's own random numbers; worker 0 draws what one process alone draws."""
    shifted = []
    for seed in seeds:
        state = np.array(seed)
        flat = state.reshape(-1)
        flat[0] = (int(flat[0]) + 0x9E3779B9 * worker) % 2**32
        shifted.append(state)
    return shifted
