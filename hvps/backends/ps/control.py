"""A task's line to the coordinator: calls that may wait, and beats that show it is alive."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, TypedDict

from hvps.backends.ps.wire import ConnectionLost, connect, receive, send
from hvps.errors import ConfigError, PeerLostError, PeerMissingError
from hvps.restart import begin_anew_after
from hvps.signals import stop_votes

_CONNECT_TIMEOUT_S = 10.0
LOOK_THERE = "look for the first error in the output of that task"


class Reason(TypedDict):
    """Why the cluster has ended too early, as it travels.

    Attributes:
        missing: somebody did not come, rather than being lost.
    """

    what: str
    do: str
    missing: bool


class Control:
    """Connection of one task.

    When the coordinator says that the cluster is over, or is not heard of for `timeout` seconds,
    the process is ended from the thread that listens: the main thread may be deep in TensorFlow,
    waiting for a task that is gone.

    Args:
        host, port, token: of the coordinator.
        task: this task's name, as in "worker 1".
        coordinator: name and address of the task that hosts the coordinator, for messages.
        timeout: seconds of silence that are borne.

    Attributes:
        exit_code: of this process when the cluster fails; None leaves it to the failure.

    Raises:
        ConfigError: a task of this name is here already.
        PeerLostError: the coordinator cannot be reached.
    """

    def __init__(
        self, host: str, port: int, token: str, *, task: str, coordinator: str, timeout: float
    ) -> None:
        self._address, self._token, self._task = (host, port), token, task
        self._coordinator, self._timeout = coordinator, timeout
        self._local = threading.local()
        self._over = threading.Event()
        self._leaving = False
        self._stop_passed_on = False
        self.exit_code: int | None = None
        beats = self._open("beats")
        threading.Thread(target=self._beat, args=(beats,), name="hvps-beats", daemon=True).start()

    def _open(self, kind: str) -> socket.socket:
        try:
            connection = connect(*self._address, _CONNECT_TIMEOUT_S)
            where = f"pid {os.getpid()} on {socket.gethostname()}"
            hello = {"token": self._token, "kind": kind, "task": self._task, "where": where}
            send(connection, hello)
        except (OSError, ConnectionLost) as err:
            raise self._lost(err) from err
        return connection

    def _lost(self, err: Exception) -> PeerLostError:
        return PeerLostError(
            f"{self._coordinator} is gone",
            rule="training needs every parameter server",
            received=str(err),
            do=f"look for the first error in the output of {self._coordinator}",
        )

    # --- beats ---

    def _beat(self, connection: socket.socket) -> None:
        heard, silent = time.monotonic(), 0.0
        try:
            while True:
                leaving = self._leaving
                send(connection, {"left": leaving})
                answer = receive(connection, self._timeout)
                silent, heard = time.monotonic() - heard, time.monotonic()
                self._pass_on_stop()
                if "refused" in answer:
                    self._end(_taken(self._task, answer["refused"]))
                if answer["abort"]:
                    self._end(aborted(answer["abort"]))
                if answer["done"] or leaving:
                    self._over.set()
                    return
        except ConnectionLost as err:
            if self._leaving:
                self._over.set()
                return
            # A process that stood still may find an answer that came before the others gave up.
            silent = max(silent, time.monotonic() - heard)
            what = what_happened(self._coordinator, self._task, err, silent, self._timeout)
            self._end(aborted({"what": what, "do": LOOK_THERE, "missing": False}))

    def _pass_on_stop(self) -> None:
        """A signal asks for a stop while the main thread may be waiting for others."""
        if not self._stop_passed_on and any(votes := stop_votes()):
            self._stop_passed_on = True
            with suppress(PeerLostError):  # the next beat says so too
                self.call("stop_all", signal_name="SIGTERM" if votes[0] else "SIGINT")

    def _end(self, err: PeerLostError | ConfigError) -> None:
        if self._leaving:
            self._over.set()
            return
        if self.exit_code is None:  # nobody has asked it to end
            begin_anew_after(err, self._task)
        sys.stdout.flush()
        print(f"hvps: error: {self._task} ends: {err}", file=sys.stderr, flush=True)
        os._exit(err.exit_code if self.exit_code is None else self.exit_code)

    def wait_until_done(self, seconds: float | None = None) -> bool:
        """Wait until the chief has finished; the process ends here if the cluster fails.

        Returns:
            False if that takes more than `seconds`.
        """
        return self._over.wait(seconds)

    def leave(self) -> None:
        """Say that this task ends in order, and wait until that is known."""
        self._leaving = True
        self._over.wait(self._timeout)

    # --- calls ---

    def call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask the coordinator; waits as long as it takes, for the beats watch over it.

        Raises:
            PeerLostError: the cluster is over.
        """
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._open("calls")
        try:
            send(connection, {"verb": verb, **arguments})
            answer = receive(connection, None)
        except ConnectionLost as err:
            raise self._lost(err) from err
        if "over" in answer:
            raise aborted(answer["over"])
        return answer

    def publish(self, key: str, value: Any) -> None:
        self.call("publish", key=key, value=value)

    def lookup(self, key: str) -> Any:
        return self.call("lookup", key=key)["value"][0]


def aborted(reason: Reason) -> PeerLostError:
    kind = PeerMissingError if reason["missing"] else PeerLostError
    return kind(
        reason["what"],
        rule="training goes on only while every task that it needs is there",
        do=reason["do"],
    )


def what_happened(other: str, own: str, err: ConnectionLost, silent: float, timeout: float) -> str:
    """Say why `other` is not heard of any more.

    Args:
        own: this task, which may have stood still itself until the other one had gone.
        silent: seconds for which nothing was heard.
    """
    if "silent" in str(err):
        return f"{other} stands still: it was {err}"
    if silent >= timeout:
        return f"{own} itself stood still for {silent:.0f} s and was given up meanwhile"
    return f"{other} died"


def _taken(task: str, text: str) -> ConfigError:
    return ConfigError(
        f"launch: {text}",
        rule="each task of the cluster runs once",
        received=f"a second {task}",
        do="give every process an index of its own, or end the other one first",
    )


def wait_for_port(host: str, port: int, *, task: str, timeout: float) -> None:
    """Wait until something listens at `host:port`.

    Raises:
        PeerMissingError: it did not within `timeout` seconds; names the task.
    """
    deadline = time.monotonic() + timeout
    reason = ""
    while time.monotonic() < deadline:
        try:
            connect(host, port, min(5.0, timeout)).close()
            return
        except OSError as err:
            reason = err.strerror or str(err)
            time.sleep(0.1)
    raise PeerMissingError(
        f"{task} did not come within {timeout:g} s",
        rule="every task of the cluster is started",
        received=f"{host}:{port}: {reason}",
        do=f"start {task}, or raise backend.stall_timeout if it only starts slowly",
    )
