"""How `hvps launch` starts a parameter-server cluster: each task a process of its own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence

from hvps.cli_args import Arguments
from hvps.cluster import ALONE, Cluster, Tasks
from hvps.errors import ConfigError
from hvps.hosts import Host, deal_out
from hvps.overrides import LoadedConfig, load_config
from hvps.plan import Plan, has_no_effect
from hvps.ports import check_own_address, free_ports, is_own_host, split_address
from hvps.preflight import preflight
from hvps.remote import guarded, signal_guarded
from hvps.returning import note_restart
from hvps.site import Site
from hvps.supervisor import Policy, send_signal
from hvps.task_cluster import place_task, read_jobs
from hvps.yaml_text import write_flow


def plan_tasks(arguments: Arguments, loaded: LoadedConfig) -> Plan:
    """Parameter servers and workers, on this machine or on the hosts that are given.

    Raises:
        ConfigError: the cluster could not run so, or not on these hosts.
    """
    backend = loaded.config.backend
    for option, given in (("-np", arguments.ranks), ("--elastic", arguments.elastic)):
        if given is not None:
            why = "backend.kind is ps, whose tasks are counted by backend.num_ps and num_workers"
            raise has_no_effect(option, why, "backend.num_workers")
    if arguments.gloo:
        raise has_no_effect("--gloo", "backend.kind is ps, which needs no MPI", "allreduce")
    hosts: list[str] = []
    site: Site | None = None
    if arguments.hosts:
        hosts = deal_out(arguments.hosts, backend.num_ps + backend.num_workers, "backend")
        tasks, site = _addresses_on(hosts, loaded, arguments.network)
    else:
        tasks = choose_addresses(loaded)
    addresses = {"ps": list(tasks.ps), "worker": list(tasks.worker)}
    # null first: the file may spell the jobs in another way, and mappings are merged.
    cluster = ["backend.cluster=null", f"backend.cluster={write_flow(addresses)}"]
    overrides = [*arguments.overrides, *cluster]
    _check_cluster(load_config(arguments.config, overrides), tasks, here=site is None)
    commands = task_commands(arguments.config, overrides, tasks)
    text = f"hvps launch: {len(tasks.ps)} ps and {len(tasks.worker)} worker tasks on "
    text += "this machine" if site is None else str(site)
    if backend.cluster and read_jobs(backend.cluster).tasks != tasks:
        text += "; backend.cluster names others"
    if site is not None:
        text += _where(dict(zip(commands, hosts, strict=True)))
        commands = {
            name: guarded(host, command)
            for (name, command), host in zip(commands.items(), hosts, strict=True)
        }
    return Plan(
        commands,
        _policy(arguments, loaded, site),
        text,
        ask_to_stop=send_signal if site is None else signal_guarded,
        guarded=site is not None,
        explain_failure=site.explain_failure if site else lambda: None,
    )


def _policy(arguments: Arguments, loaded: LoadedConfig, site: Site | None) -> Policy:
    backend = loaded.config.backend
    goes_on = backend.update != "sync" and backend.replication == "between_graph"
    not_ready: Callable[[str], str | None] = lambda name: site.why_not() if site else None  # noqa: E731
    return Policy(
        max_restarts=arguments.max_restarts,
        dispensable=lambda name: goes_on and name.startswith("worker ") and name != "worker 0",
        stopped_after=backend.stall_timeout,
        note=lambda restart: note_restart(loaded, restart),
        not_ready=not_ready,
    )


def _where(host_of: dict[str, str]) -> str:
    """Which task runs where, a line for each host."""
    lines = [
        f"  {host}: {', '.join(name for name, at in host_of.items() if at == host)}"
        for host in dict.fromkeys(host_of.values())
    ]
    return "\n" + "\n".join(lines)


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


def _addresses_on(
    hosts: Sequence[str], loaded: LoadedConfig, network: str | None
) -> tuple[Tasks, Site]:
    """Addresses in the hosts' own network, at ports that are free there."""
    count = Counter(hosts)
    site = Site([Host(name, slots) for name, slots in count.items()], network)
    ports = site.meet(count)
    if missing := [host for host in count if host not in ports]:
        raise ConfigError(
            f"-H: {missing[0]} has stopped answering",
            rule="each host answers while the job is planned",
            received=", ".join(missing),
            do="start the job again",
        )
    addresses = tuple(f"{site.network.addresses[host]}:{ports[host].pop()}" for host in hosts)
    number = loaded.config.backend.num_ps
    return Tasks(addresses[:number], addresses[number:]), site


def _check_cluster(loaded: LoadedConfig, tasks: Tasks, *, here: bool) -> None:
    """Find here, and once, what each task would find."""
    chief = place_task(loaded, Cluster(0, 1, 0, 1, ALONE), "worker", 0, env={})
    preflight(loaded, chief, here=here)
    if not here:
        return  # each checks its own address
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
