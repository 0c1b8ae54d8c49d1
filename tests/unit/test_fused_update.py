"""The fused kernels compute what Keras's optimizers compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvps.fused_update import FUSED_FROM, fuse_update

STEPS = 30
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(1e-2, beta_1=0.8, epsilon=1e-5),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.5),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2)),
}


def trained(make: Callable[[], Any], elements: int, fused: bool) -> tuple[list[np.ndarray], int]:
    """All variables after some steps, and the number of fused kernels in the step's graph."""
    rng = np.random.default_rng(0)
    variable = keras.Variable(rng.normal(size=elements).astype(np.float32))
    optimizer = make()
    optimizer.build([variable])
    if fused:
        assert fuse_update(optimizer)

    @tf.function(jit_compile=False)
    def step(gradient: tf.Tensor) -> None:
        optimizer.apply([gradient], [variable])

    gradients = [tf.constant(rng.normal(size=elements).astype(np.float32)) for _ in range(3)]
    for i in range(STEPS):
        step(gradients[i % 3])
    graph = step.get_concrete_function(gradients[0]).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    kernels = sum(node.op.startswith("ResourceApply") for node in nodes)
    return [np.asarray(v) for v in (variable, *optimizer.variables)], kernels


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_large_variables_agree_with_keras_within_rounding(name: str) -> None:
    by_keras, none = trained(OPTIMIZERS[name], FUSED_FROM + 3, fused=False)
    by_kernel, one = trained(OPTIMIZERS[name], FUSED_FROM + 3, fused=True)
    assert (none, one) == (0, 1)
    for a, b in zip(by_keras, by_kernel, strict=True):
        # 1 - 0.999 in float32 is off by 1.3e-5 of itself.
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-5)


def test_small_variables_are_equal_bit_by_bit() -> None:
    by_keras, _ = trained(OPTIMIZERS["adam"], FUSED_FROM - 1, fused=False)
    by_kernel, kernels = trained(OPTIMIZERS["adam"], FUSED_FROM - 1, fused=True)
    assert kernels == 0
    for a, b in zip(by_keras, by_kernel, strict=True):
        np.testing.assert_array_equal(a, b)


def test_sparse_gradients_keep_the_update_of_keras() -> None:
    results = []
    for fused in (False, True):
        variable = keras.Variable(np.ones((FUSED_FROM // 4, 8), np.float32))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([variable])
        if fused:
            fuse_update(optimizer)
        slices = tf.IndexedSlices(
            tf.ones((2, 8)), tf.constant([1, 5]), tf.constant([FUSED_FROM // 4, 8])
        )
        for _ in range(3):
            optimizer.apply([slices], [variable])
        results.append(np.asarray(variable))
    np.testing.assert_array_equal(*results)


def test_what_has_no_kernel_is_left_alone() -> None:
    class Mine(keras.optimizers.SGD):
        pass

    for optimizer in (
        keras.optimizers.RMSprop(),
        keras.optimizers.Adam(amsgrad=True),
        Mine(momentum=0.9),
    ):
        assert not fuse_update(optimizer)
        assert "update_step" not in vars(optimizer)
