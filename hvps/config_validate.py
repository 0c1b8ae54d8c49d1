"""Checks what the user wrote against the tree of `hvps.config` and explains what does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hvps.config import Config, leaf_fields
from hvps.config_base import (
    FieldError,
    Section,
    is_mapping,
    is_text,
    look_up,
    rule_of,
    section_type,
)
from hvps.problems import DEFAULT, Problem, did_you_mean, nearest_origin, show

# What people write who come from other trainers.
ALIASES = {
    "lr": "optimizer.learning_rate",
    "base_lr": "optimizer.learning_rate",
    "batch": "train.global_batch",
    "batch_size": "train.global_batch",
    "global_batch_size": "train.global_batch",
    "num_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "max_steps": "train.steps",
    "grad_accum": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "grad_clip": "train.clip_norm",
    "max_grad_norm": "train.clip_norm",
    "warmup": "schedule.warmup_steps",
    "output_dir": "run.dir",
    "log_dir": "run.dir",
    "model": "task",
}
_WHAT = {
    "int": "not an integer",
    "float": "not a number",
    "bool": "not true or false",
    "string": "not text",
    "list": "not a list",
    "dict": "not a mapping",
    "finite": "not a finite number",
    "literal": "not one of the choices",
    "greater": "too small",
    "less": "too large",
}


def validate(
    values: Mapping[Any, Any], origins: Mapping[str, str], plain: Mapping[str, str]
) -> tuple[Config | None, list[Problem]]:
    """Build the Config; where that is not possible, say everything that is wrong.

    Args:
        values: the nested keys and values as the user wrote them.
        origins: who set each dotted key.
        plain: the source text of values written without quotes.
    """
    checker = _Checker(origins, plain)
    known = checker.known_part(Config, values, "")
    problems = checker.problems
    try:
        config = Config.model_validate(known)
    except ValidationError as err:
        seen = set()
        for details in err.errors():
            problem = checker.explain(details, known)
            if problem.what.partition(":")[0] not in seen:  # lists report each item
                problems.append(problem)
            seen.add(problem.what.partition(":")[0])
        return None, problems
    return (None if problems else config), problems


class _Checker:
    def __init__(self, origins: Mapping[str, str], plain: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self._origins = origins
        self._plain = plain
        self._fields = dict(leaf_fields())

    def received(self, key: str, value: object) -> str:
        origin = nearest_origin(self._origins, key)
        if origin == DEFAULT:  # perhaps only parts of it were set
            origin = next((o for k, o in self._origins.items() if k.startswith(key + ".")), origin)
        return f"{show(value)} ({origin})"

    def known_part(
        self, section: type[Section], values: Mapping[Any, Any], prefix: str
    ) -> dict[str, Any]:
        """The values whose keys exist; a problem is noted for each other."""
        result: dict[str, Any] = {}
        for name, value in values.items():
            key = f"{prefix}{name}"
            field = section.model_fields.get(name)
            if field is None and isinstance(name, str) and name.isidentifier():
                if section.model_config.get("extra") == "allow":
                    self._refuse_old_booleans(key, value)
                    result[name] = value
                    continue
            if field is None:
                self.problems.append(self._unknown(key, value))
                continue
            inner = section_type(field)
            if inner is not None:
                if value is None:  # "train:" with all of its lines commented out
                    continue
                if not isinstance(value, dict):
                    self.problems.append(self._not_a_section(key, value, inner))
                    continue
                result[name] = self.known_part(inner, value, key + ".")
            else:
                result[name] = self._leaf(key, field, value)
        return result

    def _leaf(self, key: str, field: FieldInfo, value: Any) -> Any:
        if is_text(field) and isinstance(value, int | float):
            return self._plain.get(key, value)  # run.name=007 is meant as it is written
        if isinstance(value, dict) and value and not is_mapping(field):
            self.problems.append(self._unknown(key, value))
            return field.get_default(call_default_factory=True)
        if key == "task_args":
            self._refuse_old_booleans(key, value)
            if value is None:
                return {}
            for name in value if isinstance(value, dict) else ():
                if not isinstance(name, str) or not name.isidentifier():
                    self.problems.append(
                        Problem(
                            f"{key}.{name}: not the name of an argument",
                            "letters, digits and '_', as in Python",
                            self.received(f"{key}.{name}", value[name]),
                        )
                    )
            if isinstance(value, dict):
                return {name: inner for name, inner in value.items() if isinstance(name, str)}
        return value

    def _refuse_old_booleans(self, key: str, value: Any) -> None:
        # Free values go to other people's code, where the text "no" would count as true.
        if isinstance(value, dict):
            for name, inner in value.items():
                self._refuse_old_booleans(f"{key}.{name}", inner)
        elif isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
            if self._plain.get(key) == value:
                word = "true" if value.lower() in ("yes", "on") else "false"
                self.problems.append(
                    Problem(
                        f"{key}: ambiguous",
                        "yes, no, on and off are words in YAML 1.2 and booleans in YAML 1.1",
                        self.received(key, value),
                        f"write {word}, or '\"{value}\"' for the word",
                    )
                )

    def _not_a_section(self, key: str, value: Any, inner: type[Section]) -> Problem:
        names = list(inner.model_fields)
        return Problem(
            f"{key}: a section, not a value",
            f"it holds the keys {', '.join(names)}",
            self.received(key, value),
            f"set one of them, for example {key}.{names[0]}=...",
        )

    def _unknown(self, key: str, value: Any) -> Problem:
        while isinstance(value, dict) and value:  # name the key that the user wrote, to its end
            name = next(iter(value))
            key, value = f"{key}.{name}", value[name]
        return Problem(
            f"{key}: unknown key",
            "only the keys that `hvps config` prints",
            self.received(key, value),
            suggest_key(key),
        )

    def explain(self, details: Any, known: Mapping[str, Any]) -> Problem:
        """One of Pydantic's errors, in our words."""
        key = self._key_of(details["loc"])
        error = details.get("ctx", {}).get("error")
        what, rule, do = None, None, None
        if isinstance(error, FieldError):
            key = ".".join(part for part in (key, error.field) if part)
            what, rule, do = error.what, error.rule, error.do
        field = self._fields.get(key)
        rule = rule or (rule_of(field) if field else None)
        what = what or _in_words(details["type"])
        value = look_up(known, key)
        if do is None and field is not None:
            do = _near_choice(key, field, value)
        if do is None and value is None:
            do = f"remove {key} to use the default"
        return Problem(f"{key}: {what}", rule, self.received(key, value), do)

    def _key_of(self, loc: tuple[Any, ...]) -> str:
        parts: list[str] = []
        for part in loc:
            if ".".join(parts) in self._fields:
                break  # an index, or a branch of a union
            parts.append(str(part))
        return ".".join(parts)


