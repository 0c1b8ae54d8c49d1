"""What holds for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def interrupts_arrive() -> None:
    """A shell starts background jobs with SIGINT ignored, and what tests start inherits that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """What a test leaves in the environment is no other test's: jobs that it starts inherit it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
