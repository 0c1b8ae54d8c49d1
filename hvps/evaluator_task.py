"""The evaluator of a parameter-server cluster: follows the checkpoints of the run and evaluates
each new one. It takes no part in the cluster: all it sees is the run's folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hvps.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, ConfigError
from hvps.evaluate import config_for_evaluation

if TYPE_CHECKING:
    from hvps.cluster import Cluster
    from hvps.config import Config
    from hvps.overrides import LoadedConfig


def check_evaluator(loaded: LoadedConfig) -> None:
    """See whether there will be something to follow.

    Raises:
        ConfigError: nothing says which folder, or nothing is saved there.
    """
    if loaded.config.run.name is None:
        raise ConfigError(
            "run.name: needed by the evaluator",
            rule="it follows the checkpoints in run.dir/run.name; without a name the chief alone"
            " knows the folder",
            received=loaded.received("run.name", None),
            do="give run.name=... to all tasks of the cluster",
        )
    keep = loaded.config.checkpoint.keep
    if keep == 0:
        raise ConfigError(
            "checkpoint.keep: 0 leaves the evaluator nothing to evaluate",
            rule="it follows the run's checkpoints",
            received=loaded.received("checkpoint.keep", keep),
            do="keep some of them, or start no evaluator",
        )


def follow(config: Config, cluster: Cluster) -> int:
    """Evaluate until the run has ended; returns the exit code."""
    from hvps.runtime import configure_tensorflow, prepare_environment

    started = time.time()
    with _stopped_by_signals() as stop:
        try:
            alone = config_for_evaluation(config, 1)
            prepare_environment(cluster)
            configure_tensorflow(alone, cluster)
            _evaluate_all(alone, cluster, started)
        except _StoppedError:
            pass
    return stop.get("code", EXIT_OK)


class _StoppedError(BaseException):
    """Raised by a signal's handler: nothing is lost by leaving at once."""


@contextmanager
def _stopped_by_signals() -> Iterator[dict[str, int]]:
    """Within it a signal raises `_StoppedError`; gives where the exit code will stand."""
    stop: dict[str, int] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        for each in before:  # a second one ends the process
            signal.signal(each, signal.SIG_DFL)
        stop["code"] = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED
        raise _StoppedError

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _evaluate_all(config: Config, cluster: Cluster, started: float) -> None:
    from hvps.backends import make_backend
    from hvps.checkpoint_evaluation import CheckpointEvaluator, note_evaluation
    from hvps.followed_run import new_checkpoints, wait_for_run
    from hvps.log import logger, start_logging
    from hvps.metrics import TensorBoard
    from hvps.resume import Beginning
    from hvps.task import load_task

    start_logging(config.log.level, is_root=True)
    backend = make_backend(config, cluster)
    evaluator = CheckpointEvaluator(config, load_task(config), backend)
    assert config.run.name is not None
    run = Path(config.run.dir).absolute() / config.run.name
    logger.info("%s follows the checkpoints of %s", cluster.name, run)
    wait_for_run(run, config.backend.stall_timeout)
    board = TensorBoard(run / "tensorboard") if config.log.tensorboard else None
    try:
        for checkpoint, state in new_checkpoints(run, started, config.backend.stall_timeout):
            metrics = evaluator(Beginning(path=checkpoint.path, state=state))
            note_evaluation(run, checkpoint, metrics)
            epoch = checkpoint.meta["position"]["epoch"]
            if board is not None:
                board.write("evaluator", checkpoint.step, epoch, metrics)
            words = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            logger.info("%s: step %d  epoch %d  %s", cluster.name, checkpoint.step, epoch, words)
    finally:
        if board is not None:
            board.close()
    logger.info("%s: the run has ended", cluster.name)