def _in_words(kind: str) -> str:
    if kind == "string_too_short":
        return "empty"
    return _WHAT.get(re.split("_", kind)[0], "not valid")


def _near_choice(key: str, field: FieldInfo, value: Any) -> str | None:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    near = did_you_mean(str(value), choices, cutoff=0.5) if isinstance(value, str) else None
    return near.replace("did you mean ", f"did you mean {key}=") if near else None


def find_key(name: str) -> str | None:
    """The dotted key that a name of it, of its last part, or from another trainer stands for."""
    leaves = [key for key, _ in leaf_fields()]
    if name in leaves:
        return name
    last = name.rpartition(".")[2]
    same = [key for key in leaves if key.rpartition(".")[2] == last]
    return ALIASES.get(last) or (same[0] if len(same) == 1 else None)


def suggest_key(key: str) -> str | None:
    """What may have been meant by an unknown dotted key."""
    leaves = [name for name, _ in leaf_fields()]
    parent, _, last = key.rpartition(".")
    if key in leaves:  # the key of a file with dots in it
        return f"write it nested, or on the command line as {key}=..."
    for leaf in leaves:
        if key.startswith(leaf + "."):
            return f"{leaf} is a value, not a section: write {leaf}=..."
    if last in ALIASES:
        return f"did you mean {ALIASES[last]}?"
    same = [leaf for leaf in _with_sections(leaves) if leaf.rpartition(".")[2] == last]
    if same:
        return f"did you mean {' or '.join(same[:3])}?"
    siblings = {
        leaf.rpartition(".")[2]: leaf for leaf in leaves if leaf.rpartition(".")[0] == parent
    }
    near = did_you_mean(last, siblings) if parent else None
    if near:
        return near.replace("did you mean ", f"did you mean {parent}.")
    choices = [name for name in _with_sections(leaves) if not key.startswith(name + ".")]
    near = did_you_mean(key, choices, cutoff=0.7)
    if near:
        return near
    by_last = {leaf.rpartition(".")[2]: leaf for leaf in leaves}
    near = did_you_mean(last, by_last, cutoff=0.7)
    if near:
        return f"did you mean {by_last[near.removeprefix('did you mean ').removesuffix('?')]}?"
    if siblings and parent:
        return f"{parent} has the keys {', '.join(siblings)}"
    return "see all keys with `hvps config --help`"


def _with_sections(leaves: list[str]) -> Iterator[str]:
    yield from leaves
    yield from dict.fromkeys(leaf.rpartition(".")[0] for leaf in leaves if "." in leaf)
