"""Every example exactly once per epoch, with its true weight, on real ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.distributed.conftest import run_cases
from tests.launching import result_of, weights_of

EXAMPLES, BATCH = 37, 8  # the last batch has 5: less than two full shares
KINDS = ["arrays", "indexable", "dataset", "stream"]
COMMON = [
    "task=tests.tasks:Counting",
    f"task_args.examples={EXAMPLES}",
    f"train.global_batch={BATCH}",
    "optimizer.name=sgd",
    "optimizer.learning_rate=1.0",
    "train.eval_every=0",
    "log.tensorboard=false",
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "engine"), [(2, "horovod"), pytest.param(4, "mpi", marks=pytest.mark.slow)]
)
def test_each_example_once_per_epoch(tmp_path: Path, ranks: int, engine: str) -> None:
    cases = {f"{kind}-{epochs}": [f"task_args.kind={kind}", f"train.epochs={epochs}"]
             for kind in KINDS for epochs in (1, 3)}  # fmt: skip
    cases["accumulated"] = ["train.accumulate=2", "train.epochs=1"]
    run_cases(tmp_path, ranks, cases, [*COMMON, f"backend.engine={engine}"])
    for name in cases:
        epochs = 3 if name.endswith("3") else 1
        run = tmp_path / "runs" / name
        assert result_of(run)["examples"] == EXAMPLES * epochs, name
        assert result_of(run)["steps"] == 5 * epochs, name
        (weights,) = weights_of(run).values()
        moved = -weights[:, 0].astype(np.float64)
        # Each use moves an example's weight by 1/8, or by 1/5 in the last, smaller batch.
        small_uses = np.round((moved - epochs / 8) / (1 / 5 - 1 / 8))
        np.testing.assert_allclose(moved, (epochs - small_uses) / 8 + small_uses / 5, atol=1e-6)
        assert small_uses.sum() == 5 * epochs, name
        assert ((small_uses >= 0) & (small_uses <= epochs)).all(), name
