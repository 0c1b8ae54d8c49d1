"""hvps eval and the evaluator: what is refused before TensorFlow is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvps import cli, train
from hvps.checkpoint import write_checkpoint
from hvps.config import Config
from hvps.evaluate import config_for_evaluation

EVALUATOR = [
    "backend.kind=ps",
    "backend.cluster={ps: [127.0.0.1:1], worker: [127.0.0.1:2], evaluator: [127.0.0.1:3]}",
    "--role",
    "evaluator",
    "--index",
    "0",
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("task: hvps.tasks.digits:Digits\n")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["eval", "run", *arguments]) == 2
    return capsys.readouterr().err


def test_without_a_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "hvps: error: RUN: run has no checkpoint" in refused(capsys)


def test_a_checkpoint_that_is_not_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (20, 5):
        write_checkpoint(run / "checkpoints", {"w": np.zeros(1)}, {"step": step})
    error = refused(capsys, "--checkpoint", "7")
    assert "--checkpoint: there is none of step 7" in error
    assert "choose among 5, 20" in error


def test_nothing_is_left_in_a_folder_that_was_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys)
    refused(capsys, "backend.kind=ps")
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ([], "run.name: needed by the evaluator"),
        (["run.name=a", "checkpoint.keep=0"], "checkpoint.keep: 0 leaves the evaluator nothing"),
    ],
)
def test_an_evaluator_needs_something_to_follow(
    further: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main([*EVALUATOR, *further]) == 2
    assert f"hvps: error: {words}" in capsys.readouterr().err.replace("[evaluator 0] ", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ranks", "kind"), [(1, "local"), (3, "allreduce")])
@pytest.mark.parametrize(
    "backend",
    [
        {"kind": "local"},
        {"kind": "allreduce", "engine": "mpi"},
        {"kind": "ps", "update": "bounded", "max_staleness": 3, "num_ps": 2},
    ],
    ids=["local", "allreduce", "ps"],
)
def test_the_backend_depends_on_the_processes_alone(
    ranks: int, kind: str, backend: dict[str, Any]
) -> None:
    given = {"backend": {**backend, "stall_timeout": 7}, "train": {"accumulate": 4}}
    found = config_for_evaluation(Config.model_validate(given), ranks)
    assert found.backend.kind == kind
    assert found.backend.stall_timeout == 7
    assert found.train.accumulate == 1
    if ranks > 1 and "engine" in backend:
        assert found.backend.engine == "mpi"
