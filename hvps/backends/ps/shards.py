"""Variables on the parameter servers, and the Keras optimizer that updates them there.

Every shard is updated by an optimizer of its own, of the same class and configuration as the
model's, whose variables (slots, iterations) lie beside the shard. So Keras's own code computes the
update, with weight decay, clipping by value and averaging, and what it keeps besides slots, such as
Nadam's product or the step that Adam corrects its bias by, is exact for the updates that this shard
has seen.

That code is traced eagerly, as a `tf.function` over variables of this process, and then called in
the session's graph with the servers' variables in their place. Traced within a TensorFlow 1 graph
it would be another program: there `a == b` compares Python objects, so that Keras would never find
that it is time to overwrite weights by their average, and would not say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.ps.placement import Part, Shard
from hvps.backends.whole_state import slot_lists
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


@dataclass(frozen=True)
class _Held:
    """A variable of a shard.

    Attributes:
        slot: attribute of the optimizer that has it; None for the weight.
        place: of its part in the shard; None for what an optimizer has one of.
    """

    slot: str | None
    place: int | None
    shape: tuple[int, ...]
    dtype: tf.DType


def ps_device(index: int) -> str:
    return f"/job:ps/task:{index}/cpu:0"


class ShardVariables:
    """The graph's variables of one shard, alike in the graphs of all workers.

    Args:
        shard: what it holds.
        number: of the shard.
        prefix: of the shared names; a run's own.
        weights: the model's trainable variables.
        optimizer: the model's optimizer, built.

    Attributes:
        values: one `tf.Variable` per part, in the order of `shard.parts`.
        iterations: int64, how often this shard was updated.
    """

    values: list[Any]
    iterations: Any

    def __init__(
        self,
        shard: Shard,
        *,
        number: int,
        prefix: str,
        weights: Sequence[keras.Variable],
        optimizer: keras.optimizers.Optimizer,
    ) -> None:
        self.shard = shard
        self.device = ps_device(shard.ps)
        self._prefix = f"{prefix}/shard_{number}"
        whole = [weights[part.index] for part in shard.parts]
        parts = [_part_variable(w, p) for w, p in zip(whole, shard.parts, strict=True)]
        copy = _copy_of(optimizer, parts, whole)
        self._held, variables = _held(copy, parts)
        self._update: Any = self._traced(copy, parts)
        handles = {id(v.value.handle): i for i, v in enumerate(variables)}
        self._captured = [handles[id(handle)] for handle in self._update.captured_inputs]

    def _traced(self, copy: keras.optimizers.Optimizer, parts: list[keras.Variable]) -> Any:
        """The update as a function of the learning rate and the parts' gradients."""

        def update(rate: tf.Tensor, *gradients: Any) -> tf.Tensor:
            kept = copy._learning_rate
            before, kept._value = kept._value, rate
            try:
                copy.apply(list(gradients), parts)
            finally:
                kept._value = before
            return tf.constant(0)

        specs = [
            tf.IndexedSlicesSpec(v.shape, v.value.dtype, tf.int64, tf.int64, [None])
            if self.shard.sparse
            else tf.TensorSpec(v.shape, v.value.dtype)
            for v in parts
        ]
        function = tf.function(update, autograph=False, jit_compile=False)
        return function.get_concrete_function(tf.TensorSpec([], tf.float32), *specs)

    def place(self) -> None:
        """Add variables, lock and update to the default graph, and free what tracing needed."""
        self._update.add_to_graph(v1.get_default_graph())
        name = self._update.name
        self._function = name.decode() if isinstance(name, bytes) else name
        self._update = None
        with v1.device(self.device):
            self._variables = [
                v1.get_variable(
                    f"{self._prefix}/{i}",
                    shape=held.shape,
                    dtype=held.dtype,
                    use_resource=True,
                    trainable=False,
                    initializer=v1.zeros_initializer(),
                )
                for i, held in enumerate(self._held)
            ]
            self._lock = tf.CriticalSection(shared_name=f"{self._prefix}/lock")
        pairs = list(zip(self._held, self._variables, strict=True))
        self.values = [variable for held, variable in pairs if held.slot is None]
        (self.iterations,) = [v for held, v in pairs if held.slot == "_iterations"]

    def sources(
        self, weights: Sequence[keras.Variable], optimizer: keras.optimizers.Optimizer
    ) -> list[Source]:
        """Which part of which variable of the whole model and its optimizer each one holds."""
        lists, singles = slot_lists(optimizer, len(weights))
        found: list[Source] = []
        for held, variable in zip(self._held, self._variables, strict=True):
            if held.place is None:
                assert held.slot is not None, "a weight is part of the shard"
                found.append(Source(variable, singles[held.slot], None))
                continue
            part = self.shard.parts[held.place]
            whole = weights[part.index] if held.slot is None else lists[held.slot][part.index]
            found.append(Source(variable, whole, None if part.whole else part.key))
        return found

    def apply(self, gradients: Sequence[Any], learning_rate: tf.Tensor, *, locked: bool) -> Any:
        """The operation that updates the shard.

        Args:
            gradients: tensors or `tf.IndexedSlices` on this shard's ps, one per part.
            learning_rate: float32 scalar.
            locked: other graphs may update the shard at the same time.
        """
        with v1.device(self.device):
            # The lock is taken when all is here, on the ps: who holds it waits for no other task.
            learning_rate = tf.identity(learning_rate)
            flat = tf.nest.flatten(list(gradients), expand_composites=True)
            handles = [self._variables[i].handle for i in self._captured]

            def update() -> tf.Tensor:
                (done,) = tf.raw_ops.StatefulPartitionedCall(
                    args=[learning_rate, *flat, *handles], Tout=[tf.int32], f=self._function
                )
                return done

            return self._lock.execute(update).op if locked else update().op


def _part_variable(weight: keras.Variable, part: Part) -> keras.Variable:
    """A Keras variable with the part's rows, known to optimizers by the weight's own name."""
    value = np.asarray(weight) if part.whole else np.asarray(weight.value[part.key])
    variable = keras.Variable(value, dtype=weight.dtype, name=weight.name)
    variable._path = weight.path
    variable.constraint = weight.constraint
    return variable


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
    decays = [optimizer._use_weight_decay(weight) for weight in weights]
    copy._use_weight_decay = lambda variable: decays[copy._get_variable_index(variable)]
    return copy


def _held(
    optimizer: keras.optimizers.Optimizer, parts: list[keras.Variable]
) -> tuple[list[_Held], list[keras.Variable]]:
    """What a shard consists of, and the variables that stood for it when it was traced."""
    found = [(_described(v, None, i), v) for i, v in enumerate(parts)]
    lists, singles = slot_lists(optimizer, len(parts))
    for name, values in lists.items():
        found += [(_described(v, name, i), v) for i, v in enumerate(values) if v is not None]
    found += [(_described(v, name, None), v) for name, v in singles.items()]
    return [held for held, _ in found], [variable for _, variable in found]


def _described(variable: keras.Variable, slot: str | None, place: int | None) -> _Held:
    return _Held(slot, place, tuple(variable.shape), variable.value.dtype)
