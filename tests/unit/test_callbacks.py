"""Reasons to stop: early stopping and a loss that is no number."""

from __future__ import annotations

import json
import math

import pytest

from hvps.callbacks import EarlyStopping, Monitor, check_finite
from hvps.config import EarlyStopConfig
from hvps.errors import EXIT_FAILURE, ConfigError, TrainingError


def stops_at(
    values: list[float],
    *,
    monitor: str = "loss",
    mode: str = "auto",
    patience: int = 1,
    min_delta: float = 0.0,
) -> int | None:
    """Index of the evaluation after which training stops."""
    config = EarlyStopConfig.model_validate(
        {"monitor": monitor, "mode": mode, "patience": patience, "min_delta": min_delta}
    )
    stopping = EarlyStopping(config, ["loss", monitor])
    for index, value in enumerate(values):
        if stopping({"loss": -1.0, monitor: value}):
            return index
    return None


def test_off_by_default() -> None:
    stopping = EarlyStopping(EarlyStopConfig(), [])
    assert not any(stopping({"loss": 1.0}) for _ in range(100))
    assert not stopping({})


def test_a_loss_that_rises_stops() -> None:
    assert stops_at([3.0, 2.0, 1.0, 1.5, 1.2]) == 3
    assert stops_at([3.0, 2.0, 1.0, 0.5]) is None


def test_standing_still_is_no_improvement() -> None:
    assert stops_at([1.0, 1.0]) == 1
    assert stops_at([0.5, 0.5], mode="max", monitor="score") == 1


def test_patience_counts_evaluations_since_the_best() -> None:
    assert stops_at([1.0, 2.0, 2.0, 2.0], patience=3) == 3
    assert stops_at([1.0, 2.0, 1.5, 0.9, 2.0, 2.0], patience=3) is None
    # Better than the one before is not enough: it is compared with the best.
    assert stops_at([1.0, 5.0, 4.0, 3.0], patience=3) == 3
    # An improvement starts the count anew.
    assert stops_at([1.0, 2.0, 0.5, 2.0, 2.0], patience=2) == 4


def test_max_mode() -> None:
    assert stops_at([0.1, 0.2, 0.3, 0.25], monitor="score", mode="max") == 3
    assert stops_at([0.3, 0.2], monitor="accuracy", mode="min") is None
    assert stops_at([0.2, 0.3], monitor="accuracy", mode="min") == 1


def test_min_delta_is_the_smallest_change_that_counts() -> None:
    assert stops_at([1.0, 0.95, 0.89], min_delta=0.1, patience=2) is None
    assert stops_at([1.0, 0.95, 0.91], min_delta=0.1, patience=2) == 2
    assert stops_at([0.5, 0.55], min_delta=0.1, monitor="accuracy") == 1
    assert stops_at([0.5, 0.65], min_delta=0.1, monitor="accuracy") is None


@pytest.mark.parametrize(
    "monitor",
    [
        "accuracy",
        "val_acc",
        "AUC",
        "auc",
        "top_k",
        "Precision",
        "recall",
        "f1",
        "mean_iou",
        "r2_score",
        "val_top_k_accuracy",
    ],
)
def test_auto_knows_what_should_grow(monitor: str) -> None:
    assert stops_at([0.1, 0.2, 0.3], monitor=monitor) is None
    assert stops_at([0.3, 0.2], monitor=monitor) == 1


# Parts of words say nothing: "iou" in "previous", "acc" in "vacc". An error of what should grow is
# an error.
@pytest.mark.parametrize(
    "monitor",
    [
        "loss",
        "mae",
        "mean_squared_error",
        "perplexity",
        "previous_error",
        "vaccine_mae",
        "precision_loss",
        "accuracy_error",
        "binary_crossentropy",
    ],
)
def test_auto_takes_everything_else_for_an_error(monitor: str) -> None:
    assert stops_at([0.3, 0.2, 0.1], monitor=monitor) is None
    assert stops_at([0.2, 0.3], monitor=monitor) == 1


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_no_improvement(mode: str) -> None:
    assert stops_at([1.0, math.nan, math.nan], mode=mode, patience=2, monitor="score") == 2
    assert stops_at([math.nan, 1.0], mode=mode, patience=2, monitor="score") is None


def test_an_unknown_metric_names_the_known_ones() -> None:
    config = EarlyStopConfig(monitor="acuracy", patience=2)
    with pytest.raises(ConfigError, match=r"train.early_stop.monitor") as caught:
        EarlyStopping(config, ["loss", "accuracy"])
    assert caught.value.rule == "one of loss, accuracy"
    assert caught.value.received == "'acuracy'"
    assert caught.value.do


