"""Whole runs as users start them: launchers, the run's folder, evaluation, early stopping."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tests.distributed.conftest import run_cases
from tests.launching import (
    BIN,
    ROOT,
    Job,
    job_environment,
    ranks,
    result_of,
    wait_until_gone,
    weights_of,
)
from tests.tasks import scored_examples

Jobs = Callable[..., Job]

LOADED_WITHOUT_HVPS = """
import sys
import keras
import numpy as np
from sklearn.datasets import load_digits
model = keras.models.load_model(sys.argv[1])
digits = load_digits()
held_out = np.arange(len(digits.images)) % 5 == 4
images = (digits.images[held_out] / 16).astype("float32")[..., None]
print((model.predict(images, verbose=0).argmax(1) == digits.target[held_out]).mean())
assert not [name for name in sys.modules if name.startswith("hvps")]
"""


@pytest.mark.timeout(300)
def test_the_main_job_learns_the_digits(jobs: Jobs, tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "allreduce.yaml")
    job = jobs(ranks(2, [config], launcher="horovodrun"))
    assert job.wait(240) == 0, job.output
    run = job.run_directory()
    assert run.name.startswith("allreduce-")
    assert os.readlink(tmp_path / "runs" / "latest") == run.name
    result = result_of(run)
    assert result["backend"] == "allreduce"
    assert result["engine"] == "horovod over MPI"
    assert result["ranks"] == 2
    assert result["eval"]["accuracy"] >= 0.97
    assert result["examples"] == 1438 * result["steps"] / 23
    assert result["examples_per_second"] > 0
    assert len(result["weights_sha256"]) == 64
    for line in ("rank 0 of 2 (OMPI_COMM_WORLD_*)", "= 2 ranks × 32 local × 1 accumulation"):
        assert line in job.output
    check_folder(run, result)
    printed = subprocess.run(
        [BIN / "python", "-c", LOADED_WITHOUT_HVPS, run / "model.keras"],
        cwd=tmp_path,
        env={**job_environment(), "KERAS_BACKEND": "tensorflow", "PYTHONPATH": ""},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert float(printed.split()[-1]) == pytest.approx(result["eval"]["accuracy"])


def check_folder(run: Path, result: dict[str, object]) -> None:
    """The files of a run tell one story."""
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.yaml", "run.json", "logs", "metrics.jsonl", "metrics.csv", "tensorboard",
        "model.keras", "result.json", "checkpoints", ".lock",
    }  # fmt: skip
    record = json.loads((run / "run.json").read_text())
    assert "hvps.train" in record["command"]
    assert record["versions"]["tensorflow"].startswith("2.21")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in records if r["kind"] == "eval"][-1]
    assert last["step"] == result["steps"]
    assert last["accuracy"] == result["eval"]["accuracy"]  # type: ignore[index]
    with open(run / "metrics.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(records)
    logs = {path.name: path.read_text() for path in (run / "logs").iterdir()}
    assert set(logs) == {"rank-0.log", "rank-1.log"}
    assert "rank 1 of 2, pid " in logs["rank-1.log"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "number", "source"),
    [
        ("none", 0, "no launcher: one process"),
        ("mpirun", 4, "OMPI_COMM_WORLD_*"),
        ("gloo", 2, "HOROVOD_*"),
        pytest.param("horovodrun", 8, "OMPI_COMM_WORLD_*", marks=pytest.mark.slow),
    ],
)
def test_the_same_program_under_every_launcher(
    jobs: Jobs, launcher: str, number: int, source: str
) -> None:
    job = jobs(ranks(number, ["train.epochs=2"], launcher=launcher))
    assert job.wait(240) == 0, job.output
    result = result_of(job.run_directory())
    assert result["ranks"] == max(1, number)
    assert f"({source})" in job.output
    logs = list((job.run_directory() / "logs").iterdir())
    assert len(logs) == max(1, number)
    wait_until_gone(job)


@pytest.mark.timeout(300)
def test_evaluation_batch_norm_and_early_stopping_over_ranks(tmp_path: Path) -> None:
    scored = ["task=tests.tasks:Scored", "train.global_batch=8", "optimizer.learning_rate=1e-9"]
    cases = {
        # 101 examples on 2 ranks: 50 and 51. A mean of two means would differ, so would two AUCs'.
        "scored": [*scored, "train.steps=1"],
        "stopped": [
            *scored,
            "train.epochs=9",
            "train.early_stop.patience=2",
            "train.early_stop.min_delta=0.1",
            "train.early_stop.monitor=auc",
        ],
        "batch_norm": ["task_args.batch_norm=true", "train.steps=30"],
    }
    run_cases(tmp_path, 2, cases, ["log.tensorboard=false"])
    runs = {name: tmp_path / "runs" / name for name in cases}

    x, y = scored_examples()
    scores = 1 / (1 + np.exp(-x[:, 0]))
    evaluation = result_of(runs["scored"])["eval"]
    assert evaluation["accuracy"] == pytest.approx(np.mean((scores > 0.5) == y), abs=1e-6)
    # Keras's AUC is a Riemann sum over 1,000 thresholds.
    assert evaluation["auc"] == pytest.approx(roc_auc_score(y, scores), abs=2e-3)
    losses = -np.where(y > 0.5, np.log(scores), np.log(1 - scores))
    assert evaluation["loss"] == pytest.approx(losses.mean(), abs=1e-5)

    stopped = result_of(runs["stopped"])
    assert stopped["stopped_by"] == "early_stop"
    assert stopped["steps"] == 3 * 13  # the first evaluation is the best, two more are no better

    first, second = (
        dict(np.load(runs["batch_norm"] / f"weights-rank-{rank}.npz")) for rank in range(2)
    )
    moving = [name for name in first if "moving" in name]
    assert len(moving) == 4
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    assert all(np.abs(first[name]).max() > 0.01 for name in moving)
    assert any("moving" in name or "vars" in name for name in weights_of(runs["batch_norm"]))
