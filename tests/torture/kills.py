"""python -m tests.torture.kills: a short job is killed at random instants, again and again.

Each time its whole group of processes gets SIGKILL and is started again, until it comes to its end;
then another run begins, until all kills are done. After each kill every checkpoint must be
readable, and at the end of each run its state must be, bit by bit, that of one that was never
disturbed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvps.checkpoint import Checkpoint, DamagedCheckpointError, latest_checkpoint, list_checkpoints
from tests.launching import BIN, Job, ranks, result_of, start
from tests.torture.fork_server import ForkServer

TIMEOUT = 240
TASK = [
    "task=tests.tasks:Resumable",
    "task_args.width=60000",
    "train.global_batch=16",
    "train.eval_every=50",
    "optimizer.name=sgd",
    "optimizer.momentum=0.9",
    "optimizer.learning_rate=0.0001",
    "schedule.warmup_steps=20",
    "schedule.decay=cosine",
    "checkpoint.every_steps=1",
    "checkpoint.keep=2",
    "log.tensorboard=false",
    "log.progress=off",
    "backend.stall_timeout=60",
]
STEPS_PER_EPOCH = 13


class Started(Protocol):
    """A job that runs."""

    @property
    def output(self) -> str: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class RealJob:
    """The same as a `Life` of the fork server, for jobs that are started as users do."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def output(self) -> str:
        return self._job.output

    def poll(self) -> int | None:
        return self._job.process.poll()

    def kill(self) -> None:
        while self._job.members():  # one that was just being started is not among them yet
            self._job.end()


@dataclass
class Tally:
    """What was seen.

    Attributes:
        kills: of which `in_save` left a save half done, and `before_any` no checkpoint yet.
        unreadable: checkpoints that could not be read after a kill.
        runs: that came to their end; `unequal` names those whose state is another one.
    """

    kills: int = 0
    in_save: int = 0
    before_any: int = 0
    unreadable: list[str] = field(default_factory=list)
    runs: int = 0
    unequal: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.unreadable and not self.unequal and self.runs > 0

    def table(self, launch: str) -> str:
        rows = {
            "kills": self.kills,
            "in a save": self.in_save,
            "before the first checkpoint": self.before_any,
            "runs finished": self.runs,
            "unreadable checkpoints": len(self.unreadable),
            "equal to the undisturbed run": f"{self.runs - len(self.unequal)} of {self.runs}",
        }
        lines = [f"| {name} | {value} |" for name, value in rows.items()]
        return "\n".join([f"| {launch} | |", "|---|---|", *lines])

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.in_save} of them in a save, {self.before_any} before the"
            f" first checkpoint; {self.runs} runs came to their end; unreadable checkpoints:"
            f" {len(self.unreadable)}, runs with another result: {len(self.unequal)}"
        )


def launcher(kind: str, folder: Path) -> Callable[[Sequence[str]], Started]:
    """How a job is started."""
    if kind == "local":
        server = ForkServer()
        return lambda arguments: server.start([*arguments, "backend.kind=local"], folder)
    if kind == "allreduce":
        return lambda arguments: RealJob(
            start(ranks(2, [*arguments, "backend.kind=allreduce"]), folder)
        )
    further = ["backend.kind=ps", "backend.update=sync", "backend.num_ps=2"]
    command = [str(BIN / "hvps"), "launch", *further]
    return lambda arguments: RealJob(start([*command, *arguments], folder))


def torture(
    folder: Path,
    kills: int,
    *,
    launch: str = "local",
    seed: int = 0,
    epochs: int = 25,
    say: Callable[[str], None] = print,
) -> Tally:
    """Kill a job `kills` times in all; returns what was seen."""
    begin = launcher(launch, folder)
    chance = random.Random(seed)
    common = [*TASK, f"train.epochs={epochs}"]
    reference, startup, length = undisturbed(begin, folder, common)
    say(f"undisturbed: {startup:.1f} s to the first checkpoint, {length:.1f} s in all")
    tally = Tally()
    while tally.kills < kills or not tally.runs:
        name = f"run-{tally.runs}"
        last = TIMEOUT if tally.kills >= kills else None  # nothing more is killed
        live = last or how_long(chance, startup, length)
        if lives_on(begin, [*common, f"run.name={name}"], live):
            assert not last, f"{name} still ran after {TIMEOUT} s"
            look_at(folder / "runs" / name / "checkpoints", tally)
            if tally.kills % 20 == 0 or launch != "local":
                say(str(tally))
            continue
        tally.runs += 1
        if not equal(reference, outcome(folder / "runs" / name)):
            tally.unequal.append(name)
    return tally


