"""hvps launch: all tasks of a parameter-server cluster on this machine, and how they end.

    choose the addresses → check once → start the tasks → pass on their output → exit code

One thread does it all: a process that was started by a thread would end with it, because of the
signal that each task asks for in case the launcher dies. TensorFlow is not needed here.
"""

from __future__ import annotations

import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, TextIO

from hvps.cli_args import split_args
from hvps.cluster import ALONE, Cluster, Tasks
from hvps.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_PREEMPTED, ConfigError
from hvps.overrides import LoadedConfig, load_config
from hvps.ports import check_own_address, free_ports, is_own_host, split_address
from hvps.preflight import preflight
from hvps.task_cluster import TF_CONFIG, place_task, read_jobs
from hvps.yaml_text import write_flow

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
# Workers that were asked to stop agree on it, save and end with one of these.
_STOPPED = (EXIT_INTERRUPTED, EXIT_PREEMPTED)
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_LINE = 1 << 16


def launch(argv: Sequence[str]) -> int:
    """Train on a cluster of this machine's processes.

    Returns:
        The exit code of the first task that failed, else 0.

    Raises:
        ConfigError: nothing was started.
    """
    arguments = split_args(
        argv, "hvps launch", "Train with parameter servers: start all of them on this machine."
    )
    loaded = load_config(arguments.config, arguments.overrides)
    tasks = choose_addresses(loaded)
    addresses = {"ps": list(tasks.ps), "worker": list(tasks.worker)}
    # null first: the file may spell the jobs in another way, and mappings are merged.
    given = ["backend.cluster=null", f"backend.cluster={write_flow(addresses)}"]
    overrides = [*arguments.overrides, *given]
    _check(load_config(arguments.config, overrides), tasks)
    text = f"hvps launch: {len(tasks.ps)} ps and {len(tasks.worker)} worker tasks on this machine"
    if loaded.config.backend.cluster and read_jobs(loaded.config.backend.cluster).tasks != tasks:
        text += "; backend.cluster names others"
    print(text, flush=True)
    return Supervisor(task_commands(arguments.config, overrides, tasks)).run()


def choose_addresses(loaded: LoadedConfig) -> Tasks:
    """The configuration's cluster if all of it is on this machine, else free ports.

    Raises:
        ConfigError: the backend has no parameter servers.
    """
    backend = loaded.config.backend
    if backend.kind != "ps":
        command = "horovodrun -np 2 python" if backend.kind == "allreduce" else "python"
        raise ConfigError(
            "backend.kind: hvps launch starts parameter-server clusters",
            rule="backend.kind=ps",
            received=loaded.received("backend.kind", backend.kind),
            do=f"use backend.kind=ps, or start it with {command} -m hvps.train",
        )
    if backend.cluster is not None:
        tasks = read_jobs(backend.cluster).tasks
        hosts = {split_address(address)[0] for address in (*tasks.ps, *tasks.worker)}
        if all(is_own_host(host) for host in hosts):
            return tasks
    ports = free_ports(backend.num_ps + backend.num_workers)
    addresses = tuple(f"127.0.0.1:{port}" for port in ports)
    return Tasks(addresses[: backend.num_ps], addresses[backend.num_ps :])


def _check(loaded: LoadedConfig, tasks: Tasks) -> None:
    """Find here, and once, what each task would find."""
    chief = place_task(loaded, Cluster(0, 1, 0, 1, ALONE), "worker", 0, env={})
    preflight(loaded, chief)
    for index, address in enumerate(tasks.ps):
        check_own_address(address, f"ps {index}")
    for index, address in enumerate(tasks.worker):
        check_own_address(address, f"worker {index}")


def task_commands(
    config: str | None, overrides: Sequence[str], tasks: Tasks
) -> dict[str, list[str]]:
    """The command of each task, by its name; parameter servers first."""
    shared = [sys.executable, "-m", "hvps.train", *([config] if config else []), *overrides]
    return {
        f"{role} {index}": [*shared, "--role", role, "--index", str(index)]
        for role, addresses in (("ps", tasks.ps), ("worker", tasks.worker))
        for index in range(len(addresses))
    }


