"""The session's graph of one client: variables, towers, and how gradients become updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.ps.clipping import Clipper, scaled, sum_of_squares
from hvps.backends.ps.parameters import Parameters, Payload, StateVariables, merged
from hvps.backends.ps.placement import Placement, Slot, place
from hvps.backends.ps.replica import TracedStep, embedding_tables, trace_step
from hvps.backends.ps.shards import ShardVariables, ps_device
from hvps.errors import ConfigError

v1 = tf.compat.v1

_MIN_TABLE_BYTES = 16 << 10  # smaller embedding tables travel whole

# Optimizers whose update of an element depends on others of the same variable.
_WHOLE_VARIABLES = ("Adafactor", "Lamb", "Muon")


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


class Counters:
    """The global step and each worker's steps, on ps 0, counted with the updates themselves."""

    def __init__(self, num_workers: int, prefix: str) -> None:
        with v1.device(ps_device(0)):
            self.step = self._variable(f"{prefix}/global_step", [])
            self.by_worker = self._variable(f"{prefix}/worker_steps", [num_workers])
            self._lock = tf.CriticalSection(shared_name=f"{prefix}/step_lock")

    @staticmethod
    def _variable(name: str, shape: list[int]) -> Any:
        return v1.get_variable(
            name, shape=shape, dtype=tf.int64, use_resource=True, trainable=False,
            initializer=v1.zeros_initializer(),
        )  # fmt: skip

    def read(self) -> tf.Tensor:
        with v1.device(ps_device(0)):
            return self.step.read_value()

    def count(self, workers: Sequence[int]) -> tf.Tensor:
        """Add one update, to which `workers` contributed; gives the step before it, int64."""

        def add() -> tf.Tensor:
            before = tf.identity(self.step.read_value())
            with tf.control_dependencies([before]):
                adds = [self.step.assign_add(1, read_value=False)]
                ones = tf.IndexedSlices(
                    tf.ones([len(workers)], tf.int64), tf.constant(list(workers), tf.int64)
                )
                adds.append(self.by_worker.scatter_add(ones).op)
            with tf.control_dependencies(adds):
                return tf.identity(before)

        with v1.device(ps_device(0)):
            return self._lock.execute(add)


@dataclass(frozen=True)
class Feeds:
    """Placeholders of one replica.

    Attributes:
        micros: (x, y, weight) of each micro-batch.
        seeds: states of the model's seed generators.
    """

    micros: list[tuple[Any, Any, Any]]
    examples: Any
    learning_rate: Any
    seeds: list[Any]

    def flat(self) -> list[Any]:
        return [
            *tf.nest.flatten(self.micros), self.examples, self.learning_rate, *self.seeds,
        ]  # fmt: skip


