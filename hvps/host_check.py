"""Whether a job can run on its hosts, found out before it starts: each answers by ssh, has the same
program and libraries, and reaches all others by one network.

The launcher starts `hvps.probe` on each of them and asks it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hvps import probe
from hvps.problems import InvalidConfigError, Problem
from hvps.remote import on_host

_ANSWER_S = 15.0
_READ = "import sys; exec(compile(eval(sys.stdin.readline()), 'hvps.probe', 'exec'))"
_Network = ipaddress.IPv4Network


@dataclass(frozen=True)
class Network:
    """A network by which all hosts reach each other.

    Attributes:
        cidr: as in "10.0.0.0/24".
        interfaces: names, by host.
        addresses: by host.
    """

    cidr: str
    interfaces: Mapping[str, str]
    addresses: Mapping[str, str]


class Probes:
    """A probe on each host, while the context lasts.

    Attributes:
        facts: what each host has said of itself; only of those that have answered.
        silent: why the others have not.
    """

    def __init__(self, hosts: Sequence[str], seconds: float = _ANSWER_S) -> None:
        self._hosts, self._seconds = list(hosts), seconds
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._unread: dict[str, bytes] = {}
        self.tokens = {host: secrets.token_hex(8) for host in hosts}
        self.facts: dict[str, dict[str, Any]] = {}
        self.silent: dict[str, str] = {}

    def __enter__(self) -> Probes:
        source = repr(Path(probe.__file__).read_text(encoding="utf-8"))
        for host in self._hosts:
            try:
                self._processes[host] = subprocess.Popen(
                    # PYTHONPATH as the job will have it; nothing else is needed to look around.
                    on_host(host, [sys.executable, "-c", _READ], ["PYTHONPATH"]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as err:
                self.silent[host] = str(err)
                continue
            self._send(host, f"{source}\n{json.dumps([os.getcwd(), self.tokens[host]])}")
        self.facts = self._answers(list(self._processes))
        return self

    def ask(self, questions: Mapping[str, object], seconds: float | None = None) -> dict[str, Any]:
        """Ask some hosts at the same time; the answers of those that answer in time."""
        for host, question in questions.items():
            self._send(host, json.dumps(question))
        return self._answers(list(questions), seconds)

    def _send(self, host: str, text: str) -> None:
        stdin = self._processes[host].stdin
        assert stdin is not None
        with suppress(OSError):  # it has ended: said by the lack of an answer
            stdin.write(text.encode() + b"\n")
            stdin.flush()

    def _answers(self, hosts: Sequence[str], seconds: float | None = None) -> dict[str, Any]:
        """A line of each, until the deadline; why not is kept in `silent`."""
        answers: dict[str, Any] = {}
        seconds = self._seconds if seconds is None else seconds
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for host in hosts:
                selector.register(self._processes[host].stdout, selectors.EVENT_READ, host)  # type: ignore[arg-type]
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 65536)
                    answer = self._answer_in(key.data, data)
                    if answer is not None:
                        answers[key.data] = answer
                    elif data:
                        continue
                    else:
                        self.silent[key.data] = self._last_words(key.data)
                    selector.unregister(key.fileobj)
            for key in selector.get_map().values():
                self.silent[key.data] = f"no answer in {seconds:g} s"
        return answers

    def _answer_in(self, host: str, data: bytes) -> Any:
        """The answer that is complete with this data; None if there is none yet.

        What a shell says when it starts is passed over.
        """
        *lines, self._unread[host] = (self._unread.get(host, b"") + data).split(b"\n")
        for line in lines:
            with suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, (dict, list)):
                    return answer
        return None

    def _last_words(self, host: str) -> str:
        process = self._processes[host]
        try:
            _, text = process.communicate(timeout=2)
        except (subprocess.TimeoutExpired, ValueError, OSError):
            return "it has closed its output"
        lines = [
            line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()
        ]
        return lines[-1] if lines else f"exit code {process.returncode} without a word"

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            for pipe in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError, ValueError):
                    assert pipe is not None
                    pipe.close()
        for process in self._processes.values():
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def check_hosts(probes: Probes, hosts: Sequence[str], wanted: str | None, engine: str) -> Network:
    """Find all that would stop the job.

    Args:
        wanted: the network to use, by the name of an interface or as CIDR; None to choose.
        engine: a package that the job needs beside TensorFlow and Keras, if any.

    Raises:
        InvalidConfigError: names each host that cannot take part, and why.
    """
    problems = [*silent_hosts(probes), *different_hosts(probes.facts, engine)]
    if problems:
        raise InvalidConfigError(problems)
    network, problems = choose_network(probes, hosts, wanted)
    if network is None or problems:
        raise InvalidConfigError(problems)
    return network


def silent_hosts(probes: Probes) -> Iterator[Problem]:
    """Hosts that do not answer, and why."""
    for host, why in probes.silent.items():
        yield Problem(
            f"-H: {host} does not answer",
            "each host runs a command by ssh, without a password",
            f"ssh {host}: {why}",
            f"make `ssh {host} true` work, or leave the host out",
        )


def different_hosts(facts: Mapping[str, Mapping[str, Any]], engine: str) -> Iterator[Problem]:
    """What hosts lack, or have in another version than the first."""
    if not facts:
        return
    first, *_ = facts
    needed = ["tensorflow", "keras", "numpy", *([engine] if engine else [])]
    for host, own in facts.items():
        if not own["folder"]:
            yield Problem(
                f"-H: {host} has no folder {os.getcwd()}",
                "the job runs in the same folder on each host",
                do="share it, or copy it there",
            )
            continue
        missing = [name for name in needed if own["packages"][name] is None]
        missing += ["hvps"] * (own["hvps"] is None)
        if missing:
            yield Problem(
                f"-H: {host} lacks {', '.join(missing)}",
                "each host has the same packages for the same Python",
                f"{sys.executable} of {host}, Python {own['python']}",
                f"install them on {host}, or run `make install` there",
            )
            continue
        other = facts[first]
        pairs = {"hvps": (other["hvps"], own["hvps"]), "python": (other["python"], own["python"])}
        pairs |= {name: (other["packages"][name], own["packages"][name]) for name in needed}
        for name, (expected, found) in pairs.items():
            if expected is not None and expected != found:
                yield Problem(
                    f"-H: {host} has another {name} than {first}",
                    "each host runs the same program with the same libraries",
                    f"{name} {found} on {host}, {expected} on {first}",
                    "install the same version on all hosts",
                )


def choose_network(
    probes: Probes, hosts: Sequence[str], wanted: str | None
) -> tuple[Network | None, list[Problem]]:
    """The first network in which each host has an address that all others reach.

    Interfaces like docker0 have the same address on each host, and lead nowhere.
    """
    networks = [n for n in _networks(probes.facts, hosts) if _is_wanted(n, wanted)]
    shared = [n for n in networks if len(n.addresses) == len(hosts)]
    if not shared:
        return None, list(_why_none(networks, probes.facts, hosts, wanted))
    failures: list[Problem] = []
    for network in shared:
        broken = list(_broken(probes, network))
        if not broken:
            return network, []
        failures += broken
    return None, failures


def _networks(facts: Mapping[str, Mapping[str, Any]], hosts: Sequence[str]) -> Iterator[Network]:
    """Networks in which several hosts have addresses of their own, those of most hosts first."""
    found: dict[_Network, dict[str, tuple[str, str]]] = {}
    for host in hosts:
        for name, address, length in facts[host]["interfaces"]:
            network = _Network(f"{address}/{length}", strict=False)
            if len(hosts) == 1 or not network.is_loopback:
                found.setdefault(network, {}).setdefault(host, (name, address))
    for network, members in sorted(found.items(), key=lambda item: -len(item[1])):
        addresses = {address for _, address in members.values()}
        if len(addresses) == len(members) and len(members) >= min(2, len(hosts)):
            yield Network(
                str(network),
                {host: name for host, (name, _) in members.items()},
                {host: address for host, (_, address) in members.items()},
            )


def _why_none(
    networks: Sequence[Network],
    facts: Mapping[str, Mapping[str, Any]],
    hosts: Sequence[str],
    wanted: str | None,
) -> Iterator[Problem]:
    rule = "each host has an IPv4 address of its own in one network"
    do = "name it with --network: an interface or a CIDR, like eth0 or 10.0.0.0/8"
    for network in networks[:1]:  # most hosts have it: what is wrong is with the others
        for host in hosts:
            if host not in network.addresses:
                yield Problem(
                    f"-H: {host} has no address in {network.cidr}, where the others are",
                    rule,
                    f"{host}: {_listed(facts[host]['interfaces'])}",
                    f"connect {host} to it, or {do}",
                )
    if not networks:
        yield Problem(
            "--network: the hosts share no network" + (f" that is {wanted}" if wanted else ""),
            rule,
            "; ".join(f"{host}: {_listed(facts[host]['interfaces'])}" for host in hosts),
            do,
        )


def _is_wanted(network: Network, wanted: str | None) -> bool:
    if wanted is None:
        return True
    if set(network.interfaces.values()) == {wanted}:
        return True
    try:
        return _Network(network.cidr).subnet_of(_Network(wanted, strict=False))
    except ValueError:
        return False


def _listed(interfaces: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{name} {address}/{length}" for name, address, length in interfaces)


def _broken(probes: Probes, network: Network) -> Iterator[Problem]:
    """Connections that cannot be made in a network."""
    for (host, peer), why in _failures(probes, network):
        yield Problem(
            f"-H: {host} cannot connect to {peer}",
            f"all hosts reach each other by TCP on any port; tried {network.cidr}"
            f" ({network.interfaces[host]})",
            f"{network.addresses[peer]}:{probes.facts[peer]['port']}: {why}",
            "open the ports between the hosts, or choose another network with --network",
        )


def _failures(probes: Probes, network: Network) -> Iterator[tuple[tuple[str, str], str]]:
    """Pairs of hosts, and why the first cannot connect to the second."""
    hosts = list(network.addresses)
    peers = {h: [other for other in hosts if other != h] for h in hosts}
    answers = probes.ask(
        {
            host: {
                "connect": [
                    (network.addresses[p], probes.facts[p]["port"], probes.tokens[p])
                    for p in peers[host]
                ]
            }
            for host in hosts
            if peers[host]
        }
    )
    for host, results in answers.items():
        for peer, why in zip(peers[host], results, strict=True):
            if why is not None:
                yield (host, peer), why


def hosts_left(probes: Probes, hosts: Sequence[str], wanted: str | None) -> list[str]:
    """The most of the hosts, in their order, that still answer and reach each other."""
    left = [host for host in hosts if host in probes.facts]
    for network in _networks(probes.facts, left):
        if not _is_wanted(network, wanted):
            continue
        left = [host for host in left if host in network.addresses]
        while len(left) > 1:
            among = Network(
                network.cidr, network.interfaces, {h: network.addresses[h] for h in left}
            )
            failed = [pair for pair, _ in _failures(probes, among)]
            if not failed:
                break
            # Who has most of the failures is cut off; of two alike the later one.
            left.remove(max(reversed(left), key=lambda host: sum(host in p for p in failed)))
        break
    return left
