"""What the awaitable face needs of an event loop: asyncio's, uvloop's, or trio's through anyio.

Nothing here knows of ports. asyncio is never imported, only found where it runs already; anyio is
imported where no asyncio loop runs.
"""

from __future__ import annotations

import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    from collections import deque
    from collections.abc import Callable, Coroutine
    from typing import Any, Protocol, TypeVar
    from weakref import WeakKeyDictionary

    T = TypeVar("T")

    class Loop(Protocol):
        async def turn(self) -> None:
            """Wait for a turn to keep the loop's thread for a while; few are given out at once."""
            ...

        async def sleep(self, seconds: float) -> None: ...

        async def readable(self, fd: int, timeout: float | None = None) -> bool:
            """Wait until ``fd`` is readable, or at end of file; False after ``timeout`` seconds."""
            ...

        async def writable(self, fd: int) -> None: ...

        async def in_thread(self, job: Job) -> Any:
            """Do the job, of milliseconds, in one of the loop's worker threads.

            When cancelled: the job's result has been undone when the cancellation goes on.
            """
            ...

        async def search(self, job: Job) -> Any:
            """The same for a job that keeps the interpreter from others: few are at it at once."""
            ...

        async def apart(self, job: Job, *, prompt: bool = False) -> Any:
            """Do a job that may wait for long in a thread that is none of the loop's workers.

            Few are at it at once, the others wait their turn. When cancelled: the job has been
            done, whatever it takes, when the cancellation goes on. With ``prompt`` that goes on at
            once, and the thread undoes the result in its own time.
            """
            ...

        async def shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
            """Let it come to its end before a cancellation goes on."""
            ...


__all__ = ["Job", "current"]

# Searches that one turn of a loop lets through: 8 of some 50 us leave the loop to others in time.
PER_TURN = 8

# Worker threads of one loop that search. With as many as the loop has workers a turn of the loop
# takes 5 ms and more, since each of them takes the interpreter away from it: 20 us with one worker,
# 30 us with two (the 90th of 100 turns, 50 tasks that allocate 64 ports each), and not a tenth of
# the throughput less. Two, because a search that finds nothing waits for others, asleep.
SEARCHING = 2

# Threads of one loop that wait for a cluster registry. The loop's own workers are left alone: a
# registry that does not answer would keep them all, and with them every name lookup of the program.
APART = 16


