"""Checks the optimizer's name and arguments against the sources of the installed Keras."""

from __future__ import annotations

import ast
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hvps.overrides import LoadedConfig
from hvps.problems import InvalidConfigError, Problem, did_you_mean, fail, show
from hvps.source_reader import ClassSource, Signature, SourceReader

# Public classes of keras.optimizers that are not optimizers by themselves.
_NOT_PLAIN = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}
_ALIASES = {
    "lr": "did you mean optimizer.learning_rate?",
    "beta1": "did you mean optimizer.beta_1?",
    "beta2": "did you mean optimizer.beta_2?",
    "betas": "write optimizer.beta_1=... and optimizer.beta_2=...",
    "eps": "did you mean optimizer.epsilon?",
    "alpha": "did you mean optimizer.learning_rate?",
    "decay": "did you mean schedule.decay?",
    "clip_norm": "did you mean train.clip_norm?",
    "warmup_steps": "did you mean schedule.warmup_steps?",
    "batch_size": "did you mean train.global_batch?",
}
_OWNED = {
    "gradient_accumulation_steps": "use train.accumulate, which counts updates correctly",
    "loss_scale_factor": "use train.precision=mixed_float16, which scales the loss",
}
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_Test = Callable[[float], bool]
_RANGES: tuple[tuple[str, str, _Test], ...] = (
    (r"(adam_)?beta_\d|momentum|rho|ema_momentum", ">= 0 and < 1", lambda v: 0 <= v < 1),
    (r"epsilon(_\d)?|clip\w*|global_clipnorm", "> 0", lambda v: v > 0),
    (r"(adam_)?weight_decay|l[12]_\w+|initial_accumulator_value", ">= 0", lambda v: v >= 0),
    (r"learning_rate_power", "<= 0", lambda v: v <= 0),
    (r"ema_overwrite_frequency|ns_steps", ">= 1", lambda v: v >= 1),
    (r"warmup_steps", ">= 0", lambda v: v >= 0),
)


def canonical_optimizer_name(name: str, reader: SourceReader | None = None) -> str:
    """The class of keras.optimizers that a name in any case means: "adam" -> "Adam".

    Raises:
        ConfigError: Keras has no such optimizer, or is not installed.
    """
    classes = _optimizer_classes(reader or SourceReader([os.getcwd(), *sys.path]))
    by_lower = {known.lower(): known for known in classes}
    found = by_lower.get(name.lower().replace("_", ""))
    if found is None:
        wrapper = next((known for known in _NOT_PLAIN if known.lower() == name.lower()), None)
        do = did_you_mean(name, classes)
        if wrapper:
            do = "name the optimizer itself"
            if wrapper == "LossScaleOptimizer":
                do += "; train.precision=mixed_float16 scales the loss"
        fail(
            "optimizer.name: no optimizer of Keras has this name",
            f"one of {', '.join(classes)}",
            show(name),
            do,
        )
    return found


def check_optimizer(loaded: LoadedConfig, reader: SourceReader) -> Iterator[Problem]:
    """What is wrong with the section `optimizer`."""
    config = loaded.config.optimizer
    try:
        name = canonical_optimizer_name(config.name, reader)
    except InvalidConfigError as err:
        first = err.problems[0]
        received = loaded.received("optimizer.name", config.name) if first.received else None
        yield Problem(first.what, first.rule, received, first.do)
        return
    signature = _signature(reader, name)
    arguments = config.arguments()
    for argument, value in arguments.items():
        received = loaded.received(f"optimizer.{argument}", value)
        if argument not in signature.defaults:
            yield _unknown(name, argument, received, signature, loaded)
        elif argument in _OWNED and value is not None:
            yield Problem(
                f"optimizer.{argument}: not to be set here",
                "hvps does this itself, in step over all ranks",
                received,
                _OWNED[argument],
            )
        else:
            rule = _broken_rule(argument, value, signature.defaults[argument])
            if rule is not None:
                yield Problem(f"optimizer.{argument}: not allowed", rule, received)
    yield from _contradictions(loaded, name, arguments)


def _optimizer_classes(reader: SourceReader) -> dict[str, str]:
    """Public optimizers, and the module of each."""
    module = reader.read("keras.optimizers") if reader.find("keras") else None
    version = reader.read("keras.src.version") if module else None
    if module is None or version is None:
        fail("optimizer: Keras 3 is not installed", "keras >= 3", None, "run `make install`")
    return {
        alias.asname or alias.name: f"{node.module}"
        for node in module.tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras.src.")
        for alias in node.names
        if alias.name[:1].isupper() and alias.name not in _NOT_PLAIN
    }


