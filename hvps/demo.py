"""python -m hvps.demo: what parameter servers do, on this machine, in three parts.

  1. placement   a constant on a ps, arithmetic on a worker, through the session of another worker
  2. linear      asynchronous training finds the numbers in y = 0.1 x + 0.3
  3. digits      asynchronous training on handwritten digits

Two ps and three workers are started once and do all three. They can be started one by one, too, in
terminals of their own: `python -m hvps.demo --role ps --index 0`, and so on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hvps.cluster import ALONE, Cluster
from hvps.errors import EXIT_OK, ConfigError, TrainingError, report_error
from hvps.overrides import LoadedConfig, load_config
from hvps.ports import check_own_address, free_ports
from hvps.preflight import preflight
from hvps.task_cluster import place_task

if TYPE_CHECKING:
    import keras

    from hvps.backends.ps.control import Control
    from hvps.backends.ps.member import Member
    from hvps.signals import StopSignals
    from hvps.trainer import TrainingResult

NUM_PS, NUM_WORKERS = 2, 3
FIRST_PORT = 33331
_PLACING_WORKER = 2  # whose session computes on worker 1

# What each part trains; runs are named demo-PART-TIME.
_COMMON = ["backend.kind=ps", "train.eval_every=0", "log.tensorboard=false"]
_PARTS = {
    "linear": [
        "task=hvps.tasks.linear:Linear",
        "train.steps=1000",
        "train.global_batch=20",
        "optimizer.name=sgd",
        # Small, for with three workers a gradient is some updates old when it is applied.
        "optimizer.learning_rate=0.1",
        "log.every=200",
    ],
    "digits": [  # as configs/ps.yaml
        "task=hvps.tasks.digits:Digits",
        "train.epochs=40",
        "optimizer.learning_rate=3e-3",
        "schedule.warmup_steps=30",
        "schedule.decay=cosine",
        "log.every=200",
    ],
}
_TOLERANCE = 1e-3
_ACCURACY = 0.97


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration, or one task of it.

    Returns:
        The exit code: 0 when all three parts gave what they should.
    """
    try:
        options = _parse(sys.argv[1:] if argv is None else argv)
        if options.role is None:
            return _start_all(options.cluster)
        addresses = options.cluster or _addresses(_usual_ports())
        parts, cluster = _prepare(addresses, options.role, options.index)
    except ConfigError as err:
        return report_error(err)
    from hvps.failure import ends_the_job_on_error, leave_at_once

    with ends_the_job_on_error(cluster):
        leave_at_once(run_task(parts, cluster))


# --- all tasks ---


def _start_all(given: str | None) -> int:
    from hvps.supervisor import Supervisor

    started = time.monotonic()
    addresses = given or _choose_addresses()
    _, chief = _prepare(addresses, "worker", 0)  # find here, and once, what each task would find
    assert chief.tasks is not None
    command = [sys.executable, "-m", "hvps.demo", "--cluster", addresses]
    commands = {
        f"{role} {index}": [*command, "--role", role, "--index", str(index)]
        for role, those in (("ps", chief.tasks.ps), ("worker", chief.tasks.worker))
        for index in range(len(those))
    }
    code = Supervisor(commands, grace=5.0).run()
    if code == EXIT_OK:
        print(f"hvps.demo: done in {time.monotonic() - started:.1f} s; all processes have ended")
    return code


def _usual_ports() -> list[int]:
    return list(range(FIRST_PORT, FIRST_PORT + NUM_PS + NUM_WORKERS))


def _addresses(ports: Sequence[int]) -> str:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return json.dumps({"ps": addresses[:NUM_PS], "worker": addresses[NUM_PS:]})


def _choose_addresses() -> str:
    """The usual ports, or free ones if one of those is taken."""
    ports = _usual_ports()
    for port in ports:
        try:
            check_own_address(f"127.0.0.1:{port}")
        except ConfigError as err:
            ports = free_ports(len(ports))
            taken = err.what.removeprefix("this task: ")
            print(f"hvps.demo: {taken}; using {', '.join(map(str, ports))}", flush=True)
            break
    return _addresses(ports)


def _prepare(addresses: str, role: str, index: int) -> tuple[dict[str, LoadedConfig], Cluster]:
    """The configuration of each training, and the task among the addresses.

    Raises:
        ConfigError: the addresses are wrong or taken, or the folder for the runs cannot be written.
    """
    common = [*_COMMON, f"backend.cluster={addresses}"]
    parts = {
        # There is no such file, but runs are named after it.
        name: replace(load_config(None, [*common, *own]), path=Path(f"demo-{name}"))
        for name, own in _PARTS.items()
    }
    cluster = place_task(parts["linear"], Cluster(0, 1, 0, 1, ALONE), role, index, env={})
    assert cluster.tasks is not None
    if len(cluster.tasks.worker) <= _PLACING_WORKER:
        raise ConfigError(
            "--cluster: too few workers",
            rule=f"at least {_PLACING_WORKER + 1}: the session of the last computes on another",
            received=f"{', '.join(cluster.tasks.worker)} (command line)",
            do="add addresses, or leave --cluster out",
        )
    for loaded in parts.values():
        preflight(loaded, cluster)
    return parts, cluster


# --- one task ---


