"""The same verbs for event loops: asyncio, uvloop and, with the extra ``anyio``, trio.

>>> import asyncio
>>> from fastports import aio
>>> async def main() -> int:
...     async with aio.allocate(8) as block:
...         return len(block)
>>> asyncio.run(main())
8

A search that promises to be over within some 200 us keeps the loop's thread; every other one goes
to a worker thread, and what talks to a cluster registry to a thread apart from those. Whoever
cancels a call finds nothing left of it: no hold, no record, no child.
"""

from __future__ import annotations

from . import allocator, loops
from . import block as blocks
from ._core import FOUND
from .allocator import _UNSET, Patience
from .block import searched
from .errors import FastportsError, PortsUnavailable, PrivilegedPort, RegistryError
from .events import refused
from .loops import Job
from .ranges import PortRange
from .request import check_size, check_timeout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Coroutine,
        Generator,
        Iterable,
        Mapping,
        Sequence,
    )
    from typing import Any, TypeVar

    import numpy
    import numpy.typing

    from ._core import Search
    from .aio_child import Child
    from .allocator import Pacing, _Unset
    from .command import Text
    from .handoff import Stream
    from .loops import Loop
    from .ranges import RangeLike
    from .registry import Registry
    from .request import Request

    T = TypeVar("T")

__all__ = ["Allocator", "PortBlock", "allocate", "allocate_many", "probe", "reserve", "spawn"]

# What may keep the loop's thread. On Linux 6.18 a hold takes 4 us, a busy port 0.7 us, a whole
# call for one port 21 us, for 16 ports 84 us, for 32 145 us; the hop to a worker thread and back
# takes about 100 us. How many sockets are wanted is known beforehand; how many ports are busy is
# not, so the search starts here with a number of binds to spend, and a worker goes on with it.
_SOCKETS = 24
_BINDS_FOR_ONE = 128  # nearly all of them of busy ports
_BINDS = 40


class PortBlock(blocks.PortBlock):
    """A :class:`fastports.PortBlock` that ``async with`` takes too.

    Everything else is as there: what acts on the hold alone is quick and needs no ``await``.
    :meth:`spawn` and, with a cluster registry, :meth:`release` do block; use
    :func:`fastports.aio.spawn` and :meth:`aclose` in coroutines.
    """

    __slots__ = ()

    async def aclose(self) -> None:
        """:meth:`release`, without blocking the loop; not kept from it by a cancellation."""
        if self._registry is None or self.released:
            self.release()
            return
        loop = loops.current()
        await loop.shielded(loop.apart(Job(self.release)))

    async def __aenter__(self) -> PortBlock:
        self._acting()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class _OneBlock:
    """What :meth:`Allocator.allocate` returns: to be awaited, or entered by ``async with``."""

    __slots__ = ("_block", "_call")

    def __init__(self, call: Coroutine[Any, Any, PortBlock]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, PortBlock]:
        return self._call.__await__()

    async def __aenter__(self) -> PortBlock:
        self._block = await self._call
        return self._block

    async def __aexit__(self, *exc: object) -> None:
        await self._block.aclose()


class _ManyBlocks:
    """What :meth:`Allocator.allocate_many` returns: to be awaited, or entered by ``async with``."""

    __slots__ = ("_blocks", "_call")

    def __init__(self, call: Coroutine[Any, Any, dict[str, PortBlock]]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, dict[str, PortBlock]]:
        return self._call.__await__()

    async def __aenter__(self) -> dict[str, PortBlock]:
        self._blocks = await self._call
        return self._blocks

    async def __aexit__(self, *exc: object) -> None:
        left = list(self._blocks.values())
        loop = loops.current()
        if any(block._registry is not None for block in left):
            await loop.shielded(loop.apart(Job(lambda: _release_all(left))))
        else:
            _release_all(left)


def _release_all(left: Iterable[blocks.PortBlock]) -> None:
    error: BaseException | None = None
    for block in left:
        try:
            block.release()
        except RegistryError as exc:  # the ports are given back all the same
            error = error or exc
    if error is not None:
        raise error


class _Policy(allocator.Allocator):
    _block = PortBlock