def _signature(reader: SourceReader, name: str) -> Signature:
    """Arguments of the class, and through its **kwargs those of the base of all optimizers."""
    defaults: dict[str, ast.expr | None] = {}
    for module_name, class_name in (
        ("keras.src.optimizers.base_optimizer", "BaseOptimizer"),
        (_optimizer_classes(reader)[name], name),
    ):
        module = reader.read(module_name)
        source = reader.lookup(module, class_name) if module else None
        signature = reader.signature(source) if isinstance(source, ClassSource) else None
        if signature is None:
            fail(
                f"optimizer.name: cannot read the arguments of {name} in the installed Keras",
                "a Keras 3 whose sources are installed",
                module_name,
                "run `make install`",
            )
        if not signature.takes_any:
            defaults.clear()
        defaults.update(signature.defaults)
    for ours in ("learning_rate", "name"):
        defaults.pop(ours, None)
    return Signature(defaults)


def _unknown(
    name: str, argument: str, received: str, signature: Signature, loaded: LoadedConfig
) -> Problem:
    do = None
    alias = _ALIASES.get(argument.lower())
    if alias:
        target = re.search(r"optimizer\.(\w+)", alias)
        if target is None or target[1] in signature.defaults or target[1] == "learning_rate":
            do = alias
    choices = [known for known in signature.defaults if known not in _OWNED]
    if do is None:
        do = did_you_mean(argument, ["learning_rate", *choices])
        do = do.replace("did you mean ", "did you mean optimizer.") if do else None
    do = do or loaded.remove(f"optimizer.{argument}", "optimizer")
    return Problem(
        f"optimizer.{argument}: {name} has no such argument",
        f"learning_rate, {', '.join(choices)}",
        received,
        do,
    )


def _broken_rule(argument: str, value: Any, default: ast.expr | None) -> str | None:
    """The rule that a value breaks, None if it is fine."""
    known = _literal(default)
    if value is None and known is None:
        return None
    if argument == "exclude_layers":
        is_words = isinstance(value, list) and all(isinstance(word, str) for word in value)
        return None if is_words else "a list of words, or null"
    if isinstance(known, bool):
        return None if isinstance(value, bool) else "true or false"
    whole = argument.endswith(("_steps", "_frequency"))
    words, test = "", None
    for pattern, words_of, test_of in _RANGES:
        if re.fullmatch(pattern, argument):
            words, test = " " + words_of, test_of
    rule = ("an integer" if whole else "a number") + words + (" or null" if known is None else "")
    if known is None and isinstance(value, bool) and test is None:
        return None  # a default of None does not say what the argument is
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return rule
    if not math.isfinite(value) or (test is not None and not test(value)):
        return rule
    return None


def _literal(default: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(default) if default is not None else None
    except ValueError:
        return None


def _contradictions(
    loaded: LoadedConfig, name: str, arguments: dict[str, Any]
) -> Iterator[Problem]:
    """Arguments that exclude each other or would have no effect."""
    clips = [clip for clip in _CLIPS if arguments.get(clip) is not None]
    if len(clips) > 1:
        others = " and ".join(f"optimizer.{clip}" for clip in clips[1:])
        yield Problem(
            f"optimizer.{clips[0]}: set together with {others}",
            "at most one of clipnorm, clipvalue and global_clipnorm",
            loaded.received(f"optimizer.{clips[0]}", arguments[clips[0]]),
            "keep one of them, or use train.clip_norm alone",
        )
    elif clips and loaded.config.train.clip_norm is not None:
        yield Problem(
            f"optimizer.{clips[0]}: set together with train.clip_norm",
            "one way of clipping",
            loaded.received(f"optimizer.{clips[0]}", arguments[clips[0]]),
            f"keep train.clip_norm ({loaded.origin('train.clip_norm')}), or the optimizer's own",
        )
    ignored = []
    if not arguments.get("use_ema"):
        reason = "optimizer.use_ema is not true"
        ignored += [(key, reason) for key in ("ema_momentum", "ema_overwrite_frequency")]
    if name == "SGD" and not arguments.get("momentum") and arguments.get("nesterov") is True:
        ignored += [("nesterov", "optimizer.momentum is 0")]
    for key, reason in ignored:
        if arguments.get(key) is not None:
            yield Problem(
                f"optimizer.{key}: set, but it would be ignored",
                f"it has no effect here: {reason}",
                loaded.received(f"optimizer.{key}", arguments[key]),
                "remove it, or change that",
            )
