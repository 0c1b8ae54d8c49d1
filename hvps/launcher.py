"""hvps launch: all processes of a job on this machine, supervised.

what to start → check it once → start → pass on output and signals, start again → exit code
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvps.cli_args import Arguments, split_args
from hvps.cluster import ALONE, Cluster, Tasks
from hvps.config import TrainConfig
from hvps.errors import EXIT_INTERRUPTED, ConfigError
from hvps.mpirun import mpirun_command, signal_ranks
from hvps.overrides import LoadedConfig, load_config
from hvps.ports import check_own_address, free_ports, is_own_host, split_address
from hvps.preflight import preflight
from hvps.returning import can_come_back, note_restart
from hvps.supervisor import Policy, Restart, Supervisor, send_signal
from hvps.task_cluster import place_task, read_jobs
from hvps.yaml_text import write_flow

_RANKS = 2  # where -np is not given
JOB = "the job"


def launch(argv: Sequence[str]) -> int:
    """Train on this machine, in as many processes as the backend needs.

    Returns:
        The exit code of the first process that failed, else 0.

    Raises:
        ConfigError: nothing was started.
    """
    arguments = split_args(
        argv, "hvps launch", "Start all processes of a training on this machine, and watch them."
    )
    try:
        with can_come_back(arguments) as arguments:
            plan = _plan(arguments)
        print(plan.text, flush=True)
        if arguments.dry_run or plan.together:
            commands = map(shlex.join, plan.commands.values())
            print("\n".join(commands), flush=True)
        return 0 if arguments.dry_run else plan.supervisor().run()
    except KeyboardInterrupt:  # before anything was started
        return EXIT_INTERRUPTED


def _plan(arguments: Arguments) -> Plan:
    loaded = load_config(arguments.config, arguments.overrides)
    if loaded.config.backend.kind == "ps":
        return _plan_cluster(arguments, loaded)
    return _plan_ranks(arguments, loaded)


@dataclass
class Plan:
    """What is started.

    Attributes:
        commands: by the name of the process.
        policy: what is done about those that die.
        text: says so.
        together: it is one command for the whole job.
        ask_to_stop: passes a signal on to a process.
    """

    commands: Mapping[str, Sequence[str]]
    policy: Policy
    text: str
    together: bool = False
    ask_to_stop: Callable[[subprocess.Popen[bytes], int], bool] = send_signal

    def supervisor(self) -> Supervisor:
        return Supervisor(
            self.commands,
            policy=self.policy,
            prefixed=not self.together,
            ask_to_stop=self.ask_to_stop,
        )


# --- ranks ---


def _plan_ranks(arguments: Arguments, loaded: LoadedConfig) -> Plan:
    """One process, or the ranks of one mpirun."""
    config = loaded.config
    if config.backend.kind == "local":
        if arguments.ranks not in (None, 1) or arguments.elastic:
            option = "--elastic" if arguments.elastic else "-np"
            raise _not_for(option, "backend.kind is local: one process", "backend.kind=allreduce")
        command = [sys.executable, "-m", "hvps.train", *arguments.for_training()]
        policy = Policy(
            max_restarts=arguments.max_restarts,
            note=lambda restart: note_restart(loaded, restart),
        )
        return Plan({JOB: command}, policy, "hvps launch: one process", together=True)
    smallest, largest = arguments.elastic or (None, None)
    number = arguments.ranks or largest or _RANKS
    if smallest is not None and not smallest <= number <= (largest or number):
        raise ConfigError(
            f"-np: {number} ranks are not within --elastic",
            rule="MIN <= ranks <= MAX",
            received=f"-np {number} --elastic {smallest}:{largest}",
            do="leave -np out: training starts with MAX",
        )
    if smallest is not None:
        arguments = arguments.with_overrides(["train.uneven_batch=true"])
    loaded = load_config(arguments.config, arguments.overrides)
    given = arguments.for_training()
    # What each rank would find, here and once.
    preflight(loaded, Cluster(0, number, 0, number, "hvps launch"))

    def command_for(ranks: int) -> list[str]:
        return mpirun_command(ranks, [sys.executable, "-m", "hvps.train", *given])

    def note(restart: Restart) -> Sequence[str] | None:
        nonlocal number
        note_restart(loaded, restart)
        if smallest is None or number == smallest:
            return None
        number -= 1
        print(f"hvps launch: {_shares(number, config.train)}", flush=True)
        return command_for(number)

    policy = Policy(max_restarts=arguments.max_restarts, note=note)
    command = command_for(number)
    text = f"hvps launch: {number} rank{'s' * (number > 1)}"
    if arguments.elastic and not arguments.max_restarts:
        text += "; --elastic needs --max-restarts: nothing that dies is started again"
    return Plan({JOB: command}, policy, text, together=True, ask_to_stop=signal_ranks)


def _shares(ranks: int, train: TrainConfig) -> str:
    """As hvps.sampling deals them out."""
    batch, parts = train.global_batch, ranks * train.accumulate
    dealt = [batch * (i + 1) // parts - batch * i // parts for i in range(parts)]
    shares = ", ".join(str(sum(dealt[rank::ranks])) for rank in range(ranks))
    verb = "rank has" if ranks == 1 else "ranks share"
    return f"{ranks} {verb} the global batch of {batch}: {shares}"


def _not_for(option: str, why: str, do: str) -> ConfigError:
    return ConfigError(
        f"{option}: has no effect here",
        rule=why,
        received=f"{option} (command line)",
        do=f"remove it, or use {do}",
    )


# --- parameter servers ---


def _plan_cluster(arguments: Arguments, loaded: LoadedConfig) -> Plan:
    """Each task a process of its own."""
    backend = loaded.config.backend
    for option, given in (("-np", arguments.ranks), ("--elastic", arguments.elastic)):
        if given is not None:
            why = "backend.kind is ps, whose tasks are counted by backend.num_ps and num_workers"
            raise _not_for(option, why, "backend.num_workers")
    tasks = choose_addresses(loaded)
    addresses = {"ps": list(tasks.ps), "worker": list(tasks.worker)}
    # null first: the file may spell the jobs in another way, and mappings are merged.
    cluster = ["backend.cluster=null", f"backend.cluster={write_flow(addresses)}"]
    overrides = [*arguments.overrides, *cluster]
    _check_cluster(load_config(arguments.config, overrides), tasks)
    text = f"hvps launch: {len(tasks.ps)} ps and {len(tasks.worker)} worker tasks on this machine"
    if backend.cluster and read_jobs(backend.cluster).tasks != tasks:
        text += "; backend.cluster names others"
    goes_on = backend.update != "sync" and backend.replication == "between_graph"
    policy = Policy(
        max_restarts=arguments.max_restarts,
        dispensable=lambda name: goes_on and name.startswith("worker ") and name != "worker 0",
        stopped_after=backend.stall_timeout,
        note=lambda restart: note_restart(loaded, restart),
    )
    return Plan(task_commands(arguments.config, overrides, tasks), policy, text)


def choose_addresses(loaded: LoadedConfig) -> Tasks:
    """The configuration's cluster if all of it is on this machine, else free ports."""
    backend = loaded.config.backend
    if backend.cluster is not None:
        tasks = read_jobs(backend.cluster).tasks
        hosts = {split_address(address)[0] for address in (*tasks.ps, *tasks.worker)}
        if all(is_own_host(host) for host in hosts):
            return tasks
    ports = free_ports(backend.num_ps + backend.num_workers)
    addresses = tuple(f"127.0.0.1:{port}" for port in ports)
    return Tasks(addresses[: backend.num_ps], addresses[backend.num_ps :])


def _check_cluster(loaded: LoadedConfig, tasks: Tasks) -> None:
    """Find here, and once, what each task would find."""
    chief = place_task(loaded, Cluster(0, 1, 0, 1, ALONE), "worker", 0, env={})
    preflight(loaded, chief)
    for index, address in enumerate(tasks.ps):
        check_own_address(address, f"ps {index}")
    for index, address in enumerate(tasks.worker):
        check_own_address(address, f"worker {index}")


def task_commands(
    config: str | None, overrides: Sequence[str], tasks: Tasks
) -> dict[str, list[str]]:
    """The command of each task, by its name; parameter servers first."""
    shared = [sys.executable, "-m", "hvps.train", *([config] if config else []), *overrides]
    return {
        f"{role} {index}": [*shared, "--role", role, "--index", str(index)]
        for role, addresses in (("ps", tasks.ps), ("worker", tasks.worker))
        for index in range(len(addresses))
    }
