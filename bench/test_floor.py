"""The floor is what it says: what strace shows of fastports. Change floor.c when that changes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .rivals import FIRST, LAST, Floor

SCRIPT = """
import ctypes, os, sys
import fastports
size = int(sys.argv[1])
floor = ctypes.CDLL(sys.argv[2])
probes = ctypes.c_int64(0)
def ours():
    fastports.allocate(size).release()
def theirs():
    floor.floor_allocate(1, {first}, {last}, size, 1, ctypes.byref(probes))
for work in (ours, theirs):
    work()
    os.access("/begin", 0)
    work()
    os.access("/end", 0)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_the_floor_makes_the_same_system_calls(tmp_path: Path, floor: Floor, size: int) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    trace = tmp_path / "trace"
    script = SCRIPT.format(first=FIRST, last=LAST)
    command = [strace, "-o", str(trace), sys.executable, "-c", script, str(size), str(floor.path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    text = trace.read_text()
    ours, theirs = (
        Counter(re.findall(r"^(\w+)\(", part.partition("\n")[2].rpartition("\n")[0], re.MULTILINE))
        for part in re.findall(r'"/begin"(.*?)"/end"', text, re.DOTALL)
    )
    del ours["getpid"]  # a C program would know when it forks
    assert theirs == ours
