"""The place where the tasks of a cluster agree: a small service in the process of ps 0.

It deals out steps, holds back who is too far ahead, keeps values that one task has for the others,
and watches: every task keeps a connection open on which it is heard from at least once a second.
When one that cannot be done without is gone or does not come, all others are told its name.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hvps.backends.ps.control import LOOK_THERE, Reason, aborted, what_happened
from hvps.backends.ps.run_state import RunState
from hvps.backends.ps.wire import ConnectionLost, receive, send
from hvps.cluster import Tasks
from hvps.errors import PeerLostError

BEAT_S = 0.5
SIGNALS = ("SIGTERM", "SIGINT")
_HELLO_TIMEOUT_S = 10.0


@dataclass
class _Member:
    """A task that is connected, or was."""

    where: str
    state: str  # "here", "left", "lost"
    beats: socket.socket | None


class Coordinator:
    """Serves the tasks of one cluster until the chief says that all is done.

    Args:
        tasks: the cluster.
        host: address to listen on.
        timeout: seconds of silence after which a task counts as gone, and seconds in which the
            tasks come that are needed, once a worker has come.
        tolerant: training goes on without a worker that dies, unless it is the chief.
        spare: number of workers that may not come even so.
    """

    def __init__(
        self, tasks: Tasks, host: str, timeout: float, *, tolerant: bool, spare: int = 0
    ) -> None:
        self.token = secrets.token_hex(16)
        self.applied_steps: Callable[[int, int], int] | None = None
        self._timeout, self._tolerant, self._spare = timeout, tolerant, spare
        self._addresses = {
            f"{role} {index}": address
            for role, addresses in (("ps", tasks.ps), ("worker", tasks.worker))
            for index, address in enumerate(addresses)
        }
        self._changed = threading.Condition()
        self._members: dict[str, _Member] = {}
        self._missed: list[int] = []  # workers that had not come when they were looked for
        self._losing: set[str] = set()  # workers whose last updates are being counted
        self._board: dict[str, Any] = {}
        self._news: list[str] = []
        self._answering = 0
        self._sums: dict[str, list[int]] = {}
        self._runs: dict[int, RunState] = {}
        self._run_number = 0
        self._stop_reason: str | None = None
        self._abort: Reason | None = None
        self.done = False
        self._listener = socket.create_server((host, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="hvps-coordinator", daemon=True).start()
        threading.Thread(target=self._call_roll, name="hvps-roll-call", daemon=True).start()

    # --- the process that hosts it ---

    def wait_until_over(self, seconds: float) -> bool:
        """Wait for the end, so many seconds at most; returns whether it has come."""
        with self._changed:
            return self._changed.wait_for(self._is_over, seconds)

    @property
    def failure(self) -> PeerLostError | None:
        """Why the end came too early."""
        return None if self._abort is None else aborted(self._abort)

    def linger(self, seconds: float) -> None:
        """Let the tasks that are still here hear of the end before this process leaves."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._answering and all(m.state != "here" for m in self._members.values())
                ),
                max(0.0, deadline - time.monotonic()),
            )

    def stop(self, task: str, signal_name: str) -> None:
        """A task that only serves was asked to stop: ask those that train to save and end.

        Without the chief there is nothing to save.
        """
        with self._changed:
            self._stop_reason = signal_name
            chief = self._members.get("worker 0")
            if chief is not None and chief.state == "here":
                if self._run_number in self._runs:
                    self._runs[self._run_number].stop(signal_name)
            else:
                self._fail(f"{task} was stopped by {signal_name}", "start the cluster again")
            self._changed.notify_all()

    def _fail(self, what: str, do: str = LOOK_THERE, *, missing: bool = False) -> None:
        """Under the lock: tell everyone that it is over, and why."""
        if not self._is_over():
            self._abort = {"what": what, "do": do, "missing": missing}
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # close() alone would not wake accept()
            self._listener.close()  # whoever comes now belongs to the cluster's next life
        self._changed.notify_all()

    # --- who is here ---

    def _call_roll(self) -> None:
        """From the first worker on, all have `timeout` seconds to come."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over() or any(task.startswith("worker") for task in self._members)
            )
            self._changed.wait_for(lambda: self._is_over() or not self._absent(), self._timeout)
            absent = self._absent()
            spared = [task for task in absent if task.startswith("worker") and task != "worker 0"]
            if not self._tolerant and len(spared) > self._spare:
                spared = []
            needed = [task for task in absent if task not in spared]
            if needed:
                self._fail(
                    self._did_not_come(needed),
                    "start what is missing, or raise backend.stall_timeout if it starts slowly",
                    missing=True,
                )
            elif spared:
                self._news.append(self._did_not_come(spared))
                self._missed = [int(task.partition(" ")[2]) for task in spared]
                for run in self._runs.values():
                    run.miss(self._missed)
            self._changed.notify_all()

    def _absent(self) -> list[str]:
        """Tasks that have never been here; ps 0 is where this runs."""
        return [task for task in self._addresses if task != "ps 0" and task not in self._members]

    def _did_not_come(self, names: list[str]) -> str:
        who = " and ".join(f"{name} ({self._addresses[name]})" for name in names)
        return f"{who} did not come within {self._timeout:g} s"

    # --- connections ---

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        with connection:
            try:
                hello = receive(connection, _HELLO_TIMEOUT_S)
                if not hmac.compare_digest(str(hello.get("token")), self.token):
                    return
                if hello["kind"] == "beats":
                    self._watch(connection, hello["task"], hello["where"])
                else:
                    self._serve(connection, hello["task"], hello["where"])
            except (ConnectionLost, KeyError):
                return

    def _watch(self, connection: socket.socket, task: str, where: str) -> None:
        """One task's beats, from its arrival to its end."""
        with self._changed:
            before = self._members.get(task)
            if before is not None and before.state == "here":
                send(connection, {"refused": f"{task} is here already: {before.where}"})
                return
            me = _Member(where, "here", connection)
            self._members[task] = me
            self._changed.notify_all()
        text, heard = "", time.monotonic()
        try:
            while True:
                if receive(connection, self._timeout).get("left"):
                    me.state = "left"
                heard = time.monotonic()
                with self._changed:
                    self._changed.wait_for(self._is_over, BEAT_S if me.state == "here" else 0)
                    answer = {"abort": self._abort, "done": self.done}
                send(connection, answer)
                if me.state == "left" or self._is_over():
                    break
        except ConnectionLost as err:
            silent = time.monotonic() - heard
            text = what_happened(f"{task} ({where})", "ps 0", err, silent, self._timeout)
            with suppress(OSError):  # should it only have stood still, it ends at once
                connection.shutdown(socket.SHUT_RDWR)
        with self._changed:
            if me.state == "here" and not self._is_over():
                me.state = "lost"
                self._lose(task, text)
            elif me.state == "here":
                me.state = "left"
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self.done or self._abort is not None

    def _lose(self, task: str, text: str) -> None:
        role, _, index = task.partition(" ")
        if role != "worker" or index == "0" or not self._tolerant:
            self._fail(text)
            return
        self._news.append(text)
        number, worker = self._run_number, int(index)
        run = self._runs.get(number)
        if run is None or worker >= len(run.workers):
            return
        applied = 0
        if self.applied_steps is not None and run.workers[worker].claimed:
            self._losing.add(task)
            self._changed.release()  # it asks TensorFlow, which may take a while
            try:
                applied = self.applied_steps(number, worker)
            finally:
                self._changed.acquire()
                self._losing.discard(task)
        run.lose(worker, applied)

    # --- calls ---

    def _serve(self, connection: socket.socket, task: str, where: str) -> None:
        """One task's questions; its beats have begun, or will in a moment."""

        def me() -> _Member | None:
            member = self._members.get(task)
            return member if member is not None and member.where == where else None

        with self._changed:
            if not self._changed.wait_for(me, _HELLO_TIMEOUT_S):
                return
        while True:
            message = receive(connection, None)
            verb = message.pop("verb")
            with self._changed:
                member = me()
                if member is None or member.state == "lost":
                    return  # it was given up, and others do its work
                self._answering += 1
            try:
                answer = getattr(self, f"do_{verb}")(task, **message)
            except _Over as over:
                answer = {"over": over.reason}
            try:
                send(connection, answer)
            finally:
                with self._changed:
                    self._answering -= 1
                    self._changed.notify_all()

    def _wait(self, condition: Callable[[], Any]) -> Any:
        """Wait, under the lock, until `condition` gives something that is not None or False."""
        found: list[Any] = [None]

        def ready() -> bool:
            found[0] = condition()
            return self._is_over() or found[0] not in (None, False)

        self._changed.wait_for(ready)
        if found[0] in (None, False):
            raise _Over(self._abort)
        return found[0]

    def do_publish(self, task: str, key: str, value: Any) -> dict[str, Any]:
        with self._changed:
            self._board[key] = value
            self._changed.notify_all()
        return {}

    def do_lookup(self, task: str, key: str) -> dict[str, Any]:
        with self._changed:
            return {"value": self._wait(lambda: [self._board[key]] if key in self._board else None)}

    def do_add_up(self, task: str, key: str, value: int, parties: int) -> dict[str, Any]:
        """Sum of a value over `parties` tasks, when all have given theirs."""
        with self._changed:
            entry = self._sums.setdefault(key, [0, 0])
            entry[0] += 1
            entry[1] += value
            if entry[0] == parties:  # whoever waits holds the entry itself
                del self._sums[key]
                self._changed.notify_all()
            self._wait(lambda: entry[0] >= parties)
            return {"sum": entry[1]}

    def do_meet(self, task: str) -> dict[str, Any]:
        """Wait until all parameter servers are here."""
        with self._changed:
            self._wait(lambda: not any(name.startswith("ps") for name in self._absent()))
        return {}

    def do_news(self, task: str) -> dict[str, Any]:
        """What happened to workers that training goes on without, since the last call."""
        with self._changed:
            news, self._news = self._news, []
            return {"text": "; ".join(news)}

    def do_begin_run(self, task: str, number: int, spec: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            run = self._runs[number] = RunState(spec)
            run.miss(self._missed)
            if self._stop_reason is not None:
                run.stop(self._stop_reason)
            self._run_number = number
            self._changed.notify_all()
        return {}

    def do_set_ready(self, task: str, number: int) -> dict[str, Any]:
        with self._changed:
            self._runs[number].ready = True
            self._changed.notify_all()
        return {}

    def do_join(self, task: str, number: int, worker: int) -> dict[str, Any]:
        """Wait until the chief has made the variables."""
        with self._changed:

            def ready() -> RunState | None:
                run = self._runs.get(number)
                settled = task not in self._losing  # what its predecessor has done
                return run if run is not None and run.ready and settled else None

            run = self._wait(ready)
            back = run.workers[worker].lost > 0
            return {"finished": run.join(worker), "back": back, "spec": run.spec}

    def do_claim(self, task: str, number: int, worker: int, done: Any) -> dict[str, Any]:
        with self._changed:
            run = self._runs[number]
            self._report(run, worker, done)
            answer: dict[str, Any] = self._wait(lambda: run.claim(worker))
            if run.bounded:  # with the last step dealt, others may be waited for no more
                self._changed.notify_all()
            return answer

    def do_hold(self, task: str, number: int, step: int) -> dict[str, Any]:
        """Let no step from `step` on begin until `release`."""
        with self._changed:
            self._runs[number].hold_at(step)
            self._changed.notify_all()
        return {}

    def do_held(self, task: str, number: int, worker: int, done: Any) -> dict[str, Any]:
        """Wait for what comes after a hold."""
        with self._changed:
            run = self._runs[number]
            self._report(run, worker, done)
            answer: dict[str, Any] = self._wait(lambda: run.held(worker))
            return answer

    def do_release(self, task: str, number: int) -> dict[str, Any]:
        with self._changed:
            self._runs[number].release()
            self._changed.notify_all()
        return {}

    def do_report(self, task: str, number: int, worker: int, done: Any) -> dict[str, Any]:
        with self._changed:
            self._report(self._runs[number], worker, done)
        return {}

    def _report(self, run: RunState, worker: int, done: Any) -> None:
        if done is not None:
            run.report(worker, done)
            self._changed.notify_all()

    def do_begin(self, task: str, number: int, worker: int) -> dict[str, Any]:
        """Wait until the worker is not too far ahead."""
        with self._changed:
            run = self._runs[number]
            self._wait(lambda: run.may_begin(worker))
        return {}

    def do_round(self, task: str, number: int, worker: int, step: int) -> dict[str, Any]:
        """Wait until the rounds before `step` have been applied; returns the one to work for."""
        with self._changed:
            run = self._runs[number]
            self._wait(lambda: run.round >= step)
            if run.round > step:
                run.skip_to(worker, run.round + 1)
            return {"round": run.round, "late": run.is_over(run.round)}

    def do_applied(self, task: str, number: int, rounds: int) -> dict[str, Any]:
        with self._changed:
            self._runs[number].round = rounds
            self._changed.notify_all()
        return {}

    def do_stop(self, task: str, number: int, reason: str) -> dict[str, Any]:
        with self._changed:
            self._runs[number].stop(reason)
            self._changed.notify_all()
        return {}

    def do_stop_all(self, task: str, signal_name: str) -> dict[str, Any]:
        self.stop(task, signal_name)
        return {}

    def do_leave(self, task: str, number: int, worker: int, done: Any) -> dict[str, Any]:
        """The worker has done its part.

        After a stop by signal it stays until the chief has saved: its exit code is not 0 then, and
        mpirun ends all others at the first of these.
        """
        with self._changed:
            run = self._runs[number]
            self._report(run, worker, done)
            run.leave(worker)
            self._changed.notify_all()
            if worker and run.stopped_by in SIGNALS:
                self._changed.wait_for(lambda: self._is_over() or self._run_number != number)
                if self._abort is not None:
                    raise _Over(self._abort)
        return {}

    def do_wait_for_others(self, task: str, number: int, seconds: float) -> dict[str, Any]:
        """Wait until all workers but the chief have left; names those that never came.

        After an early stop nobody waits for these.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            run = self._runs[number]

            def absent() -> list[int]:
                return [i for i, state in enumerate(run.workers) if i and not state.joined]

            def waits_for() -> set[int]:
                return {*run.waits_for} - {0}

            self._changed.wait_for(lambda: self._is_over() or waits_for() <= {*absent()})
            self._changed.wait_for(
                lambda: self._is_over() or not waits_for(),
                0.0 if run.stopped_by else max(0.0, deadline - time.monotonic()),
            )
            if self._abort is not None:
                raise _Over(self._abort)
            return {"absent": absent()}

    def do_interval(self, task: str, number: int) -> dict[str, Any]:
        with self._changed:
            return self._runs[number].take_interval()

    def do_summary(self, task: str, number: int) -> dict[str, Any]:
        with self._changed:
            return self._runs[number].summary()

    def do_finish(self, task: str) -> dict[str, Any]:
        """The chief is done with everything: all others may go."""
        with self._changed:
            self.done = True
            self._changed.notify_all()
        return {}


class _Over(Exception):  # noqa: N818
    """The cluster ended while a task waited."""

    def __init__(self, reason: Reason | None) -> None:
        super().__init__()
        self.reason = reason or {
            "what": "the cluster has ended",
            "do": LOOK_THERE,
            "missing": False,
        }
