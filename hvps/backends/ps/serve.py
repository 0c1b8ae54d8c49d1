"""What a task does that only serves: a ps, or in-graph a worker that is not the client."""

from __future__ import annotations

import sys
import time

import tensorflow as tf

from hvps.backends.ps.backend import run_prefix
from hvps.backends.ps.coordinator import Coordinator
from hvps.backends.ps.member import Member
from hvps.backends.ps.shards import ps_device
from hvps.errors import EXIT_FAILURE, EXIT_OK
from hvps.signals import StopSignals

v1 = tf.compat.v1
_LINGER_S = 3.0


def serve(member: Member) -> int:
    """Serve until the chief has finished.

    Returns:
        The exit code: 0, or 1 when the cluster failed.
    """
    coordinator = member.coordinator
    with StopSignals():  # the workers are asked too, and need this task until they have saved
        return _serve(member, coordinator)


def _serve(member: Member, coordinator: Coordinator | None) -> int:
    if coordinator is None:
        assert member.control is not None
        member.control.wait_until_done()
        return EXIT_OK
    coordinator.applied_steps = lambda run, worker: _applied_steps(member, run, worker)
    why = coordinator.wait_until_over()
    coordinator.linger(_LINGER_S)
    if why is None:
        return EXIT_OK
    print(f"hvps: error: {member.cluster.name} ends: {why}", file=sys.stderr, flush=True)
    return EXIT_FAILURE


def _applied_steps(member: Member, run: int, worker: int) -> int:
    """How many of a dead worker's updates were applied; what is on its way may still arrive."""
    workers = len(member.tasks.worker)
    with tf.Graph().as_default() as graph:
        with v1.device(ps_device(0)):
            steps = v1.get_variable(
                f"{run_prefix(run)}/worker_steps", shape=[workers], dtype=tf.int64,
                use_resource=True, trainable=False, initializer=v1.zeros_initializer(),
            ).read_value()  # fmt: skip
        before = -1
        with member.session(graph, filters=["/job:ps/task:0"]) as session:
            while (now := int(session.run(steps)[worker])) != before:
                before = now
                time.sleep(0.1)
    return now
