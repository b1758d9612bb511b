"""The search against a plain-Python oracle, in a network of its own where the facts are known."""

from __future__ import annotations

import math
import random
import socket
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from worlds import network, root_only, set_sysctl

import fastports
from fastports import _core

pytestmark = root_only

KINDS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}


@pytest.fixture(autouse=True)
def own_network() -> Iterator[None]:
    with network():
        yield


@contextmanager
def occupied(ports: set[int], kind: int = socket.SOCK_STREAM) -> Iterator[None]:
    """Bound by plain sockets, so that the oracle does not lean on what it judges."""
    sockets = []
    try:
        for port in sorted(ports):
            sock = socket.socket(socket.AF_INET, kind)
            sockets.append(sock)
            sock.bind(("0.0.0.0", port))
        yield
    finally:
        for sock in sockets:
            sock.close()


def valid_starts(first: int, last: int, size: int, taken: set[int]) -> set[int]:
    """The starts of the class in turn: the aligned ones that work, else the others."""
    works = {
        start
        for start in range(first, last - size + 2)
        if not taken.intersection(range(start, start + size))
    }
    return {start for start in works if (start - first) % size == 0} or works


def longest_stretch(first: int, last: int, taken: set[int]) -> int:
    best = run = 0
    for port in range(first, last + 1):
        run = 0 if port in taken else run + 1
        best = max(best, run)
    return best


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int, set[int], set[int]]:
    """first, last, size, busy, reserved: sparse, dense and full ranges, edges included."""
    first = draw(st.sampled_from([1, 1000, 20000, 65401]))
    span = draw(st.integers(1, 135))
    last = min(first + span - 1, 65535)
    size = draw(st.integers(1, min(last - first + 1, 20)))
    density = draw(st.sampled_from([0.0, 0.1, 0.3, 0.7, 0.97, 1.0]))
    dice = random.Random(draw(st.integers(0, 2**32)))
    busy = {port for port in range(first, last + 1) if dice.random() < density}
    reserved = {
        port for port in range(first, last + 1) if dice.random() < draw(st.sampled_from([0, 0.05]))
    }
    return first, last, size, busy, reserved


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(worlds(), st.sampled_from(["tcp", "udp", "both"]))
def test_a_free_block_is_found_if_there_is_one_and_else_the_refusal_tells_the_facts(
    world: tuple[int, int, int, set[int], set[int]], protocol: str
) -> None:
    first, last, size, busy, reserved = world
    set_sysctl("net.ipv4.ip_local_reserved_ports", ",".join(map(str, sorted(reserved))) or "\n")
    kind = KINDS.get(protocol, socket.SOCK_DGRAM)  # with both: taken in one of the two is taken
    works = valid_starts(first, last, size, busy | reserved)
    span = last - first + 1
    with occupied(busy, kind):
        try:
            block = fastports.allocate(size, range=(first, last), protocol=protocol)
        except fastports.InvalidRequest:
            assert not valid_starts(first, last, size, reserved)
        except fastports.PortsUnavailable as exc:
            assert not works
            assert (exc.range, exc.wanted) == (f"{first}-{last}", size)
            assert (exc.protocol, exc.host) == (protocol, None)
            assert (exc.denied, exc.recorded, exc.time_wait) == (0, 0, 0)
            assert exc.reserved == len(reserved)
            assert exc.busy <= exc.probed <= span
            assert exc.busy <= len(busy - reserved)
            assert exc.longest_free <= longest_stretch(first, last, busy | reserved) < size
            if size == 1:
                assert exc.probed == exc.busy == len(busy - reserved)
        else:
            with block:
                assert block.first in works
                assert len(block) == size
                assert len(block.filenos()) == size * (2 if protocol == "both" else 1)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(worlds(), st.integers(0, 40))
