"""The coordinator and the lines to it, over real sockets in one process."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from hvps.backends.ps.control import Control, wait_for_port
from hvps.backends.ps.coordinator import Coordinator
from hvps.backends.ps.wire import ConnectionLost, connect, receive, send
from hvps.cluster import Tasks
from hvps.errors import PeerLostError
from hvps.ports import free_ports

TASKS = Tasks(ps=("127.0.0.1:1",), worker=("127.0.0.1:2", "127.0.0.1:3"))
SPEC = {
    "workers": 2,
    "start": 0,
    "total": 4,
    "update": "async",
    "max_staleness": 0,
    "worker_steps": None,
    "by_worker": None,
}


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator(TASKS, "127.0.0.1", 30.0, tolerant=True)
    yield made
    made.do_finish("the test")
    made.linger(2.0)


Join = Callable[[str], Control]


@pytest.fixture
def join(coordinator: Coordinator) -> Join:
    def connected(task: str) -> Control:
        return Control(
            "127.0.0.1",
            coordinator.port,
            coordinator.token,
            task=task,
            coordinator="ps 0",
            timeout=30.0,
        )

    return connected


@pytest.mark.timeout(20)
def test_values_are_waited_for(join: Join) -> None:
    chief, worker = join("worker 0"), join("worker 1")
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(worker.lookup("where")))
    thread.start()
    chief.publish("where", {"a": [1, 2]})
    thread.join(10)
    assert found == [{"a": [1, 2]}]


@pytest.mark.timeout(20)
def test_a_run_from_its_beginning_to_its_end(join: Join) -> None:
    chief, worker = join("worker 0"), join("worker 1")
    chief.call("begin_run", number=0, spec=SPEC)
    chief.call("set_ready", number=0)
    done = {"steps": 1, "dropped": 0, "examples": 8, "loss_sum": 0.5, "staleness": {"1": 1}}
    dealt = []
    for index, control in enumerate((worker, chief)):
        control.call("join", number=0, worker=1 - index)
        report = None
        for _ in range(2):
            answer = control.call("claim", number=0, worker=1 - index, done=report)
            dealt.append(answer["step"])
            report = done
        control.call("report", number=0, worker=1 - index, done=done)
    assert dealt == [0, 1, 2, 3]
    assert worker.call("claim", number=0, worker=1, done=None) == {"end": None}
    worker.call("leave", number=0, worker=1, done=None)
    assert chief.call("wait_for_others", number=0, seconds=5)["absent"] == []
    summary = chief.call("summary", number=0)
    assert summary["steps"] == 4
    assert summary["staleness_histogram"] == {"1": 4}


@pytest.mark.timeout(20)
def test_sums_over_the_workers(join: Join) -> None:
    controls = [join("worker 0"), join("worker 1")]
    found: list[int] = []

    def add(control: Control, value: int) -> None:
        for key in ("a", "b"):
            answer = control.call("add_up", key=key, value=value, parties=2)
            found.append(answer["sum"])

    threads = [
        threading.Thread(target=add, args=(control, 3 + i)) for i, control in enumerate(controls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [7] * 4


@pytest.mark.timeout(20)
def test_without_the_token_nobody_is_heard(coordinator: Coordinator) -> None:
    connection = connect("127.0.0.1", coordinator.port, 5.0)
    send(connection, {"token": "guess", "kind": "calls", "task": "worker 1"})
    with pytest.raises(ConnectionLost):
        receive(connection, 5.0)


@pytest.mark.timeout(30)
def test_a_second_task_of_a_name_is_refused(coordinator: Coordinator, join: Join) -> None:
    join("worker 1").call("news")
    second = (
        "from hvps.backends.ps.control import Control\n"
        f"c = Control('127.0.0.1', {coordinator.port}, '{coordinator.token}', task='worker 1',"
        " coordinator='ps 0', timeout=10.0)\n"
        "c.wait_until_done()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", second], capture_output=True, text=True, timeout=20
    )
    assert ended.returncode == 2
    assert "worker 1 is here already: pid " in ended.stderr


@pytest.mark.timeout(20)
def test_a_missing_port_is_named() -> None:
    (port,) = free_ports(1)
    with pytest.raises(PeerLostError, match=r"ps 3 did not come within 0.3 s"):
        wait_for_port("127.0.0.1", port, task="ps 3", timeout=0.3)


@pytest.mark.timeout(20)
def test_a_connection_to_itself_is_none() -> None:
    """The kernel may give a connection to a port in its range that very port as its own end."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
        own.connect(("127.0.0.1", port))  # it can be done: this is what must not count
    real = socket.create_connection

    def to_itself(address: tuple[str, int], timeout: float) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.bind(address)
        connection.connect(address)
        return connection

    (port,) = free_ports(1)
    try:
        socket.create_connection = to_itself  # type: ignore[assignment]
        with pytest.raises(ConnectionRefusedError, match="connected to itself"):
            connect("127.0.0.1", port, 5.0)
    finally:
        socket.create_connection = real
    with socket.socket() as free_again:
        free_again.bind(("127.0.0.1", port))
