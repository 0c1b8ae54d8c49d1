"""Parameter-server clusters as users start them: hvps launch, TF_CONFIG, mpirun; all modes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hvps import processes
from hvps.ports import split_address
from tests.distributed.ps_cluster import new_tasks, run_locally, run_ps_cases, state_of
from tests.launching import BIN, ROOT, Job, largest_difference, ranks, result_of, wait_until_gone

CONFIG = str(ROOT / "configs" / "ps.yaml")
STAGED = [
    "task=tests.tasks:Staged",
    "train.steps=1000000",
    "train.epochs=1",
    "train.eval_every=0",
    "log.every=5",
    "log.tensorboard=false",
]
SYNC = "backend.update=sync"
START_TIMEOUT = 90
END_TIMEOUT = 15  # the promise of the design, not a measurement
PAUSE = {"HVPS_TEST_PAUSE": "0.01"}

Jobs = Callable[..., Job]


def hvps_launch(*arguments: str) -> list[str]:
    return [str(BIN / "hvps"), "launch", CONFIG, *arguments]


def pid_of(job: Job, task: str) -> int:
    """The process of a worker, as its log names it."""
    log = job.run_directory() / "logs" / f"{task.replace(' ', '-')}.log"
    found = re.search(rf"{task} of \d+, pid (\d+) on ", log.read_text())
    assert found, log.read_text()
    return int(found[1])


def wait_until_training(job: Job) -> None:
    job.wait_for(lambda: "train step" in job.output, START_TIMEOUT, "training step")


def wait_until_nobody_listens(run: Path) -> None:
    """A process that was killed is gone from the list of processes before its sockets are."""
    tasks = yaml.safe_load((run / "config.yaml").read_text())["backend"]["cluster"]
    assert len(tasks["ps"]) == len(tasks["worker"]) == 2
    deadline = time.monotonic() + 10
    for address in (*tasks["ps"], *tasks["worker"]):
        while listens(address):
            assert time.monotonic() < deadline, address
            time.sleep(0.05)


def listens(address: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(split_address(address)) == 0


# --- hvps launch ---


@pytest.mark.timeout(240)
def test_hvps_launch_learns_the_digits(jobs: Jobs) -> None:
    job = jobs(hvps_launch())
    assert job.wait(200) == 0, job.output
    assert not job.members()
    result = result_of(job.run_directory())
    assert result["eval"]["accuracy"] >= 0.97
    assert result["steps"] == 40 * 23
    assert (result["ps"], result["workers"], result["update"]) == (2, 2, "async")
    assert min(result["worker_steps"]) > 0
    assert result["lost_updates"] == 0
    assert (job.run_directory() / "model.keras").exists()
    first, *others = job.output.splitlines()
    assert first == "hvps launch: 2 ps and 2 worker tasks on this machine"
    assert all(re.match(r"\[(ps|worker) [01]\] ", line) for line in others), job.output
    wait_until_nobody_listens(job.run_directory())


def errors_of_launch(job: Job) -> list[str]:
    return [line for line in job.output.splitlines() if line.startswith("hvps: error:")]


@pytest.mark.timeout(240)
def test_hvps_launch_ends_with_a_killed_worker(jobs: Jobs) -> None:
    job = jobs(hvps_launch(*STAGED, SYNC), env=PAUSE)
    wait_until_training(job)
    os.kill(pid_of(job, "worker 1"), signal.SIGKILL)
    since = time.monotonic()
    assert job.wait(2 * END_TIMEOUT) == 128 + signal.SIGKILL
    print(f"hvps launch ended {time.monotonic() - since:.2f} s after worker 1 was killed")
    wait_until_gone(job)
    assert errors_of_launch(job) == ["hvps: error: worker 1 was killed by SIGKILL"]
    assert not (job.run_directory() / "model.keras").exists()


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("update", ["async", "bounded"])
def test_hvps_launch_goes_on_without_an_asynchronous_worker(jobs: Jobs, update: str) -> None:
    job = jobs(hvps_launch(*STAGED, "train.steps=50", f"backend.update={update}"), env=PAUSE)
    wait_until_training(job)
    os.kill(pid_of(job, "worker 1"), signal.SIGKILL)
    assert job.wait(120) == 0, job.output
    wait_until_gone(job)
    said = "hvps: error: worker 1 was killed by SIGKILL; the others go on without it"
    assert errors_of_launch(job) == [said]
    result = result_of(job.run_directory())
    assert result["steps"] == 50
    assert result["lost_updates"] == 0
    assert result["worker_deaths"] == [0, 1]


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_hvps_launch_starts_a_killed_ps_again_alone(jobs: Jobs) -> None:
    """The workers begin anew in place: they keep their process ids."""
    options = ["--max-restarts", "2", "train.steps=60", "checkpoint.every_steps=10"]
    job = jobs(hvps_launch(*STAGED, *options), env=PAUSE)
    job.wait_for(
        lambda: list(job.run_directory().glob("checkpoints/step-*")), START_TIMEOUT, "checkpoint"
    )
    workers = {name: pid_of(job, name) for name in ("worker 0", "worker 1")}
    (victim,) = [pid for pid in job.members() if has_role(pid, "ps", 0)]
    os.kill(victim, signal.SIGKILL)
    assert job.wait(150) == 0, job.output
    wait_until_gone(job)
    said = "hvps: error: ps 0 was killed by SIGKILL; it is started again in 1 s (restart 1 of 2)"
    assert errors_of_launch(job) == [said]
    assert {name: last_pid_of(job, name) for name in workers} == workers
    result = result_of(job.run_directory())
    assert [(r["task"], r["reason"]) for r in result["restarts"]] == [
        ("ps 0", "was killed by SIGKILL")
    ]
    assert result["steps"] == 60
    assert result["lost_updates"] == 0


def has_role(pid: int, role: str, index: int) -> bool:
    return processes.arguments(pid)[-4:] == ["--role", role, "--index", str(index)]


def last_pid_of(job: Job, task: str) -> int:
    log = job.run_directory() / "logs" / f"{task.replace(' ', '-')}.log"
    found = re.findall(rf"{task} of \d+, pid (\d+) on ", log.read_text())
    assert len(found) == 2, log.read_text()  # it has begun twice
    return int(found[-1])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_hvps_launch_is_stopped(jobs: Jobs, number: signal.Signals) -> None:
    """By a signal that it can pass on, and by one that it cannot."""
    job = jobs(hvps_launch(*STAGED), env=PAUSE)
    wait_until_training(job)
    job.process.send_signal(number)
    since = time.monotonic()
    expected = 128 + number if number == signal.SIGTERM else -number
    assert job.wait(END_TIMEOUT) == expected, job.output
    wait_until_gone(job)
    print(f"all had ended {time.monotonic() - since:.2f} s after {number.name}")
    run = job.run_directory()
    wait_until_nobody_listens(run)
    if number == signal.SIGTERM:
        assert result_of(run)["stopped_by"] == "SIGTERM"
        assert (run / "model.keras").exists()
        assert "error" not in job.output


@pytest.mark.timeout(120)
def test_hvps_launch_is_stopped_while_it_starts(jobs: Jobs) -> None:
    job = jobs(hvps_launch(*STAGED), env=PAUSE)
    job.wait_for(lambda: len(job.members()) == 5, START_TIMEOUT, "tasks")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(END_TIMEOUT) == 143, job.output
    wait_until_gone(job)


# --- all modes ---


@pytest.mark.timeout(300)
def test_all_modes_learn_the_digits(tmp_path: Path) -> None:
    """By changing two keys of configs/ps.yaml. hvps launch has done what it says itself."""
    modes = [
        ("sync", "between_graph"),
        ("bounded", "between_graph"),
        ("async", "in_graph"),
        ("sync", "in_graph"),
    ]
    cases = {
        f"{update}_{replication}": {
            "config": CONFIG,
            "overrides": [f"backend.update={update}", f"backend.replication={replication}"],
        }
        for update, replication in modes
    }
    runs = run_ps_cases(tmp_path, cases, [], timeout=280)
    for name in cases:
        result = result_of(runs / name)
        print(f"{name}: accuracy {result['eval']['accuracy']:.4f}, {result['seconds']:.1f} s")
        assert result["eval"]["accuracy"] >= 0.97, name
        assert result["steps"] == 40 * 23, name
        assert result["lost_updates"] == 0, name


@pytest.mark.timeout(240)
def test_several_devices_train_what_one_trains(tmp_path: Path) -> None:
    common = ["task=tests.tasks:Regression", "train.global_batch=48", "train.steps=30"]
    modes = {
        "between": [SYNC],
        "in_graph": [SYNC, "backend.replication=in_graph"],
    }
    two = ["backend.devices=[cpu:0,cpu:1]", "backend.log_placement=true"]
    cases = {
        f"{mode}_{devices}": {"overrides": [*overrides, *chosen]}
        for mode, overrides in modes.items()
        for devices, chosen in (("one", ["backend.devices=[]"]), ("two", two))
    }
    local = run_locally(tmp_path / "local", {"local": {"overrides": []}}, common)
    servers = ["backend.devices=[cpu:0,cpu:1]"]  # as many devices as any of the cases needs
    runs = run_ps_cases(tmp_path / "ps", cases, [*common, *servers], ps=1)
    reference = state_of(local / "local")
    for name in cases:
        difference = largest_difference(reference, state_of(runs / name))
        print(f"{name}: largest difference {difference:.2e}")
        assert difference < 2e-6, name
    output = (tmp_path / "ps" / "worker-0.out").read_text()
    for worker in (0, 1):  # worker 1's of the in-graph run
        for device in (0, 1):
            place = rf"/job:worker/replica:0/task:{worker}/device:CPU:{device}"
            assert re.search(rf"tower\S*/MatMul\S*: \(MatMul\): {place}$", output, re.M), place
    assert np.isfinite(reference["model/dense/kernel"]).all()


# --- started by others ---


@pytest.fixture
def started(jobs: Jobs) -> Callable[..., dict[str, Job]]:
    """Starts all tasks of a cluster, which say by TF_CONFIG or by arguments who they are."""

    def start_all(cluster: dict[str, Any], by: str, arguments: list[str]) -> dict[str, Job]:
        begun = {}
        for role in ("evaluator", "ps", "chief", "worker"):
            command = [str(BIN / "python"), "-m", "hvps.train", CONFIG, *arguments]
            env = {}
            if by == "TF_CONFIG":
                task = {"type": role, "index": 0}
                env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
            else:
                command += [f"backend.cluster={json.dumps(cluster)}", "--role", role]
                command += ["--index", "0"]
            begun[role] = jobs(command, env=env, name=role)
        return begun

    return start_all


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "by", ["TF_CONFIG", pytest.param("backend.cluster", marks=pytest.mark.slow)]
)
def test_tasks_that_were_started_one_by_one(
    started: Callable[..., dict[str, Job]], tmp_path: Path, by: str
) -> None:
    """A chief, a worker, a ps and an evaluator; the job of the workers is spelled `work`, too."""
    (ps,), (chief, worker) = new_tasks(1, 2).values()
    cluster: dict[str, Any] = {"chief": [chief], "ps": [ps], "evaluator": ["127.0.0.1:1"]}
    cluster["worker" if by == "TF_CONFIG" else "work"] = [worker]
    all_jobs = started(cluster, by, ["train.epochs=2", "run.name=together"])
    for name, job in all_jobs.items():
        assert job.wait(120) == 0, f"{name}: {job.output}"
    assert "the run has ended" in all_jobs["evaluator"].output
    run = all_jobs["chief"].run_directory()
    result = result_of(run)
    assert (result["ps"], result["workers"], result["steps"]) == (1, 2, 2 * 23)
    assert {path.name for path in (run / "logs").iterdir()} == {"worker-0.log", "worker-1.log"}
    assert f"worker 0 of 2 ({by})" in all_jobs["chief"].output


@pytest.mark.timeout(180)
def test_mpirun(jobs: Jobs) -> None:
    job = jobs(ranks(4, [CONFIG, "train.epochs=2"]))
    assert job.wait(150) == 0, job.output
    result = result_of(job.run_directory())
    assert (result["ps"], result["workers"], result["steps"]) == (2, 2, 2 * 23)
    assert "worker 0 of 2 (OMPI_COMM_WORLD_*, backend.num_ps)" in job.output
    wait_until_gone(job)


@pytest.mark.timeout(180)
def test_mpirun_saves_when_it_is_stopped(jobs: Jobs) -> None:
    """mpirun ends all ranks a moment after the first that ends with another code than 0."""
    job = jobs(ranks(4, [CONFIG, *STAGED]), env={**PAUSE, "HVPS_TEST_SAVE": "4"})
    wait_until_training(job)
    os.kill(pid_of(job, "worker 1"), signal.SIGTERM)
    assert job.wait(2 * END_TIMEOUT) == 143, job.output
    wait_until_gone(job)
    assert result_of(job.run_directory())["stopped_by"] == "SIGTERM"
    assert (job.run_directory() / "model.keras").exists()
