"""The Keras optimizer that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from hvps.errors import ConfigError

if TYPE_CHECKING:
    from hvps.config import Config
    from hvps.task import Task


def make_optimizer(config: Config, task: Task) -> tuple[keras.optimizers.Optimizer, float]:
    """Build the optimizer, with clipping and loss scaling, and its base learning rate.

    The task's own `build_optimizer()` is used where it has one. Clipping by the global norm is
    left to Keras: it sees the reduced gradient, after loss scaling was taken out of it.

    Raises:
        ConfigError: Keras refuses the arguments, or the configuration and the task both claim the
            optimizer.
    """
    build = getattr(task, "build_optimizer", None)
    optimizer = _from_task(config, build) if callable(build) else _from_config(config)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if config.train.clip_norm is not None:
        if inner.clipnorm or inner.clipvalue or inner.global_clipnorm:
            raise ConfigError(
                "train.clip_norm: the optimizer clips already",
                rule="one way of clipping",
                received=f"clip_norm={config.train.clip_norm:g} and the optimizer's own",
                do="take one of them away",
            )
        inner.global_clipnorm = config.train.clip_norm
    # The number as it was written, where there is one: the optimizer's own is rounded to float32.
    learning_rate = (
        float(inner.learning_rate) if callable(build) else config.optimizer.learning_rate
    )
    if config.train.precision == "mixed_float16" and optimizer is inner:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer, learning_rate


def _from_config(config: Config) -> keras.optimizers.Optimizer:
    from hvps.optimizer_check import canonical_optimizer_name

    name = canonical_optimizer_name(config.optimizer.name)
    arguments: dict[str, Any] = config.optimizer.model_dump(exclude={"name"})
    try:
        return getattr(keras.optimizers, name)(**arguments)
    except (TypeError, ValueError) as err:
        raise ConfigError(
            f"optimizer: Keras refuses the arguments of {name}",
            rule=f"the arguments of keras.optimizers.{name}",
            received=str(err),
            do="mend the optimizer section",
        ) from err


def _from_task(config: Config, build: Any) -> keras.optimizers.Optimizer:
    if not config.optimizer.is_default:
        raise ConfigError(
            "optimizer: the task builds its own",
            rule="the optimizer comes from the configuration or from the task's build_optimizer()",
            received=f"{config.task} with build_optimizer(), and an optimizer section",
            do="take one of them away",
        )
    optimizer = build()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "task: build_optimizer() did not return an optimizer",
            rule="a keras.optimizers.Optimizer",
            received=type(optimizer).__name__,
            do="return the optimizer",
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(
        getattr(inner, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule
    ):
        raise ConfigError(
            "task: build_optimizer() gave an optimizer with a schedule of its own",
            rule="a constant learning rate; hvps moves it as `schedule` says",
            received=type(inner._learning_rate).__name__,
            do="give the optimizer a number, and describe the schedule in the configuration",
        )
    return optimizer
