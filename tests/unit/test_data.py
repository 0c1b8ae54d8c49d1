"""From a task's data to each rank's batches: every example once, whatever the ranks.

Several ranks are played by as many feeds in one process.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvps import data as hvps_data
from hvps.batches import Batch, Feed, MicroBatch, consecutive, prefetched
from hvps.data import make_feed
from hvps.dataset_feed import DatasetFeed
from hvps.errors import ConfigError, TrainingError
from hvps.position import START, Position
from hvps.sampling import permuted
from hvps.sources import Source

KINDS = ("arrays", "indexable", "dataset", "stream")


class Rows:
    """Examples by index; example i is ([i, i], i)."""

    def __init__(self, examples: int) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.float32]:
        assert type(i) is int
        assert 0 <= i < self._examples
        return np.full(2, i, np.float32), np.float32(i)


def data_of(kind: str, examples: int) -> Any:
    y = np.arange(examples, dtype=np.float32)
    x = np.stack([y, y], axis=1)
    if kind == "arrays":
        return x, y
    if kind == "indexable":
        return Rows(examples)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset if kind == "dataset" else dataset.filter(lambda _x, _y: True)


def feeds(data: Any, ranks: int, global_batch: int, **keywords: Any) -> list[Feed]:
    return [
        make_feed(
            data,
            what="train_data",
            global_batch=global_batch,
            ranks=ranks,
            rank=rank,
            **keywords,
        )
        for rank in range(ranks)
    ]


def lockstep(group: list[Feed], epoch: int = 0, first_step: int = 0) -> list[tuple[Batch, ...]]:
    """The batches of all ranks, step by step.

    Counts of a dataset of unknown length are added up as the backend does: here by a thread for
    each rank, which meet at a barrier.
    """
    if not isinstance(group[0], DatasetFeed) or group[0].steps_per_epoch is not None:
        iterators = [feed.epoch(epoch, first_step) for feed in group]
        return list(zip(*iterators, strict=True))
    meeting = Meeting(len(group))
    results: list[list[Batch]] = [[] for _ in group]
    errors: list[BaseException] = []

    def run(rank: int, feed: Any) -> None:
        feed._agree = lambda count: meeting.sum(rank, count)
        try:
            results[rank] = list(feed.epoch(epoch, first_step))
        except BaseException as err:
            errors.append(err)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(group)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return list(zip(*results, strict=True))


class Meeting:
    """A sum over threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self._counts = [0] * size

    def sum(self, rank: int, count: int) -> int:
        self._counts[rank] = count
        self.barrier.wait()
        total = sum(self._counts)
        self.barrier.wait()
        return total


def examples_of(micro: MicroBatch) -> list[int]:
    """Labels of the rows that count; the inputs must belong to them."""
    weight, y, x = micro.weight.numpy(), micro.y.numpy(), micro.x.numpy()
    assert micro.weight.dtype == tf.float32
    assert len(weight) == len(y) == len(x) >= 1
    assert set(weight.tolist()) <= {0.0, 1.0}
    np.testing.assert_array_equal(x, np.stack([y, y], axis=1))
    return [int(label) for label, w in zip(y, weight, strict=True) if w]


def step_examples(batches: tuple[Batch, ...]) -> list[int]:
    return [i for batch in batches for micro in batch.micros for i in examples_of(micro)]


