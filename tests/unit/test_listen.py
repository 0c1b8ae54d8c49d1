"""A TensorFlow server listens on its own address only."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from hvps.backends.ps import elf
from hvps.backends.ps.listen import check_listening, firewall_notice, resolve
from hvps.errors import ConfigError, TrainingError
from tests.launching import ROOT, job_environment

# Makes servers, asks each for a result through the network, says how it went, waits to be ended.
SERVERS = """
import json, os, sys
from contextlib import nullcontext
import tensorflow as tf
from hvps.backends.ps import listen
from hvps.errors import HvpsError, TrainingError

def interrupt(*args):
    raise KeyboardInterrupt("in bind")

def serve(host, port, mode):
    said = {"error": None, "check": None, "answer": None}
    bind = listen._Guard._bind
    if mode == "interrupted":
        listen._Guard._bind = interrupt
    try:
        with nullcontext() if mode == "unguarded" else listen.listening_on(host, port):
            tf.distribute.Server({"ps": [f"{host}:{port}"]}, job_name="ps", task_index=0)
    except (KeyboardInterrupt, HvpsError) as err:
        return {**said, "error": f"{type(err).__name__}: {err}"}
    finally:
        listen._Guard._bind = bind
    try:
        listen.check_listening(host, port)
    except TrainingError as err:
        said["check"] = str(err)
    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=30_000)
    config.rpc_options.use_rpc_for_inprocess_master = True
    with tf.Graph().as_default():
        answer = tf.constant(6) * 7
        with tf.compat.v1.Session(f"grpc://{host}:{port}", config=config) as session:
            said["answer"] = int(session.run(answer))
    return said

