"""How `hvps launch` starts ranks: one process, or all of them by mpirun or horovodrun."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from hvps.cli_args import Arguments
from hvps.cluster import Cluster
from hvps.config import TrainConfig
from hvps.errors import ConfigError
from hvps.hosts import Host, first_slots
from hvps.mpirun import horovodrun_command, mpirun_command, signal_mpirun, signal_ranks
from hvps.overrides import LoadedConfig, load_config
from hvps.plan import JOB, Plan, has_no_effect
from hvps.preflight import preflight
from hvps.remote import is_here
from hvps.returning import note_restart
from hvps.site import Site
from hvps.supervisor import Policy, Restart

_RANKS = 2  # where neither -np nor hosts are given


def plan_ranks(arguments: Arguments, loaded: LoadedConfig) -> Plan:
    """One process, or the ranks of one mpirun.

    Raises:
        ConfigError: the job could not run so, or not on these hosts.
    """
    if loaded.config.backend.kind == "local":
        return _plan_one(arguments, loaded)
    number = _number_of_ranks(arguments)
    if arguments.elastic:
        arguments = arguments.with_overrides(["train.uneven_batch=true"])
    loaded = load_config(arguments.config, arguments.overrides)
    # What each rank would find, here and once.
    preflight(loaded, Cluster(0, number, 0, number, "hvps launch"))
    text = f"hvps launch: {number} rank{'s' * (number > 1)}"
    ranks = _Ranks(arguments, loaded, number)
    if ranks.site is not None:
        text += f" on {ranks.site}"
    if arguments.elastic and not arguments.max_restarts:
        text += "; --elastic needs --max-restarts: nothing that dies is started again"
    policy = Policy(
        max_restarts=arguments.max_restarts, note=ranks.after_death, not_ready=ranks.not_ready
    )
    return Plan(
        {JOB: ranks.command()},
        policy,
        text,
        together=True,
        ask_to_stop=signal_ranks if ranks.some_here else signal_mpirun,
        explain_failure=ranks.site.explain_failure if ranks.site else lambda: None,
    )


def _plan_one(arguments: Arguments, loaded: LoadedConfig) -> Plan:
    given = {
        "-np": arguments.ranks not in (None, 1),
        "--elastic": bool(arguments.elastic),
        "-H": bool(arguments.hosts),
        "--gloo": arguments.gloo,
    }
    for option in (option for option, is_given in given.items() if is_given):
        why = "backend.kind is local: one process"
        raise has_no_effect(option, why, "backend.kind=allreduce")
    command = [sys.executable, "-m", "hvps.train", *arguments.for_training()]
    policy = Policy(
        max_restarts=arguments.max_restarts, note=lambda restart: note_restart(loaded, restart)
    )
    return Plan({JOB: command}, policy, "hvps launch: one process", together=True)


def _number_of_ranks(arguments: Arguments) -> int:
    smallest, largest = arguments.elastic or (None, None)
    slots = sum(host.slots for host in arguments.hosts)
    number = arguments.ranks or min(largest or slots, slots or _RANKS) or largest or _RANKS
    if largest is not None and not arguments.hosts:
        number = arguments.ranks or largest
    if smallest is not None and not smallest <= number <= (largest or number):
        raise ConfigError(
            f"-np: {number} ranks are not within --elastic",
            rule="MIN <= ranks <= MAX",
            received=f"{number} ranks, --elastic {smallest}:{largest}",
            do="leave -np out: training starts with MAX, or as many as there are slots",
        )
    return number


class _Ranks:
    """The ranks of a job, as many as there are now.

    Attributes:
        site: the hosts that they run on; None: this machine.
        some_here: whether this machine has some of them.
    """

    def __init__(self, arguments: Arguments, loaded: LoadedConfig, number: int) -> None:
        self._arguments, self._loaded, self._number = arguments, loaded, number
        self._given = arguments.for_training()
        self.site: Site | None = None
        self.some_here = True
        if arguments.hosts:
            self._settle(first_slots(arguments.hosts, number, "-np"))

    def _settle(self, hosts: list[Host]) -> None:
        self.site = Site(hosts, self._arguments.network, self._engine())
        self.site.meet()
        if self._arguments.gloo:
            self.site.check_names()
        self.some_here = any(is_here(host.name) for host in hosts)

    def _engine(self) -> str:
        wanted = self._loaded.config.backend.engine
        if wanted == "mpi" or (wanted == "auto" and importlib.util.find_spec("horovod") is None):
            return "mpi4py"
        return "horovod"

    def command(self) -> list[str]:
        """What starts them all."""
        program = [sys.executable, "-m", "hvps.train", *self._given]
        if self._arguments.gloo:
            return horovodrun_command(self._number, program, self.site)
        return mpirun_command(self._number, program, self.site)

    def after_death(self, restart: Restart) -> Sequence[str] | None:
        """The command to go on with, where that is another."""
        note_restart(self._loaded, restart)
        if self._arguments.elastic is None:
            return None
        smallest, _ = self._arguments.elastic
        number = max(smallest, self._number - 1)
        if self.site is not None:
            left = self.site.left()
            number = max(smallest, min(number, sum(host.slots for host in left)))
            if sum(host.slots for host in left) < number:
                return None  # wait for the others
            self._settle(first_slots(left, number, "--elastic"))
        if number == self._number:
            return None
        self._number = number
        print(f"hvps launch: {_shares(number, self._loaded.config.train)}", flush=True)
        return self.command()

    def not_ready(self, name: str) -> str | None:
        """Why it makes no sense to start now."""
        return None if self.site is None else self.site.why_not()


def _shares(ranks: int, train: TrainConfig) -> str:
    """As hvps.sampling deals them out."""
    batch, parts = train.global_batch, ranks * train.accumulate
    dealt = [batch * (i + 1) // parts - batch * i // parts for i in range(parts)]
    shares = ", ".join(str(sum(dealt[rank::ranks])) for rank in range(ranks))
    verb = "rank has" if ranks == 1 else "ranks share"
    return f"{ranks} {verb} the global batch of {batch}: {shares}"
