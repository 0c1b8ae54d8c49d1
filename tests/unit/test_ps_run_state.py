"""Steps dealt to workers: each once, whoever is slow, leaves or dies."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hvps.backends.ps.run_state import RunState


def run_state(
    workers: int = 2, total: int | None = 10, update: str = "async", **more: Any
) -> RunState:
    spec = {"workers": workers, "total": total, "update": update}
    run = RunState({**spec, "max_staleness": 1, "worker_steps": None, **more})
    for worker in range(workers):
        run.join(worker)
    return run


def done(steps: int = 1, **more: Any) -> dict[str, Any]:
    return {"steps": steps, "dropped": 0, "examples": 8, "loss_sum": 1.0, "staleness": {}, **more}


def step_of(run: RunState, worker: int) -> int:
    answer = run.claim(worker)
    assert answer is not None
    return int(answer["step"])


@pytest.mark.parametrize("seed", range(5))
def test_each_step_once_in_any_order(seed: int) -> None:
    rng, run = random.Random(seed), run_state(3, 50)
    dealt: list[int] = []
    working = [0, 1, 2]
    while working:
        worker = rng.choice(working)
        answer = run.claim(worker)
        if answer is None:
            continue
        if "end" in answer:
            assert answer["end"] is None
            working.remove(worker)
            run.leave(worker)
        else:
            dealt.append(answer["step"])
            run.report(worker, done())
    assert sorted(dealt) == list(range(50))
    assert run.summary()["steps"] == 50


def test_steps_of_the_dead_are_given_to_others() -> None:
    run = run_state(2, 6)
    mine = [step_of(run, 0), step_of(run, 0)]
    lost = [step_of(run, 1), step_of(run, 1), step_of(run, 1)]
    run.lose(1, applied=1)  # one of its three was applied before it died
    rest = [step_of(run, 0), step_of(run, 0), step_of(run, 0)]
    assert sorted([*mine, lost[0], *rest]) == list(range(6))
    assert run.claim(0) == {"end": None}


def test_the_chief_waits_for_those_whose_steps_it_might_have_to_take() -> None:
    run = run_state(2, 2)
    first, other = step_of(run, 0), step_of(run, 1)
    run.report(0, done())
    assert run.claim(0) is None
    run.lose(1, applied=0)
    assert step_of(run, 0) == other != first
    assert run.claim(0) == {"end": None}


def test_one_that_comes_back_goes_on() -> None:
    run = run_state(2, 10)
    step_of(run, 1)
    run.report(1, done())
    run.lose(1, applied=1)
    assert run.join(1) == 1
    assert step_of(run, 1) == 1
    assert run.summary()["worker_deaths"] == [0, 1]


def test_a_stop_ends_the_work_of_all() -> None:
    run = run_state(2, 10)
    step_of(run, 0)
    run.stop("SIGTERM")
    run.stop("early_stop")
    assert run.claim(0) == run.claim(1) == {"end": "SIGTERM"}


def test_a_stop_of_synchronous_training_completes_begun_rounds() -> None:
    run = run_state(2, 10, "sync")
    assert [step_of(run, 0), step_of(run, 0), step_of(run, 1)] == [0, 1, 0]
    run.stop("SIGTERM")
    assert run.claim(0) == {"end": "SIGTERM"}
    assert step_of(run, 1) == 1
    assert run.claim(1) == {"end": "SIGTERM"}


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_nobody_begins_too_far_ahead(bound: int) -> None:
    run = run_state(3, None, "bounded", max_staleness=bound)
    begun = 0
    while run.may_begin(0):
        run.report(0, done())
        begun += 1
    assert begun == bound + 1
    run.report(1, done())
    assert not run.may_begin(0)  # worker 2 is the slowest
    run.report(2, done())
    assert run.may_begin(0)
    assert run.max_lead == bound


def test_those_who_have_left_hold_nobody_back() -> None:
    run = run_state(2, None, "bounded", max_staleness=0)
    run.report(0, done())
    assert not run.may_begin(0)
    run.leave(1)
    assert run.may_begin(0)


def test_one_that_comes_back_does_not_hold_the_others_back() -> None:
    run = run_state(3, None, "bounded", max_staleness=0)
    for worker in (0, 2):
        run.report(worker, done(5))
    run.lose(1, applied=0)
    assert run.may_begin(0)
    run.join(1)
    assert run.may_begin(0)
    assert run.may_begin(1)


def test_limits_by_worker() -> None:
    run = run_state(2, 5, worker_steps=[3, 2])
    assert [step_of(run, 1), step_of(run, 1)] == [0, 1]
    assert run.claim(1) == {"end": None}
    run.report(1, done(2))
    assert [step_of(run, 0) for _ in range(3)] == [2, 3, 4]


def test_the_interval_and_the_summary() -> None:
    run = run_state()
    run.report(0, done(2, staleness={"0": 1, "3": 1}))
    assert run.take_interval() == {
        "steps": 2,
        "examples": 8,
        "loss_sum": 1.0,
        "staleness_mean": 1.5,
        "staleness_max": 3,
    }
    assert run.take_interval()["steps"] == 0
    summary = run.summary()
    assert summary["staleness_histogram"] == {"0": 1, "3": 1}
    assert summary["worker_steps"] == [2, 0]
