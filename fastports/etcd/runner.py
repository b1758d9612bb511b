"""Calls that an interrupt in the main thread cannot break.

Python runs signal handlers in the main thread, between two bytecodes. One that raises (Ctrl-C does)
inside grpcio's synchronous call may leave grpcio's channel lock locked for ever, and with it every
other call of the process. So the main thread's calls are made by another thread, and the main
thread waits in a lock, which can be interrupted at any point.
"""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Seconds without a call after which the thread ends; the next call starts a new one.
IDLE = 1.0


class Late(Exception):
    """The call was not done in time; it may have been sent."""


class _Job:
    __slots__ = ("deadline", "done", "error", "result", "work")

    def __init__(self, work: Callable[[float], Any], deadline: float) -> None:
        self.work = work
        self.deadline = deadline
        self.done = threading.Lock()
        self.done.acquire()
        self.result: Any = None
        self.error: BaseException | None = None


class Runner:
    """Runs the main thread's calls one after the other; other threads' calls where they are."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[float], Any], limit: float) -> Any:
        """``work(seconds)`` with at most ``limit`` of them, its result or its exception.

        Raises
        ------
        Late
            After ``limit``, when the call before it (an interrupted one) is still under way.
        """
        if threading.current_thread() is not threading.main_thread():
            return work(limit)
        job = _Job(work, time.monotonic() + limit)
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(
                    target=self._serve, name="fastports-etcd-calls", daemon=True
                )
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:
                    pass  # the interpreter is at its exit (from Python 3.12 on): there is no other
            served = self._thread is not None
            if served:
                self._jobs.put(job)
        if not served:
            return work(limit)
        # The call ends by itself at its deadline; the extra is for the way back.
        if not job.done.acquire(timeout=limit + 0.05):
            raise Late
        if job.error is not None:
            raise job.error
        return job.result

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE)
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            if job is None:
                return
            left = job.deadline - time.monotonic()
            try:
                # What nobody waits for any more is not begun.
                if left > 0:
                    job.result = job.work(left)
                else:
                    job.error = Late()
            except BaseException as exc:  # raised again where the result is waited for
                job.error = exc
            job.done.release()
            del job

    def close(self) -> None:
        """End the thread, after the calls that were asked for."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None:
            thread.join(IDLE)
