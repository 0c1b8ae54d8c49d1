"""python -m benchmarks.allreduce: sums over several hosts against the limit of the network.

Hosts with shaped links on this machine (needs root and iproute2; see shaped_hosts.py). A sum of M
bytes over N hosts moves at least 2 (N-1)/N M bytes out of each host and into each (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009); the least time
is that by the goodput of a plain TCP stream measured beside it. hvps's backend is measured as it is
started by hvps launch, by plain mpirun and by horovodrun, and Horovod alone by plain horovodrun.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ps_network import measure_goodput
from benchmarks.shaped_hosts import ShapedHosts, unavailable
from hvps.backends.trial import MARK, repetitions, report, timed

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
WAYS = ("hvps launch", "hvps launch --gloo", "mpirun", "horovodrun", "horovodrun --gloo", "stock")
_LIMIT_S = 240


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--stock", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stock:
        return stock([int(size) for size in options.stock.split(",")])
    if options.start:
        way, number, sizes = options.start
        return subprocess.run(command(way, int(number), sizes)).returncode
    reason = unavailable()
    if reason:
        print(f"skipped: {reason}")
        return 0
    for number in options.hosts:
        with ShapedHosts(number, options.rate) as hosts:
            goodput = measure_goodput(hosts)
            print(f"{number} hosts, goodput {goodput / 1e6:.1f} MB/s", flush=True)
            for way in options.ways:
                measured = measure(hosts, way, [m * 1_000_000 for m in options.megabytes])
                print(f"  {way:<20}{describe(measured, number, goodput)}", flush=True)
    return 0


def describe(seconds: dict[int, float] | str, hosts: int, goodput: float) -> str:
    """Least time by time, for each size."""
    if isinstance(seconds, str):
        return seconds
    return "  ".join(
        f"{size // 1_000_000} MB {2 * (hosts - 1) / hosts * size / goodput / took:.3f}"
        f" ({took * 1e3:,.0f} ms)"
        for size, took in seconds.items()
    )


def measure(hosts: ShapedHosts, way: str, sizes: Sequence[int]) -> dict[int, float] | str:
    """Median seconds by size; or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder) / "bin"
        programs.mkdir()
        hosts.make_ssh(programs / "ssh")
        starter = [sys.executable, "-m", "benchmarks.allreduce", "--start", way]
        process = hosts.popen(
            0,
            [*starter, str(hosts.number), ",".join(map(str, sizes))],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{programs}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "TF_CPP_MIN_LOG_LEVEL": "2",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate()
    for line in output.splitlines():
        _, mark, text = line.partition(f"{MARK} {{")  # launchers put words of their own around it
        if mark:
            found, _ = json.JSONDecoder().raw_decode("{" + text)
            return {int(size): took for size, took in found["seconds"].items()}
    return "failed: " + " / ".join(output.strip().splitlines()[-3:])


def command(way: str, number: int, sizes: str) -> list[str]:
    """What starts the ranks, one on each host; runs on the first."""
    slots = ",".join(f"hv{i}:1" for i in range(number))
    program = [sys.executable, "-m", "hvps.backends.trial", sizes]
    if way.startswith("hvps launch"):
        from hvps.hosts import parse_hosts
        from hvps.mpirun import horovodrun_command, mpirun_command
        from hvps.site import Site

        site = Site(parse_hosts(slots), None, "horovod")
        site.meet()
        start = horovodrun_command if "--gloo" in way else mpirun_command
        return start(number, program, site)
    if way == "mpirun":
        plain = ["mpirun", "-np", str(number), "-H", slots, "--mca", "plm_rsh_agent", "ssh"]
        return [*plain, "-x", "PYTHONPATH", "-x", "PATH", "--prefix", str(BIN.parent), *program]
    if way == "stock":
        program = [sys.executable, "-m", "benchmarks.allreduce", "--stock", sizes]
    gloo = ["--gloo"] if "--gloo" in way else []
    return ["horovodrun", *gloo, "-np", str(number), "-H", slots, *program]


def stock(sizes: Sequence[int]) -> int:
    """Horovod alone, as its users write it."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    seconds = {}
    for size in sizes:
        tensor = tf.ones([size // 4])

        @tf.function
        def add(values: tf.Tensor, name: str = f"stock_{size}") -> tf.Tensor:
            return hvd.allreduce(values, op=hvd.Sum, name=name)[-1]

        def step(add: Any = add, tensor: Any = tensor) -> None:
            float(add(tensor))

        step()
        once = max(hvd.allgather_object(timed(step)))
        times = [timed(step) for _ in range(repetitions(once))]
        seconds[size] = max(hvd.allgather_object(statistics.median(times)))
    if hvd.rank() == 0:
        report(hvd.size(), "horovod", seconds)
        time.sleep(0.5)  # so that the line is out before the launcher ends
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
