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


class EarlyStopping:
    """Stops when a metric of the evaluation has not improved for `patience` evaluations.

    Args:
        config: `train.early_stop`.
        names: metrics that the evaluation reports.

    Raises:
        ConfigError: the monitored metric is not among them.
    """

    def __init__(self, config: EarlyStopConfig, names: Sequence[str]) -> None:
        self._patience, self._min_delta = config.patience, config.min_delta
        self._monitor = config.monitor
        # A metric whose result is a vector reports name/0, name/1, ...
        if self._patience and self._monitor.split("/")[0] not in names:
            raise self._unknown(names)
        words = set(re.split(r"[^a-z0-9]+", self._monitor.lower()))
        larger = bool(words & _LARGER_IS_BETTER) and not words & _LESS_IS_BETTER
        mode = config.mode if config.mode != "auto" else ("max" if larger else "min")
        self._sign = 1.0 if mode == "min" else -1.0
        self._best = math.inf
        self._waited = 0

    def __call__(self, evaluation: Mapping[str, float]) -> bool:
        """Whether to stop after this evaluation."""
        if not self._patience:
            return False
        if self._monitor not in evaluation:
            raise self._unknown(list(evaluation))
        value = self._sign * evaluation[self._monitor]
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self._waited >= self._patience

    def _unknown(self, names: Sequence[str]) -> ConfigError:
        return ConfigError(
            "train.early_stop.monitor: no such metric",
            rule=f"one of {', '.join(names) or 'nothing: there is no evaluation'}",
            received=repr(self._monitor),
            do="name a metric of the evaluation, or add it to the task's metrics()",
        )


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
