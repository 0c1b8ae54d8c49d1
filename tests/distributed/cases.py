"""python -m tests.distributed.cases NAME=OVERRIDE,OVERRIDE ... : many small runs in one job.

Starting ranks costs seconds, most of it TensorFlow's import; so one job runs many configurations,
one after the other, through the same code as hvps.train. Each leaves its folder under runs/NAME,
with every rank's final weights beside it as weights-rank-N.npz.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from hvps.cluster import detect_cluster
from hvps.failure import ends_the_job_on_error
from hvps.overrides import load_config
from hvps.preflight import preflight
from hvps.runtime import configure_tensorflow, prepare_environment, reset_keras


def main(cases: dict[str, list[str]], common: list[str]) -> None:
    cluster = detect_cluster()
    first = load_config(None, common)
    prepare_environment(cluster)
    devices = configure_tensorflow(first.config, cluster)

    from hvps.backends import allreduce, collectives
    from hvps.backends.watchdog import Watchdog
    from hvps.session import Session
    from hvps.signals import StopSignals
    from hvps.task import load_task

    watchdog = Watchdog(first.config.backend.stall_timeout, cluster.rank)
    shared = collectives.make_collectives(first.config, cluster, watchdog)
    if os.environ.get("HVPS_TEST_BREAK") == "reduction":
        # What Keras 3 does to Horovod's optimizer wrapper: gradients pass by unreduced.
        allreduce.AllreduceBackend._reduce = lambda self, gradients, scalars: (gradients, scalars)
    for name, overrides in cases.items():
        loaded = load_config(None, [*common, *overrides, f"run.name={name}"])
        preflight(loaded, cluster)
        reset_keras(loaded.config)
        backend = allreduce.AllreduceBackend(
            cluster,
            accumulate=loaded.config.train.accumulate,
            collectives=shared,
            watchdog=watchdog,
        )
        session = Session.open(loaded, cluster, backend)
        with StopSignals() as signals:
            trainer = session.trainer(load_task(loaded.config), devices, signals)
            result = trainer.fit()
            session.finish(trainer.model, result)
        weights = {v.path.replace("/", "."): np.asarray(v) for v in trainer.model.weights}
        np.savez(session.folder.path / f"weights-rank-{cluster.rank}.npz", **weights)
    shared.close()


if __name__ == "__main__":
    with ends_the_job_on_error(detect_cluster()):
        given = json.loads(Path(sys.argv[1]).read_text())
        main(given["cases"], given["common"])
