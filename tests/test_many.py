"""Several blocks at once: all or none, disjoint, and placed if they fit."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import can_bind, network, root_only

import fastports
from fastports import packing

FIRST = 20000


def taken(*ports: int) -> list[fastports.PortBlock]:
    return [fastports.reserve(FIRST + port) for port in ports]


def fits(runs: list[tuple[int, int]], sizes: list[int]) -> bool:
    """Whether the sizes fit, by trying every assignment of sizes to runs."""
    for chosen in itertools.product(range(len(runs)), repeat=len(sizes)):
        used = [0] * len(runs)
        for size, run in zip(sizes, chosen, strict=True):
            used[run] += size
        if all(total <= length for total, (_, length) in zip(used, runs, strict=True)):
            return True
    return False


def test_each_name_has_its_size_and_the_order_is_the_caller_s() -> None:
    plan = fastports.allocate_many({"http": 1, "kv": 3, "nixl": 8}, label="decode-0")
    assert list(plan) == ["http", "kv", "nixl"]
    assert [len(block) for block in plan.values()] == [1, 3, 8]
    assert [block.label for block in plan.values()] == [f"decode-0-{name}" for name in plan]
    ports = [port for block in plan.values() for port in block]
    assert len(set(ports)) == 12
    assert not any(can_bind(port) for port in ports)
    plan["kv"].release()  # each by itself
    assert can_bind(plan["kv"].first) and not can_bind(plan["http"].first)
    plan["http"].release()
    plan["nixl"].release()


@root_only
@pytest.mark.parametrize(
    ("busy", "sizes"),
    [
        ((), {"a": 1, "b": 7, "c": 2}),  # exactly the range
        ((4,), {"a": 5, "b": 4}),  # both stretches full
        ((4,), {"a": 4, "b": 5}),
        ((4,), {"a": 1, "b": 4, "c": 4}),
        ((3, 7), {"a": 2, "b": 2, "c": 3, "d": 1}),
        ((6,), {"a": 3, "b": 3, "c": 3}),  # largest first alone may cut the six in two
    ],
)
def test_what_fits_is_placed_whatever_the_order_of_the_sizes(
    busy: tuple[int, ...], sizes: dict[str, int]
) -> None:
    with network():
        held = taken(*busy)
        for order in itertools.permutations(sizes):
            plan = fastports.allocate_many(
                {name: sizes[name] for name in order}, range=(FIRST, FIRST + 9)
            )
            assert {name: len(block) for name, block in plan.items()} == sizes
            ports = [port for block in plan.values() for port in block]
            assert len(ports) == len(set(ports))
            for block in plan.values():
                block.release()
        for block in held:
            block.release()


@root_only
def test_what_does_not_fit_is_one_refusal_and_nothing_is_kept() -> None:
    with network():
        held = taken(4)
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(fastports.PortsUnavailable) as caught:
            fastports.allocate_many({"a": 3, "b": 3, "c": 3}, range=(FIRST, FIRST + 9))
        assert caught.value.wanted == 9
        assert set(os.listdir("/proc/self/fd")) == before
        assert [entry.first for entry in fastports.entries()] == [FIRST + 4]
        assert all(can_bind(FIRST + port) for port in range(10) if port != 4)
        held[0].release()


@root_only
def test_a_plan_that_waits_gets_its_ports_when_they_come_free() -> None:
    import threading

    with network():
        held = taken(4)
        timer = threading.Timer(0.05, held[0].release)
        timer.start()
        plan = fastports.allocate_many({"a": 5, "b": 5}, range=(FIRST, FIRST + 9), timeout=30)
        timer.join()
        assert sorted(port for block in plan.values() for port in block) == list(
            range(FIRST, FIRST + 10)
        )
        for block in plan.values():
            block.release()


@root_only
def test_with_both_protocols_a_port_taken_in_one_is_left_out() -> None:
    with network(), fastports.reserve(FIRST + 4, protocol="udp"):
        plan = fastports.allocate_many({"a": 4, "b": 5}, range=(FIRST, FIRST + 9), protocol="both")
        assert plan["a"].ports == range(FIRST, FIRST + 4)
        assert plan["b"].ports == range(FIRST + 5, FIRST + 10)
        for block in plan.values():
            block.release()


# --- the placement by itself ----------------------------------------------------------------------


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.binary(min_size=1, max_size=24).map(lambda data: bytes(byte & 1 for byte in data)),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_a_placement_is_found_just_when_there_is_one(states: bytes, sizes: list[int]) -> None:
    sizes.sort(reverse=True)
    runs = packing.free_runs(states)
    assert sum(length for _, length in runs) == states.count(0)
    placement = packing.place(runs, sizes)
    assert (placement is not None) == (bool(runs) and fits(runs, sizes))
    if placement is not None:
        used: set[int] = set()
        for start, size in zip(placement, sizes, strict=True):
            window = set(range(start, start + size))
            assert not window & used and not any(states[port] for port in window)
            used |= window


def test_a_hopeless_request_ends_within_its_bound_of_steps() -> None:
    # 30 stretches of 7, blocks of 4 and 3 with one too many: every arrangement is a dead end
    runs = [(10 * i, 7) for i in range(30)]
    assert packing.place(runs, [4] * 30 + [3] * 30) is not None
    assert packing.place(runs, [4] * 31 + [3] * 28) is None
    assert packing.place(runs, [1] * 1000) is None
