"""What a launcher starts, and what it does about what dies."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvps.errors import ConfigError
from hvps.supervisor import Policy, Supervisor, send_signal

JOB = "the job"


@dataclass
class Plan:
    """What is started.

    Attributes:
        commands: by the name of the process.
        policy: what is done about those that die.
        text: says so.
        together: it is one command for the whole job.
        ask_to_stop: passes a signal on to a process.
        guarded: the processes end when their standard input does.
        explain_failure: called after the job has failed, to say more.
    """

    commands: Mapping[str, Sequence[str]]
    policy: Policy
    text: str
    together: bool = False
    ask_to_stop: Callable[[subprocess.Popen[bytes], int], bool] = send_signal
    guarded: bool = False
    explain_failure: Callable[[], None] = lambda: None

    def supervisor(self) -> Supervisor:
        return Supervisor(
            self.commands,
            policy=self.policy,
            prefixed=not self.together,
            ask_to_stop=self.ask_to_stop,
            guarded=self.guarded,
        )


def has_no_effect(option: str, why: str, do: str) -> ConfigError:
    """An option of the command line that this job cannot use."""
    return ConfigError(
        f"{option}: has no effect here",
        rule=why,
        received=f"{option} (command line)",
        do=f"remove it, or use {do}",
    )
