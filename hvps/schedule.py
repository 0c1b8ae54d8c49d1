"""The learning rate as a pure function of the global step.

Nothing is carried from step to step, so a resumed run, every rank and every backend read the same
rate, and the console can print it without asking a device.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvps.config import Config


@dataclass(frozen=True)
class Schedule:
    """Scaling, linear warm-up and decay of a base learning rate.

    Attributes:
        base: the rate in the configuration.
        factor: what scaling multiplies it by.
        explanation: how the peak was derived, one line for the banner.
    """

    base: float
    factor: float
    explanation: str
    warmup_steps: int
    warmup_from: float
    decay: str
    decay_steps: int
    final: float
    rate: float
    boundaries: tuple[int, ...]

    @property
    def peak(self) -> float:
        """The scaled rate, reached when warm-up ends."""
        return self.base * self.factor

    def __call__(self, step: int) -> float:
        """Learning rate of the update that moves the weights from `step` to `step + 1`."""
        if step < self.warmup_steps:
            progress = (step + 1) / self.warmup_steps
            return self.peak * (self.warmup_from + (1.0 - self.warmup_from) * progress)
        return self.peak * self._decayed(step - self.warmup_steps, step)

    def _decayed(self, since_warmup: int, step: int) -> float:
        if self.decay == "none":
            return 1.0
        if self.decay == "step":
            return self.rate ** bisect_right(self.boundaries, step)
        if self.decay == "exponential":
            return self.rate ** (since_warmup / self.decay_steps)
        progress = min(1.0, since_warmup / self.decay_steps)
        if self.decay == "linear":
            return 1.0 - (1.0 - self.final) * progress
        assert self.decay == "cosine", self.decay
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_schedule(config: Config, base: float, ranks: int, total_steps: int | None) -> Schedule:
    """Build the schedule that `config` asks for.

    Linear scaling is the rule of Goyal et al. 2017 (arXiv:1706.02677), square-root scaling that of
    Krizhevsky 2014 (arXiv:1404.5997). The base rate belongs to
    `schedule.base_batch` examples, by default to one rank's share of the global batch, so that
    linear scaling multiplies by the number of ranks as Horovod's users expect.

    Args:
        config: the configuration.
        base: the optimizer's learning rate before scaling.
        ranks: world size.
        total_steps: updates of the whole run, None when the data does not say.
    """
    s = config.schedule
    base_batch = s.base_batch or config.train.global_batch / ranks
    ratio = config.train.global_batch / base_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[s.scaling]
    explanation = f"{base * factor:g}"
    if s.scaling != "none":
        explanation += (
            f" = {base:g} × {factor:g} ({s.scaling}: global batch {config.train.global_batch}"
            f" / base batch {base_batch:g})"
        )
    if s.warmup_steps:
        explanation += f", warm-up over {s.warmup_steps} steps"
    if s.decay != "none":
        explanation += f", {s.decay} decay"
    decay_steps = s.decay_steps or max(1, (total_steps or 1) - s.warmup_steps)
    return Schedule(
        base=base,
        factor=factor,
        explanation=explanation,
        warmup_steps=s.warmup_steps,
        warmup_from=s.warmup_from,
        decay=s.decay,
        decay_steps=decay_steps,
        final=s.final,
        rate=s.rate,
        boundaries=tuple(s.boundaries),
    )
