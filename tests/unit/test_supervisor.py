"""Processes that die are started again, or done without, or take the others with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvps.processes import find
from hvps.supervisor import Policy, Restart, Supervisor, send_signal

pytestmark = pytest.mark.timeout(60)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# Dies as often as there is no file for it yet, then ends in order.
DIES = """
import os, signal, sys
folder, times = sys.argv[1], int(sys.argv[2])
for i in range(times):
    try:
        os.close(os.open(f"{folder}/died-{i}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        continue
    os.kill(os.getpid(), signal.SIGKILL)
"""


def dies(folder: Path, times: int) -> list[str]:
    return [*python(DIES), str(folder), str(times)]


# Runs until a file is there.
WAITS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"


def at_once(number: int) -> float:
    return 0.0


def test_what_dies_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noted: list[Restart] = []
    policy = Policy(max_restarts=3, note=noted.append)
    code = Supervisor({"worker 0": dies(tmp_path, 2)}, policy=policy, delay=at_once).run()
    assert code == 0
    assert [r.number for r in noted] == [1, 2]
    assert {(r.task, r.reason, r.limit) for r in noted} == {
        ("worker 0", "was killed by SIGKILL", 3)
    }
    assert "worker 0 was killed by SIGKILL; it is started again in 0 s" in capfd.readouterr().err


def test_not_more_often_than_allowed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    policy = Policy(max_restarts=2)
    code = Supervisor({"worker 0": dies(tmp_path, 9)}, policy=policy, delay=at_once).run()
    assert code == 128 + signal.SIGKILL
    assert len(list(tmp_path.glob("died-*"))) == 3
    assert capfd.readouterr().err.count("started again") == 2


@pytest.mark.parametrize("code", [0, 2, 130, 143])
def test_an_end_that_is_meant_is_one(code: int) -> None:
    noted: list[Restart] = []
    policy = Policy(max_restarts=3, note=noted.append)
    commands = {"worker 0": python(f"raise SystemExit({code})")}
    assert Supervisor(commands, policy=policy, delay=at_once, grace=0.1).run() == code
    assert not noted


def test_a_restart_may_have_another_command(tmp_path: Path) -> None:
    policy = Policy(max_restarts=1, note=lambda restart: python("raise SystemExit(0)"))
    assert Supervisor({"job": dies(tmp_path, 9)}, policy=policy, delay=at_once).run() == 0
    assert len(list(tmp_path.glob("died-*"))) == 1


def test_delays_double_up_to_half_a_minute() -> None:
    delay = Supervisor({}).delay
    assert [delay(n) for n in (1, 2, 3, 6, 9)] == [1, 2, 4, 30, 30]


def test_the_others_go_on_without_one_that_is_dispensable(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flag = tmp_path / "died-0"
    commands = {
        "worker 0": [*python(WAITS), str(flag)],
        "worker 1": dies(tmp_path, 1),
    }
    policy = Policy(dispensable=lambda name: name == "worker 1")
    assert Supervisor(commands, policy=policy).run() == 0
    assert "worker 1 was killed by SIGKILL; the others go on without it" in capfd.readouterr().err


def test_nobody_waits_for_a_dispensable_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = {"worker 0": python(""), "worker 1": [*python(WAITS), str(tmp_path / "never")]}
    policy = Policy(dispensable=lambda name: name == "worker 1")
    assert Supervisor(commands, policy=policy, grace=0.2).run() == 0
    assert "training has ended without worker 1" in capfd.readouterr().err


def test_one_that_stands_still_is_started_again(tmp_path: Path) -> None:
    stops = (
        "import os, signal, sys\n"
        "try: os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))\n"
        "except FileExistsError: sys.exit()\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    noted: list[Restart] = []
    policy = Policy(max_restarts=1, stopped_after=0.1, note=noted.append)
    commands = {"ps 0": [*python(stops), str(tmp_path / "stopped")], "worker 0": python("")}
    assert Supervisor(commands, policy=policy, delay=at_once).run() == 0
    assert [(r.task, r.reason) for r in noted] == [("ps 0", "was killed by SIGKILL")]


def test_no_grace_for_one_that_stands_still(tmp_path: Path) -> None:
    flag = tmp_path / "stopping"
    stops = (
        "import os, pathlib, signal, sys\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    commands = {
        "ps 0": [*python(stops), str(flag)],
        "worker 0": [*python(f"{WAITS}\nsys.exit(1)"), str(flag)],
    }
    # With grace, this would take longer than the test may.
    assert Supervisor(commands, grace=3600.0, kill_after=3600.0).run() == 1


def test_the_last_one_stands_still(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody is left who would notice."""
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    waits = [*python(WAITS), str(tmp_path / "never")]
    commands = {"ps 0": waits, "worker 0": python(""), "worker 1": python(stops)}
    policy = Policy(stopped_after=0.1)
    assert Supervisor(commands, policy=policy, grace=0.2).run() == 128 + signal.SIGKILL
    assert "worker 1 has stood still for 0.1 s" in capfd.readouterr().err


def when(condition: Callable[[], bool], number: int) -> None:
    """Send this process a signal as soon as the condition holds."""

    def work() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not condition():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=work, daemon=True).start()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_one_waits_to_be_started_again(
    tmp_path: Path, number: int, code: int
) -> None:
    noted: list[Restart] = []
    when(lambda: bool(noted), number)
    policy = Policy(max_restarts=1, note=noted.append)
    supervisor = Supervisor({"worker 0": dies(tmp_path, 1)}, policy=policy, delay=lambda n: 3600.0)
    assert supervisor.run() == code


def test_a_second_signal_while_one_waits_ends_the_others(tmp_path: Path) -> None:
    """The first one asks those that run, who do not mind it; the second kills them."""
    noted: list[Restart] = []
    heard = tmp_path / "heard"
    minds_nothing = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1]).touch())\n"
        "pathlib.Path(sys.argv[2]).touch()\n"
        "while True: time.sleep(0.02)\n"
    )
    up = tmp_path / "up"
    commands = {
        "ps 0": [*python(minds_nothing), str(heard), str(up)],
        "worker 0": [*python(f"{WAITS}\nsys.exit(1)"), str(up)],
    }
    when(lambda: bool(noted), signal.SIGTERM)
    when(heard.exists, signal.SIGTERM)
    policy = Policy(max_restarts=1, note=noted.append)
    assert Supervisor(commands, policy=policy, delay=lambda n: 3600.0).run() == 143
    assert len(noted) == 1


