"""The order of samples and how it is dealt to ranks: each sample once, whatever the ranks."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest

from hvps import sampling
from hvps.sampling import Plan, Share, permuted

SIZES = [
    *range(1, 20),
    *(2**k + d for k in range(5, 13) for d in (-1, 0, 1)),
    10_007,
]


def order(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permuted(np.arange(n), n, seed, epoch)


@pytest.mark.parametrize("n", SIZES)
def test_an_order_is_a_permutation(n: int) -> None:
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (2**31 - 1, 12_345)):
        found = order(n, seed, epoch)
        assert found.dtype == np.int64
        assert sorted(found.tolist()) == list(range(n))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    seen = {order(50, seed, epoch).tobytes() for seed in range(12) for epoch in range(12)}
    assert len(seen) == 144


def test_small_sets_are_shuffled_too() -> None:
    for n in (2, 3, 4, 5):
        seen = {tuple(order(n, 0, epoch).tolist()) for epoch in range(3000)}
        assert seen == set(itertools.permutations(range(n)))


@pytest.mark.parametrize("n", [5, 64, 100, 10_007])
def test_a_position_has_its_sample_whatever_else_is_asked_for(n: int) -> None:
    whole = order(n, 3, 4)
    rng = np.random.default_rng(0)
    subset = rng.permutation(n)[: max(1, n // 3)]
    np.testing.assert_array_equal(permuted(subset, n, 3, 4), whole[subset])
    np.testing.assert_array_equal(permuted(subset.astype(np.int32), n, 3, 4), whole[subset])
    for position in (0, n // 2, n - 1):
        assert permuted(np.array([position]), n, 3, 4).tolist() == [whole[position]]
        assert permuted(np.array(position), n, 3, 4) == whole[position]
    doubled = np.array([[n - 1, n - 1], [0, n - 1]])
    np.testing.assert_array_equal(permuted(doubled, n, 3, 4), whole[doubled])
    np.testing.assert_array_equal(order(n, 3, 4), whole)


def test_nothing_asked_is_nothing() -> None:
    for n in (0, 1, 7):
        assert permuted(np.zeros(0, int), n, 0, 0).shape == (0,)
    assert permuted(np.zeros((2, 3), int), 1, 0, 0).shape == (2, 3)


def test_positions_are_not_written_to() -> None:
    positions = np.arange(30, dtype=np.uint64)
    permuted(positions, 30, 0, 0)
    np.testing.assert_array_equal(positions, np.arange(30))


def test_wrapping_arithmetic_warns_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (1, 2, 3, 1000):
            order(n, 2**31 - 1, 10**9)


GOLDEN_20 = [11, 18, 17, 1, 5, 2, 8, 14, 0, 10, 9, 4, 15, 6, 19, 12, 13, 7, 16, 3]
GOLDEN_10007 = [9832, 8430, 5274, 618, 4790]
GOLDEN_LARGE = [816569895554, 432761075030, 166995291597, 948520032017]


# A resumed run must find the order that its first part had, maybe under an older version: a change
# of these numbers breaks every checkpoint that was written in the middle of an epoch.
def test_the_order_never_changes_between_versions() -> None:
    assert order(20, seed=7, epoch=3).tolist() == GOLDEN_20
    positions = np.array([0, 1, 2, 5000, 10_006])
    assert permuted(positions, 10_007, 0, 0).tolist() == GOLDEN_10007
    positions = np.array([0, 1, 2, 2**40])
    assert permuted(positions, 2**40 + 1, 12, 34).tolist() == GOLDEN_LARGE


@pytest.mark.parametrize("n", [10, 16, 33])
def test_samples_come_at_every_position_equally_often(n: int) -> None:
    epochs = 200 * n
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[order(n, 1, epoch), np.arange(n)] += 1
    expected = epochs / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    # Five standard deviations; the numbers are fixed, so this fails always or never.
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_neighbours_are_torn_apart() -> None:
    """A batch must not be made of samples that lie side by side in the data."""
    n = 4096
    steps = np.abs(np.diff(order(n)))
    assert np.mean(steps) == pytest.approx(n / 3, rel=0.05)
    assert np.sum(steps == 1) < 15
    both = np.corrcoef(order(n, 0, 0), order(n, 0, 1))[0, 1]
    assert abs(both) < 5 / math.sqrt(n)


NEIGHBOURS = [
    *(((seed, 0), (seed + step, 0)) for seed in (0, 1, 7, 2**31 - 3) for step in (1, 2)),
    *(((0, epoch), (0, epoch + step)) for epoch in (0, 1, 100) for step in (1, 2)),
    ((0, 1), (1, 0)),
    ((5, 3), (6, 2)),
]


@pytest.mark.parametrize(("first", "second"), NEIGHBOURS, ids=str)
def test_neighbours_are_no_shifted_copies(first: tuple[int, int], second: tuple[int, int]) -> None:
    """With round keys that only move on by one round from seed to seed, samples that come from the
    same column of one order lie in the same row of the next."""
    n, half = 1024, 32
    a, b = order(n, *first), order(n, *second)
    for x, y in ((a, b), (b, a)):
        equal = [
            np.array_equal(np.sort(x[v::half] % half), np.sort(y[v * half :][:half] // half))
            for v in range(half)
        ]
        assert not any(equal)


def test_no_round_key_is_used_twice() -> None:
    keys = [key for s in range(40) for e in range(40) for key in sampling._round_keys(s, e)]
    assert len(set(keys)) == len(keys) == 40 * 40 * sampling._ROUNDS


PLANS = [
    Plan(samples, global_batch, ranks, accumulate)
    for samples in (1, 5, 37, 64, 65, 200)
    for global_batch in (1, 7, 12, 64)
    for ranks in (1, 2, 3, 4)
    for accumulate in (1, 2, 3)
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_step_is_cut_into_shares_that_cover_it(plan: Plan) -> None:
    seen: list[int] = []
    for step in range(plan.steps_per_epoch):
        shares = [
            plan.share(step, micro, rank)
            for micro in range(plan.accumulate)
            for rank in range(plan.ranks)
        ]
        sizes = [len(share) for share in shares]
        assert min(sizes) >= 0
        assert max(sizes) - min(sizes) <= 1
        positions = sorted(p for share in shares for p in range(share.start, share.stop))
        first = step * plan.global_batch
        assert positions == list(range(first, first + plan.step_size(step)))
        seen += positions
    assert sorted(seen) == list(range(plan.samples))


def test_steps_hold_the_global_batch_and_the_last_one_the_rest() -> None:
    plan = Plan(samples=37, global_batch=10, ranks=2)
    assert plan.steps_per_epoch == 4
    assert [plan.step_size(step) for step in range(4)] == [10, 10, 10, 7]
    assert Plan(samples=40, global_batch=10).steps_per_epoch == 4
    assert Plan(samples=3, global_batch=10).steps_per_epoch == 1


def test_the_samples_of_a_step_do_not_depend_on_the_ranks() -> None:
    def step(ranks: int, accumulate: int) -> set[int]:
        plan = Plan(100, 24, ranks, accumulate)
        shares = [plan.share(2, m, r) for m in range(accumulate) for r in range(ranks)]
        return {p for share in shares for p in range(share.start, share.stop)}

    expected = set(range(48, 72))
    assert all(step(r, a) == expected for r in (1, 2, 3, 4, 5) for a in (1, 2, 4))


def test_micro_batches_of_all_ranks_come_one_after_the_other() -> None:
    plan = Plan(samples=16, global_batch=8, ranks=2, accumulate=2)
    assert plan.share(1, 0, 0) == Share(8, 10)
    assert plan.share(1, 0, 1) == Share(10, 12)
    assert plan.share(1, 1, 0) == Share(12, 14)
    assert plan.share(1, 1, 1) == Share(14, 16)


@pytest.mark.parametrize("samples", [1, 2, 37, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_evaluation_shares_cover_the_data_once(samples: int, ranks: int) -> None:
    plan = Plan(samples, 8, ranks)
    shares = [plan.eval_share(rank) for rank in range(ranks)]
    assert [p for share in shares for p in range(share.start, share.stop)] == list(range(samples))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
