"""Make a TensorFlow server listen on its own address only.

A `tf.distribute.Server` binds 0.0.0.0, whatever the cluster says, asks nobody who they are and
runs every graph that it is sent. TensorFlow has no setting for it, so the `bind` and `listen` that
its libraries call are replaced while the server is made: in the slots through which a library
calls other libraries, as a debugger or a preloaded library would, but without a compiler and
without starting the process anew.

That is safe here for two reasons. TensorFlow binds in the thread that makes the server, so that
Python code can run in place of `bind` although that thread holds Python's lock. And nothing rests
on it alone: a socket with another address is not allowed to listen, and what the kernel says of
the socket afterwards decides.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from hvps.backends.congestion import set_congestion_control
from hvps.backends.ps.elf import SlotError, import_slots, replaced
from hvps.errors import ConfigError, HvpsError, TrainingError

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_RULE = "a server listens on its own address only: it takes any graph from anybody who can connect"


@contextmanager
def listening_on(host: str, port: int, congestion: str | None = None) -> Iterator[None]:
    """Inside, a TensorFlow server that is made for `port` binds the address of `host` only.

    Nothing else of TensorFlow can begin to listen meanwhile, at whatever address. One server at a
    time, and TensorFlow must have been imported.

    Args:
        congestion: TCP congestion control of the connections that the server accepts, through
            which it sends tensors; None for the system's.

    Raises:
        ConfigError: the host has no address here, or one that stands for all; the address, the
            port or the congestion control cannot be had.
        TrainingError: the server would listen elsewhere.
    """
    address = resolve(host)
    guard = _Guard(address, port, congestion)
    try:
        slots = import_slots(guard.functions)
        with guard.reporting(), replaced(slots, guard.functions):
            yield
    except SlotError as err:
        raise TrainingError(
            "parameter servers: cannot keep a TensorFlow server to its own address",
            rule=_RULE,
            received=err,
            do="train on Linux (x86_64 or aarch64) with the TensorFlow that hvps installs, or with"
            " backend.kind=allreduce",
        ) from err
    except Exception as err:
        if guard.refusal is None:
            raise
        raise guard.refusal from err
    _check(address, port)


def check_listening(host: str, port: int) -> None:
    """Check that this process listens for `port` on the address of `host`, and on no other.

    Raises:
        ConfigError: the host has no address here, or one that stands for all.
        TrainingError: it listens elsewhere, or not at all.
    """
    _check(resolve(host), port)


def firewall_notice(addresses: Iterable[str]) -> str | None:
    """Say what a firewall should protect.

    Args:
        addresses: the cluster's servers, as host:port.

    Returns:
        One line, or None if nothing but this host can reach them.
    """
    open_to_others = [address for address in addresses if not _is_loopback(address)]
    if not open_to_others:
        return None
    return (
        "TensorFlow servers take any graph from anybody who can connect: let only the cluster's"
        f" hosts reach {', '.join(open_to_others)}"
    )


def resolve(host: str) -> _Address:
    """The address of a host, IPv4 if it has one.

    Raises:
        ConfigError: it has none, or one that stands for all.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as err:
        raise ConfigError(
            f"parameter servers: {host!r} has no address",
            rule="the cluster's hosts are addresses, or names that every host knows",
            received=err,
            do="correct the name, give the address, or add the name to /etc/hosts",
        ) from err
    texts = [str(entry[4][0]) for entry in sorted(found, key=lambda e: e[0] != socket.AF_INET)]
    address = _unmapped(ipaddress.ip_address(texts[0]))
    if address.is_unspecified:
        raise ConfigError(
            f"parameter servers: {host!r} stands for all addresses",
            rule=_RULE,
            received=address,
            do="give the address by which the other hosts reach this one; 127.0.0.1 if there are"
            " none",
        )
    return address


def _is_loopback(address: str) -> bool:
    try:
        return resolve(address.rpartition(":")[0]).is_loopback
    except ConfigError:
        return False


def _unmapped(address: _Address) -> _Address:
    """An IPv4 address that an IPv6 socket shows as ::ffff:a.b.c.d is that IPv4 address."""
    return getattr(address, "ipv4_mapped", None) or address