# 37 examples in batches of 12: the last one has a single example, so ranks get none.
@pytest.mark.parametrize(
    ("ranks", "accumulate"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 3), (2, 2), (3, 2)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_example_once_in_full_steps_and_a_smaller_last(
    kind: str, ranks: int, accumulate: int
) -> None:
    group = feeds(data_of(kind, 37), ranks, 12, accumulate=accumulate)
    steps = lockstep(group)
    seen = [step_examples(batches) for batches in steps]
    assert [len(examples) for examples in seen] == [12, 12, 12, 1]
    assert Counter(i for examples in seen for i in examples) == Counter(range(37))
    for batches, examples in zip(steps, seen, strict=True):
        # All ranks divide by the true number of examples.
        assert {batch.examples for batch in batches} == {len(examples)}
        assert {len(batch.micros) for batch in batches} == {accumulate}


@pytest.mark.parametrize(("examples", "sizes"), [(1, [1]), (12, [12]), (24, [12, 12])])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_fit_or_are_tiny(kind: str, examples: int, sizes: list[int]) -> None:
    steps = lockstep(feeds(data_of(kind, examples), 3, 12))
    assert [len(step_examples(batches)) for batches in steps] == sizes
    assert [batches[0].examples for batches in steps] == sizes


@pytest.mark.parametrize("kind", ["arrays", "indexable"])
def test_a_step_holds_the_same_examples_for_any_number_of_ranks(kind: str) -> None:
    def steps(ranks: int, accumulate: int) -> list[list[int]]:
        group = feeds(data_of(kind, 50), ranks, 12, accumulate=accumulate, seed=5)
        return [sorted(step_examples(batches)) for batches in lockstep(group, epoch=2)]

    order = permuted(np.arange(50), 50, 5, 2).tolist()
    expected = [sorted(order[i : i + 12]) for i in range(0, 50, 12)]
    for ranks, accumulate in ((1, 1), (2, 1), (4, 1), (3, 2), (1, 4)):
        assert steps(ranks, accumulate) == expected


def test_one_rank_sees_the_order_itself() -> None:
    (feed,) = feeds(data_of("arrays", 20), 1, 6, seed=3)
    seen = [i for batch in feed.epoch(7) for i in step_examples((batch,))]
    assert seen == permuted(np.arange(20), 20, 3, 7).tolist()


def test_epochs_differ_and_can_be_read_again() -> None:
    (feed,) = feeds(data_of("arrays", 40), 1, 8)
    first, second, again = (
        [i for batch in feed.epoch(e) for i in step_examples((batch,))] for e in (0, 1, 0)
    )
    assert first != second
    assert first == again


def test_without_shuffling_the_order_is_the_data() -> None:
    group = feeds(data_of("arrays", 20), 2, 8, shuffle=False)
    for epoch in (0, 1):
        seen = [step_examples(batches) for batches in lockstep(group, epoch)]
        assert [i for examples in seen for i in examples] == list(range(20))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first_step", [0, 1, 3, 4])
def test_an_epoch_is_entered_in_the_middle(kind: str, first_step: int) -> None:
    def content(steps: list[tuple[Batch, ...]]) -> list[Any]:
        return [
            [
                (b.examples, [(m.y.numpy().tolist(), m.weight.numpy().tolist()) for m in b.micros])
                for b in batches
            ]
            for batches in steps
        ]

    group = feeds(data_of(kind, 37), 2, 12, accumulate=2)
    whole = content(lockstep(group, 3))
    assert content(lockstep(group, 3, first_step)) == whole[first_step:]


def test_long_epochs_are_entered_in_the_middle() -> None:
    """The order is computed in blocks of steps, which begin at the first step asked for."""
    (feed,) = feeds(data_of("arrays", 400), 1, 2)
    whole = [step_examples((batch,)) for batch in feed.epoch(0)]
    assert sorted(itertools.chain(*whole)) == list(range(400))
    for first in (1, 63, 64, 65, 130):
        assert [step_examples((b,)) for b in feed.epoch(0, first)] == whole[first:]


def test_rows_that_only_fill_have_no_weight() -> None:
    steps = lockstep(feeds(data_of("arrays", 5), 4, 4, accumulate=1))
    last = [batch.micros[0] for batch in steps[-1]]
    assert sorted(len(micro.weight) for micro in last) == [1, 1, 1, 1]
    assert sorted(float(tf.reduce_sum(micro.weight)) for micro in last) == [0, 0, 0, 1]
    for micro in last:
        assert np.isfinite(micro.x.numpy()).all()


def test_what_a_feed_knows_about_its_length() -> None:
    def facts(data: Any) -> tuple[int | None, int | None, bool]:
        (feed,) = feeds(data, 1, 12)
        return feed.steps_per_epoch, feed.samples, feed.endless

    assert facts(data_of("arrays", 37)) == (4, 37, False)
    assert facts(data_of("indexable", 37)) == (4, 37, False)
    assert facts(data_of("dataset", 37)) == (4, 37, False)
    assert facts(data_of("stream", 37)) == (None, None, False)
    assert facts(data_of("dataset", 37).repeat()) == (None, None, True)


def test_an_endless_dataset_has_only_full_steps() -> None:
    def forbidden(count: int) -> int:
        raise AssertionError("there is nothing to agree about")

    group = feeds(data_of("dataset", 7).repeat(), 2, 4, agree=forbidden)
    iterators = [feed.epoch(0) for feed in group]
    steps = [tuple(next(iterator) for iterator in iterators) for _ in range(14)]
    assert all(len(step_examples(batches)) == 4 for batches in steps)
    assert {batch.examples for batches in steps for batch in batches} == {4}
    # 14 steps of 4 are 8 times round 7 examples.
    assert Counter(i for b in steps for i in step_examples(b)) == Counter(list(range(7)) * 8)


def test_a_dataset_keeps_its_order() -> None:
    steps = lockstep(feeds(data_of("dataset", 12), 3, 6))
    assert [sorted(step_examples(batches)) for batches in steps] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_reads_every_example_once(kind: str, ranks: int) -> None:
    group = feeds(data_of(kind, 37), ranks, 12)
    by_rank = [list(feed.eval_batches()) for feed in group]
    seen = [i for micros in by_rank for micro in micros for i in examples_of(micro)]
    assert Counter(seen) == Counter(range(37))
    for micros in by_rank:
        # What evaluates ignores weights, so there must be no filler; and memory is bounded.
        assert all(micro.weight.numpy().all() for micro in micros)
        assert max(len(micro.weight) for micro in micros) == 12 // ranks


def test_a_rank_without_examples_evaluates_nothing() -> None:
    for kind in KINDS:
        group = feeds(data_of(kind, 2), 3, 3)
        assert sum(len(list(feed.eval_batches())) for feed in group) == 2


def test_evaluation_is_not_shuffled() -> None:
    (feed,) = feeds(data_of("arrays", 20), 1, 6)
    assert [i for m in feed.eval_batches() for i in examples_of(m)] == list(range(20))


def test_nests_keep_their_structure() -> None:
    numbers = np.arange(10)
    x = {"a": numbers.astype(np.float32), "b": (numbers[:, None] * [1, 2]).astype(np.int32)}
    y = (numbers.astype(np.int64), np.stack([numbers, -numbers], 1).astype(np.float32))
    (feed,) = feeds((x, y), 1, 5)
    for batch in feed.epoch(0):
        (micro,) = batch.micros
        rows = micro.x["a"].numpy()
        np.testing.assert_array_equal(micro.x["b"].numpy(), rows[:, None] * [1, 2])
        np.testing.assert_array_equal(micro.y[0].numpy(), rows)
        np.testing.assert_array_equal(micro.y[1].numpy(), np.stack([rows, -rows], 1))
        assert micro.x["b"].dtype == tf.int32
        assert micro.y[0].dtype == tf.int64


def test_indexables_of_nests() -> None:
    rows = [({"a": np.float32(i)}, {"t": np.array([i, i])}) for i in range(6)]
    (feed,) = feeds(rows, 1, 3)
    seen: list[float] = []
    for batch in feed.epoch(0):
        a = batch.micros[0].x["a"].numpy()
        np.testing.assert_array_equal(batch.micros[0].y["t"].numpy(), np.stack([a, a], 1))
        seen += a.tolist()
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float64, tf.float32),
        (np.float32, tf.float32),
        (np.float16, tf.float16),
        (np.int64, tf.int64),
        (np.uint8, tf.uint8),
        (np.bool_, tf.bool),
    ],
)
def test_only_double_precision_is_converted(given: Any, expected: tf.DType) -> None:
    x = np.arange(8).astype(given)
    for data in ((x, x), list(zip(x, x, strict=True))):
        (feed,) = feeds(data, 1, 4)
        for micro in (next(feed.epoch(0)).micros[0], next(iter(feed.eval_batches()))):
            assert (micro.x.dtype, micro.y.dtype) == (expected, expected)


