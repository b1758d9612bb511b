"""What a hand-off costs the launcher: over bare Popen, until it notices, and with many children."""

from __future__ import annotations

import subprocess
import time
from statistics import median
from typing import Any

import pytest

import fastports
from fastports.brokered import rehearsed

from .table import Rival, Table
from .test_broker import calls

__all__ = ["calls"]

DEVNULL, PIPE = -3, -1
TARGETS = {"door": 1e-3, "broker": 3e-3}


def ready(mode: str) -> None:
    if mode == "broker" and (why := rehearsed()["broker"]) is not None:
        pytest.skip(f"no broker here: {why}")


@pytest.mark.parametrize("mode", TARGETS)
def test_spawn_over_popen(
    benchmark: Any, table: Table, calls: str, descriptors: int, mode: str
) -> None:
    """A program in C that does nothing: started, ended, waited for."""
    ready(mode)
    argv = [calls, "nothing", "0", "0"]
    block = fastports.allocate(1)

    def ours() -> int:
        block.spawn(argv, handoff=mode, wait=None, stdout=DEVNULL).wait()
        return 1

    def theirs() -> int:
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
            process.wait()
        return 1

    with block:
        table.compare(
            benchmark,
            f"spawn and wait, {mode}",
            ours,
            [Rival("subprocess.Popen", theirs, "more", TARGETS[mode])],
            seconds=8,
        )


@pytest.mark.parametrize("mode", TARGETS)
def test_listening_is_noticed(table: Table, calls: str, smoke: bool, mode: str) -> None:
    """From the return of the child's listen(2), by its own clock, to the return of spawn."""
    ready(mode)
    late = []
    with fastports.allocate(1) as block:
        for _ in range(5 if smoke else 100):
            with block.spawn(
                [calls, "serve", "{port}", "0"], handoff=mode, stdin=DEVNULL, stdout=PIPE
            ) as child:
                noticed = time.monotonic_ns()
                assert child.stdout is not None
                late.append(noticed - int(child.stdout.readline()))
    late.sort()
    table.count(f"listening noticed, {mode}, median", late[len(late) // 2] / 1e3, "us", 2000)
    table.note(f"noticed, {mode}: {late[len(late) * 9 // 10] / 1e3:.0f} us at the 90th percentile")


@pytest.mark.parametrize("mode", TARGETS)
def test_a_hundred_children(table: Table, calls: str, smoke: bool, mode: str) -> None:
    ready(mode)
    number = 10 if smoke else 100
    each, busy, bare = [], [], []
    for _ in range(1 if smoke else 5):
        blocks = [fastports.allocate(1) for _ in range(number)]
        begin, used = time.monotonic(), time.process_time()
        children = [
            block.spawn(
                [calls, "serve", "{port}", "0"],
                handoff=mode,
                wait=None,
                stdin=DEVNULL,
                stdout=DEVNULL,
            )
            for block in blocks
        ]
        each.append((time.monotonic() - begin) / number)
        busy.append((time.process_time() - used) / number)
        for child in children:
            child.terminate()
        for child, block in zip(children, blocks, strict=True):
            child.wait()
            block.release()
        begin = time.monotonic()
        rivals = [
            subprocess.Popen(
                [calls, "serve", str(block.first), "0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            for block in blocks
        ]
        bare.append((time.monotonic() - begin) / number)
        for rival in rivals:
            rival.terminate()
            rival.wait()
    table.count(f"{number} children at once, {mode}, each", median(each) * 1e6, "us", 2000)
    table.note(
        f"of that, {mode}: {median(busy) * 1e6:.0f} us of the launcher's processor time;"
        f" {number} times subprocess.Popen: {median(bare) * 1e6:.0f} us each"
    )
