"""The exact area under the ROC curve, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sklearn.metrics import roc_auc_score

from hvps.errors import ConfigError
from hvps.exact_metrics import ExactAUC


def area(labels: Any, scores: Any) -> float:
    rows = ExactAUC().per_example(tf.constant(labels), tf.constant(scores))
    return ExactAUC().of_all(np.asarray(rows))


@pytest.mark.parametrize("digits", [0, 1, 2, 9])  # the fewer, the more ties
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_it_is_that_of_scikit_learn(digits: int, shift: float) -> None:
    rng = np.random.default_rng(digits)
    scores = np.round(rng.normal(size=997) + shift, digits).astype(np.float32)
    labels = (scores + rng.normal(size=997) > shift).astype(np.float32)
    wanted = roc_auc_score(labels, scores)
    assert 0.5 < wanted < 1.0
    assert area(labels, scores) == pytest.approx(wanted, abs=1e-15)
    assert area(labels[:, None], scores[:, None]) == area(labels.astype(np.int32), scores)
    order = rng.permutation(997)
    assert area(labels[order], scores[order]) == area(labels, scores)  # to the last bit


def test_known_areas() -> None:
    assert area([0.0, 0.0, 1.0, 1.0], [1.0, 2.0, 3.0, np.inf]) == 1.0
    assert area([1.0, 0.0], [-np.inf, np.inf]) == 0.0
    assert area([0.0, 1.0, 1.0], [0.5, 0.5, 0.5]) == 0.5
    assert area([0.0, 1.0, 0.0], [1.0, 2.0, 3.0]) == 0.5


@pytest.mark.parametrize(
    ("labels", "scores"),
    [([1.0, 1.0], [0.1, 0.2]), ([0.0], [0.1]), ([0.0, 1.0], [0.1, np.nan])],
)
def test_without_pairs_there_is_none(labels: list[float], scores: list[float]) -> None:
    assert np.isnan(area(labels, scores))


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="the metric auc needs one score per example") as caught:
        area([0.0, 1.0], [[0.1, 0.9], [0.2, 0.8]])
    assert caught.value.received == "scores of the shape (2, 2)"
    with pytest.raises(ConfigError, match="is of two kinds of examples") as caught:
        area([0.0, 2.0], [0.1, 0.9])
    assert caught.value.received == "labels from 0 to 2"