class Allocator:
    """Allocates ports with shared settings, for coroutines of any number of loops at once.

    Parameters and errors, also those of the methods, are the ones of :class:`fastports.Allocator`;
    what the methods return has to be awaited. What :meth:`allocate`, :meth:`reserve` and
    :meth:`allocate_many` return can also be entered by ``async with``, which releases at its end.

    Notes
    -----
    Up to 24 sockets (ports, times two for ``protocol="both"``), without a cluster registry and
    without ``rng``: the search begins in the loop's thread, for at most 128 binds (one port) or 40
    (several), and at most 8 searches begin in one turn of the loop. A search that is not over by
    then goes on in a worker thread. Everything else is done in a worker thread from the start; with
    a registry in one of at most 16 threads apart, so that one that does not answer keeps no worker.

    Cancelled, a call without a cluster registry waits for its worker thread (milliseconds) and
    leaves nothing. With one it returns at once, and the thread takes back what it comes to record.
    Waiting under ``timeout=`` happens in the loop, not in a thread.
    """

    def __init__(
        self,
        *,
        range: RangeLike | None = None,
        registry: Registry | None = None,
        host: str | None = None,
        protocol: str = "tcp",
        rng: numpy.random.Generator | None = None,
        retry: Pacing | None = None,
        include_reserved: bool = False,
    ) -> None:
        self._policy = _Policy(
            range=range,
            registry=registry,
            host=host,
            protocol=protocol,
            rng=rng,
            retry=retry,
            include_reserved=include_reserved,
        )

    def __repr__(self) -> str:
        return f"<aio.{repr(self._policy)[1:].removeprefix('_Policy').lstrip()}"

    @property
    def registry(self) -> Registry | None:
        """The cluster registry given, or None."""
        return self._policy.registry

    def allocate(
        self,
        size: int = 1,
        *,
        range: RangeLike | None = None,
        protocol: str | None = None,
        host: str | _Unset | None = _UNSET,
        timeout: float | None = None,
        label: str = "",
        metadata: Mapping[str, object] | None = None,
        rng: numpy.random.Generator | None = None,
        candidates: object = None,
    ) -> _OneBlock:
        """Find ``size`` contiguous free ports and hold them; see :meth:`Allocator.allocate`.

        Returns
        -------
        awaitable of PortBlock, and asynchronous context manager
        """

        def ask() -> Request:
            return self._policy._request(
                check_size(size),
                range,
                protocol,
                host,
                label,
                metadata,
                rng,
                candidates,
            )

        return _OneBlock(self._one(ask, timeout))

    def reserve(
        self,
        ports: RangeLike,
        *,
        protocol: str | None = None,
        host: str | _Unset | None = _UNSET,
        timeout: float | None = None,
        label: str = "",
        metadata: Mapping[str, object] | None = None,
    ) -> _OneBlock:
        """Hold exactly this port, or this range of ports; see :meth:`Allocator.reserve`.

        Returns
        -------
        awaitable of PortBlock, and asynchronous context manager
        """

        def ask() -> Request:
            exact = PortRange(ports)
            return self._policy._request(
                len(exact), exact, protocol, host, label, metadata, None, None, exact=True
            )

        return _OneBlock(self._one(ask, timeout))

    def allocate_many(
        self,
        sizes: Mapping[str, int],
        *,
        range: RangeLike | None = None,
        protocol: str | None = None,
        host: str | _Unset | None = _UNSET,
        timeout: float | None = None,
        label: str = "",
        metadata: Mapping[str, object] | None = None,
        rng: numpy.random.Generator | None = None,
    ) -> _ManyBlocks:
        """Hold several disjoint blocks, all or none; see :meth:`Allocator.allocate_many`.

        Returns
        -------
        awaitable of dict[str, PortBlock], and asynchronous context manager
        """
        policy = self._policy

        async def call() -> dict[str, PortBlock]:
            loop = loops.current()
            await loop.turn()

            async def attempt(deadline: float | None) -> dict[str, PortBlock]:
                job = Job(
                    lambda: policy._attempt_many(request, wanted, deadline),
                    lambda found: _release_all(found.values()),
                )
                found: dict[str, PortBlock] = await _anywhere(loop, policy.registry, job)
                return found

            try:
                request, wanted = policy._request_many(
                    sizes, range, protocol, host, label, metadata, rng
                )
                return await self._wait(loop, request, timeout, attempt)
            except FastportsError as exc:
                refused(exc)
                raise

        return _ManyBlocks(call())

    async def probe(
        self,
        candidates: object,
        *,
        protocol: str | None = None,
        host: str | _Unset | None = _UNSET,
    ) -> numpy.typing.NDArray[numpy.int8]:
        """What can be said of ports at this moment; see :meth:`Allocator.probe`. In a worker."""
        states: numpy.typing.NDArray[numpy.int8] = await loops.current().search(
            Job(lambda: self._policy.probe(candidates, protocol=protocol, host=host))
        )
        return states

    # --- how ---

    async def _one(self, ask: Callable[[], Request], timeout: float | None) -> PortBlock:
        loop = loops.current()
        await loop.turn()

        def attempt(deadline: float | None) -> Coroutine[Any, Any, PortBlock]:
            return self._attempt(loop, request, deadline)

        try:
            request = ask()
            return await self._wait(loop, request, timeout, attempt)
        except FastportsError as exc:
            refused(exc)
            raise

    async def _wait(
        self,
        loop: Loop,
        request: Request,
        timeout: float | None,
        attempt: Callable[[float | None], Awaitable[T]],
    ) -> T:
        timeout = check_timeout(timeout)
        if timeout is None:
            return await attempt(None)
        patience = Patience(request, timeout, self._policy._retry)
        while True:
            try:
                return await attempt(patience.deadline)
            except PrivilegedPort:
                raise
            except PortsUnavailable as exc:
                pause = patience.after(exc)
            await loop.sleep(pause)
            await loop.turn()

    async def _attempt(self, loop: Loop, request: Request, deadline: float | None) -> PortBlock:
        policy = self._policy
        registry = policy.registry
        search: Search | None = None
        sockets = request.size * (2 if request.bits == 3 else 1)
        if registry is None and request.rng is None and sockets <= _SOCKETS:
            search = policy._begin(request, request.size, request.size, 1)
            try:
                done = search.run_briefly(_BINDS_FOR_ONE if request.size == 1 else _BINDS) == FOUND
            except BaseException:
                _give_up(search)
                raise
            if done:
                return policy._attempt(request, deadline, search)  # type: ignore[return-value]
        job = Job(
            lambda: policy._attempt(request, deadline, search),
            PortBlock.release,
            None if search is None else lambda: _give_up(search),
        )
        block: PortBlock = await _anywhere(loop, registry, job)
        return block


