"""The parameter-server backend of a process that trains: a worker, or the one in-graph client."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends import AtBoundary, Interval, StepOutput
from hvps.backends.identity import compare, flattened
from hvps.backends.ps.boundaries import Boundaries
from hvps.backends.ps.drivers import Driver, Outcome, SyncDriver, make_driver
from hvps.backends.ps.graph import PsGraph, Shape
from hvps.backends.ps.lanes import Lanes
from hvps.backends.ps.lost import lost_or_same
from hvps.backends.ps.member import Member
from hvps.backends.ps.reports import Reports
from hvps.backends.ps.rounds import Participants, RoundCloser
from hvps.backends.ps.served_model import ServedModel
from hvps.backends.whole_state import by_path, seed_variables, whole_state
from hvps.errors import ConfigError
from hvps.log import logger
from hvps.position import START, Position

if TYPE_CHECKING:
    from hvps.batches import Batch, Feed
    from hvps.config import Config
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
        self._config, self._options, self._run = config, config.backend, run
        self._in_graph = self._options.replication == "in_graph"
        self._sync = self._options.update == "sync"
        self._rounds = self._sync and not self._in_graph
        self.engine = f"{_WORDS[self._options.update]}, {_WORDS[self._options.replication]}"
        self.stopped_by: str | None = None
        self.completes_dealt_steps = True
        self._participants = Participants(
            self.cluster.size, self._options.worker_steps, self._options.backup_workers
        )
        self._reports = Reports()
        self._own_steps = self._dealt = self._agreements = self._broadcasts = 0
        self._start, self._position = START, START
        self._boundaries = Boundaries()
        self._places: dict[int, tuple[int, int]] = {}  # (epoch, number in it) of the last steps
        self._stop_sent = self._settled = False
        self._learning_rate = 0.0

    @property
    def _chief(self) -> bool:
        return self.cluster.is_root

    # --- what this process reads ---

    @property
    def train_share(self) -> tuple[int, int]:
        """(rank, ranks) among which a batch is divided; asynchronously each worker computes whole
        batches."""
        return (self.cluster.rank, self.cluster.size) if self._rounds else (0, 1)

    @property
    def reading_share(self) -> tuple[int, int]:
        """The same for data that can only be read in order."""
        return (0, 1) if self._in_graph else (self.cluster.rank, self.cluster.size)

    @property
    def eval_share(self) -> tuple[int, int] | None:
        return (0, 1) if self._chief else None

    @property
    def batch_parts(self) -> tuple[str, int]:
        workers = len(self._member.tasks.worker)
        devices = max(1, len(self._options.devices))
        parts = workers if self._sync else 1
        words = f"{workers} workers" if self._sync else f"1 of {workers} workers"
        if devices > 1 and self._in_graph and not self._sync:
            return f"1 of {workers * devices} towers", 1
        return (words, parts) if devices == 1 else (f"{words} × {devices} devices", parts * devices)

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
        workers = len(self._member.tasks.worker)
        graph = self._graph = PsGraph(
            shape=self._shape(),
            model=model,
            optimizer=optimizer,
            loss=loss,
            example=example,
            clip_on_worker=not self._sync,
            state_moves=not self._sync and (workers > 1 or self._options.pipeline > 1),
        )
        seeds = [np.asarray(v) for v in graph.seed_variables]
        with graph.graph.as_default():
            self._driver: Driver = make_driver(graph, self._member, self._options, seeds)
            self._counts = [s.iterations.read_value() for s in graph.parameters.shards]
            self._counts += [graph.counters.step.read_value()]
        if self._in_graph:
            self._member.wait_for_workers(self._options.stall_timeout)
        # A session depends on all ps, and on no worker but those that it runs.
        mine = "/job:worker" if self._in_graph else f"/job:worker/task:{self.cluster.rank}"
        self._session = self._member.session(
            graph.graph, log_placement=self._options.log_placement, filters=["/job:ps", mine]
        )
        self._driver.start(self._session)
        self._served = ServedModel(graph, self._session, model, optimizer)
        if self._chief:
            logger.info(graph.placement.describe())

    def _shape(self) -> Shape:
        tasks, accumulate = self._member.tasks, self._config.train.accumulate
        shares = accumulate  # of one tower
        if self._sync or not self._in_graph:
            shares *= max(1, len(self._options.devices))
        if self._sync:
            shares *= len(tasks.worker)
        return Shape(
            num_ps=len(tasks.ps),
            num_workers=len(tasks.worker),
            accumulate=accumulate,
            shares=shares,
            prefix=run_prefix(self._run),
        )

    def _compare(self, mine: dict[str, str]) -> None:
        """All workers were started alike, or they would train different models."""
        key = f"identity/{self._run}"
        if self._chief:
            self._control.publish(key, mine)
        else:
            compare(self._control.lookup(key), mine, "worker 0", self.cluster.name)

    # --- the work ---

    def work(
        self,
        feed: Feed,
        *,
        start: Position,
        total: int | None,
        epochs: int | None,
        schedule: Schedule,
    ) -> Iterator[Batch]:
        """This process's batches, as the coordinator deals them out."""
        self._check_worker_steps(total)
        self._start, self._feed, self._own_steps = start, feed, start.step
        if self._chief:
            self._begin_run(total)
        self._served.assign(self._driver.local)
        joined = self._call("join")
        if joined["back"]:
            logger.info("%s is back: %d steps done before", self.cluster.name, joined["finished"])
        self._lanes = Lanes(self._driver.lanes, self._run_step)
        self._closer: RoundCloser | None = None
        if self._chief and isinstance(self._driver, SyncDriver):
            self._closer = RoundCloser(
                driver=self._driver,
                member=self._member,
                run=self._run,
                participants=self._participants,
                start=start.step,
                total=total,
                learning_rate=schedule,
                examples=feed.examples_in,
                closed=self._round_closed,
            )
        deal = self._deal if self._rounds else None
        done = joined["finished"]
        for batch in feed.dealt(self._claims(), deal=deal, epochs=epochs, done=done):
            self._places = {**self._places, batch.step: (batch.epoch, batch.within)}
            if len(self._places) > 64:
                self._places = {s: p for s, p in self._places.items() if s > batch.step - 32}
            yield batch

    def _check_worker_steps(self, total: int | None) -> None:
        limits = self._options.worker_steps
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
        workers, between = len(self._member.tasks.worker), not self._in_graph
        dealing = workers if between else 1  # those who ask for steps
        spec = {
            "workers": dealing,
            "start": self._start.step,
            "total": total,
            "update": self._options.update if between else "async",
            "max_staleness": self._options.max_staleness,
            "worker_steps": self._options.worker_steps,
            "by_worker": self._steps_before(dealing),
        }
        self._control.call("begin_run", number=self._run, spec=spec)
        counters, by_worker = self._graph.counters, np.zeros(workers, np.int64)
        by_worker[:dealing] = spec["by_worker"] or 0
        self._served.push()
        self._served.assign(
            [
                (counters.step, np.int64(self._start.step)),
                (counters.by_worker, by_worker),
                *self._driver.shared,
            ]
        )
        if isinstance(self._driver, SyncDriver):
            self._driver.open_round(self._start.step)
        self._iterations_before = int(self._optimizer.iterations)
        self._control.call("set_ready", number=self._run)

    def _steps_before(self, workers: int) -> list[int] | None:
        """What each worker did before the run was broken off.

        Raises:
            ConfigError: that matters, and is not known for these workers.
        """
        known = self._start.by_worker
        if known is not None and len(known) == workers:
            return list(known)
        if self._start.step and not self._rounds and self._feed.divided_among_readers:
            raise ConfigError(
                "run.resume: data that is read in order was divided otherwise",
                rule="each asynchronous worker goes on where it was in its part of the dataset",
                received=f"{workers} workers now; the checkpoint is of "
                + (f"{len(known)}" if known else "another way of training"),
                do="resume with as many workers, or give the data as arrays",
            )
        return None

    def _claims(self) -> Iterator[int]:
        """Steps for this process, until there are none left or all were asked to stop."""
        while True:
            answer = self._call("claim", done=self._reports.take())
            if "end" in answer:
                self.stopped_by = answer["end"]
                return
            if "hold" in answer:
                self._wait_at_boundary()
                continue
            self._dealt += 1
            yield int(answer["step"])

    # --- moments at which nothing is under way ---

    def at_boundary(self, step: int, call: AtBoundary) -> None:
        if self._settled:
            call(self._position, self.state())
            return
        self._boundaries.add(step, call)
        if not self._rounds:
            self._control.call("hold", number=self._run, step=step)

    def _wait_at_boundary(self) -> None:
        """In the thread that asks for steps: finish those that were dealt, and wait for the others;
        the chief then has the state saved."""
        self._reports.wait_for(self._dealt)
        answer = self._call("held", done=self._reports.take())
        if self._chief and "step" in answer:
            by_worker = answer["by_worker"]
            self._call_boundary(answer["step"], self._examples_of(answer), by_worker)
            self._control.call("release", number=self._run)
            if self._boundaries.due(None):  # asked for meanwhile, and released with this one
                self._control.call("hold", number=self._run, step=0)

    def _round_closed(self, rounds: int) -> None:
        if self._boundaries.due(rounds):
            self._call_boundary(rounds, None, None)

    def _call_boundary(self, step: int, examples: int | None, by_worker: list[int] | None) -> None:
        position = self._position_at(step, examples, by_worker)
        for call in self._boundaries.take(step):
            call(position, self._snapshot())

    def _position_at(
        self, step: int, examples: int | None, by_worker: list[int] | None
    ) -> Position:
        """Where the run is after `step` updates.

        Args:
            examples: in the steps of this life, or None: all that those steps had.
        """
        if examples is None:
            examples = sum(map(self._feed.examples_in, range(self._start.step, step)))
        per_epoch = self._feed.steps_per_epoch
        if step and per_epoch:
            epoch, within = divmod(step - 1, per_epoch)
        else:
            epoch, within = self._places.get(step - 1, (0, step - 1))
        return Position(
            step,
            epoch,
            within + 1,
            self._start.examples + examples,
            tuple(by_worker) if by_worker is not None and len(by_worker) > 1 else None,
        )

    def _examples_of(self, answer: dict[str, Any]) -> int:
        """All that were trained on in this life, those included whose worker died before it could
        say so."""
        return answer["examples"] + sum(map(self._feed.examples_in, answer["unreported"]))

    def _snapshot(self) -> dict[str, np.ndarray]:
        """The whole state, while the eager model may be in use."""
        state = self._served.snapshot()
        names = {id(v): name for name, v in seed_variables(self._model).items()}
        seeds = zip(self._graph.seed_variables, self._driver.seed_states, strict=True)
        return state | {names[id(variable)]: np.array(value) for variable, value in seeds}

    def _deal(self, step: int) -> tuple[int, int]:
        return self._participants.share(self.cluster.rank, step)

    def _call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask the coordinator something about this worker's part in the run."""
        return self._control.call(verb, number=self._run, worker=self.cluster.rank, **arguments)

    # --- a step ---

    def train_step(
        self, batch: Batch, *, learning_rate: float, stop: tuple[bool, bool]
    ) -> Future[StepOutput]:
        if any(stop) and not self._stop_sent:
            self._stop_sent = True
            self.stop("SIGTERM" if stop[0] else "SIGINT")
        self._learning_rate = learning_rate
        self._own_steps += 1
        return self._lanes.submit(batch, learning_rate)

    def _run_step(self, lane: int, batch: Batch, learning_rate: float) -> StepOutput:
        try:
            outcome = self._step(lane, batch, learning_rate)
        except tf.errors.OpError as err:
            raise lost_or_same(err) from err
        if outcome is None:
            return StepOutput(0.0, 0.0, 0.0, 0.0)
        self._reports.add(outcome, self._examples_in(batch))
        if self._options.update == "bounded":  # others may be waiting for this step
            logger.debug("has finished step %d", batch.step)
            self._call("report", done=self._reports.take())
        return StepOutput(outcome.loss_sum, 0.0, 0.0, 0.0)

    def _step(self, lane: int, batch: Batch, learning_rate: float) -> Outcome | None:
        if isinstance(self._driver, SyncDriver):
            answer = self._call("round", step=batch.step)
            if answer["late"]:
                return None  # the last round was over before this step began
            needed = self._participants.needed(answer["round"])
            return self._driver.push(batch, learning_rate, answer["round"], needed)
        if self._options.update == "bounded":
            self._call("begin")
            logger.debug("begins step %d", batch.step)
        return self._driver.run(lane, batch, learning_rate)

    def _examples_in(self, batch: Batch) -> int:
        """True examples that this process has computed."""
        if self._rounds:
            return int(sum(float(np.sum(m.weight)) for m in batch.micros))
        return batch.examples

    def read(self, output: Future[StepOutput]) -> StepOutput:
        return output.result()

    @property
    def depth(self) -> int:
        return self._driver.lanes

    def interval(self, own: Interval) -> tuple[Interval, dict[str, float]]:
        """The chief shows what all workers did since it last asked."""
        if not self._chief:
            return own, {}
        done = self._reports.take()
        if done is not None:
            self._call("report", done=done)
        since = self._control.call("interval", number=self._run)
        news = self._control.call("news")["text"]
        if news:
            logger.warning("%s; the others go on", news)
        together = Interval(
            loss_sum=since["loss_sum"],
            loss_examples=since["examples"],
            steps=since["steps"],
            skipped=0,
            examples=since["examples"],
            seconds=own.seconds,
        )
        if self._sync:
            return together, {}
        return together, {name: float(since[name]) for name in ("staleness_mean", "staleness_max")}

    # --- the end ---

    def stop(self, reason: str) -> None:
        """Ask all workers to end with the steps that they have begun."""
        self._control.call("stop", number=self._run, reason=reason)

    def settle(self) -> None:
        """All steps of all workers are done; the chief gets the weights."""
        self._lanes.drain()
        self._lanes.close()
        if self._closer is not None:
            rounds = self._own_steps
            if not self.stopped_by:
                rounds = self._participants.last(rounds) or rounds
            self._closer.wait_for(rounds, self._options.stall_timeout)
        self._call("leave", done=self._reports.take())
        if not self._chief:
            return
        self._wait_for_others()
        self.sync_model()
        self._settled = True
        self._summary = self._control.call("summary", number=self._run)
        *iterations, self._steps = (int(n) for n in self._session.run(self._counts))
        # Every shard must have seen every step that was counted, and every step that a worker says
        # it has done must have been counted.
        counted = self._steps - self._start.step
        reported = 0 if self._rounds else int(self._summary["steps"]) - counted
        self._lost = max(counted - (min(iterations) - self._iterations_before), reported, 0)
        by_worker = None if self._rounds else self._summary["worker_steps"]
        self._position = self._position_at(self._steps, self._examples_of(self._summary), by_worker)

    def finalize(self) -> None:
        if self._chief:
            self._optimizer.finalize_variable_values(self._model.trainable_variables)

    def _wait_for_others(self) -> None:
        answer = self._control.call(
            "wait_for_others", number=self._run, seconds=self._options.stall_timeout
        )
        for worker in answer["absent"]:
            logger.warning("worker %d never came; training has ended without it", worker)

    def totals(self) -> dict[str, int]:
        """Steps and examples of all workers together."""
        if not self._chief:
            return {}
        return {"steps": self._steps, "examples": self._position.examples}

    def report(self) -> dict[str, Any]:
        """What result.json says of this backend's part."""
        summary, graph, tasks = self._summary, self._graph, self._member.tasks
        rows = self._reports.rows_per_step * graph.row_bytes()
        one_way = round(graph.parameters.dense_bytes + graph.state.bytes + rows)
        by_worker = summary["worker_steps"]
        if not self._rounds:
            by_worker = self._session.run(graph.counters.by_worker).tolist()
        return {
            "ps": len(tasks.ps),
            "workers": len(tasks.worker),
            "update": self._options.update,
            "replication": self._options.replication,
            "staleness": {
                "histogram": summary["staleness_histogram"],
                "mean": summary["staleness_mean"],
                "max": summary["staleness_max"],
            },
            "max_lead": summary["max_lead"],
            "worker_steps": by_worker,
            "worker_deaths": summary["worker_deaths"],
            "dropped_gradients": summary["dropped_gradients"],
            "lost_updates": self._lost,
            "bytes_per_step": {"pull": one_way, "push": one_way},
            "bytes_by_ps": list(graph.placement.bytes_by_ps),
        }

    # --- the same as other backends ---

    def reduce(self, sums: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The chief evaluates alone."""
        return [np.asarray(value) for value in sums]

    def agree(self, count: int) -> int:
        if not self._rounds:
            return count
        self._agreements += 1
        key = f"{self._run}/{self._agreements}"
        answer = self._control.call("add_up", key=key, value=count, parties=self.cluster.size)
        return int(answer["sum"])

    def broadcast(self, value: Any) -> Any:
        self._broadcasts += 1
        key = f"broadcast/{self._run}/{self._broadcasts}"
        if self._chief:
            self._control.publish(key, base64.b64encode(pickle.dumps(value)).decode())
            return value
        return pickle.loads(base64.b64decode(self._control.lookup(key)))

    def check_weights(self) -> None:
        """There is one copy of the weights."""

    def sync_model(self) -> None:
        """Chief: bring weights, slots and counts from the parameter servers to the eager model."""
        if not self._chief or self._settled:
            return
        self._served.pull()
        seeds = zip(self._graph.seed_variables, self._driver.seed_states, strict=True)
        for variable, value in seeds:
            variable.assign(value)
        self._optimizer.learning_rate.assign(self._learning_rate)

    def state(self) -> dict[str, np.ndarray]:
        self.sync_model()
        variables = whole_state(self._model, self._optimizer)
        return {name: np.asarray(v.value.numpy()) for name, v in variables.items()}

    def barrier(self) -> None:
        """Nobody has to wait: the chief keeps the files, and the ps stay until it is done."""

    def close(self) -> None:
        """The chief lets all others go."""
        self._session.close()
        if self._chief:
            self._control.call("finish")
        self._control.leave()


_WORDS = {
    "async": "asynchronous",
    "sync": "synchronous",
    "bounded": "bounded staleness",
    "between_graph": "between-graph",
    "in_graph": "in-graph",
}


def run_prefix(run: int) -> str:
    """Of all names that tasks share in a run."""
    return f"hvps_{run}"
