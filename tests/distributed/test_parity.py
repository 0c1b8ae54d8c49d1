"""The same weights from 1, 2 and 4 ranks, with both engines.

One job per number of ranks and engine trains all cases, 50 steps each. `make parity` runs all cases
on 4 ranks too, where the usual tests run three.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.conftest import run_cases
from tests.launching import largest_difference, result_of, weights_of

STEPS = 50
QUICK = ("sgd", "momentum", "adam")
CASES = {
    "sgd": ["optimizer.name=sgd", "optimizer.learning_rate=0.05"],
    "momentum": ["optimizer.name=sgd", "optimizer.learning_rate=0.05", "optimizer.momentum=0.9"],
    "adam": ["optimizer.name=adam", "optimizer.learning_rate=0.002"],
    "clipped": ["optimizer.name=sgd", "optimizer.learning_rate=0.5", "train.clip_norm=0.1"],
    "scheduled": [
        "optimizer.name=adam",
        "schedule.scaling=sqrt",
        "schedule.base_batch=16",
        "schedule.warmup_steps=10",
        "schedule.decay=cosine",
    ],
    "accumulated": ["optimizer.name=sgd", "optimizer.learning_rate=0.05", "train.accumulate=2"],
    # 200 examples in batches of 64: the last one has 8, in 50 steps it comes 12 times.
    "convolution": ["task=hvps.tasks.digits:Digits", "task_args.dropout=0", "optimizer.name=sgd"],
    "sparse": ["task=tests.tasks:Tokens", "optimizer.name=adam"],
    "sparse_densified": ["task=tests.tasks:Tokens", "task_args.vocabulary=30"],
    "sparse_clipped": [
        "task=tests.tasks:Tokens",
        "optimizer.name=sgd",
        "optimizer.learning_rate=5.0",
        "train.clip_norm=0.01",
    ],
}
COMMON = [
    "task=tests.tasks:Regression",
    f"train.steps={STEPS}",
    "train.global_batch=64",
    "train.eval_every=0",
    "train.check_every=10",
    "log.tensorboard=false",
]
# Largest difference seen: 3.6e-7, with momentum; the order of float32 sums is all that differs.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity") / "1"
    run_cases(folder, 1, CASES, COMMON)
    return folder


def losses_of(run: Path) -> list[float]:
    """The recorded losses, which are of all ranks together."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]


def compare(
    reference: Path, folder: Path, ranks: int, names: Iterable[str] = CASES
) -> dict[str, float]:
    """Check the cases of a job of `ranks` ranks; returns the largest difference of each."""
    differences = {}
    for name in names:
        result = result_of(folder / "runs" / name)
        assert result["backend"] == "allreduce"
        assert result["ranks"] == ranks
        assert result["steps"] == STEPS
        by_rank = [
            dict(np.load(folder / "runs" / name / f"weights-rank-{rank}.npz"))
            for rank in range(ranks)
        ]
        for other in by_rank[1:]:
            assert largest_difference(by_rank[0], other) == 0.0, f"{name}: ranks differ"
        one, many = weights_of(reference / "runs" / name), weights_of(folder / "runs" / name)
        differences[name] = largest_difference(one, many)
        assert losses_of(folder / "runs" / name) == pytest.approx(
            losses_of(reference / "runs" / name), rel=1e-5
        ), name
        print(f"{ranks} ranks {name:>16}: largest difference {differences[name]:.2e}")
        assert differences[name] < TOLERANCE, name
    return differences


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["horovod", "mpi"])
def test_two_ranks_equal_one(reference: Path, tmp_path: Path, engine: str) -> None:
    run_cases(tmp_path, 2, CASES, [*COMMON, f"backend.engine={engine}"])
    compare(reference, tmp_path, 2)


@pytest.mark.timeout(300)
def test_four_ranks_equal_one_quickly(reference: Path, tmp_path: Path) -> None:
    run_cases(tmp_path, 4, {name: CASES[name] for name in QUICK}, COMMON)
    compare(reference, tmp_path, 4, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["horovod", "mpi"])
def test_four_ranks_equal_one(reference: Path, tmp_path: Path, engine: str) -> None:
    run_cases(tmp_path, 4, CASES, [*COMMON, f"backend.engine={engine}"], timeout=600)
    compare(reference, tmp_path, 4)
