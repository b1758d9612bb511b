"""Many threads, many processes: what is handed out once is handed out to nobody else."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest
from worlds import Child, can_bind, network, root_only, wait_until

import fastports

T = TypeVar("T")

THREADS = 16


def together(count: int, work: Callable[[int], T]) -> list[T]:
    """What ``work(number)`` returns in each of ``count`` threads that begin at once."""
    barrier = threading.Barrier(count)

    def run(number: int) -> T:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def processes(count: int, work: Callable[[int], T], judge: Callable[[list[T]], None]) -> None:
    """Run ``work`` in processes that begin at once; ``judge`` while all still hold what they have.

    ``work`` keeps what it allocated alive by itself until its process ends.
    """
    start, go = os.pipe()
    told: list[tuple[int, int]] = []
    children = []
    over, end = os.pipe()
    for number in range(count):
        told.append(os.pipe())

        def live(number: int = number) -> None:
            os.close(go)
            os.close(end)
            os.read(start, 1)
            found = work(number)
            os.write(told[number][1], repr(found).encode() + b"\n")
            os.read(over, 1)

        children.append(Child(live))
    os.close(start)
    os.close(over)
    os.close(go)  # all begin
    for _, write in told:
        os.close(write)
    answers: list[T] = []
    for read, _ in told:
        with os.fdopen(read, "rb") as file:
            line = file.readline()
            if line:  # else it failed, and its result says how
                answers.append(eval(line))
    try:
        if len(answers) == count:
            judge(answers)
    finally:
        os.close(end)
        for child in children:
            child.result()


def test_c02_a_thousand_allocations_in_one_process_are_a_thousand_ports() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(1000, (hard - 200) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count + 200), hard))
    try:
        blocks = [fastports.allocate(1) for _ in range(count)]
        assert len({block.first for block in blocks}) == count
        for block in blocks:
            block.release()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert count == 1000


def test_16_threads_share_one_allocator() -> None:
    allocator = fastports.Allocator()

    def work(number: int) -> list[tuple[int, int]]:
        kept = []
        for turn in range(40):
            block = allocator.allocate(1 + (number + turn) % 8, label=f"{number}")
            assert block.label == f"{number}"
            if turn % 4:
                block.release()
            else:
                kept.append(block)
        mine = [(block.first, block.last) for block in kept]
        held.extend(kept)
        return mine

    held: list[fastports.PortBlock] = []
    spans = [span for found in together(THREADS, work) for span in found]
    ports = [port for first, last in spans for port in range(first, last + 1)]
    assert len(ports) == len(set(ports))
    assert not any(can_bind(port) for port in ports)
    for block in held:
        block.release()
    assert all(can_bind(port) for port in ports[::7])


@root_only
def test_the_last_free_port_goes_to_one_of_16_threads() -> None:
    with network(), fastports.reserve((20000, 20062)):
        for _ in range(20):
            answers = together(THREADS, lambda _: _one_or_none("20000-20063"))
            won = [block for block in answers if block is not None]
            assert [block.first for block in won] == [20063]
            won[0].release()


def _of_size(size: int, where: tuple[int, int], number: int) -> fastports.PortBlock:
    return fastports.allocate(size, range=where)


def _one_or_none(where: str) -> fastports.PortBlock | None:
    try:
        return fastports.allocate(range=where)
    except fastports.PortsUnavailable:
        return None


@root_only
def test_threads_that_fill_a_range_get_every_port_of_it() -> None:
    """Searches see each other's passing binds as busy, and must not be refused for them."""
    with network():
        for size in (1, 4):
            where = (20000, 20000 + THREADS * size - 1)
            for _ in range(10):
                blocks = together(THREADS, partial(_of_size, size, where))
                ports = sorted(port for block in blocks for port in block)
                assert ports == list(range(20000, 20000 + 16 * size))
                for block in blocks:
                    block.release()


@root_only
def test_c04_eight_processes_that_ask_for_one_range_at_once_get_disjoint_blocks() -> None:
    kept = []

    def work(number: int) -> list[int]:
        for _ in range(4):
            kept.append(fastports.allocate(8, range="20000-20299"))
        return [port for block in kept for port in block]

    def judge(answers: list[list[int]]) -> None:
        ports = [port for found in answers for port in found]
        assert len(ports) == len(set(ports)) == 8 * 4 * 8
        assert len({found[0] for found in answers}) == 8

    with network():
        processes(8, work, judge)


@root_only
def test_c05_500_concurrent_allocations_in_900_ports_are_500_ports() -> None:
    kept = []

    def work(number: int) -> list[int]:
        kept.extend(
            together(10, lambda _: [fastports.allocate(range="20000-20899") for _ in range(5)])
        )
        return [block.first for blocks in kept for block in blocks]

    def judge(answers: list[list[int]]) -> None:
        ports = [port for found in answers for port in found]
        assert len(ports) == len(set(ports)) == 500

    with network():
        processes(10, work, judge)


@root_only
def test_processes_that_come_and_go_never_hold_the_same_port() -> None:
    """Each port is guarded by a lock that its holder takes: two holders would meet there."""

    def work(number: int) -> int:
        import fcntl

        for turn in range(60):
            with fastports.allocate(
                1 + (number + turn) % 5, range="20000-20039", timeout=30
            ) as block:
                locks = []
                for port in block:
                    fd = os.open(f"{folder}/{port}", os.O_RDWR | os.O_CREAT, 0o600)
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locks.append(fd)
                for fd in locks:
                    os.close(fd)
        return 60

    import tempfile

    with tempfile.TemporaryDirectory() as folder, network():
        processes(8, work, lambda answers: None)


@root_only
def test_allocations_while_other_threads_fork() -> None:
    """What a thread holds stays its process's alone, whenever another thread forks."""
    done = threading.Event()

    def fork() -> None:
        while not done.is_set():
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)

    with network():
        forking = threading.Thread(target=fork)
        forking.start()
        try:
            for _ in range(300):
                with fastports.allocate(8, range="20000-20019") as block:
                    ports = list(block)
                wait_until(lambda ports=ports: all(map(can_bind, ports)), "free again")  # type: ignore[misc]
        finally:
            done.set()
            forking.join()


def test_blocks_that_are_dropped_in_many_threads_leave_nothing() -> None:
    def work(number: int) -> None:
        for _ in range(20):
            fastports.allocate(3)

    before = len(os.listdir("/proc/self/fd"))
    with pytest.warns(ResourceWarning, match="unreleased"):
        together(THREADS, work)
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(3)", "raise SystemError", "os._exit(3)"])
def test_an_interpreter_that_ends_with_blocks_and_threads_says_nothing_of_them(end: str) -> None:
    program = (
        "import os, threading, time, fastports\n"
        "kept = [fastports.allocate(2) for _ in range(4)]\n"
        "def work():\n"
        "    while True:\n"
        "        with fastports.allocate(2): pass\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "print([p for b in kept for p in b], flush=True)\n"
        f"{end}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    if "SystemError" not in end:
        assert done.stderr == ""
    assert done.returncode == (0 if not end else 1 if "SystemError" in end else 3)
    for port in eval(done.stdout):
        assert can_bind(port)