BAD = {
    "lengths differ": ((np.zeros(3), np.zeros(4)), r"lengths \[3, 4\]"),
    "lengths differ in a nest": (({"a": np.zeros(3), "b": np.zeros(2)}, np.zeros(3)), r"\[2, 3\]"),
    "no examples": ((np.zeros((0, 2)), np.zeros(0)), r"lengths \[0\]"),
    "a number": ((np.zeros(3), np.float32(1)), r"lengths \[0, 3\]"),
    "an empty indexable": ([], "list of length 0"),
    "nothing": (None, "NoneType"),
    "a generator": ((i for i in range(3)), "generator"),
}


@pytest.mark.parametrize("what", ["train_data", "eval_data"])
@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_explained(name: str, what: str) -> None:
    data, received = BAD[name]
    with pytest.raises(ConfigError, match=rf"^task: {what}\(\) gave") as caught:
        make_feed(data, what=what, global_batch=4, ranks=1, rank=0)
    assert caught.value.rule
    assert caught.value.do
    assert what in caught.value.do
    assert re.search(received, str(caught.value.received))


def test_a_dataset_of_something_else_than_pairs_is_explained() -> None:
    triples = tf.data.Dataset.from_tensor_slices((np.zeros(3), np.zeros(3), np.zeros(3)))
    for dataset in (tf.data.Dataset.range(4), triples):
        with pytest.raises(ConfigError, match="elements are not pairs") as caught:
            make_feed(dataset, what="train_data", global_batch=2, ranks=1, rank=0)
        assert caught.value.rule
        assert "TensorSpec" in str(caught.value.received)
        assert caught.value.do


