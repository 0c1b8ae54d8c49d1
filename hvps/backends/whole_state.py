"""All that training changes, by names that hold no layout: neither ranks nor parts of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def whole_state(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> dict[str, keras.Variable]:
    """Weights, seed-generator states and optimizer variables by a name that holds no layout."""
    return {
        **by_path(model.variables, "model/"),
        **by_path(optimizer.variables, "optimizer/"),
        **{f"optimizer/{name}": v for name, v in _unlisted(optimizer).items()},
    }


def seed_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Those of a whole state that are states of random number generators."""
    weights = {id(v) for v in model.weights}
    return {n: v for n, v in by_path(model.variables, "model/").items() if id(v) not in weights}


def by_path(variables: Sequence[keras.Variable], prefix: str = "") -> dict[str, keras.Variable]:
    """Variables by their path; where layers share a name, the further ones are numbered."""
    named: dict[str, keras.Variable] = {}
    seen: dict[str, int] = {}
    for variable in variables:
        seen[variable.path] = seen.get(variable.path, 0) + 1
        number = f"#{seen[variable.path]}" if seen[variable.path] > 1 else ""
        named[f"{prefix}{variable.path}{number}"] = variable
    return named


def optimizer_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """All of an optimizer's variables."""
    return [*optimizer.variables, *_unlisted(optimizer).values()]


def _unlisted(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """What Keras's own list leaves out, such as Nadam's product, by attribute."""
    listed = {id(variable) for variable in optimizer.variables}
    _, single = slot_lists(getattr(optimizer, "inner_optimizer", optimizer), 0)
    return {name.strip("_"): v for name, v in single.items() if id(v) not in listed}


def slot_lists(
    optimizer: keras.optimizers.Optimizer, count: int
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """An optimizer's variables by attribute: lists of `count` (None where a variable has no such
    slot), and single ones, without the learning rate. Keras's own list of them leaves some out,
    such as Nadam's product."""
    lists: dict[str, list[Any]] = {}
    single: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables"):
            continue
        if isinstance(value, keras.Variable):
            if name != "_learning_rate":
                single[name] = value
        elif isinstance(value, list | tuple) and len(value) == count and count:
            known = [isinstance(v, keras.Variable) for v in value]
            if any(known) and all(k or v is None for k, v in zip(known, value, strict=True)):
                lists[name] = list(value)
    return lists, single
