"""The life of a parameter-server cluster: tasks that die, come back, stand still or never come.

Each task is a process of its own that was started by hand; what the others do is the promise.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hvps.ports import split_address
from tests.distributed.ps_cluster import PsCluster, new_tasks
from tests.launching import Job, result_of

START_TIMEOUT = 90
END_TIMEOUT = 15  # the promise of the design, not a measurement
FINISH_TIMEOUT = 90
STALL_TIMEOUT = 8  # in place of the two minutes that are borne by default

COMMON = [
    "task=tests.tasks:Staged",
    "train.global_batch=8",
    "train.eval_every=0",
    "log.tensorboard=false",
    "log.every=5",
    "backend.stall_timeout=30",
]
ENDLESS = [*COMMON, "train.steps=1000000"]
SYNC = "backend.update=sync"
IN_GRAPH = "backend.replication=in_graph"

Clusters = Callable[..., "Staged"]


class Staged:
    """A cluster whose training is slow until it is let go."""

    def __init__(self, folder: Path, ps: int, workers: int, arguments: list[str]) -> None:
        env = {"HVPS_TEST_PAUSE": "0.01"}
        self.folder = folder
        self.cluster = PsCluster(folder, new_tasks(ps, workers), arguments, env=env)

    @property
    def jobs(self) -> dict[str, Job]:
        return self.cluster.jobs

    @property
    def run(self) -> Path:
        return (self.folder / "runs" / "latest").resolve()

    @property
    def address(self) -> dict[str, str]:
        return {
            f"{role} {i}": address
            for role, addresses in self.cluster.tasks.items()
            for i, address in enumerate(addresses)
        }

    def start(self, *names: str, env: dict[str, str] | None = None) -> None:
        self.cluster.start(*names, env=env)

    def start_again(self, name: str, tasks: dict[str, list[str]]) -> str:
        """Start a task that is there, at its address in `tasks`; returns what the second one said
        when it was refused."""
        second = PsCluster(self.folder / "twice", tasks, self.cluster.arguments)
        second.folder.mkdir(exist_ok=True)
        try:
            second.start(name)
            assert second.wait(START_TIMEOUT) == {name: 2}
        finally:
            second.end()
        return second.outputs

    def start_all(self) -> None:
        """Start the ps, and when they listen, the workers; wait until all train."""
        names = self.cluster.names
        ps = [name for name in names if name.startswith("ps")]
        self.start(*ps)
        for name in ps:
            self.wait_until_listening(name)
        workers = [name for name in names if name not in ps]
        self.start(*workers)
        alone = IN_GRAPH in self.cluster.arguments
        self.wait_until_training(*(workers[:1] if alone else workers))

    def wait_for(self, name: str, condition: Callable[[], Any], what: str) -> None:
        """Wait until the condition holds; fail if the task `name` ends before."""
        try:
            self.jobs[name].wait_for(condition, START_TIMEOUT, what)
        except AssertionError as err:
            raise AssertionError(f"{name}: {err}\n{self.cluster.outputs}") from None

    def wait_until_listening(self, name: str) -> None:
        def listens() -> bool:
            with suppress(OSError), socket.create_connection(split_address(self.address[name])):
                return True
            return False

        self.wait_for(name, listens, "server")

    def wait_until_training(self, *names: str) -> None:
        for name in names:
            mark = self.folder / f"fetched.{self.jobs[name].process.pid}"
            self.wait_for(name, mark.exists, "training")

    @property
    def steps(self) -> int:
        """The last step that the chief has recorded."""
        metrics = self.run / "metrics.jsonl"
        found = re.findall(r'"step": (\d+)', metrics.read_text()) if metrics.exists() else []
        return int(found[-1]) if found else 0

    def wait_for_steps(self, count: int) -> None:
        self.wait_for("worker 0", lambda: self.steps >= count, f"step {count}")

    def log(self, name: str) -> str:
        path = self.run / "logs" / f"{name.replace(' ', '-')}.log"
        return path.read_text() if path.exists() else ""

    def let_go(self) -> None:
        """From now on training is as fast as it can be."""
        (self.folder / "go").touch()

    def signal(self, name: str, number: signal.Signals) -> None:
        self.jobs[name].process.send_signal(number)

    def wait(self, timeout: float, *names: str) -> dict[str, int]:
        return self.cluster.wait(timeout, *names)

    def others(self, *names: str) -> list[str]:
        return [name for name in self.jobs if name not in names]

    def lose(self, name: str) -> str:
        """Kill a task; all others end in time, not well. Returns what they said."""
        self.signal(name, signal.SIGKILL)
        since = time.monotonic()
        codes = self.wait(END_TIMEOUT, *self.others(name))
        print(f"{name} killed: the others ended within {time.monotonic() - since:.2f} s")
        assert all(code == 1 for code in codes.values()), f"{codes}\n{self.cluster.outputs}"
        return "\n".join(self.jobs[other].output for other in self.others(name))


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Clusters]:
    """`staged(ps, workers, arguments)` prepares a cluster; whatever is left of it is ended."""
    made: list[Staged] = []

    def make(ps: int, workers: int, arguments: list[str]) -> Staged:
        made.append(Staged(tmp_path, ps, workers, arguments))
        return made[-1]

    yield make
    for each in made:
        for name in each.jobs:
            with suppress(ProcessLookupError):
                each.signal(name, signal.SIGCONT)
        each.cluster.end()


# --- asynchronous: training goes on ---


@pytest.mark.timeout(240)
def test_async_goes_on_without_a_killed_worker(staged: Clusters) -> None:
    cluster = staged(2, 3, [*COMMON, "train.steps=400"])
    cluster.start_all()
    pid = cluster.jobs["worker 1"].process.pid
    cluster.signal("worker 1", signal.SIGKILL)
    cluster.wait_for("worker 0", lambda: "died" in cluster.jobs["worker 0"].output, "news")
    cluster.let_go()
    codes = cluster.wait(FINISH_TIMEOUT, *cluster.others("worker 1"))
    assert set(codes.values()) == {0}, cluster.cluster.outputs
    told = rf"worker 1 \(pid {pid} on .+\) died; the others go on"
    assert len(re.findall(told, cluster.jobs["worker 0"].output)) == 1
    result = result_of(cluster.run)
    assert result["steps"] == 400
    assert sum(result["worker_steps"]) == 400
    assert min(result["worker_steps"]) > 0
    assert result["lost_updates"] == 0
    assert result["worker_deaths"] == [0, 1, 0]
    assert (cluster.run / "model.keras").exists()


@pytest.mark.timeout(240)
def test_async_workers_come_back_fail_and_come_twice(staged: Clusters) -> None:
    """Worker 1 dies and is started again, worker 2 cannot read its data, worker 1 is started a
    second time; the chief goes on through all of it."""
    cluster = staged(2, 3, [*COMMON, "train.steps=600"])
    cluster.start("ps 0", "ps 1", "worker 0", "worker 1")
    cluster.start("worker 2", env={"HVPS_TEST_FAIL_AT": "60"})
    cluster.wait_until_training("worker 0", "worker 1")
    assert cluster.wait(START_TIMEOUT, "worker 2") == {"worker 2": 1}
    for text in (cluster.jobs["worker 2"].output, cluster.log("worker 2")):
        assert re.search(r"worker 2 of 3 failed: OSError: example \d+ cannot be read", text)
        assert "Traceback" in text

    pid = cluster.jobs["worker 1"].process.pid
    port = cluster.address["worker 1"].rpartition(":")[2]
    twice = cluster.start_again("worker 1", cluster.cluster.tasks)
    assert f"worker 1: port {port} is in use by pid {pid} (" in twice
    twice = cluster.start_again("worker 1", new_tasks(2, 3) | {"ps": cluster.cluster.tasks["ps"]})
    assert f"worker 1 is here already: pid {pid} on " in twice

    cluster.signal("worker 1", signal.SIGKILL)
    cluster.wait(5, "worker 1")
    cluster.start("worker 1", env={"PYTHONPROFILEIMPORTTIME": "1"})
    back = cluster.jobs["worker 1 again"]
    imported = re.compile(r"\| +tensorflow$", re.MULTILINE)  # it is written once both are loaded
    cluster.wait_for("worker 1 again", lambda: imported.search(back.output), "import")
    since = time.monotonic()
    cluster.wait_for(
        "worker 1 again", lambda: "worker 1 is back" in cluster.log("worker 1"), "return"
    )
    print(f"worker 1 was back {time.monotonic() - since:.2f} s after TensorFlow's import")
    cluster.wait_until_training("worker 1 again")
    cluster.let_go()
    gone = ("worker 1", "worker 2")
    codes = cluster.wait(FINISH_TIMEOUT, *cluster.others(*gone))
    assert set(codes.values()) == {0}, cluster.cluster.outputs
    result = result_of(cluster.run)
    assert result["steps"] == sum(result["worker_steps"]) == 600
    assert result["lost_updates"] == 0
    assert result["worker_deaths"] == [0, 1, 1]
    done = int(re.findall(r"worker 1 is back: (\d+) steps done before", cluster.log("worker 1"))[0])
    assert 0 < done < result["worker_steps"][1]


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_async_goes_on_without_a_worker_that_stands_still(staged: Clusters) -> None:
    """Wherever it stands in its step: it holds no lock meanwhile. After the deadline it is given
    up, and when it goes on, it ends."""
    cluster = staged(2, 2, [*ENDLESS, f"backend.stall_timeout={STALL_TIMEOUT}"])
    cluster.let_go()
    cluster.start_all()
    for _ in range(10):
        cluster.signal("worker 1", signal.SIGSTOP)
        cluster.wait_for_steps(cluster.steps + 50)
        cluster.signal("worker 1", signal.SIGCONT)
    chief = cluster.jobs["worker 0"]
    assert "worker 1" not in chief.output
    pid = cluster.jobs["worker 1"].process.pid
    cluster.signal("worker 1", signal.SIGSTOP)
    cluster.wait_for("worker 0", lambda: f"worker 1 (pid {pid} on " in chief.output, "news")
    assert f"stands still: it was silent for {STALL_TIMEOUT} s; the others go on" in chief.output
    cluster.signal("worker 1", signal.SIGCONT)
    assert cluster.wait(END_TIMEOUT, "worker 1") == {"worker 1": 1}
    assert "worker 1 itself stood still for" in cluster.jobs["worker 1"].output
    cluster.wait_for_steps(cluster.steps + 50)
    cluster.signal("worker 0", signal.SIGTERM)
    codes = cluster.wait(END_TIMEOUT, *cluster.others("worker 1"))
    assert codes == {"ps 0": 0, "ps 1": 0, "worker 0": 143}
    result = result_of(cluster.run)
    assert result["steps"] == sum(result["worker_steps"])
    assert result["lost_updates"] == 0
    assert result["worker_deaths"] == [0, 1]


# --- a loss that cannot be borne ---


@pytest.mark.timeout(180)
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_ps_ends_all(staged: Clusters, index: int) -> None:
    cluster = staged(2, 2, ENDLESS)
    cluster.start_all()
    name = f"ps {index}"
    output = cluster.lose(name)
    pid = cluster.jobs[name].process.pid
    named = rf"{name} \((pid {pid} on .+|{cluster.address[name]})\) died"
    assert len(re.findall(named, output)) == 3, output  # each of the others says so


@pytest.mark.timeout(180)
def test_a_killed_chief_ends_all(staged: Clusters) -> None:
    cluster = staged(2, 3, ENDLESS)
    cluster.start_all()
    output = cluster.lose("worker 0")
    pid = cluster.jobs["worker 0"].process.pid
    assert len(re.findall(rf"worker 0 \(pid {pid} on .+\) died", output)) == 4, output


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "arguments",
    [
        [SYNC],
        pytest.param([IN_GRAPH, SYNC], marks=pytest.mark.slow),
        pytest.param([IN_GRAPH], marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_ends_all_who_wait_for_it(staged: Clusters, arguments: list[str]) -> None:
    cluster = staged(1, 2, [*ENDLESS, *arguments])
    cluster.start_all()
    cluster.wait_for_steps(10)
    output = cluster.lose("worker 1")
    pid = cluster.jobs["worker 1"].process.pid
    assert len(re.findall(rf"worker 1 \(pid {pid} on .+\) died", output)) == 2, output


@pytest.mark.timeout(180)
def test_sync_ends_with_a_worker_that_fails(staged: Clusters) -> None:
    cluster = staged(1, 2, [*ENDLESS, SYNC])
    cluster.start("ps 0", "worker 0")
    cluster.start("worker 1", env={"HVPS_TEST_FAIL_AT": "60"})
    assert cluster.wait(START_TIMEOUT, "worker 1") == {"worker 1": 1}
    since = time.monotonic()
    assert set(cluster.wait(END_TIMEOUT).values()) == {1}
    print(f"worker 1 failed: the others ended within {time.monotonic() - since:.2f} s")
    output = cluster.jobs["worker 1"].output
    assert re.search(r"worker 1 of 2 failed: OSError: example \d+ cannot be read", output)
    assert "Traceback" in output
    for name in cluster.others("worker 1"):
        assert "worker 1 (pid " in cluster.jobs[name].output, name
        assert "Traceback" not in cluster.jobs[name].output


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ps 0", []),
        pytest.param("ps 1", [], marks=pytest.mark.slow),
        pytest.param("worker 1", [SYNC], marks=pytest.mark.slow),
        pytest.param("worker 0", [], marks=pytest.mark.slow),
    ],
)
def test_a_task_that_stands_still_ends_all(
    staged: Clusters, name: str, arguments: list[str]
) -> None:
    """And it ends by itself when it goes on."""
    cluster = staged(2, 2, [*ENDLESS, *arguments, f"backend.stall_timeout={STALL_TIMEOUT}"])
    cluster.start_all()
    cluster.signal(name, signal.SIGSTOP)
    since = time.monotonic()
    codes = cluster.wait(STALL_TIMEOUT + END_TIMEOUT, *cluster.others(name))
    print(f"{name} stopped: the others ended within {time.monotonic() - since:.2f} s")
    assert set(codes.values()) == {1}, codes
    pid = cluster.jobs[name].process.pid
    named = rf"{name} \((pid {pid} on .+|{cluster.address[name]})\) stands still"
    output = "\n".join(cluster.jobs[other].output for other in cluster.others(name))
    assert len(re.findall(named, output)) == 3, output
    cluster.signal(name, signal.SIGCONT)
    since = time.monotonic()
    assert cluster.wait(END_TIMEOUT, name) == {name: 1}
    print(f"{name} went on: it ended within {time.monotonic() - since:.2f} s")
    assert f"ends: {name} itself stood still for " in cluster.jobs[name].output


# --- tasks that come late, or never ---


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("ps 1", []),
        pytest.param("worker 0", [], marks=pytest.mark.slow),
        pytest.param("worker 2", [SYNC], marks=pytest.mark.slow),
        pytest.param("worker 2", [SYNC, IN_GRAPH], marks=pytest.mark.slow),
    ],
)
def test_a_needed_task_that_never_comes_is_named(
    staged: Clusters, missing: str, arguments: list[str]
) -> None:
    stall = f"backend.stall_timeout={STALL_TIMEOUT}"
    cluster = staged(2, 3, [*ENDLESS, *arguments, "train.global_batch=9", stall])
    cluster.start(*(name for name in cluster.cluster.names if name != missing))
    codes = cluster.wait(START_TIMEOUT)
    assert set(codes.values()) == {1}, codes
    text = f"{missing} ({cluster.address[missing]}) did not come within {STALL_TIMEOUT} s"
    for name, job in cluster.jobs.items():
        assert text in job.output, f"{name}: {job.output}"


@pytest.mark.timeout(180)
def test_all_wait_for_ps_0(staged: Clusters) -> None:
    """Somebody is there who does not answer, or nobody."""
    cluster = staged(2, 1, [*ENDLESS, "backend.stall_timeout=3"])
    address = cluster.address["ps 0"]
    with socket.create_server(split_address(address)):
        cluster.start("worker 0")
        assert cluster.wait(START_TIMEOUT) == {"worker 0": 1}
    named = f"ps 0 ({address}) listens, but did not answer within 3 s"
    assert named in cluster.jobs["worker 0"].output
    cluster.start("ps 1")
    assert cluster.wait(START_TIMEOUT, "ps 1") == {"ps 1": 1}
    assert f"ps 0 ({address}) did not come within" in cluster.jobs["ps 1"].output


@pytest.mark.timeout(180)
def test_others_train_without_a_worker_that_never_comes(staged: Clusters) -> None:
    """Bounded: they wait for it at first, and do not for ever."""
    arguments = ["train.steps=60", "backend.update=bounded"]
    cluster = staged(1, 3, [*COMMON, *arguments, f"backend.stall_timeout={STALL_TIMEOUT}"])
    cluster.let_go()
    cluster.start("ps 0", "worker 0", "worker 1")
    codes = cluster.wait(START_TIMEOUT)
    assert set(codes.values()) == {0}, codes
    output = cluster.jobs["worker 0"].output
    address = cluster.address["worker 2"]
    assert f"worker 2 ({address}) did not come within {STALL_TIMEOUT} s; the others go on" in output
    assert "worker 2 never came; training has ended without it" in output
    result = result_of(cluster.run)
    assert result["steps"] == 60
    assert result["worker_steps"][2] == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "arguments", [[SYNC], pytest.param(["backend.update=bounded"], marks=pytest.mark.slow)]
)
def test_a_late_worker_joins_at_once(staged: Clusters, arguments: list[str]) -> None:
    """The ps come after the chief, and the other worker when the chief waits for it."""
    cluster = staged(1, 2, [*COMMON, *arguments, "train.steps=60"])
    cluster.start("worker 0")
    cluster.wait_for("worker 0", lambda: _loaded(cluster.jobs["worker 0"]), "TensorFlow")
    cluster.start("ps 0")
    cluster.wait_for("worker 0", lambda: "60 steps" in cluster.log("worker 0"), "banner")
    cluster.let_go()
    cluster.start("worker 1")
    codes = cluster.wait(FINISH_TIMEOUT)
    assert set(codes.values()) == {0}, codes
    result = result_of(cluster.run)
    assert result["steps"] == 60
    if SYNC in arguments:
        assert result["worker_steps"] == [60, 60]
    else:
        assert sum(result["worker_steps"]) == 60
        assert min(result["worker_steps"]) > 10


def _loaded(job: Job) -> bool:
    """Whether the task imports TensorFlow or has done so."""
    return "libtensorflow" in Path(f"/proc/{job.process.pid}/maps").read_text()


# --- stopped by signal ---


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "arguments", "number"),
    [
        ("worker 0", [], signal.SIGTERM),
        ("worker 1", [SYNC], signal.SIGTERM),
        pytest.param("worker 0", [IN_GRAPH], signal.SIGINT, marks=pytest.mark.slow),
        ("ps 1", [], signal.SIGTERM),
        pytest.param("ps 0", [SYNC], signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_task_stops_all(
    staged: Clusters, name: str, arguments: list[str], number: signal.Signals
) -> None:
    """Who trains ends with 128 and the signal's number, who only serves with 0: it was of use to
    the end."""
    cluster = staged(2, 2, [*ENDLESS, *arguments])
    cluster.start_all()
    cluster.wait_for_steps(5)
    cluster.signal(name, number)
    since = time.monotonic()
    codes = cluster.wait(END_TIMEOUT)
    print(f"{number.name} to {name}: all ended within {time.monotonic() - since:.2f} s")
    code = 128 + number
    second = 0 if IN_GRAPH in arguments else code
    expected = {"ps 0": 0, "ps 1": 0, "worker 0": code, "worker 1": second}
    assert codes == expected, cluster.cluster.outputs
    assert (cluster.run / "model.keras").exists()
    result = result_of(cluster.run)
    assert result["stopped_by"] == number.name
    assert 0 < result["steps"] < 1_000_000
    assert result["lost_updates"] == 0


@pytest.mark.timeout(120)
def test_ps_that_nobody_has_come_to_can_be_stopped(staged: Clusters) -> None:
    cluster = staged(2, 1, ENDLESS)
    cluster.start("ps 0", "ps 1")
    for name in ("ps 0", "ps 1"):
        cluster.wait_for(name, lambda name=name: _minds(cluster.jobs[name]), "handler")
    cluster.signal("ps 1", signal.SIGTERM)
    assert cluster.wait(END_TIMEOUT) == {"ps 0": 1, "ps 1": 143}
    for job in cluster.jobs.values():
        assert "ps 1 was stopped by SIGTERM" in job.output


def _minds(job: Job) -> bool:
    """Whether the process has a handler of its own for SIGTERM."""
    status = Path(f"/proc/{job.process.pid}/status").read_text()
    (caught,) = re.findall(r"SigCgt:\s*([0-9a-f]+)", status)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
