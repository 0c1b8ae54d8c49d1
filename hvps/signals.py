"""Stopping by signal: the handler only sets a flag, the ranks agree on it in the next step."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

_STOP = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)


class StopSignals:
    """Context in which SIGTERM, SIGUSR1 and Ctrl-C ask for a stop at the next step.

    A second signal ends the process at once, with 128 + its number.
    """

    active: StopSignals | None = None

    def __init__(self) -> None:
        self._received: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in _STOP:
            self._before[number] = signal.signal(number, self._handle)
        StopSignals.active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        StopSignals.active = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            os._exit(128 + number)
        self._received = number

    @property
    def votes(self) -> tuple[bool, bool]:
        """(asked to stop by SIGTERM or SIGUSR1, asked by SIGINT)."""
        if self._received is None:
            return False, False
        return self._received != signal.SIGINT, self._received == signal.SIGINT


def stop_votes() -> tuple[bool, bool]:
    """The votes of the context that is active in this process."""
    return StopSignals.active.votes if StopSignals.active else (False, False)
