"""The loop: steps, records, evaluations, and an agreed stop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras

from hvps.backends import Backend, Interval, StepOutput
from hvps.batches import Batch, Feed
from hvps.callbacks import EarlyStopping, check_finite
from hvps.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED
from hvps.evaluation import Evaluator
from hvps.metrics import Writers
from hvps.position import START, Position
from hvps.progress import Progress
from hvps.saver import Saver
from hvps.schedule import Schedule
from hvps.signals import StopSignals

if TYPE_CHECKING:
    from hvps.config import Config


@dataclass
class TrainingResult:
    """What came out of the loop.

    Attributes:
        steps: updates that were run.
        examples: true examples in them, over all ranks.
        evaluation: results of the last evaluation, by name.
        train_seconds: time in steps, without tracing the first one and without evaluations.
        timed_examples: examples in the steps that `train_seconds` counts.
        skipped_steps: updates left out for a non-finite float16 gradient, since this process began.
        stopped_by: why the loop ended before its end, or None.
    """

    steps: int = 0
    examples: int = 0
    evaluation: dict[str, float] = field(default_factory=dict)
    train_seconds: float = 0.0
    timed_examples: int = 0
    skipped_steps: int = 0
    stopped_by: str | None = None

    @property
    def examples_per_second(self) -> float:
        return self.timed_examples / self.train_seconds if self.train_seconds else 0.0

    @property
    def exit_code(self) -> int:
        codes = {"SIGTERM": EXIT_PREEMPTED, "SIGINT": EXIT_INTERRUPTED}
        return codes.get(self.stopped_by or "", EXIT_OK)


class Trainer:
    """Runs the steps that the configuration asks for on a backend that was set up."""

    def __init__(
        self,
        *,
        config: Config,
        model: keras.Model,
        backend: Backend,
        feed: Feed,
        schedule: Schedule,
        evaluator: Evaluator | None,
        writers: Writers,
        progress: Progress,
        signals: StopSignals,
        start: Position = START,
        saver: Saver | None = None,
    ) -> None:
        self._config, self._backend, self._feed = config, backend, feed
        self.model = model
        self._schedule, self._evaluator = schedule, evaluator
        self._writers, self._progress, self._signals = writers, progress, signals
        self._total = total_steps(config, feed)
        names = evaluator.names if evaluator else []
        self._early_stopping = EarlyStopping(config.train.early_stop, names)
        self._meter = _Meter(backend)
        self._result = TrainingResult(steps=start.step, examples=start.examples)
        self._start, self._saver = start, saver
        self._epoch = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the loop."""
        return {
            "epoch": self._epoch,
            "early_stop": list(self._early_stopping.state),
            "evaluation": self._result.evaluation,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a loop was that gave `state`."""
        self._epoch = state["epoch"]
        self._early_stopping.state = tuple(state["early_stop"])
        self._result.evaluation = dict(state["evaluation"])
        if self._early_stopping.is_over:
            self._result.stopped_by = "early_stop"

    def fit(self) -> TrainingResult:
        """Train to the end or to an agreed stop, save, evaluate, and leave the final weights in
        `model`.

        Raises:
            TrainingError: the loss is not finite, the ranks drifted apart or lost one another.
        """
        try:
            self.train_epochs()
        finally:
            self._progress.close()
        self._backend.settle()
        if self._saver:
            self._save(0, self._saver.save_last)
        self._backend.finalize()
        result, totals = self._result, self._backend.totals()
        result.steps = totals.get("steps", result.steps)
        result.examples = totals.get("examples", result.examples)
        self._backend.sync_model()
        if self._evaluator and result.stopped_by not in ("SIGTERM", "SIGINT"):
            self._evaluate()
            if self._saver:
                self._saver.note_last(result.evaluation)
        self._backend.check_weights()
        result.skipped_steps = self._meter.total_skipped
        self._writers.close()
        if self._saver:
            self._saver.close()
        return result

    def train_epochs(self) -> None:
        """The steps of the configuration, with records and the evaluations between them.

        Called again, it goes on with the same weights for as many steps more.
        """
        train, start = self._config.train, self._start
        self._result.steps, self._start = start.step, START
        self._epoch = self._epoch if start.step else 0
        work = self._backend.work(
            self._feed,
            start=start,
            total=start.step if self._result.stopped_by else self._total,
            epochs=None if train.steps else train.epochs,
            schedule=self._schedule,
        )
        for batch in work:
            if batch.epoch > self._epoch:
                self._epoch = batch.epoch
                if train.eval_every == "epoch":
                    self._evaluate_and_decide()
            if self._result.stopped_by is None or self._backend.completes_dealt_steps:
                self._step(batch)
        self._result.stopped_by = self._result.stopped_by or self._backend.stopped_by
        self._log_train()

    def _step(self, batch: Batch) -> None:
        train, result = self._config.train, self._result
        self._save_if_due(batch.step + 1)
        self._meter.start_step()
        output = self._backend.train_step(
            batch, learning_rate=self._schedule(batch.step), stop=self._signals.votes
        )
        self._meter.add(output, batch.examples)
        before, result.steps = result.steps, batch.step + 1
        result.examples += batch.examples
        if self._meter.seen.stop_votes:
            self._stop("SIGTERM")
        elif self._meter.seen.interrupt_votes:
            self._stop("SIGINT")
        self._progress.step(result.steps)
        if _crossed(self._config.log.every, before, result.steps):
            self._log_train()
        if _crossed(train.check_every, before, result.steps):
            self._backend.check_weights()
        every = train.eval_every
        if isinstance(every, int) and _crossed(every, before, result.steps):
            if result.stopped_by is None and result.steps != self._total:
                self._evaluate_and_decide()

    def _save_if_due(self, step: int) -> None:
        """Have the state saved when it is that after `step` updates."""
        if self._saver and step != self._total and self._saver.due(step):
            self._save(step, self._saver.save)

    def _save(self, step: int, save: Callable[..., None]) -> None:
        self._backend.at_boundary(step, lambda at, state: save(at, state, self.state()))

    def _stop(self, reason: str) -> None:
        if self._result.stopped_by is None:
            self._result.stopped_by = reason
            self._backend.stop(reason)

    def _log_train(self) -> None:
        own = self._meter.take()
        interval, further = self._backend.interval(own)
        self._result.train_seconds += interval.seconds
        self._result.timed_examples += interval.examples
        if not interval.steps:
            return
        step = self._result.steps
        values = {
            "loss": interval.loss,
            "learning_rate": self._schedule(step - 1),
            "examples_per_second": interval.examples_per_second,
            "skipped": float(interval.skipped),
            **further,
        }
        self._writers.write("train", step, self._epoch, values)
        self._progress.record("train", step, values)
        check_finite(interval.loss, step, interval.steps - interval.skipped)

    def _evaluate_and_decide(self) -> None:
        if self._evaluator is None:
            return
        self._backend.sync_model()
        self._evaluate()
        if self._saver and self._saver.is_among_best(self._result.evaluation):
            self._save(self._result.steps, self._saver.save_best)
        if self._early_stopping(self._result.evaluation):
            self._stop("early_stop")

    def _evaluate(self) -> None:
        if self._evaluator is None:
            return
        self._meter.pause()
        self._result.evaluation = self._evaluator()
        self._writers.write("eval", self._result.steps, self._epoch, self._result.evaluation)
        self._progress.record("eval", self._result.steps, self._result.evaluation)


def total_steps(config: Config, feed: Feed) -> int | None:
    """Updates of the whole run, None when only the data's end will tell."""
    if config.train.steps is not None:
        return config.train.steps
    if feed.steps_per_epoch is None:
        return None
    return config.train.epochs * feed.steps_per_epoch


def _crossed(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; never for 0."""
    return bool(every) and after // every > before // every


class _Meter:
    """Adds up what steps report, some steps late: reading a step's output waits for it, so the last
    ones are left alone until further ones have been handed to the device.

    The first step is not timed: it is traced.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.seen = StepOutput(0.0, 0.0, 0.0, 0.0)
        self.total_skipped = 0
        self._pending: deque[tuple[Any, int]] = deque()
        self._running_since: float | None = None
        self._traced = False
        self._clear()

    def _clear(self) -> None:
        self._loss_sum, self._loss_examples = 0.0, 0
        self._steps = self._skipped = 0
        self._seconds, self._examples = 0.0, 0

    def start_step(self) -> None:
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def add(self, output: Any, examples: int) -> None:
        self._read(leave=self._backend.depth - 1)
        self._pending.append((output, examples))
        if not self._traced:
            self._traced = True
            self._read()
            self._running_since = time.perf_counter()
        else:
            self._examples += examples

    def pause(self) -> None:
        """Stop the clock until the next step."""
        self._read()
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def take(self) -> Interval:
        """What has been added since the last call."""
        self.pause()
        interval = Interval(
            loss_sum=self._loss_sum,
            loss_examples=self._loss_examples,
            steps=self._steps,
            skipped=self._skipped,
            examples=self._examples,
            seconds=self._seconds,
        )
        self._clear()
        return interval

    def _read(self, leave: int = 0) -> None:
        while len(self._pending) > leave:
            output, examples = self._pending.popleft()
            self.seen = self._backend.read(output)
            self._steps += 1
            if self.seen.skipped:
                self._skipped += 1
                self.total_skipped += 1
            else:
                self._loss_sum += self.seen.loss_sum
                self._loss_examples += examples
