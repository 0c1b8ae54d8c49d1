"""Variables on the parameter servers, and the Keras optimizer that updates them there.

Every shard is updated by an optimizer of its own, of the same class and configuration as the
model's, whose variables (slots, iterations) lie beside the shard. So Keras's own code computes the
update, with weight decay, clipping by value and averaging, and what it keeps besides slots, such as
Nadam's product or the step that Adam corrects its bias by, is exact for the updates that this shard
has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.ps.placement import Part, Shard
from hvps.fused_update import fuse_update

v1 = tf.compat.v1


@dataclass(frozen=True)
class Source:
    """A variable on a ps and what it is of the whole model.

    Attributes:
        variable: on the ps.
        whole: the Keras variable of the model or its optimizer.
        key: what selects the part from it, or None for all.
    """

    variable: Any
    whole: keras.Variable
    key: tuple[slice, ...] | None


def ps_device(index: int) -> str:
    return f"/job:ps/task:{index}/cpu:0"


class ShardVariables:
    """The graph's variables of one shard, alike in the graphs of all workers.

    Args:
        shard: what it holds.
        prefix: of the shared names; a run's own.
        weights: the model's trainable variables.
        optimizer: the model's optimizer, built.

    Attributes:
        values: one `tf.Variable` per part, in the order of `shard.parts`.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        number: int,
        prefix: str,
        weights: Sequence[keras.Variable],
        optimizer: keras.optimizers.Optimizer,
    ) -> None:
        self.shard, self.number = shard, number
        self.device = ps_device(shard.ps)
        self._prefix = f"{prefix}/shard_{number}"
        parts = [_part_variable(weights[part.index], part) for part in shard.parts]
        self._parts = parts
        self._optimizer = _copy_of(optimizer, parts, [weights[p.index] for p in shard.parts])
        self._keras = [*parts, *optimizer_variables(self._optimizer)]

    def place(self) -> None:
        """Add the variables to the default graph; what was made so far was made eagerly."""
        with v1.device(self.device):
            self._variables = [
                _graph_variable(f"{self._prefix}/{i}", v) for i, v in enumerate(self._keras)
            ]
            self._lock = tf.CriticalSection(shared_name=f"{self._prefix}/lock")
        for kept, variable in zip(self._keras, self._variables, strict=True):
            kept._value = variable
        _index_again(self._optimizer, self._parts)
        self.values: list[Any] = self._variables[: len(self._parts)]

    def sources(
        self, weights: Sequence[keras.Variable], optimizer: keras.optimizers.Optimizer
    ) -> list[Source]:
        """Which rows of which variable of the whole model and its optimizer each one holds."""
        by_id = {id(v): gv for v, gv in zip(self._keras, self._variables, strict=True)}
        mine, my_singles = slot_lists(self._optimizer, len(self._parts))
        theirs, their_singles = slot_lists(optimizer, len(weights))
        found: list[Source] = []

        def add(kept: keras.Variable, whole: keras.Variable, part: Part | None) -> None:
            key = None if part is None or part.whole else part.key
            found.append(Source(by_id[id(kept)], whole, key))

        for j, part in enumerate(self.shard.parts):
            add(self._parts[j], weights[part.index], part)
            for name, values in mine.items():
                if values[j] is not None:
                    add(values[j], theirs[name][part.index], part)
        for name, kept in my_singles.items():
            add(kept, their_singles[name], None)
        return found

    @property
    def iterations(self) -> tf.Variable:
        """int64: how often this shard was updated."""
        return self._optimizer._iterations._value

    def apply(self, gradients: Sequence[Any], learning_rate: tf.Tensor, *, locked: bool) -> Any:
        """The operation that updates the shard.

        Args:
            gradients: tensors or `tf.IndexedSlices` on this shard's ps, one per part.
            learning_rate: float32 scalar.
            locked: other graphs may update the shard at the same time.
        """

        def update(*flat: Any) -> tf.Tensor:
            rate, *rest = flat
            grads = tf.nest.pack_sequence_as(list(gradients), rest, expand_composites=True)
            rate_variable = self._optimizer._learning_rate
            before = rate_variable._value
            rate_variable._value = rate
            try:
                self._optimizer.apply(grads, self._parts)
            finally:
                rate_variable._value = before
            return tf.constant(0)

        flat = tf.nest.flatten(list(gradients), expand_composites=True)
        function = tf.function(update, autograph=False, jit_compile=False)
        with v1.device(self.device):
            if locked:
                return self._lock.execute(lambda: function(learning_rate, *flat)).op
            return function(learning_rate, *flat).op


def _part_variable(weight: keras.Variable, part: Part) -> keras.Variable:
    """A Keras variable with the part's rows, known to optimizers by the weight's own name."""
    if part.whole:
        value = np.asarray(weight)
    else:
        value = np.asarray(weight.value[part.key])
    variable = keras.Variable(value, dtype=weight.dtype, name=weight.name)
    variable._path = weight.path
    variable.constraint = weight.constraint
    return variable


def _graph_variable(name: str, variable: keras.Variable) -> Any:
    return v1.get_variable(
        name,
        shape=tuple(variable.shape),
        dtype=variable.value.dtype,
        use_resource=True,
        trainable=False,
        initializer=v1.zeros_initializer(),
    )


def _copy_of(
    optimizer: keras.optimizers.Optimizer,
    parts: list[keras.Variable],
    weights: list[keras.Variable],
) -> keras.optimizers.Optimizer:
    copy = type(optimizer).from_config(optimizer.get_config())
    # Norms are of whole variables or of all of them; hvps.backends.ps.clipping knows these.
    copy.clipnorm = copy.global_clipnorm = None
    copy.loss_scale_factor = None  # the loss is not scaled here, so there is nothing to undo
    copy.build(parts)
    fuse_update(copy)
    decays = {id(p): optimizer._use_weight_decay(w) for p, w in zip(parts, weights, strict=True)}

    def use_weight_decay(variable: Any) -> bool:
        return decays[id(parts[copy._get_variable_index(variable)])]

    copy._use_weight_decay = use_weight_decay
    return copy


def _index_again(optimizer: keras.optimizers.Optimizer, parts: list[keras.Variable]) -> None:
    optimizer._trainable_variables_indices = {
        optimizer._var_key(part): i for i, part in enumerate(parts)
    }


def slot_lists(
    optimizer: keras.optimizers.Optimizer, count: int
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """An optimizer's variables by attribute: lists of `count` (None where a variable has no such
    slot), and single ones. Keras's own list of them leaves some out, such as Nadam's product."""
    lists: dict[str, list[Any]] = {}
    single: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables"):
            continue
        if isinstance(value, keras.Variable):
            if name != "_learning_rate":
                single[name] = value
        elif isinstance(value, list | tuple) and len(value) == count and count:
            known = [isinstance(v, keras.Variable) for v in value]
            if any(known) and all(k or v is None for k, v in zip(known, value, strict=True)):
                lists[name] = list(value)
    return lists, single


def optimizer_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """All variables that an optimizer's update reads or writes, without the learning rate."""
    lists, single = slot_lists(optimizer, len(optimizer._trainable_variables))
    found = [v for values in lists.values() for v in values if v is not None]
    found += single.values()
    return list({id(v): v for v in found}.values())
