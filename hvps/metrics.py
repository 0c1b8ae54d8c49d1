"""Writers of what is measured during a run: JSON lines, CSV, TensorBoard events."""

from __future__ import annotations

import csv
import json
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
        record = {"kind": kind, "step": step, "epoch": epoch, "time": time.time(), **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Csv:
    """metrics.csv: one row a record, empty where a kind has no such column."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._file: TextIO = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115
        self._rows = csv.DictWriter(self._file, ["kind", "step", "epoch", *columns])
        self._rows.writeheader()

    def write(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._rows.writerow({"kind": kind, "step": step, "epoch": epoch, **values})
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files under tensorboard/train and tensorboard/eval."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writers: dict[str, Any] = {}

    def write(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        import tensorflow as tf

        if kind not in self._writers:
            self._writers[kind] = tf.summary.create_file_writer(str(self._path / kind))
        with self._writers[kind].as_default():
            for name, value in values.items():
                tf.summary.scalar(name, value, step=step)

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
