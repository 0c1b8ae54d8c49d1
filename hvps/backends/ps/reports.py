"""What a process tells the coordinator of the steps that it has done."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from hvps.backends.ps.drivers import Outcome


class Reports:
    """Collects outcomes, from several threads, until they are told."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._outcomes: list[Outcome] = []
        self._examples = 0
        self._all_steps = self._all_rows = 0

    def add(self, outcome: Outcome, examples: int) -> None:
        with self._lock:
            self._outcomes.append(outcome)
            self._examples += 0 if outcome.dropped else examples
            self._all_steps += 1
            self._all_rows += outcome.rows
            self._lock.notify_all()

    def wait_for(self, steps: int) -> None:
        """Wait until so many were added in all."""
        with self._lock:
            self._lock.wait_for(lambda: self._all_steps >= steps)

    def take(self) -> dict[str, Any] | None:
        """Sums over what was added since the last call; None where that is nothing."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
            examples, self._examples = self._examples, 0
        if not outcomes:
            return None
        kept = [outcome for outcome in outcomes if not outcome.dropped]
        staleness = Counter(str(o.staleness) for o in kept if o.staleness is not None)
        return {
            "steps": len(kept),
            "dropped": len(outcomes) - len(kept),
            "examples": examples,
            "loss_sum": sum(outcome.loss_sum for outcome in kept),
            "staleness": dict(staleness),
        }

    @property
    def rows_per_step(self) -> float:
        """Rows of embedding tables that a step has fetched, on average."""
        return self._all_rows / max(1, self._all_steps)
