"""Many ports held, many processes at once, many entries to list."""

from __future__ import annotations

import time
from typing import Any

import pytest

import fastports

from .rivals import Floor, Helper, times
from .table import Rival, Table

# where ports are held by somebody: outside the default range
HELD_FIRST = 10000


def _phases(benchmark: Any, table: Table, work: str, hold: Any, drop: Any) -> None:
    """Alternate between nothing held and everything held."""
    state = {"held": False}
    one = times(200, lambda: fastports.allocate(1).release())

    def with_none() -> tuple[float, int]:
        if state["held"]:
            drop()
            state["held"] = False
        one()
        begin = time.perf_counter()
        done = one()
        took = time.perf_counter() - begin, done
        hold()
        state["held"] = True
        one()
        return took

    table.compare(benchmark, work, one, [Rival("with none held", with_none, limit=1.5)], seconds=8)
    drop()


@pytest.mark.usefixtures("crowd")
def test_with_ten_thousand_ports_held_by_this_process(
    benchmark: Any, table: Table, descriptors: int, smoke: bool
) -> None:
    blocks: list[fastports.PortBlock] = []
    # two descriptors for a block of one: as many of them as there is room for, the rest in one
    count = how_many(smoke)
    single = min(count, descriptors - count - 1000)

    def hold() -> None:
        for port in range(HELD_FIRST, HELD_FIRST + single):
            blocks.append(fastports.reserve(port))
        if single < count:
            blocks.append(fastports.reserve((HELD_FIRST + single, HELD_FIRST + count - 1)))

    def drop() -> None:
        for block in blocks:
            block.release()
        blocks.clear()

    work = f"allocate(1), {count:,} held here, {min(single + 1, count):,} entries"
    _phases(benchmark, table, work, hold, drop)


@pytest.mark.usefixtures("crowd", "descriptors")
def test_with_ten_thousand_ports_held_by_others(
    benchmark: Any, table: Table, helpers: Any, smoke: bool
) -> None:
    count = how_many(smoke)
    others = [helpers("holder.py") for _ in range(2)]

    def hold() -> None:
        assert hold_singly(others, count) == count

    def drop() -> None:
        for other in others:
            other.ask("drop")

    _phases(benchmark, table, f"allocate(1), {count:,} held by others", hold, drop)


def how_many(smoke: bool) -> int:
    """10,000, as the targets say, where there is time for it."""
    return 2_000 if smoke else 10_000


def hold_singly(holders: list[Helper], count: int) -> int:
    """Blocks of one port, shared out among processes; ports held."""
    each = count // len(holders)
    for index, holder in enumerate(holders):
        first = HELD_FIRST + index * each
        holder.send(f"blocks {first} {first + each - 1} 1")
    return sum(int(holder.answer()) for holder in holders)


def test_eight_processes_at_once(
    benchmark: Any, table: Table, floor: Floor, helpers: Any, smoke: bool
) -> None:
    seconds = 0.1 if smoke else 0.3
    ours = [helpers("worker.py", "fastports") for _ in range(8)]
    theirs = [helpers("worker.py", str(floor.path)) for _ in range(8)]
    for worker in (*ours, *theirs):
        assert worker.answer() == "ready"

    def together(workers: list[Helper]) -> int:
        for worker in workers:
            worker.send(str(seconds))
        return sum(int(worker.answer()) for worker in workers)

    table.compare(
        benchmark,
        "8 processes at once, per allocate(1)",
        lambda: together(ours),
        [Rival("8 loops in C", lambda: together(theirs), "faster", 0.8)],
        seconds=8,
    )
