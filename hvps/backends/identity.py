"""What must be the same in all processes of a job, and the error when it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvps.errors import ConfigError


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def compare(theirs: Mapping[str, Any], mine: Mapping[str, Any], them: str, me: str) -> None:
    """Check that two processes were started alike.

    Args:
        theirs, mine: flattened.
        them, me: names of the processes, as in "rank 1".

    Raises:
        ConfigError: names the first key that differs.
    """
    for key in [*mine, *(k for k in theirs if k not in mine)]:
        here, there = mine.get(key, "nothing"), theirs.get(key, "nothing")
        if here != there:
            raise ConfigError(
                f"{key}: {them} differs from {me}",
                rule="all processes run the same configuration, model and versions",
                received=f"{there} on {them}, {here} on {me}",
                do="start every process with the same command, code and environment",
            )
