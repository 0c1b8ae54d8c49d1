"""The parameter-server backend of a process that trains: a worker, or the one in-graph client."""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends import Interval, StepOutput
from hvps.backends.identity import compare, flattened
from hvps.backends.local import by_path
from hvps.backends.ps.drivers import Driver, Outcome, SyncDriver, make_driver
from hvps.backends.ps.graph import PsGraph, Shape
from hvps.backends.ps.lanes import Lanes
from hvps.backends.ps.member import Member
from hvps.backends.ps.shards import Source
from hvps.errors import ConfigError, PeerLostError
from hvps.log import logger

if TYPE_CHECKING:
    from hvps.config import Config
    from hvps.data import Batch, Feed
    from hvps.schedule import Schedule


class PsBackend:
    """Trains on a cluster of TensorFlow servers.

    Args:
        member: this process in the cluster.
        config: the run's configuration.
        run: number of the training on this cluster, alike in all its processes.
    """

    name = "ps"

    def __init__(self, member: Member, config: Config, run: int = 0) -> None:
        assert member.control is not None, "ps 0 serves"
        self._member, self._control = member, member.control
        self.cluster = member.cluster
        self._config, self._run = config, run
        self._in_graph = config.backend.replication == "in_graph"
        self._sync = config.backend.update == "sync"
        self.engine = f"{_WORDS[config.backend.update]}, {_WORDS[config.backend.replication]}"
        self.stopped_by: str | None = None
        self.completes_dealt_steps = self._sync and not self._in_graph
        self._lock = threading.Lock()
        self._unreported: list[Outcome] = []
        self._unreported_examples = 0
        self._rows = self._own_steps = self._agreements = self._broadcasts = 0
        self._stop_sent = self._settled = False
        self._learning_rate = 0.0

    # --- what this process reads ---

    @property
    def chief(self) -> bool:
        return self.cluster.is_root

    @property
    def train_share(self) -> tuple[int, int]:
        """(rank, ranks) among which a batch is divided; asynchronously each worker computes whole
        batches."""
        divided = self._sync and not self._in_graph
        return (self.cluster.rank, self.cluster.size) if divided else (0, 1)

    @property
    def reading_share(self) -> tuple[int, int]:
        """The same for data that can only be read in order."""
        return (0, 1) if self._in_graph else (self.cluster.rank, self.cluster.size)

    @property
    def eval_share(self) -> tuple[int, int] | None:
        return (0, 1) if self.chief else None

    # --- setup ---

    def setup(
        self,
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable[[Any, Any], Any],
        identity: dict[str, Any],
        example: tuple[Any, Any],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        layout = {n: f"{v.dtype} {tuple(v.shape)}" for n, v in by_path(model.weights).items()}
        self._compare(flattened({**identity, "variables": layout}))
        backend, tasks = self._config.backend, self._member.tasks
        towers = max(1, len(backend.devices)) * self._config.train.accumulate
        together = len(tasks.worker) if self._sync else 1
        if self._in_graph and not self._sync:
            towers = self._config.train.accumulate
        self._graph = PsGraph(
            shape=Shape(
                num_ps=len(tasks.ps),
                num_workers=len(tasks.worker),
                accumulate=self._config.train.accumulate,
                shares=together * towers,
                prefix=run_prefix(self._run),
            ),
            model=model,
            optimizer=optimizer,
            loss=loss,
            example=example,
            clip_on_worker=not self._sync,
            state_moves=not self._sync and (len(tasks.worker) > 1 or backend.pipeline > 1),
        )
        seeds = [np.asarray(v) for v in self._graph.seed_variables]
        with self._graph.graph.as_default():
            self._driver: Driver = make_driver(self._graph, self._member, backend, seeds)
            self._checks = [s.iterations.read_value() for s in self._graph.parameters.shards]
            self._checks += [self._graph.counters.step.read_value()]
        if self._in_graph:
            self._member.wait_for_workers(backend.stall_timeout)
        self._session = self._member.session(
            self._graph.graph, log_placement=backend.log_placement, filters=self._filters()
        )
        self._driver.start(self._session)
        if self.chief:
            logger.info(self._graph.placement.describe())

    def _filters(self) -> list[str]:
        """A session depends on all ps, and on no worker but those that it runs."""
        return [
            "/job:ps",
            "/job:worker" if self._in_graph else f"/job:worker/task:{self.cluster.rank}",
        ]

    def _compare(self, mine: dict[str, str]) -> None:
        """All workers were started alike, or they would train different models."""
        key = f"identity/{self._run}"
        if self.chief:
            self._control.publish(key, mine)
        else:
            compare(self._control.lookup(key), mine, "worker 0", self.cluster.name)

    def _assign(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Set variables to values, some megabytes in each run of the session."""
        values = [(variable, np.asarray(value)) for variable, value in pairs]
        with self._graph.graph.as_default():
            places = [
                tf.compat.v1.placeholder(v.dtype.base_dtype, v.shape.as_list()) for v, _ in values
            ]
            assigns = [v.assign(p).op for (v, _), p in zip(values, places, strict=True)]
        batch: list[int] = []
        size = 0
        for i, (_, value) in enumerate(values):
            batch.append(i)
            size += np.asarray(value).nbytes
            if size > _ASSIGN_BYTES or i == len(values) - 1:
                feeds = {places[j]: values[j][1] for j in batch}
                self._session.run([assigns[j] for j in batch], feeds)
                batch, size = [], 0

    def _sources(self) -> list[Source]:
        found: list[Source] = []
        for shard in self._graph.parameters.shards:
            found += shard.sources(self._graph.parameters.weights, self._optimizer)
        state = zip(self._graph.state.values, self._graph.changing, strict=True)
        return found + [Source(variable, whole, None) for variable, whole in state]

    # --- the work ---

    def work(
        self, feed: Feed, *, total: int | None, epochs: int | None, schedule: Schedule
    ) -> Iterator[Batch]:
        """This process's batches, as the coordinator deals them out."""
        self._schedule, self._feed = schedule, feed
        self._check_worker_steps(total)
        if self.chief:
            self._begin_run(total)
        self._assign(self._driver.local)
        joined = self._control.call("join", number=self._run, worker=self.cluster.rank)
        if joined["finished"]:
            logger.info("%s is back: %d steps done before", self.cluster.name, joined["finished"])
        self._lanes = Lanes(self._driver.lanes, self._run_step)
        if self._sync and not self._in_graph and self.chief:
            self._applier_failed: BaseException | None = None
            threading.Thread(target=self._close_rounds, args=(total,), daemon=True).start()
        deal = self._round_share if self._sync and not self._in_graph else None
        yield from feed.dealt(self._claims(), deal=deal, epochs=epochs, done=joined["finished"])

    def _check_worker_steps(self, total: int | None) -> None:
        limits = self._config.backend.worker_steps
        if limits is None or total is None:
            return
        given = max(limits) if self._sync else sum(limits)
        if given != total:
            word = "the largest" if self._sync else "their sum"
            raise ConfigError(
                f"backend.worker_steps: {word} is {given}, but training has {total} steps",
                rule="synchronous workers take part in rounds, others divide the steps",
                received=f"{limits}",
                do=f"make {word} {total}, or set train.steps={given}",
            )

    def _begin_run(self, total: int | None) -> None:
        backend, tasks = self._config.backend, self._member.tasks
        between = not self._in_graph
        spec = {
            "workers": len(tasks.worker) if between else 1,
            "total": total,
            "update": backend.update if between else "async",
            "tolerant": between and not self._sync,
            "max_staleness": backend.max_staleness,
            "worker_steps": backend.worker_steps,
        }
        self._control.call("begin_run", number=self._run, spec=spec)
        sources = self._sources()
        values = [(s.variable, _part_of(np.asarray(s.whole), s.key)) for s in sources]
        counters = self._graph.counters
        values += [(counters.step, np.int64(0))]
        values += [(counters.by_worker, np.zeros(len(tasks.worker), np.int64))]
        self._assign([*values, *self._driver.shared])
        self._control.call("set_ready", number=self._run)

    def _claims(self) -> Iterator[int]:
        """Steps for this process, until there are none left or all were asked to stop."""
        while True:
            answer = self._control.call(
                "claim", number=self._run, worker=self.cluster.rank, done=self._take_report()
            )
            if "end" in answer:
                self.stopped_by = answer["end"]
                return
            yield int(answer["step"])

    def _round_share(self, step: int) -> tuple[int, int]:
        """(rank, ranks) among the workers that take part in a synchronous round."""
        limits = self._config.backend.worker_steps
        if limits is None:
            return self.cluster.rank, self.cluster.size
        active = [i for i, limit in enumerate(limits) if limit > step]
        return active.index(self.cluster.rank), len(active)

    def _participants(self, step: int) -> int:
        limits = self._config.backend.worker_steps
        active = self.cluster.size if limits is None else sum(n > step for n in limits)
        return max(1, active - self._config.backend.backup_workers)

    def train_step(
        self, batch: Batch, *, learning_rate: float, stop: tuple[bool, bool]
    ) -> Future[StepOutput]:
        if any(stop) and not self._stop_sent:
            self._stop_sent = True
            self.stop("SIGTERM" if stop[0] else "SIGINT")
        self._learning_rate = learning_rate
        index, self._own_steps = self._own_steps, self._own_steps + 1
        return self._lanes.submit(batch, learning_rate, index)

    def _run_step(self, lane: int, batch: Batch, learning_rate: float, index: int) -> StepOutput:
        try:
            outcome = self._step(lane, batch, learning_rate, index)
        except tf.errors.OpError as err:
            raise lost_or_same(err) from err
        if outcome.skipped:
            return StepOutput(0.0, 0.0, 0.0, 0.0)
        with self._lock:
            self._unreported.append(outcome)
            self._unreported_examples += 0 if outcome.dropped else self._examples_in(batch)
            self._rows += outcome.rows
        if self._config.backend.update == "bounded":
            self._report()
        return StepOutput(outcome.loss_sum, 0.0, 0.0, 0.0)

    def _step(self, lane: int, batch: Batch, learning_rate: float, index: int) -> Outcome:
        if isinstance(self._driver, SyncDriver):
            answer = self._call_round("round", step=batch.step)
            round_ = answer["round"]
            if answer["late"]:
                return Outcome(0.0, None, 0, skipped=True)
            return self._driver.push(batch, learning_rate, round_, self._participants(round_))
        if self._config.backend.update == "bounded":
            self._call_round("begin")
            logger.debug("begins step %d at %.6f", index, time.monotonic())
        outcome = self._driver.run(lane, batch, learning_rate, index)
        if self._config.backend.update == "bounded":
            logger.debug("has finished step %d at %.6f", index, time.monotonic())
        return outcome

    def _call_round(self, verb: str, **arguments: Any) -> dict[str, Any]:
        return self._control.call(verb, number=self._run, worker=self.cluster.rank, **arguments)

    def _examples_in(self, batch: Batch) -> int:
        if self._sync and not self._in_graph:
            return int(sum(float(np.sum(m.weight)) for m in batch.micros))
        return batch.examples

    def _close_rounds(self, total: int | None) -> None:
        """Chief, synchronous: apply the sum of each round when enough gradients are there."""
        assert isinstance(self._driver, SyncDriver)
        limits = self._config.backend.worker_steps
        last = max(limits) if limits else total
        step = 0
        try:
            while last is None or step < last:
                examples = self._feed.examples_in(step)
                done = self._driver.close_round(
                    self._participants(step), self._schedule(step), examples
                )
                step = done + 1
                self._control.call("applied", number=self._run, rounds=step)
        except tf.errors.CancelledError:
            return
        except BaseException as err:
            self._applier_failed = (
                err if not isinstance(err, tf.errors.OpError) else lost_or_same(err)
            )

    # --- reports ---

    def _take_report(self) -> dict[str, Any] | None:
        with self._lock:
            outcomes, self._unreported = self._unreported, []
            examples, self._unreported_examples = self._unreported_examples, 0
        if not outcomes:
            return None
        kept = [o for o in outcomes if not o.dropped]
        staleness = Counter(str(o.staleness) for o in kept if o.staleness is not None)
        return {
            "steps": len(kept),
            "dropped": len(outcomes) - len(kept),
            "examples": examples,
            "loss_sum": sum(o.loss_sum for o in kept),
            "staleness": dict(staleness),
        }

    def _report(self) -> None:
        done = self._take_report()
        if done is not None:
            self._call_round("report", done=done)

    def read(self, output: Future[StepOutput]) -> StepOutput:
        return output.result()

    @property
    def depth(self) -> int:
        """Outputs that may be left unread while further steps are handed in."""
        return self._driver.lanes

    def interval(self, own: Interval) -> tuple[Interval, dict[str, float]]:
        """The chief shows what all workers did since it last asked."""
        if not self.chief:
            return own, {}
        self._report()
        since = self._control.call("interval", number=self._run)
        news = self._control.call("news")["text"]
        if news:
            logger.warning("%s; the others go on", news)
        steps = since["steps"]
        together = Interval(
            loss_sum=since["loss_sum"],
            loss_examples=since["examples"],
            steps=steps,
            skipped=0,
            examples=since["examples"],
            seconds=own.seconds,
        )
        if self._sync:
            return together, {}
        return together, {
            "staleness_mean": since["staleness_mean"],
            "staleness_max": float(since["staleness_max"]),
        }

    # --- the end ---

    def stop(self, reason: str) -> None:
        """Ask all workers to end with the steps that they have begun."""
        self._control.call("stop", number=self._run, reason=reason)

    def finalize(self) -> None:
        """All steps of all workers are done; the chief gets the weights."""
        self._lanes.drain()
        self._lanes.close()
        if self._sync and not self._in_graph:
            self._finish_rounds()
        done = self._take_report()
        self._call_round("leave", done=done)
        if self.chief:
            self._wait_for_others()
            self.sync_model()
            self._optimizer.finalize_variable_values(self._model.trainable_variables)
            self._summary = self._control.call("summary", number=self._run)
            self._lost = self._count_lost()
        self._settled = True

    def _finish_rounds(self) -> None:
        if not self.chief:
            return
        rounds = self._own_steps
        limits = self._config.backend.worker_steps
        if limits and not self.stopped_by:
            rounds = max(limits)
        seconds, seen = self._config.backend.stall_timeout, -1
        deadline = time.monotonic()
        while self._applier_failed is None:
            before, seen = seen, int(self._session.run(self._checks[-1]))
            if seen >= rounds:
                return
            if seen != before:
                deadline = time.monotonic() + seconds
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        if self._applier_failed is not None:
            raise self._applier_failed
        raise PeerLostError(
            f"round {rounds} was not completed",
            rule="every worker takes part in every round",
            received=f"{seconds:g} s without the gradients of round {seen + 1}",
            do="look at the output of the other workers",
        )

    def _wait_for_others(self) -> None:
        seconds = self._config.backend.stall_timeout
        answer = self._control.call("wait_for_others", number=self._run, seconds=seconds)
        for worker in answer["absent"]:
            logger.warning("worker %d never came; training has ended without it", worker)

    def _count_lost(self) -> int:
        *iterations, step = (int(n) for n in self._session.run(self._checks))
        return (
            max(step - min(iterations), int(self._summary["steps"]) - step, 0)
            if not (self._sync)
            else max(0, step - min(iterations))
        )

    def totals(self) -> dict[str, int]:
        """Steps and examples of all workers together."""
        if not self.chief:
            return {}
        *_, step = self._session.run(self._checks)
        return {"steps": int(step), "examples": int(self._summary["examples"])}

    def report(self) -> dict[str, Any]:
        """What result.json says of this backend's part."""
        summary, backend = self._summary, self._config.backend
        tasks = self._member.tasks
        steps = max(1, self._own_steps)
        rows = self._rows / steps * self._graph.row_bytes()
        down = self._graph.parameters.dense_bytes + rows + self._graph.state.bytes
        return {
            "ps": len(tasks.ps),
            "workers": len(tasks.worker),
            "update": backend.update,
            "replication": backend.replication,
            "staleness": {
                "histogram": summary["staleness_histogram"],
                "mean": summary["staleness_mean"],
                "max": summary["staleness_max"],
            },
            "max_lead": summary["max_lead"],
            "worker_steps": self._worker_steps(),
            "worker_deaths": summary["worker_deaths"],
            "dropped_gradients": summary["dropped_gradients"],
            "lost_updates": self._lost,
            "bytes_per_step": {"pull": round(down), "push": round(down)},
            "bytes_by_ps": list(self._graph.placement.bytes_by_ps),
        }

    def _worker_steps(self) -> list[int]:
        if self._sync and not self._in_graph:
            return list(self._summary["worker_steps"])
        return [int(n) for n in self._session.run(self._graph.counters.by_worker)]

    # --- the same as other backends ---

    def reduce(self, sums: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The chief evaluates alone."""
        return [np.asarray(value) for value in sums]

    def agree(self, count: int) -> int:
        if self._in_graph or not self._sync:
            return count
        self._agreements += 1
        answer = self._control.call(
            "add_up",
            key=f"{self._run}/{self._agreements}",
            value=count,
            parties=self.cluster.size,
        )
        return int(answer["sum"])

    def broadcast(self, value: Any) -> Any:
        self._broadcasts += 1
        key = f"broadcast/{self._run}/{self._broadcasts}"
        if self.chief:
            self._control.publish(key, base64.b64encode(pickle.dumps(value)).decode())
            return value
        return pickle.loads(base64.b64decode(self._control.lookup(key)))

    def check_weights(self) -> None:
        """There is one copy of the weights."""

    def sync_model(self) -> None:
        """Chief: bring weights, slots and counts from the parameter servers to the eager model."""
        if not self.chief or self._settled:
            return
        sources = self._sources()
        wholes: dict[int, Any] = {}
        pending: list[Source] = []
        size = 0
        for i, source in enumerate(sources):
            pending.append(source)
            size += int(np.prod(source.variable.shape.as_list())) * source.variable.dtype.size
            if size > _ASSIGN_BYTES or i == len(sources) - 1:
                with self._graph.graph.as_default():
                    values = self._session.run([s.variable for s in pending])
                for part, value in zip(pending, values, strict=True):
                    _put(wholes, part, value)
                pending, size = [], 0
        for whole, value in wholes.values():
            whole.assign(value)
        for variable, value in zip(
            self._graph.seed_variables, self._driver.seed_states, strict=True
        ):
            variable.assign(value)
        self._optimizer.learning_rate.assign(self._learning_rate)

    def variables(self) -> dict[str, keras.Variable]:
        return {
            **by_path(self._model.variables, "model/"),
            **by_path(self._optimizer.variables, "optimizer/"),
        }

    def state(self) -> dict[str, np.ndarray]:
        self.sync_model()
        return {name: np.asarray(v) for name, v in self.variables().items()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Set what `state()` returned, before the work begins."""
        variables = self.variables()
        if state.keys() != variables.keys():
            raise ValueError(f"names differ: {sorted(state.keys() ^ variables.keys())}")
        for name, variable in variables.items():
            variable.assign(state[name])

    def barrier(self) -> None:
        """Nobody has to wait: the chief keeps the files, and the ps stay until it is done."""

    def close(self) -> None:
        """The chief lets all others go."""
        self._session.close()
        if self.chief:
            self._control.call("finish")
        self._control.leave()


_ASSIGN_BYTES = 64 << 20
_WORDS = {
    "async": "asynchronous", "sync": "synchronous", "bounded": "bounded staleness",
    "between_graph": "between-graph", "in_graph": "in-graph",
}  # fmt: skip


def run_prefix(run: int) -> str:
    """Of all names that tasks share in a run."""
    return f"hvps_{run}"


def lost_or_same(err: tf.errors.OpError) -> Exception:
    """A lost connection in our words; other errors as they are."""
    gone = (
        tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError,
        tf.errors.FailedPreconditionError, tf.errors.DeadlineExceededError,
    )  # fmt: skip
    if not isinstance(err, gone):
        return err
    return PeerLostError(
        "lost contact with another task",
        rule="training needs every parameter server",
        received=str(err).splitlines()[0][:300],
        do="look for the first error in the output of the other tasks",
    )


def _part_of(value: np.ndarray, key: tuple[slice, ...] | None) -> np.ndarray:
    return value if key is None else value[key]


def _put(wholes: dict[int, Any], source: Source, value: np.ndarray) -> None:
    """Collect the parts of a whole variable."""
    key = id(source.whole)
    if source.key is None:
        wholes[key] = (source.whole, value)
        return
    if key not in wholes:
        wholes[key] = (source.whole, np.empty(tuple(source.whole.shape), value.dtype))
    wholes[key][1][source.key] = value
