"""How fast TCP sends: the congestion control of the connections between tasks.

BBR keeps no more in flight than the rate that it has seen times the shortest round trip. While both
directions of a link are full, acknowledgements wait behind data and round trips take many times
that, and after every pause in the traffic it begins from too low a rate. Weights that go down while
gradients come up are just such traffic: on links of 400 Mbit/s hvps's parameter servers took 1.09
to 1.31 times the least time under BBR, and 1.01 to 1.04 under Reno.
"""

from __future__ import annotations

import socket
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
