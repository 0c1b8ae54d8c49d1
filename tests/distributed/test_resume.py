"""A run that was stopped at any step goes on as if it never had been, on the same number of
processes or another, under the same backend or another."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hvps.checkpoint import latest_checkpoint
from tests.distributed.ps_cluster import PsCluster, new_tasks
from tests.launching import BIN, Job, ranks, result_of

Jobs = Callable[..., Job]

TASK = [
    "task=tests.tasks:Resumable",
    "train.epochs=4",
    "train.global_batch=16",
    "optimizer.name=sgd",
    "optimizer.momentum=0.9",
    "optimizer.learning_rate=0.05",
    "schedule.warmup_steps=5",
    "schedule.decay=cosine",
    "log.tensorboard=false",
    "log.progress=off",
    "backend.stall_timeout=60",
]
PLAIN = [*TASK, "task_args.plain=true"]
TOTAL = 52  # steps
TIMEOUT = 120


def command(launch: str, arguments: list[str]) -> list[str]:
    """A way of training: local, allreduce on so many ranks, or ps (ps, workers, further keys)."""
    kind, *numbers = launch.split()
    if kind == "local":
        return ranks(0, [*arguments, "backend.kind=local"])
    if kind == "allreduce":
        return ranks(int(numbers[0]), [*arguments, "backend.kind=allreduce"])
    servers, workers, *further = numbers
    number = [f"backend.num_ps={servers}", f"backend.num_workers={workers}"]
    given = ["backend.kind=ps", "backend.update=sync", *number, *further]
    return [str(BIN / "hvps"), "launch", *given, *arguments]


def finish(job: Job, code: int = 0) -> None:
    assert job.wait(TIMEOUT) == code, job.output


def state(folder: Path, name: str) -> dict[str, np.ndarray]:
    """All arrays of a run's last checkpoint."""
    found, passed = latest_checkpoint(folder / "runs" / name / "checkpoints")
    assert found is not None
    assert not passed
    return found.arrays()


def differences(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, float]:
    assert a.keys() == b.keys()
    largest = {k: float(np.max(np.abs(a[k].astype(np.float64) - b[k]), initial=0.0)) for k in a}
    return {name: value for name, value in largest.items() if value}


@pytest.mark.timeout(4 * TIMEOUT)
@pytest.mark.parametrize("launch", ["local", "allreduce 2", "ps 2 2"])
def test_a_run_that_was_stopped_ends_bit_equal_to_one_that_was_not(
    jobs: Jobs, tmp_path: Path, launch: str
) -> None:
    finish(jobs(command(launch, [*TASK, "run.name=whole"]), name="whole"))
    # Somewhere in the run, and not beyond the fetches that a rank makes before the last steps.
    at = random.SystemRandom().randrange(20, 300)
    signalled = {"HVPS_TEST_SIGNAL_AT": str(at), "HVPS_TEST_SIGNAL_RANK": "0"}
    arguments = [*TASK, "run.name=parts"]
    finish(jobs(command(launch, arguments), env=signalled, name="first"), 143)
    stopped_at = result_of(tmp_path / "runs" / "parts")["steps"]
    assert 0 < stopped_at < TOTAL, at
    finish(jobs(command(launch, arguments), name="second"))
    whole, parts = result_of(tmp_path / "runs" / "whole"), result_of(tmp_path / "runs" / "parts")
    assert differences(state(tmp_path, "whole"), state(tmp_path, "parts")) == {}, stopped_at
    same = ("weights_sha256", "steps", "examples", "eval", "stopped_by")
    assert {k: whole[k] for k in same} == {k: parts[k] for k in same}
    assert parts["steps"] == TOTAL


