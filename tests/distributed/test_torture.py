"""A few of the trials of `make torture`, which takes much longer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import Job

Jobs = Callable[..., Job]
TIMEOUT = 180

# In a process of its own: the one that runs the tests may have used TensorFlow, and cannot fork.
CELLS = """
import sys
from tests.torture import matrix

matrix.STALL = 5
cells = [matrix.Cell(*words.split(", ")) for words in sys.argv[1:]]
failed = [f"{cell}: {text}" for cell, passed, text in matrix.run_cells(cells) if not passed]
sys.exit("\\n".join(failed) or 0)
"""


@pytest.mark.timeout(TIMEOUT)
def test_kills_at_random_instants_leave_no_trace(jobs: Jobs) -> None:
    arguments = ["--kills", "20", "--epochs", "15"]
    job = jobs([sys.executable, "-m", "tests.torture.kills", *arguments])
    assert job.wait(TIMEOUT - 10) == 0, job.output


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 120)
def test_every_signal_ends_a_job_as_specified(jobs: Jobs, tmp_path: Path) -> None:
    cells = [
        "allreduce, rank 1, SIGKILL, save",
        "ps-sync, ps 1, SIGKILL, save",
        "ps-sync, ps 1, SIGSTOP, step",
        "ps-sync, worker 1, SIGTERM, step",
    ]
    job = jobs([sys.executable, "-c", CELLS, *cells], env={"TMPDIR": str(tmp_path)})
    assert job.wait(TIMEOUT + 110) == 0, job.output