print(json.dumps([serve(*each) for each in json.loads(sys.argv[1])]), flush=True)
sys.stdin.read()
os._exit(0)
"""
SERVES = {"error": None, "check": None, "answer": 42}


@dataclass
class Servers:
    """A process with servers.

    Attributes:
        said: for each server, the error that was met instead of it, what the check found wrong,
            and the answer that it gave.
        listeners: all sockets on which the process listens, as the kernel writes them.
    """

    ports: list[int]
    said: list[dict[str, Any]]
    listeners: set[tuple[str, int]]


@contextmanager
def servers(*wanted: tuple[str, int, str]) -> Iterator[Servers]:
    """Run servers in a process that ends with the block, or after 60 s.

    Args:
        wanted: host, port (0: a free one) and mode of each: guarded, unguarded, or interrupted, as
            by Ctrl-C, while it binds.
    """
    each = [(host, port or free_port(), mode) for host, port, mode in wanted]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVERS, json.dumps(each)],
        cwd=ROOT,
        env=job_environment({"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    deadline = threading.Timer(60, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the servers ended, or were ended after 60 s: {process.wait()}"
        yield Servers([port for _, port, _ in each], json.loads(line), listeners(process.pid))
    finally:
        deadline.cancel()
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def listeners(pid: int) -> set[tuple[str, int]]:
    """Address, in hexadecimal, and port of all sockets on which a process listens."""
    own, found = set(), set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            for fields in map(str.split, file.read().splitlines()[1:]):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    address, _, port = fields[1].partition(":")
                    found.add((address, int(port, 16)))
    return found


def in_hexadecimal(address: str) -> set[str]:
    """An IPv4 address as the kernel writes it, for an IPv4 socket and for an IPv6 one."""
    word, mapped = (
        f"{int.from_bytes(packed, sys.byteorder):08X}"
        for packed in (socket.inet_aton(address), b"\0\0\xff\xff")
    )
    return {word, "0" * 16 + mapped + word}


def refuses(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.fixture(scope="module")
def guarded() -> Iterator[Servers]:
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        servers(
            ("127.0.0.1", 0, "interrupted"),
            ("127.0.0.1", busy.getsockname()[1], "guarded"),
            ("192.0.2.1", 0, "guarded"),  # for documentation: nobody has it
            ("127.0.0.1", 0, "guarded"),
            ("127.0.0.2", 0, "guarded"),
        ) as running,
    ):
        yield running


def test_a_server_listens_on_its_own_address_only(guarded: Servers) -> None:
    expected = {"127.0.0.1": guarded.ports[3], "127.0.0.2": guarded.ports[4]}
    assert {port: address for address, port in guarded.listeners}.keys() == set(expected.values())
    assert len(guarded.listeners) == len(expected)
    for address, port in guarded.listeners:
        (own,) = (name for name, number in expected.items() if number == port)
        assert address in in_hexadecimal(own)
    for own, port in expected.items():
        for address in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            assert refuses(address, port) == (address != own)


def test_it_serves(guarded: Servers) -> None:
    assert guarded.said[3:] == [SERVES, SERVES]


def test_an_interrupted_bind_leaves_nothing_that_listens(guarded: Servers) -> None:
    # The callback's caller may take the exception for a success and go on to listen; without an
    # address, that would be at all addresses. (The sockets are compared above.)
    assert guarded.said[0] == {
        "error": "KeyboardInterrupt: in bind",
        "check": None,
        "answer": None,
    }


def test_an_address_that_cannot_be_had_is_said(guarded: Servers) -> None:
    for number, host, reason in (
        (1, "127.0.0.1", "Address already in use"),
        (2, "192.0.2.1", "Cannot assign requested address"),
    ):
        port, said = guarded.ports[number], guarded.said[number]
        assert f"ConfigError: parameter servers: cannot listen on {host}:{port}" in said["error"]
        assert f"received: {reason}" in said["error"]


def test_without_the_guard_it_listens_on_all_and_the_check_fails() -> None:
    with servers(("127.0.0.1", 0, "unguarded")) as running:
        (said,) = running.said
        assert said["answer"] == 42
        assert f"does not listen on 127.0.0.1:{running.ports[0]} alone" in said["check"]
        assert {(address.strip("0"), port) for address, port in running.listeners} == {
            ("", running.ports[0])
        }
        assert not refuses("127.0.0.2", running.ports[0])


@pytest.mark.parametrize(
    ("host", "bound", "received"),
    [
        ("127.0.0.1", ["127.0.0.1"], None),
        ("localhost", ["127.0.0.1"], None),
        ("127.0.0.1", ["0.0.0.0"], "0.0.0.0:{port}"),
        ("127.0.0.1", ["127.0.0.2"], "127.0.0.2:{port}"),
        ("127.0.0.1", ["127.0.0.1", "127.0.0.2"], "127.0.0.1:{port}, 127.0.0.2:{port}"),
        ("127.0.0.1", [], "nothing listens there"),
    ],
)
def test_the_check_reads_what_the_kernel_says(
    host: str, bound: Sequence[str], received: str | None
) -> None:
    port = free_port()
    sockets = [socket.create_server((address, port)) for address in bound]
    try:
        if received is None:
            check_listening(host, port)
        else:
            with pytest.raises(TrainingError) as raised:
                check_listening(host, port)
            assert raised.value.received == received.format(port=port)
    finally:
        for each in sockets:
            each.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
@pytest.mark.parametrize(
    ("bound", "received"),
    [("::ffff:127.0.0.1", None), ("::", "[::]:{port}"), ("::1", "[::1]:{port}")],
)
def test_the_check_knows_ipv6_sockets(bound: str, received: str | None) -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind((bound, 0))
        except OSError as err:
            pytest.skip(f"no IPv6 here: {err}")
        listener.listen()
        port = listener.getsockname()[1]
        if received is None:
            check_listening("127.0.0.1", port)
        else:
            with pytest.raises(TrainingError) as raised:
                check_listening("127.0.0.1", port)
            assert raised.value.received == received.format(port=port)


def test_sockets_of_other_processes_do_not_count() -> None:
    listens = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", listens], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = threading.Timer(30, process.kill)
        deadline.start()
        try:
            assert process.stdout is not None
            with pytest.raises(TrainingError, match="nothing listens there"):
                check_listening("127.0.0.1", int(process.stdout.readline()))
        finally:
            deadline.cancel()
            process.kill()


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("0.0.0.0", "stands for all addresses"),
        ("[::]", "stands for all addresses"),
        ("::ffff:0.0.0.0", "stands for all addresses"),
        ("", "has no address"),
        ("no-such-host.invalid", "has no address"),
        ("a" * 70, "has no address"),  # too long for a name
    ],
)
def test_hosts_that_are_no_address(host: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve(host)


@pytest.mark.parametrize(
    ("host", "address"),
    [("localhost", "127.0.0.1"), ("[::1]", "::1"), ("::ffff:10.0.0.1", "10.0.0.1")],
)
def test_hosts_and_their_addresses(host: str, address: str) -> None:
    assert str(resolve(host)) == address


def test_the_firewall_notice_names_what_others_can_reach() -> None:
    assert firewall_notice(["127.0.0.1:1", "localhost:2", "127.8.8.8:3", "[::1]:4"]) is None
    assert firewall_notice([]) is None
    assert firewall_notice(["10.0.0.1:4000", "127.0.0.1:1", "no-such-host.invalid:4001"]) == (
        "TensorFlow servers take any graph from anybody who can connect: let only the cluster's"
        " hosts reach 10.0.0.1:4000, no-such-host.invalid:4001"
    )


def test_read_only_slots_are_written_and_protected_again() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    cell = ctypes.c_size_t.from_buffer(page, 64)
    slot = ctypes.addressof(cell)
    cell.value = 1
    function = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    assert elf._read_only({slot}) == set()
    elf._protect(slot - 64, mmap.PROT_READ)
    with elf.replaced({"bind": [slot]}, {"bind": function}):
        assert cell.value == ctypes.cast(function, ctypes.c_void_p).value
        assert elf._read_only({slot}) == {slot}
    assert cell.value == 1
    assert elf._read_only({slot}) == {slot}
    elf._protect(slot - 64, mmap.PROT_READ | mmap.PROT_WRITE)
    del cell
    page.close()
