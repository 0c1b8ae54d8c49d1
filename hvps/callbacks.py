"""Reasons to stop that are looked for between steps.

They see numbers that were reduced over the ranks, so all ranks come to the same decision without
asking each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hvps.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from hvps.config import EarlyStopConfig

_LARGER_IS_BETTER = {"acc", "accuracy", "auc", "precision", "recall", "f1", "iou", "r2", "top"}
_LESS_IS_BETTER = {"loss", "error", "entropy", "crossentropy"}


class Monitor:
    """Reads one metric of the evaluations, so that less is better.

    Args:
        key: of the configuration, for messages.
        name: of the metric.
        mode: "min", "max", or "auto": by the metric's name.
        names: metrics that the evaluation reports.

    Raises:
        ConfigError: the metric is not among them.
    """

    def __init__(self, key: str, name: str, mode: str, names: Sequence[str]) -> None:
        self._key, self.name = key, name
        # A metric whose result is a vector reports name/0, name/1, ...
        if name.split("/")[0] not in names:
            raise self._unknown(names)
        words = set(re.split(r"[^a-z0-9]+", name.lower()))
        larger = bool(words & _LARGER_IS_BETTER) and not words & _LESS_IS_BETTER
        mode = mode if mode != "auto" else ("max" if larger else "min")
        self._sign = 1.0 if mode == "min" else -1.0

    def __call__(self, evaluation: Mapping[str, float]) -> float:
        if self.name not in evaluation:
            raise self._unknown(list(evaluation))
        return self._sign * evaluation[self.name]

    def _unknown(self, names: Sequence[str]) -> ConfigError:
        return ConfigError(
            f"{self._key}: no such metric",
            rule=f"one of {', '.join(names) or 'nothing: there is no evaluation'}",
            received=repr(self.name),
            do="name a metric of the evaluation, or add it to the task's metrics()",
        )


class EarlyStopping:
    """Stops when a metric of the evaluation has not improved for `patience` evaluations.

    Args:
        config: `train.early_stop`.
        names: metrics that the evaluation reports.

    Attributes:
        state: best value (less is better) and evaluations since; part of checkpoints.

    Raises:
        ConfigError: the monitored metric is not among them.
    """

    def __init__(self, config: EarlyStopConfig, names: Sequence[str]) -> None:
        self._patience, self._min_delta = config.patience, config.min_delta
        self._monitor = None
        if self._patience:
            key = "train.early_stop.monitor"
            self._monitor = Monitor(key, config.monitor, config.mode, names)
        self.state: tuple[float | None, int] = (None, 0)

    def __call__(self, evaluation: Mapping[str, float]) -> bool:
        """Whether to stop after this evaluation."""
        if self._monitor is None:
            return False
        value = self._monitor(evaluation)
        best, waited = self.state
        if value < (math.inf if best is None else best) - self._min_delta:
            self.state = (value, 0)
        else:
            self.state = (best, waited + 1)
        return self.is_over

    @property
    def is_over(self) -> bool:
        return bool(self._patience) and self.state[1] >= self._patience


def check_finite(loss: float, step: int, applied_steps: int) -> None:
    """Stop a run whose loss is not a number any more.

    Args:
        loss: mean loss over all ranks since the last look.
        applied_steps: updates since then that were not skipped by loss scaling.

    Raises:
        TrainingError: the loss is infinite or NaN although updates were made.
    """
    if math.isfinite(loss) or applied_steps == 0:
        return
    raise TrainingError(
        f"the loss is {loss} at step {step}",
        rule="a finite loss",
        received=str(loss),
        do="lower optimizer.learning_rate, set train.clip_norm or schedule.warmup_steps,"
        " or look at the data of the last steps",
    )