def current() -> Loop:
    """The event loop that runs the calling task.

    Raises
    ------
    RuntimeError
        There is none, or it is trio's and anyio is not installed.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        try:
            return _Anyio()
        except ImportError as exc:
            raise RuntimeError(
                "under trio fastports.aio needs anyio 4.8 or later. Install fastports[anyio]."
            ) from exc
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        try:
            return _of_asyncio(asyncio.get_running_loop())
        except RuntimeError:
            pass  # none runs
    raise RuntimeError("no event loop is running in this thread. Call this from a coroutine.")


class Job:
    """Work for a thread, whose result is undone there if nobody wants it any more.

    Parameters
    ----------
    work
        Called once, in a worker thread.
    undo
        Takes a result that nobody wants back, in whatever thread.
    unstarted
        Called instead of ``work`` when the job is dropped before its start.
    """

    def __init__(
        self,
        work: Callable[[], object],
        undo: Callable[[Any], object] | None = None,
        unstarted: Callable[[], object] | None = None,
    ) -> None:
        self._work = work
        self._undo = undo
        self._unstarted = unstarted
        self._lock = threading.Lock()
        self._dropped = False
        self._results: list[object] = []
        self.started = False

    def __call__(self) -> object:
        with self._lock:
            if self._dropped:
                return None
            self.started = True
        result = self._work()
        with self._lock:
            if not self._dropped:
                self._results.append(result)
                return result
        if self._undo is not None:
            self._undo(result)
        return result

    def drop(self) -> Callable[[], object] | None:
        """Nobody wants the result. What undoes it, where it has come already."""
        with self._lock:
            self._dropped = True
            results, self._results = self._results, []
            unstarted, self._unstarted = self._unstarted, None
        if not self.started and unstarted is not None:
            unstarted()
        undo = self._undo
        if results and undo is not None:
            return lambda: undo(*results)
        return None


def _in_the_background(undo: Callable[[], object] | None) -> None:
    if undo is not None:
        threading.Thread(target=undo, name="fastports-undo").start()


# --- asyncio --------------------------------------------------------------------------------------

# Turns are the loop's, not an allocator's. Weak keys: a loop goes when its program lets it go.
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Asyncio] | None = None


def _of_asyncio(running: asyncio.AbstractEventLoop) -> _Asyncio:
    global _loops
    if _loops is None:
        from weakref import WeakKeyDictionary  # asyncio has loaded it

        _loops = WeakKeyDictionary()
    loop = _loops.get(running)
    if loop is None:
        loop = _loops[running] = _Asyncio()
    return loop


class _Asyncio:
    """Holds no reference to its loop, so that it does not keep it alive."""

    def __init__(self) -> None:
        import asyncio
        from collections import deque

        self._asyncio = asyncio
        self._given = 0
        self._turning = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._searches = asyncio.Semaphore(SEARCHING)
        self._apart = 0
        self._jobs: deque[tuple[Job, asyncio.Future[Any]]] = deque()

    async def turn(self) -> None:
        loop = self._asyncio.get_running_loop()
        while self._given >= PER_TURN:
            waiter = loop.create_future()
            self._waiting.append(waiter)
            await waiter
        self._given += 1
        if not self._turning:
            self._turning = True
            loop.call_soon(self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._given = woken = 0
        while self._waiting and woken < PER_TURN:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else cancelled
                waiter.set_result(None)
                woken += 1
        # also when those just woken are cancelled before they run, the next ones have their turn
        self._turning = woken > 0
        if self._turning:
            loop.call_soon(self._next, loop)

    async def sleep(self, seconds: float) -> None:
        await self._asyncio.sleep(seconds)

    async def readable(self, fd: int, timeout: float | None = None) -> bool:
        loop = self._asyncio.get_running_loop()
        ready: asyncio.Future[bool] = loop.create_future()
        loop.add_reader(fd, _tell, ready, True)
        timer = None if timeout is None else loop.call_later(timeout, _tell, ready, False)
        try:
            return await ready
        finally:
            if timer is not None:
                timer.cancel()
            if not loop.is_closed():
                loop.remove_reader(fd)

    async def writable(self, fd: int) -> None:
        loop = self._asyncio.get_running_loop()
        ready: asyncio.Future[bool] = loop.create_future()
        loop.add_writer(fd, _tell, ready, True)
        try:
            await ready
        finally:
            if not loop.is_closed():
                loop.remove_writer(fd)

    async def in_thread(self, job: Job) -> Any:
        try:
            future = self._asyncio.get_running_loop().run_in_executor(None, job)
        except BaseException:  # the loop is being shut down: it has no workers any more
            _in_the_background(job.drop())
            raise
        future.add_done_callback(_look)
        try:
            await self._asyncio.wait([future])  # leaves the future alone when it is cancelled
            return future.result()
        except BaseException as exc:
            undo = job.drop()
            if not isinstance(exc, self._asyncio.CancelledError):
                _in_the_background(undo)
            elif job.started:
                if undo is not None:
                    future = self._asyncio.get_running_loop().run_in_executor(None, undo)
                await self._until_done(future)
            raise

    async def search(self, job: Job) -> Any:
        loop = self._asyncio.get_running_loop()
        try:
            await self._searches.acquire()
        except BaseException:
            job.drop()
            raise
        try:
            return await self.in_thread(job)
        finally:
            if not loop.is_closed():
                self._searches.release()

    async def apart(self, job: Job, *, prompt: bool = False) -> Any:
        loop = self._asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        future.add_done_callback(_look)
        self._jobs.append((job, future))
        self._begin(loop)
        try:
            await self._asyncio.wait([future])
            return future.result()
        except BaseException as exc:
            if not prompt and isinstance(exc, self._asyncio.CancelledError):
                await self._until_done(future)
            _in_the_background(job.drop())
            if not loop.is_closed():
                future.cancel()  # what waits for its turn need not begin
            raise

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """A thread for each of the jobs whose turn it is.

        No pool: its threads would outlast the loop, or not be there after a fork.
        """
        while self._jobs and self._apart < APART:
            job, future = self._jobs.popleft()
            if future.done():
                continue
            thread = threading.Thread(
                target=_do_apart, args=(job, future, loop, self._end), name="fastports-registry"
            )
            try:
                thread.start()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                self._apart += 1

    def _end(
        self,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
        result: object,
        error: BaseException | None,
    ) -> None:
        self._apart -= 1
        self._begin(loop)
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    async def shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = self._asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(_look)
        try:
            await self._asyncio.wait([task])
        except self._asyncio.CancelledError:
            await self._until_done(task)
            raise
        return task.result()

    async def _until_done(self, future: asyncio.Future[Any]) -> None:
        while not future.done():
            try:  # noqa: SIM105
                await self._asyncio.wait([future])
            except self._asyncio.CancelledError:
                pass  # one is on its way already


def _do_apart(
    job: Job,
    future: asyncio.Future[Any],
    loop: asyncio.AbstractEventLoop,
    end: Callable[..., None],
) -> None:
    result: object = None
    error: BaseException | None = None
    try:
        result = job()
    except BaseException as exc:
        error = exc
    try:
        loop.call_soon_threadsafe(end, loop, future, result, error)
    except RuntimeError:  # the loop is closed, and nobody there to take the result
        undo = job.drop()
        if undo is not None:
            undo()


def _look(future: asyncio.Future[Any]) -> None:
    """Have seen the exception, if there is one, of a job that nobody may wait for."""
    if not future.cancelled():
        future.exception()


def _tell(future: asyncio.Future[bool], what: bool) -> None:
    if not future.done():
        future.set_result(what)


# --- trio, through anyio --------------------------------------------------------------------------


class _Anyio:
    def __init__(self) -> None:
        import anyio.lowlevel  # 60 ms; whoever uses trio through anyio has it loaded
        import anyio.to_thread

        self._anyio = anyio
        self._turns = _of_run("fastports turns", lambda: anyio.Semaphore(PER_TURN))

    async def turn(self) -> None:
        async with self._turns:  # one checkpoint with a ticket: so many pass in one go
            await self._anyio.lowlevel.checkpoint()

    async def sleep(self, seconds: float) -> None:
        await self._anyio.sleep(seconds)

    async def readable(self, fd: int, timeout: float | None = None) -> bool:
        with self._anyio.move_on_after(timeout) as scope:
            await self._anyio.wait_readable(fd)
        return not scope.cancelled_caught

    async def writable(self, fd: int) -> None:
        await self._anyio.wait_writable(fd)

    async def in_thread(self, job: Job) -> Any:
        return await self._thread(job, limiter=None)

    async def search(self, job: Job) -> Any:
        return await self._thread(job, limiter=self._limiter("fastports searching", SEARCHING))

    async def apart(self, job: Job, *, prompt: bool = False) -> Any:
        limiter = self._limiter("fastports apart", APART)
        with self._anyio.CancelScope(shield=not prompt):
            return await self._thread(job, limiter=limiter, abandon_on_cancel=prompt)

    async def _thread(self, job: Job, **options: Any) -> Any:
        try:
            return await self._anyio.to_thread.run_sync(job, **options)
        except BaseException:
            _in_the_background(job.drop())
            raise

    def _limiter(self, name: str, threads: int) -> Any:
        return _of_run(name, lambda: self._anyio.CapacityLimiter(threads))

    async def shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._anyio.CancelScope(shield=True):
            return await coroutine
        raise AssertionError("a scope that nobody cancels swallows nothing")


_kept_by_runs: dict[str, Any] = {}


def _of_run(name: str, make: Callable[[], Any]) -> Any:
    """What this run of the loop keeps under a name; made by the first who asks."""
    from anyio.lowlevel import RunVar

    kept = _kept_by_runs.get(name)
    if kept is None:
        kept = _kept_by_runs.setdefault(name, RunVar(name))
    try:
        return kept.get()
    except LookupError:
        made = make()
        kept.set(made)
        return made
