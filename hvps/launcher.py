"""hvps launch: all processes of a job, on this machine or on several hosts, supervised.

what to start → check it once → start → pass on output and signals, start again → exit code
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hvps.cli_args import Arguments, split_args
from hvps.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED
from hvps.overrides import load_config
from hvps.plan import Plan
from hvps.plan_ranks import plan_ranks
from hvps.plan_tasks import plan_tasks
from hvps.returning import can_come_back


def launch(argv: Sequence[str]) -> int:
    """Train in as many processes as the backend needs.

    Returns:
        The exit code of the first process that failed, else 0.

    Raises:
        ConfigError: nothing was started.
    """
    arguments = split_args(
        argv,
        "hvps launch",
        "Start all processes of a training, on this machine or on several hosts, and watch them.",
    )
    try:
        with can_come_back(arguments) as arguments:
            plan = _plan(arguments)
        print(plan.text, flush=True)
        if arguments.dry_run or plan.together:
            commands = map(shlex.join, plan.commands.values())
            print("\n".join(commands), flush=True)
        return EXIT_OK if arguments.dry_run else _run(plan)
    except KeyboardInterrupt:  # before anything was started
        return EXIT_INTERRUPTED


def _plan(arguments: Arguments) -> Plan:
    loaded = load_config(arguments.config, arguments.overrides)
    plan_kind = plan_tasks if loaded.config.backend.kind == "ps" else plan_ranks
    return plan_kind(arguments, loaded)


def _run(plan: Plan) -> int:
    code = plan.supervisor().run()
    if code not in (EXIT_OK, EXIT_INTERRUPTED, EXIT_PREEMPTED):
        plan.explain_failure()
    return code
