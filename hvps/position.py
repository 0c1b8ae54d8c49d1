"""Where in its work a run is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """What has been done, in numbers that do not depend on how many processes do it.

    Attributes:
        step: updates that were made.
        epoch: pass over the data to which the last of them belongs.
        within: steps of that pass that were made.
        examples: true examples in all steps.
        by_worker: asynchronous workers' shares of the steps; they matter where each reads data of
            its own in order.
    """

    step: int = 0
    epoch: int = 0
    within: int = 0
    examples: int = 0
    by_worker: tuple[int, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Position:
        by_worker = value["by_worker"]
        return cls(**{**value, "by_worker": None if by_worker is None else tuple(by_worker)})


START = Position()
