"""Which task of a parameter-server cluster this process is, and what a cluster may look like.

The addresses come from the configuration or from TF_CONFIG, where other launchers of TensorFlow
leave them. Under mpirun the first ranks serve, and addresses are exchanged once they run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hvps.cluster import Cluster, Tasks
from hvps.config_base import FieldError, look_up
from hvps.errors import ConfigError
from hvps.problems import did_you_mean, show

if TYPE_CHECKING:
    from hvps.overrides import LoadedConfig

TF_CONFIG = "TF_CONFIG"
ROLES = ("ps", "worker", "chief", "evaluator")
_SPELLINGS = {**{role: role for role in ROLES}, "work": "worker", "master": "chief"}
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]+)")
_ADDRESS_RULE = "'host:port', with the host as the other tasks know it and a port up to 65535"
_ALL_ADDRESSES = ("0.0.0.0", "[::]")
_EXAMPLE = "{ps: [127.0.0.1:33331], worker: [127.0.0.1:33333, 127.0.0.1:33334]}"


@dataclass(frozen=True)
class Jobs:
    """A cluster as it was written.

    Attributes:
        tasks: the ps and worker tasks, a chief before the other workers.
        chiefs: 1 if there is a job "chief", else 0.
        evaluators: number of tasks that only evaluate; they are no part of the cluster.
    """

    tasks: Tasks
    chiefs: int
    evaluators: int

    def place(self, role: str, index: int) -> tuple[str, int, int]:
        """(role, index, number of tasks in the role), with the chief as worker 0.

        Raises:
            FieldError: there is no such task.
        """
        workers = len(self.tasks.worker)
        shift = self.chiefs if role == "worker" else 0
        counts = {
            "ps": len(self.tasks.ps),
            "worker": workers - self.chiefs,
            "chief": self.chiefs,
            "evaluator": self.evaluators,
        }
        if not 0 <= index < counts[role]:
            known = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            raise FieldError(
                "index",
                f"there is no {role} {index}",
                rule=f"the cluster has {known}; the first of each has index 0",
                do="correct the index, or add the task's address to the cluster",
            )
        if role in ("worker", "chief"):
            return "worker", index + shift, workers
        return role, index, counts[role]


def read_jobs(jobs: Any) -> Jobs:
    """Check the addresses of a cluster by job.

    Raises:
        FieldError: they are no cluster; the field names the place within them, as `ps[0]`.
    """
    if not isinstance(jobs, Mapping):
        raise FieldError("", "not a mapping", rule=_shape(), do=f"for example {_EXAMPLE}")
    by_role: dict[str, list[str]] = {}
    spelled: dict[str, str] = {}
    seen: dict[tuple[str, int], str] = {}
    for job, addresses in jobs.items():
        role = _SPELLINGS.get(job) if isinstance(job, str) else None
        if role is None:
            near = did_you_mean(str(job), _SPELLINGS)
            raise FieldError(str(job), "unknown job", rule=_shape(), do=near or "remove it")
        if role in by_role:
            do = "write one list of them"
            raise FieldError(job, f"the same job as {spelled[role]}", rule=_shape(), do=do)
        spelled[role], by_role[role] = job, list(_addresses(job, addresses, seen))
    for role in ("ps", "worker"):
        if not by_role.get(role) and not (role == "worker" and by_role.get("chief")):
            do = f"give their addresses, for example {_EXAMPLE}"
            raise FieldError(spelled.get(role, ""), f"no {role}", rule=_shape(), do=do)
    chiefs = by_role.get("chief", [])
    if len(chiefs) > 1:
        do = "keep one, and list the others as workers"
        raise FieldError(spelled["chief"], f"{len(chiefs)} chiefs", rule="at most one", do=do)
    tasks = Tasks(tuple(by_role["ps"]), (*chiefs, *by_role.get("worker", ())))
    return Jobs(tasks, len(chiefs), len(by_role.get("evaluator", ())))


def _shape() -> str:
    return "lists of addresses for the jobs ps and worker (or work), perhaps chief and evaluator"


def _addresses(job: str, addresses: Any, seen: dict[tuple[str, int], str]) -> Iterator[str]:
    if not isinstance(addresses, list | tuple):
        do = (
            f"for example {job}: [{addresses if isinstance(addresses, str) else '127.0.0.1:33331'}]"
        )
        raise FieldError(job, "not a list of addresses", rule=_ADDRESS_RULE, do=do)
    for index, address in enumerate(addresses):
        place = f"{job}[{index}]"
        parts = _parts(place, address)
        if parts in seen:
            do = "give each task a port of its own"
            what = f"the address of {seen[parts]} again"
            raise FieldError(place, what, rule="each address once", do=do)
        seen[parts] = place
        yield address


def _parts(place: str, address: Any) -> tuple[str, int]:
    """Host, in the form in which hosts are compared, and port."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    do = "for example 127.0.0.1:33331"
    if match is None:
        if isinstance(address, int) and not isinstance(address, bool):
            do = f"for a port of this machine 127.0.0.1:{address}"
        raise FieldError(place, "not an address", rule=_ADDRESS_RULE, do=do)
    host, port = match["host"], int(match["port"])
    if not 1 <= port <= 65535:
        do = "choose a port between 1024 and 65535"
        raise FieldError(place, "no such port", rule=_ADDRESS_RULE, do=do)
    if host in _ALL_ADDRESSES:
        do = "give the address by which the other tasks reach it, 127.0.0.1 if all are here"
        raise FieldError(place, f"{host} stands for all addresses", rule=_ADDRESS_RULE, do=do)
    return _host_key(host), port


