"""Programs on ports of a block, for event loops: what :func:`fastports.aio.spawn` returns."""

from __future__ import annotations

import os
import select
import time

from . import handoff, loops
from .command import number
from .loops import Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from io import BufferedReader, BufferedWriter
    from typing import Any

    from .block import PortBlock
    from .command import Text

__all__ = ["Child", "Reader", "Writer", "spawn"]

_TERM = 15
_CHUNK = 65536
_HIGH_WATER = 65536  # bytes written and not taken by the child before drain() waits
_WITHOUT_PIDFD = 0.01  # seconds between two looks where a sandbox refuses pidfds


class Child:
    """A running program, with the methods of ``asyncio.subprocess.Process``.

    ``async with`` and :meth:`stop` end the program and its descendants.

    Attributes
    ----------
    pid, args, block, mode, ports
        As in ``fastports.handoff.Child``.
    stdin, stdout, stderr
        :class:`Writer` and :class:`Reader` where PIPE was asked for, else None.
    """

    def __init__(self, child: handoff.Child) -> None:
        self._child = child
        self.pid: int = child.pid
        self.args: list[str] = child.args
        self.block: PortBlock = child.block
        self.mode: str = child.mode
        self.ports: Sequence[int] = child.ports
        self.stdin: Writer | None = None if child.stdin is None else Writer(child.stdin)
        self.stdout: Reader | None = None if child.stdout is None else Reader(child.stdout)
        self.stderr: Reader | None = None if child.stderr is None else Reader(child.stderr)

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as :meth:`wait` has seen; minus the signal that killed it."""
        return self._child.returncode

    @property
    def listened_after(self) -> float | None:
        """Seconds from its start until all its ports were seen listening; None before."""
        return self._child.listened_after

    async def wait(self) -> int:
        """Wait until it has ended; its return code. The loop watches a pidfd, no thread waits."""
        while (code := self._child.poll()) is None:
            await self._ended(None)
        return code

    async def communicate(self, input: bytes | None = None) -> tuple[bytes | None, bytes | None]:
        """Feed stdin, read stdout and stderr to their ends, wait; None for what is no pipe."""
        readers = [reader for reader in (self.stdout, self.stderr) if reader is not None]
        loop = loops.current()
        with select.epoll() as ready:  # can be waited for itself: one waiter for all pipes
            streams: dict[int, Reader | Writer] = {}
            for reader in readers:
                if not reader._eof:
                    streams[reader._file.fileno()] = reader
                    ready.register(reader._file.fileno(), select.EPOLLIN)
            if self.stdin is not None and not self.stdin._file.closed:
                streams[self.stdin._file.fileno()] = self.stdin
                ready.register(self.stdin._file.fileno(), select.EPOLLOUT)
                self.stdin._buffer += input or b""
                self.stdin._eof = True
            while streams:
                await loop.readable(ready.fileno())
                for fd, _ in ready.poll(0):
                    if not streams[fd]._step():
                        ready.unregister(fd)
                        streams.pop(fd)._close()
        await self.wait()
        return (
            None if self.stdout is None else await self.stdout.read(),
            None if self.stderr is None else await self.stderr.read(),
        )

    def send_signal(self, signal: int) -> None:
        """Send a signal to the child alone; nothing happens once it has ended."""
        self._child.send_signal(signal)

    def terminate(self) -> None:
        """Send SIGTERM to the child alone."""
        self._child.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the child alone."""
        self._child.kill()

    async def wait_listening(self, timeout: float | None = 30.0) -> Child:
        """Wait until the child or a descendant listens on every port of :attr:`ports`.

        :func:`fastports.aio.spawn` does this unless it was given ``wait=None``. The kernel is asked
        every millisecond, in some 5 us.

        Parameters
        ----------
        timeout
            Seconds; None for no limit.

        Returns
        -------
        Child
            This one.

        Raises
        ------
        HandoffError
            It ended, took too long, or somebody else listens. Nothing of the child is left; nor is
            it when this is cancelled.
        """
        child = self._child
        child._mine()
        budget = None if timeout is None else number(timeout, "timeout")
        loop = loops.current()
        try:
            steps = child._listening(None if budget is None else time.monotonic() + budget)
            pause = next(steps, None)
            while pause is not None:
                if pause > 0:
                    await loop.sleep(pause)
                    pause = next(steps, None)
                else:
                    pause = await loop.in_thread(Job(lambda: next(steps, None)))
        except GeneratorExit:  # the loop is gone, and nothing can be awaited
            child.stop(0.0)
            raise
        except BaseException:
            await loop.shielded(self._stop(None))
            child._handover.over()
            raise
        return self

    async def stop(self, grace: float | None = None) -> int:
        """End the child and its descendants: SIGTERM, a grace, SIGKILL. Idempotent.

        Parameters
        ----------
        grace
            Seconds between the two; None takes what ``spawn`` was given.

        Returns
        -------
        int
            The return code of the child. A cancellation waits until it has ended.
        """
        return await loops.current().shielded(self._stop(grace))

    async def _stop(self, grace: float | None) -> int:
        child = self._child
        loop = loops.current()
        left = child._grace if grace is None else grace
        if child.poll() is None:
            began = time.monotonic()
            await loop.in_thread(Job(lambda: child._signal_family(_TERM)))
            await self._ended(left)
            left = max(left - (time.monotonic() - began), 0.0)
        code: int = await loop.in_thread(Job(lambda: child.stop(left)))
        return code

    async def _ended(self, timeout: float | None) -> None:
        """Return when it has ended, or after ``timeout`` seconds."""
        loop = loops.current()
        if self._child.pidfd >= 0:
            fd = os.dup(self._child.pidfd)  # loops take one waiter a descriptor
            try:
                await loop.readable(fd, timeout)
            finally:
                os.close(fd)
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._child._process.ended(0):
            if deadline is not None and time.monotonic() >= deadline:
                return
            await loop.sleep(_WITHOUT_PIDFD)

    def _close_pipes(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream._close()

    async def __aenter__(self) -> Child:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._child.owner == os.getpid():
            try:
                await self.stop()
            finally:
                self._close_pipes()

    def __repr__(self) -> str:
        return f"<aio.{repr(self._child)[1:]}"


class Reader:
    """Reads a pipe of the child, with methods of ``asyncio.StreamReader``; one task at a time."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self._buffer = bytearray()
        self._eof = False
        os.set_blocking(file.fileno(), False)

    def at_eof(self) -> bool:
        """Whether everything was read."""
        return self._eof and not self._buffer

    async def read(self, n: int = -1) -> bytes:
        """At most ``n`` bytes, at least one of them; all until the end if ``n`` is negative."""
        while not self._eof and (n < 0 or (n > 0 and not self._buffer)):
            await self._more()
        return self._take(len(self._buffer) if n < 0 else n)

    async def readexactly(self, n: int) -> bytes:
        """``n`` bytes; EOFError if the pipe ends before."""
        while len(self._buffer) < n:
            if self._eof:
                raise EOFError(f"the pipe ended after {len(self._buffer)} of {n} bytes")
            await self._more()
        return self._take(n)

    async def readline(self) -> bytes:
        """A line with its end; what is left at the end of the pipe."""
        looked = 0
        while (at := self._buffer.find(b"\n", looked)) < 0 and not self._eof:
            looked = len(self._buffer)
            await self._more()
        return self._take(at + 1 if at >= 0 else len(self._buffer))

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> bytes:
        line = await self.readline()
        if not line:
            raise StopAsyncIteration
        return line

    async def _more(self) -> None:
        if not self._fill() and not self._eof:
            await loops.current().readable(self._file.fileno())
            self._fill()

    def _step(self) -> bool:
        self._fill()
        return not self._eof

    def _fill(self) -> bool:
        """Read what is there; False if nothing was."""
        if self._eof:
            return False
        try:
            data = os.read(self._file.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._eof = True
        self._buffer += data
        return bool(data)

    def _take(self, n: int) -> bytes:
        data = bytes(self._buffer[:n])
        del self._buffer[:n]
        return data

    def _close(self) -> None:
        self._eof = True
        self._file.close()


class Writer:
    """Writes the child's stdin, with methods of ``asyncio.StreamWriter``.

    What the pipe does not take at once is kept, and sent by :meth:`drain` and :meth:`wait_closed`.
    """

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self._buffer = bytearray()
        self._eof = False
        os.set_blocking(file.fileno(), False)

    def write(self, data: bytes) -> None:
        """Send ``data``, now or later; BrokenPipeError if nobody reads any more."""
        if self._eof:
            raise ValueError("stdin was closed")
        self._buffer += data
        self._flush()

    def writelines(self, data: Iterable[bytes]) -> None:
        """Send all of ``data``."""
        self.write(b"".join(data))

    async def drain(self) -> None:
        """Wait until no more than 64 KiB are left to be sent."""
        await self._drain(_HIGH_WATER)

    def close(self) -> None:
        """Close the pipe once all is sent, at once where it is; else in :meth:`wait_closed`."""
        self._eof = True
        self._flush()

    write_eof = close

    def is_closing(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._eof

    async def wait_closed(self) -> None:
        """Wait until all is sent and the pipe closed."""
        await self._drain(0)

    async def _drain(self, mark: int) -> None:
        while len(self._buffer) > mark:
            await loops.current().writable(self._file.fileno())
            self._flush()

    def _step(self) -> bool:
        """Send what the pipe takes now; False when nothing is left to send, or nobody there."""
        try:
            while self._buffer:
                del self._buffer[: os.write(self._file.fileno(), self._buffer[:_CHUNK])]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self._buffer.clear()
        return False

    def _flush(self) -> None:
        try:
            while self._buffer:
                del self._buffer[: os.write(self._file.fileno(), self._buffer[:_CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._close()
            raise
        if self._eof:
            self._close()

    def _close(self) -> None:
        self._eof = True
        self._buffer.clear()
        self._file.close()


async def spawn(
    block: PortBlock,
    argv: Sequence[Text],
    *,
    wait: str | Iterable[int] | None,
    timeout: float | None,
    **options: Any,
) -> Child:
    """See :func:`fastports.aio.spawn`."""
    ports = handoff._wanted(block, wait, ())
    job = Job(
        lambda: handoff.spawn(block, argv, wait=None, timeout=timeout, **options),
        lambda started: started.__exit__(),
    )
    started: handoff.Child = await loops.current().in_thread(job)
    if ports:
        started.ports = ports
    child = Child(started)
    if wait is not None:
        try:
            await child.wait_listening(timeout)
        except BaseException:
            child._close_pipes()
            raise
    return child
