"""python -m hvps.backends.trial BYTES,... [section.key=value ...]: sums over all ranks, timed.

Started like a training, by mpirun or horovodrun, and through the same collectives. Rank 0 prints
one line, `MARK {"ranks": 2, "engine": "...", "seconds": {"4096": 0.0003, ...}}`: the median time of
a sum of that many bytes, measured on the slowest rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvps.cluster import Cluster, detect_cluster
from hvps.config import Config
from hvps.errors import ConfigError, HvpsError, report_error
from hvps.overrides import load_config

MARK = "hvps-trial"
_LEAST, _MOST, _SECONDS = 5, 200, 2.0  # repetitions, and how long they may take


def sizes_of(words: Sequence[str]) -> tuple[list[int], list[str]]:
    """The sizes in bytes, and the overrides that follow them.

    Raises:
        ConfigError: they are not numbers.
    """
    first, *overrides = [*words, ""][: max(1, len(words))]
    if not all(word.isdigit() and int(word) >= 4 for word in first.split(",")):
        raise ConfigError(
            "BYTES: not sizes", rule="integers >= 4 with commas between them", received=first
        )
    return [int(word) for word in first.split(",")], overrides


def report(ranks: int, engine: str, seconds: dict[int, float]) -> None:
    print(MARK, json.dumps({"ranks": ranks, "engine": engine, "seconds": seconds}), flush=True)


def repetitions(once: float) -> int:
    """How often to measure what takes `once` seconds."""
    return max(_LEAST, min(_MOST, int(_SECONDS / max(once, 1e-6))))


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as one rank.

    Returns:
        The exit code.
    """
    try:
        sizes, overrides = sizes_of(sys.argv[1:] if argv is None else argv)
        cluster = detect_cluster()
        loaded = load_config(None, ["backend.kind=allreduce", *overrides])
        _measure(sizes, loaded.config, cluster)
    except HvpsError as err:
        return report_error(err)
    return 0


def _measure(sizes: Sequence[int], config: Config, cluster: Cluster) -> None:
    from hvps.runtime import configure_tensorflow, prepare_environment

    prepare_environment(cluster)
    configure_tensorflow(config, cluster)
    from hvps.backends.collectives import make_collectives
    from hvps.backends.watchdog import Watchdog

    watchdog = Watchdog(config.backend.stall_timeout, cluster.rank)
    collectives = make_collectives(config, cluster, watchdog)
    with watchdog.waiting("the trial", 10 * config.backend.stall_timeout):
        seconds = {size: _median(collectives, size, cluster.rank) for size in sizes}
    if cluster.is_root:
        report(cluster.size, collectives.engine, seconds)
    with watchdog.waiting("all ranks to finish"):
        collectives.close()
    watchdog.stop()


def _median(collectives: Any, size: int, rank: int) -> float:
    import numpy as np
    import tensorflow as tf

    values = tf.Variable(tf.fill([size // 4], float(rank + 1)))

    @tf.function
    def add() -> tf.Tensor:
        (total,) = collectives.sum_tensors([values.read_value()], f"trial_{size}")
        return total[-1]

    def step() -> None:
        total, ranks = float(add()), collectives.size
        if total != ranks * (ranks + 1) / 2:
            raise HvpsError(
                "the sum over the ranks is wrong",
                rule=f"1 + ... + {ranks} = {ranks * (ranks + 1) // 2}",
                received=total,
                do="look for ranks of another job, or for bad memory",
            )

    step()
    (once,) = collectives.sum_arrays([np.array([timed(step)])])
    times = [timed(step) for _ in range(repetitions(float(once[0]) / collectives.size))]
    return max(collectives.gather_objects(statistics.median(times)))


if __name__ == "__main__":
    sys.exit(main())