def _host_key(host: str) -> str:
    """The same text for all names of this machine alone."""
    host = host.lower()
    return "localhost" if host.startswith("127.") or host == "[::1]" else host


def place_task(
    loaded: LoadedConfig,
    cluster: Cluster,
    role: str | None,
    index: int | None,
    env: Mapping[str, str] | None = None,
) -> Cluster:
    """Find this process's task.

    Args:
        cluster: what the launcher's variables say.
        role, index: of the command line, None where not given.

    Returns:
        The cluster unchanged for other backends than parameter servers.

    Raises:
        ConfigError: the addresses or the task are wrong or missing.
    """
    env = os.environ if env is None else env
    backend = loaded.config.backend
    if backend.kind != "ps":
        if role is not None:
            raise ConfigError(
                "--role: there are roles only among parameter servers and their workers",
                rule="backend.kind=ps",
                received=f"--role {role} (command line), "
                f"backend.kind {loaded.received('backend.kind', backend.kind)}",
                do="remove --role and --index, or use backend.kind=ps",
            )
        return cluster
    if cluster.launched and role is None:
        placed = _ranks_by_role(loaded, cluster)
    else:
        placed = _by_address(loaded, role, index, env.get(TF_CONFIG) or None)
    _check_workers(loaded, count_workers(loaded, placed), placed.source)
    return placed


def count_workers(loaded: LoadedConfig, cluster: Cluster) -> int:
    """The number of workers in the cluster that a task is placed in, the chief among them."""
    if cluster.tasks is not None:
        return len(cluster.tasks.worker)
    if cluster.world_size is not None:
        return cluster.world_size - loaded.config.backend.num_ps
    return cluster.size


def _ranks_by_role(loaded: LoadedConfig, cluster: Cluster) -> Cluster:
    servers = loaded.config.backend.num_ps
    if cluster.size <= servers:
        raise ConfigError(
            "backend.num_ps: no rank is left to be a worker",
            rule="the first backend.num_ps ranks serve and the others train: one more, at least",
            received=f"{loaded.received('backend.num_ps', servers)}, {cluster.size} "
            f"rank{'s' * (cluster.size > 1)} by {cluster.source}",
            do=f"start at least {servers + 1} ranks, or use fewer parameter servers",
        )
    serves = cluster.rank < servers
    return replace(
        cluster,
        role="ps" if serves else "worker",
        rank=cluster.rank if serves else cluster.rank - servers,
        size=servers if serves else cluster.size - servers,
        source=f"{cluster.source}, backend.num_ps",
        world_rank=cluster.rank,
        world_size=cluster.size,
    )


def _by_address(
    loaded: LoadedConfig, role: str | None, index: int | None, tf_config: str | None
) -> Cluster:
    written = loaded.config.backend.cluster
    jobs = read_jobs(written) if written is not None else None
    source, origin = "backend.cluster", loaded.origin("backend.cluster")
    if tf_config is not None:
        source, content = TF_CONFIG, _parse_tf_config(tf_config)
        jobs = _same_jobs(content, jobs, f"{show(written)} ({origin})")
        if role is None:
            role, index = _tf_task(content)
    if role is None:
        raise ConfigError(
            "backend.kind: ps, but this process does not know which task of the cluster it is",
            rule="a launcher, --role and --index, or TF_CONFIG say so",
            received=f"none of them; backend.cluster {loaded.received('backend.cluster', written)}",
            do="start all tasks on this machine with `hvps launch CONFIG`, or each one with"
            " backend.cluster and --role ps --index 0",
        )
    if jobs is None:
        raise ConfigError(
            "backend.cluster: missing, so that the other tasks cannot be found",
            rule="--role and --index choose a task of backend.cluster, or of TF_CONFIG",
            received=f"--role {role} --index {index} (command line)",
            do=f"give it, for example backend.cluster='{_EXAMPLE}'",
        )
    try:
        own_role, rank, size = jobs.place(_SPELLINGS[role], index or 0)
    except FieldError as err:
        raise ConfigError(
            f"{source}: {err.what}",
            rule=err.rule,
            received=f"task {role} {index}, in a cluster by {source}",
            do=err.do,
        ) from None
    return _with_address(Cluster(rank, size, 0, 1, source, tasks=jobs.tasks), own_role)


