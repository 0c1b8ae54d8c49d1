"""`hvps launch`: how its tasks start, speak and end, with small programs in the tasks' place."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import hvps.launcher
from hvps.cluster import Tasks
from hvps.overrides import load_config
from hvps.plan_ranks import _shares
from hvps.plan_tasks import choose_addresses, task_commands
from hvps.ports import check_own_address, free_ports, split_address
from hvps.prefixed_output import PrefixedLines
from hvps.sampling import Plan
from hvps.supervisor import Supervisor

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(60)

# A task that says "up" and waits; it goes on when its folder has a file "go".
WAIT = """
import os, signal, sys, time
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""
# A worker that stops when it is asked to, and says by which signal.
STOPPABLE = """
import os, signal, sys, time
def stop(number, frame):
    print("stop by", signal.Signals(number).name, flush=True)
    open("go", "w").close()
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
print("up", flush=True)
while True:
    time.sleep(0.02)
"""
PS = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
""" + WAIT.replace("import os, signal, sys, time\n", "")
STUBBORN = PS.replace('os.path.exists("go")', "False")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class Launch:
    """A supervisor in a process of its own, with what it prints."""

    def __init__(self, folder: Path, programs: Mapping[str, str], **seconds: float) -> None:
        self.folder = folder
        note = "import os; open(f'pid.{os.getpid()}', 'w').close()\n"
        commands = {name: [sys.executable, "-c", note + text] for name, text in programs.items()}
        main = (
            "import sys, json; from hvps.supervisor import Supervisor\n"
            "given = json.loads(sys.argv[1])\n"
            "sys.exit(Supervisor(given[0], **given[1]).run())"
        )
        self.path = folder / "output"
        with self.path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", main, json.dumps([commands, seconds])],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TF_CONFIG": "{}"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.path.read_text()

    @property
    def tasks(self) -> list[int]:
        return [int(file.name.partition(".")[2]) for file in self.folder.glob("pid.*")]

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.output}"
            time.sleep(0.02)

    def wait_until_up(self, count: int) -> None:
        self.wait_for(lambda: self.output.count("up\n") == count, f"{count} tasks")

    def wait(self) -> int:
        return self.process.wait(40)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.tasks:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(programs: Mapping[str, str], **seconds: float) -> Launch:
        started.append(Launch(tmp_path, programs, **seconds))
        return started[-1]

    yield start
    left = [pid for each in started for pid in each.tasks if alive(pid)]
    for each in started:
        each.end()
    assert not left, "tasks outlived their launcher"


Launcher = Callable[..., Launch]


def test_all_end_well(launch: Launcher) -> None:
    job = launch({"ps 0": WAIT, "worker 0": "print('hello'); open('go', 'w')"})
    assert job.wait() == 0
    assert sorted(job.output.splitlines()) == ["[ps 0] up", "[worker 0] hello"]


def test_what_a_task_is_given(launch: Launcher) -> None:
    """Nothing to read, a session of its own, no TF_CONFIG that says otherwise."""
    program = (
        "import os, sys\n"
        "print(repr(sys.stdin.read()), os.getsid(0) == os.getpid(), 'TF_CONFIG' in os.environ)"
    )
    job = launch({"worker 0": program})
    assert job.wait() == 0
    assert job.output == "[worker 0] '' True False\n"


def test_the_first_failure_is_named(launch: Launcher) -> None:
    failing = "import sys; print('hvps: error: x', file=sys.stderr); sys.exit(7)"
    waits = WAIT.replace('os.path.exists("go")', "os.getppid() < 0")
    job = launch({"ps 0": waits, "worker 0": failing}, grace=0.2)
    assert job.wait() == 7
    # ps 0 may come up after the other has failed.
    lines = [line for line in job.output.splitlines() if line != "[ps 0] up"]
    assert lines[-2:] == [
        "[worker 0] hvps: error: x",
        "hvps: error: worker 0 ended with exit code 7",
    ]
    assert job.output.count("ended with") == 1  # ps 0, which was ended for it, is no failure


def test_a_killed_task(launch: Launcher) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    others = "import sys, time; time.sleep(0.5); print('lost worker 1'); sys.exit(1)"
    job = launch({"ps 0": others, "worker 0": others, "worker 1": killed})
    started = time.monotonic()
    assert job.wait() == 128 + 9
    assert time.monotonic() - started < 10  # it does not wait for the whole grace
    assert job.output.count("lost worker 1") == 2  # the others could say what they noticed
    assert job.output.count("hvps: error: ") == 1
    assert "hvps: error: worker 1 was killed by SIGKILL" in job.output


def test_tasks_that_do_not_end_are_killed(launch: Launcher) -> None:
    job = launch({"ps 0": STUBBORN, "worker 0": WAIT + "sys.exit(1)"}, grace=0.3, kill_after=0.3)
    job.wait_until_up(2)
    (job.folder / "go").touch()
    assert job.wait() == 1
    assert "worker 0 ended with exit code 1" in job.output
    assert len(job.tasks) == 2


def test_parameter_servers_that_go_on_without_workers(launch: Launcher) -> None:
    programs = {"ps 0": STUBBORN, "ps 1": STUBBORN, "worker 0": WAIT}
    job = launch(programs, grace=0.3, kill_after=0.3)
    job.wait_until_up(3)
    (job.folder / "go").touch()
    assert job.wait() == 1
    assert "hvps: error: ps 0 and ps 1 are still running 0.3 s after all workers" in job.output


def test_what_a_task_leaves_behind_is_ended(launch: Launcher) -> None:
    """A helper of a task holds its output open, and would live on."""
    child = "import os, time; open(f'pid.{os.getpid()}', 'w').close(); time.sleep(60)"
    program = (
        "import glob, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "while len(glob.glob('pid.*')) < 2: time.sleep(0.02)\n"
    )
    job = launch({"worker 0": program})
    assert job.wait() == 0
    assert len(job.tasks) == 2


@pytest.mark.parametrize(
    ("number", "passed_on", "code"),
    [
        (signal.SIGINT, "SIGINT", 130),
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGUSR1, "SIGTERM", 143),
        (signal.SIGHUP, "SIGTERM", 143),
    ],
)
def test_a_signal_is_passed_on(launch: Launcher, number: int, passed_on: str, code: int) -> None:
    job = launch({"ps 0": PS, "worker 0": STOPPABLE, "worker 1": STOPPABLE})
    job.wait_until_up(3)
    os.kill(job.process.pid, number)
    assert job.wait() == code
    assert job.output.count(f"stop by {passed_on}") == 2
    assert "error" not in job.output


def test_a_worker_that_was_asked_to_stop_is_no_failure(launch: Launcher) -> None:
    """The signal came to a worker itself: all agree on a stop, and the chief may save for long."""
    saving = WAIT + "time.sleep(0.5); print('saved'); sys.exit(143)"
    job = launch({"worker 0": saving, "worker 1": WAIT + "sys.exit(143)"}, grace=0.1)
    job.wait_until_up(2)
    (job.folder / "go").touch()
    assert job.wait() == 143
    assert "[worker 0] saved" in job.output
    assert "error" not in job.output


def test_a_second_signal_kills(launch: Launcher) -> None:
    once = STUBBORN.replace("signal.SIG_IGN", "lambda *_: print('heard', flush=True)")
    job = launch({"ps 0": once, "worker 0": once})
    job.wait_until_up(2)
    os.kill(job.process.pid, signal.SIGINT)
    job.wait_for(lambda: job.output.count("heard") == 2, "signal")
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait() == 130
    assert "error" not in job.output


def test_a_failure_after_a_signal_is_one(launch: Launcher) -> None:
    failing = STOPPABLE.replace("128 + number", "5")
    job = launch({"ps 0": PS, "worker 0": failing})
    job.wait_until_up(2)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == 5
    assert "worker 0 ended with exit code 5" in job.output


def test_tasks_go_with_a_launcher_that_is_killed(launch: Launcher) -> None:
    job = launch({"ps 0": STUBBORN, "worker 0": STUBBORN})
    job.wait_until_up(2)
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.wait_for(lambda: not any(alive(pid) for pid in job.tasks), "end of the tasks")


def test_nobody_reads_on(tmp_path: Path) -> None:
    """As in `hvps launch ... | head -1`: it ends, as any program does."""
    chatter = "import time\nwhile True: print('x', flush=True); time.sleep(0.01)"
    code = (
        "import sys; from hvps.supervisor import Supervisor\n"
        f"sys.exit(Supervisor({{'worker 0': [sys.executable, '-c', {chatter!r}]}}).run())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"[worker 0] x\n"
        process.stdout.close()
        assert process.wait(30) == 143
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


# Lines


def prefixed(*chunks: bytes) -> str:
    raw = io.BytesIO()
    lines = PrefixedLines("ps 0", 0, io.TextIOWrapper(raw, encoding="ascii"))
    for chunk in chunks:
        assert lines.feed(chunk)
    lines.end()
    return raw.getvalue().decode()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\nc", b"\n"], ["ab", "c"]),
        ([b"no end"], ["no end"]),
        ([b"10%\r20%\rdone\n"], ["10%", "20%", "done"]),
        ([b"a\r\nb\r", b"\nc\n"], ["a", "b", "c"]),
        ([b"a\r", b"", b"\nb\n"], ["a", "b"]),
        ([b"a\n\nb\n"], ["a", "", "b"]),
        (["é😀\n".encode()[:3], "é😀\n".encode()[3:]], ["é😀"]),
        ([b"x" * 70000, b"y\n"], ["x" * 70000, "y"]),
        ([], []),
    ],
)  # fmt: skip
def test_prefixed_lines(chunks: list[bytes], lines: list[str]) -> None:
    assert prefixed(*chunks) == "".join(f"[ps 0] {line}\n" for line in lines)


def test_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for no_colour, expected in ((None, b"\x1b[36m[ps 0] \x1b[0mx"), ("1", b"[ps 0] x")):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_colour:
            monkeypatch.setenv("NO_COLOR", no_colour)
        ours, theirs = pty.openpty()
        with open(theirs, "w") as terminal:
            PrefixedLines("ps 0", 0, terminal).feed(b"x\n")
            assert os.read(ours, 100).startswith(expected)
        os.close(ours)


# Addresses and commands


def test_free_ports_where_no_cluster_is_given() -> None:
    tasks = choose_addresses(load_config(None, ["backend={kind: ps, num_ps: 2, num_workers: 3}"]))
    assert (len(tasks.ps), len(tasks.worker)) == (2, 3)
    assert len({*tasks.ps, *tasks.worker}) == 5
    for address in (*tasks.ps, *tasks.worker):
        assert split_address(address)[0] == "127.0.0.1"
        check_own_address(address)


def test_the_given_cluster_if_it_is_here() -> None:
    ps, chief, worker = free_ports(3)
    given = f"{{ps: [localhost:{ps}], chief: [127.0.0.1:{chief}], work: [127.0.0.1:{worker}]}}"
    tasks = choose_addresses(load_config(None, ["backend.kind=ps", f"backend.cluster={given}"]))
    expected = (f"127.0.0.1:{chief}", f"127.0.0.1:{worker}")
    assert tasks == Tasks((f"localhost:{ps}",), expected)
    elsewhere = "backend.cluster={ps: [127.0.0.1:1], worker: [192.0.2.1:1]}"
    tasks = choose_addresses(load_config(None, ["backend.kind=ps", elsewhere]))
    assert (len(tasks.ps), len(tasks.worker)) == (1, 2)  # as by num_ps and num_workers
    assert "192.0.2.1" not in str(tasks)


def test_commands() -> None:
    commands = task_commands("x.yaml", ["a=1"], Tasks(("a:1", "a:2"), ("a:3",)))
    assert list(commands) == ["ps 0", "ps 1", "worker 0"]
    python = [sys.executable, "-m", "hvps.train", "x.yaml", "a=1"]
    assert commands["ps 1"] == [*python, "--role", "ps", "--index", "1"]
    assert task_commands(None, [], Tasks(("a:1",), ("a:2",)))["worker 0"][3] == "--role"


def run_program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    guard = folder / "guard"
    guard.mkdir(exist_ok=True)
    # Python imports it before anything of ours.
    (guard / "sitecustomize.py").write_text(
        "import os, sys\n"
        "for name in ('tensorflow', 'keras', 'numpy'): sys.modules[name] = None\n"
        "if 'hvps.train' in sys.orig_argv:\n"
        "    print('a task', sys.orig_argv[-1], flush=True)\n"
        "    os._exit(3)\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "hvps", "launch", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(guard), str(REPOSITORY)])},
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_a_wrong_configuration_is_reported_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = free_ports(1)[0]
        cluster = f"backend.cluster={{ps: [127.0.0.1:{free}], worker: [127.0.0.1:{port}]}}"
        for overrides, says in (
            (["backend.kind=ps", "train.epochs=0"], "train.epochs: too small"),
            (["backend.kind=ps", "optimizer.name=adan"], "optimizer.name: "),
            (["backend.kind=ps", "backend.worker_steps=[1]"], "backend.worker_steps: "),
            (["backend.kind=ps", cluster], f"worker 0: port {port} is in use by pid {os.getpid()}"),
            (["backend.kind=ps", "-np", "2"], "-np: has no effect here"),
            (["backend.kind=ps", "--elastic", "1:2"], "--elastic: has no effect here"),
            (["backend.kind=local", "-np", "2"], "-np: has no effect here"),
            (["-np", "0"], "-np: not such a number"),
            (["--max-restarts"], "--max-restarts: missing"),
            (["--elastic", "3:2"], "--elastic: not such a number"),
            (["--elastic", "2:3", "-np", "4"], "-np: 4 ranks are not within --elastic"),
            (["-np", "3", "train.global_batch=64"], "train.global_batch: 64 cannot be shared"),
            (["--max-restarts", "1", "run.resume=never"], "--max-restarts: run.resume forbids"),
            (["--max-restarts", "1", "checkpoint.keep=0"], "--max-restarts: checkpoint.keep for"),
        ):
            done = run_program(tmp_path, *overrides)
            assert (done.returncode, done.stdout) == (2, ""), done
            assert done.stderr.startswith(f"hvps: error: {says}")
            assert done.stderr.count("hvps: error") == 1


def test_the_program_starts_the_tasks(tmp_path: Path) -> None:
    """They end with 3 before they are anything: the launcher says so, without TensorFlow."""
    done = run_program(tmp_path, "configs/ps.yaml", "backend.num_workers=1")
    assert done.returncode == 3, done
    first, *others = done.stdout.splitlines()
    assert first == "hvps launch: 2 ps and 1 worker tasks on this machine"
    assert {"[ps 0] a task 0", "[ps 1] a task 1", "[worker 0] a task 0"} == set(others)
    assert "ended with exit code 3" in done.stderr


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert Supervisor({"worker 0": [sys.executable, "-c", ""]}).run() == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    done = run_program(tmp_path, "--dry-run", "-np", "4", "train.steps=3")
    assert (done.returncode, done.stderr) == (0, "")
    first, command = done.stdout.splitlines()
    assert first == "hvps launch: 4 ranks"
    assert re.search(r"mpirun -np 4 .*python -m hvps.train train.steps=3$", command)
    done = run_program(tmp_path, "--dry-run", "configs/ps.yaml")
    assert done.stdout.count(" -m hvps.train ") == 4  # 2 ps, 2 workers
    assert "a task" not in done.stdout
    done = run_program(tmp_path, "--dry-run", "--elastic", "1:3")
    assert "--elastic needs --max-restarts" in done.stdout
    assert "mpirun -np 3 " in done.stdout


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shares_are_those_that_ranks_get(ranks: int, accumulate: int) -> None:
    plan = Plan(1000, 64, ranks, accumulate)
    shares = [sum(len(plan.share(0, m, r)) for m in range(accumulate)) for r in range(ranks)]
    train = load_config(None, [f"train.accumulate={accumulate}"]).config.train
    who = "1 rank has" if ranks == 1 else f"{ranks} ranks share"
    expected = f"{who} the global batch of 64: {', '.join(map(str, shares))}"
    assert _shares(ranks, train) == expected


def test_ctrl_c_before_anything_was_started(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hvps.launcher._plan", interrupted)
    assert hvps.launcher.launch([]) == 130
    assert capfd.readouterr() == ("", "")