def test_a_dataset_known_to_be_empty_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval_data\(\) gave an empty dataset") as caught:
        make_feed(data_of("dataset", 3).take(0), what="eval_data", global_batch=2, ranks=1, rank=0)
    assert caught.value.rule


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dataset_that_turns_out_to_be_empty_ends(ranks: int, accumulate: int) -> None:
    """There is no row to fill a batch with."""
    empty = data_of("dataset", 3).filter(lambda _x, _y: False)
    group = feeds(empty, ranks, 4, accumulate=accumulate)
    assert group[0].steps_per_epoch is None
    assert lockstep(group) == []
    assert [list(feed.eval_batches()) for feed in group] == [[]] * ranks


@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_datasets_of_double_precision_are_converted(kind: str) -> None:
    """Fillers too: both kinds of batches go through one trace."""
    numbers = np.arange(5)
    x = {"a": numbers.astype(np.float64), "b": numbers.astype(np.int64)}
    dataset = tf.data.Dataset.from_tensor_slices((x, (numbers / 2, numbers.astype(np.float16))))
    if kind == "stream":
        dataset = dataset.filter(lambda _x, _y: True)
    group = feeds(dataset, 2, 4)
    micros = [m for batches in lockstep(group) for batch in batches for m in batch.micros]
    assert len(micros) == 4
    assert sorted(float(tf.reduce_sum(m.weight)) for m in micros) == [0, 1, 2, 2]
    for micro in (*micros, *group[0].eval_batches()):
        dtypes = (micro.x["a"].dtype, micro.x["b"].dtype, micro.y[0].dtype, micro.y[1].dtype)
        assert dtypes == (tf.float32, tf.int64, tf.float32, tf.float16)
        np.testing.assert_array_equal(micro.x["a"] / 2, micro.y[0])


def as_lists(x: np.ndarray, y: np.ndarray) -> list[tuple[Any, Any]]:
    return [(x.tolist(), y.tolist()), (x, y.tolist()), (x.tolist(), y)]


def test_lists_of_numbers_are_arrays() -> None:
    x, y = data_of("arrays", 10)
    (reference,) = feeds((x, y), 1, 4)
    expected = [contents(batch) for batch in reference.epoch(0)]
    for data in as_lists(x, y):
        (feed,) = feeds(data, 1, 4)
        assert feed.samples == 10
        assert [contents(batch) for batch in feed.epoch(0)] == expected
    (feed,) = feeds((x, [0, 1] * 5), 1, 4)
    assert next(feed.epoch(0)).micros[0].y.dtype == tf.int64


def test_lists_that_differ_in_length_are_explained() -> None:
    x, y = data_of("arrays", 3)
    for data in as_lists(x, np.append(y, 0)):
        with pytest.raises(ConfigError, match=r"arrays that do not fit together") as caught:
            feeds(data, 1, 2)
        assert caught.value.received == "lengths [3, 4]"


# --- small arrays in blocks, others in a thread ---


def contents(batch: Batch) -> tuple[int, list[tuple[Any, ...]]]:
    return batch.examples, [
        (m.x.numpy().tolist(), m.y.numpy().tolist(), m.weight.numpy().tolist(), m.x.dtype)
        for m in batch.micros
    ]


EXAMPLE_BYTES = 3 * 4  # in data_of("arrays", ...)
LONG = 401  # in batches of 6: 67 steps, the last one of 5 examples


