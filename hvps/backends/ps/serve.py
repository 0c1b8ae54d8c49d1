"""What a task does that only serves: a ps, or in-graph a worker that is not the client."""

from __future__ import annotations

import sys
import time

import tensorflow as tf

from hvps.backends.ps.backend import run_prefix
from hvps.backends.ps.control import Control
from hvps.backends.ps.member import Member
from hvps.backends.ps.shards import ps_device
from hvps.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED
from hvps.restart import begin_anew_after
from hvps.signals import StopSignals

v1 = tf.compat.v1
_LINGER_S = 3.0
_POLL_S = 0.2


def serve(member: Member) -> int:
    """Serve until the chief has finished.

    A signal is passed on to those who train: they need this task until they have saved.

    Returns:
        The exit code: 0, or 1 when the cluster failed; if this task was asked to stop, 128 and the
        signal's number.
    """
    with StopSignals() as signals:
        return _serve(member, signals)


def _serve(member: Member, signals: StopSignals) -> int:
    coordinator, control = member.coordinator, member.control
    code, asked = EXIT_FAILURE, False
    if coordinator is not None:
        coordinator.applied_steps = lambda run, worker: _applied_steps(member, run, worker)
    while not (coordinator.wait_until_over(_POLL_S) if coordinator else _is_done(control)):
        if asked or not any(signals.votes):
            continue
        asked = True
        name, code = (
            ("SIGTERM", EXIT_PREEMPTED) if signals.votes[0] else ("SIGINT", EXIT_INTERRUPTED)
        )
        if coordinator is not None:
            coordinator.stop(member.cluster.name, name)
        elif control is not None:
            control.exit_code = code
            control.call("stop_all", signal_name=name)
    if coordinator is None:
        return EXIT_OK
    coordinator.linger(_LINGER_S)
    if coordinator.failure is None:
        return EXIT_OK
    if not asked:
        begin_anew_after(coordinator.failure, member.cluster.name)
    text = f"hvps: error: {member.cluster.name} ends: {coordinator.failure}"
    print(text, file=sys.stderr, flush=True)
    return code


def _is_done(control: Control | None) -> bool:
    assert control is not None, "only ps 0 has none"
    return control.wait_until_done(_POLL_S)


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
