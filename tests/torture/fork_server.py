"""Starts trainings in a moment: a process that has TensorFlow loaded, but never used, forks.

Loading takes seconds and a kill a moment, so that almost all of a trial would be loading.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.launching import ROOT

LOADED = (
    "tensorflow",
    "keras",
    "hvps.train",
    "hvps.session",
    "hvps.backends.local",
    "tests.tasks",
)


class ForkServer:
    """Forks trainings off this process, which must not use TensorFlow itself."""

    def __init__(self) -> None:
        os.environ["KERAS_BACKEND"] = "tensorflow"
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        # Threads do not come along into a fork, and what they hold would be held for ever.
        for key in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(key, "1")
        sys.path.insert(0, str(ROOT))
        for name in LOADED:
            importlib.import_module(name)

    def start(
        self, arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> Life:
        """`python -m hvps.train ARGUMENTS` in `folder`, as a session of its own."""
        _check_unused()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return Life(pid, folder / "output")
        try:
            self._train(arguments, folder, env or {})
        finally:
            os._exit(70)

    def _train(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        from hvps.train import main

        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler is not for this one
        os.chdir(folder)
        os.environ.update(env)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = main(list(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _check_unused() -> None:
    """The first operation makes TensorFlow's threads, and a fork would have none of them."""
    from tensorflow.python.eager import context

    made = context.context_safe()
    assert made is None or made._context_handle is None, "this process has used TensorFlow"


class Life:
    """One training process, until it ends or is ended."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid, self._output = pid, output
        self.code: int | None = None

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"still running after {timeout:g} s:\n{self.output[-3000:]}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """End it and all that it has started, as a power cut would."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group of its own yet
                os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
