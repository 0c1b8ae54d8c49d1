"""Tasks that mpirun started tell one another where they listen."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

from hvps.backends.mpi_settings import set_mpi_defaults
from hvps.cluster import Cluster, Tasks
from hvps.ports import free_ports

_LOOPBACK = "127.0.0.1"


def exchange_addresses(cluster: Cluster) -> Cluster:
    """Choose a free port, and learn those of the others by MPI, which is not used afterwards.

    Returns:
        The cluster with its tasks; `local_rank` and `local_size` count the tasks of both jobs on
        this host.
    """
    set_mpi_defaults(cluster)
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    MPI.Init()
    world = MPI.COMM_WORLD
    on_host = world.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_size = on_host.Get_rank(), on_host.Get_size()
    together = world.allreduce(local_size == world.Get_size(), MPI.LAND)
    host = _LOOPBACK if together else _host_address()
    # One process after another on each host: a port is free until its server listens.
    ports = on_host.bcast(free_ports(local_size, host) if local_rank == 0 else None)
    mine = (cluster.role, cluster.rank, f"{host}:{ports[local_rank]}")
    everyone: list[tuple[str, int, str]] = world.allgather(mine)
    on_host.Free()
    MPI.Finalize()  # mpirun takes a process that leaves without for one that crashed

    def of(role: str) -> tuple[str, ...]:
        return tuple(address for r, _, address in sorted(everyone) if r == role)

    tasks = Tasks(ps=of("ps"), worker=of("worker"))
    return replace(cluster, tasks=tasks, local_rank=local_rank, local_size=local_size)


def _host_address() -> str:
    """The address by which other hosts reach this one: that of the way out."""
    name: Any = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        if not address.startswith("127."):
            return address
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        return str(probe.getsockname()[0])
