"""The line that training finds again."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvps.task import REQUIRED_METHODS, Task
from hvps.tasks.linear import Linear


def test_the_points_lie_on_the_line() -> None:
    task = Linear(weight=2.0, bias=-1.0, examples=7)
    assert isinstance(task, Task)
    assert all(hasattr(task, name) for name in REQUIRED_METHODS)
    (x, y), (held_out, _) = task.train_data(), task.eval_data()
    assert x.shape == y.shape == held_out.shape == (7, 1)
    assert x.dtype == y.dtype == np.float32
    assert 0 <= x.min() <= x.max() < 1
    np.testing.assert_allclose(y, 2 * x - 1, rtol=1e-6)
    assert not np.intersect1d(x, held_out).size
    np.testing.assert_array_equal(x, task.train_data()[0])  # alike on all workers


def test_the_model_that_has_found_it_has_no_loss() -> None:
    task = Linear()
    x, y = task.eval_data()
    assert x.shape == (100, 1)
    model = task.build_model()
    kernel, bias = model.trainable_variables
    kernel.assign([[0.1]])
    bias.assign([0.3])
    loss = task.loss(tf.constant(y), model(x))
    assert loss.shape == (100,)
    np.testing.assert_allclose(loss, 0.0, atol=1e-12)
    bias.assign([1.3])
    np.testing.assert_allclose(task.loss(tf.constant(y), model(x)), 1.0, rtol=1e-5)
    (metric,) = task.metrics()
    metric.update_state(y, model(x))
    np.testing.assert_allclose(metric.result(), 1.0, rtol=1e-5)
