"""Which optimizers can be run shard by shard."""

from __future__ import annotations

import keras

from hvps.errors import ConfigError

RUNNABLE = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lamb", "Lion"),
    *("Muon", "Nadam", "RMSprop", "SGD", "ScheduleFreeAdamW"),
)
# Their update of an element depends on others of the same variable.
_WHOLE_VARIABLES = ("Adafactor", "Lamb", "Muon")


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse what cannot be run shard by shard.

    Raises:
        ConfigError: names the optimizer, and those that can.
    """
    kind = type(optimizer)
    if _is_keras(optimizer) and kind.__name__ in RUNNABLE:
        return
    if not _is_keras(optimizer) and kind.apply is keras.optimizers.Optimizer.apply:
        return  # the user's own update_step
    raise ConfigError(
        f"optimizer: {kind.__name__} cannot be run on parameter servers",
        rule=f"one of {', '.join(RUNNABLE)}, or a class of your own that keeps Keras's apply()",
        received=f"{kind.__module__}.{kind.__name__}, which needs all gradients in one place",
        do="use one of these, or backend.kind=allreduce",
    )


def updates_elements(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether each element is updated by itself, so that a variable may be split into parts."""
    return _is_keras(optimizer) and type(optimizer).__name__ not in _WHOLE_VARIABLES


def _is_keras(optimizer: keras.optimizers.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("keras.")
