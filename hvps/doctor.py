"""hvps doctor: whether a job can run on these hosts, and if not, why.

look at each host → compare them → find a network → measure it → try both ways of training
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from hvps.cli_args import hosts_and_network
from hvps.doctor_rows import OK, Row, bad_row, host_rows, link_row, network_rows
from hvps.doctor_trials import slots, try_allreduce, try_ps
from hvps.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK
from hvps.host_check import Network, Probes, choose_network, different_hosts, silent_hosts
from hvps.site import Site

HELP = """\
usage: hvps doctor [-H HOST,...] [--hostfile FILE] [--network NET] [--json]

Find out whether training can run here, or on several hosts, and what would stop it.

Looks at Python, the libraries and how they were built, MPI, GPUs, memory and cores of each host;
whether hosts answer by ssh, have the same versions and know each other's names; at networks and
connections, with latency and bandwidth of each pair; then sums over real MPI ranks, and reads and
writes a variable on a real parameter server.

  -H HOST:SLOTS,...  the hosts to look at; by default this machine
  --hostfile FILE    the same, one host per line: NAME slots=N
  --network NET      the network between the hosts: an interface, or a CIDR
  --json             for machines: {"ok": true, "rows": [{"status", "host", "what", "found", "do"}]}

examples:
  hvps doctor
  hvps doctor -H node1,node2
  hvps doctor --hostfile hosts.txt --network 10.0.0.0/8

exit codes: 0 training can run (there may be warnings), 1 something would stop it, 2 wrong usage
"""
_DESCRIBE_S = 75.0  # TensorFlow is imported on each host
_MEASURE_S = 12.0


def main(argv: Sequence[str]) -> int:
    """Look, and print what was found.

    Returns:
        The exit code.

    Raises:
        ConfigError: a wrong command line.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(HELP, end="")
        return EXIT_OK
    as_json = "--json" in argv
    hosts, network = hosts_and_network([word for word in argv if word != "--json"], "hvps doctor")
    examination = _Examination([host.name for host in hosts] or ["localhost"], network)
    try:
        for progress in examination.steps():
            if not as_json:
                print(f"{progress} ...", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    rows, stopped = examination.rows, examination.fails
    if as_json:
        print(json.dumps({"ok": not stopped, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        _print_table(rows)
    return EXIT_FAILURE if stopped else EXIT_OK


@dataclass
class _Examination:
    """What is found, step by step."""

    hosts: list[str]
    wanted: str | None
    rows: list[Row] = field(default_factory=list)

    @property
    def fails(self) -> bool:
        return any(row.status == "bad" for row in self.rows)

    def steps(self) -> Iterator[str]:
        """Does them; yields before each what comes. After what stops a job, nothing is tried."""
        began = time.monotonic()
        yield f"asking {', '.join(self.hosts)}"
        with Probes(self.hosts) as probes:
            problems = [*silent_hosts(probes), *different_hosts(probes.facts, "")]
            self.rows += map(bad_row, problems)
            if len(self.hosts) > 1:
                self._compare(probes)
            network = self._find_network(probes)
            if not self.fails:
                yield "loading the libraries"
            self._describe(probes)
            if network is not None and not self.fails and len(self.hosts) > 1:
                yield "measuring the network"
                self._measure(probes, network)
        if self.fails or network is None:
            self.rows.append(Row("warning", "", "trials", "not tried", "mend the above first"))
            return
        yield "summing over ranks"
        site = self._site(max(2, len(self.hosts)))
        self.rows.append(try_allreduce(site, max(2, len(self.hosts))))
        yield "reading and writing on a parameter server"
        self.rows.append(try_ps(site, site.meet(dict.fromkeys(self.hosts, 2))))
        self.rows.append(Row(OK, "", "examined", f"in {time.monotonic() - began:.0f} s"))

    def _site(self, ranks: int) -> Site:
        site = Site(slots(self.hosts, ranks), self.wanted)
        site.meet()
        return site

    def _compare(self, probes: Probes) -> None:
        """Of those that answer: whether they know each other's names."""
        known = list(probes.facts)
        unknown = probes.ask({host: {"resolve": self.hosts} for host in known})
        for host, names in unknown.items():
            if names:
                do = "add them to /etc/hosts or DNS: Gloo needs them"
                self.rows.append(Row("warning", host, "names", f"unknown: {', '.join(names)}", do))
            else:
                self.rows.append(Row(OK, host, "names", "resolves those of all hosts"))
            self.rows.append(Row(OK, host, "ssh", "answers"))

    def _find_network(self, probes: Probes) -> Network | None:
        known = [host for host in self.hosts if host in probes.facts]
        if not known:
            return None
        network, problems = choose_network(probes, known, self.wanted)
        self.rows += network_rows(network, problems, known)
        return network

    def _describe(self, probes: Probes) -> None:
        """All that answer; in full only where nothing stops a job yet, for that takes seconds."""
        more: dict[str, Any] = {}
        if not self.fails:
            more = probes.ask({host: {"describe": True} for host in probes.facts}, _DESCRIBE_S)
            for host, own in probes.facts.items():
                self.rows += host_rows(host, own, more.get(host))
            return
        for host, own in probes.facts.items():
            versions = ", ".join(f"{name} {own['packages'][name]}" for name in own["packages"])
            self.rows.append(Row(OK, host, "python", f"{own['python']}, hvps {own['hvps']}"))
            self.rows.append(Row(OK, host, "packages", versions))

    def _measure(self, probes: Probes, network: Network) -> None:
        """Each pair of hosts; pairs that share no host at the same time."""
        for pairs in rounds(self.hosts):
            questions = {
                a: {"measure": [network.addresses[b], probes.facts[b]["port"]]} for a, b in pairs
            }
            answers = probes.ask(questions, _MEASURE_S)
            self.rows += [link_row(a, b, answers.get(a)) for a, b in pairs]


def rounds(hosts: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Every pair once, in rounds in which each host is in one pair at most (the circle method)."""
    fixed, *others = [*hosts, *([""] * (len(hosts) % 2))]
    for _ in others:
        circle = [fixed, *others]
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a and b]
        others = [others[-1], *others[:-1]]


def _print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {OK: "green", "warning": "yellow", "bad": "bold red"}
    table = Table(box=None, pad_edge=False)
    for name in ("", "host", "what", "found"):
        table.add_column(name, overflow="fold")
    order = sorted(rows, key=lambda row: row.host)  # the whole job's first, then by host
    for row in [r for r in order if r.status != "bad"] + [r for r in order if r.status == "bad"]:
        found = row.found if not row.do else f"{row.found}\n→ {row.do}"
        table.add_row(Text(row.status, styles[row.status]), row.host, row.what, Text(found))
    with suppress(BrokenPipeError):
        Console(width=None if sys.stdout.isatty() else 140).print(table)
    bad = sum(row.status == "bad" for row in rows)
    print(f"\n{bad} of these would stop training" if bad else "\ntraining can run here")
