"""How a rank that failed ends: exit code, message, and nobody waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import atexit, logging, sys
from hvps import failure
from hvps.cluster import Cluster
from hvps.errors import ConfigError, PeerLostError, TrainingError
from hvps.log import log_to_file, start_logging
from pathlib import Path

failure._SECONDARY_DELAY_S = 0.0
rank, size = {rank}, {size}
start_logging("info", rank == 0)
log_to_file(Path({log!r}))
atexit.register(print, "farewell")
print("said before")  # still in the buffer when the process is left

def task_code():
    {statement}

with failure.ends_the_job_on_error(Cluster(rank, size, rank, size, "test")):
    task_code()
print("went on")
"""


class Ended:
    """How a process ended, and what it left in its rank's log."""

    def __init__(self, folder: Path, statement: str, rank: int, size: int) -> None:
        log = folder / "rank.log"
        code = PROGRAM.format(rank=rank, size=size, log=str(log), statement=statement)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.log = log.read_text()


def test_without_an_error_nothing_happens(tmp_path: Path) -> None:
    ended = Ended(tmp_path, "pass", rank=0, size=2)
    assert (ended.code, ended.out, ended.err) == (0, "said before\nwent on\nfarewell\n", "")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_is_told_with_its_traceback(tmp_path: Path, rank: int) -> None:
    ended = Ended(tmp_path, "raise OSError('disk on fire')", rank=rank, size=4)
    assert ended.code == 1
    # It leaves at once: MPI's farewell would wait for the others.
    assert ended.out == "said before\n"
    assert ended.err.startswith("Traceback")
    assert "in task_code" in ended.err
    last = ended.err.splitlines()[-1]
    assert last == f"hvps: error: rank {rank} of 4 failed: OSError: disk on fire"
    assert last in ended.log
    assert "in task_code" in ended.log


def test_one_process_has_no_rank(tmp_path: Path) -> None:
    ended = Ended(tmp_path, "raise OSError('disk on fire')", rank=0, size=1)
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == "hvps: error: OSError: disk on fire"


@pytest.mark.parametrize(
    ("error", "code"), [("ConfigError", 2), ("TrainingError", 1), ("PeerLostError", 1)]
)
def test_an_explained_error_has_no_traceback(tmp_path: Path, error: str, code: int) -> None:
    ended = Ended(
        tmp_path, f"raise {error}('wrong', rule='right', received=3, do='mend')", rank=2, size=4
    )
    assert ended.code == code
    assert ended.err == (
        "hvps: error: rank 2 of 4 failed: wrong\n"
        "  rule:     right\n"
        "  received: 3\n"
        "  do:       mend\n"
    )
    assert ended.out == "said before\n"
    assert "rank 2 of 4 failed: wrong" in ended.log


def test_ctrl_c(tmp_path: Path) -> None:
    ended = Ended(tmp_path, "raise KeyboardInterrupt", rank=1, size=2)
    assert ended.code == 130
    assert ended.err == "hvps: error: rank 1 of 2 failed: interrupted\n"


def test_an_exit_code_is_passed_on(tmp_path: Path) -> None:
    ended = Ended(tmp_path, "sys.exit(5)", rank=1, size=2)
    assert (ended.code, ended.err) == (5, "")
