"""The rules of update: what one run of the session does with the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvps.backends.ps.clipping import scaled
from hvps.backends.ps.graph import PsGraph
from hvps.backends.ps.parameters import merged
from hvps.backends.ps.shards import ShardVariables, ps_device
from hvps.backends.ps.towers import Replica
from hvps.step import merge_rows

v1 = tf.compat.v1


def apply_at_once(graph: PsGraph, replica: Replica, *, alone: bool) -> tf.Tensor:
    """Asynchronous: the replica's gradients are applied when they arrive, each shard under its
    lock, then the step is counted.

    Args:
        alone: no other replica changes what is not trained; it is then assigned, otherwise moved
            by the difference to what was read, so that nobody's move is lost.

    Returns:
        Staleness, int64 scalar: updates by others between reading and counting.
    """
    parameters = graph.parameters
    gradients = [
        parameters.unpacked(payload, shard)
        for payload, shard in zip(replica.payloads, parameters.shards, strict=True)
    ]
    done = graph.apply(gradients, replica.learning_rate, locked=True)
    done += _move_state(graph, replica, alone)
    with tf.control_dependencies([*done, *replica.control]):
        before = graph.counters.count([replica.worker])
    with v1.device(ps_device(0)):
        return before - replica.begun


class Handover:
    """A queue on a worker, between two runs of the session that make one step.

    With one between fetching weights and computing, and one between computing and sending, one
    step's weights come down the link while another's gradients go up. In a single run both would be
    under way at the same time too, but in step with each other: first both fetch, then both send,
    and half of the link stands idle.

    Args:
        carried: a nest of tensors on the worker.
        capacity: steps for which they may wait.

    Attributes:
        put: the operation that ends the first run.
        taken: the same nest, in the second run.
    """

    def __init__(self, carried: Any, *, device: str, capacity: int, name: str) -> None:
        tensors = tf.nest.flatten(carried, expand_composites=True)
        with v1.device(device):
            queue = v1.FIFOQueue(capacity, [t.dtype for t in tensors], shared_name=name)
            self.put = queue.enqueue([tf.identity(tensor) for tensor in tensors])
            taken = queue.dequeue()
        taken = taken if isinstance(taken, list) else [taken]
        for tensor, like in zip(taken, tensors, strict=True):
            tensor.set_shape(like.shape)
        self.taken = tf.nest.pack_sequence_as(carried, taken, expand_composites=True)


def hand_over(graph: PsGraph, replica: Replica, capacity: int) -> tuple[Any, Replica]:
    """Divide a replica's step between computing gradients and sending them.

    Returns:
        The operation that computes, and a replica whose gradients are those of earlier calls of it.
    """
    with tf.control_dependencies(replica.control):
        handover = Handover(
            [replica.payloads, replica.state_payloads, replica.learning_rate, replica.begun],
            device=replica.device,
            capacity=capacity,
            name=f"{graph.shape.prefix}/computed_{replica.worker}",
        )
    payloads, states, rate, begun = handover.taken
    return handover.put, replace(
        replica,
        payloads=payloads,
        state_payloads=states,
        learning_rate=rate,
        begun=begun,
        control=[],
    )


def _move_state(graph: PsGraph, replica: Replica, alone: bool) -> list[Any]:
    operations: list[Any] = []
    for group, payload in enumerate(replica.state_payloads):
        for variable, value in graph.state.unpacked(payload, group):
            with v1.device(graph.state.groups[group][0]):
                operations.append(
                    variable.assign(value, read_value=False)
                    if alone
                    else variable.assign_add(value, read_value=False)
                )
    return operations


def apply_together(graph: PsGraph, replicas: Sequence[Replica]) -> tf.Tensor:
    """In-graph, synchronous: the sum over all replicas is applied in the same run.

    Returns:
        The step before, int64 scalar.
    """
    parameters = graph.parameters
    gradients = []
    for i, shard in enumerate(parameters.shards):
        total = _sum_payloads([r.payloads[i] for r in replicas], shard)
        gradients.append(parameters.unpacked(total, shard))
    done = graph.apply(gradients, replicas[0].learning_rate, locked=False)
    for group, (device, _) in enumerate(graph.state.groups):
        with v1.device(device):
            payloads = [r.state_payloads[group] for r in replicas]
            mean = payloads[0] if len(payloads) == 1 else tf.add_n(payloads) / len(payloads)
        for variable, value in graph.state.unpacked(mean, group):
            with v1.device(device):
                done.append(variable.assign(value, read_value=False))
    with tf.control_dependencies([*done, *(op for r in replicas for op in r.control)]):
        return graph.counters.count([r.worker for r in replicas])


def _sum_payloads(payloads: list[Any], shard: ShardVariables) -> Any:
    if len(payloads) == 1:
        return payloads[0]
    with v1.device(shard.device):
        if not shard.shard.sparse:
            return tf.add_n(payloads)
        pairs = [(p.indices, p.values) for p in payloads]
        return merged(pairs, shard.values[0].shape.as_list())


class Rounds:
    """Between-graph, synchronous: workers add their gradients up on the parameter servers; when
    enough have come, the chief applies the sum.

    Every shard has an accumulator, which takes a gradient only if it belongs to the round that is
    open. With backup workers ps 0 says who is in: the first that have computed their gradients,
    the same ones for all shards.

    Args:
        backup: some of the workers are not waited for.
    """

    def __init__(self, graph: PsGraph, *, backup: bool) -> None:
        self._graph, self._backup = graph, backup
        prefix = graph.shape.prefix
        self._accumulators = [
            self._accumulator(shard, f"{prefix}/sum_{i}")
            for i, shard in enumerate(graph.parameters.shards)
        ]
        self._state_sums = []
        for group, (device, members) in enumerate(graph.state.groups):
            size = sum(graph.state.values[i].shape.num_elements() for i in members)
            shape = [size] if len(members) > 1 else graph.state.values[members[0]].shape.as_list()
            with v1.device(device):
                self._state_sums.append(_dense_sum(tf.float32, shape, f"{prefix}/state_{group}"))
        with v1.device(ps_device(0)):
            self.needed = v1.placeholder(tf.int32, [])
            self.round = v1.placeholder(tf.int64, [])
            self.learning_rate = v1.placeholder(tf.float32, [])
            self.all_examples = v1.placeholder(tf.float32, [])
            self._admitted = _counter(f"{prefix}/admitted", tf.int64, [2])
            self._examples = _counter(f"{prefix}/admitted_examples", tf.float32, [])
            self._lock = tf.CriticalSection(shared_name=f"{prefix}/admission")

        every = [*self._accumulators, *self._state_sums]
        self.open = [accumulator.set_global_step(self.round) for accumulator in every]

    def initial(self) -> list[tuple[Any, Any]]:
        return [(self._admitted, [-1, 0]), (self._examples, 0.0)]

    @staticmethod
    def _accumulator(shard: ShardVariables, name: str) -> Any:
        value = shard.values[0]
        with v1.device(shard.device):
            if shard.shard.sparse:
                return v1.SparseConditionalAccumulator(
                    value.dtype, shape=value.shape, shared_name=name, reduction_type="SUM"
                )
            size = sum(v.shape.num_elements() for v in shard.values)
            shape = [size] if len(shard.values) > 1 else value.shape.as_list()
            return _dense_sum(value.dtype, shape, name)

    # --- a worker's part ---

    def push(self, replica: Replica) -> tf.Tensor:
        """Add the replica's gradients to the open round.

        Returns:
            int64 scalar: the round, or -1 if they came too late.
        """
        round_ = self._admit(replica) if self._backup else self.round
        operations: list[Any] = [*replica.control]
        shards = self._graph.parameters.shards
        for accumulator, payload, shard in zip(
            self._accumulators, replica.payloads, shards, strict=True
        ):
            with v1.device(shard.device):
                if shard.shard.sparse:
                    operations.append(_push_rows(accumulator, payload, round_, replica.device))
                else:
                    operations.append(accumulator.apply_grad(payload, local_step=round_))
        for accumulator, payload, (device, _) in zip(
            self._state_sums, replica.state_payloads, self._graph.state.groups, strict=True
        ):
            with v1.device(device):
                operations.append(accumulator.apply_grad(payload, local_step=round_))
        with tf.control_dependencies(operations), v1.device(ps_device(0)):
            return tf.identity(round_)

    def _admit(self, replica: Replica) -> tf.Tensor:
        tensors = tf.nest.flatten(replica.payloads, expand_composites=True)
        with v1.device(replica.device), tf.control_dependencies(tensors):
            mine = tf.add_n([tf.reduce_sum(weight) for _, _, weight in replica.feeds.micros])

        def decide() -> tf.Tensor:
            step = self._graph.counters.step.read_value()
            before = self._admitted.read_value()
            known = self._examples.read_value()
            fresh = tf.equal(before[0], step)
            count = tf.where(fresh, before[1], tf.zeros_like(before[1]))
            examples = tf.where(fresh, known, 0.0)
            is_in = tf.equal(round_, step) & (count < tf.cast(needed, tf.int64))
            after = tf.stack([step, count + tf.cast(is_in, tf.int64)])
            assigns = [
                self._admitted.assign(after, read_value=False),
                self._examples.assign(examples + tf.where(is_in, mine, 0.0), read_value=False),
            ]
            with tf.control_dependencies(assigns):
                return tf.where(is_in, round_, tf.constant(-1, tf.int64))

        with v1.device(ps_device(0)):
            # Here before the lock is taken: who holds it waits for no other task.
            mine, round_, needed = map(tf.identity, (mine, self.round, self.needed))
            return self._lock.execute(decide)

    # --- the chief's part ---

    def close(self) -> tf.Tensor:
        """Wait until `needed` gradients are there, and apply their sum.

        Returns:
            The step before, int64 scalar.
        """
        graph, parameters = self._graph, self._graph.parameters
        sums: list[Any] = []
        for accumulator, shard in zip(self._accumulators, parameters.shards, strict=True):
            with v1.device(shard.device):
                if shard.shard.sparse:
                    sums.append(accumulator.take_indexed_slices_grad(self.needed))
                else:
                    sums.append(accumulator.take_grad(self.needed))
        states = []
        for accumulator, (device, _) in zip(self._state_sums, graph.state.groups, strict=True):
            with v1.device(device):
                states.append(accumulator.take_grad(self.needed))
        gradients = [
            parameters.unpacked(total, shard)
            for total, shard in zip(sums, parameters.shards, strict=True)
        ]
        if self._backup:
            gradients = self._weighed(gradients, [*tf.nest.flatten(sums, expand_composites=True)])
        done = graph.apply(gradients, self.learning_rate, locked=False)
        for group, total in enumerate(states):
            device = graph.state.groups[group][0]
            with v1.device(device):
                mean = total / tf.cast(self.needed, tf.float32)
            for variable, value in graph.state.unpacked(mean, group):
                with v1.device(device):
                    done.append(variable.assign(value, read_value=False))
        with tf.control_dependencies(done), v1.device(ps_device(0)):
            before = graph.counters.step.read_value()
            with tf.control_dependencies([before]):
                add = graph.counters.step.assign_add(1, read_value=False)
            with tf.control_dependencies([add]):
                return tf.identity(before)

    def _weighed(self, gradients: list[list[Any]], taken: list[Any]) -> list[list[Any]]:
        """The mean over the examples that are in, not over all of the round's."""
        with v1.device(ps_device(0)), tf.control_dependencies(taken):
            scale = self.all_examples / self._examples.read_value()
        weighed = []
        for shard, grads in zip(self._graph.parameters.shards, gradients, strict=True):
            with v1.device(shard.device):
                weighed.append([scaled(g, scale) for g in grads])
        return weighed