@pytest.mark.timeout(4 * TIMEOUT)
@pytest.mark.parametrize(
    ("first", "then", "rounding"),
    [
        pytest.param("allreduce 2", "allreduce 4", 1e-6, marks=pytest.mark.slow),
        pytest.param("allreduce 4", "local", 1e-6, marks=pytest.mark.slow),
        ("allreduce 2", "ps 2 2", 1e-6),
        pytest.param("ps 2 2", "ps 3 2", 0.0, marks=pytest.mark.slow),
        pytest.param(
            "ps 2 2 backend.replication=in_graph", "allreduce 2", 1e-6, marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_goes_on_elsewhere(
    jobs: Jobs, tmp_path: Path, first: str, then: str, rounding: float
) -> None:
    # A width at which the hidden layer is split over parameter servers.
    model = [*PLAIN, "task_args.width=60000"] if "ps" in first and "ps" in then else PLAIN
    finish(jobs(command(first, [*model, "run.name=whole"]), name="whole"))
    arguments = [*model, "run.name=parts"]
    signalled = {"HVPS_TEST_SIGNAL_AT": "70"}
    finish(jobs(command(first, arguments), env=signalled, name="first"), 143)
    second = jobs(command(then, arguments), name="second")
    finish(second)
    assert "goes on after step" in second.output
    found = differences(state(tmp_path, "whole"), state(tmp_path, "parts"))
    found = {name: value for name, value in found.items() if "learning_rate" not in name}
    assert max(found.values(), default=0.0) <= rounding, found
    assert result_of(tmp_path / "runs" / "parts")["steps"] == TOTAL


@pytest.mark.timeout(3 * TIMEOUT)
@pytest.mark.parametrize(
    "further",
    [
        ["backend.update=async"],
        pytest.param(["backend.update=async", "backend.pipeline=4"], marks=pytest.mark.slow),
        pytest.param(
            ["backend.update=async", "backend.replication=in_graph"], marks=pytest.mark.slow
        ),
        pytest.param(["backend.update=bounded", "backend.max_staleness=0"], marks=pytest.mark.slow),
    ],
    ids=["async", "pipeline", "in_graph", "bounded"],
)
def test_asynchronous_updates_are_neither_lost_nor_done_twice(
    jobs: Jobs, tmp_path: Path, further: list[str]
) -> None:
    task = ["task=tests.tasks:Constant", "train.steps=200", "optimizer.name=sgd"]
    task += ["optimizer.momentum=0.9", "optimizer.learning_rate=0.01", "train.eval_every=0"]
    task += ["log.tensorboard=false", "log.progress=off", "backend.stall_timeout=60"]
    finish(jobs(command("local", [*task, "run.name=serial"]), name="serial"))
    arguments = [*task, "run.name=parts", "checkpoint.every_steps=10"]
    job = jobs(command("ps 2 2", [*arguments, "train.steps=77", *further]), name="first")
    finish(job)
    finish(jobs(command("ps 2 2", [*arguments, *further]), name="second"))
    found = differences(state(tmp_path, "serial"), state(tmp_path, "parts"))
    assert found == {}
    result = result_of(tmp_path / "runs" / "parts")
    assert (result["steps"], result["lost_updates"]) == (200, 0)


# --- tasks that come back ---


@pytest.mark.timeout(4 * TIMEOUT)
@pytest.mark.parametrize("victim", ["ps 1", pytest.param("worker 0", marks=pytest.mark.slow)])
def test_a_task_that_was_killed_comes_back_and_nothing_is_lost(
    jobs: Jobs, tmp_path: Path, victim: str
) -> None:
    arguments = [*TASK, "run.name=parts", "train.epochs=8", "backend.update=sync"]
    arguments += ["backend.restarts=1", "checkpoint.every_steps=5"]
    finish(jobs(command("allreduce 2", [*arguments[:-2], "run.name=whole"]), name="whole"))
    cluster = PsCluster(tmp_path, new_tasks(2, 2), arguments, env={"HVPS_TEST_PAUSE": "0.005"})
    folder = tmp_path / "runs" / "parts" / "checkpoints"
    try:
        cluster.start()
        job = cluster.jobs[victim]
        job.wait_for(lambda: latest_checkpoint(folder)[0], TIMEOUT, "checkpoint")
        job.process.send_signal(signal.SIGKILL)
        cluster.wait(10, victim)
        del cluster.jobs[victim]
        cluster.start(victim)
        assert set(cluster.wait(TIMEOUT).values()) == {0}, cluster.outputs
        assert "begins anew (1 of 1)" in cluster.outputs
    finally:
        cluster.end()
    assert differences(state(tmp_path, "whole"), state(tmp_path, "parts")) == {}


@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.slow
def test_a_task_that_does_not_come_back_is_named_in_time(tmp_path: Path) -> None:
    arguments = [*TASK, "run.name=parts", "train.epochs=1000", "backend.restarts=5"]
    arguments += ["backend.stall_timeout=15", "train.eval_every=0"]
    cluster = PsCluster(tmp_path, new_tasks(2, 2), arguments)
    log = tmp_path / "runs" / "parts" / "metrics.jsonl"
    try:
        cluster.start()
        job = cluster.jobs["ps 1"]
        job.wait_for(lambda: log.exists() and log.stat().st_size, TIMEOUT, "training step")
        job.process.send_signal(signal.SIGKILL)
        cluster.wait(10, "ps 1")
        del cluster.jobs["ps 1"]
        codes = cluster.wait(TIMEOUT)
        assert set(codes.values()) == {1}, cluster.outputs
        named = [name for name, j in cluster.jobs.items() if "did not come within 15 s" in j.output]
        assert named == list(cluster.jobs), cluster.outputs
    finally:
        cluster.end()
