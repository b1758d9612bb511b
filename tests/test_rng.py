"""The order of a search: the kernel's entropy, or a caller's generator."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from worlds import in_child, network, root_only

import fastports


@pytest.fixture(autouse=True)
def own_network() -> Iterator[None]:
    with network():
        yield


pytestmark = root_only


def drawn(count: int = 12, **options: object) -> list[int]:
    found = []
    for _ in range(count):
        with fastports.allocate(range="20000-29999", **options) as block:  # type: ignore[arg-type]
            found.append(block.first)
    return found


@pytest.mark.parametrize(
    "kind", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64]
)
def test_the_same_seed_gives_the_same_ports(kind: type[np.random.BitGenerator]) -> None:
    def ports(seed: int) -> list[int]:
        return drawn(rng=np.random.Generator(kind(seed)))

    assert ports(7) == ports(7) != ports(8)


def test_a_seed_means_these_ports() -> None:
    """For good: what was reproducible with one version is with the next, on every numpy."""
    assert drawn(4, rng=np.random.Generator(np.random.PCG64(20417))) == SEEDED[1]
    found = []
    generator = np.random.Generator(np.random.PCG64(20417))
    for _ in range(4):
        with fastports.allocate(8, range="20000-29999", rng=generator) as block:
            found.append(block.first)
    assert found == SEEDED[8]


SEEDED = {1: [26653, 24186, 27458, 22083], 8: [26648, 24184, 27456, 22080]}


def test_an_allocator_s_generator_is_drawn_on_from_call_to_call() -> None:
    allocator = fastports.Allocator(
        range="20000-29999", rng=np.random.Generator(np.random.PCG64(20417))
    )
    found = []
    for _ in range(12):
        with allocator.allocate() as block:
            found.append(block.first)
    assert found == drawn(rng=np.random.Generator(np.random.PCG64(20417)))


def test_a_caller_s_generator_is_left_where_the_draws_ended() -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    before = generator.bit_generator.state
    drawn(1, rng=generator)
    assert generator.bit_generator.state != before


def test_global_seeds_change_nothing() -> None:
    def ports() -> list[int]:
        random.seed(1)
        np.random.seed(1)
        return drawn()

    assert ports() != ports()
    assert in_child(ports) != in_child(ports)


def test_forked_children_of_one_parent_search_in_orders_of_their_own() -> None:
    drawn()
    assert len({tuple(in_child(drawn)) for _ in range(4)}) == 4


def test_hash_seeds_change_nothing() -> None:
    import subprocess
    import sys

    program = "import fastports\nwith fastports.allocate(1) as b: print(b.first)"
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    found = {
        subprocess.run([sys.executable, "-c", program], env=env, capture_output=True).stdout
        for _ in range(4)
    }
    assert len(found) > 1


def test_candidates_are_tried_in_their_order() -> None:
    candidates = np.array([20005, 20001, 20009], dtype=np.uint16)
    held = []
    for first in (20005, 20001, 20009):
        held.append(fastports.allocate(candidates=candidates))
        assert held[-1].first == first
    with pytest.raises(fastports.PortsUnavailable):
        fastports.allocate(candidates=candidates)
    for block in held:
        block.release()


def test_threads_that_share_a_generator_draw_one_after_another() -> None:
    """Under its lock: no two searches get the same draws, and the state is never torn."""
    generator = np.random.Generator(np.random.PCG64(5))
    found: list[list[int]] = []

    def draw() -> None:
        found.append(drawn(50, rng=generator))

    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(ports) for ports in found}) == 8
    generator.integers(0, 10, 100)  # still sound


def test_a_generator_whose_lock_is_taken_is_waited_for() -> None:
    generator = np.random.Generator(np.random.PCG64(5))
    found: list[int] = []
    with generator.bit_generator.lock:
        thread = threading.Thread(target=lambda: found.extend(drawn(1, rng=generator)))
        thread.start()
        thread.join(0.1)
        assert found == []
    thread.join()
    assert len(found) == 1