def vector_stopping(monitor: str) -> EarlyStopping:
    """Of an evaluation whose metric f1 gives a vector."""
    return EarlyStopping(EarlyStopConfig(monitor=monitor, patience=1), ["loss", "f1"])


def test_an_entry_of_a_vector_can_be_monitored() -> None:
    stopping = vector_stopping("f1/0")
    seen = [stopping({"loss": 1.0, "f1/0": value, "f1/1": 0.0}) for value in (0.1, 0.2, 0.15)]
    assert seen == [False, False, True]


@pytest.mark.parametrize("monitor", ["f1/2", "f1", "f1/macro"])
def test_an_entry_that_is_not_there_is_known_at_the_evaluation(monitor: str) -> None:
    stopping = vector_stopping(monitor)
    with pytest.raises(ConfigError, match=r"train.early_stop.monitor: no such metric") as caught:
        stopping({"loss": 1.0, "f1/0": 0.5, "f1/1": 0.5})
    assert caught.value.rule == "one of loss, f1/0, f1/1"
    assert caught.value.received == repr(monitor)


def test_an_entry_of_no_metric_is_known_at_once() -> None:
    with pytest.raises(ConfigError, match=r"train.early_stop.monitor"):
        vector_stopping("f2/0")


def test_without_evaluation_there_is_nothing_to_monitor() -> None:
    with pytest.raises(ConfigError, match="no evaluation"):
        EarlyStopping(EarlyStopConfig(patience=2), [])


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_ends_the_run(loss: float) -> None:
    with pytest.raises(TrainingError, match="at step 17") as caught:
        check_finite(loss, 17, 1)
    assert caught.value.exit_code == EXIT_FAILURE
    assert caught.value.received == str(loss)
    assert caught.value.rule
    assert caught.value.do


def test_finite_or_skipped_is_fine() -> None:
    check_finite(0.0, 1, 1)
    check_finite(-1e30, 1, 20)
    # Loss scaling skipped all updates: it is still looking for its scale.
    check_finite(math.nan, 1, 0)
    check_finite(math.inf, 1, 0)


def test_less_is_better_for_a_monitor() -> None:
    names = ["loss", "accuracy", "f1"]
    assert Monitor("key", "loss", "auto", names)({"loss": 2.0}) == 2.0
    assert Monitor("key", "accuracy", "auto", names)({"loss": 2.0, "accuracy": 0.5}) == -0.5
    assert Monitor("key", "accuracy", "min", names)({"accuracy": 0.5}) == 0.5
    assert Monitor("key", "loss", "max", names)({"loss": 2.0}) == -2.0
    vector = Monitor("key", "f1/1", "auto", names)
    assert vector({"f1/0": 0.1, "f1/1": 0.9}) == -0.9
    assert vector.name == "f1/1"


def test_a_monitor_speaks_of_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint\.monitor: no such metric") as caught:
        Monitor("checkpoint.monitor", "acuracy", "auto", ["loss", "accuracy"])
    assert caught.value.rule == "one of loss, accuracy"
    with pytest.raises(ConfigError, match="no such metric") as caught:
        Monitor("checkpoint.monitor", "loss", "auto", [])
    assert "there is no evaluation" in str(caught.value.rule)
    monitor = Monitor("checkpoint.monitor", "f1/9", "auto", ["loss", "f1"])
    with pytest.raises(ConfigError, match=r"^checkpoint\.monitor") as caught:
        monitor({"loss": 1.0, "f1/0": 0.5})
    assert caught.value.rule == "one of loss, f1/0"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_early_stopping_goes_on_from_its_state(mode: str) -> None:
    """Wherever it was broken off, the state having been written as JSON."""
    config = EarlyStopConfig.model_validate({"monitor": "score", "mode": mode, "patience": 3})
    values = [1.0, 2.0, 1.5, 0.5, 2.5, 2.5, 2.4, 0.5, 2.5, 2.5]
    whole = EarlyStopping(config, ["score"])
    expected = [whole({"score": value}) for value in values]
    assert any(expected)
    for broken_off in range(len(values)):
        first, second = (EarlyStopping(config, ["score"]) for _ in range(2))
        found = [first({"score": value}) for value in values[:broken_off]]
        second.state = tuple(json.loads(json.dumps(list(first.state))))
        assert second.is_over == first.is_over
        found += [second({"score": value}) for value in values[broken_off:]]
        assert found == expected


def test_early_stopping_that_is_off_is_never_over() -> None:
    stopping = EarlyStopping(EarlyStopConfig(), [])
    stopping.state = (0.5, 100)  # of a run in which it was on
    assert not stopping.is_over
