"""Steps dealt to workers: each once, whoever is slow, leaves or dies."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from hvps.backends.ps.run_state import RunState


def run_state(
    workers: int = 2, total: int | None = 10, update: str = "async", **more: Any
) -> RunState:
    spec = {"workers": workers, "start": 0, "total": total, "update": update, "by_worker": None}
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
    assert run.summary()["unreported"] == [lost[0]]


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


# --- a run that goes on ---


def test_steps_go_on_where_they_were() -> None:
    run = run_state(2, 10, start=6, by_worker=[4, 2])
    assert [run.join(0), run.join(1)] == [4, 2]
    assert [step_of(run, 1), step_of(run, 0), step_of(run, 0)] == [6, 7, 8]
    run.report(0, done(2))
    run.report(1, done())
    assert step_of(run, 1) == 9
    run.report(1, done())
    assert run.claim(1) == run.claim(0) == {"end": None}
    summary = run.summary()
    assert summary["worker_steps"] == [6, 4]
    assert summary["steps"] == 4  # of this life
    assert summary["examples"] == 8 * 3


def test_whose_steps_they_were_may_be_unknown() -> None:
    """With another number of workers than before; nobody has data of its own then."""
    run = run_state(3, 10, start=6)
    assert [run.join(worker) for worker in range(3)] == [0, 0, 0]
    assert sorted(step_of(run, worker) for worker in (0, 1, 2, 0)) == [6, 7, 8, 9]
    run.report(0, done(2))
    run.report(1, done())
    run.report(2, done())
    assert run.summary()["worker_steps"] == [2, 1, 1]
    assert run.claim(1) == {"end": None}


def test_a_run_that_is_over_deals_no_steps() -> None:
    for update in ("async", "bounded", "sync"):
        run = run_state(2, 10, update, start=10, by_worker=[5, 5])
        assert run.claim(1) == run.claim(0) == {"end": None}


def test_limits_count_the_steps_of_earlier_lives() -> None:
    run = run_state(2, 10, start=6, by_worker=[2, 4], worker_steps=[4, 6])
    assert [step_of(run, 1), step_of(run, 0), step_of(run, 1), step_of(run, 0)] == [6, 7, 8, 9]
    assert run.claim(1) == {"end": None}


def test_the_dead_of_a_run_that_goes_on_leave_only_this_lifes_steps() -> None:
    run = run_state(2, 10, start=6, by_worker=[3, 3])
    assert [step_of(run, 1), step_of(run, 1)] == [6, 7]
    run.lose(1, applied=4)
    assert run.summary()["worker_steps"] == [3, 4]
    assert run.join(1) == 4
    assert step_of(run, 0) == 7


def test_synchronous_rounds_go_on_where_they_were() -> None:
    run = run_state(2, 6, "sync", start=4)
    assert run.round == 4
    assert [run.join(0), run.join(1)] == [4, 4]
    assert [step_of(run, 0), step_of(run, 1), step_of(run, 0)] == [4, 4, 5]
    assert run.claim(0) == {"end": None}
    assert not run.is_over(5)
    assert run.is_over(6)


def test_bounded_workers_start_even_however_much_they_did_before() -> None:
    run = run_state(2, None, "bounded", max_staleness=0, start=10, by_worker=[9, 1])
    assert run.may_begin(0)
    assert run.may_begin(1)
    run.report(0, done())
    assert not run.may_begin(0)


# --- moments at which nothing is under way ---


def test_a_hold_waits_for_all_steps_before_it() -> None:
    run = run_state(2, 10)
    assert [step_of(run, 0), step_of(run, 1), step_of(run, 1)] == [0, 1, 2]
    run.hold_at(2)
    assert run.hold == 3  # what has begun is not taken back
    assert run.claim(0) == run.claim(1) == {"hold": 3}
    run.report(0, done())
    assert run.held(0) is None
    run.report(1, done())
    assert run.held(0) is None
    run.report(1, done())
    assert run.held(1) is None  # it is worker 0 that saves
    assert run.held(0) == {"step": 3, "examples": 24, "unreported": [], "by_worker": [1, 2]}
    run.release()
    assert run.held(1) == {}
    assert step_of(run, 1) == 3


def test_a_hold_later_on_lets_the_steps_before_it_begin() -> None:
    run = run_state(2, 10)
    run.hold_at(2)
    assert [step_of(run, 1), step_of(run, 1)] == [0, 1]
    assert run.claim(0) == {"hold": 2}
    run.report(1, done(2))
    assert run.held(0) == {"step": 2, "examples": 8, "unreported": [], "by_worker": [0, 2]}


def test_a_hold_counts_the_steps_of_earlier_lives() -> None:
    run = run_state(2, 10, start=6, by_worker=[2, 4])
    step_of(run, 0)
    run.hold_at(7)
    run.report(0, done())
    assert run.claim(0) == {"hold": 7}
    assert run.held(0) == {"step": 7, "examples": 8, "unreported": [], "by_worker": [3, 4]}


def test_a_lost_workers_steps_are_done_before_a_hold() -> None:
    run = run_state(2, 10)
    assert [step_of(run, 1), step_of(run, 1), step_of(run, 0)] == [0, 1, 2]
    run.hold_at(3)
    run.report(0, done())
    assert run.held(0) is None
    run.lose(1, applied=1)
    assert run.held(0) == {}  # there is work again
    assert step_of(run, 0) == 1
    assert run.claim(0) == {"hold": 3}
    assert run.held(0) is None
    run.report(0, done())
    answer = run.held(0)
    assert answer is not None
    assert (answer["step"], answer["by_worker"], answer["unreported"]) == (3, [2, 1], [0])


def test_a_lost_worker_is_not_waited_for_at_a_hold() -> None:
    run = run_state(2, 10)
    step_of(run, 0)
    run.hold_at(1)
    run.report(0, done())
    run.lose(1, applied=0)
    assert run.held(0) == {"step": 1, "examples": 8, "unreported": [], "by_worker": [1, 0]}


def test_a_stop_ends_a_hold() -> None:
    run = run_state(2, 10)
    step_of(run, 1)
    run.hold_at(1)
    assert run.claim(0) == {"hold": 1}
    assert run.held(0) is None
    run.stop("SIGTERM")
    assert run.held(0) == run.held(1) == {}
    assert run.claim(1) == {"end": "SIGTERM"}
    run.report(1, done())
    assert run.claim(0) == {"end": "SIGTERM"}


def test_a_hold_at_the_end_holds_nobody() -> None:
    run = run_state(2, 2)
    assert [step_of(run, 0), step_of(run, 1)] == [0, 1]
    run.hold_at(2)
    assert run.claim(1) == {"end": None}
    assert run.claim(0) is None
    run.report(1, done())
    assert run.claim(0) == {"end": None}


def test_a_bounded_worker_that_others_wait_for_is_not_held() -> None:
    run = run_state(2, 20, "bounded", max_staleness=0)
    assert [step_of(run, 0), step_of(run, 0), step_of(run, 1)] == [0, 1, 2]
    run.report(0, done())
    run.report(1, done())
    run.hold_at(3)
    assert run.claim(1) == {"hold": 3}
    assert run.may_begin(0)
    run.report(0, done())
    assert step_of(run, 0) == 3 if run.claim(0) is None else True
    # Worker 0 is one step ahead. With one more dealt to it, it has to wait for worker 1.
    run = run_state(2, 20, "bounded", max_staleness=0)
    assert [step_of(run, 0), step_of(run, 0)] == [0, 1]
    run.hold_at(2)
    run.report(0, done())
    assert not run.may_begin(0)
    assert step_of(run, 1) == 2  # moves the hold
    assert run.hold == 3
    run.report(1, done())
    assert run.may_begin(0)
    assert run.claim(1) == {"hold": 3}
    assert run.held(1) is None
    run.report(0, done())
    assert run.claim(0) == {"hold": 3}
    assert run.held(0) == {"step": 3, "examples": 24, "unreported": [], "by_worker": [2, 1]}


@dataclass
class PlayedWorker:
    """A worker as `PsBackend` is one: a thread that asks for steps ahead of those that run.

    Attributes:
        dealt: steps that it has not done, of which the first may have begun.
        waits: for all that was dealt, at a hold.
        gone: it was lost or has ended.
    """

    dealt: deque[int] = field(default_factory=deque)
    begun: bool = False
    waits: bool = False
    gone: bool = False
    ended: bool = False


class Play:
    """Workers in any order, until none of them can move any more."""

    def __init__(self, run: RunState, rng: random.Random, data: dict[int, int] | None = None):
        self.run, self.rng, self.bounded = run, rng, run.bounded
        self.workers = [PlayedWorker() for _ in run.workers]
        self.done = set(range(run.start))
        self.saves: list[int] = []
        self.data = data or {}  # by worker: how many steps its own data is enough for

    def to_the_end(self, events: list[Any]) -> None:
        while not all(worker.gone for worker in self.workers):
            if events and self.rng.random() < 0.15:
                events.pop()()
                continue
            order = list(range(len(self.workers)))
            self.rng.shuffle(order)
            moved = any(self._moves(i) for i in order)
            if not moved and events:
                events.pop()()
            elif not moved:
                raise AssertionError(f"nobody can move any more: {self.workers}, {vars(self.run)}")

    def hold(self) -> None:
        """Worker 0 asks for it when it has a step at hand."""
        if not self.workers[0].gone:
            self.run.hold_at(max(0, self.run._next - self.rng.randrange(3)))

    def lose(self) -> None:
        i = self.rng.randrange(len(self.workers))
        worker, state = self.workers[i], self.run.workers[i]
        if i == 0 or worker.ended or worker.gone:
            return
        untold = worker.begun and self.rng.random() < 0.5
        if untold:
            self.done.add(worker.dealt[0])
        self.run.lose(i, state.finished + untold)
        self.workers[i] = PlayedWorker(gone=True)

    def come_back(self) -> None:
        for i, worker in enumerate(self.workers):
            if worker.gone and not worker.ended:
                self.workers[i] = PlayedWorker()
                self.run.join(i)

    def _moves(self, i: int) -> bool:
        worker = self.workers[i]
        if worker.gone:
            return False
        moves = [self._computes, self._asks]
        self.rng.shuffle(moves)
        return any(move(i, worker) for move in moves)

    def _computes(self, i: int, worker: PlayedWorker) -> bool:
        if not worker.dealt:
            return False
        if not worker.begun:
            worker.begun = not self.bounded or self.run.may_begin(i)
            return worker.begun
        step = worker.dealt.popleft()
        assert step not in self.done
        self.done.add(step)
        worker.begun = False
        self.run.report(i, done())
        return True

    def _asks(self, i: int, worker: PlayedWorker) -> bool:
        if worker.ended:
            if worker.dealt:
                return False
            self.run.leave(i)
            worker.gone = True
            return True
        if worker.waits:
            return not worker.dealt and self._held(i, worker)
        if len(worker.dealt) >= 3:
            return False
        if i in self.data and len(self.run.workers[i].claimed) >= self.data[i]:
            worker.ended = True
            return True
        answer = self.run.claim(i)
        if answer is None:
            return False
        if "hold" in answer:
            worker.waits = True
        elif "end" in answer:
            worker.ended = True
        else:
            worker.dealt.append(answer["step"])
        return True

    def _held(self, i: int, worker: PlayedWorker) -> bool:
        answer = self.run.held(i)
        if answer is None:
            return False
        worker.waits = False
        if "step" in answer:
            assert i == 0
            assert self.done == set(range(answer["step"])), answer
            assert not any(other.dealt for other in self.workers)
            assert sum(answer["by_worker"]) == answer["step"]
            self.saves.append(answer["step"])
            self.run.release()
        return True


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize(
    ("workers", "staleness"),
    [
        (1, None),
        (2, None),
        (4, None),
        (1, 0),
        (2, 0),
        (4, 0),
        (2, 1),
        (4, 3),
    ],
)
def test_holds_hold_at_a_state_and_never_for_good(
    workers: int, staleness: int | None, start: int
) -> None:
    """With workers that are lost and return, in many orders."""
    saves = 0
    for seed in range(40):
        rng = random.Random(seed)
        before = [start // workers + (i < start % workers) for i in range(workers)]
        update = "async" if staleness is None else "bounded"
        total = start + rng.randrange(1, 60)
        run = run_state(
            workers, total, update, max_staleness=staleness or 0, start=start, by_worker=before
        )
        play = Play(run, rng)
        events: list[Any] = []
        for _ in range(rng.randrange(12)):
            kind = rng.choice([play.hold, play.hold, play.lose, play.come_back])
            events.append(kind)
        play.to_the_end(events)
        assert play.done == set(range(total))
        assert sum(run.summary()["worker_steps"]) == total
        saves += len(play.saves)
    assert saves > 10


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_bounded_workers_come_to_an_end(staleness: int) -> None:
    """Without any hold, however the last steps were dealt."""
    for seed in range(100):
        run = run_state(2, 30, "bounded", max_staleness=staleness)
        play = Play(run, random.Random(seed))
        play.to_the_end([])
        assert play.done == set(range(30))


@pytest.mark.parametrize("update", ["async", "bounded"])
def test_a_stop_during_a_hold_ends_all_workers(update: str) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        run = run_state(3, None, update)
        play = Play(run, rng)
        holds = [play.hold] * rng.randrange(4)
        play.to_the_end([partial(run.stop, "SIGTERM"), *holds])  # the last one comes first
        assert play.done == set(range(len(play.done)))
        assert run.stopped_by == "SIGTERM"


def test_a_hold_does_not_outlive_worker_0() -> None:
    run = run_state(2, 6, worker_steps=[1, 5])
    assert [step_of(run, 0), step_of(run, 1)] == [0, 1]
    run.hold_at(1)  # worker 0 asks for it before its last step
    run.report(0, done())
    run.report(1, done())
    assert run.claim(1) == {"hold": 2}
    assert run.claim(0) == {"end": None}
    run.leave(0)
    assert run.held(1) == {}
    assert step_of(run, 1) == 2


@pytest.mark.parametrize("kind", ["limits", "data of its own"])
def test_holds_where_worker_0_has_less_to_do_than_others(kind: str) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        if kind == "limits":
            run, data = run_state(2, 12, worker_steps=[2, 10]), None
        else:  # worker 0's part of a dataset is at its end before the others' are
            run, data = run_state(2, None), {0: 2, 1: 10}
        play = Play(run, rng, data)
        play.to_the_end([play.hold] * 3)
        assert play.done == set(range(12))