@pytest.mark.parametrize(
    ("ranks", "accumulate"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 3), (3, 2), (4, 1), (4, 2)]
)
@pytest.mark.parametrize("first_step", [0, 1, 3, 62, 63, 64, 66, 67])
def test_batches_do_not_depend_on_how_they_are_fetched(
    monkeypatch: pytest.MonkeyPatch, ranks: int, accumulate: int, first_step: int
) -> None:
    def epoch(kind: str, inline_bytes: int) -> list[Any]:
        monkeypatch.setattr(hvps_data, "_INLINE_BYTES", inline_bytes)
        group = feeds(data_of(kind, LONG), ranks, 6, accumulate=accumulate, seed=4)
        steps = lockstep(group, 2, first_step)
        seen = [i for batches in steps for i in step_examples(batches)]
        assert len(seen) == len(set(seen)) == max(0, LONG - 6 * first_step)
        return [[contents(batch) for batch in batches] for batches in steps]

    expected = epoch("indexable", 1 << 20)
    assert len(expected) == 67 - first_step
    step_bytes = EXAMPLE_BYTES * max(1, 6 // (ranks * accumulate)) * accumulate
    # In one block of 64 steps, step by step, in blocks that do not divide 64, in a thread.
    for inline_bytes in (1 << 20, step_bytes, 5 * step_bytes + 1, step_bytes - 1):
        assert epoch("arrays", inline_bytes) == expected


def test_blocks_keep_the_structure_of_nests() -> None:
    numbers = np.arange(150)
    x = {"a": numbers.astype(np.float32), "b": (numbers[:, None], numbers.astype(np.uint8))}
    y = {"t": np.stack([numbers, -numbers], 1)}
    (feed,) = feeds((x, y), 1, 2, accumulate=2)
    order = permuted(numbers, 150, 0, 0)
    micros = [micro for batch in feed.epoch(0) for micro in batch.micros]
    assert len(micros) == 150
    for micro, i in zip(micros, order.tolist(), strict=True):
        assert micro.x["a"].numpy().tolist() == [i]
        assert micro.x["b"][0].numpy().tolist() == [[i]]
        assert micro.x["b"][1].dtype == tf.uint8
        assert micro.y["t"].numpy().tolist() == [[i, -i]]


def test_only_small_arrays_are_fetched_in_blocks_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[tuple[str, int]] = []
    make = hvps_data.indexed_source

    def counting(given: Any, what: str) -> Source:
        source = make(given, what)

        def fetch(indices: np.ndarray) -> Any:
            fetched.append((threading.current_thread().name, len(indices)))
            return source.fetch(indices)

        return replace(source, fetch=fetch)

    monkeypatch.setattr(hvps_data, "indexed_source", counting)
    here = threading.current_thread().name
    batches_of_6 = [6] * 66 + [5]
    for kind, inline_bytes, expected in (
        ("arrays", 1 << 20, [(here, 64 * 6), (here, 2 * 6 + 5)]),
        ("arrays", 6 * EXAMPLE_BYTES, [(here, n) for n in batches_of_6]),
        ("arrays", 6 * EXAMPLE_BYTES - 1, [("hvps-prefetch", n) for n in batches_of_6]),
        ("indexable", 1 << 20, [("hvps-prefetch", n) for n in batches_of_6]),
    ):
        monkeypatch.setattr(hvps_data, "_INLINE_BYTES", inline_bytes)
        fetched.clear()
        (feed,) = feeds(data_of(kind, LONG), 1, 6)
        assert len(list(feed.epoch(0))) == 67
        assert fetched == expected


# --- prefetching ---


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hvps-prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_prefetching_keeps_items_and_their_order(depth: int) -> None:
    assert list(prefetched(iter(range(20)), depth)) == list(range(20))
    assert list(prefetched(iter([None, None]), depth)) == [None, None]
    assert list(prefetched(iter([]), depth)) == []
    assert prefetchers() == []


def test_an_exception_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("cannot be read")

    ahead = prefetched(items(), 4)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="cannot be read") as caught:
        next(ahead)
    # The place in the task's own code is what the user needs.
    assert any(entry.name == "items" for entry in caught.traceback)
    assert prefetchers() == []


