"""The hosts of a job: `host:slots,...` or a hostfile, and which process runs on which."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvps.errors import ConfigError

_RULE = "HOST[:SLOTS],..., each host once, SLOTS an integer >= 1 (1)"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._@-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Host:
    """A host by the name or IPv4 address that ssh knows, and how many processes it takes."""

    name: str
    slots: int


def parse_hosts(text: str, option: str = "-H") -> list[Host]:
    """Read `a:4,b:4`.

    Raises:
        ConfigError: it is written otherwise, or a host is there twice.
    """
    return _checked([_host(*part.strip().partition(":")) for part in text.split(",")], text, option)


def read_hostfile(path: str) -> list[Host]:
    """Read lines of `host slots=4`, as Open MPI and Horovod do, or `host:4`, as MPICH does.

    `max_slots`, empty lines and what follows a `#` mean nothing here.

    Raises:
        ConfigError: it cannot be read, or is written otherwise.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(
            f"--hostfile: {path} cannot be read",
            rule="a text file with one host per line: NAME slots=N",
            received=str(err),
            do="correct the path, or name the hosts with -H",
        ) from err
    found: list[tuple[str, int | None]] = []
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        counts = [w.partition("=")[2] for w in words[1:] if w.startswith("slots=")]
        unknown = [w for w in words[1:] if not re.fullmatch(r"(max[_-])?slots=[0-9]+", w)]
        if unknown:
            raise _wrong(f"'{unknown[0]}' means nothing", line.strip(), f"--hostfile {path}")
        name, colon, count = words[0].partition(":")
        found.append(_host(name, ":", counts[0]) if counts else _host(name, colon, count))
    return _checked(found, path, "--hostfile")


def _host(name: str, colon: str, count: str) -> tuple[str, int | None]:
    if not colon:
        return name, 1
    valid = count.isascii() and count.isdigit() and len(count) < 6 and int(count) >= 1
    return name, int(count) if valid else None


def _checked(found: Sequence[tuple[str, int | None]], text: str, option: str) -> list[Host]:
    hosts: list[Host] = []
    for name, slots in found:
        if not _NAME.fullmatch(name):
            raise _wrong(f"'{name}' is not the name of a host", text, option)
        if slots is None:
            raise _wrong(f"the slots of {name} are not a number", text, option)
        if name in (host.name for host in hosts):
            raise _wrong(f"{name} is there twice", text, option)
        hosts.append(Host(name, slots))
    if not hosts:
        raise _wrong("no hosts", text, option)
    return hosts


def _wrong(what: str, text: str, option: str) -> ConfigError:
    return ConfigError(
        f"{option.split()[0]}: {what}",
        rule="one host per line: NAME slots=N" if option.startswith("--") else _RULE,
        received=f"{option} {text}" if option.startswith("-H") else f"{text} ({option})",
        do="for example -H node1:4,node2:4",
    )


def first_slots(hosts: Sequence[Host], number: int, option: str) -> list[Host]:
    """The hosts that `number` processes fill, in order, each with as many as it gets.

    Raises:
        ConfigError: there are fewer slots.
    """
    _check_enough(hosts, number, option)
    used: list[Host] = []
    for host in hosts:
        taken = min(host.slots, number - sum(h.slots for h in used))
        if taken > 0:
            used.append(Host(host.name, taken))
    return used


def deal_out(hosts: Sequence[Host], number: int, option: str) -> list[str]:
    """A host for each of `number` tasks: one to each host in turn, while it has slots.

    Tasks that do the same, like parameter servers, so come to different hosts, and to different
    links.

    Raises:
        ConfigError: there are fewer slots.
    """
    _check_enough(hosts, number, option)
    turns = [h.name for turn in range(max(h.slots for h in hosts)) for h in hosts if turn < h.slots]
    return turns[:number]


def _check_enough(hosts: Sequence[Host], number: int, option: str) -> None:
    slots = sum(host.slots for host in hosts)
    if number > slots:
        raise ConfigError(
            f"{option}: {number} processes for {slots} slots",
            rule="each process has a slot on one of the hosts",
            received=", ".join(f"{host.name}:{host.slots}" for host in hosts),
            do="name more hosts or more slots (NAME:SLOTS), or start fewer processes",
        )
