"""One task in its cluster: its TensorFlow server, and its line to the coordinator in ps 0."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvps.backends.congestion import choose, in_use
from hvps.backends.ps.control import Control, wait_for_port
from hvps.backends.ps.coordinator import Coordinator
from hvps.backends.ps.lanes import Lanes
from hvps.backends.ps.listen import firewall_notice, listening_on
from hvps.cluster import Cluster, Tasks
from hvps.errors import PeerLostError
from hvps.log import logger
from hvps.ports import split_address
from hvps.runtime import threads_per_rank

if TYPE_CHECKING:
    from hvps.config import Config

v1 = tf.compat.v1
_CONTROL_VARIABLE = "hvps_control"


@dataclass(frozen=True)
class Member:
    """This process in the cluster, for as long as it lives.

    Attributes:
        target: what a session connects to.
        control: the line to the coordinator; None in its own process.
        coordinator: the coordinator itself, in the process of ps 0.
    """

    cluster: Cluster
    tasks: Tasks
    target: str
    control: Control | None
    coordinator: Coordinator | None
    server: Any

    @classmethod
    def start(cls, config: Config, cluster: Cluster) -> Member:
        """Start this task's server and find the others.

        Raises:
            ConfigError: the server cannot listen at its address, or the task is here already.
            PeerLostError: a parameter server did not come in time; names it.
        """
        tasks = cluster.tasks
        assert tasks is not None, "the cluster's addresses are known before it is started"
        timeout = config.backend.stall_timeout
        server = start_server(config, cluster, tasks)
        coordinator = None
        if cluster.role == "ps" and cluster.rank == 0:
            host, _ = split_address(tasks.ps[0])
            between = config.backend.replication == "between_graph"
            coordinator = Coordinator(
                tasks,
                host,
                timeout,
                tolerant=between and config.backend.update != "sync",
                spare=config.backend.backup_workers if between else 0,
            )
            _announce(server.target, f"{host} {coordinator.port} {coordinator.token}")
        control = None
        if coordinator is None:
            control = _join(server.target, cluster, tasks, timeout)
        notice = firewall_notice([*tasks.ps, *tasks.worker])
        if notice and cluster.is_root:
            logger.info(notice)
            logger.info(_describe_congestion(config.backend.congestion_control))
        return cls(cluster, tasks, server.target, control, coordinator, server)

    def wait_for_workers(self, timeout: float) -> None:
        """In-graph: the client's session needs all workers.

        Raises:
            PeerLostError: one did not come in time; names it.
        """
        for index, address in enumerate(self.tasks.worker):
            task = f"worker {index} ({address})"
            wait_for_port(*split_address(address), task=task, timeout=timeout)

    def session(self, graph: tf.Graph, *, log_placement: bool = False, filters: list[str]) -> Any:
        """A session on the cluster that depends only on the tasks in `filters`."""
        config = v1.ConfigProto(
            allow_soft_placement=True, log_device_placement=log_placement, device_filters=filters
        )
        return v1.Session(self.target, graph=graph, config=config)


def _join(target: str, cluster: Cluster, tasks: Tasks, timeout: float) -> Control:
    """Find ps 0, and through it the other ps.

    Raises:
        ConfigError: the task is here already.
        PeerLostError: a ps did not come in time; names it.
    """
    names = [f"ps {index} ({address})" for index, address in enumerate(tasks.ps)]
    wait_for_port(*split_address(tasks.ps[0]), task=names[0], timeout=timeout)
    control = _reach_coordinator(target, names[0], cluster.name, timeout)
    if cluster.role == "worker":
        control.call("meet")
        for name, address in zip(names, tasks.ps, strict=True):  # not only here, but reached
            wait_for_port(*split_address(address), task=name, timeout=timeout)
    return control


def _describe_congestion(wanted: str) -> str:
    chosen = choose(wanted)
    if chosen is None:
        return f"TCP congestion control of the servers: {in_use()} (the system's)"
    return (
        f"TCP congestion control of the servers: {chosen}"
        f" (backend.congestion_control: {wanted}; the system's is {in_use()})"
    )


def _reach_coordinator(target: str, ps_0: str, task: str, timeout: float) -> Control:
    """Connect to it; one that has just come to its end may still be where the next one will be."""
    deadline = time.monotonic() + timeout
    while True:
        host, port, token = _find_coordinator(target, ps_0, timeout).split()
        try:
            return Control(host, int(port), token, task=task, coordinator=ps_0, timeout=timeout)
        except PeerLostError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def cluster_definition(tasks: Tasks) -> Any:
    return tf.train.ClusterSpec({"ps": list(tasks.ps), "worker": list(tasks.worker)})


def start_server(config: Config, cluster: Cluster, tasks: Tasks) -> Any:
    address = (tasks.ps if cluster.role == "ps" else tasks.worker)[cluster.rank]
    host, port = split_address(address)
    threads = threads_per_rank(cluster)
    cpus = [int(name.partition(":")[2]) + 1 for name in config.backend.devices if "cpu" in name]
    proto = v1.ConfigProto(
        intra_op_parallelism_threads=threads,
        # Operations that wait for others must not keep those they wait for from running.
        inter_op_parallelism_threads=max(4, threads),
        device_count={"CPU": max([1, *cpus]), **({"GPU": 0} if cluster.role == "ps" else {})},
        gpu_options=v1.GPUOptions(allow_growth=True),
    )
    congestion = choose(config.backend.congestion_control)
    with listening_on(host, port, congestion):
        return tf.distribute.Server(
            cluster_definition(tasks),
            job_name=cluster.role,
            task_index=cluster.rank,
            config=proto,
        )


def _control_variable() -> Any:
    with v1.device("/job:ps/task:0/cpu:0"):
        return v1.get_variable(
            _CONTROL_VARIABLE,
            shape=(),
            dtype=tf.string,
            use_resource=True,
            trainable=False,
            initializer=v1.constant_initializer(""),
        )


def _announce(target: str, text: str) -> None:
    """Leave word in ps 0 of where the coordinator listens, for the tasks know only its server."""
    with tf.Graph().as_default():
        assign = _control_variable().assign(text)
        with v1.Session(target, config=v1.ConfigProto(device_filters=["/job:ps/task:0"])) as s:
            s.run(assign.op)


def _find_coordinator(target: str, task: str, timeout: float) -> str:
    """What `_announce` has left in ps 0, whose name for people is `task`.

    Raises:
        PeerLostError: it does not answer.
    """
    lane = Lanes(1, lambda _lane: _read_announcement(target, timeout))
    try:
        return str(lane.submit().result(timeout))  # TensorFlow itself would wait for ever
    except (FutureTimeoutError, tf.errors.FailedPreconditionError) as err:
        raise PeerLostError(
            f"{task} listens, but did not answer within {timeout:g} s",
            rule="every task of the cluster is started, each at its own address",
            do=f"look at the process of {task}: it may stand still, or be something else",
        ) from err
    finally:
        lane.close()


def _read_announcement(target: str, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    with tf.Graph().as_default():
        read = _control_variable().read_value()
        with v1.Session(target, config=v1.ConfigProto(device_filters=["/job:ps/task:0"])) as s:
            while True:
                try:
                    return str(s.run(read).decode())
                except tf.errors.FailedPreconditionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
