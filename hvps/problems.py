"""What is wrong with a configuration: one record per problem, one exception for all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from hvps.errors import ConfigError
from hvps.yaml_text import write_flow

DEFAULT = "default"
MAX_ALSO = 5


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: what was wrong, beginning with the dotted key.
        rule: what holds instead.
        received: what was found, as text, with its origin.
        do: what to do about it.
    """

    what: str
    rule: str | None = None
    received: str | None = None
    do: str | None = None

    def short(self) -> str:
        """The problem in one line, for the problems after the first."""
        details = [self.what]
        if self.received is not None:
            details.append(f"received {self.received}")
        if self.do is not None and self.do.startswith("did you mean"):
            details.append(self.do)
        elif self.rule is not None:
            details.append(f"rule: {self.rule}")
        return "; ".join(details)


class InvalidConfigError(ConfigError):
    """A configuration with one or more problems: the first in full, the others in a line each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        super().__init__(first.what, rule=first.rule, received=first.received, do=first.do)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        others = self.problems[1:]
        lines = [f"  also:     {problem.short()}" for problem in others[:MAX_ALSO]]
        if len(others) > MAX_ALSO:
            lines.append(f"  also:     {len(others) - MAX_ALSO} more")
        return "\n".join([super().__str__(), *lines])


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise them, if there are any.

    Raises:
        InvalidConfigError: there is at least one problem.
    """
    found = list(dict.fromkeys(problems))
    if found:
        raise InvalidConfigError(found)


def fail(what: str, rule: str | None, received: str | None, do: str | None) -> NoReturn:
    """Raise one problem, where going on to find others makes no sense."""
    raise InvalidConfigError([Problem(what, rule, received, do)])


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """`did you mean X?` for the choice nearest to the word, ignoring case; None if none is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f"did you mean {by_lower[near[0]]}?" if near else None


def show(value: object) -> str:
    """A value as the user would write it in YAML, text in quotes."""
    text = repr(value) if isinstance(value, str) else write_flow(value)
    return text if len(text) <= 100 else text[:97] + "..."


def nearest_origin(origins: Mapping[str, str], key: str) -> str:
    """Who set the key, or the nearest part of the tree around it."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return origins.get("", DEFAULT)
