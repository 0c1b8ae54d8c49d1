"""Who waits for a moment between two updates, at which no other is under way."""

from __future__ import annotations

import threading

from hvps.backends import AtBoundary


class Boundaries:
    """Calls that wait for a step; added by one thread and taken by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, AtBoundary]] = []

    def add(self, step: int, call: AtBoundary) -> None:
        with self._lock:
            self._waiting.append((step, call))

    def due(self, step: int | None) -> bool:
        """Whether anybody waits for `step` or one before; for any step, if it is None."""
        with self._lock:
            return any(step is None or wanted <= step for wanted, _ in self._waiting)

    def take(self, step: int) -> list[AtBoundary]:
        """Those who waited for `step` or one before; they do no longer."""
        with self._lock:
            found = [call for wanted, call in self._waiting if wanted <= step]
            self._waiting = [entry for entry in self._waiting if entry[0] > step]
        return found
