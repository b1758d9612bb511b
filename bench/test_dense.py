"""Ranges of 10,000 ports that are nearly full, full, and half full."""

from __future__ import annotations

from statistics import median
from typing import Any

import ephemeral_port_reserve
import pytest

import fastports
from fastports._core import FOUND, TCP, Search

from .rivals import FIRST, LAST, Floor, sample_loop
from .table import Rival, Table

SPAN = LAST - FIRST + 1


@pytest.mark.usefixtures("crowd", "descriptors")
def test_one_port_where_99_of_100_are_busy(
    benchmark: Any, table: Table, floor: Floor, helpers: Any
) -> None:
    helpers("holder.py").ask(f"plain {FIRST} {LAST} 0.99 1")
    # draws without replacement until the first of 100 free ports among 10,000
    expected = (SPAN + 1) / (SPAN // 100 + 1)
    calls = 40
    tries: list[bool] = []

    def loop() -> int:
        found = 0
        for _ in range(15):
            tries.append(sample_loop() is not None)
            found += tries[-1]
        return found

    def probes() -> int:
        for _ in range(calls):
            fastports.allocate(1).release()
        return calls

    table.compare(
        benchmark,
        "allocate(1), 99 % of 10,000 busy",
        probes,
        [
            Rival(
                "the floor: same calls in C",
                lambda: _per_call(floor.allocate(calls, per_probe=True), expected),
                limit=1.2,
            ),
            Rival("loop over random.sample, per port found", loop, "faster", 8),
        ],
        seconds=8,
    )
    if tries:
        table.count("  a loop of 100 tries found one in", 100 * sum(tries) / len(tries), "%", None)


def _per_call(measured: tuple[float, int], expected: float) -> tuple[float, int]:
    """Seconds for a call of the expected number of probes: how many it takes is luck."""
    seconds, probes = measured
    return seconds / probes * expected, 1


@pytest.mark.usefixtures("crowd", "descriptors")
def test_the_only_free_port_of_ten_thousand_is_always_found(
    table: Table, helpers: Any, smoke: bool
) -> None:
    helpers("holder.py").ask(f"plain {FIRST} {LAST} 0.9999 2")
    rounds = 5 if smoke else 50
    found = set()
    for _ in range(rounds):
        with fastports.allocate(1) as block:
            found.add(block.first)
    assert len(found) == 1
    table.count("the one free port of 10,000 found in", 100, "% of calls", 100, at_most=False)


@pytest.mark.usefixtures("crowd", "descriptors")
@pytest.mark.parametrize(("size", "limit"), [(1, 10_000), (8, 2_000), (32, 550)])
def test_a_full_range_is_refused(
    benchmark: Any, table: Table, floor: Floor, helpers: Any, size: int, limit: int
) -> None:
    helpers("holder.py").ask(f"plain {FIRST} {LAST} 1 3")
    probed: list[int] = []

    def refused() -> int:
        try:  # pytest.raises would be part of the figure
            fastports.allocate(size)
        except fastports.PortsUnavailable as exc:
            probed.append(exc.probed)
            return exc.probed
        raise AssertionError("nothing was free")

    def loop() -> int:
        assert sample_loop() is None
        return 100

    refused()
    usual = probed[0]
    table.compare(
        benchmark,
        f"refusal, block of {size}, per probe",
        refused,
        [
            Rival("the floor: bind in C", lambda: floor.refuse(1, usual), limit=1.2),
            Rival("loop over random.sample, per try", loop, "faster"),
        ],
        seconds=4,
    )
    assert max(probed) <= limit
    table.count("  probes, at most", max(probed), "probes", limit)


@pytest.mark.usefixtures("crowd", "descriptors")
def test_a_refusal_where_connections_are_in_time_wait(
    benchmark: Any, table: Table, floor: Floor, helpers: Any
) -> None:
    """Most hosts have some, and a refusal looks whether they are all that is in the way."""
    helpers("holder.py").ask(f"plain {FIRST} {LAST} 1 3")
    ephemeral_port_reserve.reserve()
    probed = 0

    def refused() -> int:
        nonlocal probed
        with pytest.raises(fastports.PortsUnavailable) as caught:
            fastports.allocate(8)
        probed = caught.value.probed
        return 1

    refused()
    table.compare(
        benchmark,
        "refusal, block of 8, beside a TIME_WAIT",
        refused,
        [Rival("the floor: binds in C", lambda: (floor.refuse(1, probed)[0], 1))],
        seconds=3,
    )


@pytest.mark.usefixtures("crowd", "descriptors")
def test_a_block_of_8_at_half_occupancy(table: Table, helpers: Any, smoke: bool) -> None:
    helper = helpers("holder.py")
    probes = []
    for seed in range(2 if smoke else 10):
        helper.ask(f"plain {FIRST} {LAST} 0.5 {seed}")
        for _ in range(20):
            search = Search(FIRST, LAST, 8, TCP, keep=512)
            assert search.run() == FOUND
            probes.append(search.probed)
            search.close()
        helper.ask("drop")
    table.count("allocate(8), 50 % of 10,000 busy, median", median(probes), "probes", 1_100)
