"""Start the tasks of a parameter-server cluster, one process each, and see how they end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvps.ports import free_ports
from tests.launching import BIN, Job, start

Cases = Mapping[str, Mapping[str, Any]]


def new_tasks(ps: int, workers: int) -> dict[str, list[str]]:
    """Addresses on loopback that nobody uses."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(ps + workers)]
    return {"ps": addresses[:ps], "worker": addresses[ps:]}


@dataclass
class PsCluster:
    """The processes of one cluster, by task name ("ps 0")."""

    folder: Path
    tasks: dict[str, list[str]]
    arguments: Sequence[str]
    program: str = "hvps.train"
    env: Mapping[str, str] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [f"{role} {i}" for role in ("ps", "worker") for i in range(len(self.tasks[role]))]

    def start(self, *names: str, env: Mapping[str, str] | None = None) -> None:
        """Start these tasks, or all."""
        for name in names or self.names:
            role, _, index = name.partition(" ")
            command = [str(BIN / "python"), "-m", self.program, *self.arguments]
            if self.program == "hvps.train":
                cluster = json.dumps(self.tasks)
                command += ["backend.kind=ps", f"backend.cluster={cluster}"]
                command += ["--role", role, "--index", index]
            else:
                command += [role, index]
            number = sum(other.startswith(name) for other in self.jobs)
            key = f"{name} again" if number else name
            self.jobs[key] = start(
                command, self.folder, {**self.env, **(env or {})}, key.replace(" ", "-")
            )

    def wait(self, timeout: float, *names: str) -> dict[str, int]:
        """Exit codes of these tasks, or all."""
        deadline = time.monotonic() + timeout
        codes = {}
        for name in names or list(self.jobs):
            try:
                codes[name] = self.jobs[name].wait(max(0.1, deadline - time.monotonic()))
            except AssertionError as err:
                raise AssertionError(f"{name}: {err}\n{self.outputs}") from None
        return codes

    @property
    def outputs(self) -> str:
        return "\n".join(f"--- {name}\n{job.output}" for name, job in self.jobs.items())

    def end(self) -> None:
        for job in self.jobs.values():
            job.end()


def run_ps_cases(
    folder: Path,
    cases: Cases,
    common: Sequence[str],
    *,
    ps: int = 2,
    workers: int = 2,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> Path:
    """Train all `cases` on one cluster; returns the folder of the runs.

    Each case has `overrides` and, if not all workers take part, `workers`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tasks = new_tasks(ps, workers)
    given = {"tasks": tasks, "cases": cases, "common": [*QUIET, *common]}
    (folder / "cases.json").write_text(json.dumps(given))
    cluster = PsCluster(folder, tasks, ["cases.json"], "tests.distributed.ps_cases", env or {})
    try:
        cluster.start()
        codes = cluster.wait(timeout)
        assert set(codes.values()) == {0}, f"{codes}\n{cluster.outputs}"
    finally:
        cluster.end()
    return folder / "runs"


QUIET = [
    "train.eval_every=0",
    "log.tensorboard=false",
    "log.progress=off",
    "backend.stall_timeout=30",
]


def run_locally(folder: Path, cases: Cases, common: Sequence[str]) -> Path:
    """Train all `cases` in one process without servers, with as many threads as a task has."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {"cases": cases, "common": [*QUIET, *common]}
    (folder / "cases.json").write_text(json.dumps(given))
    command = [str(BIN / "python"), "-m", "tests.distributed.ps_cases", "cases.json"]
    job = start(command, folder)
    try:
        assert job.wait(120) == 0, job.output
    finally:
        job.end()
    return folder / "runs"


def state_of(run: Path) -> dict[str, np.ndarray]:
    """Weights and optimizer state by name, without the states of seed generators."""
    with np.load(run / "state.npz") as arrays:
        return {name: arrays[name] for name in arrays.files if "seed_generator" not in name}
