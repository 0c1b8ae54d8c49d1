"""What runs on a host to find out whether a job can run there.

It is sent as text to a Python that may lack everything else, so that it needs the standard library
only, and nothing of hvps. It prints one line of JSON for each question, and ends with its input:

    facts                     → versions, addresses, a port that it listens on
    {"connect": [...]}        → which of the others it reaches, by which of their addresses
    {"resolve": [...]}        → the names that mean nothing here
    {"ports": n}              → free ports
    {"measure": [...]}        → latency and bandwidth of a connection to another
    {"describe": true}        → what a diagnosis shows beside: libraries as loaded, MPI, memory
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

PACKAGES = ("tensorflow", "keras", "horovod", "mpi4py", "numpy")
CONNECT_S = 4.0
MEASURE_S = 0.5
LOAD_S = 60.0
_LAST = 255  # the last byte of what is sent to measure
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
        elif "measure" in question:
            _say(measure(*question["measure"]))
        elif "describe" in question:
            _say(describe())
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
        threading.Thread(target=_greet, args=(connection, token), daemon=True).start()


def _greet(connection: socket.socket, token: str) -> None:
    """Then send back each small message, and count what follows a large one's announcement."""
    with connection, suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{token}\n".encode())
        buffer = memoryview(bytearray(1 << 18))
        while (count := connection.recv_into(buffer)) == 1:
            connection.sendall(buffer[:1])
        while count and buffer[count - 1] != _LAST:
            count = connection.recv_into(buffer)
        connection.sendall(b"!")


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
                said = file.readline().strip()
        return None if said == token else "another host answers there"
    except TimeoutError:
        return f"no answer in {CONNECT_S:g} s"
    except OSError as err:
        return os.strerror(err.errno) if err.errno else str(err)


def measure(address: str, port: int) -> dict[str, float]:
    """Of a TCP connection: median round trip of a byte in seconds, and bytes per second one way."""
    with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
        connection.settimeout(2 * CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not connection.recv(4096).endswith(b"\n"):
            pass
        trips = sorted(_seconds(lambda: _ask(connection, b"?")) for _ in range(51))
        block, sent = bytes(1 << 18), 0
        began = time.perf_counter()
        while time.perf_counter() - began < MEASURE_S:
            connection.sendall(block)
            sent += len(block)
        _ask(connection, bytes([_LAST]))  # all has arrived
        return {"latency": trips[25], "bandwidth": sent / (time.perf_counter() - began)}


def _ask(connection: socket.socket, message: bytes) -> None:
    connection.sendall(message)
    if not connection.recv(1):
        raise ConnectionError("the connection was closed")


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def describe() -> dict[str, object]:
    """What is not needed to decide whether a job can run, and takes seconds to find out."""
    mpirun = _find_program("mpirun")
    memory = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        ports = [int(number) for number in file.read().split()]
    return {
        "mpirun": mpirun,
        "mpi": _mpi_version(mpirun) if mpirun else None,
        "horovodrun": _find_program("horovodrun"),
        "shm": None if memory is None else [memory.total, memory.free],
        "ports": ports,
        "loaded": _loaded(),
    }


def _find_program(name: str) -> str | None:
    """That of this environment, or the first on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    return beside if os.path.exists(beside) else shutil.which(name)


def _mpi_version(mpirun: str) -> str | None:
    """As it says itself in its first line; MPICH's launcher says it in a later one."""
    try:
        done = subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if lines and lines[0].startswith("HYDRA"):
        versions = [line.split()[-1] for line in lines if line.startswith("Version:")]
        return " ".join(["MPICH", *versions[:1]])
    return lines[0] if lines else None


# In a process of its own: a broken library may crash it.
_LOAD = """
import json, os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
found = {}
try:
    import tensorflow as tf
    found["tensorflow"] = tf.__version__
    found["gpus"] = [
        tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)
        for gpu in tf.config.list_physical_devices("GPU")
    ]
except Exception as err:
    found["tensorflow_error"] = f"{type(err).__name__}: {err}"
try:
    import horovod.tensorflow as hvd
    built = {"MPI": hvd.mpi_built, "Gloo": hvd.gloo_built, "NCCL": hvd.nccl_built}
    found["horovod"] = [name for name, is_built in built.items() if is_built()]
except ImportError as err:
    found["horovod_error"] = str(err)
except Exception as err:
    found["horovod_error"] = f"{type(err).__name__}: {err}"
print(json.dumps(found))
"""


def _loaded() -> dict[str, object]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD],
            capture_output=True,
            text=True,
            timeout=LOAD_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"tensorflow_error": f"its import takes more than {LOAD_S:g} s"}
    try:
        loaded: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return {"tensorflow_error": f"exit code {done.returncode}: {last}"}
    return loaded


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
