"""From a task's data to batches on this rank: gather or read, pad, convert, prefetch.

What each rank gets is decided in `hvps.sampling`; here it is fetched, off the training thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from hvps.errors import ConfigError, TrainingError
from hvps.sampling import Plan, permuted
from hvps.sources import Source, indexed_source

_ORDER_STEPS = 64  # steps whose order is computed at once, to spread numpy's cost per call
_INLINE_BYTES = 1 << 20  # arrays whose steps are up to this size are not worth a thread


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
    """

    micros: tuple[MicroBatch, ...]
    examples: int
    step: int = 0
    epoch: int = 0


class Feed:
    """The training examples of one rank, in steps that line up over the ranks.

    Attributes:
        steps_per_epoch: None when the data does not know its length.
        samples: examples per epoch over all ranks, or None.
        endless: the data never ends, so that there are no epochs.
    """

    steps_per_epoch: int | None = None
    samples: int | None = None
    endless: bool = False

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


class IndexedFeed(Feed):
    """Examples that can be fetched by index: arrays, or anything with len() and []."""

    def __init__(
        self, source: Source, plan: Plan, *, rank: int, seed: int, shuffle: bool, prefetch: int
    ) -> None:
        self._source, self._plan, self._rank = source, plan, rank
        self._seed, self._shuffle, self._prefetch = seed, shuffle, prefetch
        self.samples = plan.samples
        self.steps_per_epoch = plan.steps_per_epoch
        step_bytes = source.example_bytes * _rows(plan) * plan.accumulate
        # Small arrays are gathered for many steps at once, which costs less than handing single
        # batches from thread to thread.
        self._inline = 0 < step_bytes <= _INLINE_BYTES
        self._fetch_steps = max(1, _INLINE_BYTES // step_bytes) if self._inline else 1

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        batches = self._batches(epoch, first_step)
        return batches if self._inline else prefetched(batches, self._prefetch)

    def _batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        for block in range(first_step, self._plan.steps_per_epoch, _ORDER_STEPS):
            steps = range(block, min(block + _ORDER_STEPS, self._plan.steps_per_epoch))
            orders, true_rows = self._order(epoch, steps, self._plan, self._rank)
            per_fetch = self._fetch_steps * self._plan.accumulate
            for first in range(0, len(orders), per_fetch):
                part = slice(first, first + per_fetch)
                micros = self._fetch(orders[part], true_rows[part])
                for i in range(0, len(micros), self._plan.accumulate):
                    step = block + (first + i) // self._plan.accumulate
                    yield Batch(
                        tuple(micros[i : i + self._plan.accumulate]), self._plan.step_size(step)
                    )

    def dealt(
        self,
        steps: Iterator[int],
        *,
        deal: Callable[[int], tuple[int, int]] | None,
        epochs: int | None,
        done: int,
    ) -> Iterator[Batch]:
        batches = self._dealt(steps, deal)
        return batches if self._inline else prefetched(batches, self._prefetch)

    def _dealt(
        self, steps: Iterator[int], deal: Callable[[int], tuple[int, int]] | None
    ) -> Iterator[Batch]:
        plan, rank = self._plan, self._rank
        for step in steps:
            if deal is not None:
                rank, ranks = deal(step)
                plan = replace(plan, ranks=ranks) if ranks != plan.ranks else plan
            epoch, within = divmod(step, plan.steps_per_epoch)
            orders, true_rows = self._order(epoch, range(within, within + 1), plan, rank)
            micros = self._fetch(orders, true_rows)
            yield Batch(tuple(micros), plan.step_size(within), step, epoch)

    def example(self) -> tuple[Any, Any]:
        return self._source.fetch(np.zeros(1, np.int64))

    def examples_in(self, step: int) -> int:
        return self._plan.step_size(step % self._plan.steps_per_epoch)

    def _order(
        self, epoch: int, steps: range, plan: Plan, rank: int
    ) -> tuple[list[np.ndarray], list[int]]:
        """Sample indices of each micro-batch in `steps`, and how many of them count."""
        shares = [
            plan.share(step, micro, rank) for step in steps for micro in range(plan.accumulate)
        ]
        # An empty share borrows position 0 with weight 0: layers such as BatchNormalization would
        # make NaN of no rows at all.
        spans = [np.arange(s.start, s.stop) if len(s) else np.zeros(1, int) for s in shares]
        order = np.concatenate(spans)
        if self._shuffle:
            order = permuted(order, plan.samples, self._seed, epoch)
        ends = np.cumsum([len(span) for span in spans])[:-1]
        return np.split(order, ends), [len(share) for share in shares]

    def _fetch(self, orders: list[np.ndarray], true_rows: list[int]) -> list[MicroBatch]:
        """Fetch several micro-batches at once and take them apart again."""
        sizes = [len(order) for order in orders]
        x, y = self._source.fetch(orders[0] if len(orders) == 1 else np.concatenate(orders))
        return [
            MicroBatch(micro_x, micro_y, _weights(size, true))
            for micro_x, micro_y, size, true in zip(
                _taken_apart(x, sizes), _taken_apart(y, sizes), sizes, true_rows, strict=True
            )
        ]

    def eval_batches(self) -> Iterator[MicroBatch]:
        share, rows = self._plan.eval_share(self._rank), _rows(self._plan)

        def batches() -> Iterator[MicroBatch]:
            for start in range(share.start, share.stop, rows):
                indices = np.arange(start, min(start + rows, share.stop))
                yield self._fetch([indices], [len(indices)])[0]

        return prefetched(batches(), self._prefetch)


class DatasetFeed(Feed):
    """A `tf.data.Dataset` of single (x, y) examples: rank r reads elements r, r + ranks, …

    The dataset's own order is kept. Where it cannot tell its length, the ranks add up their counts
    before each step (`agree`), and the epoch ends when nobody has anything left. `independent`
    ranks divide the examples but no steps: each makes updates of its own.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        plan: Plan,
        *,
        rank: int,
        prefetch: int,
        agree: Callable[[int], int],
        independent: bool = False,
    ) -> None:
        self._plan, self._rank, self._agree = plan, rank, agree
        self._independent = independent
        dataset = dataset.map(_narrowed)
        self._whole = dataset
        mine = dataset.shard(plan.ranks, rank) if plan.ranks > 1 else dataset
        self._local = mine.batch(_rows(plan)).prefetch(prefetch)
        known = plan.samples > 0
        self.samples = plan.samples if known else None
        self.steps_per_epoch = plan.steps_per_epoch if known else None
        if known and independent:
            own = plan.global_batch // plan.ranks
            shards = [len(range(i, plan.samples, plan.ranks)) for i in range(plan.ranks)]
            self.steps_per_epoch = sum(-(-examples // own) for examples in shards)
        self.endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        # A dataset cannot be entered in the middle, so the steps before `first_step` are read over.
        rows = iter(self._local.skip(first_step * self._plan.accumulate))
        step = first_step
        while self.steps_per_epoch is None or step < self.steps_per_epoch:
            micros, local_examples = self._next_micros(rows)
            if self.endless:
                examples = self._plan.global_batch
            elif self.steps_per_epoch is None:
                examples = self._agree(local_examples)
            else:
                examples = self._plan.step_size(step)
            if examples == 0:
                return
            yield Batch(micros, examples)
            step += 1

    def dealt(
        self,
        steps: Iterator[int],
        *,
        deal: Callable[[int], tuple[int, int]] | None,
        epochs: int | None,
        done: int,
    ) -> Iterator[Batch]:
        for epoch in count() if epochs is None else range(epochs):
            empty = True
            for batch in self._own_epoch() if self._independent else self.epoch(epoch):
                empty = False
                if done:
                    done -= 1
                    continue
                step = next(steps, None)
                if step is None:
                    return
                batch.step, batch.epoch = step, epoch
                yield batch
            if empty and epochs is None:
                return

    def _own_epoch(self) -> Iterator[Batch]:
        rows = iter(self._local)
        while True:
            micros, examples = self._next_micros(rows)
            if examples == 0:
                return
            yield Batch(micros, examples)

    def example(self) -> tuple[Any, Any]:
        x, y = next(iter(self._whole.take(1).batch(1)))
        return x, y

    def examples_in(self, step: int) -> int:
        if self.steps_per_epoch is None:
            return self._plan.global_batch
        return self._plan.step_size(step % self.steps_per_epoch)

    def _next_micros(self, rows: Iterator[Any]) -> tuple[tuple[MicroBatch, ...], int]:
        """The next step's micro-batches; none of them, and 0, for a dataset with nothing in it."""
        micros, examples = [], 0
        for _ in range(self._plan.accumulate):
            element = next(rows, None)
            if element is None:
                # This rank has run out before the others: one row of weight 0.
                filler = next(iter(self._whole.take(1).batch(1)), None)
                if filler is None:
                    return (), 0
                micros.append(MicroBatch(filler[0], filler[1], _weights(1, 0)))
            else:
                n = _length(element)
                examples += n
                micros.append(MicroBatch(element[0], element[1], _weights(n, n)))
        return tuple(micros), examples

    def eval_batches(self) -> Iterator[MicroBatch]:
        for element in self._local:
            n = _length(element)
            yield MicroBatch(element[0], element[1], _weights(n, n))


def make_feed(
    data: Any,
    *,
    what: str,
    global_batch: int,
    ranks: int,
    rank: int,
    accumulate: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    prefetch: int = 2,
    agree: Callable[[int], int] = lambda count: count,
    reading_share: tuple[int, int] | None = None,
) -> Feed:
    """Wrap what `Task.train_data()` or `Task.eval_data()` returned.

    Args:
        data: arrays, an indexable or a dataset; see `hvps.task.Task`.
        what: "train_data" or "eval_data", for messages.
        global_batch: examples per update over all ranks and micro-batches.
        agree: adds a count up over the ranks; used for datasets that do not know their length.
        reading_share: (rank, ranks) that divide a dataset, which can only be read in order; where
            it is not (rank, ranks), each makes updates of `global_batch` examples of its own.

    Raises:
        ConfigError: the data is of none of these kinds, is empty, or its parts differ in length.
    """
    if isinstance(data, tf.data.Dataset):
        samples = _cardinality(data, what)
        reader, readers = reading_share or (rank, ranks)
        independent = readers != ranks
        batch = global_batch * readers if independent else global_batch
        plan = Plan(samples, batch, readers, accumulate)
        return DatasetFeed(
            data, plan, rank=reader, prefetch=prefetch, agree=agree, independent=independent
        )
    source = indexed_source(data, what)
    plan = Plan(source.samples, global_batch, ranks, accumulate)
    return IndexedFeed(source, plan, rank=rank, seed=seed, shuffle=shuffle, prefetch=prefetch)


def consecutive(feed: Feed, *, total: int | None, epochs: int | None) -> Iterator[Batch]:
    """All of a feed's batches, one epoch after the other.

    Args:
        total: steps to end after, or None.
        epochs: passes over the data to end after, or None.

    Raises:
        TrainingError: an epoch has no examples.
    """
    step = 0
    for epoch in count() if epochs is None else range(epochs):
        before = step
        for batch in feed.epoch(epoch):
            batch.step, batch.epoch = step, epoch
            yield batch
            step += 1
            if total is not None and step >= total:
                return
        if step == before:
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


def _taken_apart(nest: Any, sizes: list[int]) -> list[Any]:
    """Consecutive rows of a nest of tensors, as one nest for each of `sizes`."""
    if len(sizes) == 1:
        return [nest]
    leaves = [tf.split(leaf, sizes) for leaf in tf.nest.flatten(nest)]
    if not tf.nest.is_nested(nest):
        return list(leaves[0])
    return [tf.nest.pack_sequence_as(nest, piece) for piece in zip(*leaves, strict=True)]


def _narrowed(*element: Any) -> Any:
    """An element with float32 for float64, as Keras does with its inputs."""
    return tf.nest.map_structure(
        lambda leaf: tf.cast(leaf, tf.float32) if leaf.dtype == tf.float64 else leaf, element
    )


def _cardinality(dataset: tf.data.Dataset, what: str) -> int:
    """Number of examples, 0 when the dataset cannot tell (or never ends)."""
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) != 2:
        raise ConfigError(
            f"task: {what}() gave a dataset whose elements are not pairs",
            rule="a tf.data.Dataset of single (x, y) examples",
            received=f"elements of {spec}",
            do="map the elements to (x, y)",
        )
    n = int(dataset.cardinality())
    if n == 0:
        raise ConfigError(
            f"task: {what}() gave an empty dataset",
            rule="at least one example",
            received="a tf.data.Dataset of cardinality 0",
            do=f"mend {what}()",
        )
    return max(n, 0)


def _rows(plan: Plan) -> int:
    """Rows of a full micro-batch on one rank."""
    return max(1, plan.global_batch // (plan.ranks * plan.accumulate))


def _length(element: Any) -> int:
    return int(tf.nest.flatten(element)[0].shape[0])


_ONES: dict[int, tf.Tensor] = {}


def _weights(rows: int, true_rows: int) -> tf.Tensor:
    if true_rows == 0:
        return tf.zeros([rows], tf.float32)
    if rows not in _ONES:
        _ONES[rows] = tf.ones([rows], tf.float32)
    return _ONES[rows]
