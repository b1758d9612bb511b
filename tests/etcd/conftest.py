"""Fixtures with real etcd servers; nothing here pretends to be one."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("etcd3", reason="needs pip install 'fastports[etcd]'")

from fastports.etcd import EtcdRegistry
from fastports.registry import Owner

from .servers import Etcd, Proxy, etcd, etcd_cluster, proxy


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long outages in full length")


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    option = request.config.getoption("--soak", default=False)
    return bool(option) or os.environ.get("FASTPORTS_SOAK") == "1"


def _python_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found.update(int(pid) for pid in file.read().split())
        except FileNotFoundError:
            continue  # that thread ended just now
    return found


def _sockets() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            where = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if where.startswith("socket:"):
            found.add(where)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind(etcd_server: Etcd) -> Iterator[None]:
    """As in the whole suite, but gRPC keeps native threads and poll descriptors of its own."""
    before = _sockets(), _children(), _python_threads()
    yield
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        left = [
            sorted(map(str, _sockets() - before[0])),
            sorted(map(str, _children() - before[1])),
            sorted(_python_threads() - before[2]),
        ]
        if not any(left):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: sockets {left[0]}, children {left[1]}, threads {left[2]}")
        time.sleep(0.01)


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[Etcd]:
    """One healthy server for all tests that do it no harm."""
    with etcd() as server:
        yield server


@pytest.fixture
def own_etcd() -> Iterator[Etcd]:
    """A server of the test's own, to be stopped, killed and emptied."""
    with etcd() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[list[Etcd]]:
    with etcd_cluster(3) as members:
        yield members


@pytest.fixture
def own_proxy(own_etcd: Etcd) -> Iterator[Proxy]:
    with proxy(own_etcd) as made:
        yield made


_counter = itertools.count()


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"n{os.getpid()}-{next(_counter)}"


@pytest.fixture
def registry(etcd_server: Etcd, namespace: str) -> Iterator[EtcdRegistry]:
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace) as made:
        yield made


class Block(SimpleNamespace):
    """What a registry reads of a block, for tests that need no sockets."""


def start_time() -> int:
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def block(first: int, size: int = 1, **fields: Any) -> Block:
    owner = Owner(os.getpid(), start_time())
    values = {
        "first": first,
        "last": first + size - 1,
        "protocol": "tcp",
        "host": None,
        "label": "",
        "metadata": {},
        "owner": owner,
    }
    return Block(**(values | fields))
