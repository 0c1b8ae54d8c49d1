"""hvps eval RUN = python -m hvps.evaluate RUN: evaluate a checkpoint, in one process or many.

arguments → the run's configuration → backend → checkpoint, on rank 0 → evaluation → table
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvps.cluster import Cluster, detect_cluster
from hvps.config import BackendConfig, Config
from hvps.errors import EXIT_OK, ConfigError, report_error
from hvps.optimizer_check import check_optimizer
from hvps.overrides import COMMAND_LINE, LoadedConfig, load_config
from hvps.problems import raise_problems
from hvps.run_args import RunArguments, split_run_args
from hvps.source_reader import SourceReader
from hvps.task_check import check_task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from hvps.checkpoint import Checkpoint

_USAGE = """\
usage: hvps eval RUN [--checkpoint N] [--json] [section.key=value ...]

Evaluate a checkpoint of a run on the task's held-out examples (eval_data).

  RUN                the run's folder, for example runs/latest; its config.yaml says what to do
  --checkpoint N     the checkpoint of step N; without it the last one that is whole
  --json             one line of JSON, not a table
  section.key=value  replaces one value of the configuration

examples:
  hvps eval runs/latest
  mpirun -np 3 hvps eval runs/latest --checkpoint 500
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one process of an evaluation.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong configuration, 130 stopped by Ctrl-C.
    """
    cluster = Cluster(0, 1, 0, 1, "not known yet")
    try:
        cluster = detect_cluster()
        given = sys.argv[1:] if argv is None else argv
        arguments = split_run_args(given, "hvps eval", _USAGE, evaluates=True)
        loaded = load_config(arguments.run / "config.yaml", arguments.overrides)
        _check(loaded, cluster)
        if cluster.is_root:  # it alone reads the checkpoint
            _check_checkpoint(arguments)
    except ConfigError as err:
        return report_error(err, cluster)
    from hvps.failure import ends_the_job_on_error

    with ends_the_job_on_error(cluster):
        return evaluate(arguments, loaded, cluster)


def _check(loaded: LoadedConfig, cluster: Cluster) -> None:
    """What can be known before TensorFlow is loaded."""
    kind = "local" if cluster.size == 1 else "allreduce"
    given = loaded.config.backend.kind
    if given != kind and loaded.origin("backend.kind") == COMMAND_LINE:
        raise ConfigError(
            f"backend.kind: an evaluation by {given} is not possible here",
            rule="one process evaluates as local, several as allreduce, however the run was"
            " trained",
            received=f"{loaded.received('backend.kind', given)}, {cluster.size} processes by"
            f" {cluster.source}",
            do="remove it",
        )
    reader = SourceReader([os.getcwd(), *sys.path])
    raise_problems([*check_optimizer(loaded, reader), *check_task(loaded, reader)])


def _check_checkpoint(arguments: RunArguments) -> None:
    """Look whether there is one to evaluate, by the descriptions alone."""
    from hvps.checkpoint import Checkpoint, list_checkpoints

    found = list(list_checkpoints(arguments.run / "checkpoints"))
    steps = [entry.step for entry in found if isinstance(entry, Checkpoint)]
    if not found:
        raise ConfigError(
            f"RUN: {arguments.run} has no checkpoint",
            rule="what is evaluated is a checkpoint",
            received=f"nothing in {arguments.run / 'checkpoints'}",
            do="train with checkpoint.keep above 0; the first one comes after"
            " checkpoint.every_steps or checkpoint.every_minutes, or at the end",
        )
    if arguments.checkpoint not in (None, *steps) and len(steps) == len(found):
        raise ConfigError(
            f"--checkpoint: there is none of step {arguments.checkpoint}",
            rule="the step of one of the run's checkpoints",
            received=f"--checkpoint {arguments.checkpoint} (command line)",
            do=f"choose among {', '.join(map(str, sorted(steps)))}",
        )


def config_for_evaluation(config: Config, ranks: int) -> Config:
    """A run's configuration where the run is only evaluated, however it was trained."""
    given = config.backend
    if ranks == 1:
        backend = BackendConfig(kind="local", stall_timeout=given.stall_timeout)
    else:
        backend = BackendConfig(
            kind="allreduce", engine=given.engine, stall_timeout=given.stall_timeout
        )
    # Nothing is accumulated, so no memory is taken for it.
    train = config.train.model_copy(update={"accumulate": 1})
    return config.model_copy(update={"backend": backend, "train": train})


def evaluate(arguments: RunArguments, loaded: LoadedConfig, cluster: Cluster) -> int:
    """From here on TensorFlow is needed."""
    from hvps.runtime import configure_tensorflow, prepare_environment

    config = config_for_evaluation(loaded.config, cluster.size)
    prepare_environment(cluster)
    configure_tensorflow(config, cluster)
    from hvps.backends import make_backend
    from hvps.checkpoint_evaluation import CheckpointEvaluator
    from hvps.log import logger, start_logging
    from hvps.resume import Beginning
    from hvps.task import load_task

    start_logging(config.log.level, cluster.is_root)
    if arguments.json:  # standard output is for the one line
        for handler in logger.handlers:
            handler.setStream(sys.stderr)  # type: ignore[attr-defined]
    backend = make_backend(config, cluster)
    evaluator = CheckpointEvaluator(config, load_task(config), backend)
    checkpoint, beginning = None, Beginning()
    if cluster.is_root:
        checkpoint, state = _read_checkpoint(arguments)
        beginning = Beginning(path=checkpoint.path, state=state)
    others = backend.broadcast(beginning.for_others())
    metrics = evaluator(beginning if cluster.is_root else others)
    if checkpoint is not None:
        _tell(arguments, checkpoint, cluster, metrics)
    backend.close()
    return EXIT_OK


def _read_checkpoint(arguments: RunArguments) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    from hvps.checkpoint import DamagedCheckpointError
    from hvps.resume import checkpoint_at

    while True:
        found = checkpoint_at(arguments.run, arguments.checkpoint)
        try:
            return found, found.arrays()
        except DamagedCheckpointError:
            if found.path.exists():
                raise
            # A run that is training has just replaced it by a newer one.


def _tell(
    arguments: RunArguments, checkpoint: Checkpoint, cluster: Cluster, metrics: Mapping[str, float]
) -> None:
    """Print the result and keep it in the run's folder."""
    from hvps.checkpoint_evaluation import note_evaluation, plain_numbers

    processes = f"{cluster.size} process{'es' * (cluster.size > 1)}"
    if arguments.json:
        record = {
            "run": str(arguments.run),
            "checkpoint": checkpoint.path.name,
            "step": checkpoint.step,
            "processes": cluster.size,
            "metrics": plain_numbers(metrics),
        }
        text = json.dumps(record)
    else:
        rows = {f"eval {name}": f"{value:.6g}" for name, value in metrics.items()}
        rows["step"] = f"{checkpoint.step:,} (epoch {checkpoint.meta['position']['epoch']})"
        rows["checkpoint"] = f"{checkpoint.path}, by {processes}"
        width = max(map(len, rows))
        text = "\n".join(f"  {name.ljust(width)}  {value}" for name, value in rows.items())
    # In one piece: launchers put marks between what is written in several.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    try:
        note_evaluation(arguments.run, checkpoint, metrics)
    except OSError as err:  # a run of somebody else can be evaluated all the same
        print(f"hvps: not noted in {err.filename}: {err.strerror}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
