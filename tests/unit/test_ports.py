"""Free ports, and what is wrong with an address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvps.errors import ConfigError
from hvps.ports import (
    check_own_address,
    free_ports,
    is_own_host,
    port_owner,
    resolves,
    split_address,
)

FOREIGN = "192.0.2.1"  # of a block that is for documentation only
UNKNOWN = "no-such-host.invalid"


@contextmanager
def listener(host: str = "127.0.0.1") -> Iterator[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen()
        yield server.getsockname()[1]


def problem(address: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_own_address(address, "ps 0")
    err = caught.value
    assert err.what.startswith("ps 0: ")
    assert (err.received, bool(err.rule), bool(err.do)) == (address, True, True)
    return err


def test_free_ports() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        check_own_address(f"127.0.0.1:{port}")
    assert free_ports(0) == []


def test_split_address() -> None:
    assert split_address("a.b:1") == ("a.b", 1)
    assert split_address("[::1]:22") == ("::1", 22)


def test_resolves() -> None:
    assert resolves("localhost")
    assert resolves("127.0.0.1")
    assert resolves("[::1]")
    assert not resolves(UNKNOWN)
    assert not resolves("a" * 70)


def test_own_hosts() -> None:
    assert is_own_host("127.0.0.1")
    assert is_own_host("localhost")
    assert not is_own_host(FOREIGN)
    assert not is_own_host(UNKNOWN)


def test_a_port_in_use_names_its_owner() -> None:
    with listener() as port:
        what = problem(f"127.0.0.1:{port}").what
        assert what.startswith(f"ps 0: port {port} is in use by pid {os.getpid()} (")
        assert "python" in what
    check_own_address(f"127.0.0.1:{port}")


def test_another_process_has_the_port() -> None:
    code = (
        "import socket, sys\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "a\nb" + "x" * 500],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            owner = port_owner(port)
        finally:
            process.kill()
    assert owner is not None
    assert owner.startswith(f"pid {process.pid} (")
    assert "\n" not in owner
    assert len(owner) < 120


def test_all_addresses_of_a_port_are_in_use() -> None:
    with listener("0.0.0.0") as port:
        assert f"port {port} is in use" in problem(f"127.0.0.1:{port}").what


def test_nobody_has_the_port() -> None:
    assert port_owner(free_ports(1)[0]) is None


def test_a_port_that_served_a_moment_ago() -> None:
    """The rest of its connections (TIME_WAIT) is no obstacle, as to a server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            accepted, _ = server.accept()
            accepted.close()  # this side closes first, and keeps the port for a minute
    check_own_address(f"127.0.0.1:{port}")


def test_a_host_that_is_not_this_machine() -> None:
    assert problem(f"{FOREIGN}:33331").what == f"ps 0: {FOREIGN} is not this machine"


def test_a_host_without_an_address() -> None:
    assert problem(f"{UNKNOWN}:1").what == f"ps 0: the host {UNKNOWN} has no address"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use all ports")
def test_a_port_of_the_system() -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) > 81:
        assert "ermission" in problem("127.0.0.1:81").what


def test_only_the_standard_library_is_needed() -> None:
    code = (
        "import sys; import hvps.ports\n"
        "assert not {'pydantic', 'yaml', 'numpy', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
