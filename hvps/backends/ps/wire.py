"""Messages between tasks: JSON objects with their length before them, over TCP."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
_LIMIT = 256 << 20


class ConnectionLost(Exception):  # noqa: N818 (it is no error of the one who meets it)
    """The other side has closed the connection, or said nothing for too long."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        ConnectionLost: the other side is gone.
    """
    data = json.dumps(message).encode()
    try:
        connection.sendall(_LENGTH.pack(len(data)) + data)
    except OSError as err:
        raise ConnectionLost(str(err)) from err


def receive(connection: socket.socket, timeout: float | None) -> dict[str, Any]:
    """The next message; waits `timeout` seconds for it, or without end for None.

    Raises:
        ConnectionLost: the other side is gone, silent for so long, or speaks another language.
    """
    try:
        connection.settimeout(timeout)
        (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
        if length > _LIMIT:
            raise ConnectionLost(f"a message of {length} bytes")
        message = json.loads(_exactly(connection, length))
    except TimeoutError as err:
        raise ConnectionLost(f"silent for {timeout:g} s") from err
    except (OSError, ValueError) as err:
        raise ConnectionLost(str(err)) from err
    if not isinstance(message, dict):
        raise ConnectionLost("not a message")
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    chunks: list[bytes] = []
    while count:
        chunk = connection.recv(min(count, 1 << 20))
        if not chunk:
            raise ConnectionLost("the connection was closed")
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Open a connection for small messages.

    Raises:
        OSError: nobody listens there.
    """
    connection = socket.create_connection((host, port), timeout)
    if connection.getsockname() == connection.getpeername():
        # Nobody listens there, and the kernel has given the connection that very port as its own
        # end. It must be free again at once for the one who is to listen.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        raise ConnectionRefusedError(f"{host}:{port}: connected to itself")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
