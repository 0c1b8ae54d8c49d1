"""How jobs end when something goes wrong: soon, non-zero, with a name, leaving nothing behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.conftest import run_cases
from tests.launching import Job, largest_difference, ranks, result_of, wait_until_gone

ENDLESS = ["train.steps=1000000", "train.eval_every=0", "log.tensorboard=false", "log.every=5"]
START_TIMEOUT = 90
END_TIMEOUT = 15  # the promise of the design, not a measurement

Jobs = Callable[..., Job]


def wait_until_training(job: Job) -> None:
    job.wait_for(lambda: "train step" in job.output, START_TIMEOUT, "training step")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_a_killed_rank_ends_the_job(jobs: Jobs, launcher: str) -> None:
    number, victim = (4, 2) if launcher == "mpirun" else (2, 1)
    job = jobs(ranks(number, ENDLESS, launcher=launcher))
    wait_until_training(job)
    pid = job.rank_pid(victim)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert job.wait(END_TIMEOUT) != 0
    wait_until_gone(job)
    if launcher == "mpirun":
        assert re.search(rf"process rank {victim} with PID .* signal 9", job.output), job.output
    else:
        assert re.search(rf"Process name: {victim}\b", job.output), job.output


@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", ["horovod", "mpi"])
def test_an_exception_in_one_rank_ends_the_job(jobs: Jobs, engine: str) -> None:
    task = ["task=tests.tasks:Regression", "task_args.fail_at=150", "train.shuffle=false"]
    batch = ["train.global_batch=200", "log.every=1"]  # rank 1 holds examples 100 to 199
    job = jobs(ranks(2, [*task, *batch, *ENDLESS[:-1], f"backend.engine={engine}"]))
    assert job.wait(START_TIMEOUT) == 1
    wait_until_gone(job)
    assert "rank 1 of 2 failed: OSError: example 150 cannot be read" in job.output
    log = (job.run_directory() / "logs" / "rank-1.log").read_text()
    assert "example 150 cannot be read" in log


@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", ["horovod", "mpi"])
def test_a_rank_that_stands_still_ends_the_job(jobs: Jobs, engine: str) -> None:
    job = jobs(ranks(2, [*ENDLESS, f"backend.engine={engine}", "backend.stall_timeout=6"]))
    wait_until_training(job)
    pid = job.rank_pid(1)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert job.wait(60) != 0
    wait_until_gone(job)
    assert re.search(r"rank 0 waited [0-9.]+ s for a step of all ranks", job.output), job.output


@pytest.mark.timeout(180)
def test_ranks_that_were_started_differently_are_told_so(jobs: Jobs) -> None:
    first = ranks(1, [*ENDLESS, "train.global_batch=64"])
    second = ["-np", "1", "python", "-m", "hvps.train", *ENDLESS, "train.global_batch=32"]
    job = jobs([*first, ":", *second])
    assert job.wait(START_TIMEOUT) == 2
    assert "train.global_batch: rank" in job.output
    assert "Traceback" not in job.output


@pytest.mark.timeout(180)
def test_a_library_that_sees_one_process_is_an_error(jobs: Jobs) -> None:
    # Two processes by Gloo's launcher, and mpi4py, which knows nothing of that launcher.
    job = jobs(
        ranks(0, ["backend.engine=mpi"]),
        env={
            "HOROVOD_RANK": "0",
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "2",
        },
    )
    assert job.wait(START_TIMEOUT) == 2
    assert "1 in mpi4py, 2 by HOROVOD_*" in job.output


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    jobs: Jobs, number: signal.Signals, code: int
) -> None:
    job = jobs(ranks(2, ENDLESS))
    wait_until_training(job)
    pid = job.rank_pid(1)
    assert pid is not None
    os.kill(pid, number)
    assert job.wait(60) == code
    wait_until_gone(job)
    result = result_of(job.run_directory())
    assert result["stopped_by"] == number.name
    assert 0 < result["steps"] < 1_000_000
    assert (job.run_directory() / "model.keras").exists()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", ["horovod", "mpi"])
def test_ranks_with_different_data_keep_equal_weights(tmp_path: Path, engine: str) -> None:
    """And when a float16 gradient of one rank is not finite, both skip that update and go on."""
    common = [
        "task=tests.tasks:Regression",
        "train.global_batch=40",
        "train.epochs=4",
        "train.eval_every=0",
        "log.tensorboard=false",
        f"backend.engine={engine}",
    ]
    half = ["train.precision=mixed_float16", "train.shuffle=false", "task_args.spike=45"]
    cases = {
        "by_rank": ["task_args.by_rank=true", "train.check_every=1"],
        "float16": [*half, "train.check_every=1"],
        "bfloat16": ["train.precision=mixed_bfloat16", "train.check_every=1"],
    }
    run_cases(tmp_path, 2, cases, common)
    for name in cases:
        run = tmp_path / "runs" / name
        first, second = (dict(np.load(run / f"weights-rank-{r}.npz")) for r in range(2))
        assert largest_difference(first, second) == 0.0
        assert all(np.isfinite(array).all() for array in first.values())
        assert result_of(run)["steps"] == 20
    # Example 45 is in the second step of each of the 4 epochs, on rank 0 alone.
    assert result_of(tmp_path / "runs" / "float16")["skipped_steps"] == 4
    assert result_of(tmp_path / "runs" / "by_rank")["skipped_steps"] == 0


@pytest.mark.timeout(180)
def test_a_reduction_that_stopped_happening_is_caught(tmp_path: Path) -> None:
    output = run_cases(
        tmp_path,
        2,
        {"broken": ["task_args.by_rank=true"]},
        ["task=tests.tasks:Regression", "train.global_batch=40", "train.check_every=5"],
        env={"HVPS_TEST_BREAK": "reduction"},
        expect=1,
    )
    assert "the ranks have drifted apart: dense" in output
