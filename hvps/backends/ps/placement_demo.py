"""One computation over three tasks: a constant on a ps, arithmetic on a worker, another's session.

Part of hvps.demo; training places its variables by placement.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvps.backends.ps.member import Member
from hvps.errors import TrainingError

v1 = tf.compat.v1
_PS, _WORKER = "/job:ps/task:0", "/job:worker/task:1"
_X = (0.0, 1.0, 2.0, 3.0)


def show_placement(member: Member) -> list[str]:
    """Compute `y = 0.1 x + 0.3` on worker 1, with x on ps 0, through this task's server.

    Args:
        member: any worker; ps 0 and worker 1 are there.

    Returns:
        For each operation its device, as TensorFlow logs placements, and the result.

    Raises:
        TrainingError: an operation ran elsewhere, or the result is wrong.
    """
    with tf.Graph().as_default() as graph:
        with v1.device(f"{_PS}/cpu:0"):
            x = tf.constant(_X, name="x")
        with v1.device(f"{_WORKER}/cpu:0"):
            product = tf.multiply(tf.constant(0.1, name="weight"), x, name="mul")
            y = tf.add(product, tf.constant(0.3, name="bias"), name="y")
    # What log_device_placement prints is for the eyes only, and only if TensorFlow's C++ code may
    # speak: the graphs that the tasks were given say the same.
    options = v1.RunOptions(output_partition_graphs=True)
    given = v1.RunMetadata()
    with v1.Session(member.target, graph=graph, config=_session_config(member)) as session:
        result = session.run(y, options=options, run_metadata=given)
    # TensorFlow has added operations that send and receive between the tasks: left out.
    nodes = {node.name: node for part in given.partition_graphs for node in part.node}
    own = [nodes[op.name] for op in graph.get_operations() if op.name in nodes]
    _check({node.name: node.device for node in own}, np.asarray(result))
    lines = [f"{node.name}: ({node.op}): {node.device}" for node in own]
    return [*lines, f"x = {_show(_X)}, y = {_show(result)}"]


def _session_config(member: Member) -> Any:
    config = v1.ConfigProto(
        device_filters=[_PS, _WORKER, f"/job:worker/task:{member.cluster.rank}"]
    )
    # All is constant here: TensorFlow would compute y beforehand, and nothing be left to place.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    return config


def _check(devices: dict[str, str], result: np.ndarray) -> None:
    on_ps, on_worker = (
        f"{task}/device:CPU:0".replace("/task", "/replica:0/task") for task in (_PS, _WORKER)
    )
    expected = {"x": on_ps, **dict.fromkeys(("weight", "mul", "bias", "y"), on_worker)}
    if devices != expected:
        wrong = sorted(set(expected.items()) ^ set(devices.items()))
        raise TrainingError(
            "placement: an operation is not where it was put",
            rule=f"x on {on_ps}, all others on {on_worker}",
            received=", ".join(f"{name} on {device}" for name, device in wrong),
            do="report this with the version of TensorFlow",
        )
    if not np.allclose(result, 0.1 * np.asarray(_X) + 0.3, atol=1e-6):
        raise TrainingError(
            "placement: the result is wrong",
            rule="y = 0.1 x + 0.3",
            received=f"x = {_show(_X)}, y = {_show(result)}",
            do="report this with the version of TensorFlow",
        )


def _show(values: np.ndarray | tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:.1f}" for value in values) + "]"
