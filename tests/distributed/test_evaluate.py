"""hvps eval and the evaluator task: the same numbers as at the end of training, and true ones."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    roc_auc_score,
    top_k_accuracy_score,
)

from hvps.checkpoint import latest_checkpoint
from tests.distributed.graded import (
    CLASS,
    GRID,
    LABEL,
    LOGITS,
    ON_GRID,
    SCORE,
    TOP,
    graded_examples,
)
from tests.distributed.ps_cluster import PsCluster, new_tasks
from tests.launching import BIN, Job, ranks, result_of, weights_of

Jobs = Callable[..., Job]

TIMEOUT = 200
COMMON = ["log.tensorboard=false", "log.progress=off", "backend.stall_timeout=60", "run.name=run"]
RESUMABLE = [
    *COMMON,
    "task=tests.tasks:Resumable",
    "train.global_batch=15",
    "train.epochs=2",
    "optimizer.name=sgd",
    "optimizer.learning_rate=0.05",
    "checkpoint.every_steps=5",
]
EMA = ["optimizer.use_ema=true", "optimizer.ema_momentum=0.9"]
TOTAL = 28  # steps


def finish(job: Job, code: int = 0) -> str:
    assert job.wait(TIMEOUT) == code, job.output
    return job.output


def evaluate(jobs: Jobs, number: int, *arguments: str, launcher: str = "mpirun") -> dict[str, Any]:
    """What `hvps eval runs/run --json` says, on so many ranks; 0: without a launcher."""
    given = ["runs/run", "--json", *arguments]
    command = ranks(number, given, launcher=launcher, program=("-m", "hvps.evaluate"))
    output = finish(jobs([str(BIN / "hvps"), "eval", *given] if number == 0 else command))
    # horovodrun puts the rank before each line.
    lines = [line[line.index("{") :] for line in output.splitlines() if '{"run"' in line]
    assert len(lines) == 1, output
    found: dict[str, Any] = json.loads(lines[0])
    return found


def notes(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def content(run: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in run.rglob("*") if path.is_file()]
    return {str(p.relative_to(run)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


@pytest.mark.timeout(3 * TIMEOUT)
def test_three_ranks_agree_with_scikit_learn(jobs: Jobs) -> None:
    task = ["task=tests.distributed.graded:Graded", "optimizer.name=sgd", "train.steps=2"]
    finish(jobs(ranks(0, [*task, *COMMON, "train.global_batch=48", "backend.kind=local"])))
    found = evaluate(jobs, 3)
    assert (found["processes"], found["step"]) == (3, 2)
    metrics, (x, y) = found["metrics"], graded_examples()
    label, on_grid, score = y[:, LABEL], x[:, ON_GRID], x[:, SCORE]
    assert len(x) == 1000
    # To the last bit: every example has counted once, and once only.
    assert metrics["exact_auc"] == roc_auc_score(label, score)
    guess = on_grid > 0.5
    counts = dict(
        zip(("tn", "fp", "fn", "tp"), confusion_matrix(label, guess).ravel(), strict=True)
    )
    assert {name: metrics[name] for name in counts} == counts
    # In float32, as Keras has its results.
    assert metrics["accuracy"] == np.float32(accuracy_score(label, guess))
    top = top_k_accuracy_score(y[:, CLASS], x[:, LOGITS], k=TOP)
    assert metrics["top"] == np.float32(top)
    right = accuracy_score(y[:, CLASS], np.argmax(x[:, LOGITS], axis=1))
    assert metrics["class_accuracy"] == np.float32(right)
    assert metrics["f1/0"] == pytest.approx(f1_score(label, guess), abs=1e-6)
    # Thresholds lie between all scores of the grid; its rounding is Keras's.
    assert len(np.unique(on_grid)) == GRID
    assert metrics["auc"] == pytest.approx(roc_auc_score(label, on_grid), abs=1e-6)
    assert metrics["loss"] == pytest.approx(float(np.mean((label - on_grid) ** 2)), rel=1e-6)
    # No mean over the ranks' own values comes near: some have labels of one kind only.
    parts = np.array_split(np.arange(1000), 3)
    assert [len(np.unique(label[part])) for part in parts] != [2, 2, 2]


@pytest.mark.timeout(3 * TIMEOUT)
@pytest.mark.parametrize(
    "number", [0, pytest.param(3, marks=pytest.mark.slow)], ids=["local", "allreduce 3"]
)
def test_the_last_checkpoint_gives_the_result_of_training(
    jobs: Jobs, tmp_path: Path, number: int
) -> None:
    kind = "allreduce" if number else "local"
    finish(jobs(ranks(number, [*RESUMABLE, *EMA, f"backend.kind={kind}"])))
    run = tmp_path / "runs" / "run"
    before = content(run)
    found = evaluate(jobs, number, launcher="horovodrun")
    assert found["metrics"] == result_of(run)["eval"]
    assert (found["step"], found["checkpoint"]) == (TOTAL, f"step-{TOTAL:012d}")
    after = content(run)
    del after["evaluations.jsonl"]
    assert after == before
    (note,) = notes(run)
    assert {k: note[k] for k in ("step", "checkpoint", "metrics")} == {
        k: found[k] for k in ("step", "checkpoint", "metrics")
    }
    # The averages make a difference: the weights that were trained are others.
    checkpoint, _ = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    trained = checkpoint.arrays()["model/dense/kernel"]
    saved = weights_of(run)
    (averaged,) = [array for name, array in saved.items() if name.startswith("dense/vars/0")]
    assert averaged.shape == trained.shape
    assert np.max(np.abs(averaged - trained)) > 1e-4


@pytest.mark.timeout(3 * TIMEOUT)
def test_the_evaluator_follows_parameter_servers(jobs: Jobs, tmp_path: Path) -> None:
    tasks = {**new_tasks(1, 2), "evaluator": ["127.0.0.1:1"]}
    arguments = [*RESUMABLE, *EMA, "backend.update=sync", "train.global_batch=16", "train.epochs=4"]
    arguments += ["log.tensorboard=true"]
    cluster = PsCluster(tmp_path, tasks, arguments, env={"HVPS_TEST_PAUSE": "0.01"})
    try:
        cluster.start("evaluator 0", *cluster.names)
        assert set(cluster.wait(TIMEOUT).values()) == {0}, cluster.outputs
    finally:
        cluster.end()
    run = tmp_path / "runs" / "run"
    result, found = result_of(run), notes(run)
    steps = [note["step"] for note in found]
    assert len(steps) > 1, cluster.outputs
    assert steps == sorted(set(steps)), cluster.outputs
    assert found[-1]["metrics"] == result["eval"]
    assert steps[-1] == result["steps"] == 52
    assert len({note["metrics"]["loss"] for note in found}) == len(found)
    output = cluster.jobs["evaluator 0"].output
    assert [f"evaluator 0: step {step} " in output for step in steps] == [True] * len(steps)
    assert any((run / "tensorboard" / "evaluator").iterdir())
    # One process evaluates what parameter servers have trained, by name of the step as well.
    assert evaluate(jobs, 0, "--checkpoint", "52")["metrics"] == result["eval"]


@pytest.mark.timeout(2 * TIMEOUT)
def test_an_evaluator_that_is_stopped(jobs: Jobs, tmp_path: Path) -> None:
    tasks = {"ps": ["127.0.0.1:2"], "worker": ["127.0.0.1:3"], "evaluator": ["127.0.0.1:1"]}
    cluster = PsCluster(tmp_path, tasks, RESUMABLE)
    try:
        cluster.start("evaluator 0")
        job = cluster.jobs["evaluator 0"]
        job.wait_for(lambda: "follows" in job.output, TIMEOUT, "evaluator")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(10) == 143, job.output
    finally:
        cluster.end()
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(TIMEOUT)
def test_an_evaluator_needs_to_know_the_folder(tmp_path: Path) -> None:
    tasks = {"ps": ["127.0.0.1:2"], "worker": ["127.0.0.1:3"], "evaluator": ["127.0.0.1:1"]}
    cluster = PsCluster(tmp_path, tasks, ["task=tests.tasks:Resumable"])
    try:
        cluster.start("evaluator 0")
        assert cluster.wait(60) == {"evaluator 0": 2}
        assert "hvps: error: run.name: needed by the evaluator" in cluster.outputs.replace(
            "[evaluator 0] ", ""
        )
    finally:
        cluster.end()