def test_a_task_that_fails_fails_the_epoch() -> None:
    class Failing(Rows):
        def __getitem__(self, i: int) -> tuple[np.ndarray, np.float32]:
            if i == 7:
                raise OSError("example 7 cannot be read")
            return super().__getitem__(i)

    (feed,) = feeds(Failing(10), 1, 2)
    with pytest.raises(OSError, match="example 7"):
        list(feed.epoch(0))
    with pytest.raises(OSError, match="example 7"):
        list(feed.eval_batches())


def test_the_thread_ends_when_nobody_reads_on() -> None:
    finished = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            finished.set()

    source = items()
    ahead = prefetched(source, 2)
    assert [next(ahead), next(ahead)] == [0, 1]
    assert len(prefetchers()) == 1
    ahead.close()
    assert prefetchers() == []
    source.close()
    assert finished.is_set()


def test_the_thread_ends_when_the_reader_fails() -> None:
    def read() -> None:
        for _ in prefetched(itertools.count(), 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read()
    assert prefetchers() == []


def test_work_is_done_ahead_but_not_without_bound() -> None:
    made: list[int] = []
    two_ahead, too_many = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        for i in itertools.count():
            made.append(i)
            if i >= 3:
                two_ahead.set()
            if i >= 5:
                too_many.set()
            yield i

    ahead = prefetched(items(), 2)
    next(ahead)
    # Without the reader's help: two wait in the queue, one in the thread's hand.
    assert two_ahead.wait(60)
    assert not too_many.wait(0.3)
    ahead.close()


def test_work_is_done_in_another_thread() -> None:
    names = set(prefetched((threading.current_thread().name for _ in range(3)), 1))
    assert names == {"hvps-prefetch"}


def test_a_list_of_numpy_numbers_is_an_array() -> None:
    given = (np.ones((3, 2)), list(np.arange(3)))
    feed = make_feed(given, what="train_data", global_batch=3, ranks=1, rank=0, shuffle=False)
    np.testing.assert_array_equal(next(iter(feed.epoch(0))).micros[0].y, [0, 1, 2])


def test_a_list_of_arrays_is_several_inputs() -> None:
    x = [np.zeros((10, 3), np.float32), np.ones((10, 4), np.float32)]
    feed = make_feed((x, np.zeros(10)), what="train_data", global_batch=4, ranks=1, rank=0)
    batch = next(iter(feed.epoch(0)))
    assert [part.shape[1] for part in batch.micros[0].x] == [3, 4]


def test_a_ragged_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="a list that is no array"):
        make_feed(([[1, 2], [3]], [0, 1]), what="train_data", global_batch=2, ranks=1, rank=0)


# --- going on in the middle ---


def told(batch: Batch) -> tuple[Any, ...]:
    """All that a batch says, and whose examples it holds."""
    return batch.step, batch.epoch, batch.within, batch.examples, step_examples((batch,))


def positions(batches: list[tuple[Any, ...]]) -> list[Position]:
    """Where a run is after each number of steps, as backends say."""
    found = [START]
    for step, epoch, within, examples, _ in batches:
        found.append(Position(step + 1, epoch, within + 1, found[-1].examples + examples))
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_work_goes_on_with_exactly_the_rest(kind: str, accumulate: int) -> None:
    (feed,) = feeds(data_of(kind, 20), 1, 6, accumulate=accumulate, seed=3)
    whole = [told(b) for b in consecutive(feed, total=None, epochs=3)]
    assert [entry[0] for entry in whole] == list(range(12))
    assert [entry[1:3] for entry in whole] == [(e, w) for e in range(3) for w in range(4)]
    assert [entry[3] for entry in whole] == [6, 6, 6, 2] * 3
    for done, start in enumerate(positions(whole)):
        rest = [told(b) for b in consecutive(feed, start=start, total=None, epochs=3)]
        assert rest == whole[done:], start
    for total in (0, 4, 7, 12, 13):
        for done, start in enumerate(positions(whole)):
            rest = [told(b) for b in consecutive(feed, start=start, total=total, epochs=None)]
            expected = whole[done:total] if total <= 12 else whole[done:]
            assert rest[: len(expected)] == expected
            assert len(rest) == max(0, total - done)


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_do_goes_on_on_another_number(kind: str) -> None:
    """A step holds the same examples on however many; so does its position."""
    (alone,) = feeds(data_of(kind, 20), 1, 6, seed=3)
    whole = [told(b) for b in consecutive(alone, total=None, epochs=2)]
    if kind == "stream":  # its ranks agree in lockstep, which is a matter of other tests
        return
    group = feeds(data_of(kind, 20), 2, 6, seed=3)
    for done, start in enumerate(positions(whole)):
        both = [list(consecutive(feed, start=start, total=None, epochs=2)) for feed in group]
        for batches, expected in zip(zip(*both, strict=True), whole[done:], strict=True):
            assert {(b.step, b.epoch, b.within, b.examples) for b in batches} == {expected[:4]}
            assert sorted(step_examples(batches)) == sorted(expected[4])


