"""What the pytest plugin costs a test that uses it, and a suite that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from .table import Table

# Each kind of test in turn, in one session; all that a test takes is timed, fixtures included.
CONFTEST = """
import json
import time
from collections import defaultdict

import pytest

TOOK = defaultdict(list)

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        TOOK[item.name.partition("[")[0]].append(time.perf_counter() - began)

def pytest_sessionfinish():
    with open("took.json", "w") as file:
        json.dump(TOOK, file)

@pytest.fixture
def number():
    yield 1

def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: int(item.name.partition("[")[2][:-1]))
"""

TESTS = """
import pytest

every = pytest.mark.parametrize("turn", range({count}))

@every
def test_plain(turn, number):
    assert number

@every
def test_port(turn, port):
    assert port

@every
def test_ports(turn, ports):
    assert ports(8)

@every
def test_unused(turn, unused_tcp_port):
    assert unused_tcp_port
"""

UNUSED = ["-p", "no:benchmark", "-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:xdist"]


def test_a_test(table: Table, smoke: bool, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_inner.py").write_text(TESTS.format(count=50 if smoke else 1000))
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *UNUSED]
    subprocess.run(argv, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    took: dict[str, list[float]] = json.loads((tmp_path / "took.json").read_text())
    plain = took.pop("test_plain")
    limits = {"test_port": 100.0, "test_ports": None, "test_unused": None}
    what = {
        "test_port": "a test with `port`, more than with a fixture of one line",
        "test_ports": "  with `ports(8)`",
        "test_unused": "  with pytest-asyncio's `unused_tcp_port`",
    }
    for name, samples in took.items():
        more = median(one - other for one, other in zip(samples, plain, strict=True))
        table.count(what[name], more * 1e6, "us", limits[name])


# In one process, so that what the rest of a start takes, a hundred times as much, does not hide it.
COLLECT = """
import contextlib, io, json, sys, time
import pytest

def collect(*more):
    sys.modules.pop("pytest_fastports", None)
    began = time.thread_time()
    with contextlib.redirect_stdout(io.StringIO()):
        assert pytest.main([*sys.argv[2:], *more]) == 0
    return time.thread_time() - began

collect(), collect("-p", "no:fastports")
pairs = [(collect(), collect("-p", "no:fastports")) for _ in range(int(sys.argv[1]))]
assert "fastports.pytest_plugin" not in sys.modules
print(json.dumps([a - b for a, b in pairs]))
"""


def test_a_suite_that_does_not_use_it(table: Table, smoke: bool, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_inner.py").write_text("def test():\n    pass\n")
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    argv = [sys.executable, "-c", COLLECT, "5" if smoke else "100", "-q", "--collect-only"]
    argv += ["--rootdir", str(tmp_path), str(tmp_path), *UNUSED, "-p", "no:asyncio"]
    argv += ["-p", "no:cacheprovider"]
    more = json.loads(subprocess.check_output(argv, cwd=tmp_path, env=environment))
    table.count("collecting a suite without ports, plugin loaded", median(more) * 1e6, "us", 3000)
