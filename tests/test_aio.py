"""The awaitable face on asyncio, uvloop and trio, with real sockets and processes."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from worlds import ROOMY, network

import fastports
from fastports import aio, loops
from fastports.block import _searching
from fastports.child import _lingering, sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fastports.registry import Entry, Recordable

T = TypeVar("T")
Run = Callable[[Callable[[], Coroutine[Any, Any, T]]], T]

SERVER = [sys.executable, "-m", "http.server", "{port}"]
# binds with SO_REUSEADDR and listens, in some 20 ms
LISTEN = (
    "import socket, sys, time\n"
    "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); time.sleep(60)\n"
)
LISTENER = [sys.executable, "-S", "-c", LISTEN, "{port}"]


def _asyncio(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(function())


def _uvloop(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    uvloop = pytest.importorskip("uvloop")
    loop = uvloop.new_event_loop()
    try:
        result: T = loop.run_until_complete(function())
        loop.run_until_complete(loop.shutdown_default_executor())
        return result
    finally:
        loop.close()


def _trio(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    pytest.importorskip("trio")
    anyio = pytest.importorskip("anyio")
    result: T = anyio.run(function, backend="trio")
    return result


@pytest.fixture(autouse=True, scope="module")
def used_loops() -> None:
    """What stays: libuv's pipe for signals, numpy's threads, and trio's for ten seconds."""
    import importlib.util

    import numpy  # noqa: F401

    async def nothing() -> None:
        pass

    for name, run in (("uvloop", _uvloop), ("trio", _trio)):
        if importlib.util.find_spec(name):
            run(nothing)
    if "trio" in sys.modules:
        from trio._core import _thread_cache

        setattr(_thread_cache, "IDLE_TIMEOUT", 0.01)  # noqa: B010


@pytest.fixture(params=[_asyncio, _uvloop, _trio], ids=["asyncio", "uvloop", "trio"])
def run(request: pytest.FixtureRequest) -> Run[Any]:
    chosen: Run[Any] = request.param
    return chosen


@pytest.fixture
def free() -> Iterator[fastports.PortRange]:
    """A stretch of 64 ports that were free a moment ago."""
    with fastports.allocate(64) as block:
        stretch = fastports.PortRange(block.first, block.last)
    yield stretch


def mine() -> list[Entry]:
    return [entry for entry in fastports.entries() if entry.pid == os.getpid()]


def children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            continue  # that thread ended just now
    return sorted(found)


class Before:
    """What this process has at the start of a test."""

    def __init__(self) -> None:
        self._ports = [entry.first for entry in mine()]
        self.children = children()

    def is_now(self) -> bool:
        ports = [entry.first for entry in mine()]
        return ports == self._ports and children() == self.children


