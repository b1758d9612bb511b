"""The awaitable face: how long it keeps the loop from others, and what belongs in which thread."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from statistics import median
from typing import Any

import pytest

from fastports import aio

from .table import Rival, Table

CALLS = 1000


async def turns(
    work: Callable[[], Coroutine[Any, Any, object]], clock: Callable[[], float]
) -> list[float]:
    """How long another callback would have waited in each turn of the loop, until it is done.

    Not in the first two: starting a thousand tasks takes 2 ms each, whatever they do.
    """
    loop = asyncio.get_running_loop()
    ticks: list[float] = []
    task = asyncio.ensure_future(work())

    def tick() -> None:
        ticks.append(clock())
        if not task.done():
            loop.call_soon(tick)

    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tick()
    await task
    return [after - before for before, after in itertools.pairwise(ticks)]


def percentile(samples: list[float], part: float) -> float:
    return sorted(samples)[min(int(len(samples) * part), len(samples) - 1)]


@pytest.mark.usefixtures("crowd", "descriptors")
@pytest.mark.parametrize(
    ("size", "at_once", "limit"),
    [(1, CALLS, 2000), (1, 50, 2000), (8, CALLS, None), (64, 50, 2000)],
    ids=["all-at-once", "fifty-tasks", "eight-ports", "in-workers"],
)
def test_latency_of_the_loop(
    table: Table, smoke: bool, size: int, at_once: int, limit: float | None
) -> None:
    async def allocate(calls: int) -> None:
        for _ in range(calls):
            async with aio.allocate(size):
                await asyncio.sleep(0)

    async def all_of_them() -> None:
        await asyncio.gather(*(allocate(CALLS // at_once) for _ in range(at_once)))

    def p99_and_median(clock: Callable[[], float]) -> list[float]:
        rounds = [asyncio.run(turns(all_of_them, clock)) for _ in range(2 if smoke else 10)]
        return [median(percentile(one, part) for one in rounds) * 1e6 for part in (0.99, 0.5)]

    work = f"{CALLS:,} x aio.allocate({size}), {at_once:,} at once: a turn of the loop, p99"
    p99, middle = p99_and_median(time.perf_counter)
    table.count(work, p99, "us", limit)
    table.count("  median", middle, "us", None)
    # without what other programs take of the processor, and worker threads of the interpreter
    table.count("  p99 in the thread's own time", p99_and_median(time.thread_time)[0], "us", limit)


@pytest.mark.parametrize("size", [1, 8, 24, 32, 64])
def test_the_thread_of_the_loop_beside_a_worker(
    benchmark: Any, table: Table, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Why 24 sockets: above, what the hop to a worker adds is small beside the search."""
    calls = 20
    loop = asyncio.new_event_loop()

    async def allocate() -> None:
        for _ in range(calls):
            async with aio.allocate(size):
                pass

    def within(sockets: int) -> Callable[[], int]:
        def run() -> int:
            monkeypatch.setattr(aio, "_SOCKETS", sockets)
            monkeypatch.setattr(aio, "_BINDS", 2 * sockets)
            loop.run_until_complete(allocate())
            return calls

        return run

    try:
        table.compare(
            benchmark,
            f"await aio.allocate({size}) in the loop",
            within(1000),
            [Rival("the same in a worker thread", within(0), "faster")],
            seconds=2,
        )
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
