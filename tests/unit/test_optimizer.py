"""The optimizer that a configuration asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import pytest

from hvps.errors import ConfigError
from hvps.optimizer import make_optimizer
from hvps.overrides import load_config


class Plain:
    """A task that leaves the optimizer to the configuration."""


def building(build: Any) -> Any:
    return SimpleNamespace(build_optimizer=build)


def made(*overrides: str, task: Any = None) -> tuple[Any, float]:
    return make_optimizer(load_config(None, overrides).config, task or Plain())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adam", keras.optimizers.Adam),
        ("ADAM", keras.optimizers.Adam),
        ("Adam", keras.optimizers.Adam),
        ("sgd", keras.optimizers.SGD),
        ("SGD", keras.optimizers.SGD),
        ("rmsprop", keras.optimizers.RMSprop),
        ("AdamW", keras.optimizers.AdamW),
        ("adamw", keras.optimizers.AdamW),
        ("Ftrl", keras.optimizers.Ftrl),
    ],
)
def test_by_name_in_any_case(name: str, expected: type) -> None:
    optimizer, _ = made(f"optimizer.name={name}")
    assert type(optimizer) is expected


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.name") as caught:
        made("optimizer.name=adma")
    assert "Adam" in str(caught.value)


def test_the_default_is_adam_at_its_rate() -> None:
    optimizer, rate = made()
    assert type(optimizer) is keras.optimizers.Adam
    assert rate == pytest.approx(1e-3)


def test_arguments_are_passed_on() -> None:
    optimizer, rate = made(
        "optimizer.name=sgd",
        "optimizer.learning_rate=0.25",
        "optimizer.momentum=0.5",
        "optimizer.nesterov=true",
        "optimizer.weight_decay=0.125",
    )
    assert rate == 0.25
    assert float(optimizer.learning_rate) == 0.25
    assert optimizer.momentum == 0.5
    assert optimizer.nesterov is True
    assert optimizer.weight_decay == 0.125


@pytest.mark.parametrize("override", ["optimizer.momentun=0.5", "optimizer.momentum=7"])
def test_arguments_that_keras_refuses(override: str) -> None:
    with pytest.raises(
        ConfigError, match="optimizer: Keras refuses the arguments of SGD"
    ) as caught:
        made("optimizer.name=sgd", override)
    assert caught.value.rule == "the arguments of keras.optimizers.SGD"
    assert "momentu" in str(caught.value.received)
    assert caught.value.do


def test_clipping_is_by_the_global_norm() -> None:
    optimizer, _ = made("train.clip_norm=1.5")
    assert (optimizer.global_clipnorm, optimizer.clipnorm, optimizer.clipvalue) == (1.5, None, None)
    assert made()[0].global_clipnorm is None


@pytest.mark.parametrize("key", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_one_way_of_clipping(key: str) -> None:
    assert getattr(made(f"optimizer.{key}=2.0")[0], key) == 2.0
    with pytest.raises(ConfigError, match=r"train.clip_norm: the optimizer clips") as caught:
        made(f"optimizer.{key}=2.0", "train.clip_norm=1.0")
    assert caught.value.rule
    assert "clip_norm=1" in str(caught.value.received)
    assert caught.value.do


def test_float16_scales_the_loss() -> None:
    optimizer, rate = made(
        "train.precision=mixed_float16", "train.clip_norm=1.5", "optimizer.learning_rate=0.5"
    )
    assert type(optimizer) is keras.optimizers.LossScaleOptimizer
    assert type(optimizer.inner_optimizer) is keras.optimizers.Adam
    # Inside: it must see the gradient after the scale was taken out.
    assert optimizer.inner_optimizer.global_clipnorm == 1.5
    assert optimizer.global_clipnorm is None
    assert rate == 0.5


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_other_precisions_do_not_scale(precision: str) -> None:
    optimizer, _ = made(f"train.precision={precision}")
    assert type(optimizer) is keras.optimizers.Adam


# --- a task's own ---


def test_the_task_may_build_it() -> None:
    mine = keras.optimizers.SGD(0.75, momentum=0.5)
    optimizer, rate = made("train.clip_norm=2.0", task=building(lambda: mine))
    assert optimizer is mine
    assert rate == 0.75
    assert mine.global_clipnorm == 2.0


def test_what_the_task_built_is_scaled_once() -> None:
    inner = keras.optimizers.SGD(0.75)
    plain, _ = made("train.precision=mixed_float16", task=building(lambda: inner))
    assert type(plain) is keras.optimizers.LossScaleOptimizer
    assert plain.inner_optimizer is inner
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.75))
    optimizer, rate = made("train.precision=mixed_float16", task=building(lambda: wrapped))
    assert optimizer is wrapped
    assert rate == 0.75


@pytest.mark.parametrize("override", ["optimizer.name=sgd", "optimizer.learning_rate=0.5"])
def test_the_task_and_the_configuration_cannot_both(override: str) -> None:
    with pytest.raises(ConfigError, match="optimizer: the task builds its own") as caught:
        made(override, task=building(keras.optimizers.SGD))
    assert caught.value.rule
    assert "build_optimizer()" in str(caught.value.received)
    assert caught.value.do


@pytest.mark.parametrize("wrap", [False, True])
def test_a_schedule_of_its_own_is_refused(wrap: bool) -> None:
    def build() -> Any:
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        optimizer = keras.optimizers.SGD(decay)
        return keras.optimizers.LossScaleOptimizer(optimizer) if wrap else optimizer

    with pytest.raises(ConfigError, match="a schedule of its own") as caught:
        made(task=building(build))
    assert caught.value.received == "ExponentialDecay"
    assert caught.value.rule
    assert caught.value.do


def test_a_clipping_task_and_clip_norm() -> None:
    def build() -> Any:
        return keras.optimizers.SGD(clipnorm=1.0)

    assert made(task=building(build))[0].clipnorm == 1.0
    with pytest.raises(ConfigError, match=r"train.clip_norm"):
        made("train.clip_norm=1.0", task=building(build))


@pytest.mark.parametrize(
    ("given", "received"), [(None, "NoneType"), ("adam", "str"), (keras.optimizers.Adam, "type")]
)
def test_something_else_than_an_optimizer_is_refused(given: Any, received: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^task: build_optimizer\(\) did not return an optimizer"
    ) as caught:
        made(task=building(lambda: given))
    assert caught.value.received == received
    assert caught.value.rule
    assert caught.value.do
