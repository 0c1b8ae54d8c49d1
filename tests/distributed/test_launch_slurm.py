"""The scripts in launch/slurm: interrupted, put back into the queue, gone on with.

Under a real SLURM where it is installed, and everywhere under programs that stand for `srun` and
`scontrol` and really start and signal the processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvps.ports import free_ports
from tests.launching import BIN, ROOT, Job, result_of
from tests.slurm import Slurm, unavailable

SLURM = ROOT / "launch" / "slurm"
TIMEOUT = 90
PAUSE = {"HVPS_TEST_PAUSE": "0.005"}
TASK = [
    "task=tests.tasks:Resumable",
    "task_args.examples=400",
    "train.epochs=4",
    "train.global_batch=16",
    "train.eval_every=0",
    "checkpoint.every_steps=5",
    "log.every=5",
    "log.tensorboard=false",
    "log.progress=off",
]
STEPS = 4 * 25
PS = ["backend.kind=ps"]
BOTH = pytest.mark.parametrize("kind", ["allreduce", "ps"])

SCONTROL = """#!/bin/sh
case $1 in
  show) case $3 in *'[0-2]') printf 'n0\\nn1\\nn2\\n' ;; *) echo "$3" ;; esac ;;
  requeue) echo "$2" >requeued ;;
esac
"""
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys

options = [a for a in sys.argv[1:] if a.startswith("--")]
command = sys.argv[1 + len(options):]
number = next(int(o.partition("=")[2]) for o in options if o.startswith("--ntasks="))
tasks = []
signal.signal(signal.SIGUSR1, lambda got, frame: [task.send_signal(got) for task in tasks])
step = {{"SLURM_STEP_NUM_TASKS": str(number), "SLURM_STEP_TASKS_PER_NODE": str(number)}}
for i in range(number):
    place = {{"SLURM_STEP_ID": "0", "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **step, **place}}))
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""


@pytest.fixture
def sbatch(jobs: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """`sbatch(kind, restarts, ...)` is one life of job 7, which has a node with 2 or 3 tasks."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def begin(kind: str, restarts: int, *arguments: str, **settings: str) -> Job:
        tasks = "3" if kind == "ps" else "2"
        env = {
            "PATH": f"{programs}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NTASKS": tasks,
            "SLURM_TASKS_PER_NODE": tasks,
            "SLURM_RESTART_COUNT": str(restarts),
            "PORT": str(free_ports(3)[0]) if kind == "ps" else "",
        }
        script = str(SLURM / f"{kind}.sbatch")
        chosen = [*TASK, *(PS if kind == "ps" else []), *arguments]
        return jobs(["bash", script, *chosen], env={**PAUSE, **env, **settings})

    return begin


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("kind", ["allreduce", pytest.param("ps", marks=pytest.mark.slow)])
@pytest.mark.timeout(3 * TIMEOUT)
def test_a_job_is_interrupted_and_goes_on(
    sbatch: Callable[..., Job], tmp_path: Path, kind: str
) -> None:
    run = tmp_path / "runs" / "slurm-7"
    job = sbatch(kind, 0)
    job.wait_for(lambda: checkpoints(run), TIMEOUT, "checkpoint")
    os.kill(job.process.pid, 10)
    assert job.wait(TIMEOUT) == 143, job.output
    assert (tmp_path / "requeued").read_text() == "7\n", job.output
    assert not job.members()
    stopped = result_of(run)
    assert stopped["stopped_by"] == "SIGTERM"
    assert 0 < stopped["steps"] < STEPS

    job = sbatch(kind, 1)
    assert job.wait(TIMEOUT) == 0, job.output
    assert f"goes on after step {stopped['steps']}" in job.output
    assert result_of(run)["steps"] == STEPS
    assert not job.members()


@pytest.mark.timeout(TIMEOUT)
def test_a_job_that_fails_is_not_requeued(sbatch: Callable[..., Job], tmp_path: Path) -> None:
    """It would fail again, for ever."""
    job = sbatch("allreduce", 0, "task_args.nonsense=1")
    assert job.wait(TIMEOUT) == 2, job.output
    assert "nonsense" in job.output
    assert not (tmp_path / "requeued").exists()


@pytest.mark.timeout(TIMEOUT)
def test_tasks_per_node(sbatch: Callable[..., Job], tmp_path: Path) -> None:
    """SLURM's short form "2(x2),1", as mpirun gets it."""
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text('#!/bin/sh\necho "$@"\n')
    mpirun.chmod(0o755)
    job = sbatch("allreduce", 0, SLURM_JOB_NODELIST="n[0-2]", SLURM_TASKS_PER_NODE="2(x2),1")
    assert job.wait(TIMEOUT) == 0, job.output
    assert "-H n0:2,n1:2,n2:1 " in job.output


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with Slurm() as made:
        yield made


@BOTH
@pytest.mark.slow
@pytest.mark.timeout(6 * TIMEOUT)
def test_a_real_slurm(slurm: Slurm, tmp_path: Path, kind: str) -> None:
    # srun must start Open MPI's daemons; parameter servers need names that resolve.
    partition = "named" if kind == "allreduce" else "reachable"
    nodes, tasks = (2, 2) if kind == "allreduce" else (1, 3)
    options = [f"--partition={partition}", f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    arguments = [*TASK, *(PS if kind == "ps" else [])]
    # Two nodes that are one machine would take each other's shared memory for their own.
    env = {**PAUSE, "OMPI_MCA_btl": "self,tcp"}
    number = slurm.submit(SLURM / f"{kind}.sbatch", arguments, options, tmp_path, **env)
    run = tmp_path / "runs" / f"slurm-{number}"
    output = tmp_path / "job.out"

    def wait_for(condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 2 * TIMEOUT
        while not condition():
            state = slurm.state(number)
            text = output.read_text() if output.exists() else ""
            assert state not in ("FAILED", "CANCELLED", "TIMEOUT"), f"{state}\n{text}"
            assert time.monotonic() < deadline, f"no {what}; {state}\n{text}"
            time.sleep(0.2)

    wait_for(lambda: checkpoints(run), "checkpoint")
    slurm.signal(number, "USR1")
    wait_for(lambda: "goes back into the queue" in output.read_text(), "requeue")
    stopped = result_of(run)["steps"]
    wait_for(lambda: slurm.state(number) == "COMPLETED", "end")
    text = output.read_text()
    assert f"job {number}, restart 1" in text
    assert f"goes on after step {stopped}" in text
    result = result_of(run)
    assert result["steps"] == STEPS
    assert 0 < stopped < STEPS
