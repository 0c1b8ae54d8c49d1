"""Steps in flight: threads that each run one step at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Lanes:
    """Runs steps in `count` threads, in the order in which they are handed in.

    Args:
        run: called as run(lane, *arguments), with the lane's number.
    """

    def __init__(self, count: int, run: Callable[..., Any]) -> None:
        self.count = count
        self._run = run
        self._work: queue.Queue[tuple[Future[Any], tuple[Any, ...]] | None] = queue.Queue()
        self._free = threading.Semaphore(count)
        self._failed: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._loop, args=(i,), name=f"hvps-lane-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, *arguments: Any) -> Future[Any]:
        """Hand in a step; waits until a lane is free.

        Raises:
            Exception: what an earlier step has raised.
        """
        self._free.acquire()
        if self._failed is not None:
            self._free.release()
            raise self._failed
        future: Future[Any] = Future()
        self._work.put((future, arguments))
        return future

    def drain(self) -> None:
        """Wait for all steps.

        Raises:
            Exception: what a step has raised.
        """
        for _ in range(self.count):
            self._free.acquire()
        self._free.release(self.count)
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)

    def _loop(self, lane: int) -> None:
        while True:
            entry = self._work.get()
            if entry is None:
                return
            future, arguments = entry
            try:
                future.set_result(self._run(lane, *arguments))
            except BaseException as err:  # handed to the thread that submits and reads
                self._failed = err
                future.set_exception(err)
            finally:
                self._free.release()
