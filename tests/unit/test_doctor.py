"""hvps doctor: its command line, its rows, and what a probe measures."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvps import probe
from hvps.cli import main
from hvps.doctor import rounds
from hvps.doctor_rows import bad_row, host_rows, link_row
from hvps.host_check import different_hosts

TOKEN = "0123"
OWN: dict[str, Any] = {
    "folder": True,
    "python": "3.11.7",
    "packages": dict.fromkeys(probe.PACKAGES, "1.0"),
    "hvps": "1.0 (aa)",
    "cores": 4,
}
MORE: dict[str, Any] = {
    "mpirun": "/bin/mpirun",
    "mpi": "mpirun (Open MPI) 4.1.8",
    "horovodrun": "/bin/horovodrun",
    "shm": [8 << 30, 8 << 30],
    "ports": [32768, 60999],
    "loaded": {"tensorflow": "2.21.0", "gpus": [], "horovod": ["MPI", "Gloo"]},
}


@pytest.mark.parametrize("number", range(1, 10))
def test_each_pair_is_measured_once(number: int) -> None:
    hosts = [f"h{i}" for i in range(number)]
    found = list(rounds(hosts))
    for pairs in found:
        busy = list(itertools.chain(*pairs))
        assert len(busy) == len(set(busy))  # else two would share a link
    pairs = [frozenset(pair) for pair in itertools.chain(*found)]
    assert sorted(map(sorted, pairs)) == sorted(map(list, itertools.combinations(hosts, 2)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-x"], "-x: unknown argument"),
        (["configs/ps.yaml"], "configs/ps.yaml: unknown argument"),
        (["-H", "a:b"], "-H: the slots of a are not a number"),
        (["-H", "a", "--hostfile", "f"], "--hostfile: the hosts are named twice"),
        (["--network", "eth0"], "--network: has no effect here"),
    ],
)
def test_wrong_command_lines(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert says in capsys.readouterr().err


def status_of(rows: Iterator[Any]) -> dict[str, str]:
    return {row.what: row.status for row in rows}


def test_all_is_well() -> None:
    assert set(status_of(host_rows("a", OWN, MORE)).values()) == {"ok"}


@pytest.mark.parametrize(
    ("changes", "what", "status"),
    [
        ({"loaded": {"tensorflow_error": "ImportError: x"}}, "TensorFlow", "bad"),
        ({"loaded": {"tensorflow": "2", "horovod_error": "undefined symbol"}}, "Horovod", "bad"),
        ({"loaded": {"tensorflow": "2", "gpus": ["H"], "horovod": ["MPI"]}}, "GPUs", "warning"),
        ({"mpi": None}, "MPI", "warning"),
        ({"mpi": None, "loaded": {"tensorflow": "2", "horovod": ["MPI"]}}, "MPI", "bad"),
        ({"horovodrun": None}, "horovodrun", "warning"),
        ({"mpi": "mpirun (Open MPI) 5.0.11"}, "horovodrun", "warning"),
        ({"loaded": {"tensorflow": "2", "horovod": []}}, "horovodrun", "warning"),
        ({"shm": [64 << 20, 64 << 20]}, "/dev/shm", "warning"),
        ({"shm": None}, "/dev/shm", "warning"),
    ],
)
def test_what_is_wrong_with_a_host(changes: dict[str, Any], what: str, status: str) -> None:
    rows = {row.what: row for row in host_rows("a", OWN, {**MORE, **changes})}
    assert rows[what].status == status
    assert rows[what].do


def test_hosts_that_differ() -> None:
    other = {**OWN, "hvps": "1.0 (bb)", "packages": {**OWN["packages"], "keras": "2.0"}}
    lacks = {**OWN, "packages": {**OWN["packages"], "tensorflow": None}}
    rows = [bad_row(p) for p in different_hosts({"a": OWN, "b": other, "c": lacks}, "")]
    assert [row.what for row in rows] == [
        "b has another hvps than a",
        "b has another keras than a",
        "c lacks tensorflow",
    ]
    assert all(row.status == "bad" and row.do for row in rows)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        threading.Thread(target=probe._answer, args=(listener, TOKEN), daemon=True).start()
        yield listener.getsockname()[1]


def test_a_connection_is_measured(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MEASURE_S", 0.05)
    measured = probe.measure("127.0.0.1", port)
    assert 0 < measured["latency"] < 10
    assert measured["bandwidth"] > 0
    assert link_row("a", "b", measured).status == "ok"
    assert link_row("a", "b", None).status == "bad"


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs", "mpirun (Open MPI) 4.1.8"),
        ("HYDRA build details:\n    Version:      5.0.2\n    CC: gcc", "MPICH 5.0.2"),
        ("", None),
    ],
)
def test_which_mpi(tmp_path: Path, says: str, version: str | None) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    mpirun.chmod(0o755)
    assert probe._mpi_version(str(mpirun)) == version


def test_who_answers(port: int) -> None:
    peers = [("127.0.0.1", port, TOKEN), ("127.0.0.1", port, "other"), ("127.0.0.1", 1, TOKEN)]
    assert probe.connect_all(peers) == [
        None,
        "another host answers there",
        "Connection refused",
    ]
