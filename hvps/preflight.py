"""Checks the configuration against the world, before anything heavy is imported.

TensorFlow takes seconds to import, on each of many processes; a mistake that can be known without
it is reported without it. Nothing here imports tensorflow, keras, numpy, horovod or the task.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from hvps.cluster import Cluster
from hvps.optimizer_check import check_optimizer
from hvps.overrides import LoadedConfig
from hvps.problems import Problem, raise_problems
from hvps.source_reader import SourceReader
from hvps.task_check import check_task

_ENGINES = {"horovod": "horovod", "mpi": "mpi4py"}


def preflight(loaded: LoadedConfig, cluster: Cluster) -> None:
    """Find what would go wrong later.

    Raises:
        ConfigError: the configuration does not fit the ranks, the folders, the task's code or
            what is installed; all problems are named.
    """
    # The program puts the current folder first, wherever it was started from.
    reader = SourceReader([os.getcwd(), *sys.path])
    problems = [
        *_check_backend(loaded, cluster, reader),
        *_check_batch(loaded, cluster),
        *_check_schedule(loaded),
        *check_optimizer(loaded, reader),
        *check_task(loaded, reader),
    ]
    if cluster.is_root:  # the others may not see its disk, and it alone writes there
        problems += _check_run_folder(loaded)
    raise_problems(problems)


def _check_backend(
    loaded: LoadedConfig, cluster: Cluster, reader: SourceReader
) -> Iterator[Problem]:
    backend = loaded.config.backend
    if backend.kind == "local":
        if cluster.size > 1:
            yield Problem(
                "backend.kind: local is one process, but more were started",
                "local trains in one process; allreduce in any number",
                f"{loaded.received('backend.kind', backend.kind)}, {cluster.size} processes by "
                f"{cluster.source}",
                "use backend.kind=allreduce, or start one process without a launcher",
            )
        return
    installed = {name: reader.find(package) is not None for name, package in _ENGINES.items()}
    received = loaded.received("backend.engine", backend.engine)
    if backend.engine in _ENGINES and not installed[backend.engine]:
        others = [name for name, there in installed.items() if there]
        yield Problem(
            f"backend.engine: {_ENGINES[backend.engine]} is not installed",
            "the engine's Python package is installed on every host",
            received,
            f"use backend.engine={others[0]}, or install it" if others else "run `make install`",
        )
    elif backend.engine == "auto" and cluster.size > 1 and not any(installed.values()):
        yield Problem(
            "backend.engine: neither horovod nor mpi4py is installed",
            "more than one rank needs one of them",
            f"{received}, {cluster.size} ranks by {cluster.source}",
            "run `make install`, or install mpi4py",
        )


def _check_batch(loaded: LoadedConfig, cluster: Cluster) -> Iterator[Problem]:
    train = loaded.config.train
    ranks = cluster.size if loaded.config.backend.kind != "local" else 1
    unit = ranks * train.accumulate
    if train.global_batch % unit == 0:
        return
    below = train.global_batch // unit * unit
    nearest = " or ".join(str(value) for value in (below, below + unit) if value > 0)
    yield Problem(
        f"train.global_batch: {train.global_batch} cannot be shared evenly",
        f"a multiple of ranks x train.accumulate = {ranks} x {train.accumulate} = {unit}",
        f"{loaded.received('train.global_batch', train.global_batch)}, "
        f"{ranks} rank{'s' if ranks > 1 else ''} ({cluster.source}), "
        f"accumulate {train.accumulate} ({loaded.origin('train.accumulate')})",
        f"use train.global_batch={nearest}",
    )


def _check_schedule(loaded: LoadedConfig) -> Iterator[Problem]:
    schedule, steps = loaded.config.schedule, loaded.config.train.steps
    if steps is None:
        return
    if schedule.warmup_steps and schedule.warmup_steps >= steps:
        yield Problem(
            "schedule.warmup_steps: training ends before the warm-up does",
            f"less than train.steps = {steps} ({loaded.origin('train.steps')})",
            loaded.received("schedule.warmup_steps", schedule.warmup_steps),
            "make the warm-up shorter or the training longer",
        )
    late = [step for step in schedule.boundaries if step >= steps]
    if late:
        yield Problem(
            f"schedule.boundaries: step {late[0]} is never reached",
            f"less than train.steps = {steps} ({loaded.origin('train.steps')})",
            loaded.received("schedule.boundaries", schedule.boundaries),
            "remove it, or train longer",
        )


def _check_run_folder(loaded: LoadedConfig) -> Iterator[Problem]:
    run = loaded.config.run
    folder = Path(run.dir)
    received = loaded.received("run.dir", run.dir)
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            yield Problem(f"run.dir: {existing} is a file", "a folder", received)
            return
        if not os.access(existing, os.W_OK | os.X_OK):
            what = f"run.dir: no permission to write in {existing}"
            yield Problem(what, "a folder that can be written", received, "choose another run.dir")
            return
        target = folder / run.name if run.name is not None else None
        if target is None or not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return
    except (OSError, ValueError) as err:  # a name too long for the file system, a null byte
        yield Problem(f"run.dir: cannot be used: {err}", "a folder that can be written", received)
        return
    yield Problem(
        f"run.name: {target} exists already",
        "each run has a folder of its own",
        loaded.received("run.name", run.name),
        f"choose another run.name, or delete {target}",
    )
