"""Which variables a step changes besides those that are trained."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

# Operations that hand a variable on to another function, which may change it.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "While", "Case")


def changed_so_far(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Those of `variables` that the `tf.function` which is being traced has assigned, or may have.

    BatchNormalization's statistics are; weights of frozen layers are not.
    """
    graph = tf.compat.v1.get_default_graph()
    inner = {id(outside): inside.name for outside, inside in graph.captures}
    touched = set()
    for operation in graph.get_operations():
        if operation.type.startswith("Assign") or operation.type in _CALLS:
            touched |= {each.name for each in operation.inputs}
    return [v for v in variables if inner.get(id(v.value.handle)) in touched]
