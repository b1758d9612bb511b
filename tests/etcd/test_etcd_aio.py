"""The awaitable face with a real etcd: the loop is never kept, a cancellation leaves no key."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import sys
from collections.abc import Awaitable, Callable

import pytest
from worlds import ROOMY

import fastports
from fastports import aio
from fastports.child import sweep
from fastports.etcd import EtcdRegistry

from .servers import Etcd, wait_for

# binds with SO_REUSEADDR and listens, in some 20 ms
LISTEN = (
    "import socket, sys, time\n"
    "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); time.sleep(60)\n"
)
LISTENER = [sys.executable, "-S", "-c", LISTEN, "{port}"]


@pytest.fixture(autouse=True, scope="module")
def used_loops() -> None:
    """What stays: libuv's pipe for signals, numpy's threads, and trio's for ten seconds."""
    import numpy  # noqa: F401

    async def nothing() -> None:
        pass

    if importlib.util.find_spec("uvloop"):
        runner("uvloop")(nothing())
    if importlib.util.find_spec("trio"):
        import trio
        from trio._core import _thread_cache

        trio.run(nothing)
        setattr(_thread_cache, "IDLE_TIMEOUT", 0.01)  # noqa: B010


def children() -> list[int]:
    sweep()
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return sorted(found)


def mine() -> list[int]:
    return [entry.first for entry in fastports.entries() if entry.pid == os.getpid()]


def test_a_frozen_etcd_keeps_neither_the_loop_nor_its_worker_threads(
    own_etcd: Etcd, namespace: str
) -> None:
    """More claims wait for the answer than the loop has worker threads; those stay everybody's."""

    async def main() -> None:
        with EtcdRegistry(own_etcd.endpoint, namespace=namespace, timeout=20.0) as registry:
            allocator = aio.Allocator(registry=registry)
            async with allocator.allocate(1):  # connected, and with a lease
                pass
            own_etcd.freeze()
            calls: list[Awaitable[object]] = [allocator.allocate(1) for _ in range(40)]
            calls += [allocator.allocate_many({"a": 1, "b": 2}) for _ in range(10)]
            waiting = [asyncio.ensure_future(call) for call in calls]
            loop = asyncio.get_running_loop()
            for _ in range(100):
                await asyncio.sleep(0.001)
            assert await asyncio.wait_for(loop.run_in_executor(None, lambda: "ok"), 5) == "ok"
            async with aio.allocate(100, range=ROOMY) as block:  # takes a worker thread
                assert len(block) == 100
            assert not any(call.done() for call in waiting)
            own_etcd.thaw()
            for found in await asyncio.gather(*waiting):
                assert isinstance(found, (aio.PortBlock, dict))
                for each in found.values() if isinstance(found, dict) else (found,):
                    await each.aclose()
        assert own_etcd.keys() == []
        assert mine() == []

    asyncio.run(main())


def test_a_release_into_a_frozen_etcd_keeps_neither_the_loop_nor_its_worker_threads(
    own_etcd: Etcd, namespace: str
) -> None:
    async def main() -> None:
        with EtcdRegistry(own_etcd.endpoint, namespace=namespace, timeout=20.0) as registry:
            allocator = aio.Allocator(registry=registry)
            blocks = await asyncio.gather(*(allocator.allocate(1) for _ in range(40)))
            plan = await allocator.allocate_many({"a": 1, "b": 2})
            own_etcd.freeze()
            going = [asyncio.ensure_future(block.aclose()) for block in blocks]
            going += [asyncio.ensure_future(block.aclose()) for block in plan.values()]
            loop = asyncio.get_running_loop()
            for _ in range(100):
                await asyncio.sleep(0.001)
            assert await loop.run_in_executor(None, lambda: "ok") == "ok"
            # a release waits two seconds for etcd, and sixteen are at it at once
            assert sum(release.done() for release in going) <= 16
            own_etcd.thaw()
            await asyncio.gather(*going)
            assert all(block.released for block in blocks)
        assert own_etcd.keys() == []
        assert mine() == []

    asyncio.run(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_hundred_cancellations_at_any_time_leave_no_key_no_hold_and_no_child(
    loop: str, registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    chance = random.Random(20419)
    allocator = aio.Allocator(registry=registry)

    async def anything(kind: int) -> None:
        if kind == 0:
            async with allocator.allocate(1):
                await asyncio.sleep(60)
        elif kind == 1:
            async with allocator.allocate(130, range=ROOMY):  # a nested transaction
                await asyncio.sleep(60)
        elif kind == 2:
            async with allocator.allocate_many({"a": 3, "b": 40}):
                await asyncio.sleep(60)
        elif kind == 3:
            async with allocator.allocate(1) as block:
                await allocator.reserve(block.first, timeout=60)
        else:
            async with allocator.allocate(1) as block, await aio.spawn(block, LISTENER) as child:
                await child.wait()

    async def main() -> None:
        async with allocator.allocate(1):  # connected, and with a lease
            pass
        for number in range(100):
            kind = number % 5
            task = asyncio.ensure_future(anything(kind))
            await asyncio.sleep(chance.random() * (0.06 if kind == 4 else 0.008))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    before = children()
    runner(loop)(main())
    wait_for(lambda: not etcd_server.keys(f"v1/{namespace}/"), what="no key is left")
    wait_for(lambda: mine() == [], what="no hold is left")
    assert children() == before


def runner(loop: str) -> Callable[[object], None]:
    if loop == "asyncio":
        return asyncio.run  # type: ignore[return-value]
    uvloop = pytest.importorskip("uvloop")

    def run(main: object) -> None:
        made = uvloop.new_event_loop()
        try:
            made.run_until_complete(main)
            made.run_until_complete(made.shutdown_default_executor())
        finally:
            made.close()

    return run


def test_a_hundred_cancellations_under_trio_leave_no_key(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    trio = pytest.importorskip("trio")
    pytest.importorskip("anyio")
    chance = random.Random(20420)
    allocator = aio.Allocator(registry=registry)

    async def main() -> None:
        async with allocator.allocate(1):
            pass
        for number in range(100):
            with trio.move_on_after(chance.random() * 0.008):
                if number % 2:
                    async with allocator.allocate(1):
                        await trio.sleep(60)
                else:
                    async with allocator.allocate_many({"a": 3, "b": 40}):
                        await trio.sleep(60)

    trio.run(main)
    wait_for(lambda: not etcd_server.keys(f"v1/{namespace}/"), what="no key is left")
    wait_for(lambda: mine() == [], what="no hold is left")


def test_what_etcd_never_answered_is_cancelled_at_once_and_taken_back_later(
    own_etcd: Etcd, namespace: str
) -> None:
    async def main() -> None:
        with EtcdRegistry(own_etcd.endpoint, namespace=namespace, timeout=20.0) as registry:
            allocator = aio.Allocator(registry=registry)
            async with allocator.allocate(1):
                pass
            own_etcd.freeze()
            waiting = [asyncio.ensure_future(allocator.allocate(1)) for _ in range(40)]
            for _ in range(100):
                await asyncio.sleep(0.001)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)  # etcd is frozen still
            assert all(task.cancelled() for task in waiting)
            own_etcd.thaw()
        wait_for(lambda: own_etcd.keys() == [], what="no key is left")
        wait_for(lambda: mine() == [], what="no hold is left")

    asyncio.run(main())
