"""Which TCP congestion control is asked for, and that the servers' connections have it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvps.backends import congestion
from hvps.errors import ConfigError
from tests.launching import BIN, ROOT, job_environment

# A server whose connections, as the kernel sees them, are printed after a session was served.
SERVER = """
import json, os, socket, sys
import tensorflow as tf
from hvps.backends.ps.listen import listening_on
from hvps.errors import HvpsError
from hvps.ports import free_ports

port, = free_ports(1)
try:
    with listening_on("127.0.0.1", port, sys.argv[1]):
        tf.distribute.Server({"ps": [f"127.0.0.1:{port}"]}, job_name="ps", task_index=0)
except HvpsError as err:
    print(json.dumps(str(err)), flush=True)
    os._exit(0)
config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=30_000)
config.rpc_options.use_rpc_for_inprocess_master = True
found = {}
with tf.Graph().as_default():
    answer = tf.constant(6) * 7
    with tf.compat.v1.Session(f"grpc://127.0.0.1:{port}", config=config) as session:
        session.run(answer)
        for name in os.listdir("/proc/self/fd"):
            try:
                each = socket.socket(fileno=int(name))
            except OSError:
                continue
            try:
                if each.type == socket.SOCK_STREAM and each.getsockname()[1] == port:
                    kind = "accepted" if each.getpeername() else ""
                    used = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                    found[kind] = used.rstrip(b"\\0").decode()
            except OSError:
                pass
            finally:
                each.detach()
print(json.dumps(found), flush=True)
os._exit(0)
"""


def run_server(name: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", SERVER, name],
        cwd=ROOT,
        env=job_environment({"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}),
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(congestion, "_KERNEL", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("own", "allowed", "wanted", "chosen"),
    [
        ("cubic", "reno cubic", "auto", None),
        ("reno", "reno bbr", "auto", None),
        ("bbr", "reno bbr", "auto", "reno"),
        ("bbr", "reno bbr cubic", "auto", "cubic"),
        ("bbr2", "bbr2 reno", "auto", "reno"),
        ("bbr", "bbr", "auto", None),
        ("bbr", "reno bbr", "system", None),
        ("cubic", "reno", "bbr", "bbr"),
        (None, None, "auto", None),
        (None, None, "reno", "reno"),
    ],
)
def test_what_is_chosen(
    kernel: Path, own: str | None, allowed: str | None, wanted: str, chosen: str | None
) -> None:
    if own is not None and allowed is not None:
        (kernel / "tcp_congestion_control").write_text(f"{own}\n")
        (kernel / "tcp_allowed_congestion_control").write_text(f"{allowed}\n")
    assert congestion.choose(wanted) == chosen
    assert congestion.in_use() == (own or "unknown")


def test_a_server_sends_by_it() -> None:
    others = {"reno", "cubic", "bbr"} & set(
        (congestion._KERNEL / "tcp_allowed_congestion_control").read_text().split()
    )
    for name in sorted(others):
        assert run_server(name) == {"accepted": name}


def test_one_that_the_kernel_does_not_have_is_refused() -> None:
    said = run_server("fastest")
    assert isinstance(said, str)
    assert "backend.congestion_control: this host cannot use it" in said
    assert "received: 'fastest' (No such file or directory)" in said


def test_a_socket_stays_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        congestion.set_congestion_control(server.fileno(), "reno")
        with pytest.raises(ConfigError):
            congestion.set_congestion_control(server.fileno(), "fastest")
        with socket.create_connection(server.getsockname(), timeout=5):
            accepted, _ = server.accept()
            with accepted:
                used = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert used.rstrip(b"\0") == b"reno"


def test_only_connections_that_are_new_use_it() -> None:
    def in_use(sock: socket.socket) -> bytes:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as old:
        before = in_use(old)
        other = b"cubic" if before == b"reno" else b"reno"
        with congestion.new_connections_use(other.decode()):
            listener = socket.create_server(("127.0.0.1", 0))
            made = socket.create_connection(listener.getsockname())
            datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        later = socket.create_connection(listener.getsockname())
        accepted = [listener.accept()[0] for _ in range(2)]
        with listener, made, datagrams, later, accepted[0], accepted[1]:
            assert in_use(made) == in_use(listener) == in_use(accepted[1]) == other
            assert in_use(old) == in_use(later) == before
        with congestion.new_connections_use(None):
            made = socket.create_connection(old.getsockname())
        with made:
            assert in_use(made) == before


@pytest.mark.parametrize("engine", ["horovod", "mpi"])
def test_ranks_send_by_it(engine: str) -> None:
    """Those that reach each other by TCP, as on several hosts."""
    command = [str(BIN / "mpirun"), "-np", "2", "--oversubscribe", "--mca", "btl", "self,tcp"]
    command += [sys.executable, "-c", _RANK, engine]
    done = subprocess.run(
        command, env=job_environment(), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["all", "all"]


_RANK = """
import socket, sys
from hvps.backends import congestion
from hvps.backends.collectives import make_collectives
from hvps.backends.watchdog import Watchdog
from hvps.cluster import detect_cluster
from hvps.overrides import load_config

own = congestion.in_use()
other = "cubic" if own == "reno" else "reno"
before = congestion._tcp_sockets()
options = ["backend.kind=allreduce", f"backend.engine={sys.argv[1]}"]
config = load_config(None, [*options, f"backend.congestion_control={other}"]).config
cluster = detect_cluster()
collectives = make_collectives(config, cluster, Watchdog(60, cluster.rank))
found = set()
for inode, fd in congestion._tcp_sockets().items():
    if inode not in before:
        made = socket.socket(fileno=fd)
        found.add(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0"))
        made.detach()
print("all" if found == {other.encode()} else found)
collectives.close()
"""