def test_a_refusal_is_proved_by_the_busy_ports_it_names(
    world: tuple[int, int, int, set[int], set[int]], keep: int
) -> None:
    """Every window holds a port reported busy or excluded, whatever few descriptors are kept."""
    first, last, size, busy, reserved = world
    works = valid_starts(first, last, size, busy | reserved)
    with occupied(busy):
        search = _core.Search(first, last, size, _core.TCP, keep=keep)
        assert sum(search.exclude(port, port) for port in reserved) == len(reserved)
        status = search.run()
        if works:
            assert status == _core.FOUND
            assert search.start in works
        else:
            assert status == _core.EXHAUSTED
            named = set(search.busy_ports())
            assert named <= busy
            assert not valid_starts(first, last, size, named | reserved)
        search.close()


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(worlds(), st.randoms(use_true_random=False))
def test_given_starts_are_tried_in_their_order_and_no_others(
    world: tuple[int, int, int, set[int], set[int]], dice: random.Random
) -> None:
    first, last, size, busy, reserved = world
    starts = list(range(first, last - size + 2))
    dice.shuffle(starts)
    starts = starts[: dice.randint(1, len(starts))]
    works = [start for start in starts if not busy.intersection(range(start, start + size))]
    set_sysctl("net.ipv4.ip_local_reserved_ports", ",".join(map(str, sorted(reserved))) or "\n")
    with occupied(busy):
        try:
            with fastports.allocate(size, candidates=array("H", starts)) as block:
                assert block.first == works[0]
        except fastports.PortsUnavailable as exc:
            assert not works
            assert exc.busy <= len(busy)


# --- a numpy generator -------------------------------------------------------------------------


def drawn_starts(span: int, size: int, draw32: Callable[[], int]) -> Iterator[int]:
    """Offsets in the order of the search: a Fisher-Yates shuffle of each class, lazily."""

    def below(bound: int) -> int:
        product = draw32() * bound
        if product % 2**32 < bound:
            while product % 2**32 < (2**32 - bound) % bound:
                product = draw32() * bound
        return product >> 32

    aligned = [start for start in range(span - size + 1) if start % size == 0]
    others = [start for start in range(span - size + 1) if start % size]
    for starts in (aligned, others):
        for i in range(len(starts)):
            j = i + below(len(starts) - i)
            starts[i], starts[j] = starts[j], starts[i]
            yield starts[i]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(worlds(), st.integers(0, 2**63), st.sampled_from(["PCG64", "MT19937", "Philox", "SFC64"]))
def test_a_numpy_generator_is_drawn_for_each_start_as_the_oracle_draws_it(
    world: tuple[int, int, int, set[int], set[int]], seed: int, bits: str
) -> None:
    import numpy as np

    first, last, size, busy, _ = world
    span = last - first + 1
    set_sysctl("net.ipv4.ip_local_reserved_ports", "\n")
    assume(valid_starts(first, last, size, busy))
    ours = np.random.Generator(getattr(np.random, bits)(seed))
    theirs = np.random.Generator(getattr(np.random, bits)(seed))

    def draw32() -> int:
        return int(theirs.integers(2**32, dtype=np.uint32))

    expected = next(
        first + offset
        for offset in drawn_starts(span, size, draw32)
        if not busy.intersection(range(first + offset, first + offset + size))
    )
    with occupied(busy), fastports.allocate(size, range=(first, last), rng=ours) as block:
        assert block.first == expected
    # and not a number more was drawn
    assert ours.integers(2**32, dtype=np.uint32) == theirs.integers(2**32, dtype=np.uint32)


# --- uniform -------------------------------------------------------------------------------------