def _dense_sum(dtype: Any, shape: list[int], name: str) -> Any:
    return v1.ConditionalAccumulator(dtype, shape=shape, shared_name=name, reduction_type="SUM")


def _push_rows(accumulator: Any, rows: tf.IndexedSlices, round_: tf.Tensor, worker: str) -> Any:
    """Add rows to a sparse accumulator, which adds two sets of rows up by walking along both: they
    must ascend, each once. It also refuses to take none, so row 0 is always sent, if with zeros."""
    with v1.device(worker):
        indices = tf.concat([tf.cast(rows.indices, tf.int64), tf.zeros([1], tf.int64)], 0)
        nothing = tf.zeros([1, *rows.values.shape[1:]], rows.values.dtype)
        values = tf.concat([rows.values, nothing], 0)
        once = merge_rows(tf.IndexedSlices(values, indices, rows.dense_shape))
        order = tf.argsort(once.indices)
        indices, values = tf.gather(once.indices, order), tf.gather(once.values, order)
    return accumulator.apply_grad(indices, values, local_step=round_)


def _counter(name: str, dtype: Any, shape: list[int]) -> Any:
    return v1.get_variable(
        name, shape=shape, dtype=dtype, use_resource=True, trainable=False,
        initializer=v1.zeros_initializer(),
    )  # fmt: skip
