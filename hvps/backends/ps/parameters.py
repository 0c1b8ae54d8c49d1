"""All that lies on the parameter servers, and how it travels: weights down, gradients up.

Small variables of one ps travel as one tensor, large ones in parts, so that a transfer is neither
lost in round trips nor waits for its last byte before anything else can go on. Of embedding tables
only rows travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.ps.placement import Placement, Shard
from hvps.backends.ps.replica import Table, owners_of
from hvps.backends.ps.shards import ShardVariables, ps_device
from hvps.step import merge_rows

v1 = tf.compat.v1

# What one shard's gradient is on its way: a tensor, or the rows of a table.
Payload = Any


class Parameters:
    """The trainable weights on the parameter servers.

    Args:
        model: built; its weights are the initial values.
        optimizer: built.
        placement: of `model.trainable_variables`.
        prefix: of all shared names.
    """

    def __init__(
        self,
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        placement: Placement,
        prefix: str,
    ) -> None:
        self.weights = list(model.trainable_variables)
        self.shards = [
            ShardVariables(
                shard, number=i, prefix=prefix, weights=self.weights, optimizer=optimizer
            )
            for i, shard in enumerate(placement.shards)
        ]
        self._where: dict[int, list[tuple[int, int]]] = {}  # (shard, place in it), in row order
        for i, shard in enumerate(placement.shards):
            for j, part in enumerate(shard.parts):
                self._where.setdefault(part.index, []).append((i, j))
        for places in self._where.values():
            places.sort(key=lambda place: self._part(place).start)

    def place(self) -> None:
        """Add all variables to the default graph."""
        for shard in self.shards:
            shard.place()

    def _part(self, place: tuple[int, int]) -> Any:
        return self.shards[place[0]].shard.parts[place[1]]

    def parts_of(self, index: int) -> list[tuple[ShardVariables, int]]:
        """Where a weight's parts lie, in the order of rows: (shard, place in it)."""
        return [(self.shards[i], j) for i, j in self._where[index]]

    def table(self, index: int, layer: Any) -> Table:
        places = self._where[index]
        return Table(
            index,
            layer,
            tuple(self._part(place).start for place in places),
            tuple(self.shards[i].device for i, _ in places),
        )

    def handles(self, table: Table) -> list[tf.Tensor]:
        return [shard.values[j].handle for shard, j in self.parts_of(table.index)]

    # --- down ---

    def pull(self, device: str) -> list[tf.Tensor | None]:
        """Weights on a worker; None for tables, whose rows are fetched by the layers."""
        pieces: dict[tuple[int, int], tf.Tensor] = {}
        for i, shard in enumerate(self.shards):
            if shard.shard.sparse:
                continue
            for j, piece in enumerate(_pulled(shard.values, shard.device, device)):
                pieces[i, j] = piece
        weights: list[tf.Tensor | None] = []
        for index in range(len(self.weights)):
            found = [pieces[place] for place in self._where[index] if place in pieces]
            if len(found) > 1:
                axis = self._part(self._where[index][0]).axis
                with v1.device(device):
                    found = [tf.concat(found, axis)]
            weights.append(found[0] if found else None)
        return weights

    @property
    def dense_bytes(self) -> int:
        """What travels down, and up again, in every step, but for tables."""
        return sum(_bytes(v) for s in self.shards if not s.shard.sparse for v in s.values)

    # --- up ---

    def payloads(
        self, gradients: dict[int, tf.Tensor | tf.IndexedSlices], device: str
    ) -> list[Payload]:
        """Gradients of whole variables as they are sent, one payload per shard."""
        with v1.device(device):
            by_table = {
                index: self._rows_by_part(index, gradient)
                for index, gradient in gradients.items()
                if isinstance(gradient, tf.IndexedSlices)
            }
            return [
                self._payload(i, s.shard, gradients, by_table) for i, s in enumerate(self.shards)
            ]

    def _payload(
        self,
        number: int,
        shard: Shard,
        gradients: dict[int, Any],
        by_table: dict[int, list[tf.IndexedSlices]],
    ) -> Payload:
        if shard.sparse:
            index = shard.parts[0].index
            return by_table[index][self._where[index].index((number, 0))]
        pieces = [gradients[p.index] if p.whole else gradients[p.index][p.key] for p in shard.parts]
        return _packed(pieces)

    def _rows_by_part(self, index: int, rows: tf.IndexedSlices) -> list[tf.IndexedSlices]:
        places = self._where[index]
        owners, local = owners_of(rows.indices, [self._part(place).start for place in places])
        values = tf.dynamic_partition(rows.values, owners, len(places))
        indices = tf.dynamic_partition(local, owners, len(places))
        return [
            tf.IndexedSlices(v, k, tf.TensorShape(self.shards[i].values[j].shape))
            for v, k, (i, j) in zip(values, indices, places, strict=True)
        ]

    def unpacked(self, payload: Payload, shard: ShardVariables) -> list[Any]:
        """A payload on its ps as gradients of the shard's parts."""
        if shard.shard.sparse:
            shape = tf.constant(shard.values[0].shape.as_list(), tf.int64)
            with v1.device(shard.device):
                indices = tf.cast(payload.indices, tf.int64)
                return [tf.IndexedSlices(payload.values, indices, shape)]
        return _unpacked(payload, shard.values, shard.device)


