"""What asynchronous, bounded and uneven training promise: nothing lost, nothing twice, no lead."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.ps_cluster import (
    QUIET,
    PsCluster,
    new_tasks,
    run_locally,
    run_ps_cases,
    state_of,
)
from tests.launching import largest_difference, result_of

RUNNABLE = [
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion"),
    *("muon", "nadam", "rmsprop", "sgd", "schedulefreeadamw"),
]


def counts_of(run: Path) -> np.ndarray:
    """How often each example was used in updates of 8 examples at rate 1."""
    return -8.0 * state_of(run)["model/count/kernel"][:, 0]


@pytest.mark.timeout(240)
def test_no_update_is_lost(tmp_path: Path) -> None:
    """4 workers, 1,000 updates: weights, momentum and step are those of one process, exactly."""
    common = ["task=tests.tasks:Constant", "train.steps=1000", "train.global_batch=8"]
    momentum = ["optimizer.name=sgd", "optimizer.learning_rate=0.001", "optimizer.momentum=0.9"]
    cases = {
        "small": {"overrides": momentum},
        "split": {"overrides": [*momentum, "task_args.size=600000", "train.steps=200"]},
    }
    asynchronous = {
        "small": {"overrides": [*momentum, "backend.worker_steps=[250,250,250,250]"]},
        "split": cases["split"],
        "in_flight": {"overrides": [*momentum, "backend.pipeline=3"]},
        "in_graph": {"overrides": [*momentum, "backend.replication=in_graph"]},
        "bounded": {"overrides": [*momentum, "backend.update=bounded"]},
    }
    local = run_locally(tmp_path / "local", cases, common)
    runs = run_ps_cases(tmp_path / "ps", asynchronous, common, workers=4)
    for name, case in asynchronous.items():
        reference = state_of(local / ("split" if name == "split" else "small"))
        steps = 200 if name == "split" else 1000
        result = result_of(runs / name)
        assert result["steps"] == steps, name
        assert int(state_of(runs / name)["optimizer/sgd/iteration"]) == steps
        assert largest_difference(reference, state_of(runs / name)) == 0.0, name
        assert result["lost_updates"] == 0
        assert sum(result["worker_steps"]) == steps
        assert sum(result["staleness"]["histogram"].values()) == steps
        assert case
    assert result_of(runs / "small")["worker_steps"] == [250, 250, 250, 250]
    assert result_of(runs / "small")["staleness"]["max"] > 0  # they did overlap
    shares = result_of(runs / "split")["bytes_by_ps"]
    assert max(shares) <= 1.01 * sum(shares) / 2


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_every_optimizer(tmp_path: Path) -> None:
    """One worker that updates alone, on two ps, is one process: whatever state an optimizer has."""
    common = ["task=tests.tasks:Regression", "train.steps=20", "train.global_batch=40"]
    cases = {name: {"overrides": [f"optimizer.name={name}"]} for name in RUNNABLE}
    cases["decayed"] = {"overrides": ["optimizer.name=sgd", "optimizer.weight_decay=0.1"]}
    cases["overwritten"] = {
        "overrides": ["optimizer.use_ema=true", "optimizer.ema_overwrite_frequency=5"]
    }
    cases["gathered"] = {"overrides": ["optimizer.gradient_accumulation_steps=4"]}
    local = run_locally(tmp_path / "local", cases, common)
    runs = run_ps_cases(tmp_path / "ps", cases, common, workers=1)
    for name in cases:
        difference = largest_difference(state_of(local / name), state_of(runs / name))
        print(f"{name:>20}: largest difference {difference:.2e}")
        # How TensorFlow arranges a product of three, or the sums in Muon's matrix products.
        rounded = name in ("muon", "decayed")
        assert difference <= (1e-6 if rounded else 0.0), name


@pytest.mark.timeout(240)
def test_every_example_once_whatever_the_workers_do(tmp_path: Path) -> None:
    """Uneven steps and uneven data; each example in each of the 3 epochs once."""
    common = [
        "task=tests.tasks:Counting",
        "optimizer.name=sgd",
        "optimizer.learning_rate=1.0",
        "train.global_batch=8",
    ]
    epochs = ["task_args.examples=40", "train.epochs=3"]  # 15 steps
    uneven = ["task_args.examples=1304", "train.epochs=1"]  # 163 steps
    sync = "backend.update=sync"
    cases = {
        "async": {"overrides": epochs},
        "async_uneven": {"overrides": [*uneven, "backend.worker_steps=[100,63]"]},
        "sync_uneven": {"overrides": [*uneven, sync, "backend.worker_steps=[163,100]"]},
        "sync_chief_first": {"overrides": [*uneven, sync, "backend.worker_steps=[100,163]"]},
        "bounded": {"overrides": [*epochs, "backend.update=bounded", "backend.max_staleness=0"]},
        "bounded_uneven": {
            "overrides": [*uneven, "backend.update=bounded", "backend.worker_steps=[100,63]"]
        },
        "sync": {"overrides": [*epochs, sync]},
        "in_graph": {"overrides": [*epochs, sync, "backend.replication=in_graph"]},
        "in_graph_async": {"overrides": [*epochs, "backend.replication=in_graph"]},
    }
    for kind in ("indexable", "dataset", "stream"):
        for update in ("async", "sync"):
            # 16 examples for each worker that reads a dataset by itself, in whole batches.
            size = ["task_args.examples=32"] if kind != "indexable" else []
            overrides = [*epochs, *size, f"task_args.kind={kind}", f"backend.update={update}"]
            cases[f"{kind}_{update}"] = {"overrides": overrides}
    runs = run_ps_cases(tmp_path, cases, common)
    for name in cases:
        expected = 1.0 if "uneven" in name or "first" in name else 3.0
        np.testing.assert_allclose(counts_of(runs / name), expected, rtol=1e-5, err_msg=name)
    for name in ("async_uneven", "bounded_uneven"):
        assert result_of(runs / name)["worker_steps"] == [100, 63]
    assert result_of(runs / "sync_uneven")["worker_steps"] == [163, 100]
    assert result_of(runs / "sync_chief_first")["steps"] == 163


@pytest.mark.timeout(240)
def test_nobody_is_further_ahead_than_allowed(tmp_path: Path) -> None:
    """One of three workers is ten times slower; the lead is read off what each has begun."""
    common = [
        *QUIET,
        "task=tests.tasks:Paced",
        "optimizer.name=sgd",
        "train.global_batch=8",
        "train.steps=60",
        "backend.update=bounded",
    ]
    bounds = (0, 1, 4)
    cases = {f"s{s}": {"overrides": [f"backend.max_staleness={s}"]} for s in bounds}
    cases["free"] = {"overrides": ["backend.update=async", "backend.max_staleness=1"]}
    given = {"tasks": new_tasks(1, 3), "cases": cases, "common": common}
    (tmp_path / "cases.json").write_text(json.dumps(given))
    cluster = PsCluster(tmp_path, given["tasks"], ["cases.json"], "tests.distributed.ps_cases")
    try:
        cluster.start("ps 0")
        for worker, pause in enumerate((0.0005, 0.0005, 0.005)):
            cluster.start(f"worker {worker}", env={"HVPS_TEST_PAUSE": str(pause)})
        assert set(cluster.wait(220).values()) == {0}, cluster.outputs
    finally:
        cluster.end()
    for bound in bounds:
        result = result_of(tmp_path / "runs" / f"s{bound}")
        assert result["max_lead"] == bound
        lead = lead_of(tmp_path / "runs" / f"s{bound}")
        assert lead <= bound, (bound, lead)
        assert result["steps"] == 60
        assert result["lost_updates"] == 0


def lead_of(run: Path) -> int:
    """Largest number of steps that a worker which began a step had finished more than another,
    by the times in the workers' own logs."""
    events: list[tuple[str, bool, int]] = []
    for log in (run / "logs").glob("worker-*.log"):
        worker = int(log.stem.rpartition("-")[2])
        for line in log.read_text().splitlines():
            for kind in ("has finished", "begins"):
                if f" {kind} step " in line:
                    # Of the same millisecond, what was finished comes first.
                    events.append((" ".join(line.split()[:2]), kind == "begins", worker))
    assert events
    finished = {worker: 0 for _, _, worker in events}
    totals = {w: sum(not begins and v == w for _, begins, v in events) for w in finished}
    lead = 0
    for _, begins, worker in sorted(events):
        if begins:
            others = [n for w, n in finished.items() if w != worker and n < totals[w]]
            lead = max([lead, *(finished[worker] - n for n in others)])
        else:
            finished[worker] += 1
    return lead


