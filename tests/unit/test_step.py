"""The body that every backend traces: loss per example, gradients, penalties, tracing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvps.backends.local import LocalBackend
from hvps.batches import Batch, MicroBatch
from hvps.cluster import Cluster
from hvps.errors import ConfigError
from hvps.step import AnyBatch, forward, loss_and_gradients, merge_rows, per_example_loss


@pytest.fixture(autouse=True)
def same_names_and_numbers() -> Iterator[None]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


def squared(y: Any, y_pred: Any) -> Any:
    return tf.square(y - y_pred[:, 0])


def network(*, l2: float | None = None) -> keras.Model:
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(
        4, activation="tanh", kernel_regularizer=keras.regularizers.L2(l2) if l2 else None
    )(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def rows(number: int, seed: int = 1) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, 3)).astype(np.float32)
    return tf.constant(x), tf.constant(np.sin(x.sum(axis=1)))


def gradients(
    model: keras.Model,
    x: tf.Tensor,
    y: tf.Tensor,
    *,
    examples: float,
    shares: int = 1,
    weight: tf.Tensor | None = None,
    optimizer: keras.optimizers.Optimizer | None = None,
    loss: Any = squared,
) -> tuple[list[np.ndarray], float]:
    found, loss_sum = loss_and_gradients(
        model=model,
        optimizer=optimizer or keras.optimizers.SGD(),
        loss=loss,
        x=x,
        y=y,
        weight=tf.ones(len(y)) if weight is None else weight,
        examples=tf.constant(examples, tf.float32),
        shares=shares,
    )
    return [tf.convert_to_tensor(g).numpy() for g in found], float(loss_sum)


def plain_gradients(model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> list[np.ndarray]:
    """Of the mean loss plus penalties, as one would write it down."""
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        objective = tf.reduce_mean(squared(y, model(x, training=True)))
        objective += sum(model.losses)
    return [g.numpy() for g in tape.gradient(objective, variables)]


def assert_close(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


# --- loss per example ---


def test_a_loss_per_example_stays() -> None:
    y = tf.constant([1.0, 2.0])
    value = per_example_loss(lambda y, p: y * p, y, tf.constant([3.0, 5.0]))
    assert value.numpy().tolist() == [3.0, 10.0]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5)])
def test_further_axes_are_averaged(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(size=shape)
    found = per_example_loss(lambda y, p: p, None, tf.constant(values))
    assert found.shape == (2,)
    np.testing.assert_allclose(found, values.reshape(2, -1).mean(axis=1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.int32])
def test_the_loss_is_single_precision(dtype: tf.DType) -> None:
    found = per_example_loss(lambda y, p: p, None, tf.constant([1, 2], dtype))
    assert found.dtype == tf.float32


def test_half_precision_is_widened_before_it_is_averaged() -> None:
    """The sum of 64 values of 4,000 is no float16."""
    found = per_example_loss(lambda y, p: p, None, tf.fill([1, 64], tf.constant(4000, tf.float16)))
    assert found.numpy().tolist() == [4000.0]


def test_one_number_for_all_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task: loss\(\) returned a single number") as caught:
        per_example_loss(lambda y, p: tf.reduce_mean(p), None, tf.ones([4, 1]))
    assert caught.value.rule
    assert caught.value.received == "a scalar"
    assert caught.value.do


# --- gradients ---


def test_one_share_is_the_mean_loss_with_penalties() -> None:
    model = network(l2=0.1)
    x, y = rows(10)
    found, loss_sum = gradients(model, x, y, examples=10)
    assert_close(found, plain_gradients(model, x, y))
    assert loss_sum == pytest.approx(float(tf.reduce_sum(squared(y, model(x)))), rel=1e-6)


@pytest.mark.parametrize("cuts", [(5,), (3, 7), (1, 2, 9), (9,)])
def test_shares_of_any_size_add_up_to_the_whole(cuts: tuple[int, ...]) -> None:
    """The penalty is large: counted twice, or once per example, it would be seen."""
    model = network(l2=10.0)
    x, y = rows(10)
    bounds = [0, *cuts, 10]
    parts = [
        gradients(model, x[a:b], y[a:b], examples=10, shares=len(bounds) - 1)
        for a, b in pairwise(bounds)
    ]
    total = [sum(arrays) for arrays in zip(*(found for found, _ in parts), strict=True)]
    assert_close(total, plain_gradients(model, x, y))
    whole = gradients(model, x, y, examples=10)[1]
    assert sum(loss_sum for _, loss_sum in parts) == pytest.approx(whole, rel=1e-5)


def test_rows_without_weight_do_not_count() -> None:
    model = network(l2=0.1)
    x, y = rows(10)
    weight = tf.constant([1.0] * 6 + [0.0] * 4)
    found, loss_sum = gradients(model, x, y, examples=6, weight=weight)
    assert_close(found, plain_gradients(model, x[:6], y[:6]))
    assert loss_sum == pytest.approx(gradients(model, x[:6], y[:6], examples=6)[1], rel=1e-6)


def test_a_variable_that_is_not_reached_has_a_zero_gradient() -> None:
    inputs = keras.Input((3,))
    used, unused = keras.layers.Dense(1)(inputs), keras.layers.Dense(2)(inputs)
    model = keras.Model(inputs, [used, unused])
    x, y = rows(4)
    found, _ = gradients(model, x, y, examples=4, loss=lambda y, p: squared(y, p[0]))
    by_shape = {g.shape: g for g in found}
    assert len(found) == len(model.trainable_variables) == 4
    assert [g.shape for g in found] == [tuple(v.shape) for v in model.trainable_variables]
    assert np.any(by_shape[(3, 1)])
    assert not np.any(by_shape[(3, 2)])
    assert not np.any(by_shape[(2,)])


def test_a_penalty_per_example_is_added_up() -> None:
    """As Keras's own step does with what `add_loss` was given."""

    class Penalty(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * tf.square(x[:, 0]))
            return x

    inputs = keras.Input((3,))
    hidden = Penalty()(keras.layers.Dense(4, kernel_regularizer="l2")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    x, y = rows(10)
    model(x)
    assert sorted(penalty.shape.rank for penalty in model.losses) == [0, 1]
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        objective = tf.reduce_mean(squared(y, model(x, training=True)))
        objective += sum(tf.reduce_sum(penalty) for penalty in model.losses)
    found, loss_sum = gradients(model, x, y, examples=10)
    assert_close(found, [g.numpy() for g in tape.gradient(objective, variables)])
    assert loss_sum == pytest.approx(float(tf.reduce_sum(squared(y, model(x)))), rel=1e-6)


def test_penalties_of_several_precisions_are_added_up() -> None:
    """With mixed precision that of a kernel is float32, and that of an activation float16."""
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    x, y = rows(10)
    model(x)
    assert {penalty.dtype for penalty in model.losses} == {tf.float16, tf.float32}
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        objective = tf.reduce_mean(squared(y, tf.cast(model(x, training=True), tf.float32)))
        objective += sum(tf.cast(penalty, tf.float32) for penalty in model.losses)
    found, _ = gradients(model, x, y, examples=10)
    assert {g.dtype for g in found} == {np.dtype(np.float32)}
    for a, e in zip(found, tape.gradient(objective, variables), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-2, atol=1e-3)


def test_what_is_frozen_has_no_gradient() -> None:
    model = network()
    model.layers[1].trainable = False
    x, y = rows(4)
    found, _ = gradients(model, x, y, examples=4)
    assert [g.shape for g in found] == [(4, 1), (1,)]


def test_gradients_are_scaled_as_the_optimizer_says() -> None:
    model = network(l2=0.1)
    x, y = rows(8)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=64.0)
    optimizer.build(model.trainable_variables)
    found, loss_sum = gradients(model, x, y, examples=8, optimizer=optimizer)
    plain, plain_sum = gradients(model, x, y, examples=8)
    assert_close([g / 64 for g in found], plain)
    assert loss_sum == plain_sum


