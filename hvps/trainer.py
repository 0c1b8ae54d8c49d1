"""The loop: steps, records, evaluations, and an agreed stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from hvps.backends import Backend, StepOutput
from hvps.callbacks import EarlyStopping, check_finite
from hvps.data import Batch, Feed
from hvps.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, TrainingError
from hvps.evaluation import Evaluator
from hvps.metrics import Writers
from hvps.progress import Progress
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
        skipped_steps: updates left out for a non-finite float16 gradient.
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
        optimizer: keras.optimizers.Optimizer,
        backend: Backend,
        feed: Feed,
        schedule: Schedule,
        evaluator: Evaluator | None,
        writers: Writers,
        progress: Progress,
        signals: StopSignals,
    ) -> None:
        self._config, self._backend, self._feed = config, backend, feed
        self._optimizer, self.model = optimizer, model
        self._schedule, self._evaluator = schedule, evaluator
        self._writers, self._progress, self._signals = writers, progress, signals
        self._total = total_steps(config, feed)
        names = evaluator.names if evaluator else []
        self._early_stopping = EarlyStopping(config.train.early_stop, names)
        self._meter = _Meter(backend.read)
        self._result = TrainingResult()
        self._epoch = 0

    def fit(self) -> TrainingResult:
        """Train to the end or to an agreed stop, evaluate, and leave the final weights in `model`.

        Raises:
            TrainingError: the loss is not finite, the ranks drifted apart or lost one another.
        """
        try:
            self.train_epochs()
        finally:
            self._progress.close()
        # Some optimizers (weight averaging) have their last word here.
        self._optimizer.finalize_variable_values(self.model.trainable_variables)
        self._backend.sync_model()
        if self._evaluator and self._result.stopped_by not in ("SIGTERM", "SIGINT"):
            self._evaluate()
        self._backend.check_weights()
        self._result.skipped_steps = self._meter.total_skipped
        self._writers.close()
        return self._result

    def train_epochs(self) -> None:
        """The steps of the configuration, with records and the evaluations between them.

        Called again, it goes on with the same weights for as many steps more.
        """
        self._result.steps, self._epoch = 0, 0
        while not self._finished():
            steps_before = self._result.steps
            for batch in self._feed.epoch(self._epoch):
                self._step(batch)
                if self._finished():
                    break
            if self._result.steps == steps_before:
                raise TrainingError(
                    f"no examples in epoch {self._epoch}",
                    rule="train_data() gives the same examples each time it is read",
                    received="an empty dataset",
                    do="do not hand out an iterator that can be read only once",
                )
            self._epoch += 1
            # The evaluation at the very end follows the loop.
            if self._config.train.eval_every == "epoch" and not self._finished():
                self._evaluate_and_decide()
        self._log_train()

    def _finished(self) -> bool:
        result = self._result
        if result.stopped_by or (self._total is not None and result.steps >= self._total):
            return True
        return self._config.train.steps is None and self._epoch >= self._config.train.epochs

    def _step(self, batch: Batch) -> None:
        train, result = self._config.train, self._result
        self._meter.start_step()
        output = self._backend.train_step(
            batch, learning_rate=self._schedule(result.steps), stop=self._signals.votes
        )
        self._meter.add(output, batch.examples)
        result.steps += 1
        result.examples += batch.examples
        if self._meter.seen.stop_votes:
            result.stopped_by = "SIGTERM"
        elif self._meter.seen.interrupt_votes:
            result.stopped_by = "SIGINT"
        self._progress.step(result.steps)
        if result.steps % self._config.log.every == 0:
            self._log_train()
        if train.check_every and result.steps % train.check_every == 0:
            self._backend.check_weights()
        every = train.eval_every
        if isinstance(every, int) and every and result.steps % every == 0 and not self._finished():
            self._evaluate_and_decide()

    def _log_train(self) -> None:
        interval = self._meter.take()
        self._result.train_seconds = self._meter.timed_seconds
        self._result.timed_examples = self._meter.timed_examples
        if not interval.steps:
            return
        step = self._result.steps
        values = {
            "loss": interval.loss,
            "learning_rate": self._schedule(step - 1),
            "examples_per_second": interval.examples_per_second,
            "skipped": float(interval.skipped),
        }
        self._writers.write("train", step, self._epoch, values)
        self._progress.record("train", step, values)
        check_finite(interval.loss, step, interval.steps - interval.skipped)

    def _evaluate_and_decide(self) -> None:
        self._backend.sync_model()
        self._evaluate()
        if self._early_stopping(self._result.evaluation):
            self._result.stopped_by = "early_stop"

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


@dataclass(frozen=True)
class _Interval:
    loss: float
    examples_per_second: float
    steps: int
    skipped: int


class _Meter:
    """Adds up what steps report, one step late: reading a step's output waits for it, so the last
    one is left alone until the next has been handed to the device.

    The first step is not timed: it is traced.
    """

    def __init__(self, read: Callable[[tf.Tensor], StepOutput]) -> None:
        self._read_output = read
        self.seen = StepOutput(0.0, 0.0, 0.0, 0.0)
        self.timed_seconds = 0.0
        self.timed_examples = 0
        self.total_skipped = 0
        self._pending: tuple[tf.Tensor, int] | None = None
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

    def add(self, output: tf.Tensor, examples: int) -> None:
        self._read()
        self._pending = (output, examples)
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

    def take(self) -> _Interval:
        """What has been added since the last call."""
        self.pause()
        interval = _Interval(
            loss=self._loss_sum / self._loss_examples if self._loss_examples else float("nan"),
            examples_per_second=self._examples / self._seconds if self._seconds else 0.0,
            steps=self._steps,
            skipped=self._skipped,
        )
        self.timed_seconds += self._seconds
        self.timed_examples += self._examples
        self._clear()
        return interval

    def _read(self) -> None:
        if self._pending is None:
            return
        output, examples = self._pending
        self._pending = None
        self.seen = self._read_output(output)
        self._steps += 1
        if self.seen.skipped:
            self._skipped += 1
            self.total_skipped += 1
        else:
            self._loss_sum += self.seen.loss_sum
            self._loss_examples += examples
