"""hvps launch with ranks: signals, restarts, fewer ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hvps.processes import children
from tests.launching import BIN, Job, result_of, wait_until_gone

Jobs = Callable[..., Job]
TIMEOUT = 90
PAUSE = {"HVPS_TEST_PAUSE": "0.005"}
TASK = [
    "task=tests.tasks:Resumable",
    "task_args.examples=400",
    "train.epochs=8",
    "train.global_batch=16",
    "train.eval_every=0",
    "checkpoint.every_steps=5",
    "log.every=5",
    "log.tensorboard=false",
    "log.progress=off",
    "run.name=it",
]
STEPS = 8 * 25


def launch(*options: str) -> list[str]:
    return [str(BIN / "hvps"), "launch", *TASK, *options]


def wait_until_saved(job: Job) -> None:
    folder = job.cwd / "runs" / "it" / "checkpoints"
    job.wait_for(lambda: [*folder.glob("step-*")], TIMEOUT, "checkpoint")


@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize(
    ("number", "code", "name"),
    [
        (signal.SIGTERM, 143, "SIGTERM"),
        pytest.param(signal.SIGUSR1, 143, "SIGTERM", marks=pytest.mark.slow),
        (signal.SIGINT, 130, "SIGINT"),
    ],
)
def test_a_signal_to_the_launcher_stops_the_ranks_after_a_save(
    jobs: Jobs, number: int, code: int, name: str
) -> None:
    job = jobs(launch("-np", "2"), env=PAUSE)
    wait_until_saved(job)
    job.process.send_signal(number)
    assert job.wait(TIMEOUT) == code, job.output
    result = result_of(job.cwd / "runs" / "it")
    assert result["stopped_by"] == name
    last = sorted((job.cwd / "runs" / "it" / "checkpoints").glob("step-*"))[-1]
    assert last.name == f"step-{result['steps']:012d}"
    assert not job.members()


def mpirun_of(job: Job) -> list[int]:
    """Children of the launcher: `mpirun --version` has ended when there is a line about ranks."""
    return children(job.process.pid) if "mpirun -np" in job.output else []


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_there_are_ranks(jobs: Jobs, number: int, code: int) -> None:
    job = jobs(launch("-np", "2"))
    job.wait_for(lambda: mpirun_of(job), TIMEOUT, "mpirun")
    job.process.send_signal(number)
    assert job.wait(TIMEOUT) == code, job.output
    assert "hvps: error: the job" not in job.output
    assert not job.members()


@pytest.mark.timeout(2 * TIMEOUT)
def test_a_second_signal_ends_the_ranks_at_once(jobs: Jobs) -> None:
    job = jobs(launch("-np", "2"), env=PAUSE)
    wait_until_saved(job)
    ranks = [pid for mpirun in mpirun_of(job) for pid in children(mpirun)]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGSTOP)  # it would outlive its mpirun for ever
    job.process.send_signal(signal.SIGTERM)
    job.wait_for(lambda: has_pending(ranks[1], signal.SIGTERM), TIMEOUT, "signal to the ranks")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(10) == 143, job.output
    wait_until_gone(job)


def has_pending(pid: int, number: int) -> bool:
    """A process that stands still was sent this signal."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.timeout(3 * TIMEOUT)
def test_a_killed_mpirun_leaves_no_ranks_in_the_way(jobs: Jobs) -> None:
    """Ranks of the first life would hold the run's folder, or write in it."""
    job = jobs(launch("-np", "2", "--max-restarts", "1"), env=PAUSE)
    wait_until_saved(job)
    (mpirun,) = mpirun_of(job)
    os.kill(mpirun, signal.SIGKILL)
    assert job.wait(2 * TIMEOUT) == 0, job.output
    assert "the job was killed by SIGKILL; it is started again in 1 s" in job.output
    result = result_of(job.cwd / "runs" / "it")
    assert [r["reason"] for r in result["restarts"]] == ["was killed by SIGKILL"]
    assert result["steps"] == STEPS


@pytest.mark.timeout(3 * TIMEOUT)
@pytest.mark.parametrize(
    "elastic",
    [pytest.param([], marks=pytest.mark.slow), ["--elastic", "2:3", "train.global_batch=17"]],
)
def test_a_killed_rank_brings_the_job_back(jobs: Jobs, tmp_path: Path, elastic: list[str]) -> None:
    ranks = elastic or ["-np", "2"]
    job = jobs(launch("--max-restarts", "1", *ranks), env=PAUSE)
    wait_until_saved(job)
    victim = job.rank_pid(1)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    assert job.wait(2 * TIMEOUT) == 0, job.output
    assert "(restart 1 of 1)" in job.output
    assert "goes on after step" in job.output
    result = result_of(tmp_path / "runs" / "it")
    assert [r["task"] for r in result["restarts"]] == ["the job"]
    assert result["ranks"] == 2
    if elastic:
        assert "2 ranks share the global batch of 17: 8, 9" in job.output
        assert result["steps"] == 8 * 24  # batches of 17 in 400 examples
        assert result["examples"] == 8 * 400
    else:
        assert result["steps"] == STEPS


@pytest.mark.timeout(2 * TIMEOUT)
def test_what_dies_again_and_again_is_given_up(jobs: Jobs) -> None:
    fails = ["task=tests.tasks:Regression", "task_args={fail_at: 3}", "run.name=fails"]
    job = jobs(launch("-np", "2", "--max-restarts", "1", *fails))
    assert job.wait(TIMEOUT) == 1, job.output
    assert job.output.count("example 3 cannot be read") >= 2
    assert "(restart 1 of 1)" in job.output
    assert not job.members()
