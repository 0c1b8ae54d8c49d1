"""Exceptions and the exit codes that they stand for.

Every message has one form: what was wrong, the rule, what was received, what to do.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvps.cluster import Cluster

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
EXIT_PREEMPTED = 143


class HvpsError(Exception):
    """A failure that is explained to the user without a traceback.

    Args:
        what: what was wrong, beginning with the key or the part that is concerned.
        rule: what holds instead.
        received: what was found, with the numbers.
        do: what to do about it.
    """

    exit_code = EXIT_FAILURE

    def __init__(
        self,
        what: str,
        *,
        rule: str | None = None,
        received: object = None,
        do: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.rule = rule
        self.received = received
        self.do = do

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("rule", self.rule), ("received", self.received), ("do", self.do)):
            if text is not None:
                lines.append(f"  {label + ':':<9} {text}")
        return "\n".join(lines)


class ConfigError(HvpsError):
    """The user's configuration, command line, task or launch is wrong: exit code 2."""

    exit_code = EXIT_CONFIG


class TrainingError(HvpsError):
    """Training went wrong: non-finite loss, ranks that drifted apart, a lost peer. Exit code 1."""


class PeerLostError(TrainingError):
    """A collective failed because another rank is gone; that rank's own message is the cause."""


class PeerMissingError(PeerLostError):
    """A task did not come in time: it never was there, or is not back after its end."""


def report_error(err: HvpsError, cluster: Cluster | None = None) -> int:
    """Print the error for people, and return its exit code.

    All ranks of a job usually meet the same error. Rank 0 prints at once; the others wait for
    half a second, in which the launcher normally ends them, so that the user reads it once.
    """
    text = f"hvps: error: {err}"
    if cluster is not None and not cluster.is_root:
        time.sleep(0.5)
        text = f"[{cluster.name}] {text}"
    print(text, file=sys.stderr, flush=True)
    return err.exit_code