class StateVariables:
    """Weights that are not trained but change in training, such as BatchNormalization's
    statistics, on the parameter servers.

    Args:
        variables: of the model, float, in the order of the step's outputs.
        num_ps: they are dealt out over these by size.
    """

    def __init__(self, variables: Sequence[keras.Variable], num_ps: int, prefix: str) -> None:
        self._keras = list(variables)
        load = [0] * num_ps
        self._by_ps: list[list[int]] = [[] for _ in range(num_ps)]
        for i in sorted(range(len(variables)), key=lambda i: -int(np.prod(variables[i].shape))):
            ps = min(range(num_ps), key=lambda p: (load[p], p))
            load[ps] += int(np.prod(variables[i].shape))
            self._by_ps[ps].append(i)
        self.values: list[Any] = [None] * len(variables)
        for ps, members in enumerate(self._by_ps):
            with v1.device(ps_device(ps)):
                for i in members:
                    self.values[i] = v1.get_variable(
                        f"{prefix}/state/{i}",
                        shape=tuple(variables[i].shape),
                        dtype=variables[i].value.dtype,
                        use_resource=True,
                        trainable=False,
                        initializer=v1.zeros_initializer(),
                    )

    def initial(self) -> list[tuple[Any, np.ndarray]]:
        return [(v, np.asarray(k)) for v, k in zip(self.values, self._keras, strict=True)]

    @property
    def groups(self) -> list[tuple[str, list[int]]]:
        """(device, members) of each ps that has any."""
        return [(ps_device(ps), members) for ps, members in enumerate(self._by_ps) if members]

    @property
    def bytes(self) -> int:
        return sum(_bytes(v) for v in self.values)

    def pull(self, device: str) -> list[tf.Tensor]:
        found: list[Any] = [None] * len(self.values)
        for ps, members in self.groups:
            pieces = _pulled([self.values[i] for i in members], ps, device)
            for i, piece in zip(members, pieces, strict=True):
                found[i] = piece
        return found

    def payloads(self, new: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
        """One tensor per group, on the worker."""
        with v1.device(device):
            return [_packed([new[i] for i in members]) for _, members in self.groups]

    def unpacked(self, payload: tf.Tensor, group: int) -> list[tuple[Any, tf.Tensor]]:
        """(variable, value) for the members of a group, on its ps."""
        device, members = self.groups[group]
        variables = [self.values[i] for i in members]
        return list(zip(variables, _unpacked(payload, variables, device), strict=True))


def _bytes(variable: Any) -> int:
    return int(np.prod(variable.shape.as_list())) * int(variable.dtype.size)


def _pulled(variables: Sequence[Any], ps: str, device: str) -> list[tf.Tensor]:
    """Values of variables of one dtype on another device, in one transfer."""
    with v1.device(ps):
        reads = [v.read_value() for v in variables]
        packed = _packed(reads)
    return _unpacked(packed, variables, device)


def _packed(pieces: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(pieces) == 1:
        return tf.identity(pieces[0])
    return tf.concat([tf.reshape(piece, [-1]) for piece in pieces], 0)


def _unpacked(packed: tf.Tensor, like: Sequence[Any], device: str) -> list[tf.Tensor]:
    shapes = [v.shape.as_list() for v in like]
    with v1.device(device):
        if len(like) == 1:
            return [tf.ensure_shape(packed, shapes[0])]
        pieces = tf.split(packed, [int(np.prod(shape)) for shape in shapes])
        return [tf.reshape(p, shape) for p, shape in zip(pieces, shapes, strict=True)]


def merged(rows: Sequence[tuple[tf.Tensor, tf.Tensor]], shape: Sequence[int]) -> tf.IndexedSlices:
    """The row gradients of all lookups in one table, each row once."""
    shape = tf.TensorShape(list(shape))
    if len(rows) == 1:  # a lookup asks for each row once
        return tf.IndexedSlices(rows[0][1], rows[0][0], shape)
    kind = tf.int64 if any(ids.dtype == tf.int64 for ids, _ in rows) else tf.int32
    ids = tf.concat([tf.cast(ids, kind) for ids, _ in rows], 0)
    return merge_rows(tf.IndexedSlices(tf.concat([g for _, g in rows], 0), ids, shape))
