"""Writers of what is measured during a run: JSON lines, CSV, TensorBoard events."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO


class Writer(Protocol):
    """Takes one record at a time: `kind` is "train" or "eval", values are floats by name."""

    def write(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Record `values` as of global step `step`."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines:
    """metrics.jsonl: one object a line, flushed as it is written."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed in close)

    def write(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN and no infinity; their names are still better than nothing.
        plain = {name: v if math.isfinite(v) else str(v) for name, v in values.items()}
        record = {"kind": kind, "step": step, "epoch": epoch, "time": time.time(), **plain}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Csv:
    """metrics.csv: one row a record, empty where a kind has no such column.

    Columns that come up later (a metric whose result turns out to be a vector) are added on the
    right, and the file written anew. Rows that are there already stay.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = ["kind", "step", "epoch", *columns]
        rows = _read_rows(path)
        known = [name for row in rows[:1] for name in row if name]
        self._columns += [name for name in known if name not in self._columns]
        self._open("w")
        self._writer.writeheader()
        self._writer.writerows(rows)
        self._file.flush()

    def _open(self, mode: str) -> None:
        self._file = open(self._path, mode, encoding="utf-8", newline="")  # noqa: SIM115
        self._writer = csv.DictWriter(self._file, self._columns)

    def write(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        row = {"kind": kind, "step": step, "epoch": epoch, **values}
        unknown = [name for name in row if name not in self._columns]
        if unknown:
            self._add_columns(unknown)
        self._writer.writerow(row)
        self._file.flush()

    def _add_columns(self, names: Sequence[str]) -> None:
        self._file.close()
        rows = _read_rows(self._path)
        self._columns += names
        self._open("w")
        self._writer.writeheader()
        self._writer.writerows(rows)

    def close(self) -> None:
        self._file.close()


def _read_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(_whole_lines(path), newline="")))


def _whole_lines(path: Path) -> str:
    """A file's text without a last line that was cut off, and without what no text has."""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            text = file.read().replace("\0", "")
    except FileNotFoundError:
        return ""
    return text[: text.rfind("\n") + 1]


def forget_after(folder: Path, step: int) -> None:
    """Remove records of steps after `step`, which a run that goes on from there makes again.

    A line that was cut off when the run was killed goes too.
    """
    lines = folder / "metrics.jsonl"
    if lines.exists():
        kept = []
        for line in _whole_lines(lines).splitlines(keepends=True):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
        aside = folder / ".metrics.jsonl.tmp"
        aside.write_text("".join(kept), encoding="utf-8")
        os.replace(aside, lines)
    table = folder / "metrics.csv"
    complete = [row for row in _read_rows(table) if None not in row.values() and None not in row]
    rows = [row for row in complete if row.get("step", "").isdigit()]
    if rows:
        with open(table, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [name for name in rows[0] if name], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row for row in rows if int(row["step"]) <= step)
    elif table.exists():
        table.unlink()


class TensorBoard:
    """Event files under tensorboard/train and tensorboard/eval."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writers: dict[str, Any] = {}

    def write(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        # Not tf.summary: it runs an operation for each number, which takes longer than a step.
        from tensorboard.summary import Writer as EventWriter

        if kind not in self._writers:
            self._writers[kind] = EventWriter(str(self._path / kind))
        for name, value in values.items():
            self._writers[kind].add_scalar(name, value, step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Writers:
    """All writers of a run as one."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers

    def write(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(kind, step, epoch, values)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def open_writers(
    folder: Path, columns: Sequence[str], *, csv_file: bool, tensorboard: bool
) -> Writers:
    """The writers of rank 0.

    Args:
        columns: names of all values that a record may hold, for the CSV's header.
    """
    writers: list[Writer] = [JsonLines(folder / "metrics.jsonl")]
    if csv_file:
        writers.append(Csv(folder / "metrics.csv", columns))
    if tensorboard:
        writers.append(TensorBoard(folder / "tensorboard"))
    return Writers(writers)
