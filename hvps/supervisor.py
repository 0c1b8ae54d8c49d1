"""Runs processes that belong together: passes on what they print and the signals that come, starts
again what dies, and ends them all when one that is needed is gone.

One thread does it all: a process that was started by a thread would end with it, because of the
signal that each task asks for in case the launcher dies. TensorFlow is not needed here.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO

from hvps.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from hvps.prefixed_output import PrefixedLines
from hvps.processes import end_with, is_stopped, kill_all_of, signal_group
from hvps.task_cluster import TF_CONFIG

_POLL_S = 0.05
_LOOK_FOR_STOPPED_S = 1.0
_LONGEST_DELAY_S = 30.0
_ERROR = b"hvps: error:"
_ENDS_BY_ITSELF_S = 5.0  # a task that has reported an error
_LOOK_AGAIN_S = 3.0  # whether what was not ready is now
_ASK_FOR_S = 10.0  # a task that has nobody yet who could stop
# Workers that were asked to stop agree on it, save and end with one of these.
_STOPPED = (EXIT_INTERRUPTED, EXIT_PREEMPTED)


def send_signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Ask a task to stop; False if there was nobody yet to ask."""
    process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)
    return True


@dataclass(frozen=True)
class Restart:
    """Something is started again.

    Attributes:
        task: its name.
        reason: how it ended.
        number: of the restart, from 1.
        limit: how many there may be.
    """

    task: str
    reason: str
    number: int
    limit: int


@dataclass(frozen=True)
class Policy:
    """What is done about tasks that die.

    Attributes:
        max_restarts: of all tasks together.
        dispensable: tasks without which the others go on.
        stopped_after: seconds after which a task that stands still (SIGSTOP) counts as dead, where
            it may be started again or all who train stand still.
        note: called for each restart, before it; may give another command for the task.
        not_ready: why a task cannot run now, if so: asked before it is started again, and, while it
            has reported an error and does not end, whether it ever will.
        wait_for_ready: seconds after which that is a failure.
    """

    max_restarts: int = 0
    dispensable: Callable[[str], bool] = lambda name: False
    stopped_after: float = 120.0
    note: Callable[[Restart], Sequence[str] | None] = lambda restart: None
    not_ready: Callable[[str], str | None] = lambda name: None
    wait_for_ready: float = 600.0


