"""What runs on a host to find out whether a job can run there.

It is sent as text to a Python that may lack everything else, so that it needs the standard library
only, and nothing of hvps. It prints one line of JSON for each question, and ends with its input:

    facts                     → versions, addresses, a port that it listens on
    {"connect": [...]}        → which of the others it reaches, by which of their addresses
    {"resolve": [...]}        → the names that mean nothing here
    {"ports": n}              → free ports
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

PACKAGES = ("tensorflow", "keras", "horovod", "mpi4py", "numpy")
CONNECT_S = 4.0
_GET_ADDRESS, _GET_NETMASK, _GET_FLAGS = 0x8915, 0x891B, 0x8913  # ioctl(2) of Linux: SIOCGIF...
_UP = 0x41  # and running


def main() -> None:
    folder, token = json.loads(sys.stdin.readline())
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen(64)
    threading.Thread(target=_answer, args=(listener, token), daemon=True).start()
    _say(facts(folder, listener.getsockname()[1]))
    for line in sys.stdin:
        question = json.loads(line)
        if "connect" in question:
            _say(connect_all(question["connect"]))
        elif "resolve" in question:
            _say([name for name in question["resolve"] if not resolves(name)])
        else:
            _say(free_ports(question["ports"]))


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def facts(folder: str, port: int) -> dict[str, object]:
    """All that must be alike on the hosts, and where they can be reached."""
    there = True
    try:
        os.chdir(folder)
    except OSError:
        there = False
    return {
        "folder": there,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hvps": _digest(),
        "hostname": socket.gethostname(),
        "interfaces": interfaces(),
        "cores": len(os.sched_getaffinity(0)),
        "port": port,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        for name in importlib.metadata.packages_distributions().get(package, ()):
            return importlib.metadata.version(name)  # tensorflow-cpu, say
        return None


def _digest() -> str | None:
    """Version and fingerprint of the program that `python -m hvps.train` would run."""
    spec = importlib.util.find_spec("hvps")
    if spec is None or not spec.submodule_search_locations:
        return None
    base = os.path.realpath(spec.submodule_search_locations[0])
    digest = hashlib.sha256()
    for path, folders, files in os.walk(base):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                digest.update(os.path.relpath(os.path.join(path, name), base).encode())
                with open(os.path.join(path, name), "rb") as file:
                    digest.update(file.read())
    try:
        version = importlib.metadata.version("hvps")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return f"{version} ({digest.hexdigest()[:8]})"


def interfaces() -> list[tuple[str, str, int]]:
    """Name, IPv4 address and prefix length of each interface that is up."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = fcntl.ioctl(sock, _GET_FLAGS, request)[16:18]
                if struct.unpack("H", flags)[0] & _UP != _UP:
                    continue
                address = socket.inet_ntoa(fcntl.ioctl(sock, _GET_ADDRESS, request)[20:24])
                mask = fcntl.ioctl(sock, _GET_NETMASK, request)[20:24]
            except OSError:  # it has no address
                continue
            found.append((name, address, bin(int.from_bytes(mask, "big")).count("1")))
    return found


def _answer(listener: socket.socket, token: str) -> None:
    """Say who this is to each that connects: another host may have the same address."""
    while True:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(token.encode())


def connect_all(peers: list[tuple[str, int, str]]) -> list[str | None]:
    """`peers`: [address, port, token] each. Returns for each why not, or None."""
    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        return list(pool.map(_connect, peers))


def _connect(peer: tuple[str, int, str]) -> str | None:
    address, port, token = peer
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            with connection.makefile() as file:
                said = file.read()
        return None if said == token else "another host answers there"
    except TimeoutError:
        return f"no answer in {CONNECT_S:g} s"
    except OSError as err:
        return os.strerror(err.errno) if err.errno else str(err)


def resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    main()
