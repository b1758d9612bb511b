"""What the broker costs: the child, by its own clock, and how long the door is open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

import fastports
from fastports import _broker
from fastports.brokered import rehearsed, shared

from .table import Table

HERE = Path(__file__).parent
DEVNULL, PIPE = -3, -1


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("cc") is None:
        pytest.skip("the child is a program in C: needs cc")
    why = rehearsed()["broker"]
    if why is not None:
        pytest.skip(f"no broker here: {why}")
    path = tmp_path_factory.mktemp("calls") / "calls"
    subprocess.run(["cc", "-O2", "-o", path, HERE / "calls.c"], check=True)
    return str(path)


def bare(program: str, kind: str, port: int, count: int) -> list[int]:
    """Median, 99th percentile and maximum of a child that nobody looks at, in nanoseconds."""
    run = subprocess.run([program, kind, str(port), str(count)], capture_output=True, check=True)
    return [int(word) for word in run.stdout.split()]


def served(
    program: str, kind: str, port: str, count: int, block: fastports.PortBlock, mode: str = "broker"
) -> list[int]:
    """The same behind the filter."""
    with block.spawn(
        [program, kind, port, str(count)], handoff=mode, wait=None, stdin=DEVNULL, stdout=PIPE
    ) as child:
        out, _ = child.communicate(timeout=120)
    assert out is not None
    return [int(word) for word in out.split()]


def repeat(rounds: int, pairs: list[tuple[list[int], list[int]]]) -> tuple[float, float, float]:
    """Medians over the rounds: ours, theirs, and the ratio, of the children's own medians."""
    ours = median(mine[0] for mine, _ in pairs)
    theirs = median(its[0] for _, its in pairs)
    return ours, theirs, median(mine[0] / its[0] for mine, its in pairs)


def test_a_brokered_bind_and_listen(table: Table, calls: str, smoke: bool) -> None:
    rounds, count = (2, 200) if smoke else (9, 2000)
    pairs = []
    with fastports.allocate(1) as block, fastports.allocate(1) as free:
        port = free.first
        free.release()
        for _ in range(rounds):
            pairs.append(
                (
                    served(calls, "listen", "{port}", count, block),
                    bare(calls, "listen", port, count),
                )
            )
        windows = sorted(shared().windows())
    ours, theirs, ratio = repeat(rounds, pairs)
    table.count("brokered bind + listen, median", ours / 1e3, "us", 60)
    table.note(f"bind + listen without us: {theirs / 1e3:.1f} us at the median; {ratio:.1f} x")
    p99 = windows[len(windows) * 99 // 100]
    table.count("open window, 99th percentile", p99, "ns", 10_000)
    shut = "the door stays shut" if _broker.stays_shut() else "the door is open"
    table.note(f"window at the median: {windows[len(windows) // 2]} ns; {shut} in it")


def test_somebody_elses_port_through_the_filter(table: Table, calls: str, smoke: bool) -> None:
    rounds, count = (2, 200) if smoke else (9, 2000)
    with fastports.allocate(1) as block:
        pairs = [
            (served(calls, "bind", "0", count, block), bare(calls, "bind", 0, count))
            for _ in range(rounds)
        ]
    ours, theirs, ratio = repeat(rounds, pairs)
    table.count("somebody else's port through the filter, median", ours / 1e3, "us", 40)
    table.note(f"that bind without us: {theirs / 1e3:.1f} us at the median; {ratio:.1f} x")


def test_a_call_that_is_neither(table: Table, calls: str, smoke: bool) -> None:
    rounds, count = (2, 50) if smoke else (15, 500)
    with fastports.allocate(1) as block:
        pairs = [
            (served(calls, "nothing", "0", count, block), bare(calls, "nothing", 0, count))
            for _ in range(rounds)
        ]
    ours, theirs, ratio = repeat(rounds, pairs)
    table.count("another call through the filter, median", ours, "ns", None)
    table.note(f"that call without a filter: {theirs:.0f} ns; {ratio:.2f} x")


def longest_wait(calls: str, number: int) -> int:
    """Children that all bind and listen at one moment; the longest single call in nanoseconds."""
    blocks = [fastports.allocate(1) for _ in range(number)]
    reader, writer = os.pipe()
    children = [
        block.spawn(
            [calls, "listen", "{port}", "1", str(reader)],
            handoff="broker",
            wait=None,
            stdin=DEVNULL,
            stdout=PIPE,
            pass_fds=[reader],
        )
        for block in blocks
    ]
    os.write(writer, b"x" * number)
    took = []
    for child in children:
        assert child.stdout is not None
        took.append(int(child.stdout.readline().split()[3]))
    for child in children:
        child.stop()
        child.communicate()
    for block in blocks:
        block.release()
    os.close(reader)
    os.close(writer)
    return max(took)


def test_a_hundred_children_at_once(table: Table, calls: str, smoke: bool) -> None:
    """A child waits for the broker, and for a processor: the other children want one, too."""
    number, rounds = (10, 1) if smoke else (100, 5)
    worst = median(longest_wait(calls, number) for _ in range(rounds))
    table.count(f"{number} children at once, the longest wait", worst / 1e3, "us", 2000)
    normal = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return
    try:  # who waits first has a processor first, whatever else runs on this machine
        first = median(longest_wait(calls, number) for _ in range(rounds))
    finally:
        os.sched_setscheduler(0, *normal)
    table.note(f"that wait under SCHED_RR, which leaves the broker's share: {first / 1e3:.0f} us")


def test_the_open_time_of_bind_door(table: Table, calls: str, smoke: bool) -> None:
    """By a server that sets SO_REUSEADDR; against the child's whole start in door mode."""
    server = "import socket,sys,time;s=socket.socket();s.setsockopt(1,2,1)\n"
    server += "s.bind(('',int(sys.argv[1])));s.listen();time.sleep(100)"
    with fastports.allocate(1) as block:
        rounds = 3 if smoke else 30
        whole = []
        for _ in range(rounds):
            for mode in ("bind-door", "door"):
                with block.spawn([sys.executable, "-c", server, "{port}"], handoff=mode) as child:
                    if mode == "door":
                        whole.append(child.listened_after or 0.0)
        opened = sorted(shared().windows()[-2 * rounds :])  # a bind and a listen each
    table.count("bind-door, open time, median", opened[len(opened) // 2] / 1e3, "us", 10_000)
    table.note(f"door, open time: {median(whole) * 1e3:.1f} ms at the median")