def can_bind(port: int, *options: int) -> bool:
    with socket.socket() as sock:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def until(condition: Callable[[], bool], pause: Callable[[float], Awaitable[None]]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await pause(0.002)


def all_loops(function: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[Run[None]], None]:
    """A test of this coroutine on every loop."""

    def test(run: Run[None]) -> None:
        run(function)

    test.__doc__ = function.__doc__
    return test


# --- blocks ---------------------------------------------------------------------------------------


@all_loops
async def test_a_block_is_held_from_the_await_to_the_end_of_async_with() -> None:
    async with aio.allocate(8, label="aio") as block:
        assert len(block) == 8
        assert block.label == "aio"
        assert not can_bind(block[3], socket.SO_REUSEADDR)
        assert block.first in [entry.first for entry in mine()]
    assert block.released
    assert can_bind(block[3])
    assert block.first not in [entry.first for entry in mine()]


@all_loops
async def test_a_block_can_all_that_a_block_of_the_synchronous_face_can() -> None:
    block = await aio.allocate(2, protocol="both")
    assert isinstance(block, fastports.PortBlock)
    assert isinstance(block, aio.PortBlock)
    assert len(block.filenos()) == 4
    block.open_door()
    assert can_bind(block.first, socket.SO_REUSEADDR)
    block.close_door()
    block.close_holds()
    assert block.state == "closed"
    with block:
        assert list(block) == [block.first, block.last]
    assert block.released
    await block.aclose()  # idempotent
    with pytest.raises(fastports.BlockReleased):
        async with block:
            pass


@all_loops
async def test_reserve_takes_exactly_what_was_named_or_says_what_is_there() -> None:
    async with aio.allocate(1) as block:
        with pytest.raises(fastports.PortsUnavailable) as caught:
            await aio.reserve(block.first)
        assert caught.value.cause == "bound"
    async with aio.reserve(block.first) as again:
        assert list(again) == [block.first]


@all_loops
async def test_several_blocks_come_all_or_none_and_go_together() -> None:
    async with aio.allocate_many({"http": 1, "kv": 1, "nixl": 8}, label="w") as plan:
        assert [len(block) for block in plan.values()] == [1, 1, 8]
        assert {block.label for block in plan.values()} == {"w-http", "w-kv", "w-nixl"}
        assert len({port for block in plan.values() for port in block}) == 10
    assert all(block.released for block in plan.values())
    with pytest.raises(fastports.InvalidRequest):
        await aio.allocate_many({})


@all_loops
async def test_a_bad_request_is_refused_at_the_await() -> None:
    for call in (
        aio.allocate(0),
        aio.allocate(1, protocol="sctp"),
        aio.allocate(1, timeout=-1.0),
        aio.reserve("70000"),
    ):
        with pytest.raises(fastports.InvalidRequest):
            await call


@all_loops
async def test_probe_says_what_is_on_the_ports() -> None:
    async with aio.allocate(1) as block:
        states = await aio.probe([block.first])
        assert states.tolist() == [fastports.PortState.BUSY]


def test_a_search_too_long_for_the_loop_is_ended_by_a_worker_and_is_complete(
    run: Run[None], free: fastports.PortRange
) -> None:
    """C13 and C06: the one free block is found however many ports have to be looked at before."""

    async def main() -> None:
        threads: set[int] = set()

        class Watched(aio._Policy):
            def _attempt(self, *args: Any) -> fastports.PortBlock:
                threads.add(threading.get_ident())
                return super()._attempt(*args)

        for size in (1, 4):
            allocator = aio.Allocator(range=free)
            allocator._policy = Watched(range=free)
            blocks = [fastports.reserve(port) for port in free]
            try:
                with pytest.raises(fastports.PortsUnavailable) as caught:
                    await allocator.allocate(size)
                assert caught.value.busy >= 64 // size
                for block in blocks[17 : 17 + size]:
                    block.release()
                async with allocator.allocate(size) as found:
                    assert found.first == free.first + 17
            finally:
                for block in blocks:
                    block.release()
        assert threads - {threading.get_ident()}

    run(main)


def test_nothing_but_small_searches_keeps_the_thread_of_the_loop(run: Run[None]) -> None:
    async def main() -> None:
        threads: list[bool] = []
        here = threading.get_ident()

        class Watched(aio._Policy):
            def _attempt(self, *args: Any) -> fastports.PortBlock:
                threads.append(threading.get_ident() == here)
                return super()._attempt(*args)

        allocator = aio.Allocator()
        allocator._policy = Watched()
        for size, protocol in ((1, "tcp"), (24, "tcp"), (12, "both"), (25, "tcp"), (13, "both")):
            async with allocator.allocate(size, protocol=protocol):
                pass
        assert threads == [True, True, True, False, False]

    # where nobody else is in the way of a search: one that meets busy ports goes to a worker, too
    with network() if os.geteuid() == 0 else nullcontext():
        run(main)


def test_few_searches_are_in_worker_threads_at_once(run: Run[None]) -> None:
    """More of them would take the interpreter away from the loop, and gain nothing."""

    async def main() -> None:
        at_it: set[int] = set()
        most: list[int] = []

        class Watched(aio._Policy):
            def _attempt(self, *args: Any) -> fastports.PortBlock:
                at_it.add(threading.get_ident())
                most.append(len(at_it))
                try:
                    time.sleep(0.002)  # as long as a search among many busy ports
                    return super()._attempt(*args)
                finally:
                    at_it.remove(threading.get_ident())

        allocator = aio.Allocator()
        allocator._policy = Watched()

        async def one() -> None:
            async with allocator.allocate(30):
                pass

        await together(*[one] * 12)
        assert len(most) == 12
        assert max(most) <= loops.SEARCHING

    run(main)


def test_a_search_cancelled_while_it_waits_for_a_worker_is_given_up(
    run: Run[None], free: fastports.PortRange
) -> None:
    async def main() -> None:
        go = threading.Event()

        class Slow(aio._Policy):
            def _attempt(self, *args: Any) -> fastports.PortBlock:
                go.wait(10)
                return super()._attempt(*args)

        allocator = aio.Allocator()
        allocator._policy = Slow()
        blocks = [fastports.reserve(port) for port in free]
        before = Before()

        async def one() -> None:
            async with allocator.allocate(30):
                pass

        async def late() -> None:
            async def search() -> None:
                await aio.allocate(1, range=free)

            try:
                await cancelled(search, lambda: bool(_searching))
                assert not _searching
            finally:
                go.set()

        await together(*[one] * loops.SEARCHING, late)
        assert before.is_now()
        for block in blocks:
            block.release()

    run(main)


async def cancelled(
    function: Callable[[], Coroutine[Any, Any, None]], when: Callable[[], bool]
) -> None:
    """Call it, and cancel it once that is so."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(function)
            await until(when, trio.sleep)
            nursery.cancel_scope.cancel()
    else:
        task = asyncio.ensure_future(function())
        await until(when, asyncio.sleep)
        task.cancel()
        await asyncio.wait([task])


def test_five_hundred_allocations_at_once_are_disjoint() -> None:
    """C05."""

    async def main() -> None:
        allocator = aio.Allocator(range="20000-20899")
        blocks = await asyncio.gather(*(allocator.allocate(1) for _ in range(500)))
        assert len({block.first for block in blocks}) == 500
        for block in blocks:
            block.release()

    asyncio.run(main())


def test_few_searches_are_done_in_one_turn_of_the_loop() -> None:
    async def main() -> None:
        turns: list[int] = []
        count = 0

        async def one() -> None:
            async with aio.allocate(1):
                turns.append(count)

        tasks = [asyncio.create_task(one()) for _ in range(100)]
        while not all(task.done() for task in tasks):
            count += 1
            await asyncio.sleep(0)
        assert max(turns.count(turn) for turn in turns) <= 8
        assert len(turns) == 100

    asyncio.run(main())


def test_whoever_is_cancelled_in_the_queue_does_not_stop_it() -> None:
    async def main() -> None:
        async def one() -> int:
            async with aio.allocate(1) as block:
                return block.first

        tasks = [asyncio.create_task(one()) for _ in range(60)]
        await asyncio.sleep(0)
        for task in tasks[8:40]:
            task.cancel()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert sum(isinstance(result, int) for result in done) == 28

    asyncio.run(main())


def test_waiting_for_ports_leaves_the_loop_to_others(
    run: Run[None], free: fastports.PortRange
) -> None:
    async def main() -> None:
        block = fastports.reserve(free.first)
        threading.Timer(0.05, block.release).start()
        async with aio.reserve(free.first, timeout=10.0) as again:
            assert again.first == free.first
            with pytest.raises(fastports.AllocationTimeout) as caught:
                await aio.reserve(free.first, timeout=0.02)
            assert caught.value.busy == 1

    run(main)


# --- cancellation ---------------------------------------------------------------------------------


async def _anything(kind: int) -> None:
    if kind == 0:
        async with aio.allocate(1):
            await asyncio.sleep(60)
    elif kind == 1:
        async with aio.allocate(200, range=ROOMY):
            await asyncio.sleep(60)
    elif kind == 2:
        async with aio.allocate_many({"a": 3, "b": 40}):
            await asyncio.sleep(60)
    elif kind == 3:
        async with aio.allocate(1) as block:
            await aio.reserve(block.first, timeout=60)
    else:
        async with aio.allocate(1) as block, await aio.spawn(block, LISTENER) as child:
            await child.wait()


@pytest.mark.parametrize("new_loop", [_asyncio, _uvloop], ids=["asyncio", "uvloop"])
def test_a_hundred_cancellations_at_any_time_leave_nothing(new_loop: Run[None]) -> None:
    chance = random.Random(20417)
    before = Before()

    async def main() -> None:
        for number in range(100):
            kind = number % 5
            task = asyncio.ensure_future(_anything(kind))
            await asyncio.sleep(chance.random() * (0.04 if kind == 4 else 0.003))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert before.is_now()

    new_loop(main)


def test_a_hundred_cancellations_under_trio_leave_nothing() -> None:
    trio = pytest.importorskip("trio")
    chance = random.Random(20418)
    before = Before()

    async def anything(kind: int) -> None:
        if kind == 0:
            async with aio.allocate(1):
                await trio.sleep(60)
        elif kind == 1:
            async with aio.allocate(200, range=ROOMY):
                await trio.sleep(60)
        elif kind == 2:
            async with aio.allocate(1) as block:
                await aio.reserve(block.first, timeout=60)
        else:
            async with aio.allocate(1) as block, await aio.spawn(block, LISTENER) as child:
                await child.wait()

    async def main() -> None:
        for number in range(100):
            kind = number % 4
            with trio.move_on_after(chance.random() * (0.04 if kind == 3 else 0.003)):
                await anything(kind)
            assert before.is_now()

    trio.run(main)


def test_a_call_cancelled_before_a_worker_is_free_does_not_wait_for_one(
    free: fastports.PortRange,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool:
            loop.set_default_executor(pool)
            busy = threading.Event()
            blocks = [fastports.reserve(port) for port in free]
            job = loop.run_in_executor(None, busy.wait, 10)
            task = asyncio.ensure_future(aio.allocate(1, range=free))
            while not _searching:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not _searching
            busy.set()
            assert await job
            for block in blocks:
                block.release()

    asyncio.run(main())


def test_a_loop_that_is_given_up_leaves_nothing() -> None:
    async def wait(block: aio.PortBlock) -> None:
        async with block:
            await aio.reserve(block.first, timeout=60)

    async def spawn() -> None:
        async with aio.allocate(1) as block:
            await aio.spawn(block, ["sleep", "60"])

    before = Before()
    loop = asyncio.new_event_loop()
    block = loop.run_until_complete(aio.allocate(1).__aenter__())
    waiting = [loop.create_task(wait(block)), loop.create_task(spawn())]
    loop.run_until_complete(until(lambda: len(children()) > len(before.children), asyncio.sleep))
    loop.run_until_complete(loop.shutdown_default_executor())
    for task in waiting:
        setattr(task, "_log_destroy_pending", False)  # noqa: B010 - that is the point here
        task.get_coro().close()
    loop.close()
    del waiting, task
    assert before.is_now()


def test_a_search_that_no_worker_can_go_on_with_is_given_up() -> None:
    async def main() -> None:
        async with aio.allocate(1) as block:
            await asyncio.get_running_loop().shutdown_default_executor()
            before = Before()
            with pytest.raises(RuntimeError, match="shutdown"):
                await aio.reserve(block.first)
            assert before.is_now()

    asyncio.run(main())


# --- cluster registries ---------------------------------------------------------------------------


class Ledger:
    """A registry in memory whose answers can be held up."""

    def __init__(self) -> None:
        self.records: set[int] = set()
        self.threads: set[int] = set()
        self.asked = threading.Event()
        self.answer = threading.Event()
        self.answer.set()
        self.waited_for_nothing = False
        self.calls = 0
        self.released: list[int] = []

    def claim(
        self, blocks: Sequence[Recordable], *, search: tuple[int, int], timeout: float | None
    ) -> Collection[int]:
        self.threads.add(threading.get_ident())
        self.calls += 1
        self.asked.set()
        self.waited_for_nothing |= not self.answer.wait(10)
        self.records.update(block.first for block in blocks)
        return ()

    def release(self, blocks: Sequence[Recordable]) -> None:
        self.threads.add(threading.get_ident())
        self.records.difference_update(block.first for block in blocks)
        self.released += [block.first for block in blocks]

    def release_later(self, blocks: Sequence[Recordable]) -> None:
        self.release(blocks)

    def state(self, block: Recordable) -> str:
        return "held" if block.first in self.records else "degraded"

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def close(self) -> None:
        """Nothing to give back."""


def test_a_registry_is_never_asked_in_the_thread_of_the_loop(run: Run[None]) -> None:
    async def main() -> None:
        ledger = Ledger()
        allocator = aio.Allocator(registry=ledger)
        async with allocator.allocate(1) as block:
            assert ledger.records == {block.first}
        async with allocator.allocate_many({"a": 1, "b": 2}):
            assert len(ledger.records) == 2
        assert ledger.records == set()
        assert threading.get_ident() not in ledger.threads

    run(main)


def test_a_claim_that_is_cancelled_ends_at_once_and_is_taken_back() -> None:
    async def main() -> None:
        ledger = Ledger()
        allocator = aio.Allocator(registry=ledger)
        before = Before()
        calls: list[Awaitable[object]] = [allocator.allocate(1), allocator.allocate_many({"a": 2})]
        for call in calls:
            ledger.answer.clear()
            ledger.asked.clear()
            task = asyncio.ensure_future(call)
            await until(ledger.asked.is_set, asyncio.sleep)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not ledger.waited_for_nothing
            ledger.answer.set()
            await until(lambda: not ledger.records and before.is_now(), asyncio.sleep)

    asyncio.run(main())


def test_calls_that_wait_for_a_registry_take_few_threads_and_none_of_the_loop_s(
    run: Run[None],
) -> None:
    async def main() -> None:
        ledger = Ledger()
        allocator = aio.Allocator(registry=ledger)
        found: list[aio.PortBlock] = []

        async def claim() -> None:
            found.append(await allocator.allocate(1))

        async def others() -> None:
            await loops.current().sleep(0.0)
            await until(ledger.asked.is_set, loops.current().sleep)
            async with aio.allocate(30):  # needs a worker thread, and little room among others
                assert found == []
            at_it = [t for t in threading.enumerate() if t.ident in ledger.threads]
            assert 1 <= len(at_it) <= loops.APART
            ledger.answer.set()

        ledger.answer.clear()
        await together(*[claim] * 60, others)
        assert len(ledger.records) == 60

        async def release(block: aio.PortBlock) -> None:
            await block.aclose()

        await together(*(partial(release, block) for block in found))
        assert ledger.records == set()
        assert not ledger.waited_for_nothing

    run(main)


def test_a_claim_cancelled_while_it_waits_its_turn_is_never_made() -> None:
    async def main() -> None:
        ledger = Ledger()
        allocator = aio.Allocator(registry=ledger)
        ledger.answer.clear()
        tasks = [asyncio.ensure_future(allocator.allocate(1)) for _ in range(loops.APART)]
        await until(lambda: ledger.calls == loops.APART, asyncio.sleep)
        late = [asyncio.ensure_future(allocator.allocate(1)) for _ in range(5)]
        for _ in range(5):
            await asyncio.sleep(0)
        for task in late[:4]:
            task.cancel()
        await asyncio.wait(late[:4])
        ledger.answer.set()
        for block in await asyncio.gather(*tasks, late[4]):
            await block.aclose()
        assert ledger.calls == loops.APART + 1

    asyncio.run(main())


def test_a_release_that_waits_its_turn_is_done_before_the_loop_ends() -> None:
    ledger = Ledger()
    blocks: list[aio.PortBlock] = []

    async def main() -> None:
        allocator = aio.Allocator(registry=ledger)
        blocks.append(await allocator.allocate(1))
        ledger.answer.clear()
        waiting = [asyncio.ensure_future(allocator.allocate(1)) for _ in range(loops.APART)]
        await until(lambda: ledger.calls == loops.APART + 1, asyncio.sleep)
        tasks.append(asyncio.ensure_future(blocks[0].aclose()))
        tasks.extend(waiting)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not blocks[0].released
        asyncio.get_running_loop().call_later(0.05, ledger.answer.set)

    tasks: list[asyncio.Future[Any]] = []
    before = Before()
    asyncio.run(main())  # cancels what has not ended
    assert blocks[0].released
    assert blocks[0].first in ledger.released
    wait_until(lambda: not ledger.records and before.is_now())


def test_an_answer_that_comes_after_the_end_of_the_loop_is_taken_back() -> None:
    ledger = Ledger()
    ledger.answer.clear()
    before = Before()
    loop = asyncio.new_event_loop()

    async def call() -> None:
        await aio.Allocator(registry=ledger).allocate(1)

    task = loop.create_task(call())
    loop.run_until_complete(until(ledger.asked.is_set, asyncio.sleep))
    setattr(task, "_log_destroy_pending", False)  # noqa: B010 - that is the point here
    loop.close()
    ledger.answer.set()
    wait_until(lambda: ledger.records == set() and before.is_now())
    task.get_coro().close()
    assert ledger.calls == 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_release_is_not_kept_from_the_registry_by_a_cancellation(run: Run[None]) -> None:
    async def main() -> None:
        ledger = Ledger()
        block = await aio.Allocator(registry=ledger).allocate(1)
        if run is _trio:
            import anyio

            with anyio.CancelScope() as scope:
                async with block:
                    scope.cancel()
                    await anyio.sleep(60)
        else:
            task = asyncio.ensure_future(_sleep_in(block))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert block.released
        assert ledger.records == set()

    run(main)


async def _sleep_in(block: aio.PortBlock) -> None:
    async with block:
        await asyncio.sleep(60)


# --- children -------------------------------------------------------------------------------------


@all_loops
async def test_a_server_is_spawned_listens_and_is_ended() -> None:
    async with aio.allocate(1) as block:
        async with await aio.spawn(block, LISTENER) as child:
            assert child.returncode is None
            assert child.listened_after is not None
            assert child.block is block
            with socket.create_connection(("127.0.0.1", block.first), timeout=5):
                pass
            assert not can_bind(block.first, socket.SO_REUSEADDR)
        assert child.returncode == -signal.SIGTERM
        async with await aio.spawn(block, LISTENER) as child:  # again, behind the same hold
            child.kill()
            assert await child.wait() == -signal.SIGKILL


@all_loops
async def test_any_block_will_do_and_a_list_of_ports_to_wait_for() -> None:
    with fastports.allocate(2) as block:
        async with await aio.spawn(block, LISTENER, wait=[block.first]) as child:
            assert list(child.ports) == [block.first]
        with pytest.raises(fastports.InvalidRequest):
            await aio.spawn(block, LISTENER, wait=[1])
        with pytest.raises(FileNotFoundError):
            await aio.spawn(block, ["/nowhere/at/all"])


def test_waiting_for_children_takes_no_thread() -> None:
    async def main() -> None:
        async with aio.allocate(1) as block:

            async def one() -> int:
                async with await aio.spawn(block, ["sleep", "60"], wait=None) as child:
                    pids.append(child.pid)
                    return await child.wait()

            pids: list[int] = []
            first = asyncio.create_task(one())
            await until(lambda: len(pids) == 1, asyncio.sleep)
            before = _python_threads()
            tasks = [first, *(asyncio.create_task(one()) for _ in range(7))]
            await until(lambda: len(pids) == 8, asyncio.sleep)
            # the loop's pool may have grown to start them, up to its size; nobody is at work in it
            idle = {"asyncio"}
            assert {name.partition("_")[0] for name in _python_threads() - before} <= idle
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*tasks) == [-signal.SIGKILL] * 8

    asyncio.run(main())


def _python_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@all_loops
async def test_several_tasks_wait_for_one_child() -> None:
    async with (
        aio.allocate(1) as block,
        await aio.spawn(block, ["sleep", "60"], wait=None) as child,
    ):
        codes: list[int] = []

        async def wait() -> None:
            codes.append(await child.wait())

        async def kill() -> None:
            child.kill()

        await together(wait, wait, wait, kill)
        assert codes == [-signal.SIGKILL] * 3


async def together(*functions: Callable[[], Coroutine[Any, Any, None]]) -> None:
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        async with trio.open_nursery() as nursery:
            for function in functions:
                nursery.start_soon(function)
    else:
        await asyncio.gather(*(function() for function in functions))


@all_loops
async def test_pipes_carry_more_than_they_hold_in_both_directions() -> None:
    data = random.Random(1).randbytes(3_000_000)
    async with aio.allocate(1) as block:
        child = await aio.spawn(
            block,
            ["sh", "-c", "cat; echo done >&2"],
            wait=None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert await child.communicate(data) == (data, b"done\n")
        assert child.returncode == 0


@all_loops
async def test_pipes_are_read_and_written_piece_by_piece() -> None:
    async with (
        aio.allocate(1) as block,
        await aio.spawn(
            block, ["cat"], wait=None, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is None
        child.stdin.write(b"one\ntw")
        assert await child.stdout.readline() == b"one\n"
        child.stdin.writelines([b"o\n", b"x" * 10])
        assert await child.stdout.readexactly(4) == b"two\n"
        assert await child.stdout.read(100) == b"x" * 10
        big = b"y\n" * 400_000

        async def write() -> None:
            assert child.stdin is not None
            child.stdin.write(big)
            await child.stdin.drain()
            child.stdin.close()
            await child.stdin.wait_closed()
            assert child.stdin.is_closing()

        lines = 0

        async def read() -> None:
            nonlocal lines
            assert child.stdout is not None
            async for line in child.stdout:
                assert line == b"y\n"
                lines += 1

        await together(write, read)
        assert lines == 400_000
        assert child.stdout.at_eof()
        with pytest.raises(EOFError):
            await child.stdout.readexactly(1)
        with pytest.raises(ValueError):
            child.stdin.write(b"more")
        assert await child.wait() == 0


@all_loops
async def test_writing_to_a_child_that_has_gone_is_a_broken_pipe() -> None:
    async with aio.allocate(1) as block:
        async with await aio.spawn(block, ["true"], wait=None, stdin=subprocess.PIPE) as child:
            await child.wait()
            assert child.stdin is not None
            with pytest.raises(BrokenPipeError):
                child.stdin.write(b"is anybody there?")
        child = await aio.spawn(block, ["true"], wait=None, stdin=subprocess.PIPE)
        assert await child.communicate(b"x" * 1_000_000) == (None, None)


@all_loops
async def test_a_child_that_ends_or_dawdles_is_told_and_leaves_nothing() -> None:
    before = Before()
    async with aio.allocate(1) as block:
        with pytest.raises(fastports.HandoffError) as caught:
            await aio.spawn(block, ["sh", "-c", "echo sorry >&2; exit 3"], stderr=subprocess.PIPE)
        assert caught.value.returncode == 3
        assert caught.value.stderr == "sorry"
        with pytest.raises(fastports.HandoffError) as caught:
            await aio.spawn(block, ["sleep", "60"], timeout=0.05)
        assert caught.value.port == block.first
        assert children() == before.children
        assert not block.released
    assert before.is_now()


@all_loops
async def test_stop_ends_a_stubborn_child_and_its_descendants() -> None:
    script = "trap '' TERM; sleep 60 & echo $!; while :; do wait; done"
    async with aio.allocate(1) as block:
        child = await aio.spawn(
            block, ["sh", "-c", script], wait=None, stdout=subprocess.PIPE, grace=0.05
        )
        async with child:
            assert child.stdout is not None
            grandchild = int(await child.stdout.readline())
            assert await child.stop() == -signal.SIGKILL
            assert await child.stop() == -signal.SIGKILL
            assert not os.path.exists(f"/proc/{grandchild}/fd/0")
    await until(group_is_gone, loops.current().sleep)


def group_is_gone() -> bool:
    """A killed grandchild is a member of its group until its new parent has reaped it."""
    sweep()
    return not _lingering


# --- imports --------------------------------------------------------------------------------------


def _python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, text=True, capture_output=True
    ).stdout


def test_no_event_loop_is_imported_before_one_runs() -> None:
    code = (
        "import fastports, sys\n"
        "assert 'fastports.aio' not in sys.modules\n"
        "import fastports.aio\n"
        "heavy = {'asyncio', 'anyio', 'trio', 'typing', 'socket', 'subprocess'}\n"
        "print(fastports.aio.allocate.__name__, heavy & {*sys.modules})"
    )
    assert _python(code) == "allocate set()\n"


def test_a_call_outside_a_loop_says_so() -> None:
    call = aio.allocate(1)
    with pytest.raises(RuntimeError, match="no event loop"):
        call.__await__().send(None)


def test_trio_without_anyio_names_the_extra() -> None:
    pytest.importorskip("trio")
    code = (
        "import sys, trio, fastports.aio\n"
        "sys.modules['anyio'] = None\n"
        "async def main():\n"
        "    try:\n        await fastports.aio.allocate(1)\n"
        "    except RuntimeError as exc:\n        print(exc)\n"
        "trio.run(main)\n"
    )
    assert "fastports[anyio]" in _python(code)


# --- documents ------------------------------------------------------------------------------------


def test_the_example_of_the_document_runs_without_error_or_warning(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "aio.md").read_text()
    for example in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        script = tmp_path / "example.py"
        script.write_text(example)
        done = subprocess.run(
            [sys.executable, "-W", "error", str(script)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "listens on" in done.stdout
        assert "Warning" not in done.stderr
