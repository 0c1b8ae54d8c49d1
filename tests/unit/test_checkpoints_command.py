"""hvps checkpoints: what it lists, what it calls damaged, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvps import cli
from hvps.checkpoint import note_in_checkpoint, write_checkpoint
from hvps.position import Position
from tests.launching import job_environment


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run without checkpoints."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("task: hvps.tasks.digits:Digits\n")
    return folder


def add(run: Path, step: int, **further: Any) -> Path:
    meta = {"step": step, "time": 1.7e9 + step, **further}
    meta["position"] = Position(step, step // 10, step % 10, step * 64).as_json()
    arrays = {"model/w": np.full(50, step, np.float32)}
    return write_checkpoint(run / "checkpoints", arrays, meta).path


def damage(path: Path, file: str = "state.npz") -> None:
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (path / file).write_bytes(content)


def listed(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    code = cli.main(["checkpoints", str(run), "--json"])
    return code, json.loads(capsys.readouterr().out)["checkpoints"]


def test_a_run_without_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(run, capsys) == (0, [])
    assert cli.main(["checkpoints", str(run)]) == 0
    assert capsys.readouterr().out == f"run {run} has no checkpoint\n"


def test_the_newest_is_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (5, 100, 25):
        add(run, step)
    write = write_checkpoint(
        run / "checkpoints",
        {"w": np.zeros(3, np.float32)},
        {"step": 300, "time": 0.0, "position": Position(300, 3, 0, 12345).as_json()},
    )
    note_in_checkpoint(write, {"best": {"accuracy": 0.98765}, "last": True})
    code, entries = listed(run, capsys)
    assert code == 0
    assert [entry["step"] for entry in entries] == [300, 100, 25, 5]
    assert [entry["whole"] for entry in entries] == [True] * 4
    assert [entry["last"] for entry in entries] == [True, False, False, False]
    assert [entry["best"] for entry in entries] == [{"accuracy": 0.98765}, None, None, None]
    assert entries[1]["epoch"] == 10
    assert entries[1]["examples"] == 6400
    assert entries[1]["time"] == 1.7e9 + 100
    assert cli.main(["checkpoints", str(run)]) == 0
    head, first, second, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["step", "epoch", "examples", "when"]
    assert "12,345" in first
    assert first.endswith("accuracy 0.9877  last  whole")
    assert second.endswith("  whole")
    assert "last" not in second


@pytest.mark.parametrize(
    ("file", "reason"),
    [("state.npz", "the checksum of state.npz"), ("checkpoint.json", "")],
)
def test_a_damaged_one_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], file: str, reason: str
) -> None:
    add(run, 5)
    damage(add(run, 7), file)
    code, entries = listed(run, capsys)
    assert code == 0
    assert [(entry["step"], entry["whole"]) for entry in entries] == [(7, False), (5, True)]
    assert entries[0]["reason"]
    assert reason in entries[0]["reason"]
    cli.main(["checkpoints", str(run)])
    lines = capsys.readouterr().out.splitlines()
    assert f"damaged: {entries[0]['reason']}" in lines[1]
    assert lines[2].endswith("whole")


def test_only_damaged_ones_are_a_failure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(add(run, 5))
    (add(run, 7) / "state.npz").unlink()
    code, entries = listed(run, capsys)
    assert code == 1
    assert [entry["whole"] for entry in entries] == [False, False]
    assert entries[0]["reason"] == "No such file or directory"


def test_what_is_no_run_is_explained(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent.parent)
    path = add(run, 5)
    (run.parent / "latest").symlink_to("mine")
    for given, words in {
        "mine": "did you mean runs/mine?",
        "runs": "name one of its runs, for example runs/latest",
        str(path): f"name the run, {run}; --checkpoint N chooses a checkpoint",
        "nowhere": "correct the path",
    }.items():
        assert cli.main(["checkpoints", given]) == 2
        error = capsys.readouterr().err
        assert f"RUN: {given} is " in error
        assert words in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "RUN: no folders"),
        (["a", "b"], "RUN: 2 folders"),
        (["a", "--jsn"], "--jsn: unknown option"),
        (["a", "run.name=b"], "run.name=b: unknown option"),
        (["a", "--checkpoint", "3"], "--checkpoint: unknown option"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoints", *arguments]) == 2
    assert f"hvps: error: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--checkpoint", "x"], ["--checkpoint"], ["--checkpoint=-1"]])
def test_a_checkpoint_is_named_by_its_step(
    run: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(run), *given]) == 2
    assert "--checkpoint: not a step" in capsys.readouterr().err


def test_an_evaluation_says_what_it_cannot_do(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(run), "backend.kind=ps"]) == 2
    assert "backend.kind: an evaluation by ps is not possible" in capsys.readouterr().err
    assert cli.main(["eval", str(run), "train.epoch=3"]) == 2
    assert "did you mean train.epochs" in capsys.readouterr().err


def test_tensorflow_is_not_loaded(run: Path) -> None:
    add(run, 5)
    code = (
        "import sys; from hvps import cli; code = cli.main(['checkpoints', sys.argv[1]]);"
        "assert not {'tensorflow', 'keras', 'horovod', 'mpi4py'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], env=job_environment(), timeout=60, check=False
    )
    assert done.returncode == 0
