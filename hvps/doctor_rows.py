"""The rows of `hvps doctor`: what a host has, and what follows for a job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvps.host_check import Network
from hvps.problems import Problem

OK: Literal["ok"] = "ok"
_SHM_LEAST = 256 << 20  # Open MPI's and NCCL's ranks on one host exchange data there
_CONTAINER_SHM = 64 << 20  # what container engines give by default


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        status: "ok"; "warning": a job runs, but not as well as it might or not in every way; "bad":
            it would stop a job.
        host: which it is about; "" for the job as a whole.
        what, found: what was looked at, and what was seen.
        do: what to do about it.
    """

    status: Literal["ok", "warning", "bad"]
    host: str
    what: str
    found: str
    do: str = ""


def bad_row(problem: Problem) -> Row:
    """What stops a job, as hvps launch would say it."""
    what = problem.what.removeprefix("-H: ")
    received = problem.received or problem.rule or ""
    return Row("bad", "", what, received, problem.do or problem.rule or "")


def host_rows(host: str, own: Mapping[str, Any], more: Mapping[str, Any] | None) -> Iterator[Row]:
    """Of one host.

    Args:
        own, more: what its probe says at first, and when it is asked to describe; None: it does
            not answer to that.
    """
    packages = own["packages"]
    yield Row(OK, host, "python", f"{own['python']}, hvps {own['hvps']}")
    if more is None:
        yield Row("bad", host, "libraries", "no answer in time", f"look at the load of {host}")
        return
    yield from _libraries(host, packages, more["loaded"])
    yield from _mpi(host, packages, more)
    yield from _memory(host, more["shm"])
    yield _cores(host, own["cores"])
    low, high = more["ports"]
    yield Row(
        OK, host, "ports", f"{low} to {high} for connections; one that is free was listened at"
    )


def _libraries(host: str, packages: Mapping[str, Any], loaded: Mapping[str, Any]) -> Iterator[Row]:
    keras = f"Keras {packages['keras']}"
    if "tensorflow_error" in loaded:
        error = loaded["tensorflow_error"]
        yield Row("bad", host, "TensorFlow", error, f"run `make install` on {host}")
        return
    yield Row(OK, host, "TensorFlow", f"{loaded['tensorflow']}, {keras}")
    gpus = loaded.get("gpus", [])
    nccl = "NCCL" in loaded.get("horovod", [])
    if not gpus:
        yield Row(OK, host, "GPUs", "none")
    elif nccl:
        yield Row(OK, host, "GPUs", f"{', '.join(gpus)}; Horovod uses NCCL")
    else:
        found = f"{', '.join(gpus)}, but Horovod was built without NCCL"
        yield Row(
            "warning", host, "GPUs", found, "`make install GPU=1`: sums then stay on the GPUs"
        )


def _mpi(host: str, packages: Mapping[str, Any], more: Mapping[str, Any]) -> Iterator[Row]:
    loaded, kind = more["loaded"], more["mpi"]
    if "horovod" in loaded:
        built = ", ".join(loaded["horovod"]) or "nothing"
        yield Row(OK, host, "Horovod", f"{packages['horovod']}, built with {built}")
    elif packages["horovod"] is not None:
        error = loaded.get("horovod_error", "it cannot be loaded")
        yield Row("bad", host, "Horovod", error, f"run `make install` on {host} again")
    else:
        do = "run `make install`, or leave it: mpi4py does the same more slowly"
        yield Row("warning", host, "Horovod", "not installed", do)
    if kind is None:
        do = "install Open MPI (`make install`), or train by Gloo: hvps launch --gloo"
        status: Literal["warning", "bad"] = "warning" if "Gloo" in _built(more) else "bad"
        yield Row(status, host, "MPI", "no mpirun", do)
    else:
        yield Row(OK, host, "MPI", f"{kind} ({more['mpirun']})")
    yield _horovodrun(host, kind, more)


def _built(more: Mapping[str, Any]) -> Sequence[str]:
    return more["loaded"].get("horovod", [])


def _horovodrun(host: str, kind: str | None, more: Mapping[str, Any]) -> Row:
    """Open MPI 5 does not know the `-bind-to` that it gives by itself (Horovod 0.28.1: code 66)."""
    if more["horovodrun"] is None:
        return Row("warning", host, "horovodrun", "not installed", "use mpirun, or hvps launch")
    by_mpi = kind is not None and "MPI" in _built(more)
    newer = by_mpi and re.search(r"Open MPI\) [5-9]\.", kind or "")
    if by_mpi and not newer:
        return Row(OK, host, "horovodrun", "by MPI, or with --gloo")
    with_gloo = "Gloo" in _built(more)
    do = "use mpirun, hvps launch" + (", or horovodrun --gloo" if with_gloo else "")
    if newer:
        found = "Open MPI 5 does not know the options that it gives by itself"
        do = f'give it --binding-args="--bind-to none --map-by slot", or {do}'
        return Row("warning", host, "horovodrun", found, do)
    if with_gloo:
        return Row(OK, host, "horovodrun", "with --gloo")
    return Row("warning", host, "horovodrun", "Horovod was built with neither MPI nor Gloo", do)


def _memory(host: str, shm: Sequence[int] | None) -> Iterator[Row]:
    if shm is None:
        yield Row("warning", host, "/dev/shm", "there is none", "mount a tmpfs there")
        return
    total, free = shm
    found = f"{free / 2**20:,.0f} of {total / 2**20:,.0f} MiB free"
    if free >= _SHM_LEAST:
        yield Row(OK, host, "/dev/shm", found)
        return
    do = "start the container with --shm-size=1g" if total <= _CONTAINER_SHM else "make room there"
    yield Row("warning", host, "/dev/shm", f"{found}: ranks on one host may fail", do)


def _cores(host: str, cores: int) -> Row:
    shares = ", ".join(f"{ranks}: {max(1, cores // ranks)}" for ranks in (1, 2, 4, 8))
    return Row(OK, host, "cores", f"{cores}; threads of each rank for ranks there {shares}")


def network_rows(
    network: Network | None, problems: Sequence[Problem], hosts: Sequence[str]
) -> Iterator[Row]:
    """Which network a job would use, and whether all connections in it can be made."""
    yield from map(bad_row, problems)
    if network is None:
        return
    for host in hosts:
        found = f"{network.interfaces[host]} {network.addresses[host]} in {network.cidr}"
        yield Row(OK, host, "network", f"a job would use {found}")
    if len(hosts) > 1:
        pairs = len(hosts) * (len(hosts) - 1)
        yield Row(OK, "", "connections", f"{pairs} of {pairs}: each host reaches all others")


def link_row(first: str, second: str, measured: Mapping[str, float] | None) -> Row:
    what = f"{first} → {second}"
    if measured is None:
        return Row("bad", "", what, "the connection broke", "look at the hosts' network")
    latency, bandwidth = measured["latency"] * 1e3, measured["bandwidth"] / 1e6
    return Row(OK, "", what, f"{bandwidth:,.0f} MB/s, round trip {latency:.2f} ms")
