"""One worker's copies of the model in the session's graph: what goes in, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.ps.clipping import scaled, sum_of_squares
from hvps.backends.ps.parameters import Payload, merged

if TYPE_CHECKING:
    from hvps.backends.ps.graph import PsGraph

v1 = tf.compat.v1


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


class Towers:
    """Builds replicas.

    Args:
        graph: the run's variables and the traced step.
        example: x and y of one batch, for types and shapes.
    """

    def __init__(self, graph: PsGraph, example: tuple[Any, Any]) -> None:
        self._graph, self._example = graph, example
        self._others = graph.others

    def add(
        self, worker: int, devices: Sequence[str], through: Callable[[Any, str], Any] | None = None
    ) -> tuple[Replica, list[Any]]:
        """Add a worker's towers to the default graph.

        Args:
            through: what the weights go through when they have come to the worker; is given a nest
                of tensors and the worker's device.

        Returns:
            The replica, and (variable, value) pairs of what lies on the worker itself.
        """
        home = f"/job:worker/task:{worker}"
        towers = [f"{home}/{device}" for device in devices] or [home]
        with v1.device(home):
            feeds = self._feeds()
        begun = self._graph.counters.read()
        weights = self._graph.parameters.pull(home)
        state = self._graph.state.pull(home)
        if through is not None:
            tables = [i for i, weight in enumerate(weights) if weight is None]
            dense = [weight for weight in weights if weight is not None]
            dense, state, begun = through([dense, state, begun], home)
            weights = list(dense)
            for i in tables:
                weights.insert(i, None)
        fixed, local = self._fixed_values(home, worker)
        gradients: dict[int, list[Any]] = {}
        rows: dict[int, list[tuple[Any, Any]]] = {}
        outcomes: list[dict[str, Any]] = []
        last: list[list[Any]] = []
        for d, device in enumerate(towers):
            others = self._others_for(feeds.seeds, state, fixed, d)
            for micro in feeds.micros:
                part = _device_share(micro, d, len(towers))
                placed = self._tower(weights, others, part, feeds.examples, device)
                others = self._next_others(others, placed["others"])
                outcomes.append(placed)
                self._collect(placed, gradients, rows)
            last.append(others)
        if self._graph.state_moves:
            last = [self._moves(others, state) for others in last]
        return self._finished(worker, home, feeds, gradients, rows, outcomes, last, begun), local

    def _moves(self, others: list[Any], state: list[Any]) -> list[Any]:
        moves = list(others)
        for i, value in zip(self._others.changing, state, strict=True):
            moves[i] = others[i] - value
        return moves

    def _feeds(self) -> Feeds:
        def placeholder(value: Any) -> Any:
            return v1.placeholder(value.dtype, [None, *value.shape[1:]])

        micros = [
            (
                tf.nest.map_structure(placeholder, self._example[0]),
                tf.nest.map_structure(placeholder, self._example[1]),
                v1.placeholder(tf.float32, [None]),
            )
            for _ in range(self._graph.shape.accumulate)
        ]
        return Feeds(
            micros,
            v1.placeholder(tf.float32, []),
            v1.placeholder(tf.float32, []),
            [v1.placeholder(v.value.dtype, tuple(v.shape)) for v in self._graph.seed_variables],
        )

    def _fixed_values(self, home: str, worker: int) -> tuple[dict[int, Any], list[Any]]:
        """What never changes lies on the worker."""
        values, local = {}, []
        with v1.device(home):
            for i in self._others.fixed:
                kept = self._others.variables[i]
                variable = v1.get_variable(
                    f"{self._graph.shape.prefix}/fixed_{worker}/{i}",
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
        others: list[Any] = [None] * len(self._others.variables)
        for i, seed in zip(self._others.seeds, seeds, strict=True):
            # Each tower draws numbers of its own, and so its own dropout masks.
            offset = np.zeros(seed.shape.as_list(), seed.dtype.as_numpy_dtype)
            offset.reshape(-1)[0] = (0x85EBCA6B * tower) % 2**31
            others[i] = seed + offset if tower else seed
        for i, value in zip(self._others.changing, state, strict=True):
            others[i] = value
        for i, value in fixed.items():
            others[i] = value
        return others

    def _next_others(self, before: list[Any], after: list[Any]) -> list[Any]:
        """What the tower's next micro-batch begins with."""
        moving = {*self._others.seeds, *self._others.changing}
        return [after[i] if i in moving else value for i, value in enumerate(before)]

    def _tower(
        self,
        weights: list[Any],
        others: list[Any],
        part: tuple[Any, Any, Any],
        examples: Any,
        device: str,
    ) -> dict[str, Any]:
        x, y, weight = part
        return self._graph.traced.place(
            {
                "weights": weights,
                "others": others,
                "handles": [self._graph.parameters.handles(t) for t in self._graph.tables.values()],
                "x": x,
                "y": y,
                "weight": weight,
                "examples": examples,
            },
            device,
        )

    def _collect(self, placed: dict[str, Any], gradients: Any, rows: Any) -> None:
        dense = [
            i for i in range(len(self._graph.parameters.weights)) if i not in self._graph.tables
        ]
        for i, gradient in zip(dense, placed["gradients"], strict=True):
            gradients.setdefault(i, []).append(gradient)
        for i, pair in zip(self._graph.traced.lookups, placed["rows"], strict=True):
            rows.setdefault(i, []).append(pair)

    def _finished(
        self,
        worker: int,
        home: str,
        feeds: Feeds,
        gradients: dict[int, list[Any]],
        rows: dict[int, list[Any]],
        outcomes: list[dict[str, Any]],
        last: list[list[Any]],
        begun: tf.Tensor,
    ) -> Replica:
        with v1.device(home):
            total: dict[int, Any] = {i: _sum(parts) for i, parts in gradients.items()}
            for i in self._graph.tables:
                shape = self._graph.parameters.weights[i].shape
                pairs = rows.get(i) or [_no_rows(self._graph.parameters.weights[i])]
                total[i] = merged(pairs, tuple(shape))
            if self._graph.clip_on_worker and self._graph.clipper.active:
                order = sorted(total)
                scales = self._graph.clipper.scales([[sum_of_squares(total[i])] for i in order])
                total = {i: scaled(total[i], s) for i, s in zip(order, scales, strict=True)}
            fetched = [tf.size(ids) for pairs in rows.values() for ids, _ in pairs]
            new_state = [
                _sum([others[i] for others in last]) / float(len(last))
                if len(last) > 1
                else last[0][i]
                for i in self._others.changing
            ]
            loss_sum = _sum([placed["loss_sum"] for placed in outcomes])
            row_count = _sum(fetched) if fetched else tf.constant(0)
        return Replica(
            worker=worker,
            device=home,
            feeds=feeds,
            payloads=self._graph.parameters.payloads(total, home),
            state_payloads=self._graph.state.payloads(new_state, home),
            learning_rate=feeds.learning_rate,
            loss_sum=loss_sum,
            rows=row_count,
            new_seeds=[last[0][i] for i in self._others.seeds],
            control=[op for placed in outcomes for op in placed["control"]],
            begun=begun,
        )


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
