"""A parameter server does not grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.ps_cluster import QUIET, PsCluster, new_tasks

STEPS = 10_000
GROWTH_KB = 8 << 10  # of some 400 MB; a leak of 1 KB per step would be more


def resident_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("the process has ended")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("update", ["async", "sync"])
def test_over_ten_thousand_steps(tmp_path: Path, update: str) -> None:
    arguments = [*QUIET, "task=tests.tasks:Tokens", f"train.steps={STEPS}", "train.global_batch=16"]
    arguments += [f"backend.update={update}", "log.every=500", "optimizer.name=adam"]
    cluster = PsCluster(tmp_path, new_tasks(2, 2), arguments)

    def step() -> int:
        metrics = tmp_path / "runs" / "latest" / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    try:
        cluster.start()
        chief = cluster.jobs["worker 0"]
        servers = [cluster.jobs[name].process.pid for name in ("ps 0", "ps 1")]
        chief.wait_for(lambda: step() >= 2000, 200, "progress")
        before = [resident_kb(pid) for pid in servers]
        chief.wait_for(lambda: step() >= STEPS - 600, 400, "progress")
        after = [resident_kb(pid) for pid in servers]
        print(f"{update}: resident kB of two ps at step 2,000 {before}, near 10,000 {after}")
        assert set(cluster.wait(60).values()) == {0}, cluster.outputs
    finally:
        cluster.end()
    growth = [b - a for a, b in zip(before, after, strict=True)]
    assert max(growth) < GROWTH_KB, growth
