"""Evaluating checkpoints apart from training: the model that would have been saved, on the task's
held-out examples, and the notes that are kept of it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from hvps.backends import Backend
from hvps.building import build_eval_feed, build_evaluator, build_model
from hvps.checkpoint import Checkpoint
from hvps.config import Config
from hvps.errors import ConfigError
from hvps.resume import Beginning, restore
from hvps.run_directory import versions
from hvps.task import Task


class CheckpointEvaluator:
    """Evaluates one checkpoint after the other with the same model, together with other ranks.

    Raises:
        ConfigError: the task has no held-out examples, or they or its model cannot be used.
    """

    def __init__(self, config: Config, task: Task, backend: Backend) -> None:
        self._config, self._task, self._backend = config, task, backend
        feed = build_eval_feed(config, task, backend)
        if feed is None:
            raise ConfigError(
                "task: there is nothing to evaluate on",
                rule="eval_data() gives held-out examples",
                received="None",
                do=f"have eval_data() of {config.task} return some",
            )
        self._feed = feed
        self._model, self._optimizer, _ = build_model(config, task, backend.cluster.rank)
        self._evaluator = build_evaluator(task, self._model, feed, backend)
        self._is_set_up = False

    def __call__(self, beginning: Beginning) -> dict[str, float]:
        """The metrics by name, the same on all ranks.

        Args:
            beginning: names the checkpoint; on the root it holds its state.

        Raises:
            ConfigError: the checkpoint is of another model or optimizer.
        """
        restore(beginning, self._model, self._optimizer, self._backend.broadcast)
        if not self._is_set_up:  # brings the root's weights to the others
            self._is_set_up = self._backend.cluster.size == 1
            self._backend.setup(
                model=self._model,
                optimizer=self._optimizer,
                loss=self._task.loss,
                identity={**self._config.model_dump(), "versions": versions()},
                example=self._feed.example(),
            )
        self._backend.finalize()
        return self._evaluator()


def note_evaluation(run: Path, checkpoint: Checkpoint, metrics: Mapping[str, float]) -> None:
    """Append a line to evaluations.jsonl of the run, in one piece: others may append as well.

    Raises:
        OSError: the file cannot be written.
    """
    record = {
        "step": checkpoint.step,
        "time": time.time(),
        "checkpoint": checkpoint.path.name,
        "metrics": plain_numbers(metrics),
    }
    file = os.open(run / "evaluations.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(record) + "\n").encode())
    finally:
        os.close(file)


def plain_numbers(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """As in metrics.jsonl: JSON has no NaN and no infinity, so their names stand there."""
    return {name: v if math.isfinite(v) else str(v) for name, v in metrics.items()}