class Supervisor:
    """Runs the tasks of a cluster until all have ended.

    Args:
        commands: by name; those of parameter servers begin with "ps ", and are expected to end by
            themselves once the others have.
        grace: seconds in which the others may end by themselves after one has failed, or
            parameter servers after all workers are done.
        kill_after: seconds from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        *,
        grace: float = 15.0,
        kill_after: float = 15.0,
    ) -> None:
        self._commands = commands
        self._grace = grace
        self._kill_after = kill_after
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._outputs: dict[str, list[tuple[IO[bytes], PrefixedLines]]] = {}
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._stopping = False  # a signal was passed on
        self._failed = False
        self._code = 0  # of the first task that failed, or else of one that was stopped
        self._deadline: tuple[float, Callable[[], None]] | None = None

    def run(self) -> int:
        """Start them, pass on what they print and the signals that come, and wait for all.

        Returns:
            The exit code of the first failure; 128 + the signal's number if one killed the task.
        """
        with self._handling_signals():
            try:
                for name, command in self._commands.items():
                    self._start(name, command)
                while self._running:
                    self._pass_on_output(_POLL_S)
                    self._pass_on_signals()
                    self._note_ended()
                    self._act_in_time()
            finally:
                self._kill()
                self._selector.close()
        return self._code

    # --- tasks ---

    def _start(self, name: str, command: Sequence[str]) -> None:
        env = {key: value for key, value in os.environ.items() if key != TF_CONFIG}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**env, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C comes to the launcher alone
            preexec_fn=_end_with(os.getpid()),
        )
        self._running[name] = process
        self._outputs[name] = []
        number = list(self._commands).index(name)
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._outputs[name].append((pipe, PrefixedLines(name, number, target)))
            self._selector.register(pipe, selectors.EVENT_READ, self._outputs[name][-1][1])

    def _note_ended(self) -> None:
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[name]
            _signal_group(process, signal.SIGKILL)  # what it may have left behind
            self._drain(name)
            self._judge(name, code)
        if self._deadline is None and self._only_ps_left():
            self._deadline = (time.monotonic() + self._grace, self._ps_are_late)

    def _judge(self, name: str, code: int) -> None:
        if code == 0 or self._failed:
            return
        exit_code = 128 - code if code < 0 else code
        if code in _STOPPED or (self._stopping and code in (-signal.SIGTERM, -signal.SIGINT)):
            self._code = self._code or exit_code
            return
        self._failed, self._code = True, exit_code
        _say(f"{name} {_how(code)}")
        self._deadline = (time.monotonic() + self._grace, self._terminate)

    def _only_ps_left(self) -> bool:
        return bool(self._running) and all(name.startswith("ps ") for name in self._running)

    def _ps_are_late(self) -> None:
        names = " and ".join(self._running)
        verb = "are" if len(self._running) > 1 else "is"
        _say(f"{names} {verb} still running {self._grace:g} s after all workers have ended")
        self._failed, self._code = True, self._code or EXIT_FAILURE
        self._terminate()

    def _terminate(self) -> None:
        for process in self._running.values():
            _signal_group(process, signal.SIGTERM)
        self._deadline = (time.monotonic() + self._kill_after, self._kill)

    def _kill(self) -> None:
        for process in self._running.values():
            _signal_group(process, signal.SIGKILL)
        for process in self._running.values():
            process.wait()

    def _act_in_time(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline[0]:
            self._deadline[1]()

    # --- output ---

    def _pass_on_output(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            self._read(key.fileobj, key.data)  # type: ignore[arg-type]

    def _read(self, pipe: IO[bytes], lines: PrefixedLines) -> bool:
        """Pass on what there is; False if there is nothing now, or will be no more."""
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return False
        if not lines.feed(data) and not self._signals and not self._stopping:
            self._signals.append(signal.SIGTERM)  # nobody reads on: as if it had been asked
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
        return bool(data)

    def _drain(self, name: str) -> None:
        """What a task said last comes before what is said about its end."""
        for pipe, lines in self._outputs.pop(name):
            for _ in range(64):  # not forever: something else may hold the pipe
                if pipe.closed or not self._read(pipe, lines):
                    break
            if not pipe.closed:
                self._selector.unregister(pipe)
                pipe.close()
            lines.end()

    # --- signals ---

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                before[number] = signal.signal(number, self._note_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_on_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if self._stopping:
                self._code = self._code or 128 + number
                self._failed = True
                self._kill()
                return
            self._stopping = True
            for process in self._running.values():
                process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)


class PrefixedLines:
    """Writes what one process prints, line by line and at once, each line with its name.

    Progress bars return to the beginning of their line; here that ends it.

    Args:
        name: of the process, as in `[ps 0] `.
        number: of the process, which chooses the colour on a terminal.
    """

    def __init__(self, name: str, number: int, target: TextIO) -> None:
        prefix = f"[{name}] "
        if target.isatty() and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{prefix}\x1b[0m"
        self._prefix = prefix.encode()
        self._target = target
        self._rest = b""
        self._after_return = False  # the line end \r\n may come in two parts
        self._works = True

    def feed(self, data: bytes) -> bool:
        """Take what the process has written; False if it cannot be passed on any more."""
        if self._after_return and data:
            data = data.removeprefix(b"\n")
            self._after_return = False
        lines = _LINE_END.split(self._rest + data)
        self._after_return = self._after_return or data.endswith(b"\r")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        self._write(lines)
        return self._works

    def end(self) -> None:
        """Write the last line, if it has no end."""
        self._write([self._rest] if self._rest else [])
        self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            self._target.buffer.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._target.flush()
        except OSError:  # the reader has gone, as in `hvps launch ... | head`
            self._works = False
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._target.fileno())


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads on
        print(f"hvps: error: {text}", file=sys.stderr, flush=True)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(process.pid, number)


def _end_with(launcher: int) -> Callable[[], None]:
    """What a new process does first: have itself killed when the launcher dies, however it does."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it has died already
                os._exit(EXIT_FAILURE)

    return prepare
