"""A task that lost another one begins anew in place, and waits for its return.

What TensorFlow keeps of a cluster (sessions, graphs, connections) cannot be mended when a task of
it is gone. So the process is made new: the same command in the same process, which its launcher
does not notice, finds the last checkpoint like any other start.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hvps.errors import HvpsError, PeerLostError, PeerMissingError

if TYPE_CHECKING:
    from hvps.config import Config

# How often this process has begun anew, for the process that it becomes.
_COUNT = "HVPS_BEGAN_ANEW"

_allowed = 0


def allow_restarts(config: Config) -> None:
    """Let this process begin anew as often as the configuration says."""
    global _allowed
    _allowed = config.backend.restarts if config.backend.kind == "ps" else 0


def begin_anew_after(err: HvpsError, task: str) -> None:
    """If a lost task may come back, begin anew and do not return.

    Args:
        task: this one's name, for the message.
    """
    count = int(os.environ.get(_COUNT, "0"))
    if not isinstance(err, PeerLostError) or isinstance(err, PeerMissingError):
        return
    if count >= _allowed:
        return
    print(
        f"hvps: {task} begins anew ({count + 1} of {_allowed}): {err.what}",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os.environ[_COUNT] = str(count + 1)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
