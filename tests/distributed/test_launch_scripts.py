"""The scripts in launch/, as they are, with a program that stands for ssh."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from hvps.ports import free_ports
from tests.launching import BIN, ROOT, Job, result_of

pytestmark = pytest.mark.timeout(120)

SHORT = ["train.epochs=2", "log.tensorboard=false", "log.progress=off"]
# A host is this machine; options are passed over, as all have an argument here.
SSH = "#!/bin/sh\nwhile [ \"$1\" = -o ]; do shift 2; done\nshift\nexec sh -c \"$*\"\n"  # fmt: skip
Jobs = Callable[..., Job]


def first_of_free_ports(number: int) -> int:
    """The script counts up from a port."""
    while True:
        (first,) = free_ports(1)
        with ExitStack() as stack:
            try:
                for port in range(first, first + number):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


def config(name: str) -> str:
    return str(ROOT / "configs" / f"{name}.yaml")


@pytest.mark.parametrize("name", ["mpirun", "horovodrun"])
def test_two_ranks(jobs: Jobs, name: str) -> None:
    script = str(ROOT / "launch" / f"{name}.sh")
    job = jobs([script, "localhost:2", config("allreduce"), *SHORT])
    assert job.wait(100) == 0, job.output
    assert "rank 0 of 2" in job.output
    assert result_of(job.run_directory())["steps"] == 46
    assert not job.members()


@pytest.fixture
def cluster(jobs: Jobs, tmp_path: Path) -> Callable[..., Job]:
    """`cluster(argument, ...)` starts one ps and two workers by ps_cluster.sh."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    path = f"{programs}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    script = str(ROOT / "launch" / "ps_cluster.sh")

    def begin(*arguments: str) -> Job:
        env = {"PATH": path, "PORT": str(first_of_free_ports(3))}
        hosts = ["127.0.0.1", "127.0.0.1,127.0.0.1"]
        return jobs([script, *hosts, config("ps"), *SHORT, *arguments], env=env)

    return begin


def test_a_cluster_trains(cluster: Callable[..., Job]) -> None:
    job = cluster()
    assert job.wait(100) == 0, job.output
    assert "[worker 0] backend ps" in job.output
    assert result_of(job.run_directory())["steps"] == 46
    assert not job.members()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 143), (signal.SIGKILL, -9)])
def test_a_cluster_is_stopped(cluster: Callable[..., Job], number: int, code: int) -> None:
    job = cluster("train.epochs=5000", "log.progress=lines")
    job.wait_for(lambda: "train step" in job.output, 90, "training")
    job.process.send_signal(number)
    assert job.wait(60) == code, job.output
    if number != signal.SIGKILL:
        assert "stopped by     SIGTERM" in job.output
        assert "error:" not in job.output
        assert list((job.run_directory() / "checkpoints").iterdir())
    deadline = time.monotonic() + 10
    while job.members():
        assert time.monotonic() < deadline, f"left behind: {job.members()}"
        time.sleep(0.05)


def test_a_task_that_fails_ends_the_others(cluster: Callable[..., Job]) -> None:
    job = cluster("task_args.nonsense=1")
    assert job.wait(100) != 0, job.output
    assert "ended with exit code" in job.output
    assert not job.members()