def run_task(parts: Mapping[str, LoadedConfig], cluster: Cluster) -> int:
    """From here on TensorFlow is needed."""
    from hvps.runtime import configure_tensorflow, prepare_environment

    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # there may be fewer GPUs than workers
    prepare_environment(cluster)
    config = parts["linear"].config  # in what concerns the cluster all are alike
    devices = configure_tensorflow(config, cluster)

    from hvps.backends.ps.member import Member
    from hvps.backends.ps.serve import serve
    from hvps.signals import StopSignals

    member = Member.start(config, cluster)
    if cluster.role == "ps":
        return serve(member)
    with StopSignals() as signals:
        assert member.control is not None, "only ps 0 has none"
        return _Worker(member, member.control, devices, signals).run(parts)


@dataclass
class _Worker:
    """A worker's way through the parts.

    All workers do the same part at a time: who has the last word in it publishes whether to go on,
    and the others wait for that.
    """

    member: Member
    control: Control
    devices: str
    signals: StopSignals

    @property
    def _chief(self) -> bool:
        return self.member.cluster.is_root

    def run(self, parts: Mapping[str, LoadedConfig]) -> int:
        code, failure, found = EXIT_OK, None, []
        if self.member.cluster.rank == _PLACING_WORKER:
            self._place(parts["linear"].config.backend.stall_timeout)
        goes_on = self.control.lookup(_verdict(1))
        for number, (name, loaded) in enumerate(parts.items(), 2):
            if not goes_on:
                break
            model, result = self._train(number, loaded)
            code = result.exit_code
            if self._chief:
                if code == EXIT_OK:
                    text, failure = _judge(name, model, result)
                    found.append(f"{number}. {name:<9}  {text}")
                    print(f"\n{text}", flush=True)
                self.control.publish(_verdict(number), code == EXIT_OK and failure is None)
            goes_on = self.control.lookup(_verdict(number))
        if self._chief:
            if goes_on:
                placed = "x on ps 0, y on worker 1, session on worker 2"
                print("\n".join(["", f"1. placement  {placed}", *found]), flush=True)
            self.control.call("finish")  # not before: it ends the whole cluster
            self.control.leave()
        else:
            self.control.wait_until_done()
        if failure is not None:
            raise failure
        return code

    def _place(self, timeout: float) -> None:
        from hvps.backends.ps.placement_demo import show_placement

        placed = False
        try:
            self.member.wait_for_workers(timeout)
            lines = show_placement(self.member)
            placed = True
        finally:  # in any case the others hear of it
            if placed:
                _say_title(1, "y = 0.1 x + 0.3: x on ps 0, y on worker 1, session on worker 2")
                print("\n".join(lines), flush=True)
            self.control.publish(_verdict(1), placed)

    def _train(self, number: int, loaded: LoadedConfig) -> tuple[keras.Model, TrainingResult]:
        """As hvps.train does it."""
        from hvps.backends.ps.backend import PsBackend
        from hvps.runtime import reset_keras
        from hvps.session import Session
        from hvps.task import load_task

        if self._chief:
            _say_title(number, f"asynchronous training of {loaded.config.task}")
        reset_keras(loaded.config)
        backend = PsBackend(self.member, loaded.config, run=number)
        session = Session.open(loaded, self.member.cluster, backend)
        trainer = session.trainer(load_task(loaded.config), self.devices, self.signals)
        result = trainer.fit()
        session.finish(trainer.model, result)
        return trainer.model, result


def _verdict(number: int) -> str:
    """Where it is published whether the part was a success."""
    return f"demo/{number}"


def _say_title(number: int, text: str) -> None:
    print(f"\n--- {number} of {1 + len(_PARTS)}: {text}", flush=True)


def _judge(
    name: str, model: keras.Model, result: TrainingResult
) -> tuple[str, TrainingError | None]:
    """What training has found, in words, and the error if that is not what it should find."""
    if name == "linear":
        weight, bias = (float(v.numpy().item()) for v in model.trainable_variables)
        text = f"weight {weight:.4f}, bias {bias:.4f}"
        good = abs(weight - 0.1) <= _TOLERANCE and abs(bias - 0.3) <= _TOLERANCE
        rule = f"weight 0.1 and bias 0.3, within {_TOLERANCE:g}"
    else:
        text = f"accuracy {result.evaluation['accuracy']:.4f}"
        good = result.evaluation["accuracy"] >= _ACCURACY
        rule = f"an accuracy of {_ACCURACY:g} at least"
    if good:
        return text, None
    return text, TrainingError(
        f"{name}: training has not found what it should",
        rule=rule,
        received=f"{text} after {result.steps} steps",
        do="run it again; if it stays so, look at the losses in the run's metrics.csv",
    )


# --- command line ---


class _Parser(argparse.ArgumentParser):
    received = ""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"demo: {message}",
            rule="no arguments, or --role and --index of one task",
            received=f"{self.received} (command line)",
            do="see python -m hvps.demo --help",
        )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m hvps.demo",
        description="Show parameter servers at work: starts two of them and three workers on this"
        " machine, or with --role and --index one of these.",
        allow_abbrev=False,
    )
    parser.add_argument("--role", choices=("ps", "worker"), help="of the task to run")
    parser.add_argument("--index", type=int, help="which task of the role, 0 for the first")
    parser.add_argument(
        "--cluster",
        metavar="ADDRESSES",
        help="of all tasks, '{ps: [HOST:PORT, ...], worker: [...]}'; without it"
        f" 127.0.0.1:{FIRST_PORT} and the next",
    )
    parser.received = shlex.join(argv)
    options = parser.parse_args(argv)
    if (options.role is None) != (options.index is None):
        parser.error("--role and --index come together")
    return options


if __name__ == "__main__":
    sys.exit(main())