def test_an_endless_dataset_goes_on() -> None:
    (feed,) = feeds(data_of("dataset", 7).repeat(), 1, 4)
    whole = [told(b) for b in consecutive(feed, total=9, epochs=None)]
    assert len(whole) == 9
    for done, start in enumerate(positions(whole)):
        rest = [told(b) for b in consecutive(feed, start=start, total=9, epochs=None)]
        assert rest == whole[done:]


def test_data_that_was_there_once_is_explained() -> None:
    """The end of an epoch that was entered at its end is none."""
    readings = itertools.count()

    def rows() -> Iterator[tuple[np.ndarray, np.float32]]:
        if next(readings) == 0:
            for i in range(4):
                yield np.full(2, i, np.float32), np.float32(i)

    signature = (tf.TensorSpec((2,), tf.float32), tf.TensorSpec((), tf.float32))
    dataset = tf.data.Dataset.from_generator(rows, output_signature=signature)
    (feed,) = feeds(dataset, 1, 2)
    batches = consecutive(feed, total=None, epochs=3)
    assert [next(batches).step, next(batches).step] == [0, 1]
    with pytest.raises(TrainingError, match="no examples in epoch 1"):
        next(batches)
    with pytest.raises(TrainingError, match="no examples in epoch 1"):
        list(consecutive(feed, start=Position(2, 0, 2, 4), total=None, epochs=3))


def dealt(feed: Feed, steps: list[int], *, done: int = 0, epochs: int | None = 2) -> list[Any]:
    batches = feed.dealt(iter(steps), deal=None, epochs=epochs, done=done)
    return [told(batch) for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_dealt_steps_go_on_after_those_that_were_done(kind: str) -> None:
    """Of data in order they are the next ones; other data are entered wherever the step says."""
    (feed,) = feeds(data_of(kind, 20), 1, 6, seed=3)
    whole = dealt(feed, list(range(8)))
    assert [entry[:3] for entry in whole] == [(s, s // 4, s % 4) for s in range(8)]
    for done in range(9):
        assert dealt(feed, list(range(done, 8)), done=done) == whole[done:]


@pytest.mark.parametrize("kind", ["arrays", "indexable"])
def test_dealt_steps_of_indexed_data_are_any(kind: str) -> None:
    (feed,) = feeds(data_of(kind, 20), 1, 6, seed=3)
    whole = dealt(feed, list(range(8)))
    for done in (0, 5):
        assert dealt(feed, [1, 6, 7], done=done) == [whole[i] for i in (1, 6, 7)]


@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_each_asynchronous_worker_goes_on_in_its_own_part_of_a_dataset(kind: str) -> None:
    """Whatever the global steps' numbers are that it is given for it."""

    def worker(rank: int) -> Feed:
        return make_feed(
            data_of(kind, 21),
            what="train_data",
            global_batch=4,
            ranks=1,
            rank=0,
            reading_share=(rank, 2),
        )

    for rank in range(2):
        feed = worker(rank)
        assert feed.divided_among_readers
        whole = dealt(feed, [10 + 3 * i for i in range(20)])
        assert [i for entry in whole for i in entry[4]] == list(range(rank, 21, 2)) * 2
        assert [entry[0] for entry in whole] == [10 + 3 * i for i in range(6)]
        assert [entry[1:3] for entry in whole] == [(e, w) for e in range(2) for w in range(3)]
        for done in range(7):
            asked = iter(range(100, 200))
            batches = feed.dealt(asked, deal=None, epochs=2, done=done)
            rest = [told(batch) for batch in batches]
            assert [entry[1:] for entry in rest] == [entry[1:] for entry in whole[done:]]
            # A step is taken only when there is a batch for it.
            assert next(asked) == 100 + len(rest)
