"""A real sum over ranks and a real round trip to a parameter server, as `hvps doctor` does them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hvps.backends.trial import MARK
from hvps.doctor_rows import OK, Row
from hvps.errors import ConfigError
from hvps.hosts import Host
from hvps.mpirun import mpirun_command
from hvps.processes import kill_all_of
from hvps.remote import guarded
from hvps.site import Site
from hvps.yaml_text import write_flow

_SMALL, _LARGE = 4096, 16_000_000  # bytes
_TRIAL_S = 90.0


@dataclass
class _Ended:
    code: int | None  # None: it was ended
    output: str

    @property
    def result(self) -> dict[str, Any] | None:
        for line in self.output.splitlines():
            _, mark, text = line.partition(MARK)
            if mark:
                with suppress(ValueError):
                    found: dict[str, Any] = json.loads(text)
                    return found
        return None

    @property
    def why(self) -> str:
        """The first line that looks like a reason."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip(" -=*")]
        errors = [line for line in lines if "error" in line.lower()]
        said = (errors or lines or ["nothing was said"])[0][:200]
        return f"no end within {_TRIAL_S:g} s: {said}" if self.code is None else said


def try_allreduce(site: Site, ranks: int) -> Row:
    """Sum over ranks on the hosts of `site`."""
    name = f"allreduce, {ranks} ranks"
    program = [sys.executable, "-m", "hvps.backends.trial", f"{_SMALL},{_LARGE}"]
    try:
        ended = _run([mpirun_command(ranks, program, site if len(site.hosts) > 1 else None)])
    except ConfigError as err:
        return Row("bad", "", name, err.what, err.do or "")
    return _row(name, ended, "`hvps launch --gloo` if MPI alone is broken")


def try_ps(site: Site, ports: dict[str, list[int]]) -> Row:
    """Read and write a variable on the first host, from the last one."""
    first, last = site.names[0], site.names[-1]
    addresses = [f"{_address(site, first)}:{ports[first].pop()}"]
    addresses.append(f"{_address(site, last)}:{ports[last].pop()}")
    cluster = write_flow({"ps": addresses[:1], "worker": addresses[1:]})
    program = [sys.executable, "-m", "hvps.backends.ps.trial", f"{_SMALL},{_LARGE}"]
    ended = _run(
        [
            guarded(last, [*program, "worker", "0", cluster]),
            guarded(first, [*program, "ps", "0", cluster]),
        ]
    )
    name = "parameter server" + (f", {last} to {first}" if last != first else "")
    return _row(name, ended, "open the ports between the hosts, or choose another --network")


def _address(site: Site, host: str) -> str:
    return site.network.addresses[host] if len(site.hosts) > 1 else "127.0.0.1"


def _row(name: str, ended: _Ended, do: str) -> Row:
    result = ended.result
    if ended.code != 0 or result is None:
        return Row("bad", "", name, ended.why, do)
    small, large = (result["seconds"][str(size)] for size in (_SMALL, _LARGE))
    found = f"4 KB in {small * 1e3:.2f} ms, 16 MB in {large * 1e3:.0f} ms"
    return Row(OK, "", name, f"{found} ({_LARGE / large / 1e6:,.0f} MB/s), {result['engine']}")


def _run(commands: Sequence[Sequence[str]]) -> _Ended:
    """Start all; when the first has ended, or the time is over, the others are ended."""
    with tempfile.TemporaryFile() as output:
        processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # kept open: it is what a guard lives by
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            )
            for command in commands
        ]
        code: int | None = None
        try:
            code = processes[0].wait(_TRIAL_S)
        except subprocess.TimeoutExpired:
            processes[0].send_signal(signal.SIGTERM)  # mpirun ends its ranks on all hosts
            with suppress(subprocess.TimeoutExpired):
                processes[0].wait(5)
        finally:
            for process in processes:
                _end(process)
        output.seek(0)
        return _Ended(code, output.read().decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """A guard ends what it has started when its input ends."""
    with suppress(OSError, ValueError):
        assert process.stdin is not None
        process.stdin.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        kill_all_of(process.pid)
        process.wait()


def slots(hosts: Sequence[str], ranks: int) -> list[Host]:
    """`ranks` on the hosts, as evenly as can be."""
    return [
        Host(name, ranks * (i + 1) // len(hosts) - ranks * i // len(hosts))
        for i, name in enumerate(hosts)
    ]
