"""One process against plain Keras: the reference must itself be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvps.backends import StepOutput, make_backend
from hvps.backends.local import LocalBackend
from hvps.backends.whole_state import by_path, whole_state
from hvps.batches import Batch
from hvps.cluster import Cluster
from hvps.data import make_feed
from hvps.overrides import load_config
from hvps.runtime import seed_rank
from hvps.schedule import make_schedule

NO_EXAMPLE: tuple[None, None] = (None, None)
ALONE = Cluster(0, 1, 0, 1, "test")
EXAMPLES, BATCH, EPOCHS = 50, 16, 3
# The same operations in the same order: no bit differs, at least on a CPU.
EXACT = 1e-6 if tf.config.list_physical_devices("GPU") else 0.0
# Sums in another order. Largest difference seen: 1.2e-7, with momentum.
TOLERANCE = 1e-6
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
}


@pytest.fixture(autouse=True)
def float32_again() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


def network(dropout: float = 0.0, seed: int = 0) -> keras.Model:
    """A penalty, BatchNormalization and, if asked for, dropout; the same weights each time."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    x = keras.layers.BatchNormalization()(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x), name="network")


def plain_network() -> keras.Model:
    """Nothing that sees a batch as a whole: micro-batches give the same as one big batch."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(x), name="network")


def squared(y: Any, y_pred: Any) -> Any:
    return tf.square(y - y_pred[:, 0])


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 4)).astype(np.float32)
    return x, np.sin(x.sum(axis=1)).astype(np.float32)


def started(
    model: keras.Model,
    optimizer: Any,
    *,
    accumulate: int = 1,
    loss: Callable[[Any, Any], Any] = squared,
) -> LocalBackend:
    optimizer.build(model.trainable_variables)
    backend = LocalBackend(ALONE, accumulate=accumulate)
    backend.setup(model=model, optimizer=optimizer, loss=loss, identity={}, example=NO_EXAMPLE)
    return backend


def batches(
    accumulate: int = 1, *, shuffle: bool = False, epochs: int = EPOCHS, global_batch: int = BATCH
) -> Iterator[Batch]:
    feed = make_feed(
        data(),
        what="train_data",
        global_batch=global_batch,
        ranks=1,
        rank=0,
        accumulate=accumulate,
        shuffle=shuffle,
    )
    for epoch in range(epochs):
        yield from feed.epoch(epoch)


def train(backend: LocalBackend, source: Iterator[Batch], rate: float) -> list[StepOutput]:
    return [
        StepOutput(*backend.train_step(b, learning_rate=rate, stop=(False, False)).numpy().tolist())
        for b in source
    ]


def rate_of(optimizer: Any) -> float:
    return float(optimizer.learning_rate)


def largest_difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    assert len(a) == len(b)
    return max(float(np.max(np.abs(x - y))) for x, y in zip(a, b, strict=True))


# --- against Keras ---


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_are_those_of_keras_fit(name: str) -> None:
    x, y = data()
    reference = network()
    initial = reference.get_weights()
    reference.compile(OPTIMIZERS[name](), loss=lambda y, p: squared(y[:, 0], p), jit_compile=False)
    reference.fit(x, y[:, None], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)

    model, optimizer = network(), OPTIMIZERS[name]()
    assert largest_difference(model.get_weights(), initial) == 0
    outputs = train(started(model, optimizer), batches(), rate_of(optimizer))
    assert len(outputs) == 12
    assert largest_difference(model.get_weights(), initial) > 0.01
    assert largest_difference(model.get_weights(), reference.get_weights()) <= EXACT


def test_what_a_step_says() -> None:
    model, optimizer = plain_network(), keras.optimizers.SGD(0.05)
    backend = started(model, optimizer)
    for batch in batches(epochs=1):
        (micro,) = batch.micros
        expected = float(tf.reduce_sum(squared(micro.y, model(micro.x, training=True))))
        output = StepOutput(
            *backend.train_step(batch, learning_rate=0.05, stop=(True, False)).numpy().tolist()
        )
        # The penalty is not part of it.
        assert output.loss_sum == pytest.approx(expected, rel=1e-5)
        assert (output.stop_votes, output.interrupt_votes, output.skipped) == (1, 0, 0)
    output = StepOutput(
        *backend.train_step(next(batches()), learning_rate=0.05, stop=(False, True))
        .numpy()
        .tolist()
    )
    assert (output.stop_votes, output.interrupt_votes) == (0, 1)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_rate_of_each_step_is_used(scaled: bool) -> None:
    """Also under a wrapper that has a rate of its own."""
    inputs = keras.Input((4,))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, layer(inputs))
    optimizer: Any = keras.optimizers.SGD(99.0)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    backend = started(model, optimizer, loss=lambda y, p: p[:, 0])
    ones = np.ones((4, 4), np.float32)
    feed = make_feed((ones, ones[:, 0]), what="train_data", global_batch=4, ranks=1, rank=0)
    for rate, expected in ((0.5, -0.5), (0.25, -0.75), (0.0, -0.75), (1.0, -1.75)):
        (batch,) = feed.epoch(0)
        backend.train_step(batch, learning_rate=rate, stop=(False, False))
        np.testing.assert_array_equal(model.get_weights()[0], np.full((4, 1), expected))


def test_a_schedule_reaches_the_weights() -> None:
    config = load_config(None, ["schedule.warmup_steps=6", "schedule.decay=cosine"]).config
    schedule = make_schedule(config, 0.1, 1, 12)

    class Same(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return tf.gather(tf.constant([schedule(s) for s in range(13)]), tf.cast(step, tf.int32))

    x, y = data()
    reference = network()
    reference.compile(
        keras.optimizers.SGD(Same()), loss=lambda y, p: squared(y[:, 0], p), jit_compile=False
    )
    reference.fit(x, y[:, None], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    model = network()
    backend = started(model, keras.optimizers.SGD(0.1))
    for step, batch in enumerate(batches()):
        backend.train_step(batch, learning_rate=schedule(step), stop=(False, False))
    assert largest_difference(model.get_weights(), reference.get_weights()) <= EXACT


# --- accumulation ---


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_micro_batches_add_up_to_one_big_batch(name: str, accumulate: int) -> None:
    results = []
    for parts in (1, accumulate):
        model, optimizer = plain_network(), OPTIMIZERS[name]()
        backend = started(model, optimizer, accumulate=parts)
        # 50 examples: the last batch has 2, so some of 4 micro-batches are empty.
        outputs = train(backend, batches(parts, shuffle=True), rate_of(optimizer))
        results.append((model.get_weights(), [o.loss_sum for o in outputs]))
        assert int(optimizer.iterations) == 12
    (whole, losses), (parts_of_it, sums) = results
    assert largest_difference(whole, parts_of_it) <= TOLERANCE
    np.testing.assert_allclose(sums, losses, rtol=1e-4)


def test_accumulated_embeddings() -> None:
    def tokens() -> keras.Model:
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3,), dtype="int32")
        x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(7, 4)(inputs))
        return keras.Model(inputs, keras.layers.Dense(1)(x))

    x = np.random.default_rng(0).integers(0, 7, (20, 3)).astype(np.int32)
    y = x.sum(axis=1).astype(np.float32)
    results = []
    for parts in (1, 2):
        model = tokens()
        backend = started(model, keras.optimizers.Adam(0.05), accumulate=parts)
        feed = make_feed(
            (x, y), what="train_data", global_batch=8, ranks=1, rank=0, accumulate=parts
        )
        for epoch in range(2):
            train(backend, feed.epoch(epoch), 0.05)
        results.append(model.get_weights())
    assert largest_difference(*results) <= TOLERANCE


# --- tracing ---


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_smaller_batch_is_not_traced_again(accumulate: int) -> None:
    traces = []

    def loss(y: Any, y_pred: Any) -> Any:
        traces.append(y.shape)
        return squared(y, y_pred)

    backend = started(plain_network(), keras.optimizers.SGD(0.1), accumulate=accumulate, loss=loss)
    assert traces == []
    sizes = {len(m.y) for batch in batches(accumulate) for m in batch.micros}
    assert len(sizes) > 1
    train(backend, batches(accumulate), 0.1)
    # One for the update, and one for adding up where there is something to add.
    assert len(traces) == accumulate


# --- float16 ---


def test_an_update_that_is_not_finite_is_skipped() -> None:
    model = plain_network()
    inner = keras.optimizers.Adam(0.01)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
    backend = started(model, optimizer)
    x, y = data()
    broken = x.copy()
    broken[3, 1] = np.inf

    def step(inputs: np.ndarray) -> StepOutput:
        feed = make_feed((inputs, y), what="train_data", global_batch=50, ranks=1, rank=0)
        (output,) = train(backend, feed.epoch(0), 0.01)
        return output

    assert step(x).skipped == 0
    before = model.get_weights()
    assert step(broken).skipped == 1
    assert largest_difference(model.get_weights(), before) == 0
    assert float(optimizer.dynamic_scale) == 32.0
    assert step(x).skipped == 0
    assert largest_difference(model.get_weights(), before) > 0


def test_a_skipped_update_leaves_nothing_to_the_next() -> None:
    """What was accumulated goes with it."""
    results = []
    for with_broken in (False, True):
        model = plain_network()
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=64.0
        )
        backend = started(model, optimizer, accumulate=2)
        x, y = data()
        broken = x.copy()
        broken[:] = np.inf
        for inputs in [broken, x] if with_broken else [x]:
            feed = make_feed(
                (inputs, y), what="train_data", global_batch=50, ranks=1, rank=0, accumulate=2
            )
            train(backend, feed.epoch(0), 0.1)
        results.append(model.get_weights())
    assert largest_difference(*results) <= TOLERANCE


# --- state ---


def assign(backend: LocalBackend, state: dict[str, np.ndarray]) -> None:
    variables = whole_state(backend._model, backend._optimizer)
    assert variables.keys() == state.keys()
    for name, variable in variables.items():
        variable.assign(state[name])


def scaled_adam() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0)


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), scaled_adam], ids=[*OPTIMIZERS, "scaled"])
def test_training_goes_on_from_a_state(make: Callable[[], Any]) -> None:
    """To the bit: weights, slots, step count, moving statistics, dropout's random numbers."""
    model, optimizer = network(dropout=0.5), make()
    backend = started(model, optimizer)
    source = list(batches(shuffle=True))
    train(backend, iter(source[:5]), 0.01)
    state = backend.state()
    kept = {name: array.copy() for name, array in state.items()}
    train(backend, iter(source[5:]), 0.01)
    expected = backend.state()
    # What was taken is a copy, not a view of what goes on changing.
    for name, array in kept.items():
        np.testing.assert_array_equal(state[name], array)
    assert any(np.any(expected[name] != kept[name]) for name in kept)

    other, fresh = network(dropout=0.5, seed=99), make()
    resumed = started(other, fresh)
    train(resumed, iter(source[:2]), 0.3)
    assign(resumed, kept)
    for name, array in resumed.state().items():
        np.testing.assert_array_equal(array, kept[name])
    train(resumed, iter(source[5:]), 0.01)
    found = resumed.state()
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_the_state_names_everything() -> None:
    backend = started(network(dropout=0.5), keras.optimizers.Adam(0.01))
    state = backend.state()
    # Without axes it is a number of numpy's, which is as good.
    assert all(isinstance(array, np.ndarray | np.generic) for array in state.values())
    for part in (
        "model/dense/kernel",
        "model/batch_normalization/moving_mean",
        "model/seed_generator/seed_generator_state",
        "optimizer/adam/iteration",
        "optimizer/adam/dense_kernel_momentum",
    ):
        assert part in state
    assert len(state) == len(backend._model.variables) + len(backend._optimizer.variables)