def test_only_the_one_that_died_is_started_again(tmp_path: Path) -> None:
    """And what others do on their own account, like beginning anew in place, does not matter."""
    starts = "import os, sys; open(f'{sys.argv[1]}/start-{os.getpid()}', 'w')\n"
    stays, back = tmp_path / "stays", tmp_path / "back"
    stays.mkdir()
    commands = {
        "ps 0": [*python(starts + WAITS.replace("argv[1]", "argv[2]")), str(stays), str(back)],
        "worker 0": [*python(DIES + f"open({str(back)!r}, 'w')"), str(tmp_path), "1"],
    }
    policy = Policy(max_restarts=1)
    # With less grace than it takes until the worker is back: it is not needed for that.
    assert Supervisor(commands, policy=policy, delay=lambda n: 4.0, grace=2.0).run() == 0
    assert len(list(stays.iterdir())) == 1


def test_it_waits_before_it_starts_again(tmp_path: Path) -> None:
    died: list[float] = []
    again = tmp_path / "again"
    policy = Policy(
        max_restarts=1,
        note=lambda restart: died.append(time.time()) or python(f"open({str(again)!r}, 'w')"),
    )
    commands = {"worker 0": dies(tmp_path, 1)}
    assert Supervisor(commands, policy=policy, delay=lambda n: 0.5 * n).run() == 0
    assert again.stat().st_mtime - died[0] >= 0.45  # file systems round


# Starts a child in a group of its own, as mpirun does with ranks; both stay.
LIKE_MPIRUN = """
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(3600)"], preexec_fn=os.setpgrp
)
open(sys.argv[1] + ".tmp", "w").write(str(child.pid))
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
"""


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 10
    while (process := find(pid)) is not None and process.state not in ("Z", "X"):
        assert time.monotonic() < deadline, "it lives"
        time.sleep(0.02)


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "time.sleep(3600)"])
def test_nothing_is_left_of_a_task(tmp_path: Path, end: str) -> None:
    """Neither when it ended, nor when its launcher was told twice to end."""
    child = tmp_path / "child"
    commands = {"the job": [*python(f"{LIKE_MPIRUN}\n{end}"), str(child)]}
    if "sleep" in end:
        told = tmp_path / "told"
        when(child.exists, signal.SIGTERM)
        when(told.exists, signal.SIGTERM)
        code = Supervisor(commands, ask_to_stop=lambda process, number: told.touch() is None).run()
    else:
        code = Supervisor(commands, grace=0.1).run()
    assert code in (3, 137, 143)
    wait_until_dead(int(child.read_text()))


def test_a_task_that_cannot_hear_yet_is_asked_again(tmp_path: Path) -> None:
    up, asked = tmp_path / "up", []

    def ask(process: subprocess.Popen[bytes], number: int) -> bool:
        asked.append(number)
        if len(asked) < 3:
            return False
        return send_signal(process, number)

    when(up.exists, signal.SIGTERM)
    code = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(3600)"
    commands = {"the job": [*python(code), str(up)]}
    assert Supervisor(commands, ask_to_stop=ask).run() == 143
    assert asked == [signal.SIGTERM] * 3
