"""The files that measurements are written to can be read back."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvps import metrics
from hvps.metrics import Csv, JsonLines, TensorBoard, Writers, forget_after, open_writers

TRAIN = {"loss": 0.5, "learning_rate": 0.001}
EVAL = {"loss": 0.25, "accuracy": 0.75}


def write_both(writer: Writers | JsonLines | Csv | TensorBoard) -> None:
    writer.write("train", 10, 0, TRAIN)
    writer.write("train", 20, 1, {**TRAIN, "loss": 0.4})
    writer.write("eval", 20, 1, EVAL)


def test_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1000.5)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(time=lambda: next(clock)))
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    write_both(writer)
    # Read before it is closed: a run that is killed keeps what it wrote.
    records = [json.loads(line) for line in path.read_text().splitlines()]
    writer.close()
    assert [record.pop("time") for record in records] == [1000.5, 1001.5, 1002.5]
    assert records == [
        {"kind": "train", "step": 10, "epoch": 0, "loss": 0.5, "learning_rate": 0.001},
        {"kind": "train", "step": 20, "epoch": 1, "loss": 0.4, "learning_rate": 0.001},
        {"kind": "eval", "step": 20, "epoch": 1, "loss": 0.25, "accuracy": 0.75},
    ]


def test_json_lines_are_added_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        writer = JsonLines(path)
        writer.write("train", step, 0, TRAIN)
        writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_numbers_that_json_does_not_have_are_written_by_name(tmp_path: Path) -> None:
    """A bare NaN is no JSON: other programs than Python would refuse the whole file."""

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    values = {"loss": math.nan, "auc": math.inf, "score": -math.inf, "accuracy": 0.5}
    writer.write("eval", 1, 0, values)
    writer.close()
    record = json.loads(path.read_text(), parse_constant=refused)
    assert {name: record[name] for name in values} == {
        "loss": "nan",
        "auc": "inf",
        "score": "-inf",
        "accuracy": 0.5,
    }
    assert [float(record[name]) for name in ("auc", "score")] == [math.inf, -math.inf]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = Csv(path, ["loss", "learning_rate", "accuracy"])
    write_both(writer)
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    writer.close()
    assert rows == [
        ["kind", "step", "epoch", "loss", "learning_rate", "accuracy"],
        ["train", "10", "0", "0.5", "0.001", ""],
        ["train", "20", "1", "0.4", "0.001", ""],
        ["eval", "20", "1", "0.25", "", "0.75"],
    ]


def test_csv_takes_columns_that_come_up_later(tmp_path: Path) -> None:
    """That a metric's result is a vector is known after the first evaluation."""
    path = tmp_path / "metrics.csv"
    writer = Csv(path, ["loss", "f1"])
    writer.write("train", 10, 0, {"loss": 0.5})
    writer.write("eval", 10, 0, {"loss": 0.25, "f1/0": 0.5, "f1/1": 0.75})
    writer.write("train", 20, 1, {"loss": 0.4})
    writer.write("eval", 20, 1, {"loss": 0.2, "f1/1": 0.875, "f1/0": 0.625, "a, b": 1.0})
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    writer.close()
    assert rows == [
        ["kind", "step", "epoch", "loss", "f1", "f1/0", "f1/1", "a, b"],
        ["train", "10", "0", "0.5", "", "", "", ""],
        ["eval", "10", "0", "0.25", "", "0.5", "0.75", ""],
        ["train", "20", "1", "0.4", "", "", "", ""],
        ["eval", "20", "1", "0.2", "", "0.625", "0.875", "1.0"],
    ]


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    writer = TensorBoard(tmp_path)
    write_both(writer)
    writer.close()

    def scalars(kind: str) -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(tmp_path / kind))
        events.Reload()
        found: dict[str, list[tuple[int, float]]] = {}
        for name in events.Tags()["tensors"]:
            for event in events.Tensors(name):
                value = float(make_ndarray(event.tensor_proto))
                found.setdefault(name, []).append((event.step, pytest.approx(value)))
        return found

    assert scalars("train") == {
        "loss": [(10, 0.5), (20, 0.4)],
        "learning_rate": [(10, 0.001), (20, 0.001)],
    }
    assert scalars("eval") == {"loss": [(20, 0.25)], "accuracy": [(20, 0.75)]}


def test_all_writers_get_everything_and_are_closed() -> None:
    class Recording:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def write(self, kind: str, step: int, epoch: int, values: object) -> None:
            self.seen.append((kind, step, epoch, values))

        def close(self) -> None:
            self.seen.append("closed")

    both = [Recording(), Recording()]
    writers = Writers(both)
    write_both(writers)
    writers.close()
    for writer in both:
        assert writer.seen[0] == ("train", 10, 0, TRAIN)
        assert writer.seen[2:] == [("eval", 20, 1, EVAL), "closed"]


