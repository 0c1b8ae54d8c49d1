"""The session's graph of one client: variables, towers, and how gradients become updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.ps.clipping import Clipper, scaled, sum_of_squares
from hvps.backends.ps.counters import Counters
from hvps.backends.ps.optimizers import check_optimizer, updates_elements
from hvps.backends.ps.parameters import Parameters, StateVariables
from hvps.backends.ps.placement import Placement, Slot, place
from hvps.backends.ps.replica import Table, TracedStep, embedding_tables, trace_step
from hvps.backends.ps.shards import ShardVariables, ps_device
from hvps.errors import ConfigError

v1 = tf.compat.v1

_MIN_TABLE_BYTES = 16 << 10  # smaller embedding tables travel whole


@dataclass(frozen=True)
class Shape:
    """What a run is made of.

    Attributes:
        num_ps, num_workers: sizes of the cluster.
        accumulate: micro-batches of one tower and update.
        shares: parts of the objective that add up to one update.
        prefix: of all names that tasks share in this run.
    """

    num_ps: int
    num_workers: int
    accumulate: int
    shares: int
    prefix: str


@dataclass(frozen=True)
class Others:
    """What is not trained, `model.non_trainable_variables`, by index.

    Attributes:
        seeds: states of random generators, each replica's own.
        changing: what the step changes, such as BatchNormalization's statistics.
        fixed: what it never does.
    """

    variables: list[keras.Variable]
    seeds: list[int]
    changing: list[int]
    fixed: list[int]

    @classmethod
    def of(cls, model: keras.Model, changed: Sequence[bool]) -> Others:
        """Tell them apart.

        Raises:
            ConfigError: something changes that cannot be averaged.
        """
        variables = list(model.non_trainable_variables)
        weights = {id(v) for v in model.weights}
        seeds = [i for i, v in enumerate(variables) if id(v) not in weights]
        rest = [i for i in range(len(variables)) if i not in set(seeds)]
        changing = [i for i in rest if changed[i]]
        for v in (variables[i] for i in changing):
            if v.value.dtype != tf.float32:
                raise ConfigError(
                    f"task: {v.path} changes in training and is {v.dtype}",
                    rule="with parameter servers such state is float32, for it is averaged",
                    received=f"a non-trainable weight of type {v.dtype}",
                    do="leave it out, or train with backend.kind=allreduce",
                )
        return cls(variables, seeds, changing, [i for i in rest if not changed[i]])


class PsGraph:
    """Builds everything but the rule of update.

    Args:
        example: x and y of one batch, for types and shapes.
        clip_on_worker: the gradient is whole on the worker, so it is clipped there; otherwise the
            rule of update clips what it has averaged.
        state_moves: replicas send by how much they move what is not trained, not the new value.

    Raises:
        ConfigError: the model or the optimizer cannot be run on parameter servers.
    """

    def __init__(
        self,
        *,
        shape: Shape,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable[[Any, Any], Any],
        example: tuple[Any, Any],
        clip_on_worker: bool,
        state_moves: bool,
    ) -> None:
        check_optimizer(optimizer)
        self.shape, self._model = shape, model
        self.example = example
        self.clip_on_worker, self.state_moves = clip_on_worker, state_moves
        self.clipper = Clipper(optimizer.clipnorm, optimizer.global_clipnorm)
        self.tables: dict[int, Table] = {}
        self.placement, self.traced = self._place_and_trace(optimizer, loss)
        self.graph = tf.Graph()
        self.parameters = Parameters(
            model=model, optimizer=optimizer, placement=self.placement, prefix=shape.prefix
        )
        self.others = Others.of(model, self.traced.changed)
        with self.graph.as_default():
            self.parameters.place()
            self.state = StateVariables(self.changing, shape.num_ps, shape.prefix)
            self.counters = Counters(shape.num_workers, shape.prefix)

    def _place_and_trace(
        self, optimizer: keras.optimizers.Optimizer, loss: Any
    ) -> tuple[Placement, TracedStep]:
        layers = {
            index: layer
            for index, layer in embedding_tables(self._model).items()
            if _table_bytes(layer) >= _MIN_TABLE_BYTES
        }
        while True:
            placement = place(self._slots(optimizer, layers), self.shape.num_ps)
            self.tables = {i: _table(i, layer, placement) for i, layer in layers.items()}
            traced = trace_step(
                model=self._model,
                loss=loss,
                tables=list(self.tables.values()),
                x=self.example[0],
                y=self.example[1],
                shares=self.shape.shares,
            )
            if not traced.whole_tables:
                return placement, traced
            for index in traced.whole_tables:  # used as a matrix too, as tied output layers do
                del layers[index]

    def _slots(self, optimizer: keras.optimizers.Optimizer, tables: dict[int, Any]) -> list[Slot]:
        whole = not updates_elements(optimizer)
        return [
            Slot(
                v.path,
                tuple(v.shape),
                int(v.value.dtype.size),
                v.value.dtype.name,
                splittable=not whole and v.constraint is None,
                sparse=i in tables,
            )
            for i, v in enumerate(self._model.trainable_variables)
        ]

    @property
    def seed_variables(self) -> list[keras.Variable]:
        return [self.others.variables[i] for i in self.others.seeds]

    @property
    def changing(self) -> list[keras.Variable]:
        return [self.others.variables[i] for i in self.others.changing]

    # --- updates ---

    def apply(
        self, gradients: list[list[Any]], learning_rate: tf.Tensor, *, locked: bool
    ) -> list[Any]:
        """Operations that update every shard with the gradients of its parts, on its ps."""
        if self.clipper.active and not self.clip_on_worker:
            gradients = self._clipped(gradients)
        return [
            shard.apply(grads, learning_rate, locked=locked)
            for shard, grads in zip(self.parameters.shards, gradients, strict=True)
        ]

    def _clipped(self, gradients: list[list[Any]]) -> list[list[Any]]:
        """Clip what lies in parts on several ps: each sums its squares, ps 0 sums these."""
        squares: dict[int, list[tf.Tensor]] = {}
        for shard, grads in self._with(gradients):
            with v1.device(shard.device):
                for part, gradient in zip(shard.shard.parts, grads, strict=True):
                    squares.setdefault(part.index, []).append(sum_of_squares(gradient))
        order = sorted(squares)
        with v1.device(ps_device(0)):
            scales = self.clipper.scales([squares[i] for i in order])
        by_index = dict(zip(order, scales, strict=True))
        clipped = []
        for shard, grads in self._with(gradients):
            with v1.device(shard.device):
                clipped.append(
                    [
                        scaled(gradient, by_index[part.index])
                        for part, gradient in zip(shard.shard.parts, grads, strict=True)
                    ]
                )
        return clipped

    def _with(self, gradients: list[list[Any]]) -> list[tuple[ShardVariables, list[Any]]]:
        return list(zip(self.parameters.shards, gradients, strict=True))

    def row_bytes(self) -> float:
        """Bytes of one row with its index, over the tables that are looked up."""
        sizes = [4 * table.layer.output_dim + 8 for table in self.tables.values()]
        return sum(sizes) / len(sizes) if sizes else 0.0


def _table(index: int, layer: Any, placement: Placement) -> Table:
    where = sorted(
        (part.start, ps_device(shard.ps))
        for shard in placement.shards
        for part in shard.parts
        if part.index == index
    )
    return Table(index, layer, tuple(s for s, _ in where), tuple(d for _, d in where))


def _table_bytes(layer: Any) -> int:
    return int(np.prod(layer._embeddings.shape)) * int(layer._embeddings.value.dtype.size)
