"""The demonstration of parameter servers, run as a user does, with one of its ports taken."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from hvps.demo import FIRST_PORT, _judge, main
from tests.launching import BIN, Job, result_of

PS, WORKER = "/job:ps/replica:0/task:0", "/job:worker/replica:0/task:1"
PLACEMENT = f"""\
[worker 2] x: (Const): {PS}/device:CPU:0
[worker 2] weight: (Const): {WORKER}/device:CPU:0
[worker 2] mul: (Mul): {WORKER}/device:CPU:0
[worker 2] bias: (Const): {WORKER}/device:CPU:0
[worker 2] y: (AddV2): {WORKER}/device:CPU:0
[worker 2] x = [0.0, 1.0, 2.0, 3.0], y = [0.3, 0.4, 0.5, 0.6]
"""


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_all_parts_on_free_ports(jobs: Callable[..., Job]) -> None:
    with ExitStack() as stack:
        with suppress(OSError):  # somebody else has it: as good
            stack.enter_context(socket.create_server(("127.0.0.1", FIRST_PORT + 2)))
        job = jobs([str(BIN / "python"), "-m", "hvps.demo"])
        assert job.wait(100) == 0, job.output
    output = job.output
    ports = re.search(r"^hvps\.demo: port 3333\d is in use.*; using ([\d, ]+)$", output, re.M)
    assert ports, output
    assert PLACEMENT in output
    assert "[worker 0] weight 0.1000, bias 0.3000\n" in output
    runs = {path.name[:11]: result_of(path) for path in job.run_directory().parent.glob("demo-*")}
    assert runs.keys() == {"demo-linear", "demo-digits"}
    accuracy = runs["demo-digits"]["eval"]["accuracy"]
    assert accuracy >= 0.97
    assert f"[worker 0] accuracy {accuracy:.4f}\n" in output
    for result in runs.values():
        assert (result["ps"], result["workers"], result["update"]) == (2, 3, "async")
        assert min(result["worker_steps"]) > 0
    assert "error" not in output.lower()
    assert re.search(r"^hvps\.demo: done in ", output, re.M)
    assert job.members() == []
    for port in map(int, ports[1].split(", ")):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, port


def found(weight: float, bias: float) -> Any:
    values = [
        SimpleNamespace(numpy=lambda v=v: SimpleNamespace(item=lambda: v)) for v in (weight, bias)
    ]
    return SimpleNamespace(trainable_variables=values)


def test_what_is_not_found_is_an_error() -> None:
    result: Any = SimpleNamespace(steps=1000, evaluation={"accuracy": 0.9694})
    text, failure = _judge("linear", found(0.1004, 0.2996), result)
    assert (text, failure) == ("weight 0.1004, bias 0.2996", None)
    text, failure = _judge("linear", found(0.1004, 0.2980), result)
    assert str(failure).splitlines()[:3] == [
        "linear: training has not found what it should",
        "  rule:     weight 0.1 and bias 0.3, within 0.001",
        "  received: weight 0.1004, bias 0.2980 after 1000 steps",
    ]
    text, failure = _judge("digits", found(0, 0), result)
    assert "an accuracy of 0.97 at least" in str(failure)
    assert text == "accuracy 0.9694"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "ps"], "demo: --role and --index come together"),
        (["--role", "boss", "--index", "0"], "demo: argument --role: invalid choice: 'boss'"),
        (["--fast"], "demo: unrecognized arguments: --fast"),
        (["--cluster", "{ps: [a]}"], "backend.cluster"),
        (["--cluster", '{"ps": ["127.0.0.1:1"], "work": ["127.0.0.1:2"]}'], "too few workers"),
        (["--role", "worker", "--index", "3"], "there is no worker 3"),
    ],
)
def test_wrong_command_lines(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
