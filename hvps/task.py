"""What users write: a model, a loss and data. Nothing here is about distribution."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hvps.errors import ConfigError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from hvps.config import Config

REQUIRED_METHODS = ("build_model", "loss", "metrics", "train_data", "eval_data")


@runtime_checkable
class Task(Protocol):
    """A training problem.

    Data is given as one of
      * a tuple `(x, y)` of arrays, or of dicts/tuples of arrays, with examples on the first axis;
      * anything with `__len__` and `__getitem__(i) -> (x, y)` for one example;
      * a `tf.data.Dataset` of single `(x, y)` examples, which hvps shards over the ranks.
    """

    def build_model(self) -> keras.Model:
        """A built Keras model; called once on every rank, with the same seed."""

    def loss(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Loss of each example, float, shape [batch] (further axes are averaged)."""

    def metrics(self) -> list[keras.metrics.Metric]:
        """Keras metrics for evaluation; their state is summed over the ranks."""

    def train_data(self) -> Any:
        """Training examples."""

    def eval_data(self) -> Any:
        """Held-out examples, or None."""


def load_task(config: Config) -> Task:
    """Import and construct the task that `config.task` names ("package.module:Class").

    Raises:
        ConfigError: the module or the class cannot be imported, or the arguments do not fit.
    """
    module_name, _, class_name = config.task.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        task_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as err:
        raise ConfigError(
            f"task: {config.task} cannot be imported",
            rule="package.module:Class, importable from here",
            received=f"{type(err).__name__}: {err}",
            do="mend the import, or start from the folder that holds the module",
        ) from err
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(task_class, name, None))]
    if missing:
        raise ConfigError(
            f"task: {config.task} lacks {', '.join(missing)}",
            rule=f"a task has the methods {', '.join(REQUIRED_METHODS)}",
            received=f"a class with none of the name {missing[0]}",
            do="add what is missing; hvps/task.py says what each returns",
        )
    task: Task = task_class(**config.task_args)
    return task
