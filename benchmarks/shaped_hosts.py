"""Several hosts with links of a given rate on one machine: network namespaces on one bridge.

Needs root and iproute2. Each host has an address of its own and a full-duplex link whose two
directions are shaped apart, so that what travels can be timed as between machines.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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

    def address(self, index: int) -> str:
        return f"{NETWORK}.{index + 1}"

    def popen(self, index: int, command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start a command on a host."""
        return subprocess.Popen(["ip", "netns", "exec", self._names[index], *command], **keywords)

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
        with suppress(subprocess.CalledProcessError):
            _run(["ip", "link", "del", self._bridge])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
