"""The learning rate at every step: golden values, continuity, scaling, purity."""

from __future__ import annotations

import math
import random

import pytest

from hvps.overrides import load_config
from hvps.schedule import Schedule, make_schedule


def schedule(
    *overrides: str, base: float = 0.1, ranks: int = 1, total: int | None = 110
) -> Schedule:
    config = load_config(None, [f"schedule.{text}" for text in overrides]).config
    return make_schedule(config, base, ranks, total)


def test_by_default_the_rate_is_constant() -> None:
    rate = schedule()
    assert {rate(step) for step in (0, 1, 50, 109, 10**9)} == {0.1}
    assert rate.explanation == "0.1"


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rate = schedule("warmup_steps=4")
    assert [rate(step) for step in range(6)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_warm_up_from_a_fraction() -> None:
    rate = schedule("warmup_steps=4", "warmup_from=0.2")
    assert [rate(step) for step in range(5)] == pytest.approx([0.04, 0.06, 0.08, 0.1, 0.1])


def test_linear_decay() -> None:
    rate = schedule("decay=linear", "warmup_steps=10", "final=0.2")
    # 110 steps in all, 10 of them warm-up: 100 to fall from 0.1 to 0.02.
    assert [rate(step) for step in (10, 35, 60, 110, 500)] == pytest.approx(
        [0.1, 0.08, 0.06, 0.02, 0.02]
    )


def test_cosine_decay() -> None:
    rate = schedule("decay=cosine", "warmup_steps=10", "final=0.2")
    assert [rate(step) for step in (10, 35, 60, 85, 110, 500)] == pytest.approx(
        [
            0.1,
            0.02 + 0.08 * 0.5 * (1 + math.sqrt(0.5)),
            0.06,
            0.02 + 0.08 * 0.5 * (1 - math.sqrt(0.5)),
            0.02,
            0.02,
        ]
    )


def test_decay_steps_are_counted_from_the_end_of_the_warm_up() -> None:
    rate = schedule("decay=linear", "warmup_steps=10", "decay_steps=20")
    assert [rate(step) for step in (10, 20, 30, 40)] == pytest.approx([0.1, 0.05, 0.0, 0.0])


def test_exponential_decay() -> None:
    rate = schedule("decay=exponential", "decay_steps=10", "rate=0.25", "warmup_steps=2")
    assert [rate(step) for step in (2, 7, 12, 22)] == pytest.approx([0.1, 0.05, 0.025, 0.00625])


def test_step_decay_applies_the_rate_at_each_boundary() -> None:
    rate = schedule("decay=step", "boundaries=[10,20]", "rate=0.5", "warmup_steps=3")
    steps = (3, 9, 10, 19, 20, 1000)
    assert [rate(step) for step in steps] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])


def test_without_a_known_length_decay_does_not_divide_by_zero() -> None:
    rate = schedule("decay=cosine", "warmup_steps=5", total=None)
    assert rate(4) == pytest.approx(0.1)
    assert 0.0 <= rate(6) <= 0.1


DECAYS = [
    ("decay=none",),
    ("decay=linear",),
    ("decay=cosine",),
    ("decay=exponential", "decay_steps=50"),
    ("decay=step", "boundaries=[60]"),
]


@pytest.mark.parametrize("decay", DECAYS, ids=lambda d: d[0])
def test_the_end_of_the_warm_up_joins_the_decay(decay: tuple[str, ...]) -> None:
    rate = schedule(*decay, "warmup_steps=20")
    assert rate(19) == pytest.approx(rate.peak)
    assert rate(20) == pytest.approx(rate.peak)
    # No jump in the next steps either: at most 1/20 of the peak, the slope of the warm-up.
    for step in range(40):
        assert abs(rate(step + 1) - rate(step)) <= rate.peak / 20 + 1e-12


@pytest.mark.parametrize("decay", DECAYS, ids=lambda d: d[0])
def test_the_rate_is_a_pure_function_of_the_step(decay: tuple[str, ...]) -> None:
    one, other = schedule(*decay, "warmup_steps=7"), schedule(*decay, "warmup_steps=7")
    forward = [one(step) for step in range(130)]
    steps = list(range(130))
    random.Random(0).shuffle(steps)
    assert {step: other(step) for step in steps} == dict(enumerate(forward))
    assert [one(step) for step in range(130)] == forward


@pytest.mark.parametrize("decay", DECAYS, ids=lambda d: d[0])
def test_every_part_is_scaled_alike(decay: tuple[str, ...]) -> None:
    plain = schedule(*decay, "warmup_steps=7", "warmup_from=0.1")
    scaled = schedule(*decay, "warmup_steps=7", "warmup_from=0.1", "scaling=linear", ranks=4)
    for step in range(130):
        assert scaled(step) == pytest.approx(4 * plain(step))


@pytest.mark.parametrize(
    ("overrides", "ranks", "factor"),
    [
        (("scaling=none",), 8, 1.0),
        # The base rate belongs to one rank's share, so it grows with the ranks.
        (("scaling=linear",), 1, 1.0),
        (("scaling=linear",), 4, 4.0),
        (("scaling=sqrt",), 4, 2.0),
        # The default global batch is 64: the ranks do not matter any more.
        (("scaling=linear", "base_batch=16"), 1, 4.0),
        (("scaling=linear", "base_batch=16"), 8, 4.0),
        (("scaling=sqrt", "base_batch=16"), 8, 2.0),
        (("scaling=linear", "base_batch=128"), 2, 0.5),
        (("scaling=linear", "base_batch=64"), 2, 1.0),
    ],
)
def test_scaling(overrides: tuple[str, ...], ranks: int, factor: float) -> None:
    rate = schedule(*overrides, ranks=ranks)
    assert rate.factor == pytest.approx(factor)
    assert rate.peak == pytest.approx(0.1 * factor)
    assert rate(0) == pytest.approx(0.1 * factor)


def test_the_banner_says_how_the_rate_was_derived() -> None:
    text = schedule("scaling=linear", "warmup_steps=5", "decay=cosine", ranks=4).explanation
    assert text == (
        "0.4 = 0.1 × 4 (linear: global batch 64 / base batch 16),"
        " warm-up over 5 steps, cosine decay"
    )
