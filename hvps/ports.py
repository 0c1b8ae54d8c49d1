"""Ports and addresses of this machine, asked of the operating system."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from hvps.errors import ConfigError

_LISTEN = "0A"  # a state in /proc/net/tcp
_MAX_COMMAND = 80


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of 'host:port'."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def free_ports(n: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of this machine that nobody uses, each once.

    They are free when this returns, and stay so only until somebody takes them.
    """
    with ExitStack() as stack:  # all are held until the last is chosen
        sockets = [stack.enter_context(_socket(host)) for _ in range(n)]
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def resolves(host: str) -> bool:
    """Whether the name or address means something on this machine."""
    try:
        return bool(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


def is_own_host(host: str) -> bool:
    """Whether the host is this machine."""
    try:
        _bind(host.strip("[]"), 0)
    except (OSError, UnicodeError):
        return False
    return True


def port_owner(port: int) -> str | None:
    """Who has the port, as "pid 123 (python -m ...)"; None if nobody, or nobody of ours."""
    inodes = list(_inodes(port))
    if not inodes:
        return None
    for folder in Path("/proc").glob("[0-9]*"):
        if any(link in inodes for link in _open_files(folder)):
            return f"pid {folder.name} ({_command(folder)})"
    return None


def check_own_address(address: str, task: str = "this task") -> None:
    """Check that a server of this process could listen at 'host:port'.

    Args:
        task: what listens there, for the message.

    Raises:
        ConfigError: the host has no address, is not this machine, or the port is in use.
    """
    host, port = split_address(address)
    rule = "a task listens at its own address, at a port that nobody uses"
    if not resolves(host):
        raise unresolvable(address, task)
    try:
        _bind(host, port)
    except OSError as err:
        if err.errno == errno.EADDRNOTAVAIL:
            what = f"{host} is not this machine"
            do = f"start {task} on {host}, or correct its address"
        elif err.errno == errno.EADDRINUSE:
            owner = port_owner(port)
            what = f"port {port} is in use" + (f" by {owner}" if owner else "")
            do = "end that process, or choose another port"
        else:
            what, do = f"cannot listen: {err.strerror}", "choose another address"
        raise ConfigError(f"{task}: {what}", rule=rule, received=address, do=do) from None


def unresolvable(address: str, task: str) -> ConfigError:
    """The error of a host that has no address."""
    host, _ = split_address(address)
    return ConfigError(
        f"{task}: the host {host} has no address",
        rule="hosts are addresses, or names that every host of the cluster knows",
        received=address,
        do="correct the name, give the address, or add the name to /etc/hosts",
    )


def _bind(host: str, port: int) -> None:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, target = min(found, key=lambda e: e[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        # As a server does: connections that ended a moment ago are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(target)


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def _inodes(port: int) -> Iterator[str]:
    """Of the sockets at a port; of those that listen, if there are any."""
    found: list[tuple[bool, str]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                found.append((fields[3] == _LISTEN, f"socket:[{fields[9]}]"))
    listening = any(listens for listens, _ in found)
    yield from (link for listens, link in found if listens or not listening)


def _open_files(process: Path) -> Iterator[str]:
    try:
        for file in (process / "fd").iterdir():
            try:
                yield os.readlink(file)
            except OSError:
                continue  # it was closed meanwhile
    except OSError:
        return  # another user's process, or it has ended


def _command(process: Path) -> str:
    try:
        raw = (process / "cmdline").read_bytes()
    except OSError:
        raw = b""
    text = " ".join(part.decode(errors="replace") for part in raw.split(b"\0") if part)
    printable = "".join(c if c.isprintable() else "?" for c in text) or "unknown command"
    return printable if len(printable) <= _MAX_COMMAND else printable[: _MAX_COMMAND - 3] + "..."
