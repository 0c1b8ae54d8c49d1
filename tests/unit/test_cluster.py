"""Rank and size from every launcher's variables."""

from __future__ import annotations

import pytest

from hvps.cluster import ALONE, Cluster, Tasks, detect_cluster
from hvps.errors import ConfigError

HOROVOD = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM_STEP = {
    "SLURM_PROCID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_ID": "0",
}
SLURM_BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Cluster(0, 1, 0, 1, ALONE)),
        ({"PATH": "/bin", "RANK": "3", "WORLD_SIZE": "4"}, Cluster(0, 1, 0, 1, ALONE)),
        (HOROVOD, Cluster(5, 8, 1, 4, "HOROVOD_*")),
        (OPEN_MPI, Cluster(2, 6, 0, 2, "OMPI_COMM_WORLD_*")),
        (PMI, Cluster(3, 4, 1, 2, "PMI_*")),
        (SLURM_STEP, Cluster(7, 8, 3, 4, "SLURM_*")),
        ({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "4,4"}, Cluster(7, 8, 3, 4, "SLURM_*")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Cluster(1, 2, 1, 2, "PMI_*")),
    ],
    ids=["none", "foreign", "horovod", "openmpi", "pmi", "slurm", "slurm list", "pmi, one host"],
)
def test_launchers(env: dict[str, str], expected: Cluster) -> None:
    assert detect_cluster(env) == expected


@pytest.mark.parametrize(
    ("rank", "size", "tasks", "node", "local_rank", "local_size"),
    [
        (1, 6, "2,4", 0, 1, 2),
        (2, 6, "2,4", 1, 0, 4),
        (5, 6, "2,4", 1, 3, 4),
        (0, 11, "4(x2),3", 0, 0, 4),
        (7, 11, "4(x2),3", 1, 3, 4),
        (10, 11, "4(x2),3", 2, 2, 3),
        (24, 25, "1,12(x2)", 2, 11, 12),
        (3, 4, "4", 0, 3, 4),
    ],
)
@pytest.mark.parametrize("launcher", ["PMI_*", "SLURM_*"])
def test_slurm_hosts_of_different_size(
    launcher: str, rank: int, size: int, tasks: str, node: int, local_rank: int, local_size: int
) -> None:
    """`srun --mpi=pmi2` sets PMI's rank and size, but no rank on the host."""
    env = {
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }
    names = ("PMI_RANK", "PMI_SIZE")
    if launcher == "SLURM_*":
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    env.update(zip(names, (str(rank), str(size)), strict=True))
    assert detect_cluster(env) == Cluster(rank, size, local_rank, local_size, launcher)


def test_pmis_own_local_rank_is_taken_before_slurms() -> None:
    slurm = {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
    assert detect_cluster({**slurm, **PMI}) == Cluster(3, 4, 1, 2, "PMI_*")


@pytest.mark.parametrize("tasks", ["", "four", "4(xtwo)", "2,", "(x2)"])
def test_a_list_of_tasks_that_cannot_be_read(tasks: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE: not a number") as caught:
        detect_cluster({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": tasks})
    assert caught.value.received == repr(tasks)


def test_horovod_comes_first_then_mpi_then_pmi_then_slurm() -> None:
    """mpirun inside of a SLURM job step: the inner launcher knows the ranks."""
    everything = {**SLURM_STEP, **PMI, **OPEN_MPI, **HOROVOD}
    for known, expected in (
        (HOROVOD, "HOROVOD_*"),
        (OPEN_MPI, "OMPI_COMM_WORLD_*"),
        (PMI, "PMI_*"),
        (SLURM_STEP, "SLURM_*"),
    ):
        assert detect_cluster(everything).source == expected
        everything = {key: value for key, value in everything.items() if key not in known}
    assert everything == {}


def test_a_rank_without_a_size_is_not_a_launch() -> None:
    assert detect_cluster({"HOROVOD_RANK": "1", **OPEN_MPI}).source == "OMPI_COMM_WORLD_*"
    assert detect_cluster({"OMPI_COMM_WORLD_SIZE": "4"}).source == ALONE


def test_a_slurm_batch_script_is_one_process() -> None:
    assert detect_cluster(SLURM_BATCH) == Cluster(0, 1, 0, 1, ALONE)


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292"])
def test_slurm_steps_that_are_no_job_are_one_process(step: str) -> None:
    """An interactive, a batch and an extern step, where a site exports the step's variables."""
    env = {**SLURM_STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": step}
    assert detect_cluster(env) == Cluster(0, 1, 0, 1, ALONE)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (*HOROVOD, *OPEN_MPI, *PMI, *SLURM_STEP):
        monkeypatch.delenv(key, raising=False)
    assert detect_cluster().source == ALONE
    for key, value in OPEN_MPI.items():
        monkeypatch.setenv(key, value)
    assert detect_cluster().rank == 2


@pytest.mark.parametrize(
    "change",
    [
        {"HOROVOD_RANK": "8"},
        {"HOROVOD_RANK": "-1"},
        {"HOROVOD_LOCAL_RANK": "4"},
        {"HOROVOD_LOCAL_RANK": "-1"},
        {"HOROVOD_LOCAL_SIZE": "9"},
        {"HOROVOD_LOCAL_SIZE": "0"},
        {"HOROVOD_SIZE": "0"},
        {"HOROVOD_SIZE": "3"},
    ],
    ids=str,
)
def test_contradictions(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"HOROVOD_\*: .*contradict") as caught:
        detect_cluster({**HOROVOD, **change})
    assert caught.value.rule
    assert caught.value.do
    assert f"rank {change.get('HOROVOD_RANK', '5')} of" in str(caught.value.received)


@pytest.mark.parametrize("value", ["", "two", "1.5", "(x2)"])
@pytest.mark.parametrize("key", list(HOROVOD))
def test_not_a_number(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: not a number") as caught:
        detect_cluster({**HOROVOD, key: value})
    assert caught.value.received == repr(value)
    assert caught.value.do is not None
    assert key in caught.value.do


def test_roles() -> None:
    alone, second = detect_cluster({}), detect_cluster(OPEN_MPI)
    assert (alone.is_root, alone.launched) == (True, False)
    assert (second.is_root, second.launched) == (False, True)
    assert detect_cluster({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).is_root


def test_a_parameter_server_is_no_root() -> None:
    tasks = Tasks(("a:1", "b:1"), ("c:1", "d:1"))
    server = Cluster(0, 2, 0, 1, "test", role="ps", tasks=tasks)
    assert (server.is_root, server.name, server.address) == (False, "ps 0", "a:1")
    chief = Cluster(0, 2, 0, 1, "test", tasks=tasks)
    assert (chief.is_root, chief.name, chief.address) == (True, "worker 0", "c:1")
    evaluator = Cluster(0, 1, 0, 1, "test", role="evaluator", tasks=tasks)
    assert (evaluator.is_root, evaluator.name, evaluator.address) == (False, "evaluator 0", None)


def test_names_before_addresses_are_known() -> None:
    assert Cluster(1, 2, 0, 1, "test").name == "rank 1"
    assert Cluster(1, 2, 0, 1, "test").address is None
    assert Cluster(1, 2, 0, 1, "test", world_rank=3, world_size=4).name == "worker 1"
    assert Cluster(1, 2, 0, 1, "test", role="ps", world_rank=1, world_size=4).name == "ps 1"
