"""A second host, as far as the network is concerned: a network namespace on a virtual cable."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


def _ip(*arguments: str) -> None:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@dataclass
class Namespace:
    """A host of its own.

    Attributes:
        here: the address at which it reaches this host.
    """

    name: str
    here: str

    def connect(self, address: str, port: int) -> str:
        """Connect from there; returns "connected", or what went wrong."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, sys.executable, "-c", _CONNECT, address, str(port)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).close()
    print("connected")
except OSError as err:
    print(err.strerror or err)
"""


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    """A namespace that is removed after the test; skips where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program ip (iproute2)")
    # The pair is the only one of its kind on this host, and its network one of those that are set
    # aside for tests (RFC 2544).
    name, number = f"hvps{os.getpid()}", random.SystemRandom().randrange(2**15)
    base = (198 << 24) + (18 << 16) + 4 * number
    here, there = (socket.inet_ntoa((base + i).to_bytes(4, "big")) for i in (1, 2))
    try:
        try:
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}h", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("addr", "add", f"{here}/30", "dev", f"{name}h")
            _ip("link", "set", f"{name}h", "up")
            _ip("-n", name, "addr", "add", f"{there}/30", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        except OSError as err:
            pytest.skip(f"no network namespace can be made here: {err}")
        made = Namespace(name, here)
        with socket.create_server((here, 0)) as probe:
            outcome = made.connect(here, probe.getsockname()[1])
        if outcome != "connected":
            pytest.skip(f"this host lets nobody in from a new interface: {outcome}")
        yield made
    finally:
        # Either takes the other end of the pair with it.
        for command in (["link", "del", f"{name}h"], ["netns", "del", name]):
            subprocess.run(["ip", *command], capture_output=True, timeout=20, check=False)
