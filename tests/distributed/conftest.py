"""Running several small trainings in one job of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launching import Job, ranks, start

RunCases = Callable[..., Path]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`jobs(command)` starts a job; whatever is left of it is ended after the test."""
    started: list[Job] = []

    def begin(command: list[str], **keywords: object) -> Job:
        keywords.setdefault("name", f"job-{len(started)}")
        job = start(command, keywords.pop("cwd", tmp_path), **keywords)  # type: ignore[arg-type]
        started.append(job)
        return job

    yield begin
    for job in started:
        job.end()


def run_cases(
    folder: Path,
    number: int,
    cases: dict[str, list[str]],
    common: list[str],
    *,
    env: dict[str, str] | None = None,
    timeout: float = 240,
    expect: int | None = 0,
) -> str:
    """Train all `cases` in one job of `number` ranks; returns what it printed.

    The runs lie under `folder`/runs/NAME.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps({"cases": cases, "common": common}))
    command = ranks(number, ["cases.json"], program=("-m", "tests.distributed.cases"))
    job = start(command, folder, env)
    try:
        code = job.wait(timeout)
    finally:
        job.end()
    if expect is not None:
        assert code == expect, job.output
    return job.output
