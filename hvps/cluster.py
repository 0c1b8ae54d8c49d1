"""Who am I, and who are my peers: read from what the launcher left in the environment.

Nothing is imported here that is not in the standard library, so that a wrong launch is reported
before TensorFlow or MPI are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hvps.errors import ConfigError

ALONE = "no launcher: one process"


@dataclass(frozen=True)
class Tasks:
    """The addresses of a parameter-server cluster: ps and worker tasks, 'host:port', by index.

    The chief is worker 0.
    """

    ps: tuple[str, ...]
    worker: tuple[str, ...]


@dataclass(frozen=True)
class Cluster:
    """This process among the processes of the job.

    Attributes:
        rank: index of this process in the job, 0-based; with parameter servers, within its role.
        size: number of processes in the job (world size); with parameter servers, of its role.
        local_rank: index of this process on its host, 0-based.
        local_size: number of the job's processes on this host, of all roles.
        source: where the facts come from, for the banner.
        role: "worker" for all who train; "ps" and "evaluator" exist with parameter servers only.
        tasks: the addresses of the parameter-server cluster, once they are known.
        world_rank, world_size: the launcher's, of a job whose ranks were divided into roles.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    source: str
    role: Literal["worker", "ps", "evaluator"] = "worker"
    tasks: Tasks | None = None
    world_rank: int | None = None
    world_size: int | None = None

    @property
    def launched(self) -> bool:
        """Whether a launcher started this process."""
        return self.source != ALONE

    @property
    def is_root(self) -> bool:
        """Whether this process writes the run's folder: rank 0, or the chief among workers."""
        return self.role == "worker" and self.rank == 0

    @property
    def name(self) -> str:
        """This process for people: "ps 0", "worker 1"; "rank 3" where all are alike."""
        alike = self.role == "worker" and self.tasks is None and self.world_rank is None
        return f"rank {self.rank}" if alike else f"{self.role} {self.rank}"

    @property
    def address(self) -> str | None:
        """This task's own 'host:port', if it is known and has one."""
        if self.tasks is None or self.role == "evaluator":
            return None
        return (self.tasks.ps if self.role == "ps" else self.tasks.worker)[self.rank]


# (name shown, rank, size, local rank, local size); the first one whose rank and size are set wins.
# Horovod's own variables come first: `horovodrun --gloo` sets them alone, and under
# `horovodrun` over MPI only the OMPI_* ones exist.
_LAUNCHERS = (
    ("HOROVOD_*", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    (
        "OMPI_COMM_WORLD_*",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_*", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Only a job step has SLURM_STEP_NUM_TASKS and a rank of its own; a batch script also sees
    # SLURM_NTASKS, and is one process all the same.
    (
        "SLURM_*",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
)


def detect_cluster(env: Mapping[str, str] | None = None) -> Cluster:
    """Read rank and size from the launcher's environment variables.

    Raises:
        ConfigError: the variables contradict each other.
    """
    env = os.environ if env is None else env
    for source, rank_key, size_key, local_rank_key, local_size_key in _LAUNCHERS:
        if rank_key not in env or size_key not in env:
            continue
        if source == "SLURM_*" and env.get("SLURM_STEP_ID", "").startswith("429496729"):
            continue  # the batch and extern steps: one process, not a rank of a job
        rank, size = _integer(env, rank_key), _integer(env, size_key)
        if local_rank_key not in env and "SLURM_LOCALID" in env:
            # srun --mpi=pmi2 gives no local rank of its own.
            local_rank_key, local_size_key = "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
        local_rank = _integer(env, local_rank_key) if local_rank_key in env else rank
        local_size = _local_size(env, local_size_key) if local_size_key in env else size
        if not 0 <= rank < size or not 0 <= local_rank < local_size <= size:
            raise ConfigError(
                f"{source}: the launcher's variables contradict each other",
                rule="0 <= rank < size, 0 <= local rank < local size <= size",
                received=f"rank {rank} of {size}, local rank {local_rank} of {local_size}",
                do="start the program with mpirun, horovodrun or srun, which set these",
            )
        return Cluster(rank, size, local_rank, local_size, source)
    return Cluster(0, 1, 0, 1, ALONE)


def _local_size(env: Mapping[str, str], key: str) -> int:
    """The number of tasks on this host; SLURM lists those of all hosts, as in "4(x2),3"."""
    if not key.startswith("SLURM_"):
        return _integer(env, key)
    counts: list[int] = []
    for part in env[key].split(","):
        count, _, times = part.partition("(x")
        try:
            counts += [int(count)] * int(times.rstrip(")") or 1)
        except ValueError:
            raise _not_a_number(env, key) from None
    node = _integer(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    return counts[min(node, len(counts) - 1)]


def _integer(env: Mapping[str, str], key: str) -> int:
    try:
        return int(env[key])
    except ValueError:
        raise _not_a_number(env, key) from None


def _not_a_number(env: Mapping[str, str], key: str) -> ConfigError:
    return ConfigError(
        f"{key}: not a number",
        rule="the launcher sets it to an integer",
        received=repr(env[key]),
        do=f"unset {key}, or start the program with mpirun, horovodrun or srun",
    )
