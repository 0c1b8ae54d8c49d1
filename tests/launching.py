"""Start real jobs and see how they end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def job_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a user who activated the virtual environment, on this machine."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("OMPI_", "PMIX_", "HOROVOD_", "PMI_", "SLURM_", "PYTEST_"))
    }
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', '')}"
    env["PYTHONPATH"] = str(ROOT)
    if os.geteuid() == 0:
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env.update(extra or {})
    return env


@dataclass
class Job:
    """A job that runs, with everything it prints in a file."""

    process: subprocess.Popen[bytes]
    output_path: Path
    cwd: Path

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """The exit code; ends the whole session of processes and fails after `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None

    def wait_for(self, condition: Callable[[], Any], timeout: float, what: str) -> Any:
        """Wait until `condition` gives something true while the job runs."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.end()
        raise AssertionError(f"no {what}:\n{self.output}")

    def end(self) -> None:
        for pid in self.members():
            _kill(pid)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def members(self) -> list[int]:
        """Processes that carry this job's mark in their environment."""
        mark = f"HVPS_TEST_JOB={self.output_path}".encode()
        return [pid for pid in _processes() if mark in _environment(pid).split(b"\0")]

    def run_directory(self) -> Path:
        return (self.cwd / "runs" / "latest").resolve()

    def rank_pid(self, rank: int) -> int | None:
        """The process of a rank, as its log names it."""
        log = self.run_directory() / "logs" / f"rank-{rank}.log"
        if not log.exists():
            return None
        for line in log.read_text().splitlines():
            if " pid " in line:
                return int(line.split(" pid ")[1].split()[0])
        return None


def start(
    command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, name: str = "job"
) -> Job:
    """Start a command in `cwd` as a user would."""
    output = cwd / f"{name}.out"
    environment = job_environment({"HVPS_TEST_JOB": str(output), **(env or {})})
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Job(process, output, cwd)


def ranks(
    number: int,
    arguments: Sequence[str],
    *,
    launcher: str = "mpirun",
    program: Sequence[str] = ("-m", "hvps.train"),
) -> list[str]:
    """The command line that starts `number` ranks."""
    python = ["python", *program, *arguments]
    if number == 0:
        return [str(BIN / "python"), *python[1:]]
    start_with = {
        "mpirun": ["mpirun", "-np", str(number)],
        "horovodrun": ["horovodrun", "-np", str(number)],
        "gloo": ["horovodrun", "--gloo", "-np", str(number)],
    }[launcher]
    found = shutil.which(start_with[0], path=job_environment()["PATH"])
    assert found, f"{start_with[0]} is not installed; run make install"
    return [found, *start_with[1:], *python]


def result_of(run_directory: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_directory / "result.json").read_text())
    return result


def weights_of(run_directory: Path) -> dict[str, np.ndarray]:
    """Arrays of model.keras by their place in the file, read without Keras."""
    with zipfile.ZipFile(run_directory / "model.keras") as archive:
        content = BytesIO(archive.read("model.weights.h5"))
    arrays: dict[str, np.ndarray] = {}
    with h5py.File(content) as file:
        file["layers"].visititems(
            lambda name, item: (
                arrays.update({name: item[()]})
                if isinstance(item, h5py.Dataset) and "seed_generator" not in name
                else None
            )
        )
    return arrays


def largest_difference(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.max(np.abs(a[k].astype(np.float64) - b[k]))) for k in a)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until_gone(job: Job) -> None:
    """All of the job's processes have ended, or will within seconds: nobody waits for some of what
    horovodrun starts."""
    assert job.process.poll() is not None
    deadline = time.monotonic() + 10
    while job.members():
        assert time.monotonic() < deadline, f"left behind: {job.members()}"
        time.sleep(0.05)