class Supervisor:
    """Runs the tasks of a cluster until all have ended.

    Args:
        commands: by name; those of parameter servers begin with "ps ", and are expected to end by
            themselves once the others have.
        grace: seconds in which the others may end by themselves after one has failed, or
            parameter servers after all workers are done.
        kill_after: seconds from SIGTERM to SIGKILL.
        policy: what is done about those that die.
        prefixed: the lines that they print begin with their names.
        ask_to_stop: passes a signal on to a task; asked again while it returns False.
        guarded: tasks end when their standard input does, which is kept open for them.
        delay: seconds before the n-th restart.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        *,
        grace: float = 15.0,
        kill_after: float = 15.0,
        policy: Policy = Policy(),
        prefixed: bool = True,
        ask_to_stop: Callable[[subprocess.Popen[bytes], int], bool] = send_signal,
        guarded: bool = False,
        delay: Callable[[int], float] = lambda n: min(2.0 ** (n - 1), _LONGEST_DELAY_S),
    ) -> None:
        self._commands = dict(commands)
        self._prefixed, self._guarded = prefixed, guarded
        self._policy, self._ask_to_stop, self.delay = policy, ask_to_stop, delay
        self._restarts = 0
        self._due: list[tuple[float, str]] = []  # when what is started again
        self._waits: dict[str, tuple[float, str]] = {}  # until when, and why
        self._stopped_since: dict[str, float] = {}
        self._looked_at = time.monotonic()
        self._grace = grace
        self._kill_after = kill_after
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._outputs: dict[str, list[tuple[IO[bytes], PrefixedLines]]] = {}
        self._selector = selectors.DefaultSelector()
        self._look_at: dict[str, float] = {}  # when at tasks that have reported an error
        self._lost: set[str] = set()  # were killed because their hosts are gone
        self._signals: list[int] = []
        self._unheard: dict[str, tuple[int, float]] = {}  # signals, and until when to try
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
                while self._running or self._due:
                    self._pass_on_output(_POLL_S)
                    self._pass_on_signals()
                    self._ask_again()
                    self._note_ended()
                    self._note_stopped()
                    self._note_lost()
                    self._start_again()
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
            stdin=subprocess.PIPE if self._guarded else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**env, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C comes to the launcher alone
            preexec_fn=end_with(os.getpid()),
        )
        self._running[name] = process
        self._outputs[name] = []
        number = list(self._commands).index(name)
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            shown = name if self._prefixed else ""
            self._outputs[name].append((pipe, PrefixedLines(shown, number, target)))
            self._selector.register(pipe, selectors.EVENT_READ, self._outputs[name][-1][1])

    def _note_ended(self) -> None:
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[name]
            kill_all_of(process.pid)  # what it may have left behind
            self._drain(name)
            self._look_at.pop(name, None)
            self._judge(name, EXIT_FAILURE if name in self._lost else code)
            self._lost.discard(name)
        if self._deadline is None and self._running and not self._due:
            if all(name.startswith("ps ") for name in self._running):
                self._deadline = (time.monotonic() + self._grace, self._ps_are_late)
            elif all(map(self._policy.dispensable, self._running)) and not self._failed:
                self._deadline = (time.monotonic() + self._grace, self._nobody_waits)

    def _judge(self, name: str, code: int) -> None:
        if code == 0 or self._failed:
            return
        exit_code = 128 - code if code < 0 else code
        if code in _STOPPED or (self._stopping and code in (-signal.SIGTERM, -signal.SIGINT)):
            self._code = self._code or exit_code
            return
        if self._may_come_back(name, code):
            return
        self._failed, self._code = True, exit_code
        _say(f"{name} {_how(code)}")
        self._deadline = (time.monotonic() + self._grace, self._terminate)

    def _may_come_back(self, name: str, code: int) -> bool:
        """Whether the others need not end for that."""
        if self._stopping or code == EXIT_CONFIG:
            return False
        if self._policy.dispensable(name) and not self._needed_ones_run():
            return True  # training has ended without it
        limit = self._policy.max_restarts
        if self._restarts < limit:
            self._restarts += 1
            seconds = self.delay(self._restarts)
            restart = Restart(name, _how(code), self._restarts, limit)
            self._commands[name] = self._policy.note(restart) or self._commands[name]
            self._due.append((time.monotonic() + seconds, name))
            _say(
                f"{name} {restart.reason}; it is started again in {seconds:g} s"
                f" (restart {self._restarts} of {limit})"
            )
            return True
        if self._policy.dispensable(name):
            _say(f"{name} {_how(code)}; the others go on without it")
            return True
        return False

    def _needed_ones_run(self) -> bool:
        """Whether a task runs, or will, that is neither dispensable nor a parameter server."""
        names = [*self._running, *(name for _, name in self._due)]
        return any(not n.startswith("ps ") and not self._policy.dispensable(n) for n in names)

    def _start_again(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._due if entry[0] <= now]:
            self._due.remove(entry)
            if not self._failed and self._is_ready(entry[1]):
                self._start(entry[1], self._commands[entry[1]])

    def _is_ready(self, name: str) -> bool:
        """Whether to start it now; if not, when to ask again."""
        why = self._policy.not_ready(name)
        now = time.monotonic()
        if why is None:
            self._waits.pop(name, None)
            return True
        until, said = self._waits.get(name, (now + self._policy.wait_for_ready, ""))
        if now >= until:
            _say(f"{name} cannot be started again: {why}")
            self._failed, self._code = True, self._code or EXIT_FAILURE
            self._deadline = (now, self._terminate)
            return False
        if why != said:
            _say(f"{name} waits to be started again: {why}")
        self._waits[name] = (until, why)
        self._due.append((now + _LOOK_AGAIN_S, name))
        return False

    def _note_stopped(self) -> None:
        """A process that was stopped never ends; the others cannot wait for it for ever.

        Where it would not be started again, the tasks notice it themselves, and say more about it;
        unless all who train have ended but those that stand still.
        """
        now = time.monotonic()
        if now < self._looked_at:
            return
        self._looked_at = now + _LOOK_FOR_STOPPED_S
        workers = [p for name, p in self._running.items() if not name.startswith("ps ")]
        if self._restarts >= self._policy.max_restarts and not (
            workers and all(is_stopped(process.pid) for process in workers)
        ):
            self._stopped_since.clear()
            return
        for name, process in self._running.items():
            if not is_stopped(process.pid):
                self._stopped_since.pop(name, None)
            elif now - self._stopped_since.setdefault(name, now) > self._policy.stopped_after:
                del self._stopped_since[name]
                _say(f"{name} has stood still for {self._policy.stopped_after:g} s")
                kill_all_of(process.pid)
                return

    def _note_lost(self) -> None:
        """mpirun waits for ever for the end of ranks whose host is gone."""
        for name in [name for name, at in self._look_at.items() if at <= time.monotonic()]:
            why = self._policy.not_ready(name)
            self._look_at[name] = time.monotonic() + _ENDS_BY_ITSELF_S
            if why is not None and name in self._running:
                _say(f"{name} cannot go on: {why}")
                self._lost.add(name)
                kill_all_of(self._running[name].pid)

    def _nobody_waits(self) -> None:
        """Training has ended; who is left has come too late, or stands still."""
        names = " and ".join(self._running)
        _say(f"training has ended without {names}")
        self._failed = True  # what happens to it now is no failure of the job
        self._terminate()

    def _ps_are_late(self) -> None:
        names = " and ".join(self._running)
        verb = "are" if len(self._running) > 1 else "is"
        _say(f"{names} {verb} still running {self._grace:g} s after all workers have ended")
        self._failed, self._code = True, self._code or EXIT_FAILURE
        self._terminate()

    def _terminate(self) -> None:
        for process in self._running.values():
            if is_stopped(process.pid):  # it does nothing about SIGTERM
                kill_all_of(process.pid)
            else:
                signal_group(process.pid, signal.SIGTERM)
        self._deadline = (time.monotonic() + self._kill_after, self._kill)

    def _kill(self) -> None:
        for process in self._running.values():
            kill_all_of(process.pid)
        for process in self._running.values():
            process.wait()

    def _act_in_time(self) -> None:
        if self._deadline is None:
            return
        if time.monotonic() >= self._deadline[0] or self._only_stopped_ones_left():
            self._deadline[1]()

    def _only_stopped_ones_left(self) -> bool:
        """Grace is for those that can still end by themselves."""
        if not self._failed or self._deadline is None or self._deadline[1] != self._terminate:
            return False
        return bool(self._running) and all(is_stopped(p.pid) for p in self._running.values())

    # --- output ---

    def _pass_on_output(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            self._read(key.fileobj, key.data)  # type: ignore[arg-type]

    def _watch_for_errors(self, pipe: IO[bytes], data: bytes) -> None:
        if _ERROR in data:
            for name, pipes in self._outputs.items():
                if any(each is pipe for each, _ in pipes):
                    self._look_at.setdefault(name, time.monotonic() + _ENDS_BY_ITSELF_S)

    def _read(self, pipe: IO[bytes], lines: PrefixedLines) -> bool:
        """Pass on what there is; False if there is nothing now, or will be no more."""
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return False
        self._watch_for_errors(pipe, data)
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
            if self._due:  # what waits to be started again has its checkpoint already
                self._due.clear()
                self._code = self._code or _code_of(number)
            until = time.monotonic() + _ASK_FOR_S
            self._unheard = dict.fromkeys(self._running, (number, until))

    def _ask_again(self) -> None:
        for name, (number, until) in list(self._unheard.items()):
            process = self._running.get(name)
            if process is None or self._ask_to_stop(process, number):
                del self._unheard[name]
            elif time.monotonic() >= until:
                del self._unheard[name]
                send_signal(process, number)


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


def _code_of(number: int) -> int:
    """The exit code of a job that was asked to stop by a signal."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED
