"""From a task's data to batches on this rank: gather or read, pad, convert, prefetch.

What each rank gets is decided in `hvps.sampling`; here it is fetched, off the training thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvps.errors import ConfigError
from hvps.sampling import Plan, permuted

_BLOCK = 64  # steps whose order is computed at once, to spread numpy's cost per call


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


@dataclass(frozen=True)
class Batch:
    """One update's worth of micro-batches on this rank.

    Attributes:
        micros: `accumulate` of them.
        examples: number of true examples in the update over all ranks.
    """

    micros: tuple[MicroBatch, ...]
    examples: int


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

    def eval_batches(self) -> Iterator[MicroBatch]:
        """This rank's part of one pass without shuffling, in rows of the local batch."""
        raise AssertionError("a subclass says how")


class IndexedFeed(Feed):
    """Examples that can be fetched by index: arrays, or anything with len() and []."""

    def __init__(
        self,
        fetch: Callable[[np.ndarray], Any],
        plan: Plan,
        *,
        rank: int,
        seed: int,
        shuffle: bool,
        prefetch: int,
    ) -> None:
        self._fetch, self._plan, self._rank = fetch, plan, rank
        self._seed, self._shuffle, self._prefetch = seed, shuffle, prefetch
        self.samples = plan.samples
        self.steps_per_epoch = plan.steps_per_epoch

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        return prefetched(self._batches(epoch, first_step), self._prefetch)

    def _batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        plan = self._plan
        for block in range(first_step, plan.steps_per_epoch, _BLOCK):
            steps = range(block, min(block + _BLOCK, plan.steps_per_epoch))
            shares = [
                plan.share(step, micro, self._rank)
                for step in steps
                for micro in range(plan.accumulate)
            ]
            # An empty share borrows position 0 with weight 0: layers such as BatchNormalization
            # would make NaN of no rows at all.
            spans = [np.arange(s.start, s.stop) if len(s) else np.zeros(1, int) for s in shares]
            positions = np.concatenate(spans)
            order = (
                permuted(positions, plan.samples, self._seed, epoch) if self._shuffle else positions
            )
            pieces = np.split(order, np.cumsum([len(span) for span in spans])[:-1])
            micros = [
                self._micro(piece, len(share)) for piece, share in zip(pieces, shares, strict=True)
            ]
            for i, step in enumerate(steps):
                chunk = micros[i * plan.accumulate : (i + 1) * plan.accumulate]
                yield Batch(tuple(make() for make in chunk), plan.step_size(step))

    def _micro(self, indices: np.ndarray, true_rows: int) -> Callable[[], MicroBatch]:
        """Fetch later, when the prefetching thread comes to it."""

        def make() -> MicroBatch:
            x, y = self._fetch(indices)
            return MicroBatch(x, y, _weights(len(indices), true_rows))

        return make

    def eval_batches(self) -> Iterator[MicroBatch]:
        share, rows = self._plan.eval_share(self._rank), _rows(self._plan)

        def batches() -> Iterator[MicroBatch]:
            for start in range(share.start, share.stop, rows):
                indices = np.arange(start, min(start + rows, share.stop))
                yield self._micro(indices, len(indices))()

        return prefetched(batches(), self._prefetch)


class DatasetFeed(Feed):
    """A `tf.data.Dataset` of single (x, y) examples: rank r reads elements r, r + ranks, …

    The dataset's own order is kept. Where it cannot tell its length, the ranks add up their counts
    before each step (`agree`), and the epoch ends when nobody has anything left.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        plan: Plan,
        *,
        rank: int,
        prefetch: int,
        agree: Callable[[int], int],
    ) -> None:
        self._plan, self._rank, self._agree = plan, rank, agree
        self._whole = dataset
        mine = dataset.shard(plan.ranks, rank) if plan.ranks > 1 else dataset
        self._local = mine.batch(_rows(plan)).prefetch(prefetch)
        known = plan.samples > 0
        self.samples = plan.samples if known else None
        self.steps_per_epoch = plan.steps_per_epoch if known else None
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

    def _next_micros(self, rows: Iterator[Any]) -> tuple[tuple[MicroBatch, ...], int]:
        micros, examples = [], 0
        for _ in range(self._plan.accumulate):
            element = next(rows, None)
            if element is None:
                micros.append(self._filler())
            else:
                n = _length(element)
                examples += n
                micros.append(MicroBatch(element[0], element[1], _weights(n, n)))
        return tuple(micros), examples

    def _filler(self) -> MicroBatch:
        """One row of weight 0 for a rank that has run out before the others."""
        element = next(iter(self._whole.take(1).batch(1)))
        return MicroBatch(element[0], element[1], _weights(1, 0))

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
) -> Feed:
    """Wrap what `Task.train_data()` or `Task.eval_data()` returned.

    Args:
        data: arrays, an indexable or a dataset; see `hvps.task.Task`.
        what: "train_data" or "eval_data", for messages.
        global_batch: examples per update over all ranks and micro-batches.
        agree: adds a count up over the ranks; used for datasets that do not know their length.

    Raises:
        ConfigError: the data is of none of these kinds, is empty, or its parts differ in length.
    """
    if isinstance(data, tf.data.Dataset):
        samples = _cardinality(data, what)
        plan = Plan(samples, global_batch, ranks, accumulate)
        return DatasetFeed(data, plan, rank=rank, prefetch=prefetch, agree=agree)
    fetch, samples = _indexed(data, what)
    plan = Plan(samples, global_batch, ranks, accumulate)
    return IndexedFeed(fetch, plan, rank=rank, seed=seed, shuffle=shuffle, prefetch=prefetch)


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


def _indexed(data: Any, what: str) -> tuple[Callable[[np.ndarray], Any], int]:
    """A function from indices to (x, y) tensors, and the number of samples."""
    if isinstance(data, tuple) and len(data) == 2:
        arrays = tf.nest.map_structure(_as_array, data)
        lengths = {len(a) if a.ndim else 0 for a in tf.nest.flatten(arrays)}
        if len(lengths) != 1 or 0 in lengths:
            raise ConfigError(
                f"task: {what}() gave arrays that do not fit together",
                rule="x and y hold the same number of examples on axis 0, at least one",
                received=f"lengths {sorted(lengths)}",
                do=f"mend {what}()",
            )

        def gather(indices: np.ndarray) -> Any:
            return tf.nest.map_structure(lambda a: tf.convert_to_tensor(a[indices]), arrays)

        return gather, lengths.pop()
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and len(data) > 0:

        def collate(indices: np.ndarray) -> Any:
            rows = [data[int(i)] for i in indices]
            return tf.nest.map_structure(
                lambda *leaves: tf.convert_to_tensor(_as_array(np.stack(leaves))), *rows
            )

        return collate, len(data)
    raise ConfigError(
        f"task: {what}() gave something that cannot be fed",
        rule="a tuple (x, y) of arrays, an indexable of (x, y), or a tf.data.Dataset; not empty",
        received=f"{type(data).__name__}"
        + (f" of length {len(data)}" if isinstance(data, Sequence) else ""),
        do=f"mend {what}(); hvps/task.py says what it may return",
    )


def _as_array(leaf: Any) -> np.ndarray:
    """A numpy array; float64 becomes float32, as Keras does with its inputs."""
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == np.float64 else array


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
        raise ConfigError(f"task: {what}() gave an empty dataset", rule="at least one example")
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