@dataclass(frozen=True)
class Replica:
    """One worker's copy of the model in the graph.

    Attributes:
        worker: index of the task.
        payloads: gradients as they are sent, one per shard; `state_payloads` likewise.
        learning_rate: float32 scalar, on the worker.
        loss_sum: float32 scalar.
        rows: int32 scalar, rows fetched from embedding tables.
        new_seeds: states of the seed generators after the step.
        control: operations to run with it.
        begun: int64 scalar, the global step when the weights were read.
    """

    worker: int
    device: str
    feeds: Feeds
    payloads: list[Payload]
    state_payloads: list[tf.Tensor]
    learning_rate: tf.Tensor
    loss_sum: tf.Tensor
    rows: tf.Tensor
    new_seeds: list[tf.Tensor]
    control: list[Any]
    begun: tf.Tensor


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
        self._example, self._clip_on_worker = example, clip_on_worker
        self._state_moves = state_moves
        self.clipper = Clipper(optimizer.clipnorm, optimizer.global_clipnorm)
        self._tables: dict[int, Any] = {}
        self.placement, self.traced = self._place_and_trace(optimizer, loss)
        self.graph = tf.Graph()
        self.parameters = Parameters(
            model=model, optimizer=optimizer, placement=self.placement, prefix=shape.prefix
        )
        with self.graph.as_default():
            self.parameters.place()
            self._sort_others()
            self.state = StateVariables(self._changing, shape.num_ps, shape.prefix)
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
            where: dict[int, list[tuple[int, str]]] = {}
            for shard in placement.shards:
                for part in shard.parts:
                    if part.index in layers:
                        where.setdefault(part.index, []).append((part.start, ps_device(shard.ps)))
            self._tables = {i: _table(i, layers[i], sorted(w)) for i, w in where.items()}
            traced = trace_step(
                model=self._model,
                loss=loss,
                tables=list(self._tables.values()),
                x=self._example[0],
                y=self._example[1],
                shares=self.shape.shares,
            )
            if not traced.whole_tables:
                return placement, traced
            for index in traced.whole_tables:  # used as a matrix too, as tied output layers do
                del layers[index]

    def _slots(self, optimizer: keras.optimizers.Optimizer, tables: dict[int, Any]) -> list[Slot]:
        whole = type(optimizer).__name__ in _WHOLE_VARIABLES
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

    def _sort_others(self) -> None:
        """Tell apart what is not trained: random states, what changes, and what never does."""
        others = list(self._model.non_trainable_variables)
        weights = {id(v) for v in self._model.weights}
        self._seeds = [i for i, v in enumerate(others) if id(v) not in weights]
        changed = [i for i, c in enumerate(self.traced.changed) if c and i not in set(self._seeds)]
        for i in changed:
            if others[i].value.dtype != tf.float32:
                raise ConfigError(
                    f"task: {others[i].path} changes in training and is {others[i].dtype}",
                    rule="with parameter servers such state is float32, for it is averaged",
                    received=f"a non-trainable weight of type {others[i].dtype}",
                    do="leave it out, or train with backend.kind=allreduce",
                )
        self._others, self._changed = others, changed
        self._changing = [others[i] for i in changed]
        self._fixed = [i for i in range(len(others)) if i not in {*self._seeds, *changed}]

    @property
    def seed_variables(self) -> list[keras.Variable]:
        return [self._others[i] for i in self._seeds]

    @property
    def changing(self) -> list[keras.Variable]:
        return self._changing

    # --- a replica ---

    def replica(self, worker: int, devices: Sequence[str]) -> tuple[Replica, list[Any]]:
        """Add a worker's towers to the graph.

        Returns:
            The replica, and (variable, value) pairs of what lies on the worker itself.
        """
        home = f"/job:worker/task:{worker}"
        towers = [f"{home}/{device}" for device in devices] or [home]
        with v1.device(home):
            feeds = self._feeds(home)
        begun = self.counters.read()
        weights = self.parameters.pull(home)
        state = self.state.pull(home)
        fixed, local = self._fixed_values(home, worker)
        gradients: dict[int, list[Any]] = {}
        rows: dict[int, list[tuple[Any, Any]]] = {}
        outcomes: list[dict[str, Any]] = []
        last: list[dict[str, Any]] = []
        for d, device in enumerate(towers):
            others = self._others_for(feeds.seeds, state, fixed, d)
            for x, y, weight in feeds.micros:
                part = _device_share((x, y, weight), d, len(towers))
                placed = self._tower(weights, others, part, feeds.examples, device, outcomes)
                others = self._next_others(others, placed["others"])
                outcomes.append(placed)
                self._collect(placed, gradients, rows)
            last.append({"others": others})
        if self._state_moves:
            last = [{"others": self._moves(tower["others"], state)} for tower in last]
        return self._finished(worker, home, feeds, gradients, rows, outcomes, last, begun), local

    def _moves(self, others: list[Any], state: list[Any]) -> list[Any]:
        moves = list(others)
        for i, value in zip(self._changed, state, strict=True):
            moves[i] = others[i] - value
        return moves

    def _feeds(self, home: str) -> Feeds:
        def placeholder(value: Any) -> Any:
            return v1.placeholder(value.dtype, [None, *value.shape[1:]])

        micros = [
            (
                tf.nest.map_structure(placeholder, self._example[0]),
                tf.nest.map_structure(placeholder, self._example[1]),
                v1.placeholder(tf.float32, [None]),
            )
            for _ in range(self.shape.accumulate)
        ]
        return Feeds(
            micros,
            v1.placeholder(tf.float32, []),
            v1.placeholder(tf.float32, []),
            [v1.placeholder(v.value.dtype, tuple(v.shape)) for v in self.seed_variables],
        )

    def _fixed_values(self, home: str, worker: int) -> tuple[dict[int, Any], list[Any]]:
        """What never changes lies on the worker."""
        values, local = {}, []
        with v1.device(home):
            for i in self._fixed:
                kept = self._others[i]
                variable = v1.get_variable(
                    f"{self.shape.prefix}/fixed_{worker}/{i}",
                    shape=tuple(kept.shape),
                    dtype=kept.value.dtype,
                    use_resource=True,
                    trainable=False,
                    initializer=v1.zeros_initializer(),
                )
                values[i] = variable.read_value()
                local.append((variable, kept))
        return values, local

    def _others_for(self, seeds: list[Any], state: list[Any], fixed: Any, tower: int) -> list[Any]:
        others: list[Any] = [None] * len(self._others)
        for i, seed in zip(self._seeds, seeds, strict=True):
            # Each tower draws numbers of its own, and so its own dropout masks.
            offset = np.zeros(seed.shape.as_list(), seed.dtype.as_numpy_dtype)
            offset.reshape(-1)[0] = (0x85EBCA6B * tower) % 2**31
            others[i] = seed + offset if tower else seed
        for i, value in zip(self._changed, state, strict=True):
            others[i] = value
        for i, value in fixed.items():
            others[i] = value
        return others

    def _next_others(self, before: list[Any], after: list[Any]) -> list[Any]:
        """What the tower's next micro-batch begins with."""
        moving = {*self._seeds, *self._changed}
        return [after[i] if i in moving else value for i, value in enumerate(before)]

    def _tower(
        self,
        weights: list[Any],
        others: list[Any],
        part: tuple[Any, Any, Any],
        examples: Any,
        device: str,
        before: list[dict[str, Any]],
    ) -> dict[str, Any]:
        x, y, weight = part
        return self.traced.place(
            {
                "weights": weights,
                "others": others,
                "handles": [self.parameters.handles(t) for t in self._tables.values()],
                "x": x,
                "y": y,
                "weight": weight,
                "examples": examples,
            },
            device,
        )

    def _collect(self, placed: dict[str, Any], gradients: Any, rows: Any) -> None:
        dense = [i for i in range(len(self.parameters.weights)) if i not in self._tables]
        for i, gradient in zip(dense, placed["gradients"], strict=True):
            gradients.setdefault(i, []).append(gradient)
        for i, pair in zip(self.traced.lookups, placed["rows"], strict=True):
            rows.setdefault(i, []).append(pair)

    def _finished(
        self,
        worker: int,
        home: str,
        feeds: Feeds,
        gradients: dict[int, list[Any]],
        rows: dict[int, list[Any]],
        outcomes: list[dict[str, Any]],
        last: list[dict[str, Any]],
        begun: tf.Tensor,
    ) -> Replica:
        with v1.device(home):
            total: dict[int, Any] = {i: _sum(parts) for i, parts in gradients.items()}
            for i in self._tables:
                shape = self.parameters.weights[i].shape
                pairs = rows.get(i) or [_no_rows(self.parameters.weights[i])]
                total[i] = merged(pairs, tuple(shape))
            if self._clip_on_worker and self.clipper.active:
                order = sorted(total)
                scales = self.clipper.scales([[sum_of_squares(total[i])] for i in order])
                total = {i: scaled(total[i], s) for i, s in zip(order, scales, strict=True)}
            fetched = [tf.size(ids) for pairs in rows.values() for ids, _ in pairs]
            new_state = [
                _sum([tower["others"][i] for tower in last]) / float(len(last))
                if len(last) > 1
                else last[0]["others"][i]
                for i in self._changed
            ]
            loss_sum = _sum([placed["loss_sum"] for placed in outcomes])
            row_count = _sum(fetched) if fetched else tf.constant(0)
        return Replica(
            worker=worker,
            device=home,
            feeds=feeds,
            payloads=self.parameters.payloads(total, home),
            state_payloads=self.state.payloads(new_state, home),
            learning_rate=feeds.learning_rate,
            loss_sum=loss_sum,
            rows=row_count,
            new_seeds=[last[0]["others"][i] for i in self._seeds],
            control=[op for placed in outcomes for op in placed["control"]],
            begun=begun,
        )

    # --- updates ---

    def apply(
        self, gradients: list[list[Any]], learning_rate: tf.Tensor, *, locked: bool
    ) -> list[Any]:
        """Operations that update every shard with the gradients of its parts, on its ps."""
        if self.clipper.active and not self._clip_on_worker:
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
        sizes = [4 * layer_.layer.output_dim + 8 for layer_ in self._tables.values()]
        return sum(sizes) / len(sizes) if sizes else 0.0


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse what cannot be run shard by shard.

    Raises:
        ConfigError: names the optimizer, and those that can.
    """
    kind = type(optimizer)
    own = kind.__module__.startswith("keras.")
    if own and kind.__name__ in RUNNABLE:
        return
    if not own and kind.apply is keras.optimizers.Optimizer.apply:
        return  # the user's own update_step
    raise ConfigError(
        f"optimizer: {kind.__name__} cannot be run on parameter servers",
        rule=f"one of {', '.join(RUNNABLE)}, or a class of your own that keeps Keras's apply()",
        received=f"{kind.__module__}.{kind.__name__}, which needs all gradients in one place",
        do="use one of these, or backend.kind=allreduce",
    )


RUNNABLE = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lamb", "Lion", "Muon",
    "Nadam", "RMSprop", "SGD", "ScheduleFreeAdamW",
)  # fmt: skip


def _table(index: int, layer: Any, where: list[tuple[int, str]]) -> Any:
    from hvps.backends.ps.replica import Table

    return Table(index, layer, tuple(s for s, _ in where), tuple(d for _, d in where))


def _table_bytes(layer: Any) -> int:
    return int(np.prod(layer._embeddings.shape)) * int(layer._embeddings.value.dtype.size)


def _no_rows(weight: keras.Variable) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.zeros([0], tf.int32), tf.zeros([0, *weight.shape[1:]], weight.value.dtype)


def _sum(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tf.add_n(values)


def _device_share(part: tuple[Any, Any, Any], device: int, devices: int) -> tuple[Any, Any, Any]:
    """This device's rows of a worker's batch."""
    if devices == 1:
        return part
    rows = tf.shape(part[2])[0]
    start, stop = rows * device // devices, rows * (device + 1) // devices
    shared: tuple[Any, Any, Any] = tf.nest.map_structure(lambda t: t[start:stop], part)
    return shared