def namesakes(seed: int) -> keras.Model:
    """Layers inside of a nested model may have the names of those outside."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    inner_inputs = keras.Input((4,))
    inner = keras.Model(inner_inputs, keras.layers.Dense(4, name="dense")(inner_inputs))
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1, name="dense")(inner(inputs)))


def test_namesakes_are_all_in_the_state() -> None:
    model, optimizer = namesakes(0), keras.optimizers.SGD(0.05, momentum=0.9)
    backend = started(model, optimizer)
    source = list(batches(shuffle=True))
    train(backend, iter(source[:5]), 0.05)
    state = backend.state()
    assert len(state) == len(model.variables) + len(optimizer.variables)
    assert {name: array.shape for name, array in state.items() if name.startswith("model/")} == {
        "model/dense/kernel": (4, 4),
        "model/dense/bias": (4,),
        "model/dense/kernel#2": (4, 1),
        "model/dense/bias#2": (1,),
    }
    kept = {name: array.copy() for name, array in state.items()}
    train(backend, iter(source[5:]), 0.05)
    resumed = started(namesakes(99), keras.optimizers.SGD(0.05, momentum=0.9))
    assign(resumed, kept)
    for name, array in resumed.state().items():
        np.testing.assert_array_equal(array, kept[name], err_msg=name)
    train(resumed, iter(source[5:]), 0.05)
    assert largest_difference(resumed._model.get_weights(), model.get_weights()) == 0


def test_variables_of_one_path_are_numbered() -> None:
    variables = [keras.Variable(np.zeros(1), name="v") for _ in range(3)]
    other = keras.Variable(np.zeros(1), name="w")
    found = by_path([variables[0], other, *variables[1:]], "model/")
    assert list(found) == ["model/v", "model/w", "model/v#2", "model/v#3"]
    for mine, variable in zip(found.values(), [variables[0], other, *variables[1:]], strict=True):
        assert mine is variable
    assert list(by_path([other])) == ["w"]


# --- random numbers ---


def masks(rank: int | None, seed: int = 0) -> list[np.ndarray]:
    """Outputs of dropout on ones in three successive calls."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=seed)])
    if rank is not None:
        seed_rank(model, seed, rank)
    return [model(np.ones((1, 64), np.float32), training=True).numpy() for _ in range(3)]


