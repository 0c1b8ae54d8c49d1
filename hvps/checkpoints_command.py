"""hvps checkpoints RUN: which checkpoints a run has, and whether they are whole.

TensorFlow is not needed for that: the arrays are only compared with their checksums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hvps.checkpoint import read_meta
from hvps.errors import EXIT_FAILURE, EXIT_OK, ConfigError
from hvps.run_args import split_run_args

_USAGE = """\
usage: hvps checkpoints RUN [--json]

List the checkpoints of a run, the newest first, and compare each with its checksums.

  RUN     the run's folder, for example runs/latest
  --json  one line of JSON, not a table

The exit code is 1 if there are only damaged ones.
"""
_NAME = re.compile(r"step-(\d{12})(?:\.(\d+))?")
_HEADS = ("step", "epoch", "examples", "when", "size", "evaluation", "", "state")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, or 1 if there are only damaged checkpoints.

    Raises:
        ConfigError: the folder is no run.
    """
    arguments = split_run_args(argv, "hvps checkpoints", _USAGE)
    entries = list(_entries(arguments.run / "checkpoints"))
    if arguments.json:
        print(json.dumps({"run": str(arguments.run), "checkpoints": entries}))
    elif entries:
        print(_table(entries))
    else:
        print(f"run {arguments.run} has no checkpoint")
    return EXIT_OK if not entries or any(e["whole"] for e in entries) else EXIT_FAILURE


def _entries(folder: Path) -> Iterator[dict[str, Any]]:
    named = [(int(m[1]), int(m[2] or 0), m[0]) for m in map(_NAME.fullmatch, _names(folder)) if m]
    for step, _, name in sorted(named, reverse=True):
        path = folder / name
        entry = _entry(path, step)
        if path.exists():  # a run that is training may have replaced it while it was read
            yield entry


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _entry(path: Path, step: int) -> dict[str, Any]:
    """What is known of a checkpoint; a damaged one may tell no more than the step in its name."""
    entry: dict[str, Any] = {"checkpoint": path.name, "step": step, "whole": False, "reason": None}
    try:
        found = read_meta(path)
        position = found.meta["position"]
        entry |= {
            "epoch": position["epoch"],
            "examples": position["examples"],
            "time": found.meta["time"],
            "bytes": found.size,
            "best": found.meta.get("best"),
            "last": bool(found.meta.get("last")),
        }
        found.verify()
    except ConfigError as err:
        return {**entry, "reason": str(err.received)}
    except KeyError as err:
        return {**entry, "reason": f"checkpoint.json does not say {err}"}
    return {**entry, "whole": True}


def _table(entries: Sequence[dict[str, Any]]) -> str:
    rows = [_HEADS, *(_row(entry) for entry in entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    right = {"step", "epoch", "examples", "size"}
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if head in right else text.ljust(width)
            for text, width, head in zip(row, widths, _HEADS, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    state = "whole" if entry["whole"] else f"damaged: {entry['reason']}"
    if "bytes" not in entry:
        return (str(entry["step"]), *[""] * 6, state)
    best = entry["best"] or {}
    return (
        str(entry["step"]),
        str(entry["epoch"]),
        f"{entry['examples']:,}",
        datetime.fromtimestamp(entry["time"]).strftime("%Y-%m-%d %H:%M:%S"),
        _size(entry["bytes"]),
        ", ".join(f"{name} {value:.4g}" for name, value in best.items()),
        "last" if entry["last"] else "",
        state,
    )


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
