"""A `tf.data.Dataset` as a feed: it can only be read in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import tensorflow as tf

from hvps.batches import Batch, Feed, MicroBatch, row_weights, rows_per_batch
from hvps.errors import ConfigError
from hvps.sampling import Plan


class DatasetFeed(Feed):
    """A `tf.data.Dataset` of single (x, y) examples: rank r reads elements r, r + ranks, …

    The dataset's own order is kept. Where it cannot tell its length, the ranks add up their counts
    before each step (`agree`), and the epoch ends when nobody has anything left. `independent`
    ranks divide the examples but no steps: each makes updates of its own.
    """

    in_order = True

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
        self._independent = self.divided_among_readers = independent
        dataset = dataset.map(_narrowed)
        self._whole = dataset
        mine = dataset.shard(plan.ranks, rank) if plan.ranks > 1 else dataset
        self._local = mine.batch(rows_per_batch(plan)).prefetch(prefetch)
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
        first = 0
        if self.steps_per_epoch is not None and not self._independent:  # it can be entered there
            first, done = divmod(done, self.steps_per_epoch)
        for epoch in count(first) if epochs is None else range(first, epochs):
            within = 0
            for batch in self._own_epoch() if self._independent else self.epoch(epoch):
                within += 1
                if done:
                    done -= 1
                    continue
                step = next(steps, None)
                if step is None:
                    return
                batch.step, batch.epoch, batch.within = step, epoch, within - 1
                yield batch
            if within == 0 and epochs is None:
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
                micros.append(MicroBatch(filler[0], filler[1], row_weights(1, 0)))
            else:
                n = _length(element)
                examples += n
                micros.append(MicroBatch(element[0], element[1], row_weights(n, n)))
        return tuple(micros), examples

    def eval_batches(self) -> Iterator[MicroBatch]:
        for element in self._local:
            n = _length(element)
            yield MicroBatch(element[0], element[1], row_weights(n, n))


def cardinality(dataset: tf.data.Dataset, what: str) -> int:
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


def _narrowed(*element: Any) -> Any:
    """An element with float32 for float64, as Keras does with its inputs."""
    return tf.nest.map_structure(
        lambda leaf: tf.cast(leaf, tf.float32) if leaf.dtype == tf.float64 else leaf, element
    )


def _length(element: Any) -> int:
    return int(tf.nest.flatten(element)[0].shape[0])
