"""Options and fixtures of the benchmarks. The table of ratios is printed when all have run."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

# The installed package is measured, not the checkout that pytest has put in front of it.
if sys.path[0] == str(Path(__file__).parent.parent):
    del sys.path[0]
import fastports  # noqa: F401

from .rivals import Floor, Helper
from .table import Table

CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

# What the README shows of them all.
_FOUNDATION = ("test_allocate", "test_dense", "test_scale", "test_start", "test_spawn")

_table = pytest.StashKey[Table]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--smoke", action="store_true", help="few rounds: that the benchmarks work, in seconds"
    )
    parser.addoption(
        "--write",
        action="store_true",
        help="write the figures into README.md and bench/README.md, between their marks",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    smoke = bool(config.getoption("--smoke")) or bool(os.environ.get("FASTPORTS_BENCH_SMOKE"))
    if smoke and config.getoption("--write"):
        raise pytest.UsageError(
            "--write: the figures of a smoke run mean little; leave out --smoke"
        )
    config.stash[_table] = Table(smoke)
    # pytest-benchmark's own table says less, in lines of 200 characters
    config.option.benchmark_columns = config.option.benchmark_columns or ["min", "median", "rounds"]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    table = config.stash[_table]
    if table.rows:
        terminalreporter.section("fastports: targets")
        for line in table.lines():
            terminalreporter.write_line(line)
    if config.getoption("--write"):
        folder = Path(__file__).parent
        _write(folder.parent / "README.md", table.markdown(_FOUNDATION))
        _write(folder / "README.md", table.markdown())


def _write(page: Path, text: str) -> None:
    head, begin, rest = page.read_text().partition("<!-- figures -->\n")
    _, end, tail = rest.partition("<!-- end of figures -->\n")
    if not (begin and end):
        raise pytest.UsageError(f"{page} has no place for figures")
    page.write_text(f"{head}{begin}{text}{end}{tail}")


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    """Where results go; ``table.compare(benchmark, ...)`` measures and adds rows."""
    table = request.config.stash[_table]
    table.part = request.path.stem
    return table


@pytest.fixture
def smoke(table: Table) -> bool:
    return table.smoke


@pytest.fixture(scope="session")
def floor(tmp_path_factory: pytest.TempPathFactory) -> Floor:
    if shutil.which("cc") is None:
        pytest.skip("no floor to compare with: needs cc")
    return Floor(tmp_path_factory.mktemp("floor"))


@pytest.fixture(autouse=True)
def own_network(table: Table) -> Iterator[bool]:
    """A fresh network namespace for each benchmark: no other program's ports, nor the last one's.

    True where that is allowed; else they share the ports of this machine with everybody.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    with open("/proc/thread-self/ns/net", "rb") as before:
        if libc.unshare(CLONE_NEWNET) != 0:
            if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
                why = errno.errorcode[ctypes.get_errno()]
                table.note(f"measured among the ports of other programs (unshare: {why})")
                yield False
                return
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                Path(f"/proc/self/{name}").write_text(text)
        with socket.socket() as sock:
            request = struct.pack("16sh14x", b"lo", 0)
            flags = struct.unpack("16xh14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[0]
            fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
        yield True
        libc.setns(before.fileno(), CLONE_NEWNET)  # refused from a user namespace: stay there


@pytest.fixture
def crowd(own_network: bool) -> None:
    """For benchmarks that take the better part of a range: only in a namespace of their own."""
    if not own_network:
        pytest.skip("would take thousands of ports from other programs: run as root")


@pytest.fixture
def descriptors() -> Iterator[int]:
    """How many descriptors may be open, raised as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12_000:
        pytest.skip(f"needs 12,000 descriptors, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def helpers() -> Iterator[Any]:
    """Starts scripts of this folder, ends them afterwards."""
    with ExitStack() as stack:

        def start(script: str, *arguments: str) -> Helper:
            helper = Helper(script, *arguments)
            stack.callback(helper.close)
            return helper

        yield start
