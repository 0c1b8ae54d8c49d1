"""What the parts of the configuration have in common, and what can be asked about their fields."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

INT_MAX = 2**31 - 1


class FieldError(ValueError):
    """Raised by the validators below: one field's problem, in the parts of an error message."""

    def __init__(
        self, field: str, what: str, *, rule: str | None = None, do: str | None = None
    ) -> None:
        super().__init__(what)
        self.field = field
        self.what = what
        self.rule = rule
        self.do = do


class Section(BaseModel):
    """Base of all parts of the tree."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_surprising_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # Pydantic would take true for 1, and integers that no counter of the program can hold.
        field = cls.model_fields.get(info.field_name or "")
        kinds = set(_kinds(field.annotation)) if field else set()
        if not kinds & {int, float} or bool in kinds:
            return value
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool):
                raise FieldError("", "not an integer" if int in kinds else "not a number")
            if int in kinds and isinstance(item, int | float) and abs(item) > INT_MAX:
                if item == item and abs(item) != float("inf"):  # those have their own message
                    raise FieldError("", "too large", rule=f"an integer up to {INT_MAX}")
        return value

    def _differs(self, name: str) -> bool:
        """True if the user asked for something else than the default."""
        field = type(self).model_fields[name]
        return bool(getattr(self, name) != field.get_default(call_default_factory=True))


def ignored(field: str, reason: str) -> FieldError:
    """The problem of an option that another one makes pointless."""
    return FieldError(
        field,
        "set, but it would be ignored",
        rule=f"it has no effect here: {reason}",
        do="remove it, or change that",
    )


def section_type(field: FieldInfo) -> type[Section] | None:
    """The class of a field that is a section, else None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types and Literals in an annotation; of a list, those of its items."""
    if get_origin(annotation) in (Union, types.UnionType, list):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def is_text(field: FieldInfo) -> bool:
    """True if the field holds free text, for which 007 is not a number."""
    return str in set(_kinds(field.annotation))


def is_mapping(field: FieldInfo) -> bool:
    """True if the field holds a mapping with keys that the user chooses."""
    return dict in {get_origin(kind) for kind in _kinds(field.annotation)}


def look_up(values: object, key: str) -> Any:
    """What stands at a dotted key with indexes, like `ps[0]`; None if there is nothing."""
    inner: Any = values
    for part, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key):
        if index:
            inner = inner[int(index)] if isinstance(inner, list) else None
        else:
            inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner


def rule_of(field: FieldInfo) -> str:
    """What a field allows, in words: `an integer >= 1 or null`."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    bounds = []
    for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        for constraint in field.metadata:
            if getattr(constraint, attribute, None) is not None:
                bounds.append(f"{sign} {getattr(constraint, attribute)}")
    parts = []
    for kind in _kinds(field.annotation):
        if get_origin(kind) is Literal:
            choices = [str(choice) for choice in get_args(kind)]
            parts.append(("one of " if len(choices) > 1 else "") + ", ".join(choices))
        elif kind is type(None):
            parts.append("null")
        elif kind in (int, float):
            parts.append(" ".join([words[kind], " and ".join(bounds)]).strip())
        else:
            parts.append(words.get(kind, "a mapping"))
    if _is_list(field):
        text = "words, like [cpu:0, gpu:0]" if is_text(field) else "integers, like [100, 200]"
        return f"a list of {text}" + (", or null" if "null" in parts else "")
    return " or ".join(parts)


def _is_list(field: FieldInfo) -> bool:
    annotations = [field.annotation, *get_args(field.annotation)]
    return list in {get_origin(annotation) for annotation in annotations}