def chi_square_bound(degrees: int) -> float:
    """Exceeded by chance once in a million runs (Wilson and Hilferty's approximation)."""
    z = 4.7534
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    ("size", "taken", "turn"),
    [
        (1, set(), "all"),
        (1, {20000, 20003, 20039}, "all"),
        (4, set(), "aligned"),
        (4, {20001, 20010, 20019, 20037}, "aligned"),
        (3, set(range(20001, 20040, 3)), "none"),
        (5, {20000, 20009, 20010, 20019, 20020, 20025, 20030, 20035}, "others"),
    ],
    ids=["1", "1-some-taken", "4", "4-some-taken", "3-none", "5-unaligned"],
)
def test_draws_are_uniform_over_the_valid_starts_of_the_class_in_turn(
    size: int, taken: set[int], turn: str
) -> None:
    first, last, draws = 20000, 20039, 20_000
    works = valid_starts(first, last, size, taken)
    aligned = {start for start in works if (start - first) % size == 0}
    assert turn == ("none" if not works else "aligned" if size > 1 and aligned else
                    "others" if size > 1 else "all")  # fmt: skip
    allocator = fastports.Allocator(range=(first, last))
    seen: Counter[int] = Counter()
    with occupied(taken):
        for _ in range(draws if works else 20):
            with suppress(fastports.PortsUnavailable), allocator.allocate(size) as block:
                seen[block.first] += 1
    assert set(seen) == works
    if works:
        expected = draws / len(works)
        chi_square = sum((seen[start] - expected) ** 2 / expected for start in works)
        assert chi_square < chi_square_bound(len(works) - 1)


# --- the number of binds -----------------------------------------------------------------------

COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
static unsigned counts[65536];
unsigned *bind_counts(void) { return counts; }
int bind(int fd, const struct sockaddr *address, socklen_t length)
{
    static int (*real)(int, const struct sockaddr *, socklen_t);
    if (!real)
        real = dlsym(RTLD_NEXT, "bind");
    if (address->sa_family == AF_INET6 || address->sa_family == AF_INET)
        counts[ntohs(((const struct sockaddr_in *)address)->sin_port)]++;
    return real(fd, address, length);
}
"""

COUNTED = """
import ctypes, json, random, socket, sys
import fastports

counts = ctypes.CDLL(None).bind_counts
counts.restype = ctypes.POINTER(ctypes.c_uint * 65536)
dice = random.Random(7)
answer = []
for size, span, density in json.loads(sys.argv[1]):
    first, last = 20000, 20000 + span - 1
    busy = [socket.socket() for port in range(first, last + 1) if dice.random() < density]
    for sock, port in zip(busy, dice.sample(range(first, last + 1), len(busy))):
        sock.bind(("0.0.0.0", port))
    ctypes.memset(counts(), 0, 4 * 65536)
    try:
        with fastports.allocate(size, range=(first, last)):
            probed = -1
    except fastports.PortsUnavailable as exc:
        probed = exc.probed
    seen = list(counts().contents)[first : last + 1]
    answer.append([probed, sum(seen), max(seen), sum(1 for n in seen if n)])
    for sock in busy:
        sock.close()
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def bind_counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counter")
    source, library = folder / "counter.c", folder / "counter.so"
    source.write_text(COUNTER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def test_each_port_is_bound_at_most_once_before_it_is_found_and_few_twice_before_a_refusal(
    bind_counter: Path,
) -> None:
    import json
    import os

    cases = [(1, 400, 0.97), (8, 400, 0.5), (8, 2000, 0.3), (32, 400, 0.02), (1, 300, 1.0),
             (8, 300, 1.0), (5, 100, 0.9)] * 6  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, json.dumps(cases)],
        env={**os.environ, "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {bind_counter}"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    for case, (probed, binds, most, ports) in zip(cases, json.loads(done.stdout), strict=True):
        if probed < 0:
            assert most == 1, case
        else:
            # a last look at the ports that were busy before others could tell us of them
            assert probed == ports, case
            assert most <= 2, case
            assert binds - ports <= 40, case


@pytest.mark.parametrize(("size", "most"), [(1, 10_000), (8, 2_000), (32, 550)])
def test_c14_a_full_range_of_10000_is_refused_after_few_probes(size: int, most: int) -> None:
    """C14, in probes."""
    import resource

    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 10_200:
        pytest.skip("holds 10,000 ports in one process, which takes ulimit -n 10200")
    with occupied(set(range(20000, 30000))):
        with pytest.raises(fastports.PortsUnavailable) as caught:
            fastports.allocate(size, range=(20000, 29999))
        assert caught.value.probed <= most
        assert caught.value.longest_free == 0
