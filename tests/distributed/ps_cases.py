"""python -m tests.distributed.ps_cases FILE [ROLE INDEX]: many small runs on one cluster.

Starting a task costs seconds, most of it TensorFlow's import; so one cluster runs many
configurations, one after the other, through the same code as hvps.train. FILE is JSON: `tasks`
(the addresses), `common` overrides, and `cases`: for each run its name, overrides, perhaps a
`config` file, and how many of the workers take part. Each leaves its folder under runs/NAME, with
state.npz beside the result.
Without ROLE and INDEX the same runs are made in one process.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvps.cluster import Cluster, Tasks
from hvps.failure import ends_the_job_on_error
from hvps.overrides import load_config
from hvps.runtime import configure_tensorflow, prepare_environment, reset_keras


def cluster_of(spec: dict[str, list[str]], role: str, index: int) -> Cluster:
    tasks = Tasks(tuple(spec["ps"]), tuple(spec["worker"]))
    size = len(getattr(tasks, role))
    local = index + (len(tasks.ps) if role == "worker" else 0)
    # As on a host with many tasks: one thread each. How many there are changes the order of sums.
    return Cluster(index, size, local, 1000, "tests", role=role, tasks=tasks)


def main(given: dict[str, Any], cluster: Cluster) -> None:
    common = ["backend.kind=ps", *given["common"]]
    first = load_config(None, common)
    prepare_environment(cluster)
    devices = configure_tensorflow(first.config, cluster)

    from hvps.backends.ps.backend import PsBackend
    from hvps.backends.ps.member import Member
    from hvps.backends.ps.serve import serve

    member = Member.start(first.config, cluster)
    if cluster.role == "ps":
        leave(serve(member))
    backend: PsBackend | None = None
    for number, (name, case) in enumerate(given["cases"].items()):
        overrides = [*common, *case["overrides"], f"run.name={name}"]
        loaded = load_config(case.get("config"), overrides)
        size = case.get("workers", cluster.size)
        alone = loaded.config.backend.replication == "in_graph"
        if cluster.rank >= (1 if alone else size):
            continue
        assert cluster.tasks is not None
        tasks = replace(cluster.tasks, worker=cluster.tasks.worker[:size])
        part = replace(member, tasks=tasks, cluster=replace(cluster, size=size, tasks=tasks))
        backend = PsBackend(part, loaded.config, number)
        train(loaded, backend, devices)
    assert member.control is not None
    if cluster.is_root and backend is not None:
        backend.close()
    elif given.get("serves", True):
        member.control.wait_until_done()
    leave(0)


def train(loaded: Any, backend: Any, devices: str) -> None:
    from hvps.session import Session
    from hvps.signals import StopSignals
    from hvps.task import load_task

    reset_keras(loaded.config)
    session = Session.open(loaded, backend.cluster, backend)
    with StopSignals() as signals:
        trainer = session.trainer(load_task(loaded.config), devices, signals)
        result = trainer.fit()
        session.finish(trainer.model, result)
    if backend.cluster.is_root:
        state = backend.state()
        np.savez(session.folder.path / "state.npz", **state)


def leave(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)


def main_locally(given: dict[str, Any]) -> None:
    # As on a host with many tasks: one thread. How many there are changes the order of sums.
    cluster = Cluster(0, 1, 0, 1000, "tests")
    common = ["backend.kind=local", *given["common"]]
    first = load_config(None, common)
    prepare_environment(cluster)
    devices = configure_tensorflow(first.config, cluster)

    from hvps.backends.local import LocalBackend

    for name, case in given["cases"].items():
        loaded = load_config(None, [*common, *case["overrides"], f"run.name={name}"])
        accumulate = loaded.config.train.accumulate
        train(loaded, LocalBackend(cluster, accumulate=accumulate), devices)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    if len(sys.argv) == 2:
        main_locally(given)
        leave(0)
    role, index = sys.argv[2:]
    me = cluster_of(given["tasks"], role, int(index))
    with ends_the_job_on_error(me):
        main(given, me)