@pytest.mark.parametrize("csv_file", [False, True])
@pytest.mark.parametrize("tensorboard", [False, True])
def test_what_is_switched_off_leaves_no_file(
    tmp_path: Path, csv_file: bool, tensorboard: bool
) -> None:
    columns = ["loss", "learning_rate", "accuracy"]
    writers = open_writers(tmp_path, columns, csv_file=csv_file, tensorboard=tensorboard)
    write_both(writers)
    writers.close()
    expected = {"metrics.jsonl"}
    expected |= {"metrics.csv"} if csv_file else set()
    expected |= {"tensorboard"} if tensorboard else set()
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_a_run_without_writers() -> None:
    writers = Writers([])
    write_both(writers)
    writers.close()


# --- a run that goes on ---


def kept(folder: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(kind, step) of the records in metrics.jsonl and in metrics.csv."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows)
    return (
        [(line["kind"], line["step"]) for line in lines],
        [(row["kind"], int(row["step"])) for row in rows],
    )


def write_steps(folder: Path, steps: range, columns: tuple[str, ...] = ("loss", "f1")) -> None:
    writers = open_writers(folder, columns, csv_file=True, tensorboard=False)
    for step in steps:
        writers.write("train", step, 0, {"loss": step + 0.5})
        if step % 2 == 0:
            writers.write("eval", step, 0, {"loss": 0.1, "f1": 0.5})
    writers.close()


@pytest.mark.parametrize("last", [0, 1, 4, 6, 100])
def test_records_after_a_step_are_forgotten(tmp_path: Path, last: int) -> None:
    write_steps(tmp_path, range(1, 7))
    forget_after(tmp_path, last)
    write_steps(tmp_path, range(last + 1, 7))
    forget_after(tmp_path, 6)
    expected = [
        ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4),
        ("train", 5), ("train", 6), ("eval", 6),
    ]  # fmt: skip
    assert kept(tmp_path) == (expected, expected)


def test_values_stay_as_they_were(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    texts = [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "metrics.csv")]
    forget_after(tmp_path, 3)
    write_steps(tmp_path, range(0))
    assert [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "metrics.csv")] == texts


@pytest.mark.parametrize("cut", [1, 2, 3, 8, 30])
def test_a_line_that_was_cut_off_is_forgotten_too(tmp_path: Path, cut: int) -> None:
    """However much of it is there: what comes next must not be glued to it."""
    write_steps(tmp_path, range(5, 13))
    for name in ("metrics.jsonl", "metrics.csv"):
        content = (tmp_path / name).read_bytes()
        last = content.splitlines(keepends=True)[-1]
        end = len(content) - min(cut, len(last) - 1)
        (tmp_path / name).write_bytes(content[:end])
    forget_after(tmp_path, 12)
    write_steps(tmp_path, range(13, 14))
    expected = [("train", 10), ("eval", 10), ("train", 11), ("train", 12), ("train", 13)]
    for found in kept(tmp_path):
        assert found[-5:] == expected


def test_lines_that_are_no_records_are_forgotten(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 2))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'5\n[]\n{"kind": "train"}\n{"step": "2"}\n\0\0\0\n\xff\xfe\n{"kind": "tr\n')
    with open(tmp_path / "metrics.csv", "ab") as file:
        file.write(b"train,1\r\ntrain,,0,1,2\r\ntrain,x,0,1,2\r\ntrain,1,0,1,2,3,4\r\n\0\0\r\n")
    forget_after(tmp_path, 1)
    write_steps(tmp_path, range(2, 3))
    assert kept(tmp_path) == ([("train", 1), ("train", 2), ("eval", 2)],) * 2


def test_files_that_are_not_there_are_not_missed(tmp_path: Path) -> None:
    forget_after(tmp_path, 5)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.csv").write_bytes(b"")
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    forget_after(tmp_path, 5)
    write_steps(tmp_path, range(1, 2))
    assert kept(tmp_path) == ([("train", 1)], [("train", 1)])


def test_a_table_goes_on_with_other_columns(tmp_path: Path) -> None:
    """Metrics may have been added, and results of an earlier life may have been vectors."""
    path = tmp_path / "metrics.csv"
    writer = Csv(path, ["loss", "f1"])
    writer.write("train", 1, 0, {"loss": 0.5})
    writer.write("eval", 1, 0, {"loss": 0.25, "f1/0": 0.75})
    writer.close()
    writer = Csv(path, ["loss", "accuracy"])
    writer.write("eval", 2, 0, {"loss": 0.125, "accuracy": 1.0, "f1/0": 0.5})
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    writer.close()
    assert [set(row) for row in rows] == [
        {"kind", "step", "epoch", "loss", "accuracy", "f1", "f1/0"}
    ] * 3
    assert [(row["loss"], row["f1/0"], row["accuracy"]) for row in rows] == [
        ("0.5", "", ""),
        ("0.25", "0.75", ""),
        ("0.125", "0.5", "1.0"),
    ]