def test_the_model_is_run_in_training_mode() -> None:
    seen = []

    class Probe(keras.layers.Layer):
        def call(self, x: Any, training: bool | None = None) -> Any:
            seen.append(training)
            return x

    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(Probe()(inputs)))
    seen.clear()
    x, y = rows(2)
    gradients(model, x, y, examples=2)
    forward(model, x, training=False)
    assert seen == [True, False]


def test_a_model_without_a_training_argument() -> None:
    class Simple(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    model = Simple()
    x, y = rows(4)
    model(x)
    assert len(gradients(model, x, y, examples=4)[0]) == 2


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_predictions_are_widened(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((3,))
    outputs = {"a": keras.layers.Dense(1)(inputs), "b": keras.layers.Dense(2)(inputs)}
    model = keras.Model(inputs, outputs)
    x, _ = rows(2)
    assert model(x)["a"].dtype != tf.float32
    found = forward(model, x, True)
    assert {found[key].dtype for key in ("a", "b")} == {tf.float32}


def test_predictions_that_are_wide_enough_stay() -> None:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Lambda(lambda v: tf.argmax(v, axis=1))(inputs))
    assert forward(model, tf.ones([2, 3]), False).dtype == tf.int64


# --- rows of sparse gradients ---


def test_rows_of_one_index_are_added_up() -> None:
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0], [5.0, 5.0]]),
        tf.constant([4, 0, 4, 2]),
        tf.constant([6, 2]),
    )
    merged = merge_rows(slices)
    assert sorted(merged.indices.numpy().tolist()) == [0, 2, 4]
    dense = np.zeros((6, 2))
    dense[[0, 2, 4]] = [[10, 20], [5, 5], [101, 202]]
    np.testing.assert_array_equal(tf.convert_to_tensor(merged), dense)
    assert merged.indices.dtype == slices.indices.dtype
    assert list(merged.dense_shape) == [6, 2]