@pytest.mark.timeout(180)
def test_backup_workers(tmp_path: Path) -> None:
    """Two of three gradients make a round; the slow worker's are dropped, and counted as its."""
    common = [
        *QUIET,
        "task=tests.tasks:Paced",
        "optimizer.name=sgd",
        "train.global_batch=12",
        "train.steps=60",
        "backend.update=sync",
        "backend.backup_workers=1",
    ]
    given = {"tasks": new_tasks(2, 3), "cases": {"backup": {"overrides": []}}, "common": common}
    (tmp_path / "cases.json").write_text(json.dumps(given))
    cluster = PsCluster(tmp_path, given["tasks"], ["cases.json"], "tests.distributed.ps_cases")
    try:
        cluster.start("ps 0", "ps 1")
        for worker, pause in enumerate((0.001, 0.001, 0.05)):
            cluster.start(f"worker {worker}", env={"HVPS_TEST_PAUSE": str(pause)})
        assert set(cluster.wait(160).values()) == {0}, cluster.outputs
    finally:
        cluster.end()
    result = result_of(tmp_path / "runs" / "backup")
    assert result["steps"] == 60
    assert sum(result["worker_steps"]) == 2 * 60
    assert result["dropped_gradients"][2] > 0
    assert result["worker_steps"][2] < 30


@pytest.mark.timeout(180)
def test_statistics_move_and_masks_differ(tmp_path: Path) -> None:
    common = ["task=tests.tasks:Watched", "train.global_batch=16", "train.steps=12", "log.every=1"]
    cases = {
        "async": {"overrides": ["backend.worker_steps=[6,6]"]},
        "sync": {"overrides": ["backend.update=sync"]},
    }
    runs = run_ps_cases(tmp_path, cases, common)
    for update in cases:
        state = state_of(runs / update)
        moved = state["model/batch_normalization/moving_mean"]
        # After 12 steps of momentum 0.99 towards a mean of 3.
        np.testing.assert_allclose(moved, 3.0 * (1 - 0.99**12), rtol=0.2, err_msg=update)
        lines = (runs / update / "metrics.jsonl").read_text().splitlines()
        losses = [record["loss"] for record in map(json.loads, lines)]
        assert len(set(losses)) == len(losses) > 4, update
