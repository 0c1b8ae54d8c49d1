"""The thread that ends a process whose peers do not come."""

from __future__ import annotations

import subprocess
import sys

from tests.launching import ROOT

WAITS = """
import threading
from hvps.backends.watchdog import Watchdog
dog = Watchdog(1.0, rank=7)
with dog.waiting("nothing"):
    pass
# The first step may take longer, for it is traced; later ones by twice the slowest before them.
for seconds in (1.5, 0.8, 2.0):
    with dog.step():
        threading.Event().wait(seconds)
with dog.waiting("the others"):
    threading.Event().wait(60)
"""


def test_a_wait_that_is_too_long_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "rank 7 waited 1 s for the others" in done.stderr
