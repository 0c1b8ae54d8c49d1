"""Nothing waits for ever: a thread that ends this process when the others do not come.

Neither MPI nor Horovod does that. MPI has no deadlines; Horovod's stall check needs all ranks to
answer its coordinator, and a rank that stands still leaves the coordinator itself waiting.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hvps.errors import EXIT_FAILURE, TrainingError


class Watchdog:
    """Deadlines for what this rank does together with the others.

    Args:
        timeout: seconds that a rank may wait for another.
        rank: this rank, for the message.
    """

    def __init__(self, timeout: float, rank: int) -> None:
        self._timeout, self._rank = timeout, rank
        self._waits_for: tuple[float, float, str] | None = None
        self._slowest_step: float | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="hvps-watchdog", daemon=True).start()

    @contextmanager
    def waiting(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """Give what is done inside `seconds` (the timeout by default) to end."""
        seconds = self._timeout if seconds is None else seconds
        self._waits_for = (time.monotonic() + seconds, seconds, what)
        try:
            yield
        finally:
            self._waits_for = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """The same for a step, which also computes: the slowest one so far is allowed for, and the
        first one, which is traced and compiled, gets ten times as long."""
        started = time.monotonic()
        if self._slowest_step is None:
            allowed = 10 * self._timeout
        else:
            allowed = self._timeout + 2 * self._slowest_step
        with self.waiting("a step of all ranks", allowed):
            yield
        if self._slowest_step is None:
            self._slowest_step = 0.0
        else:
            self._slowest_step = max(self._slowest_step, time.monotonic() - started)

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(0.5, self._timeout / 4)):
            waits_for = self._waits_for
            if waits_for is not None and time.monotonic() > waits_for[0]:
                self._give_up(*waits_for[1:])

    def _give_up(self, seconds: float, what: str) -> None:
        error = TrainingError(
            f"rank {self._rank} waited {seconds:g} s for {what}",
            rule="no rank waits longer than backend.stall_timeout for another",
            received=f"backend.stall_timeout={self._timeout:g}; a rank is gone, stands still or is"
            " far behind",
            do="look at the last lines of the other ranks' logs; raise backend.stall_timeout if"
            " they are only slow",
        )
        print(f"hvps: error: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILURE)
