"""What the coordinator knows of one training: who has which step, and what came of it.

No locks and no sockets here: the coordinator calls these under its lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class WorkerState:
    """One worker's part in a run.

    Attributes:
        claimed: steps it was given, in order.
        finished: steps that it has reported.
        clock: the same for comparing with others; one that comes back starts where they are.
        active: it has joined, and neither left nor been lost.
        dropped: gradients that came too late for their round.
        lost: how often it died.
        behind: the others went on without it for a while.
    """

    claimed: list[int] = field(default_factory=list)
    finished: int = 0
    clock: int = 0
    joined: bool = False
    active: bool = True
    dropped: int = 0
    lost: int = 0
    behind: bool = False


class RunState:
    """Steps of one training, dealt to workers.

    Args:
        spec: `workers`, their number; `start`, the first step; `total` steps or None; `update`
            ("async", "sync", "bounded"); `max_staleness`; `worker_steps`, a limit for each worker,
            or None; `by_worker`, asynchronous steps that each did before `start`, or None.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.total: int | None = spec["total"]
        self.synchronous = spec["update"] == "sync"
        self.bounded = spec["update"] == "bounded"
        self.max_staleness: int = spec["max_staleness"]
        self.limits: list[int] | None = spec["worker_steps"]
        self.workers = [WorkerState() for _ in range(spec["workers"])]
        self.ready = False
        self.stopped_by: str | None = None
        self.start: int = spec["start"]
        self.round = self.start  # synchronous: rounds that have been applied
        self.hold: int | None = None  # no step from this one on begins until the state is saved
        self.max_lead = 0
        self.staleness: Counter[int] = Counter()
        self.examples = self.steps = 0
        self.loss_sum = 0.0
        self.unreported: list[int] = []  # steps that were applied, by workers that died too soon
        self._count = sum(self.limits) if self.limits else self.total  # not synchronous: of steps
        self._next = self.start
        for state, done in zip(self.workers, self._done_before(), strict=True):
            state.claimed, state.finished = list(range(done)), done
        self._returned: deque[int] = deque()
        self._last_round: int | None = None
        self._taken = {"examples": 0, "steps": 0, "loss_sum": 0.0}
        self._interval_staleness: Counter[int] = Counter()

    def _done_before(self) -> list[int]:
        """Steps of each worker in an earlier life of the run."""
        if self.synchronous:
            return [self.start] * len(self.workers)
        return self.spec["by_worker"] or [0] * len(self.workers)

    # --- steps ---

    def claim(self, worker: int) -> dict[str, Any] | None:
        """The worker's next step, {"end": reason}, {"hold": step}, or None: ask again when
        something changes."""
        state = self.workers[worker]
        if self.synchronous:
            return self._claim_round(state, worker)
        if self.stopped_by:
            return self._end(worker)
        if self.limits and len(state.claimed) >= self.limits[worker] and not self._inherits(worker):
            return self._end(worker)
        if self._returned:
            return self._give(state, self._returned.popleft())
        if self._count is None or self._next < self._count:
            if self.hold is not None and self._next >= self.hold:
                if not self._is_waited_for(worker):
                    return {"hold": self.hold}
                self.hold = self._next + 1
            self._next += 1
            return self._give(state, self._next - 1)
        return self._end(worker)

    def _inherits(self, worker: int) -> bool:
        """Whether more steps are left than those who are there will do by themselves: worker 0
        does them for the others."""
        assert self.limits is not None
        assert self._count is not None
        kept = sum(
            limit - len(w.claimed)
            for limit, w in zip(self.limits, self.workers, strict=True)
            if w.active and len(w.claimed) < limit
        )
        return worker == 0 and self._next + kept < self._count

    def _end(self, worker: int) -> dict[str, Any] | None:
        """Worker 0 stays until nobody is left whose steps it might have to take over."""
        others = [w for i, w in enumerate(self.workers) if i != worker]
        if worker == 0 and any(w.active and len(w.claimed) > w.finished for w in others):
            return None
        if worker == 0 and self._returned:
            return self._give(self.workers[0], self._returned.popleft())
        return {"end": self.stopped_by}

    # --- a moment at which nothing is under way ---

    def hold_at(self, step: int) -> None:
        self.hold = max(step, self._next)

    def release(self) -> None:
        self.hold = None

    def held(self, worker: int) -> dict[str, Any] | None:
        """What a worker that has done all its steps may do next.

        Returns:
            {}: ask for steps again; to worker 0, when all steps before the hold are done, which
            step that is, the examples reported, the steps that were not, and how many each worker
            has done; None: wait.
        """
        if self.hold is None or self.stopped_by or self._returned:
            return {}
        if self._is_waited_for(worker):
            return {}
        if worker or self._next < self.hold:
            return None
        if any(w.active and len(w.claimed) > w.finished for w in self.workers):
            return None
        by_worker = [w.finished for w in self.workers]
        return {
            "step": self.hold,
            "examples": self.examples,
            "unreported": self.unreported,
            "by_worker": by_worker,
        }

    def _claim_round(self, state: WorkerState, worker: int) -> dict[str, Any] | None:
        step = len(state.claimed)
        limit = self.limits[worker] if self.limits else self.total
        if limit is not None and step >= limit:
            return {"end": self.stopped_by}
        if self.stopped_by:
            if self._last_round is None:  # all take part in the rounds that anybody has begun
                self._last_round = max(len(w.claimed) for w in self.workers)
            if step >= self._last_round:
                return {"end": self.stopped_by}
        return self._give(state, step)

    def skip_to(self, worker: int, step: int) -> None:
        """A synchronous worker that fell behind goes on with the round that is open now."""
        state = self.workers[worker]
        state.claimed = list(range(max(step, len(state.claimed))))

    def is_over(self, round_: int) -> bool:
        """Synchronous: whether `round_` is one too many."""
        last = max(self.limits) if self.limits else self.total
        ends = [end for end in (last, self._last_round) if end is not None]
        return bool(ends) and round_ >= min(ends)

    def _give(self, state: WorkerState, step: int) -> dict[str, Any]:
        state.claimed.append(step)
        return {"step": step}

    def report(self, worker: int, done: dict[str, Any]) -> None:
        """Add what a worker says of the steps it has finished since it last spoke."""
        state = self.workers[worker]
        state.finished += done["steps"]
        state.clock += done["steps"]
        state.dropped += done["dropped"]
        self.steps += done["steps"]
        self.examples += done["examples"]
        self.loss_sum += done["loss_sum"]
        staleness = Counter({int(k): n for k, n in done["staleness"].items()})
        self.staleness += staleness
        self._interval_staleness += staleness

    # --- bounded staleness ---

    def may_begin(self, worker: int) -> bool:
        """Whether `worker` may begin its next step: it has finished at most `max_staleness` more
        than the slowest."""
        slowest = self._slowest(worker)
        if slowest is None:
            return True
        lead = self.workers[worker].clock - slowest
        if lead > self.max_staleness:
            return False
        self.max_lead = max(self.max_lead, lead)
        return True

    def _is_waited_for(self, worker: int) -> bool:
        """Whether another may not go on with its steps before `worker` has done more."""
        if not self.bounded:
            return False
        limit = self.workers[worker].clock + self.max_staleness
        return any(
            w.active and len(w.claimed) > w.finished and w.clock > limit for w in self.workers
        )

    def _slowest(self, worker: int) -> int | None:
        others = [
            w.clock
            for i, w in enumerate(self.workers)
            if i != worker and w.active and not self._has_ended(i)
        ]
        return min(others) if others else None

    def _has_ended(self, worker: int) -> bool:
        """Whether a worker has done its last step, though it may still be here for others'."""
        state = self.workers[worker]
        if len(state.claimed) > state.finished or self._returned:
            return False
        limited = self.limits is not None and len(state.claimed) >= self.limits[worker]
        over = self._count is not None and self._next >= self._count
        return bool(self.stopped_by) or limited or over

    # --- workers that come and go ---

    def join(self, worker: int) -> int:
        """The worker is here; returns how many steps its predecessors have finished."""
        state = self.workers[worker]
        state.joined = state.active = True
        if state.behind:  # it goes on from where the slowest is, or all would wait for it
            state.clock = max(state.clock, self._slowest(worker) or 0)
            state.behind = False
        return state.finished

    def leave(self, worker: int) -> None:
        self.workers[worker].active = False
        if worker == 0:  # which saves
            self.release()

    def miss(self, workers: Sequence[int]) -> None:
        """Nobody waits any longer for these workers, which have not come; they still may."""
        for state in (self.workers[i] for i in workers if i < len(self.workers)):
            if not state.joined:
                state.active, state.behind = False, True

    def lose(self, worker: int, applied: int) -> None:
        """The worker is gone; what it had been given and was not applied is given to others."""
        state = self.workers[worker]
        state.active, state.behind = False, True
        state.lost += 1
        if not self.synchronous:
            done = max(applied, state.finished)
            self._returned.extend(state.claimed[done:])
            del state.claimed[done:]
            self.unreported += state.claimed[state.finished :]
            self.steps += done - state.finished
            state.finished = done

    def stop(self, reason: str) -> None:
        if self.stopped_by is None:
            self.stopped_by = reason

    @property
    def waits_for(self) -> list[int]:
        """Workers that have not left."""
        return [i for i, w in enumerate(self.workers) if w.active]

    # --- what the chief shows ---

    def take_interval(self) -> dict[str, Any]:
        """What was reported since the last call."""
        now = {"examples": self.examples, "steps": self.steps, "loss_sum": self.loss_sum}
        since = {name: now[name] - self._taken[name] for name in now}
        count = sum(self._interval_staleness.values())
        total = sum(k * n for k, n in self._interval_staleness.items())
        since["staleness_mean"] = total / count if count else 0.0
        since["staleness_max"] = max(self._interval_staleness, default=0)
        self._taken, self._interval_staleness = now, Counter()
        return since

    def summary(self) -> dict[str, Any]:
        """What result.json says of the whole run."""
        count = sum(self.staleness.values())
        mean = sum(k * n for k, n in self.staleness.items()) / count if count else 0.0
        return {
            "steps": self.steps,
            "examples": self.examples,
            "unreported": self.unreported,
            "staleness_histogram": {str(k): self.staleness[k] for k in sorted(self.staleness)},
            "staleness_mean": round(mean, 4),
            "staleness_max": max(self.staleness, default=0),
            "max_lead": self.max_lead if self.bounded else None,
            "worker_steps": [w.finished for w in self.workers],
            "dropped_gradients": [w.dropped for w in self.workers],
            "worker_deaths": [w.lost for w in self.workers],
        }
