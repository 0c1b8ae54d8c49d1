"""From the task to feeds, model, optimizer and evaluator, alike wherever they are needed."""

from __future__ import annotations

from typing import Any

import keras

from hvps.backends import Backend
from hvps.batches import Feed
from hvps.config import Config
from hvps.data import make_feed
from hvps.errors import ConfigError
from hvps.evaluation import Evaluator
from hvps.optimizer import make_optimizer
from hvps.runtime import seed_rank
from hvps.task import Task


def build_train_feed(config: Config, task: Task, backend: Backend) -> Feed:
    """This process's part of the training examples.

    Raises:
        ConfigError: the data is of no kind that is known, or nothing says when to stop.
    """
    rank, ranks = backend.train_share
    feed = make_feed(
        task.train_data(),
        what="train_data",
        rank=rank,
        ranks=ranks,
        reading_share=backend.reading_share,
        accumulate=config.train.accumulate,
        seed=config.run.seed,
        shuffle=config.train.shuffle,
        agree=backend.agree,
        global_batch=config.train.global_batch,
        prefetch=config.train.prefetch,
    )
    if feed.endless and config.train.steps is None:
        raise ConfigError(
            "train.steps: needed, for the data never ends",
            rule="an endless dataset has no epochs to count",
            received="a dataset of infinite cardinality, and no train.steps",
            do="set train.steps",
        )
    return feed


def build_eval_feed(config: Config, task: Task, backend: Backend) -> Feed | None:
    """This process's part of the held-out examples; None where it does not evaluate.

    Raises:
        ConfigError: the data is of no kind that is known, or never ends.
    """
    if backend.eval_share is None:
        return None
    held_out = task.eval_data()
    if held_out is None:
        return None
    rank, ranks = backend.eval_share
    feed = make_feed(
        held_out,
        what="eval_data",
        rank=rank,
        ranks=ranks,
        global_batch=config.train.global_batch,
        prefetch=config.train.prefetch,
    )
    if feed.endless:
        raise ConfigError(
            "task: eval_data() never ends",
            rule="an evaluation reads each held-out example once",
            received="a dataset of infinite cardinality",
            do="take away .repeat(), or use .take(n)",
        )
    return feed


def build_model(
    config: Config, task: Task, rank: int
) -> tuple[keras.Model, keras.optimizers.Optimizer, float]:
    """The model and its optimizer, both with their variables, and the base learning rate.

    Raises:
        ConfigError: the task gives no built model, or Keras refuses the optimizer.
    """
    model = _built(task.build_model())
    seed_rank(model, config.run.seed, rank)
    optimizer, base_rate = make_optimizer(config, task)
    optimizer.build(model.trainable_variables)
    return model, optimizer, base_rate


def build_evaluator(task: Task, model: keras.Model, feed: Feed, backend: Backend) -> Evaluator:
    return Evaluator(
        model=model,
        loss=task.loss,
        metrics=list(task.metrics()),
        feed=feed,
        backend=backend,
    )


def _built(model: Any) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise ConfigError(
            "task: build_model() did not return a model",
            rule="a keras.Model",
            received=type(model).__name__,
            do="return the model",
        )
    if not model.built or not model.weights:
        raise ConfigError(
            "task: build_model() returned a model without weights",
            rule="a built model: the ranks start from equal weights",
            received=f"{model.name}, which was never built",
            do="begin with keras.Input, or call model.build(shape) before returning it",
        )
    return model
