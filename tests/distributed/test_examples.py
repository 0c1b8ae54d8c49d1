"""The example in the README trains, from a folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import ROOT, Job, ranks, result_of


@pytest.mark.timeout(180)
def test_own_model(jobs: Callable[..., Job], tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "own_model.py", tmp_path)
    job = jobs(ranks(2, ["task=own_model:TwoMoons", "optimizer.learning_rate=0.01"]))
    assert job.wait(150) == 0, job.output
    result = result_of(job.run_directory())
    assert result["ranks"] == 2
    assert result["eval"]["accuracy"] > 0.95
    assert result["eval"]["auc"] > 0.98
