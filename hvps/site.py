"""Where a job of several hosts runs: its hosts, and the network between them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvps.errors import ConfigError
from hvps.host_check import Network, Probes, check_hosts, hosts_left
from hvps.hosts import Host


class Site:
    """The hosts of a job.

    Args:
        hosts: with as many slots as the job uses.
        wanted: the network to use; see `choose_network`.
        engine: a package that the job needs beside TensorFlow and Keras, if any.

    Attributes:
        network: by which they reach each other; known after `meet`.
    """

    network: Network

    def __init__(self, hosts: Sequence[Host], wanted: str | None, engine: str = "") -> None:
        self.hosts = list(hosts)
        self._wanted, self._engine = wanted, engine

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    def meet(self, ports: dict[str, int] | None = None) -> dict[str, list[int]]:
        """Find out whether the job can run.

        Args:
            ports: how many free ports to find, by host.

        Returns:
            The ports.

        Raises:
            ConfigError: names each host that cannot take part, and why.
        """
        with Probes(self.names) as probes:
            self.network = check_hosts(probes, self.names, self._wanted, self._engine)
            return probes.ask({host: {"ports": number} for host, number in (ports or {}).items()})

    def check_names(self) -> None:
        """Gloo dies by a signal where a host cannot resolve the name of another.

        Raises:
            ConfigError: names the hosts.
        """
        with Probes(self.names) as probes:
            unknown = probes.ask({host: {"resolve": self.names} for host in self.names})
        for host, names in unknown.items():
            if names:
                raise ConfigError(
                    f"--gloo: {host} cannot resolve {', '.join(names)}",
                    rule="with Gloo each host resolves the names of all",
                    received=", ".join(self.names),
                    do="add them to /etc/hosts or DNS, name addresses with -H, or use MPI",
                )

    def left(self) -> list[Host]:
        """The hosts that still answer and reach each other."""
        with Probes(self.names) as probes:
            names = hosts_left(probes, self.names, self._wanted)
        return [host for host in self.hosts if host.name in names]

    def why_not(self) -> str | None:
        """What is wrong with the hosts now, in a line; None if nothing."""
        try:
            self.meet()
        except ConfigError as err:
            return f"{err.what.removeprefix('-H: ')} ({err.received})"
        return None

    def explain_failure(self) -> None:
        """After a job has failed: say so if that was because of a host."""
        why = self.why_not()
        if why is not None:
            print(f"hvps: error: {why}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        hosts = ", ".join(f"{host.name}:{host.slots}" for host in self.hosts)
        interfaces = ", ".join(sorted(set(self.network.interfaces.values())))
        return f"{hosts} by {self.network.cidr} ({interfaces})"
