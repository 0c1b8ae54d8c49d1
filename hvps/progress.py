"""How far the run is: a bar on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from hvps.log import logger

_SECONDS_BETWEEN_LINES = 1.0


class Progress(Protocol):
    """What the trainer tells the user between the banner and the table."""

    def step(self, step: int) -> None:
        """A step was done."""

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Something was measured."""

    def close(self) -> None:
        """The loop has ended."""


class Silent:
    """For other ranks, and for `log.progress: off`."""

    def step(self, step: int) -> None:
        pass

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        logger.debug(_line(kind, step, None, values))

    def close(self) -> None:
        pass


class Lines:
    """Plain lines, of each kind about one a second; everything is in the run's files."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._last: dict[str, float] = {}

    def step(self, step: int) -> None:
        pass

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        shown = now - self._last.get(kind, -math.inf) >= _SECONDS_BETWEEN_LINES
        if shown:
            self._last[kind] = now
        logger.log(logging.INFO if shown else logging.DEBUG, _line(kind, step, self._total, values))

    def close(self) -> None:
        pass


class Bar:
    """A rich progress bar; evaluations stay above it as lines."""

    def __init__(self, total: int | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._total = total
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
        )
        self._bar.start()
        self._task: Any = self._bar.add_task("train", total=total, values="")

    def step(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if kind == "train":
            self._bar.update(self._task, values=_values(values))
            logger.debug(_line(kind, step, self._total, values))
        else:
            self._bar.console.print(_line(kind, step, self._total, values), highlight=False)

    def close(self) -> None:
        self._bar.stop()


def make_progress(choice: str, *, is_root: bool, launched: bool, total: int | None) -> Progress:
    """The progress display that `log.progress` asks for.

    Args:
        launched: whether a launcher stands between this process and the user. mpirun gives its
            ranks a terminal of their own, whatever the user's is.
    """
    if not is_root or choice == "off":
        return Silent()
    if choice == "bar" or (choice == "auto" and not launched and sys.stdout.isatty()):
        return Bar(total)
    return Lines(total)


def _line(kind: str, step: int, total: int | None, values: Mapping[str, float]) -> str:
    of_total = f"/{total}" if total else ""
    return f"{kind:<5} step {step}{of_total}  {_values(values)}"


def _values(values: Mapping[str, float]) -> str:
    parts = []
    for name, value in values.items():
        if name == "examples_per_second":
            parts.append(f"{value:,.0f} examples/s")
        elif name == "skipped":
            parts += [f"skipped {value:.0f}"] if value else []
        else:
            parts.append(f"{name} {value:.4g}")
    return "  ".join(parts)
