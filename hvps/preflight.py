"""Checks the configuration against the world, before anything heavy is imported.

TensorFlow takes seconds to import, on each of many processes; a mistake that can be known without
it is reported without it. Nothing here imports tensorflow, keras, numpy, horovod or the task.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from hvps.cluster import Cluster
from hvps.errors import ConfigError
from hvps.optimizer_check import check_optimizer
from hvps.overrides import LoadedConfig
from hvps.ports import check_own_address, resolves, split_address, unresolvable
from hvps.problems import Problem, did_you_mean, raise_problems
from hvps.run_directory import may_hold_run
from hvps.source_reader import SourceReader
from hvps.task_check import check_task
from hvps.task_cluster import count_workers

_ENGINES = {"horovod": "horovod", "mpi": "mpi4py"}


def preflight(loaded: LoadedConfig, cluster: Cluster, *, here: bool = True) -> None:
    """Find what would go wrong later.

    Raises:
        ConfigError: the configuration does not fit the ranks, the folders, the task's code or
            what is installed; all problems are named.
    """
    # The program puts the current folder first, wherever it was started from.
    reader = SourceReader([os.getcwd(), *sys.path])
    problems = [
        *_check_backend(loaded, cluster, reader),
        *_check_addresses(cluster, here),
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
    if backend.kind == "ps":
        if cluster.world_size is not None and reader.find("mpi4py") is None:
            yield Problem(
                "backend.kind: mpi4py is not installed",
                "parameter servers and workers that a launcher starts find each other by MPI",
                f"{loaded.received('backend.kind', backend.kind)}, {cluster.world_size} ranks by "
                f"{cluster.source}",
                "run `make install`, or use `hvps launch`",
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


def _check_addresses(cluster: Cluster, here: bool) -> Iterator[Problem]:
    """Of a parameter-server cluster: mine must be free, those of the others must mean something."""
    tasks = cluster.tasks
    if tasks is None:
        return
    named = [(f"ps {index}", address) for index, address in enumerate(tasks.ps)]
    named += [(f"worker {index}", address) for index, address in enumerate(tasks.worker)]
    known: dict[str, bool] = {}
    for name, address in named:
        host, _ = split_address(address)
        if here and address == cluster.address:
            try:
                check_own_address(address, name)
            except ConfigError as err:
                yield _problem_of(err)
        elif not known.setdefault(host, resolves(host)):
            yield _problem_of(unresolvable(address, name))


def _problem_of(err: ConfigError) -> Problem:
    return Problem(err.what, err.rule, None if err.received is None else str(err.received), err.do)


def _check_batch(loaded: LoadedConfig, cluster: Cluster) -> Iterator[Problem]:
    train = loaded.config.train
    parts = _batch_parts(loaded, cluster)
    unit = math.prod(parts.values()) * train.accumulate
    if train.global_batch % unit == 0:
        return
    if train.uneven_batch and loaded.config.backend.kind != "ps" and train.global_batch >= unit:
        return
    below = train.global_batch // unit * unit
    nearest = " or ".join(str(value) for value in (below, below + unit) if value > 0)
    names = " x ".join([*parts, "train.accumulate"])
    numbers = " x ".join(str(number) for number in [*parts.values(), train.accumulate])
    counts = [f"{n} {name if n > 1 else name.removesuffix('s')}" for name, n in parts.items()]
    yield Problem(
        f"train.global_batch: {train.global_batch} cannot be shared evenly",
        f"a multiple of {names} = {numbers} = {unit}",
        f"{loaded.received('train.global_batch', train.global_batch)}, "
        f"{', '.join(counts)} ({cluster.source}), "
        f"accumulate {train.accumulate} ({loaded.origin('train.accumulate')})",
        f"use train.global_batch={nearest}",
    )


def _batch_parts(loaded: LoadedConfig, cluster: Cluster) -> dict[str, int]:
    """What a batch is divided among, in words, and how many there are of each."""
    backend = loaded.config.backend
    if backend.kind != "ps":
        return {"ranks": cluster.size if backend.kind != "local" else 1}
    devices = max(1, len(backend.devices))
    if backend.update != "sync":  # each worker computes whole batches
        return {"devices": devices}
    return {"workers": count_workers(loaded, cluster), "devices": devices}


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
        yield from _check_resume_path(loaded)
        target = folder / run.name if run.name is not None else None
        if target is None or may_hold_run(target, resume=run.resume != "never"):
            return
    except (OSError, ValueError) as err:  # a name too long for the file system, a null byte
        yield Problem(f"run.dir: cannot be used: {err}", "a folder that can be written", received)
        return
    yield Problem(
        f"run.name: {target} exists already",
        "each run has a folder of its own",
        loaded.received("run.name", run.name),
        f"choose another run.name, or delete {target}"
        + ("; run.resume=auto goes on with it" if run.resume == "never" else ""),
    )


def _check_resume_path(loaded: LoadedConfig) -> Iterator[Problem]:
    given = loaded.config.run.resume_path
    if given is None:
        return
    path = Path(given)
    if not any((path / name).exists() for name in ("checkpoint.json", "checkpoints")):
        yield Problem(
            f"run.resume: no checkpoint in {given}",
            "auto, never, or the folder of a run or of a checkpoint",
            loaded.received("run.resume", given),
            did_you_mean(given, ("auto", "never")) or "correct the path",
        )
