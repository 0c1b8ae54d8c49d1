"""python -m benchmarks.ps_network: parameter servers against the limit of the network.

Hosts with shaped links on this machine (needs root and iproute2; see shaped_hosts.py). For 16 MiB
of weights, in one variable or in sixteen, the time of an asynchronous step is compared with the
least that full-duplex links allow, from the goodput of a plain TCP stream measured beside it:
with N workers, P servers and M bytes, a round of one step of every worker takes at least
max(1, N / P) * M / goodput. Bytes on the wire are read from the interfaces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shaped_hosts import ShapedHosts, unavailable

ROOT = Path(__file__).resolve().parent.parent
WEIGHT_BYTES = 16 << 20
PORT = 33400
LAYOUTS = {"1 ps, 3 workers": (1, 3), "2 ps, 2 workers": (2, 2)}


class Wide:
    """16 MiB of weights whose gradients cost next to nothing to compute.

    Args:
        variables: 1, or 16 of 1 MiB.
    """

    def __init__(self, variables: int = 1) -> None:
        self.variables = variables

    def build_model(self) -> Any:
        import keras

        width = 4096 if self.variables == 1 else 512
        inputs = keras.Input((width,))
        x = inputs
        for _ in range(self.variables):
            x = keras.layers.Dense(1024 if self.variables == 1 else 512, use_bias=False)(x)
        return keras.Model(inputs, x)

    def loss(self, y_true: Any, y_pred: Any) -> Any:
        import keras

        return keras.ops.mean(y_pred, axis=-1)

    def metrics(self) -> list[Any]:
        return []

    def train_data(self) -> Any:
        import numpy as np

        width = 4096 if self.variables == 1 else 512
        return np.zeros((8, width), "f"), np.zeros(8, "f")

    def eval_data(self) -> Any:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured, per case")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="default: all")
    parser.add_argument("--variables", type=int, choices=(1, 16), action="append")
    parser.add_argument("--overrides", nargs="*", default=[], help="as for hvps.train")
    parser.add_argument("--watch", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch(options.watch[0], float(options.watch[1]))
        return 0
    reason = unavailable()
    if reason:
        print(f"skipped: {reason}")
        return 0
    for name in options.layout or LAYOUTS:
        ps, workers = LAYOUTS[name]
        for variables in options.variables or (1, 16):
            with ShapedHosts(ps + workers, options.rate) as hosts:
                found = measure(hosts, ps, workers, variables, options)
            print(f"{name}, {variables:>2} variables: {describe(found)}", flush=True)
    return 0


def describe(found: dict[str, float]) -> str:
    return (
        f"round {found['round'] * 1e3:.0f} ms, bound {found['bound'] * 1e3:.0f} ms,"
        f" ratio {found['round'] / found['bound']:.3f}; goodput {found['goodput'] / 1e6:.1f} MB/s;"
        f" bytes per step {found['bytes'] / (2 * WEIGHT_BYTES):.3f} x 2M"
    )


def measure(
    hosts: ShapedHosts, ps: int, workers: int, variables: int, options: argparse.Namespace
) -> dict[str, float]:
    """Train on the hosts for a while; returns seconds, bytes and bytes per second."""
    goodput = measure_goodput(hosts)
    addresses = [f"{hosts.address(i)}:{PORT}" for i in range(ps + workers)]
    cluster = json.dumps({"ps": addresses[:ps], "worker": addresses[ps:]})
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        try:
            for i in range(ps + workers):
                role, index = ("ps", i) if i < ps else ("worker", i - ps)
                command = [
                    *(sys.executable, "-m", "hvps.train", "task=benchmarks.ps_network:Wide"),
                    *(f"task_args.variables={variables}", "train.steps=100000"),
                    *("train.global_batch=1", "optimizer.name=sgd", "backend.kind=ps"),
                    *("train.eval_every=0", "log.progress=off", "log.tensorboard=false"),
                    *("log.every=100000", f"backend.cluster={cluster}", *options.overrides),
                    *("--role", role, "--index", str(index)),
                ]
                processes.append(_start(hosts, i, command, folder, f"{role}-{index}"))
            watcher = [sys.executable, "-m", "benchmarks.ps_network"]
            watcher += ["--watch", addresses[0], str(options.seconds)]
            seen = _start(hosts, 0, watcher, folder, "watch", stdout=subprocess.PIPE, text=True)
            processes.append(seen)
            steps, seconds, moved = _read(seen, hosts, ps, workers, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return {
        "round": workers * seconds / steps,
        "bound": max(1.0, workers / ps) * WEIGHT_BYTES / goodput,
        "goodput": goodput,
        "bytes": moved / steps,
    }


def _start(
    hosts: ShapedHosts, index: int, command: list[str], folder: str, name: str, **keywords: Any
) -> subprocess.Popen[Any]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    keywords.setdefault("stdout", open(f"{folder}/{name}.out", "w"))  # noqa: SIM115
    keywords.setdefault("stderr", open(f"{folder}/{name}.err", "w"))  # noqa: SIM115
    return hosts.popen(index, command, cwd=folder, env=env, **keywords)


def _read(
    seen: subprocess.Popen[Any], hosts: ShapedHosts, ps: int, workers: int, folder: str
) -> tuple[int, float, int]:
    """Steps, seconds, and bytes that the workers received and sent between two steps."""
    counts = []
    marks = []
    assert seen.stdout is not None
    for line in seen.stdout:
        step, at = line.split()
        marks.append((int(step), float(at)))
        counts.append(sum(sum(hosts.bytes_of(i)) for i in range(ps, ps + workers)))
        if len(marks) == 2:
            break
    if len(marks) < 2:
        errors = "\n".join(p.read_text()[-2000:] for p in Path(folder).glob("*.err"))
        raise SystemExit(f"training did not begin:\n{errors}")
    return marks[1][0] - marks[0][0], marks[1][1] - marks[0][1], counts[1] - counts[0]


def watch(address: str, seconds: float) -> None:
    """Print the global step and the time at which it was reached, now and after `seconds`."""
    import tensorflow as tf

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default(), v1.device("/job:ps/task:0"):
        step = v1.get_variable(
            "hvps_0/global_step", shape=[], dtype=tf.int64, use_resource=True,
            initializer=v1.zeros_initializer(),
        ).read_value()  # fmt: skip
    deadline = time.monotonic() + 120
    config = v1.ConfigProto(device_filters=["/job:ps/task:0"])
    session: Any = None

    def at_change(least: int) -> tuple[int, float]:
        nonlocal session
        before = None
        while time.monotonic() < deadline:
            try:
                session = session or v1.Session(f"grpc://{address}", graph=graph, config=config)
                now = int(session.run(step))
            except tf.errors.OpError:
                session = None
                time.sleep(0.1)
                continue
            if before is not None and now > max(before, least):
                return now, time.monotonic()
            before = now
            time.sleep(0.01)
        raise SystemExit("no steps")

    at_change(12)  # all workers have begun
    first = at_change(0)
    print(*first, flush=True)
    time.sleep(seconds)
    print(*at_change(0), flush=True)
    os._exit(0)


def measure_goodput(hosts: ShapedHosts, seconds: float = 3.0) -> float:
    """Payload bytes per second of one TCP stream between two hosts."""
    receive = (
        "import socket,time\n"
        f"s=socket.create_server(('{hosts.address(1)}',{PORT}));print('ready',flush=True)\n"
        "c,_=s.accept();n=0;b=None;end=None\n"
        "while True:\n"
        "    d=c.recv(1<<20)\n"
        "    if not d: break\n"
        "    t=time.monotonic();b=b or t\n"
        f"    if t-b>0.5 and end is None: start,end=t,t+{seconds}\n"
        "    if end:\n"
        "        n+=len(d)\n"
        "        if t>end: print(n/(t-start),flush=True);break\n"
    )
    send = (
        f"import socket\nc=socket.create_connection(('{hosts.address(1)}',{PORT}))\n"
        "d=bytes(1<<20)\n"
        "try:\n"
        "    while True: c.sendall(d)\n"
        "except OSError: pass\n"
    )
    receiver = hosts.popen(1, [sys.executable, "-c", receive], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    sender = hosts.popen(0, [sys.executable, "-c", send])
    try:
        return float(receiver.stdout.readline())
    finally:
        for process in (sender, receiver):
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
