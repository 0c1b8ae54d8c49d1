"""Which task of a parameter-server cluster a process is, from each place that can say so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hvps.cluster import ALONE, Cluster, Tasks
from hvps.config_base import FieldError
from hvps.errors import ConfigError
from hvps.overrides import load_config
from hvps.task_cluster import count_workers, place_task, read_jobs

ONE_PROCESS = Cluster(0, 1, 0, 1, ALONE)
CLUSTER = {"ps": ["a:1", "b:1"], "worker": ["a:2", "b:2", "c:2"]}
TASKS = Tasks(("a:1", "b:1"), ("a:2", "b:2", "c:2"))
WRITTEN = "backend.cluster={ps: [a:1, b:1], worker: [a:2, b:2, c:2]}"


def place(
    *overrides: str,
    role: str | None = None,
    index: int | None = None,
    cluster: Cluster = ONE_PROCESS,
    tf_config: Any = None,
) -> Cluster:
    env = {}
    if tf_config is not None:
        env["TF_CONFIG"] = tf_config if isinstance(tf_config, str) else json.dumps(tf_config)
    loaded = load_config(None, ["backend.kind=ps", *overrides])
    return place_task(loaded, cluster, role, index, env=env)


def problem(*overrides: str, **given: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        place(*overrides, **given)
    assert caught.value.rule
    assert caught.value.do
    return caught.value


def launched(rank: int, size: int) -> Cluster:
    return Cluster(rank, size, rank % 2, 2, "OMPI_COMM_WORLD_*")


def tf_config(kind: str = "worker", index: Any = 0, **cluster: Any) -> dict[str, Any]:
    return {"cluster": cluster or CLUSTER, "task": {"type": kind, "index": index}}


# Other backends


@pytest.mark.parametrize("kind", ["local", "allreduce"])
def test_other_backends_have_no_tasks(kind: str) -> None:
    assert place(f"backend.kind={kind}", tf_config="not JSON") is ONE_PROCESS
    err = problem(f"backend.kind={kind}", role="ps", index=0)
    assert err.what.startswith("--role: ")
    assert kind in str(err.received)


# The ranks of a launcher


@pytest.mark.parametrize(
    ("rank", "role", "own", "size", "name"),
    [(0, "ps", 0, 2, "ps 0"), (1, "ps", 1, 2, "ps 1"), (2, "worker", 0, 3, "worker 0"),
     (4, "worker", 2, 3, "worker 2")],
)  # fmt: skip
def test_the_first_ranks_serve(rank: int, role: str, own: int, size: int, name: str) -> None:
    placed = place("backend.num_ps=2", cluster=launched(rank, 5))
    assert (placed.role, placed.rank, placed.size) == (role, own, size)
    assert (placed.world_rank, placed.world_size, placed.tasks) == (rank, 5, None)
    assert (placed.local_rank, placed.local_size) == (rank % 2, 2)
    assert placed.source == "OMPI_COMM_WORLD_*, backend.num_ps"
    assert (placed.name, placed.is_root) == (name, rank == 2)
    assert count_workers(load_config(None, ["backend.num_ps=2"]), placed) == 3


def test_a_launcher_needs_a_rank_for_a_worker() -> None:
    err = problem("backend.num_ps=3", cluster=launched(0, 3))
    assert err.what.startswith("backend.num_ps: ")
    assert "at least 4 ranks" in str(err.do)


def test_a_role_comes_before_the_launchers_rank() -> None:
    placed = place(WRITTEN, role="ps", index=1, cluster=launched(0, 2))
    assert (placed.name, placed.world_size, placed.source) == ("ps 1", None, "backend.cluster")


# Addresses of the configuration


def test_role_and_index_choose_a_task() -> None:
    placed = place(WRITTEN, role="worker", index=2)
    assert (placed.role, placed.rank, placed.size, placed.tasks) == ("worker", 2, 3, TASKS)
    assert (placed.source, placed.launched, placed.address) == ("backend.cluster", True, "c:2")
    placed = place(WRITTEN, role="ps", index=0)
    assert (placed.role, placed.rank, placed.size, placed.is_root) == ("ps", 0, 2, False)
    assert place(WRITTEN, role="worker", index=0).is_root


@pytest.mark.parametrize(
    ("role", "index", "local"),
    [("worker", 0, (0, 2)), ("ps", 0, (1, 2)), ("worker", 2, (0, 1)), ("ps", 1, (1, 2))],
)
def test_tasks_of_the_same_host_are_counted(role: str, index: int, local: tuple[int, int]) -> None:
    placed = place(WRITTEN, role=role, index=index)
    assert (placed.local_rank, placed.local_size) == local


def test_names_of_this_machine_are_one_host() -> None:
    here = "backend.cluster={ps: [localhost:1], worker: [127.0.0.1:2, '[::1]:3', 127.0.1.1:4]}"
    placed = place(here, role="ps", index=0)
    assert (placed.local_rank, placed.local_size) == (3, 4)


@pytest.mark.parametrize(
    ("role", "index", "rank"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_a_chief_is_worker_0(role: str, index: int, rank: int) -> None:
    written = "backend.cluster={chief: [a:2], work: [b:2, c:2], ps: [a:1, b:1]}"
    placed = place(written, role=role, index=index)
    assert (placed.role, placed.rank, placed.size, placed.tasks) == ("worker", rank, 3, TASKS)


@pytest.mark.parametrize(
    ("role", "index"), [("ps", 2), ("worker", 3), ("chief", 0), ("evaluator", 0)]
)
def test_there_is_no_such_task(role: str, index: int) -> None:
    err = problem(WRITTEN, role=role, index=index)
    assert err.what == f"backend.cluster: there is no {role} {index}"
    assert "2 ps, 3 worker" in str(err.rule)


def test_nothing_says_which_task_this_is() -> None:
    for given in ((), (WRITTEN,)):
        err = problem(*given)
        assert err.what.startswith("backend.kind: ps, but this process does not know")
        assert "hvps launch CONFIG" in str(err.do)
        assert "--role ps --index 0" in str(err.do)


def test_a_role_without_a_cluster() -> None:
    assert problem(role="ps", index=0).what.startswith("backend.cluster: missing")


@pytest.mark.parametrize(
    ("jobs", "place", "what"),
    [
        ([1], "", "not a mapping"),
        (None, "", "not a mapping"),
        ({}, "", "no ps"),
        ({"worker": ["a:1"]}, "", "no ps"),
        ({"ps": [], "worker": ["a:1"]}, "ps", "no ps"),
        ({"ps": ["a:1"]}, "", "no worker"),
        ({"ps": ["a:1"], "evaluator": ["a:2"]}, "", "no worker"),
        ({"ps": ["a:1"], "chief": ["a:2", "a:3"]}, "chief", "2 chiefs"),
        ({"ps": ["a:1"], "wroker": ["a:2"]}, "wroker", "unknown job"),
        ({"ps": ["a:1"], 7: ["a:2"]}, "7", "unknown job"),
        ({"ps": ["a:1"], "worker": ["a:2"], "work": ["a:3"]}, "work", "the same job as worker"),
        ({"ps": "a:1"}, "ps", "not a list of addresses"),
        ({"ps": 7}, "ps", "not a list of addresses"),
        ({"ps": {"0": "a:1"}}, "ps", "not a list of addresses"),
        ({"ps": ["a:1", "a:1"]}, "ps[1]", r"the address of ps\[0\] again"),
        ({"ps": ["A:1"], "worker": ["b:1", "a:1"]}, "worker[1]", r"the address of ps\[0\] again"),
        ({"ps": ["localhost:1"], "worker": ["127.0.0.1:1"]}, "worker[0]", "again"),
        ({"ps": ["a:0"]}, "ps[0]", "no such port"),
        ({"ps": ["a:1", "a:65536"]}, "ps[1]", "no such port"),
        ({"ps": ["0.0.0.0:1"]}, "ps[0]", "stands for all"),
        ({"ps": ["[::]:1"]}, "ps[0]", "stands for all"),
        *[
            ({"ps": [wrong]}, "ps[0]", "not an address")
            for wrong in ("a", "a:", ":1", "a:b", "a:-1", "a:1:2", "::1:1", "http://a:1", "a b:1",
                          "", 33331, True, None, 1.5, ["a:1"], "a:1\n", "grpc:// a:1", "ä:1")
        ],
    ],
    ids=str,
)  # fmt: skip
def test_wrong_clusters(jobs: Any, place: str, what: str) -> None:
    with pytest.raises(FieldError, match=what) as caught:
        read_jobs(jobs)
    assert caught.value.field == place
    assert caught.value.rule
    assert caught.value.do


def test_a_port_without_a_host() -> None:
    with pytest.raises(FieldError) as caught:
        read_jobs({"ps": [33331]})
    assert "127.0.0.1:33331" in str(caught.value.do)


# TF_CONFIG


@pytest.mark.parametrize(
    ("kind", "index", "role", "rank", "size"),
    [("ps", 1, "ps", 1, 2), ("worker", 2, "worker", 2, 3), ("worker", 0, "worker", 0, 3)],
)
def test_tf_config(kind: str, index: int, role: str, rank: int, size: int) -> None:
    placed = place(tf_config=tf_config(kind, index))
    assert (placed.role, placed.rank, placed.size) == (role, rank, size)
    assert (placed.tasks, placed.source) == (TASKS, "TF_CONFIG")


def test_tf_configs_chief_and_evaluator() -> None:
    jobs = {"chief": ["a:2"], "worker": ["b:2", "c:2"], "ps": ["a:1", "b:1"], "evaluator": ["d:1"]}
    for kind, index, rank in (("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)):
        placed = place(tf_config=tf_config(kind, index, **jobs))
        assert (placed.role, placed.rank, placed.tasks) == ("worker", rank, TASKS)
    placed = place(tf_config=tf_config("evaluator", 0, **jobs))
    assert (placed.role, placed.rank, placed.size) == ("evaluator", 0, 1)
    assert (placed.tasks, placed.is_root, placed.address) == (TASKS, False, None)


def test_the_command_line_comes_before_tf_configs_task() -> None:
    for content in (tf_config("ps", 0), {"cluster": CLUSTER}, tf_config("ps", "wrong")):
        assert place(role="worker", index=1, tf_config=content).name == "worker 1"


def test_both_clusters_must_be_the_same() -> None:
    assert place(WRITTEN, tf_config=tf_config("ps", 1)).name == "ps 1"
    other = "backend.cluster={ps: [a:1], worker: [a:2]}"
    err = problem(other, tf_config=tf_config("ps", 1))
    assert err.what.startswith("TF_CONFIG.cluster: another cluster than backend.cluster")


def test_tf_config_may_name_the_task_alone() -> None:
    content = {"task": {"type": "worker", "index": 1}}
    assert place(WRITTEN, tf_config=content).address == "b:2"


def test_an_empty_tf_config_is_none() -> None:
    assert problem(tf_config="").what.startswith("backend.kind: ps, but")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{'cluster'", "TF_CONFIG: not JSON"),
        ('["a:1"]', "TF_CONFIG: not an object"),
        ("3", "TF_CONFIG: not an object"),
        ({"cluster": [], "task": {}}, "TF_CONFIG.cluster: not a mapping"),
        ({"task": {"type": "ps", "index": 0}}, "TF_CONFIG.cluster: not a mapping"),
        (tf_config(ps=["a:1"], worker=["a:2", "a"]), "TF_CONFIG.cluster.worker[1]: not an address"),
        (
            tf_config(ps=["a:1"], worker=["a:1"]),
            "TF_CONFIG.cluster.worker[0]: the address of",
        ),
        (tf_config(ps=["a:1"]), "TF_CONFIG.cluster: no worker"),
        ({"cluster": CLUSTER}, "TF_CONFIG.task: missing"),
        ({"cluster": CLUSTER, "task": "ps"}, "TF_CONFIG.task: missing"),
        (tf_config("sp", 0), "TF_CONFIG.task.type: unknown job"),
        (tf_config("ps", "0"), "TF_CONFIG.task.index: not an integer"),
        (tf_config("ps", None), "TF_CONFIG.task.index: not an integer"),
        (tf_config("ps", True), "TF_CONFIG.task.index: not an integer"),
        (tf_config("ps", 1.0), "TF_CONFIG.task.index: not an integer"),
        (tf_config("ps", 2), "TF_CONFIG: there is no ps 2"),
        (tf_config("ps", -1), "TF_CONFIG: there is no ps -1"),
        (tf_config("chief", 0), "TF_CONFIG: there is no chief 0"),
    ],
    ids=str,
)
def test_wrong_tf_configs(content: Any, what: str) -> None:
    assert problem(tf_config=content).what.startswith(what)


def test_wrong_values_are_shown() -> None:
    err = problem(tf_config=tf_config(ps=["a:1"], worker=["a:2", "b"]))
    assert err.received == "'b' (environment)"
    assert "write 0 without quotes" in str(problem(tf_config=tf_config("ps", "0")).do)


# Options that depend on the number of workers


@pytest.mark.parametrize("role", ["worker", "ps"])
def test_one_number_of_steps_per_worker(role: str) -> None:
    place(WRITTEN, "backend.worker_steps=[3, 1, 2]", role=role, index=0)
    err = problem(WRITTEN, "backend.worker_steps=[3, 1]", role=role, index=0)
    assert err.what == "backend.worker_steps: 2 numbers for 3 workers"
    place("backend.worker_steps=[3, 1]", cluster=launched(0, 3))
    assert "worker_steps" in problem("backend.worker_steps=[3]", cluster=launched(0, 3)).what


@pytest.mark.parametrize("role", ["worker", "ps"])
def test_fewer_backup_workers_than_workers(role: str) -> None:
    place(WRITTEN, "backend={update: sync, backup_workers: 2}", role=role, index=0)
    err = problem(WRITTEN, "backend={update: sync, backup_workers: 3}", role=role, index=0)
    assert err.what.startswith("backend.backup_workers: ")
    assert "3 workers by backend.cluster" in str(err.received)
