"""python -m hvps.train [CONFIG] [key=value ...]: the same program in every process of a job.

cluster → configuration → backend → run directory → task → trainer → exit code
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvps.cli_args import split_args
from hvps.cluster import Cluster, detect_cluster
from hvps.errors import ConfigError, report_error
from hvps.evaluator_task import check_evaluator, follow
from hvps.overrides import LoadedConfig, load_config
from hvps.preflight import preflight
from hvps.task_cluster import place_task


def main(argv: Sequence[str] | None = None) -> int:
    """Run one process of a training job.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong configuration, 143 stopped by SIGTERM, 130 by
        Ctrl-C.
    """
    cluster = Cluster(0, 1, 0, 1, "not known yet")
    try:
        cluster = detect_cluster()
        arguments = split_args(sys.argv[1:] if argv is None else argv, prog="hvps.train")
        loaded = load_config(arguments.config, arguments.overrides)
        cluster = place_task(loaded, cluster, arguments.role, arguments.index)
        preflight(loaded, cluster)
        if cluster.role == "evaluator":
            check_evaluator(loaded)
    except ConfigError as err:
        return report_error(err, cluster)
    from hvps.failure import ends_the_job_on_error, leave_at_once
    from hvps.restart import allow_restarts

    if cluster.role == "evaluator":
        with ends_the_job_on_error(cluster):
            return follow(loaded.config, cluster)
    allow_restarts(loaded.config)
    with ends_the_job_on_error(cluster):
        code = train(loaded, cluster)
        if loaded.config.backend.kind == "ps":
            leave_at_once(code)
        return code


def train(loaded: LoadedConfig, cluster: Cluster) -> int:
    """From here on TensorFlow is needed."""
    from hvps.backends import make_backend, meet, serve, serves
    from hvps.runtime import configure_tensorflow, prepare_environment

    config = loaded.config
    cluster = meet(config, cluster)
    prepare_environment(cluster)
    devices = configure_tensorflow(config, cluster)
    if serves(config, cluster):
        return serve(config, cluster)

    from hvps.session import Session
    from hvps.signals import StopSignals
    from hvps.task import load_task

    backend = make_backend(config, cluster)
    session = Session.open(loaded, cluster, backend)
    task = load_task(config)
    with StopSignals() as signals:
        trainer = session.trainer(task, devices, signals)
        result = trainer.fit()
        session.finish(trainer.model, result)
    backend.close()
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
