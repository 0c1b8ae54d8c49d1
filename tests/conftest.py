"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """What a test leaves in the environment is no other test's: jobs that it starts inherit it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