def test_ranks_drop_different_units() -> None:
    by_rank = [np.stack(masks(rank)) for rank in range(4)]
    drawn = [mask.tobytes() for outputs in by_rank for mask in outputs]
    # Nor does a rank draw later what another drew before.
    assert len(set(drawn)) == len(drawn)
    again = np.stack(masks(3))
    np.testing.assert_array_equal(again, by_rank[3])


def test_rank_0_draws_what_one_process_draws() -> None:
    np.testing.assert_array_equal(np.stack(masks(0)), np.stack(masks(None)))


def test_seeding_a_rank_leaves_the_weights_alone() -> None:
    inputs = keras.Input((3,))
    layer = keras.layers.Dense(2, bias_initializer="ones")  # a bias of shape [2], as a seed's
    model = keras.Model(inputs, keras.layers.Dropout(0.5)(layer(inputs)))
    before = model.get_weights()
    seed_rank(model, 0, 3)
    assert largest_difference(model.get_weights(), before) == 0


def test_numbers_outside_of_layers_differ_by_rank_too() -> None:
    def draw(rank: int) -> tuple[float, float]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        seed_rank(model, 0, rank)
        return float(np.random.rand()), float(tf.random.uniform([]))

    first, second = draw(0), draw(1)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert draw(1) == second


# --- the rest of the protocol ---


def test_one_process_agrees_with_itself() -> None:
    config = load_config(None, ["backend.kind=local", "train.accumulate=2"]).config
    backend = make_backend(config, ALONE)
    assert (backend.name, backend.engine, backend.cluster) == ("local", "none", ALONE)
    sums = backend.reduce([np.arange(3), np.float64(2.5)])
    assert [np.asarray(value).tolist() for value in sums] == [[0, 1, 2], 2.5]
    assert backend.broadcast({"a": 1}) == {"a": 1}
    for nothing in (backend.check_weights, backend.sync_model, backend.barrier, backend.close):
        nothing()
