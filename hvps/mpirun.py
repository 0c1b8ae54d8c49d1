"""The command that starts ranks by MPI or Gloo, and signals that reach them through it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hvps.errors import ConfigError
from hvps.processes import arguments, children
from hvps.remote import SSH, forwarded, is_here
from hvps.site import Site


def mpirun_command(ranks: int, command: Sequence[str], site: Site | None = None) -> list[str]:
    """mpirun with what a job needs, on this machine or on the hosts of `site`.

    Raises:
        ConfigError: there is no mpirun.
    """
    program = _find_program("mpirun", "install Open MPI")
    version = _version(program)
    options = ["-np", str(ranks)]
    if "Open MPI" in version or "Open RTE" in version:
        options.append("--oversubscribe")  # more ranks than cores are slow, but no mistake
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")  # in a container there is nobody else
        if site is not None:
            options += _open_mpi_hosts(program, site, newer=") 4." not in version)
    elif site is not None:
        options += _mpich_hosts(site)
    return [program, *options, *command]


def _open_mpi_hosts(program: str, site: Site, *, newer: bool) -> list[str]:
    network = site.network.cidr
    options = ["-H", _slots(site), "--bind-to", "none", "--map-by", "slot"]
    options += ["--mca", "btl_tcp_if_include", network]
    if any(map(is_here, site.names)):  # else mpirun itself may be in another network
        framework = ["--prtemca", "prte_if_include"] if newer else ["--mca", "oob_tcp_if_include"]
        options += [*framework, network]
    agent = ["--prtemca", "plm_ssh_agent"] if newer else ["--mca", "plm_rsh_agent"]
    options += [*agent, " ".join(SSH)]
    options += ["--prefix", str(Path(program).parent.parent)]  # it need not be on PATH there
    for name in forwarded():
        if not name.startswith("OMPI_MCA_"):  # these it forwards itself
            options += ["-x", name]
    return options


def _mpich_hosts(site: Site) -> list[str]:
    interfaces = set(site.network.interfaces.values())
    options = ["-hosts", _slots(site), "-launcher", "ssh"]
    if len(interfaces) == 1:
        options += ["-iface", *interfaces]
    return [*options, "-genvlist", ",".join(forwarded())]


def horovodrun_command(ranks: int, command: Sequence[str], site: Site | None = None) -> list[str]:
    """horovodrun with Gloo, on this machine or on the hosts of `site`.

    Raises:
        ConfigError: there is no horovodrun.
    """
    options = ["--gloo", "-np", str(ranks)]
    if site is not None:
        interfaces = sorted(set(site.network.interfaces.values()))
        options += ["-H", _slots(site), "--network-interfaces", ",".join(interfaces)]
    return [_find_program("horovodrun", "install Horovod"), *options, *command]


def _slots(site: Site) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in site.hosts)


def _find_program(name: str, do: str) -> str:
    """That of this environment, or the first on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(
            f"{name}: not found",
            rule="backend.kind=allreduce on several ranks is started by it",
            received=f"no {name} beside this Python and none on PATH",
            do=f"run `make install`, {do}, or use backend.kind=local",
        )
    return found


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def signal_ranks(process: subprocess.Popen[bytes], number: int) -> bool:
    """Ask the ranks of an mpirun to stop; False if it has not started them yet.

    mpirun itself kills its ranks a second after SIGTERM or SIGINT, which is no time to save.
    """
    assert not isinstance(process.args, (str, bytes, os.PathLike))
    ranks = list(_ranks_below(process.pid, [os.fsdecode(part) for part in process.args]))
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    return bool(ranks)


def signal_mpirun(process: subprocess.Popen[bytes], number: int) -> bool:
    """Ask ranks on other hosts to stop: mpirun passes SIGUSR1 on to them, and lives."""
    process.send_signal(signal.SIGUSR1)
    return True


def _ranks_below(pid: int, started: Sequence[str]) -> Iterator[int]:
    """Descendants that run what mpirun was told to start: the end of its own command line.

    They are its children in Open MPI, and children of a proxy in MPICH.
    """
    for child in children(pid):
        command = arguments(child)
        # A child that is mpirun still, and not yet what it becomes, has all of that line.
        if 0 < len(command) < len(started) and list(started[-len(command) :]) == command:
            yield child
        else:
            yield from _ranks_below(child, started)
