"""Batches, and where they come from: what data has in common, whatever it is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import tensorflow as tf

from hvps.errors import TrainingError
from hvps.position import START, Position
from hvps.sampling import Plan


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass on this rank.

    Attributes:
        x, y: nests of tensors with the rows on axis 0.
        weight: float32 [rows]; 0 marks a row that only keeps the shape from being empty.
    """

    x: Any
    y: Any
    weight: tf.Tensor


@dataclass
class Batch:
    """One update's worth of micro-batches on this rank.

    Attributes:
        micros: `accumulate` of them.
        examples: number of true examples in the update over all ranks.
        step: global step that the update makes from `step` to `step + 1`.
        epoch: the pass over the data that it belongs to.
        within: its number among the steps of that pass.
    """

    micros: tuple[MicroBatch, ...]
    examples: int
    step: int = 0
    epoch: int = 0
    within: int = 0


class Feed:
    """The training examples of one rank, in steps that line up over the ranks.

    Attributes:
        steps_per_epoch: None when the data does not know its length.
        samples: examples per epoch over all ranks, or None.
        endless: the data never ends, so that there are no epochs.
        in_order: the data can only be read from its beginning.
        divided_among_readers: each process that asks for steps has data of its own for them.
    """

    steps_per_epoch: int | None = None
    samples: int | None = None
    endless: bool = False
    in_order: bool = False
    divided_among_readers: bool = False

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Batches of one epoch, from its step `first_step` on."""
        raise AssertionError("a subclass says how")

    def dealt(
        self,
        steps: Iterator[int],
        *,
        deal: Callable[[int], tuple[int, int]] | None,
        epochs: int | None,
        done: int,
    ) -> Iterator[Batch]:
        """Batches of steps that somebody else deals out, ascending but not all of them.

        Args:
            steps: global steps for this process; taken only as batches are.
            deal: gives (rank, ranks) that divide a step's batch, where that changes.
            epochs: passes over data that can only be read in order.
            done: batches that this process has computed in an earlier life.
        """
        raise AssertionError("a subclass says how")

    def eval_batches(self) -> Iterator[MicroBatch]:
        """This rank's part of one pass without shuffling, in rows of the local batch."""
        raise AssertionError("a subclass says how")

    def example(self) -> tuple[Any, Any]:
        """x and y of one example, with the axis of the batch, for their types and shapes."""
        raise AssertionError("a subclass says how")

    def examples_in(self, step: int) -> int:
        """Number of true examples in a global step, over all ranks."""
        raise AssertionError("a subclass says how")


def consecutive(
    feed: Feed, *, start: Position = START, total: int | None, epochs: int | None
) -> Iterator[Batch]:
    """All of a feed's batches, one epoch after the other.

    Args:
        start: where to go on.
        total: steps to end after, or None.
        epochs: passes over the data to end after, or None.

    Raises:
        TrainingError: an epoch has no examples.
    """
    step, within = start.step, start.within
    if total is not None and step >= total:
        return
    for epoch in count(start.epoch) if epochs is None else range(start.epoch, epochs):
        for batch in feed.epoch(epoch, within):
            batch.step, batch.epoch, batch.within = step, epoch, within
            yield batch
            step, within = step + 1, within + 1
            if total is not None and step >= total:
                return
        empty, within = within == 0, 0
        if empty:
            raise TrainingError(
                f"no examples in epoch {epoch}",
                rule="train_data() gives the same examples each time it is read",
                received="an empty dataset",
                do="do not hand out an iterator that can be read only once",
            )


def prefetched(items: Iterator[Any], depth: int) -> Iterator[Any]:
    """Run `items` in a thread of its own, at most `depth` ahead; its exceptions are raised here."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(entry: tuple[str, Any]) -> bool:
        while not stopped.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(("item", item)):
                    return
        except BaseException as err:  # handed to the consumer, whoever raised it
            put(("error", err))
        else:
            put(("end", None))

    thread = threading.Thread(target=work, name="hvps-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        stopped.set()
        thread.join(timeout=5.0)


def rows_per_batch(plan: Plan) -> int:
    """Rows of a full micro-batch on one rank."""
    return max(1, plan.global_batch // (plan.ranks * plan.accumulate))


_ONES: dict[int, tf.Tensor] = {}


def row_weights(rows: int, true_rows: int) -> tf.Tensor:
    if true_rows == 0:
        return tf.zeros([rows], tf.float32)
    if rows not in _ONES:
        _ONES[rows] = tf.ones([rows], tf.float32)
    return _ONES[rows]
