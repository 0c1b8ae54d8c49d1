"""python -m tests.torture.matrix: who is hit, by what, and when; and how the job ends.

Each cell is a job of its own that trains until its root is at an instant; then one process gets a
signal. The job must end within a deadline and with the exit code that is specified, name who is
gone, and leave no process and no damaged checkpoint; resumed, the run must come to the result of
one that was never disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvps.checkpoint import Checkpoint, latest_checkpoint, list_checkpoints
from hvps.ports import split_address
from tests.launching import BIN, Job, ranks, result_of, start, wait_until_gone
from tests.torture.fork_server import ForkServer
from tests.torture.task import INSTANTS

START_TIMEOUT = 180
STALL = 10  # backend.stall_timeout
DEADLINES = {"SIGKILL": 40, "SIGTERM": 50, "SIGSTOP": STALL + 50}
VICTIMS = {
    "allreduce": ("rank 0", "rank 1"),
    "ps-async": ("worker 0", "worker 1", "ps 0", "ps 1"),
    "ps-sync": ("worker 0", "worker 1", "ps 0", "ps 1"),
}
TASK = [
    "task=tests.torture.task:Instants",
    "run.name=it",
    "train.epochs=2",
    "train.global_batch=16",
    "train.eval_every=20",
    "optimizer.name=sgd",
    "optimizer.momentum=0.9",
    "optimizer.learning_rate=0.01",
    "checkpoint.every_steps=5",
    "checkpoint.keep=50",
    "log.tensorboard=false",
    "log.progress=off",
    "log.every=1",
]
STEPS = 50
PAUSE = "0.005"  # seconds for each example: training lasts longer than a save does
# What is said of a task with which something is wrong.
_WRONG = "(killed|stands still|stood still|gone|lost|did not|still running|failed)"


@dataclass(frozen=True)
class Cell:
    kind: str
    victim: str
    signal: str
    instant: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.victim}, {self.signal}, {self.instant}"

    @property
    def tolerated(self) -> bool:
        """Training is to go on without it."""
        return self.kind == "ps-async" and self.victim == "worker 1"


def cells() -> list[Cell]:
    return [
        Cell(kind, victim, number, instant)
        for kind, victims in VICTIMS.items()
        for victim in victims
        for number in DEADLINES
        for instant in INSTANTS
    ]


def run_cell(cell: Cell, folder: Path, server: ForkServer, reference: dict[str, np.ndarray]) -> str:
    """What happened, in a few words: exit code, seconds after the signal, and the step of the last
    checkpoint, from which one process has then gone on.

    Raises:
        AssertionError: it is not what is specified; says what.
    """
    command = command_of(cell.kind, [*TASK, f"backend.stall_timeout={STALL}"])
    job = start(command, folder, {"HVPS_TEST_INSTANT": cell.instant, "HVPS_TEST_PAUSE": PAUSE})
    try:
        marker = folder / f"at.{cell.instant}"
        job.wait_for(marker.exists, START_TIMEOUT, f"instant {cell.instant}")
        pid = job.wait_for(lambda: pid_of(job, cell.victim), 20, f"process of {cell.victim}")
        addresses = addresses_of(job)
        os.kill(pid, getattr(signal, cell.signal))
        hit = time.monotonic()
        (folder / "go").touch()
        code = job.wait(DEADLINES[cell.signal])
        seconds = time.monotonic() - hit
        check_code(cell, code, job)
        wait_until_gone(job)
        heard = [address for address in addresses if listens(address)]
        assert not heard, f"still listened at: {heard}"
        before = last_step(folder)
    finally:
        job.end()
    check_checkpoints(folder)
    check_resumed(cell, folder, server, reference)
    further = how_it_went_on(cell, code, before)
    return f"exit code {code} after {seconds:.1f} s, resumed from step {before}{further}"


def command_of(kind: str, arguments: list[str]) -> list[str]:
    if kind == "allreduce":
        return ranks(2, [*arguments, "backend.kind=allreduce"])
    number = ["backend.kind=ps", "backend.num_ps=2", "backend.num_workers=2"]
    update = f"backend.update={kind.partition('-')[2]}"
    return [str(BIN / "hvps"), "launch", *number, update, *arguments]


def pid_of(job: Job, victim: str) -> int | None:
    """The process of a rank, by its environment, or of a task, by its command."""
    role, _, index = victim.partition(" ")
    for pid in job.members():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"hvps.train" not in command or b"mpirun" in command[0]:
                continue
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if role == "rank" and f"OMPI_COMM_WORLD_RANK={index}".encode() in environment:
                return pid
            wanted = [b"--role", role.encode(), b"--index", index.encode()]
            if role != "rank" and command[-5:-1] == wanted:
                return pid
    return None


def check_code(cell: Cell, code: int, job: Job) -> None:
    output = job.output
    if cell.signal == "SIGTERM":
        # Before anybody listens for it, SIGTERM ends a process like SIGKILL; at the end the
        # work is done before anybody can agree on a stop.
        allowed = {143} | ({0} if cell.instant in ("evaluation", "end") else set())
        allowed |= {1, 143} if cell.instant == "before" else set()
        assert code in allowed, f"exit code {code}, not {sorted(allowed)}\n{output[-3000:]}"
        return
    if cell.tolerated and code == 0:
        assert last_step(job.cwd) == STEPS, f"exit code 0 after step {last_step(job.cwd)}"
        return
    if code == 0 and cell.instant == "end":
        return  # all was done, and nobody needed it any more
    assert code not in (0, 2), f"exit code {code}\n{output[-3000:]}"
    assert is_named(cell, output), f"{cell.victim} is not named\n{output[-6000:]}"


def is_named(cell: Cell, output: str) -> bool:
    """Whether somebody says what is wrong with the victim; each line begins with who says it."""
    if cell.kind == "allreduce":
        rank = cell.victim.removeprefix("rank ")
        dead = rf"process rank {rank} with PID .* signal 9"
        return bool(re.search(dead if cell.signal == "SIGKILL" else r"rank \d waited", output))
    text = re.sub(r"^\[[a-z]+ \d+\] ", "", output, flags=re.MULTILINE)
    return bool(re.search(rf"\b{cell.victim}\b.*\b{_WRONG}|without .*\b{cell.victim}\b", text))


def how_it_went_on(cell: Cell, code: int, step: int) -> str:
    if cell.tolerated and cell.signal != "SIGTERM":
        return ", the others finished" if code == 0 else ", all ended"
    return ", nothing saved" if not step else ""


def addresses_of(job: Job) -> set[str]:
    """Where the tasks of a cluster listen, as their commands say."""
    found: set[str] = set()
    for pid in job.members():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            found.update(re.findall(r"127\.0\.0\.1:\d+", words))
    return found


def listens(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), timeout=1).close()
    except OSError:
        return False
    return True


def last_step(folder: Path) -> int:
    """Of the last checkpoint, 0 if there is none."""
    found = latest_checkpoint(folder / "runs" / "it" / "checkpoints")[0]
    return found.step if found else 0


def check_checkpoints(folder: Path) -> None:
    for found in list_checkpoints(folder / "runs" / "it" / "checkpoints"):
        assert isinstance(found, Checkpoint), str(found)
        found.verify()


def check_resumed(
    cell: Cell, folder: Path, server: ForkServer, reference: dict[str, np.ndarray]
) -> None:
    life = server.start([*TASK, "backend.kind=local"], folder)
    code = life.wait(180)
    assert code == 0, f"resumed: exit code {code}\n{life.output[-3000:]}"
    result = result_of(folder / "runs" / "it")
    assert (result["steps"], result["examples"]) == (STEPS, 800), result
    if cell.kind == "ps-async":  # its result depends on who was faster
        return
    state = final_state(folder)
    assert state.keys() == reference.keys()
    worst = max(
        float(np.max(np.abs(state[k].astype(np.float64) - reference[k]), initial=0.0))
        for k in state
        if "seed" not in k
    )
    assert worst <= 1e-6, f"differs by {worst:.1e} from the undisturbed run"


def final_state(folder: Path) -> dict[str, np.ndarray]:
    found, passed = latest_checkpoint(folder / "runs" / "it" / "checkpoints")
    assert found is not None
    assert not passed
    return found.arrays()


def run_cells(wanted: list[Cell]) -> Iterator[tuple[Cell, bool, str]]:
    """(cell, passed, what happened) of each."""
    server = ForkServer()
    with tempfile.TemporaryDirectory(prefix="hvps-matrix-") as base:
        undisturbed = Path(base, "undisturbed")
        undisturbed.mkdir()
        life = server.start([*TASK, "backend.kind=local"], undisturbed)
        assert life.wait(180) == 0, life.output
        reference = final_state(undisturbed)
        for i, cell in enumerate(wanted):
            folder = Path(base, str(i))
            folder.mkdir()
            try:
                yield cell, True, run_cell(cell, folder, server, reference)
            except AssertionError as err:
                yield cell, False, str(err)
            shutil.rmtree(folder, ignore_errors=True)


def table(found: dict[Cell, tuple[bool, str]]) -> str:
    """Markdown: a row for each kind, victim and signal, a column for each instant."""
    names = {"before": "before the first step", "step": "in a step", "save": "in a save"}
    names |= {"evaluation": "in evaluation", "end": "at the end"}
    lines = ["| job, victim, signal | " + " | ".join(names[i] for i in INSTANTS) + " |"]
    lines.append("| --- " * (len(INSTANTS) + 1) + "|")
    rows = dict.fromkeys((c.kind, c.victim, c.signal) for c in found)
    for kind, victim, number in rows:
        row = []
        for instant in INSTANTS:
            passed, text = found.get(Cell(kind, victim, number, instant), (True, ""))
            row.append(text if passed else "**failed**")
        lines.append(f"| {kind}, {victim}, {number} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default="*", help="a pattern: 'ps-sync, ps 1, *'")
    parser.add_argument("--only", default=",".join(VICTIMS), help="kinds, with commas between them")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and nothing is left behind
    kinds = options.only.split(",")
    wanted = [c for c in cells() if c.kind in kinds and fnmatch.fnmatch(str(c), options.cells)]
    found: dict[Cell, tuple[bool, str]] = {}
    for cell, passed, text in run_cells(wanted):
        found[cell] = passed, text
        print(f"{'ok    ' if passed else 'FAILED'} {cell}: {text}", flush=True)
        if options.out:
            options.out.write_text(table(found) + "\n")
    print(table(found))
    failed = sum(not passed for passed, _ in found.values())
    print(f"{len(found) - failed} of {len(found)} cells as specified")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
