"""The command that starts ranks, and signals to them, with programs that look like mpirun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvps import mpirun
from hvps.errors import ConfigError

pytestmark = pytest.mark.timeout(60)

OPEN_MPI = "mpirun (Open MPI) 4.1.8"
MPICH = "HYDRA build details:"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python without mpirun beside it, and an empty PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for name in ("bin", "path"):
        (tmp_path / name).mkdir()
    return tmp_path


def make_mpirun(folder: Path, says: str) -> str:
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("says", "user", "options"),
    [
        (OPEN_MPI, 1000, ["--oversubscribe"]),
        (OPEN_MPI, 0, ["--oversubscribe", "--allow-run-as-root"]),
        (MPICH, 0, []),
    ],
)
def test_what_mpirun_needs(
    environment: Path, monkeypatch: pytest.MonkeyPatch, says: str, user: int, options: list[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    program = make_mpirun(environment / "path", says)
    assert mpirun.mpirun_command(3, ["python", "x"]) == [
        *[program, "-np", "3"], *options, "python", "x"
    ]  # fmt: skip


def test_the_mpirun_beside_python_comes_first(environment: Path) -> None:
    make_mpirun(environment / "path", OPEN_MPI)
    program = make_mpirun(environment / "bin", OPEN_MPI)
    assert mpirun.mpirun_command(2, ["x"])[0] == program


def test_no_mpirun(environment: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        mpirun.mpirun_command(2, ["x"])
    assert "make install" in str(caught.value.do)


# What a rank does: says who it is and by which signal it was stopped.
RANK = """
import os, signal, sys, time
def stop(number, frame):
    open(f"stopped-{os.getpid()}-{signal.Signals(number).name}", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
open(f"rank-{os.getpid()}", "w").close()
while True:
    time.sleep(0.02)
"""
# Starts the end of its command line when there is a file "go", directly or through a proxy.
LAUNCHER = """
import os, subprocess, sys, time
open("launcher", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
ranks = [subprocess.Popen(sys.argv[2:], start_new_session=True) for _ in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""
PROXY = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1], "2", *sys.argv[3:]]).returncode)
"""


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("through_proxy", [False, True])
def test_signals_reach_the_ranks_alone(tmp_path: Path, number: int, through_proxy: bool) -> None:
    rank = [sys.executable, "-c", RANK]
    command = [sys.executable, "-c", LAUNCHER, "2", *rank]
    if through_proxy:
        command = [sys.executable, "-c", PROXY, LAUNCHER, "2", *rank]
    process = subprocess.Popen(command, cwd=tmp_path)
    try:
        wait_for((tmp_path / "launcher").exists, "launcher")
        assert not mpirun.signal_ranks(process, number)  # nobody is there yet
        (tmp_path / "go").touch()
        wait_for(lambda: len(list(tmp_path.glob("rank-*"))) == 2, "ranks")
        assert mpirun.signal_ranks(process, number)
        assert process.wait(30) == 0  # it got no signal itself
    finally:
        process.kill()
        process.wait()
        for file in tmp_path.glob("rank-*"):
            pid = int(file.name.partition("-")[2])
            if not list(tmp_path.glob(f"stopped-{pid}-*")):
                os.kill(pid, signal.SIGKILL)
    name = "SIGINT" if number == signal.SIGINT else "SIGTERM"
    assert len(list(tmp_path.glob(f"stopped-*-{name}"))) == 2
