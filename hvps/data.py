"""From a task's data to batches on this rank: gather or read, pad, convert, prefetch.

What each rank gets is decided in `hvps.sampling`; here it is fetched, off the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvps.batches import Batch, Feed, MicroBatch, prefetched, row_weights, rows_per_batch
from hvps.dataset_feed import DatasetFeed, cardinality
from hvps.sampling import Plan, permuted
from hvps.sources import Source, indexed_source

_ORDER_STEPS = 64  # steps whose order is computed at once, to spread numpy's cost per call
_INLINE_BYTES = 1 << 20  # arrays whose steps are up to this size are not worth a thread


class IndexedFeed(Feed):
    """Examples that can be fetched by index: arrays, or anything with len() and []."""

    def __init__(
        self, source: Source, plan: Plan, *, rank: int, seed: int, shuffle: bool, prefetch: int
    ) -> None:
        self._source, self._plan, self._rank = source, plan, rank
        self._seed, self._shuffle, self._prefetch = seed, shuffle, prefetch
        self.samples = plan.samples
        self.steps_per_epoch = plan.steps_per_epoch
        step_bytes = source.example_bytes * rows_per_batch(plan) * plan.accumulate
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
            yield Batch(tuple(micros), plan.step_size(within), step, epoch, within)

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
            MicroBatch(micro_x, micro_y, row_weights(size, true))
            for micro_x, micro_y, size, true in zip(
                _taken_apart(x, sizes), _taken_apart(y, sizes), sizes, true_rows, strict=True
            )
        ]

    def eval_batches(self) -> Iterator[MicroBatch]:
        share, rows = self._plan.eval_share(self._rank), rows_per_batch(self._plan)

        def batches() -> Iterator[MicroBatch]:
            for start in range(share.start, share.stop, rows):
                indices = np.arange(start, min(start + rows, share.stop))
                yield self._fetch([indices], [len(indices)])[0]

        return prefetched(batches(), self._prefetch)


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
        samples = cardinality(data, what)
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


def _taken_apart(nest: Any, sizes: list[int]) -> list[Any]:
    """Consecutive rows of a nest of tensors, as one nest for each of `sizes`."""
    if len(sizes) == 1:
        return [nest]
    leaves = [tf.split(leaf, sizes) for leaf in tf.nest.flatten(nest)]
    if not tf.nest.is_nested(nest):
        return list(leaves[0])
    return [tf.nest.pack_sequence_as(nest, piece) for piece in zip(*leaves, strict=True)]
