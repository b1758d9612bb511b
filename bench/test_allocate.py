"""``allocate(n)`` and release, on an empty range."""

from __future__ import annotations

from typing import Any

import ephemeral_port_reserve
import portpicker
import pytest

import fastports

from .rivals import Floor, bind_zero, sample_loop, sample_loop_block, times
from .table import Rival, Table


def test_one_port(benchmark: Any, table: Table, floor: Floor) -> None:
    table.compare(
        benchmark,
        "allocate(1) + release",
        times(50, lambda: fastports.allocate(1).release()),
        [
            Rival("the floor: same calls in C", lambda: floor.allocate(50), limit=1.4),
            Rival("a bare port in C, no entry", lambda: floor.allocate(50, entry=False)),
            Rival("portpicker", times(20, portpicker.pick_unused_port), "faster", 4),
            Rival("bind(0)", times(20, bind_zero), "faster"),
            Rival("loop over random.sample", times(20, sample_loop), "faster"),
        ],
        seconds=6,
    )


def test_one_port_beside_a_peer_that_leaves_time_wait(benchmark: Any, table: Table) -> None:
    """Apart: its connections, in TIME_WAIT for a minute, slow down whoever asks for port 0."""
    table.compare(
        benchmark,
        "the same, apart",
        times(50, lambda: fastports.allocate(1).release()),
        [Rival("ephemeral-port-reserve", times(5, ephemeral_port_reserve.reserve), "faster")],
        seconds=1,
    )


@pytest.mark.parametrize("size", [8, 64, 512])
def test_a_block(benchmark: Any, table: Table, floor: Floor, descriptors: int, size: int) -> None:
    calls = max(128 // size, 2)
    table.compare(
        benchmark,
        f"allocate({size}) + release",
        times(calls, lambda: fastports.allocate(size).release()),
        [
            Rival("the floor: same calls in C", lambda: floor.allocate(calls, size), limit=1.15),
            Rival("bare ports in C, no entry", lambda: floor.allocate(calls, size, entry=False)),
            Rival("loop over random.sample", times(1, lambda: sample_loop_block(size)), "faster"),
        ],
        seconds=5,
    )
