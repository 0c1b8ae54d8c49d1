"""Several hosts with links of a given rate on one machine: network namespaces on one bridge.

Needs root and iproute2. Each host has an address of its own and a full-duplex link whose two
directions are shaped apart, so that what travels can be timed as between machines.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

NETWORK = "10.78.0"
_SERIAL = itertools.count()
_LIMITS = ("burst", "128kb", "latency", "200ms")


def unavailable() -> str | None:
    """Why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "iproute2 (ip, tc) is not installed"
    name = f"hvps-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@dataclass
class ShapedHosts:
    """`number` hosts, while the context lasts; links carry `rate` (as in "400mbit") each way."""

    number: int
    rate: str
    _names: list[str] = field(default_factory=list)

    def __enter__(self) -> ShapedHosts:
        # A namespace goes some time after it was removed, and its links with it: new names.
        mark = f"{os.getpid() % 100_000}{next(_SERIAL)}"
        self._bridge = f"hb{mark}"
        try:
            _run(["ip", "link", "add", self._bridge, "type", "bridge"])
            _run(["ip", "link", "set", self._bridge, "up"])
            for i in range(self.number):
                self._add_names(f"hvps{mark}-{i}")
                self._add(i, f"hvps{mark}-{i}", f"hv{mark}-{i}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _add(self, index: int, name: str, link: str) -> None:
        _run(["ip", "netns", "add", name])
        self._names.append(name)
        _run(["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name])
        _run(["ip", "link", "set", link, "master", self._bridge, "up"])
        _run(["ip", "-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0"])
        for device in ("eth0", "lo"):
            _run(["ip", "-n", name, "link", "set", device, "up"])
        shape = ["root", "tbf", "rate", self.rate, *_LIMITS]
        _run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *shape])
        _run(["tc", "qdisc", "add", "dev", link, *shape])

    def _add_names(self, namespace: str) -> None:
        """`ip netns exec` shows this file as /etc/hosts."""
        names = [f"{self.address(i)} {self.name(i)}" for i in range(self.number)]
        folder = Path("/etc/netns") / namespace
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def name(self, index: int) -> str:
        """As the hosts know each other."""
        return f"hv{index}"

    def address(self, index: int) -> str:
        return f"{NETWORK}.{index + 1}"

    def popen(self, index: int, command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start a command on a host."""
        return subprocess.Popen(self.command(index, command), **keywords)

    def command(self, index: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host, which has a name of its own."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name(index)]
        return ["ip", "netns", "exec", self._names[index], *named, *command]

    def make_ssh(self, path: Path) -> None:
        """Write a program that stands for ssh between the hosts, by name or address.

        Options are passed over. Unknown hosts end as with ssh: exit code 255, and a word why.
        """
        cases = [
            f"{self.name(i)}|{self.address(i)}) set -- {shlex.join(self.command(i, ['sh', '-c']))}"
            ' "$*" ;;'
            for i in range(self.number)
        ]
        skip = (
            "while :; do case $1 in -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;; -*) shift ;; *) break ;;"
            " esac; done"
        )
        unknown = '*) echo "ssh: Could not resolve hostname $host" >&2; exit 255 ;;'
        host = ["host=$1; shift", skip]  # ssh takes options after the host as well
        lines = ["#!/bin/sh", skip, *host, 'case "$host" in', *cases, unknown, "esac"]
        path.write_text("\n".join([*lines, 'exec "$@"', ""]))
        path.chmod(0o755)

    def cut(self, index: int) -> None:
        """Take a host's link down."""
        _run(["ip", "-n", self._names[index], "link", "set", "eth0", "down"])

    def heal(self, index: int) -> None:
        """Take it up again."""
        _run(["ip", "-n", self._names[index], "link", "set", "eth0", "up"])

    def bytes_of(self, index: int) -> tuple[int, int]:
        """Bytes that a host has received and sent, as its interface counts them."""
        counters = "/sys/class/net/eth0/statistics"
        script = f"cat {counters}/rx_bytes {counters}/tx_bytes"
        command = ["ip", "netns", "exec", self._names[index], "sh", "-c", script]
        received, sent = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.split()
        return int(received), int(sent)

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _run(["ip", "netns", "del", name])
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        with suppress(subprocess.CalledProcessError):
            _run(["ip", "link", "del", self._bridge])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