def lives_on(
    begin: Callable[[Sequence[str]], Started], arguments: Sequence[str], seconds: float
) -> bool:
    """Start a job; whether it still ran after so long, and was killed."""
    job = begin(arguments)
    try:
        if ended_within(job, seconds):
            assert job.poll() == 0, job.output[-3000:]
            return False
        return True
    finally:
        job.kill()


def how_long(chance: random.Random, startup: float, length: float) -> float:
    """Seconds until the next kill: some soon after the start, most while it trains and saves."""
    if chance.random() < 0.15:
        return chance.uniform(0.0, startup)
    return chance.uniform(0.5 * startup, startup + 0.4 * max(length - startup, 0.5))


def undisturbed(
    begin: Callable[[Sequence[str]], Started], folder: Path, common: Sequence[str]
) -> tuple[dict[str, Any], float, float]:
    """The outcome, the seconds to the first checkpoint, and those to the end."""
    started = time.monotonic()
    job = begin([*common, "run.name=undisturbed"])
    checkpoints = folder / "runs" / "undisturbed" / "checkpoints"
    startup = None
    while job.poll() is None:
        if startup is None and any(checkpoints.glob("step-*")):
            startup = time.monotonic() - started
        if time.monotonic() - started > TIMEOUT:
            job.kill()
            raise AssertionError(job.output[-3000:])
        time.sleep(0.005)
    assert job.poll() == 0, job.output[-3000:]
    assert startup is not None
    return outcome(folder / "runs" / "undisturbed"), startup, time.monotonic() - started


def ended_within(job: Started, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if job.poll() is not None:
            return True
        time.sleep(0.002)
    return False


def look_at(checkpoints: Path, tally: Tally) -> None:
    """After a kill: is every checkpoint readable?"""
    tally.kills += 1
    found = list(list_checkpoints(checkpoints))
    tally.in_save += checkpoints.is_dir() and any(checkpoints.glob(".writing-*"))
    tally.before_any += not found
    for checkpoint in found:
        try:
            if isinstance(checkpoint, DamagedCheckpointError):
                raise checkpoint
            checkpoint.verify()
        except DamagedCheckpointError as err:
            tally.unreadable.append(str(err))


def outcome(run: Path) -> dict[str, Any]:
    """All that two runs must have in common at their end."""
    found, passed = latest_checkpoint(run / "checkpoints")
    assert isinstance(found, Checkpoint)
    assert not passed
    result = result_of(run)
    kept = ("weights_sha256", "steps", "examples", "eval", "stopped_by")
    return {"state": found.arrays(), **{name: result[name] for name in kept}}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    states = a["state"].keys() == b["state"].keys() and all(
        np.array_equal(a["state"][name], b["state"][name]) for name in a["state"]
    )
    return states and all(a[name] == b[name] for name in a if name != "state")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--launch", choices=("local", "allreduce", "ps"), default="local")
    parser.add_argument("--seed", type=int, default=None, help="of the instants; default: random")
    parser.add_argument("--epochs", type=int, default=25, help="length of the job")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and nothing is left behind
    folder = Path(tempfile.mkdtemp(prefix="hvps-torture-"))
    try:
        tally = torture(
            folder,
            options.kills,
            launch=options.launch,
            seed=seed,
            epochs=options.epochs,
            say=lambda text: print(text, flush=True),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(tally.table(options.launch))
    print(f"{time.monotonic() - started:.0f} s")
    for text in [*tally.unreadable, *tally.unequal]:
        print(text)
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
