"""The traced step, and what cannot be run on parameter servers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvps.backends.ps.drivers import SeedStates, worker_seeds
from hvps.backends.ps.graph import Others
from hvps.backends.ps.optimizers import check_optimizer, updates_elements
from hvps.backends.ps.replica import TracedStep, embedding_tables, owners_of, trace_step
from hvps.errors import ConfigError

v1 = tf.compat.v1


def squared(y: Any, predicted: Any) -> Any:
    return tf.square(y - predicted[:, 0])


def traced(model: keras.Model, x: np.ndarray) -> TracedStep:
    example = (tf.constant(x[:1]), tf.zeros([1]))
    return trace_step(model=model, loss=squared, tables=[], x=example[0], y=example[1], shares=1)


def results(model: keras.Model, step: TracedStep, x: np.ndarray) -> dict[str, Any]:
    """Run the copy of a step in a graph of its own, with the model's values fed."""
    values = {
        "weights": [np.asarray(v) for v in model.trainable_variables],
        "others": [np.asarray(v) for v in model.non_trainable_variables],
        "handles": [],
        "x": x,
        "y": np.zeros(len(x), np.float32),
        "weight": np.ones(len(x), np.float32),
        "examples": np.float32(len(x)),
    }
    with tf.Graph().as_default():
        placed = step.place(tf.nest.map_structure(tf.constant, values), "/cpu:0")
        placed.pop("control")
        with v1.Session() as session:
            found: dict[str, Any] = session.run(placed)
    return found


def test_the_copy_computes_what_the_model_does() -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    x = keras.layers.BatchNormalization()(inputs)
    x = keras.layers.Dropout(0.5)(keras.layers.Dense(8, kernel_regularizer="l2")(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    rows = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    step = traced(model, rows)
    assert step.changed == [True, True, True]  # mean, variance, and the dropout's state
    first = results(model, step, rows)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(squared(0.0, model(rows, training=True))) + sum(model.losses)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    for ours, theirs in zip(first["gradients"], gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for ours, kept in zip(first["others"], model.non_trainable_variables, strict=True):
        np.testing.assert_allclose(ours, np.asarray(kept), rtol=1e-5)


def test_tensors_that_a_layer_keeps_are_constants() -> None:
    inputs = keras.Input((300,))
    scaled = keras.layers.Normalization(mean=[2.0] * 300, variance=[4.0] * 300)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(scaled))
    rows = np.full((2, 300), 4.0, np.float32)
    assert results(model, traced(model, rows), rows)["loss_sum"] == pytest.approx(2 * 300.0**2)


def test_a_variable_that_keras_does_not_know_is_refused() -> None:
    hidden = tf.Variable(tf.ones([300]))
    inputs = keras.Input((300,))
    product = keras.layers.Lambda(lambda x: x * hidden)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(product))
    with pytest.raises(ConfigError, match="variable that is not one of its weights"):
        traced(model, np.ones((1, 300), np.float32))


def test_state_that_cannot_be_averaged_is_refused() -> None:
    class Counter(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(), dtype="int32", trainable=False, name="seen")

        def call(self, x: Any) -> Any:
            self.seen.assign_add(1)
            return x

    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(Counter()(inputs)))
    with pytest.raises(ConfigError, match="seen changes in training and is int32"):
        Others.of(model, traced(model, np.ones((1, 2), np.float32)).changed)


def test_which_embeddings_are_looked_up_by_rows() -> None:
    inputs = keras.Input((3,), dtype="int32")
    plain = keras.layers.Embedding(50, 4)(inputs)
    penalised = keras.layers.Embedding(50, 4, embeddings_regularizer="l2")(inputs)
    model = keras.Model(inputs, keras.layers.Add()([plain, penalised]))
    assert list(embedding_tables(model)) == [0]


def test_rows_belong_to_the_part_that_begins_before_them() -> None:
    owners, local = owners_of(tf.constant([0, 4, 5, 9, 10, 99]), [0, 5, 10])
    assert owners.numpy().tolist() == [0, 0, 1, 1, 2, 2]
    assert local.numpy().tolist() == [0, 4, 0, 4, 0, 89]


def test_optimizers_that_need_all_gradients_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        check_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    assert "LossScaleOptimizer" in str(refused.value)
    assert "Adam, " in str(refused.value)

    class Own(keras.optimizers.SGD):
        def apply(self, *arguments: Any, **keywords: Any) -> None: ...

    with pytest.raises(ConfigError, match="Own cannot be run"):
        check_optimizer(Own())


def test_an_update_step_of_ones_own_is_not_split() -> None:
    class Own(keras.optimizers.SGD):
        pass

    check_optimizer(Own())
    assert not updates_elements(Own())
    assert updates_elements(keras.optimizers.Adam())
    assert not updates_elements(keras.optimizers.Lamb())


def test_steps_in_flight_have_states_of_their_own() -> None:
    seeds = SeedStates([np.array([7, 0], np.uint32)])
    seen: list[list[int]] = []

    def step(states: list[np.ndarray]) -> tuple[None, list[np.ndarray]]:
        seen.append(states[0].tolist())
        if len(seen) == 2:
            seeds.run(step)  # another begins before this one has ended
        return None, [states[0] + np.array([0, 3], np.uint32)]

    for _ in range(3):
        seeds.run(step)
    assert seen == [[7, 0], [7, 3], [7, 6], [7, 9]]
    assert seeds.states[0].tolist() == [7, 12]


def test_workers_draw_numbers_of_their_own() -> None:
    seeds = [np.array([2**32 - 1, 5], np.uint32)]
    assert worker_seeds(seeds, 0)[0].tolist() == seeds[0].tolist()
    assert len({tuple(worker_seeds(seeds, w)[0].tolist()) for w in range(8)}) == 8
