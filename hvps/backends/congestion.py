"""How fast TCP sends: the congestion control of the connections between tasks.

BBR keeps no more in flight than the rate that it has seen times the shortest round trip. While both
directions of a link are full, acknowledgements wait behind data and round trips take many times
that, and after every pause in the traffic it begins from too low a rate. Weights that go down while
gradients come up are just such traffic: on links of 400 Mbit/s hvps's parameter servers took 1.09
to 1.31 times the least time under BBR, and 1.01 to 1.04 under Reno.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvps.errors import ConfigError

_KERNEL = Path("/proc/sys/net/ipv4")
_BETTER_THAN_BBR = ("cubic", "reno")


def choose(wanted: str) -> str | None:
    """The congestion control to ask for.

    Args:
        wanted: `system`, `auto`, or a name.

    Returns:
        A name, or None to leave the system's. `auto` leaves it too, unless that is BBR and
        the kernel lets everybody choose Cubic or Reno.
    """
    if wanted == "system":
        return None
    if wanted != "auto":
        return wanted
    if not _read("tcp_congestion_control").startswith("bbr"):
        return None
    allowed = _read("tcp_allowed_congestion_control").split()
    return next((name for name in _BETTER_THAN_BBR if name in allowed), None)


def in_use() -> str:
    """The system's own, as the kernel names it; `unknown` where it does not tell."""
    return _read("tcp_congestion_control") or "unknown"


@contextmanager
def new_connections_use(name: str | None) -> Iterator[None]:
    """TCP sockets that this process makes inside, in whatever library, send by it afterwards.

    Args:
        name: None to leave them as they are.

    Raises:
        ConfigError: see `set_congestion_control`.
    """
    before = _tcp_sockets() if name is not None else {}
    yield
    if name is None:
        return
    for inode, fd in _tcp_sockets().items():
        if inode not in before:
            set_congestion_control(fd, name)


def _tcp_sockets() -> dict[int, int]:
    """This process's TCP sockets, listening ones among them: descriptors by their inodes."""
    found: dict[int, int] = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode) and _is_tcp(fd):
                found[status.st_ino] = fd
    return found


def _is_tcp(fd: int) -> bool:
    borrowed = socket.socket(fileno=fd)
    try:
        return borrowed.proto == socket.IPPROTO_TCP and borrowed.family in (
            socket.AF_INET,
            socket.AF_INET6,
        )
    finally:
        borrowed.detach()


def set_congestion_control(fd: int, name: str) -> None:
    """Set it for a TCP socket. Connections that a listening socket accepts have the same.

    Raises:
        ConfigError: the kernel does not have it, or lets only root choose it.
    """
    # A socket object for a descriptor that belongs to somebody else, and stays open.
    borrowed = socket.socket(fileno=fd)
    try:
        borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as err:
        raise ConfigError(
            "backend.congestion_control: this host cannot use it",
            rule="auto, system, or one that the kernel lets this user choose: "
            + (_read("tcp_allowed_congestion_control") or "it does not say which"),
            received=f"{name!r} ({err.strerror})",
            do="name one of those, or load its module (modprobe tcp_...) on every host",
        ) from err
    finally:
        borrowed.detach()


def _read(name: str) -> str:
    try:
        return (_KERNEL / name).read_text().strip()
    except OSError:
        return ""
