"""hvps launch and hvps doctor over four shaped hosts, and with hosts that cannot take part."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.shaped_hosts import ShapedHosts, unavailable
from tests.launching import BIN, ROOT, Job, result_of, start

pytestmark = [pytest.mark.netlab, pytest.mark.slow, pytest.mark.timeout(300)]

ALLREDUCE, PS = (str(ROOT / "configs" / f"{name}.yaml") for name in ("allreduce", "ps"))
CLUSTER = ["backend.num_ps=2", "backend.num_workers=2"]
ALL = "hv0:1,hv1:1,hv2:1,hv3:1"
Run = Callable[..., Job]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShapedHosts]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with ShapedHosts(4, "400mbit") as made:
        yield made


@pytest.fixture
def on_first(hosts: ShapedHosts, tmp_path: Path) -> Iterator[Run]:
    """`on_first(program, ...)` runs a program of the environment on hv0."""
    programs = tmp_path / "bin"
    programs.mkdir()
    hosts.make_ssh(programs / "ssh")
    path = f"{programs}{os.pathsep}{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    jobs: list[Job] = []

    def begin(program: str, *arguments: str) -> Job:
        command = hosts.command(0, [str(BIN / program), *arguments])
        env = {"PATH": path, "HOROVOD_LOG_LEVEL": "error"}
        jobs.append(start(command, tmp_path, env, f"job-{len(jobs)}"))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def launch(on_first: Run, *arguments: str) -> Job:
    return on_first("hvps", "launch", *arguments)


def examine(on_first: Run, *arguments: str) -> tuple[int, list[dict[str, str]]]:
    job = on_first("hvps", "doctor", "--json", *arguments)
    code = job.wait(200)
    return code, json.loads(job.output[job.output.index("{") :])["rows"]


def stopping(rows: list[dict[str, str]]) -> str:
    """What the doctor finds that would stop a job."""
    return "; ".join(f"{r['what']}: {r['found']}" for r in rows if r["status"] == "bad")


def learns(job: Job) -> None:
    assert job.wait(240) == 0, job.output
    assert result_of(job.run_directory())["eval"]["accuracy"] >= 0.97
    assert not job.members()


def test_mpirun(on_first: Run) -> None:
    job = launch(on_first, "-H", ALL, ALLREDUCE)
    learns(job)
    assert "4 ranks on hv0:1, hv1:1, hv2:1, hv3:1 by 10.78.0.0/24 (eth0)" in job.output
    assert "rank 0 of 4" in job.output


def test_gloo(on_first: Run) -> None:
    job = launch(on_first, "--gloo", "-H", ALL, ALLREDUCE)
    learns(job)
    assert "horovod over Gloo" in job.output


def test_parameter_servers(on_first: Run) -> None:
    job = launch(on_first, "-H", ALL, PS, *CLUSTER)
    learns(job)
    for index, task in enumerate(("ps 0", "ps 1", "worker 0", "worker 1")):
        assert f"hv{index}: {task}" in job.output


@pytest.mark.parametrize("program", ["mpirun", "horovodrun"])
def test_without_hvps_launch(on_first: Run, program: str) -> None:
    python = [str(BIN / "python"), "-m", "hvps.train", ALLREDUCE]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 and program == "mpirun" else []
    options = ["-x", "PYTHONPATH", "-x", "PATH"] if program == "mpirun" else []
    learns(on_first(program, *root, *options, "-np", "4", "-H", ALL, *python))


def test_doctor(on_first: Run) -> None:
    code, rows = examine(on_first, "-H", ALL)
    assert code == 0, stopping(rows)
    found = {row["what"]: row["found"] for row in rows}
    assert found["connections"].startswith("12 of 12")
    assert sum("MB/s, round trip" in row["found"] for row in rows) == 6
    assert "horovod over MPI" in found["allreduce, 4 ranks"]
    assert "TensorFlow servers" in found["parameter server, hv3 to hv0"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-H", "hv0:1,nowhere:1", ALLREDUCE], "nowhere does not answer.*Could not resolve"),
        (
            ["-H", "hv0:1,nowhere:1", PS, "backend.num_ps=1", "backend.num_workers=1"],
            "nowhere does not answer",
        ),
        (["-H", "hv0:1,hv1:1", "--network", "lo", ALLREDUCE], "share no network that is lo"),
        (["-H", "hv0:1,hv1:1", "-np", "4", ALLREDUCE], "4 processes for 2 slots"),
    ],
)
def test_hosts_that_cannot(on_first: Run, arguments: list[str], says: str) -> None:
    job = launch(on_first, *arguments)
    assert job.wait(20) == 2, job.output
    assert re.search(says, job.output, re.DOTALL)
    if "-np" not in arguments:
        code, rows = examine(on_first, *(a for a in arguments if "=" not in a and ".yaml" not in a))
        assert code == 1
        assert re.search(says, stopping(rows))


def test_an_interface_that_leads_nowhere(hosts: ShapedHosts, on_first: Run) -> None:
    """docker0 has the same address on each host."""
    for i in range(2):
        for words in (
            ["link", "add", "docker0", "type", "bridge"],
            ["addr", "add", "172.17.0.1/16", "dev", "docker0"],
            ["link", "set", "docker0", "up"],
        ):
            subprocess.run(hosts.command(i, ["ip", *words]), check=True, timeout=20)
    try:
        job = launch(on_first, "-H", "hv0:1,hv1:1", "--network", "docker0", ALLREDUCE)
        assert job.wait(20) == 2, job.output
        assert "share no network that is docker0" in job.output
        code, rows = examine(on_first, "-H", "hv0:1,hv1:1", "--network", "docker0")
        assert code == 1
        assert "share no network that is docker0" in stopping(rows)
        job = launch(on_first, "--dry-run", "-H", "hv0:1,hv1:1", ALLREDUCE)
        assert job.wait(20) == 0
        assert "by 10.78.0.0/24 (eth0)" in job.output
    finally:
        for i in range(2):
            subprocess.run(hosts.command(i, ["ip", "link", "del", "docker0"]), timeout=20)


def test_ports_that_are_closed(hosts: ShapedHosts, on_first: Run) -> None:
    """A firewall that lets nothing in from the others."""
    rule = ["ip", "route", "add", "blackhole", f"{hosts.address(0)}/32"]
    subprocess.run(hosts.command(1, rule), check=True, timeout=20)
    try:
        job = launch(on_first, "-H", "hv0:1,hv1:1", ALLREDUCE)
        assert job.wait(20) == 2, job.output
        names = "hv0 cannot connect to hv1|hv1 cannot connect to hv0"
        assert re.search(names, job.output)
        code, rows = examine(on_first, "-H", "hv0:1,hv1:1")
        assert code == 1
        assert re.search(names, stopping(rows))
    finally:
        subprocess.run(hosts.command(1, [*rule[:2], "del", *rule[3:]]), timeout=20)


@pytest.mark.parametrize("config", [ALLREDUCE, PS])
def test_a_host_that_is_cut_off(hosts: ShapedHosts, on_first: Run, config: str) -> None:
    job = long_job(on_first, config, "train.epochs=4000")
    hosts.cut(2)
    try:
        assert job.wait(60) == 1, job.output
        assert "hv2 has no address in 10.78.0.0/24" in job.output
        assert not job.members()
    finally:
        hosts.heal(2)


@pytest.mark.parametrize("config", [ALLREDUCE, PS])
def test_a_host_that_comes_back(hosts: ShapedHosts, on_first: Run, config: str) -> None:
    job = long_job(on_first, config, "train.epochs=60", "--max-restarts", "16")
    hosts.cut(2)
    try:
        job.wait_for(lambda: "waits to be started again: hv2" in job.output, 90, "wait for hv2")
    finally:
        hosts.heal(2)
    learns(job)
    assert "goes on" in job.output or "begins anew" in job.output


def long_job(on_first: Run, config: str, *further: str) -> Job:
    """One that has begun to train."""
    cluster = CLUSTER if config == PS else []
    job = launch(on_first, "-H", ALL, config, *cluster, "backend.stall_timeout=8", *further)
    job.wait_for(lambda: "train step" in job.output, 90, "step")
    return job