def _show(address: _Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


# What the kernel says.


def _check(address: _Address, port: int) -> None:
    received: object
    try:
        listeners = _own_listeners(port)
    except OSError as err:  # no /proc
        received = err
    else:
        if listeners == {address}:
            return
        received = ", ".join(sorted(_show(a, port) for a in listeners)) or "nothing listens there"
    raise _wrong_listener(address, port, received)


def _wrong_listener(address: _Address, port: int, received: object) -> TrainingError:
    return TrainingError(
        f"parameter servers: this process does not listen on {_show(address, port)} alone",
        rule=_RULE,
        received=received,
        do="report this with the version of TensorFlow; nothing was trained",
    )


def _own_listeners(port: int) -> set[_Address]:
    """The addresses on which this process, and not another one, listens for a port."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # closed since: the directory's own descriptor, for one
        if target.startswith("socket:["):
            own.add(target[len("socket:[") : -1])
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(table) as file:
                lines = file.read().splitlines()[1:]
        except FileNotFoundError:
            continue  # a kernel without IPv6
        for line in lines:
            _, local, _, state, *_, inode = line.split()[:10]
            words, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port and inode in own:
                found.add(_address_of_words(words))
    return found


def _address_of_words(words: str) -> _Address:
    """The kernel writes addresses as 32-bit numbers in the byte order of the machine."""
    packed = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    return _unmapped(ipaddress.ip_address(packed))


# What stands in for bind() and listen().

_PROTOTYPES = {
    "bind": (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32),
    "listen": (ctypes.c_int, ctypes.c_int, ctypes.c_int),
}


class _Guard:
    """`bind` and `listen` for one address and port.

    Both run inside of TensorFlow. An exception, as by Ctrl-C, gets no further than to their caller
    in C, which sees an arbitrary value then: success, perhaps. Therefore `listen` relies on nothing
    that `bind` has done, and if it fails itself, there is nothing that listens.

    Attributes:
        refusal: why the server cannot listen, as far as that is known here.
        functions: what to put in the place of the C functions, by name.
    """

    def __init__(self, address: _Address, port: int, congestion: str | None) -> None:
        self._address, self._port, self._congestion = address, port, congestion
        self.refusal: HvpsError | None = None
        # PyDLL: Python's lock stays with TensorFlow's thread, as it would without the guard.
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self.functions = {
            name: ctypes.CFUNCTYPE(*_PROTOTYPES[name], use_errno=True)(function)
            for name, function in (("bind", self._bind), ("listen", self._listen))
        }

    def _bind(self, fd: int, pointer: int, length: int) -> int:
        name = ctypes.string_at(pointer, length)
        asked = _address_of_name(name)
        concerned = asked is not None and asked[1] == self._port
        if concerned and asked is not None and asked[0].is_unspecified:
            name = self._own_name(int.from_bytes(name[:2], sys.byteorder))
        code = self._libc.bind(fd, name, len(name))
        if concerned:
            self.refusal = self._unavailable(ctypes.get_errno()) if code else None
        return code

    def _listen(self, fd: int, backlog: int) -> int:
        buffer, length = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
        if self._libc.getsockname(fd, buffer, ctypes.byref(length)):
            return -1
        bound = _address_of_name(buffer.raw)
        if bound is not None and bound != (self._address, self._port):
            self.refusal = _wrong_listener(self._address, self._port, f"bound {_show(*bound)}")
            ctypes.set_errno(errno.EADDRNOTAVAIL)
            return -1
        if bound is not None and self._congestion is not None:
            try:
                set_congestion_control(fd, self._congestion)
            except ConfigError as err:
                self.refusal = err
                ctypes.set_errno(errno.EINVAL)
                return -1
        return self._libc.listen(fd, backlog)

    def _unavailable(self, number: int) -> ConfigError:
        return ConfigError(
            f"parameter servers: cannot listen on {_show(self._address, self._port)}",
            rule="a server listens on its own address, which must be one of this host's",
            received=os.strerror(number),
            do="end what uses the port or choose another one, if it is in use; else give the"
            " address by which the other hosts reach this one",
        )

    def _own_name(self, family: int) -> bytes:
        """The server's address as a C `sockaddr` for a socket of this family.

        An IPv6 address for an IPv4 socket comes out as IPv6, which the kernel refuses.
        """
        packed = self._address.packed
        if family == socket.AF_INET and len(packed) == 4:
            return struct.pack("=H2s4s8x", family, struct.pack("!H", self._port), packed)
        if len(packed) == 4:
            packed = bytes(10) + b"\xff\xff" + packed
        return struct.pack("=H2s4x16s4x", socket.AF_INET6, struct.pack("!H", self._port), packed)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Raise afterwards what was raised in the functions: Ctrl-C, say."""
        raised: list[BaseException] = []
        before = sys.unraisablehook

        def hook(unraisable: sys.UnraisableHookArgs, /) -> None:
            if unraisable.object in (self._bind, self._listen) and unraisable.exc_value:
                raised.append(unraisable.exc_value)
            else:
                before(unraisable)

        sys.unraisablehook = hook
        try:
            yield
        finally:
            sys.unraisablehook = before
            if raised:
                raise raised[0]


def _address_of_name(name: bytes) -> tuple[_Address, int] | None:
    """Address and port of a C `sockaddr`; None if it is of another kind."""
    family = int.from_bytes(name[:2], sys.byteorder)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    packed = name[4:8] if family == socket.AF_INET else name[8:24]
    return _unmapped(ipaddress.ip_address(packed)), int.from_bytes(name[2:4], "big")
