"""The model's step as a graph that takes weights from elsewhere: traced once, placed many times.

Keras models do not run in a TensorFlow 1 graph by themselves: state would be left out silently, and
tensors that a layer keeps could not be used. So the step is traced as a `tf.function`, where Keras
is at home, with all variables as inputs and their new values as outputs, and the traced graph is
then copied into the session's graph, once per tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.errors import ConfigError
from hvps.step import stateless_loss_and_gradients

v1 = tf.compat.v1


@dataclass(frozen=True)
class Table:
    """An embedding table whose rows lie on the parameter servers.

    Attributes:
        index: place in `model.trainable_variables`.
        layer: the layer that looks rows up.
        starts: first row of each part, ascending, from 0.
        devices: of each part.
    """

    index: int
    layer: keras.layers.Embedding
    starts: tuple[int, ...]
    devices: tuple[str, ...]


def embedding_tables(model: keras.Model) -> dict[int, keras.layers.Embedding]:
    """Embedding layers whose table may be looked up row by row, by the index of the table."""
    indices = {id(v): i for i, v in enumerate(model.trainable_variables)}
    found: dict[int, keras.layers.Embedding] = {}
    for layer in model._flatten_layers():
        plain = type(layer) is keras.layers.Embedding and layer.built
        if not plain or layer.lora_enabled or layer.quantization_mode:
            continue
        table = layer._embeddings
        if table.regularizer is None and table.constraint is None and id(table) in indices:
            found[indices[id(table)]] = layer
    return found


@dataclass
class _Lookup:
    table: int
    ids: tf.Tensor
    rows: tf.Tensor


_INPUTS = ("weights", "others", "handles", "x", "y", "weight", "examples")


@dataclass(frozen=True)
class TracedStep:
    """The traced step, and the names of its ends.

    Attributes:
        graph: of the function.
        inputs: names of its inputs by role, in nests.
        outputs: names of its outputs by role, in nests.
        control: operations that run for what they do, such as assertions.
        changed: which of `model.non_trainable_variables` the step changes.
        lookups: tables that the row gradients among the outputs belong to.
        whole_tables: tables that are also used as a whole, and must be pulled so.
        captured: constants by the name of the input that stands for them.
    """

    graph: tf.Graph
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    control: list[str]
    changed: list[bool]
    lookups: list[int]
    whole_tables: set[int]
    captured: list[tuple[str, np.ndarray]]

    def place(self, values: dict[str, Any], device: str) -> dict[str, Any]:
        """Copy the step into the default graph.

        Args:
            values: tensors for `weights`, `others`, `handles`, `x`, `y`, `weight`, `examples`; None
                for the weights of tables.
            device: where the tower computes.

        Returns:
            `gradients` (of weights that are no tables), `rows` (pairs of ids and gradients),
            `others`, `loss_sum`, and `control`, operations to run with them.
        """
        pairs: list[tuple[str, Any]] = []
        for role in _INPUTS:
            pairs += zip(
                tf.nest.flatten(self.inputs[role]), tf.nest.flatten(values[role]), strict=True
            )
        given = {name: value for name, value in pairs if value is not None}
        names = list(dict.fromkeys(tf.nest.flatten(self.outputs)))
        with v1.device(device):
            given.update({name: tf.constant(value) for name, value in self.captured})
            elements = tf.graph_util.import_graph_def(
                self.graph.as_graph_def(),
                input_map=given,
                return_elements=[*names, *self.control],
                name="tower",
            )
        by_name = dict(zip(names, elements[: len(names)], strict=True))
        placed = tf.nest.map_structure(lambda name: by_name[name], self.outputs)
        return {**placed, "control": elements[len(names) :]}


def trace_step(
    *,
    model: keras.Model,
    loss: Callable[[Any, Any], Any],
    tables: Sequence[Table],
    x: Any,
    y: Any,
    shares: int,
) -> TracedStep:
    """Trace forward and backward pass of one tower.

    Args:
        tables: embedding tables that are looked up on the parameter servers.
        x, y: one batch, for its types and shapes.
        shares: towers whose gradients add up to one update.

    Raises:
        ConfigError: the model reads a variable that Keras does not know of.
    """
    lookups: list[_Lookup] = []
    of_table = {table.index for table in tables}

    def step(
        weights: Any, others: Any, handles: Any, x: Any, y: Any, weight: Any, examples: Any
    ) -> Any:
        tape = tf.GradientTape()
        lookups.clear()
        with _looking_up(tables, handles, tape, lookups):
            gradients, rows, new, loss_sum = stateless_loss_and_gradients(
                model=model,
                loss=loss,
                weights=weights,
                others=others,
                x=x,
                y=y,
                weight=weight,
                examples=examples,
                shares=shares,
                tape=tape,
                watched=lambda: [lookup.rows for lookup in lookups],
            )
        return {
            "gradients": [
                tf.convert_to_tensor(g) for i, g in enumerate(gradients) if i not in of_table
            ],
            "rows": [_row_gradient(k, g) for k, g in zip(lookups, rows, strict=True)],
            "others": new,
            "loss_sum": loss_sum,
        }

    specs: dict[str, Any] = {
        "weights": [tf.TensorSpec(v.shape, v.value.dtype) for v in model.trainable_variables],
        "others": [tf.TensorSpec(v.shape, v.value.dtype) for v in model.non_trainable_variables],
        "handles": [[tf.TensorSpec([], tf.resource) for _ in t.starts] for t in tables],
        "x": tf.nest.map_structure(_any_rows, x),
        "y": tf.nest.map_structure(_any_rows, y),
        "weight": tf.TensorSpec([None], tf.float32),
        "examples": tf.TensorSpec([], tf.float32),
    }
    function = tf.function(step, autograph=False, jit_compile=False)
    concrete = function.get_concrete_function(*(specs[role] for role in _INPUTS))
    names = [tensor.name for tensor in concrete.graph.inputs]
    inputs, used = {}, 0
    for role in _INPUTS:
        count = len(tf.nest.flatten(specs[role]))
        inputs[role] = tf.nest.pack_sequence_as(specs[role], names[used : used + count])
        used += count
    ends = concrete.structured_outputs
    sources = [_source(tensor).name for tensor in ends["others"]]
    return TracedStep(
        graph=concrete.graph,
        inputs=inputs,
        outputs=tf.nest.map_structure(lambda tensor: tensor.name, ends),
        control=[operation.name for operation in concrete.graph.control_outputs],
        changed=[a != b for a, b in zip(inputs["others"], sources, strict=True)],
        lookups=[lookup.table for lookup in lookups],
        whole_tables=_reached(concrete, {inputs["weights"][i]: i for i in of_table}),
        captured=[
            (name, _constant(tensor))
            for name, tensor in zip(names[used:], concrete.captured_inputs, strict=True)
        ],
    )


@contextmanager
def _looking_up(
    tables: Sequence[Table], handles: Any, tape: tf.GradientTape, lookups: list[_Lookup]
) -> Iterator[None]:
    """Let embedding layers fetch their rows from where these lie."""

    def replace(table: Table, parts: Any) -> None:
        layer = table.layer

        def call(inputs: Any) -> tf.Tensor:
            ids = tf.cast(inputs, tf.int32) if inputs.dtype not in _INTEGERS else inputs
            unique, places = tf.unique(tf.reshape(ids, [-1]))
            rows = _fetch_rows(table, parts, unique, layer)
            tape.watch(rows)
            lookups.append(_Lookup(table.index, unique, rows))
            outputs = tf.gather(rows, tf.reshape(places, tf.shape(ids)))
            outputs.set_shape([*ids.shape, layer.output_dim])
            return tf.cast(outputs, layer.compute_dtype)

        layer.__dict__["call"] = call

    for table, parts in zip(tables, handles, strict=True):
        replace(table, parts)
    try:
        yield
    finally:
        for table in tables:
            table.layer.__dict__.pop("call", None)


def _fetch_rows(table: Table, parts: Any, ids: tf.Tensor, layer: Any) -> tf.Tensor:
    """Rows `ids` of a table, each from the ps that has it: float [len(ids), width]."""
    dtype = layer._embeddings.value.dtype
    owners, local = owners_of(ids, table.starts)
    positions = tf.dynamic_partition(tf.range(tf.size(ids)), owners, len(table.starts))
    wanted = tf.dynamic_partition(local, owners, len(table.starts))
    pieces = []
    for handle, device, indices in zip(parts, table.devices, wanted, strict=True):
        with tf.device(device):
            piece = tf.raw_ops.ResourceGather(resource=handle, indices=indices, dtype=dtype)
        piece.set_shape([None, layer.output_dim])
        pieces.append(piece)
    rows = tf.dynamic_stitch(positions, pieces)
    rows.set_shape([None, layer.output_dim])
    return rows


def owners_of(ids: tf.Tensor, starts: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """For each row its part (int32) and its index within the part."""
    first = tf.constant(list(starts), ids.dtype)
    owners = tf.searchsorted(first, ids, side="right") - 1
    return owners, ids - tf.gather(first, owners)


def _row_gradient(lookup: _Lookup, gradient: Any) -> tuple[tf.Tensor, tf.Tensor]:
    if gradient is None:
        return lookup.ids, tf.zeros_like(lookup.rows)
    return lookup.ids, tf.convert_to_tensor(gradient)


_INTEGERS = (tf.int32, tf.int64)


def _any_rows(value: Any) -> tf.TensorSpec:
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)


def _source(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _reached(concrete: Any, names: dict[str, int]) -> set[int]:
    """Which of the inputs in `names` any output depends on."""
    found: set[int] = set()
    seen: set[str] = set()
    pending = [t.op for t in concrete.graph.outputs] + list(concrete.graph.control_outputs)
    while pending:
        operation = pending.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        found.update(names[t.name] for t in operation.outputs if t.name in names)
        pending += [t.op for t in operation.inputs] + list(operation.control_inputs)
    return found


def _constant(tensor: Any) -> np.ndarray:
    if tensor.dtype == tf.resource:
        raise ConfigError(
            "task: the model uses a variable that is not one of its weights",
            rule="with parameter servers all variables are Keras weights, made by add_weight()",
            received=f"a tf.Variable or a lookup table that a layer keeps: {tensor}",
            do="make it a weight, or do that part in train_data()",
        )
    value: np.ndarray = tensor.numpy()
    return value