async def _anywhere(loop: Loop, registry: Registry | None, job: Job) -> Any:
    """Do it in a worker thread, or where a registry may take its time."""
    if registry is None:
        return await loop.search(job)
    return await loop.apart(job, prompt=True)


def _give_up(search: Search) -> None:
    search.abandon()
    search.close()
    searched(search)


async def spawn(
    block: blocks.PortBlock,
    argv: Sequence[Text],
    *,
    handoff: str = "auto",
    wait: str | Iterable[int] | None = "listen",
    timeout: float | None = 30.0,
    env: Mapping[str, str] | Mapping[bytes, bytes] | None = None,
    cwd: Text | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    **options: Any,
) -> Child:
    """Start a program on the ports of a block and wait until it listens on them.

    Parameters and errors are those of :func:`fastports.handoff.spawn`; ``options`` are the rest.
    The start takes a worker thread for a millisecond; waiting, for the ports and for the end, takes
    none. Cancelled at any time, it leaves no child.

    Returns
    -------
    fastports.aio_child.Child
        What quacks like ``asyncio.subprocess.Process``.
    """
    from . import aio_child  # and with it the hand-off, 2 ms

    return await aio_child.spawn(
        block,
        argv,
        wait=wait,
        timeout=timeout,
        handoff=handoff,
        env=env,
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        **options,
    )


# The allocator behind the functions below: no setting of its own, one for the process.
_default = Allocator()
allocate = _default.allocate
reserve = _default.reserve
allocate_many = _default.allocate_many
probe = _default.probe