def test_a_static_shape_is_kept_in_a_trace() -> None:
    @tf.function
    def traced(indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        merged = merge_rows(tf.IndexedSlices(values, indices, tf.constant([6, 2])))
        assert [int(n) for n in merged.dense_shape] == [6, 2]
        return tf.convert_to_tensor(merged)

    found = traced(tf.constant([1, 1]), tf.ones([2, 2])).numpy()
    assert found.sum() == 4
    assert found[1].tolist() == [2, 2]


def test_the_gradient_of_an_embedding_is_the_dense_one() -> None:
    inputs = keras.Input((5,), dtype="int32")
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 3)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
    x = tf.constant([[1, 1, 2, 8, 1], [2, 2, 0, 0, 8]])
    y = tf.constant([0.5, -0.5])
    found, _ = loss_and_gradients(
        model=model,
        optimizer=keras.optimizers.SGD(),
        loss=squared,
        x=x,
        y=y,
        weight=tf.ones(2),
        examples=tf.constant(2.0),
        shares=1,
    )
    sparse = found[0]
    assert isinstance(sparse, tf.IndexedSlices)
    assert sorted(sparse.indices.numpy().tolist()) == [0, 1, 2, 8]
    table = tf.Variable(model.trainable_variables[0].value)
    with tf.GradientTape() as tape:
        embedded = tf.linalg.matmul(tf.one_hot(x, 9), table)  # the same, but dense
        outputs = model.layers[-1](tf.reduce_mean(embedded, axis=1))
        objective = tf.reduce_mean(squared(y, outputs))
    np.testing.assert_allclose(
        tf.convert_to_tensor(sparse), tape.gradient(objective, table), rtol=1e-5, atol=1e-7
    )


# --- tracing ---


def test_a_function_is_traced_once_for_every_size() -> None:
    traces = []

    def body(x: Any, weight: tf.Tensor, scalar: tf.Tensor) -> tf.Tensor:
        traces.append(x["a"].shape.as_list())
        return tf.reduce_sum(x["a"]) + tf.reduce_sum(weight) + scalar

    step = AnyBatch(body)
    assert traces == []
    for number in (8, 3, 1, 8, 100):
        x = {"a": tf.ones([number, 2]), "b": tf.ones([number], tf.int32)}
        assert float(step(x, tf.ones([number]), tf.constant(1.0))) == 3 * number + 1
    assert traces == [[None, 2]]


def test_another_axis_that_differs_is_traced_again() -> None:
    """Sequences of several lengths: slower, but right."""
    step = AnyBatch(lambda x, y: (tf.reduce_sum(x, axis=1), y))
    for number, length in ((4, 3), (2, 3), (4, 5), (3, 9), (4, 3)):
        sums, y = step(tf.ones([number, length]), tf.range(number))
        assert sums.numpy().tolist() == [length] * number
        assert y.numpy().tolist() == list(range(number))


def test_a_traced_step_has_side_effects_once() -> None:
    total = tf.Variable(0.0)

    def body(x: tf.Tensor) -> None:
        total.assign_add(tf.reduce_sum(x))

    step = AnyBatch(body)
    for shape in ([4, 2], [1, 2], [4, 3]):
        step(tf.ones(shape))
    assert float(total) == 4 * 2 + 1 * 2 + 4 * 3


def test_an_error_of_ours_leaves_a_trace_as_it_is() -> None:
    """AutoGraph would make another exception of it, whose text is a traceback."""
    step = AnyBatch(lambda y: per_example_loss(lambda y, p: tf.reduce_mean(p), None, y))
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            step(tf.ones([4]))
        assert type(caught.value) is ConfigError
        assert caught.value.what == "task: loss() returned a single number"
        assert caught.value.received == "a scalar"
        assert caught.value.do


def test_the_step_of_a_backend_tells_of_a_scalar_loss() -> None:
    model, optimizer = network(), keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    backend = LocalBackend(Cluster(0, 1, 0, 1, "test"), accumulate=1)
    backend.setup(
        model=model,
        optimizer=optimizer,
        loss=lambda y, p: tf.reduce_mean(squared(y, p)),
        identity={},
        example=(None, None),
    )
    x, y = rows(4)
    batch = Batch((MicroBatch(x, y, tf.ones(4)),), 4)
    with pytest.raises(ConfigError, match=r"^task: loss\(\) returned a single number"):
        backend.train_step(batch, learning_rate=0.1, stop=(False, False))
