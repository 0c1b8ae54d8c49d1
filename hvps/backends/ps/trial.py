"""python -m hvps.backends.ps.trial BYTES,... ROLE INDEX CLUSTER: a variable read and written.

One process for each of `ps 0` and `worker 0`, on the same TensorFlow servers as a training. The
worker prints one line like that of hvps.backends.trial: the median time of reading that many bytes
from the ps and writing them back.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from hvps.backends.trial import repetitions, report, sizes_of, timed
from hvps.cluster import ALONE, Cluster
from hvps.errors import HvpsError, report_error
from hvps.overrides import load_config
from hvps.task_cluster import place_task


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process is ended, or measure as the worker.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        sizes, (role, index, cluster) = sizes_of(words)
        loaded = load_config(None, ["backend.kind=ps", f"backend.cluster={cluster}"])
        placed = place_task(loaded, Cluster(0, 1, 0, 1, ALONE), role, int(index))
        _take_part(sizes, loaded.config, placed)
    except HvpsError as err:
        return report_error(err)
    return 0


def _take_part(sizes: Sequence[int], config: Any, cluster: Cluster) -> None:
    from hvps.runtime import prepare_environment

    prepare_environment(cluster)
    from hvps.backends.ps.member import start_server

    assert cluster.tasks is not None
    server = start_server(config, cluster, cluster.tasks)
    if cluster.role == "ps":
        server.join()
    else:
        report(2, "TensorFlow servers", {size: _median(server.target, size) for size in sizes})


def _median(target: str, size: int) -> float:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        with v1.device("/job:ps/task:0/cpu:0"):
            variable = v1.get_variable(
                f"trial_{size}", [size // 4], initializer=v1.zeros_initializer(), use_resource=True
            )
        with v1.device("/job:worker/task:0/cpu:0"):
            there_and_back = variable.assign(variable.read_value() + 1.0, read_value=False)
        with v1.Session(target) as session:
            session.run(v1.global_variables_initializer())

            def step() -> None:
                session.run(there_and_back)

            step()
            count = repetitions(timed(step))
            times = [timed(step) for _ in range(count)]
            last = float(session.run(variable[-1]))
    if last != count + 2:
        raise HvpsError(
            "a variable on the ps is not what was written",
            rule=f"{count + 2} times 1 was added",
            received=last,
            do="look for another job with the same addresses",
        )
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
