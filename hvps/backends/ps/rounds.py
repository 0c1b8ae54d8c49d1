"""Synchronous training's rounds: who takes part, and the thread that closes them on the chief."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from hvps.backends.ps.drivers import SyncDriver
from hvps.backends.ps.lost import lost_or_same
from hvps.backends.ps.member import Member
from hvps.errors import PeerLostError
from hvps.failure import ends_the_job_on_error


@dataclass(frozen=True)
class Participants:
    """The workers of each round.

    Attributes:
        workers: all of them.
        limits: rounds that each takes part in, or None for all.
        backup: so many are not waited for.
    """

    workers: int
    limits: list[int] | None
    backup: int

    def share(self, worker: int, round_: int) -> tuple[int, int]:
        """(rank, ranks) of a worker among those that divide a round's batch."""
        if self.limits is None:
            return worker, self.workers
        active = [i for i, limit in enumerate(self.limits) if limit > round_]
        return active.index(worker), len(active)

    def needed(self, round_: int) -> int:
        """Gradients that close a round."""
        active = self.workers
        if self.limits is not None:
            active = sum(limit > round_ for limit in self.limits)
        return max(1, active - self.backup)

    def last(self, total: int | None) -> int | None:
        """Number of rounds, None where only the data's end will tell."""
        return max(self.limits) if self.limits else total


class RoundCloser:
    """Applies each round's sum as soon as enough gradients are there, and tells the workers.

    A thread of its own: with backup workers a round may end without the chief's own gradient.

    Args:
        start: rounds that were closed in an earlier life of the run.
        learning_rate: of a round.
        examples: true examples in a round.
        closed: called with the number of rounds that are closed, before anybody begins the next.
    """

    def __init__(
        self,
        *,
        driver: SyncDriver,
        member: Member,
        run: int,
        participants: Participants,
        start: int,
        total: int | None,
        learning_rate: Callable[[int], float],
        examples: Callable[[int], int],
        closed: Callable[[int], None],
    ) -> None:
        assert member.control is not None
        self._driver, self._control, self._run = driver, member.control, run
        self._cluster = member.cluster
        self._participants, self._last = participants, participants.last(total)
        self._learning_rate, self._examples = learning_rate, examples
        self._closed, self._call_closed = start, closed
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="hvps-rounds", daemon=True).start()

    def _work(self) -> None:
        # A failure here is the process's: its main thread may be waiting for this very round.
        with ends_the_job_on_error(self._cluster):
            try:
                while self._last is None or self._closed < self._last:
                    self._close(self._closed)
            except tf.errors.CancelledError:
                return  # the session was closed: stopped before the last round
            except tf.errors.OpError as err:
                raise lost_or_same(err) from err

    def _close(self, round_: int) -> None:
        needed = self._participants.needed(round_)
        rate, examples = self._learning_rate(round_), self._examples(round_)
        self._driver.close_round(needed, rate, examples)
        self._call_closed(round_ + 1)
        self._control.call("applied", number=self._run, rounds=round_ + 1)
        with self._changed:
            self._closed = round_ + 1
            self._changed.notify_all()

    def wait_for(self, rounds: int, seconds: float) -> None:
        """Wait until so many rounds are closed, each within `seconds` of the one before it.

        Raises:
            PeerLostError: a round was not completed in time.
        """
        with self._changed:
            while self._closed < rounds:
                seen, since = self._closed, time.monotonic()
                self._changed.wait(seconds)
                if self._closed == seen and time.monotonic() - since >= seconds:
                    raise PeerLostError(
                        f"round {seen + 1} was not completed",
                        rule="every worker takes part in every round",
                        received=f"{seconds:g} s without all of its gradients",
                        do="look at the output of the other workers",
                    )