def _with_address(cluster: Cluster, role: Any) -> Cluster:
    """Give a task its role, and count the tasks on its host: workers first, as they have GPUs."""
    cluster = replace(cluster, role=role)
    tasks, own = cluster.tasks, cluster.address
    if tasks is None or own is None:
        return cluster
    here = [a for a in (*tasks.worker, *tasks.ps) if _host_of(a) == _host_of(own)]
    return replace(cluster, local_rank=here.index(own), local_size=len(here))


def _host_of(address: str) -> str:
    return _host_key(address.rpartition(":")[0])


def _check_workers(loaded: LoadedConfig, workers: int, source: str) -> None:
    """Check the options that depend on the number of workers."""
    backend = loaded.config.backend
    steps, found = backend.worker_steps, f"{workers} worker{'s' * (workers > 1)} by {source}"
    if steps is not None and len(steps) != workers:
        raise ConfigError(
            f"backend.worker_steps: {len(steps)} numbers for {workers} workers",
            rule="the steps of each worker",
            received=f"{loaded.received('backend.worker_steps', steps)}, {found}",
            do="give one number per worker, or backend.worker_steps=null",
        )
    backups = backend.backup_workers
    if backups >= workers:
        raise ConfigError(
            "backend.backup_workers: an update would wait for nobody",
            rule="less than the number of workers",
            received=f"{loaded.received('backend.backup_workers', backups)}, {found}",
            do="use less of them, or start more workers",
        )


# TF_CONFIG


def _parse_tf_config(text: str) -> dict[str, Any]:
    do = "unset TF_CONFIG, or let the launcher set it: " + json.dumps(
        {"cluster": {"ps": ["host:1"], "worker": ["host:2"]}, "task": {"type": "ps", "index": 0}}
    )
    try:
        content = json.loads(text)
    except ValueError as err:
        raise ConfigError(
            "TF_CONFIG: not JSON", rule=str(err), received=_shortened(text), do=do
        ) from None
    if not isinstance(content, dict):
        rule = "an object with the keys cluster and task"
        raise ConfigError("TF_CONFIG: not an object", rule=rule, received=_shortened(text), do=do)
    return content


def _shortened(text: str) -> str:
    return f"{show(text)} (environment)"


def _same_jobs(content: Mapping[str, Any], given: Jobs | None, written: str) -> Jobs | None:
    """The cluster of TF_CONFIG, which must be that of the configuration if both say it."""
    cluster = content.get("cluster")
    if not cluster and given is not None:
        return given
    try:
        jobs = read_jobs(cluster)
    except FieldError as err:
        place = ".".join(part for part in ("TF_CONFIG.cluster", err.field) if part)
        value = look_up(cluster, err.field) if err.field else cluster
        received = f"{show(value)} (environment)"
        raise ConfigError(
            f"{place}: {err.what}", rule=err.rule, received=received, do=err.do
        ) from None
    if given is not None and given.tasks != jobs.tasks:
        raise ConfigError(
            "TF_CONFIG.cluster: another cluster than backend.cluster",
            rule="where both are given they are the same",
            received=f"{show(cluster)} (environment), {written}",
            do="unset TF_CONFIG, or remove backend.cluster",
        )
    return jobs


def _tf_task(content: Mapping[str, Any]) -> tuple[str, int]:
    task = content.get("task")
    if not isinstance(task, dict):
        raise ConfigError(
            "TF_CONFIG.task: missing, so that this process does not know which task it is",
            rule='an object like {"type": "worker", "index": 0}',
            received=f"{show(task)} (environment)",
            do="set it, or give --role and --index",
        )
    role, index = task.get("type"), task.get("index")
    if role not in _SPELLINGS:
        near = did_you_mean(str(role), _SPELLINGS)
        raise ConfigError(
            "TF_CONFIG.task.type: unknown job",
            rule=f"one of {', '.join(ROLES)}",
            received=f"{show(role)} (environment)",
            do=near or "set it to this process's job",
        )
    if not isinstance(index, int) or isinstance(index, bool):
        is_text = isinstance(index, str) and index.isdigit()
        raise ConfigError(
            "TF_CONFIG.task.index: not an integer",
            rule="the task's place in the list of its job, beginning with 0",
            received=f"{show(index)} (environment)",
            do=f"write {index} without quotes" if is_text else "set it, for example 0",
        )
    return role, index
