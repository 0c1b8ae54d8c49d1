"""Signals ask for a stop; a second one does not ask."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvps.signals import StopSignals

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_only_votes(number: signal.Signals) -> None:
    with StopSignals() as signals:
        assert signals.votes == (False, False)
        os.kill(os.getpid(), number)
        interrupted = number == signal.SIGINT
        assert signals.votes == (not interrupted, interrupted)
        assert signals.votes == (not interrupted, interrupted)


@pytest.mark.parametrize("number", NUMBERS)
def test_handlers_are_put_back(number: signal.Signals) -> None:
    received: list[int] = []

    def mine(n: int, frame: object) -> None:
        received.append(n)

    before = signal.signal(number, mine)
    try:
        with StopSignals():
            assert signal.getsignal(number) is not mine
            os.kill(os.getpid(), number)
            assert received == []
        assert signal.getsignal(number) is mine
        with pytest.raises(ValueError, match="stop here"), StopSignals():
            raise ValueError("stop here")
        assert signal.getsignal(number) is mine
        os.kill(os.getpid(), number)
        assert received == [number]
    finally:
        signal.signal(number, before)


def test_one_run_does_not_remember_the_signals_of_another() -> None:
    with StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.votes == (False, False)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGUSR1, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_the_second_signal_ends_the_process(first: signal.Signals, second: signal.Signals) -> None:
    code = f"""
import os, sys
from hvps.signals import StopSignals
with StopSignals() as signals:
    os.kill(os.getpid(), {int(first)})
    print("alive", *signals.votes, flush=True)
    try:
        os.kill(os.getpid(), {int(second)})
        print("still alive", flush=True)
    finally:
        print("no farewell", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    asked = first != signal.SIGINT
    assert done.stdout == f"alive {asked} {not asked}\n"
    assert done.stderr == ""
    assert done.returncode == 128 + second
