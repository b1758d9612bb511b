"""Claim and release: one transaction, all or nothing, and only one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastports.etcd import EtcdRegistry
from fastports.etcd.keys import network_identity
from fastports.registry import Owner

from .conftest import block
from .servers import Etcd, Proxy, wait_for

SEARCH = (20000, 29999)


def key(namespace: str, port: int, host: str | None = None, space: str = "ports") -> str:
    return f"v1/{namespace}/{space}/{host or network_identity()}/{port:05d}"


def put(server: Etcd, name: str, value: str) -> None:
    server.ctl("put", name, text=value)


class Counted:
    """Counts the calls that a registry's session makes."""

    def __init__(self, registry: EtcdRegistry) -> None:
        self.calls: list[str] = []
        connection = registry._here().connection
        genuine = connection._pass

        def counting(name: str, request: Any, call: Any) -> Any:
            self.calls.append(name)
            return genuine(name, request, call)

        connection._pass = counting  # type: ignore[method-assign]


def test_a_claim_writes_one_key_per_port_and_a_release_removes_them(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    mine = block(20417, 8)
    assert not registry.claim([mine], search=SEARCH, timeout=5)
    assert etcd_server.keys(f"v1/{namespace}/") == [key(namespace, p) for p in range(20417, 20425)]
    registry.release([mine])
    assert etcd_server.keys(f"v1/{namespace}/") == []


def test_the_value_says_who_has_what_and_for_what(etcd_server: Etcd, namespace: str) -> None:
    with EtcdRegistry(etcd_server.url, namespace=namespace, advertise="10.0.0.7") as registry:
        mine = block(20000, 2, label="decode-0", metadata={"reason": "nixl", "tp": 8})
        registry.claim([mine], search=SEARCH, timeout=5)
        raw = etcd_server.ctl("get", key(namespace, 20001), "--print-value-only")
    value = json.loads(raw)
    owner: Owner = mine.owner
    expected = {
        "v": 1,
        "token": owner.token,
        "pid": os.getpid(),
        "start": owner.start,
        "hostname": os.uname().nodename,
        "address": "10.0.0.7",
        "first": 20000,
        "size": 2,
        "protocol": "tcp",
        "label": "decode-0",
        "metadata": {"reason": "nixl", "tp": 8},
    }
    assert {name: value[name] for name in expected} == expected
    assert value["reserved_at"].endswith("+00:00")


@pytest.mark.parametrize("size", [1, 8, 32, 512, 4096])
def test_a_claim_is_one_round_trip_whatever_its_size(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str, size: int
) -> None:
    registry.claim([block(60000)], search=SEARCH, timeout=5)  # the lease
    counted = Counted(registry)
    mine = block(20000, size)
    assert not registry.claim([mine], search=SEARCH, timeout=10)
    assert counted.calls == ["txn"]
    assert len(etcd_server.keys(f"v1/{namespace}/")) == size + 1
    registry.release([mine])
    assert counted.calls == ["txn", "txn"]
    assert len(etcd_server.keys(f"v1/{namespace}/")) == 1


def test_a_block_of_both_protocols_takes_a_tcp_and_a_udp_key_of_each_port(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    registry.claim([block(21000, 3, protocol="both")], search=SEARCH, timeout=5)
    assert etcd_server.keys(f"v1/{namespace}/") == [
        key(namespace, p, space=s) for s in ("ports-udp", "ports") for p in (21000, 21001, 21002)
    ]
    assert registry.claim([block(21001, protocol="udp")], search=SEARCH, timeout=5)


def test_4096_ports_of_both_protocols_fit_into_one_transaction(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    mine = block(30000, 4096, protocol="both", metadata={"filler": "x" * 500})
    assert not registry.claim([mine], search=(30000, 39999), timeout=20)
    assert len(etcd_server.keys(f"v1/{namespace}/")) == 8192
    registry.release([mine])
    assert etcd_server.keys(f"v1/{namespace}/") == []


def test_tcp_and_udp_of_one_number_are_two_ports(registry: EtcdRegistry) -> None:
    assert not registry.claim([block(21000)], search=SEARCH, timeout=5)
    assert not registry.claim([block(21000, protocol="udp")], search=SEARCH, timeout=5)


def test_many_blocks_are_recorded_together_or_not_at_all(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    registry.claim([block(25003)], search=SEARCH, timeout=5)
    wanted = [block(22000), block(23000, 8), block(25000, 4)]
    assert set(registry.claim(wanted, search=SEARCH, timeout=5)) == {25003}
    assert etcd_server.keys(f"v1/{namespace}/") == [key(namespace, 25003)]
    assert not registry.claim([*wanted[:2], block(26000, 300)], search=SEARCH, timeout=5)
    assert len(etcd_server.keys(f"v1/{namespace}/")) == 1 + 1 + 8 + 300


def test_a_refusal_teaches_every_foreign_port_of_the_range_in_one_round_trip(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace) as other:
        for first in range(20000, 20500, 100):
            other.claim([block(first, 4)], search=SEARCH, timeout=5)
        registry.claim([block(40000)], search=SEARCH, timeout=5)
        counted = Counted(registry)
        taught = registry.claim([block(20098, 4)], search=(20000, 20399), timeout=5)
        assert set(taught) == {p + i for p in range(20000, 20400, 100) for i in range(4)}
        assert not registry.claim([block(20050, 4)], search=(20000, 20399), timeout=5)
        assert counted.calls == ["txn", "txn"]


def test_equal_host_ids_exclude_each_other_and_different_ones_do_not(
    etcd_server: Etcd, namespace: str
) -> None:
    with (
        EtcdRegistry(etcd_server.endpoint, namespace=namespace, host_id="10.0.0.1") as one,
        EtcdRegistry(etcd_server.endpoint, namespace=namespace, host_id="10.0.0.1") as same,
        EtcdRegistry(etcd_server.endpoint, namespace=namespace, host_id="10.0.0.2") as other,
    ):
        assert not one.claim([block(20000)], search=SEARCH, timeout=5)
        assert same.claim([block(20000)], search=SEARCH, timeout=5)
        assert not other.claim([block(20000)], search=SEARCH, timeout=5)


def test_c28_the_default_host_id_is_the_network_namespace(registry: EtcdRegistry) -> None:
    import ctypes

    def elsewhere() -> str | None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x40000000):  # CLONE_NEWNET, of this thread alone
            return None
        return registry.host_id

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(elsewhere).result()
    if there is None:
        pytest.skip("needs the right to make a network namespace")
    assert there != registry.host_id
    assert registry.host_id == network_identity()


def test_c27_a_stale_owner_does_not_release_what_another_one_has(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    stale = block(20000, 4)
    registry.claim([stale], search=SEARCH, timeout=5)
    etcd_server.ctl("del", f"v1/{namespace}/", "--prefix")
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace) as other:
        assert not other.claim([block(20002, 4)], search=SEARCH, timeout=5)
        registry.release([stale])
        assert etcd_server.keys(f"v1/{namespace}/") == [
            key(namespace, p) for p in range(20002, 20006)
        ]


def test_a_release_among_strangers_removes_exactly_the_own_keys(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    mine = block(20000, 6)
    registry.claim([mine], search=SEARCH, timeout=5)
    put(etcd_server, key(namespace, 20002), "overwritten by somebody")
    put(etcd_server, key(namespace, 20004) + "x", "a stray between two keys")
    registry.release([mine])
    assert etcd_server.keys(f"v1/{namespace}/") == [
        key(namespace, 20002),
        key(namespace, 20004) + "x",
    ]


def test_release_is_idempotent_and_passes_over_blocks_never_claimed(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    mine = block(20000)
    registry.release([mine])
    registry.claim([mine], search=SEARCH, timeout=5)
    counted = Counted(registry)
    registry.release([mine, block(20001)])
    registry.release([mine])
    assert counted.calls == ["txn"]
    assert etcd_server.keys(f"v1/{namespace}/") == []


def test_a_stray_key_between_two_ports_blocks_neither(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    put(etcd_server, key(namespace, 20001) + "7", "not a port")
    mine = block(20000, 4)
    assert not registry.claim([mine], search=SEARCH, timeout=5)
    assert len(etcd_server.keys(f"v1/{namespace}/")) == 5


@pytest.mark.parametrize(
    "value", ["plain words", '{"worker_id": "w", "reason": "r"}', "\x00\x01\x02", "[" * 9999]
)
def test_a_key_of_another_program_takes_its_port_whatever_its_value(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str, value: str
) -> None:
    put(etcd_server, key(namespace, 20002), value)
    assert set(registry.claim([block(20000, 4)], search=SEARCH, timeout=5)) == {20002}


def test_dying_ends_the_lease_and_with_it_every_key(etcd_server: Etcd, namespace: str) -> None:
    leases = set(etcd_server.leases())
    registry = EtcdRegistry(etcd_server.endpoint, namespace=namespace)
    registry.claim([block(20000, 4), block(21000)], search=SEARCH, timeout=5)
    assert len(set(etcd_server.leases()) - leases) == 1
    registry.close()
    registry.close()
    assert etcd_server.keys(f"v1/{namespace}/") == []
    assert set(etcd_server.leases()) <= leases


def test_a_registry_that_nobody_has_any_more_ends_its_lease(
    etcd_server: Etcd, namespace: str
) -> None:
    registry = EtcdRegistry(etcd_server.endpoint, namespace=namespace)
    registry.claim([block(20000, 4)], search=SEARCH, timeout=5)
    del registry
    wait_for(lambda: not etcd_server.keys(f"v1/{namespace}/"))


def test_a_finalizer_releases_without_waiting(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    mine = block(20000, 4)
    registry.claim([mine], search=SEARCH, timeout=5)
    session = registry._here()
    with session.lock:  # a finalizer may run inside any code, this lock's holder included
        registry.release_later([mine])
    wait_for(lambda: not etcd_server.keys(f"v1/{namespace}/"))


def test_a_claim_whose_answer_is_lost_is_found_to_have_happened(
    own_etcd: Etcd, own_proxy: Proxy, namespace: str
) -> None:
    with EtcdRegistry(own_proxy.endpoint, namespace=namespace) as registry:
        registry.claim([block(30000)], search=SEARCH, timeout=5)
        for size in (1, 8, 200):
            mine = block(20000, size)
            own_proxy.cut_answer_at = 0
            assert not registry.claim([mine], search=SEARCH, timeout=5)
            assert len(own_etcd.keys(f"v1/{namespace}/")) == size + 1
            registry.release([mine])


def test_a_claim_cut_at_any_byte_of_the_answer_is_neither_lost_nor_doubled(
    own_etcd: Etcd, own_proxy: Proxy, namespace: str
) -> None:
    with EtcdRegistry(own_proxy.endpoint, namespace=namespace) as registry:
        registry.claim([block(30000)], search=SEARCH, timeout=5)
        for position in range(0, 120, 7):
            mine = block(20000 + position, 2)
            own_proxy.cut_answer_at = position
            assert not registry.claim([mine], search=SEARCH, timeout=5)
            own_proxy.cut_answer_at = None
            assert len(own_etcd.keys(f"v1/{namespace}/")) == 3
            registry.release([mine])
            assert len(own_etcd.keys(f"v1/{namespace}/")) == 1


def test_a_claim_cut_at_any_byte_of_the_request_is_neither_lost_nor_doubled(
    own_etcd: Etcd, own_proxy: Proxy, namespace: str
) -> None:
    with EtcdRegistry(own_proxy.endpoint, namespace=namespace) as registry:
        registry.claim([block(30000)], search=SEARCH, timeout=5)
        for position in range(0, 1400, 93):
            mine = block(20000, 2)
            own_proxy.cut_request_at = position
            assert not registry.claim([mine], search=SEARCH, timeout=5)
            own_proxy.cut_request_at = None
            registry.release([mine])
            assert len(own_etcd.keys(f"v1/{namespace}/")) == 1


def test_a_claim_given_up_at_its_deadline_leaves_nothing_once_etcd_answers(
    own_etcd: Etcd, namespace: str
) -> None:
    from fastports.errors import RegistryError

    with EtcdRegistry(own_etcd.endpoint, namespace=namespace, ttl=60) as registry:
        registry.claim([block(30000)], search=SEARCH, timeout=5)
        own_etcd.freeze()
        with pytest.raises(RegistryError) as caught:
            registry.claim([block(20000, 8)], search=SEARCH, timeout=0.3)
        assert caught.value.outcome == "unknown"
        own_etcd.thaw()
        wait_for(lambda: own_etcd.keys(f"v1/{namespace}/") == [key(namespace, 30000)])


# Runs in a process of its own: an interrupt that came at a moment that nobody foresaw would be the
# test runner's. The timer fires once, and its handler raises only while a call is under way, so
# that the interrupt is always inside of the try.
INTERRUPTED = """
    import contextlib, gc, os, random, signal, sys, time, warnings
    from types import SimpleNamespace as Block
    import fastports
    from fastports.etcd import EtcdRegistry
    from fastports.registry import Owner

    warnings.simplefilter("ignore", ResourceWarning)  # a block between return and assignment
    registry = EtcdRegistry(sys.argv[1], namespace=sys.argv[2], ttl=600)
    ports = fastports.Allocator(registry=registry)

    def block(first, last):
        return Block(first=first, last=last, protocol="tcp", host=None, label="", metadata={},
                     owner=Owner(1, 1))

    def call():
        # Where the claim itself is tried, its release is not cut short: it would be the caller's.
        global armed
        if sys.argv[3] == "claim":
            claimed = block(40000, 40031)
            try:
                assert not registry.claim([claimed], search=(40000, 49999), timeout=5)
                armed = False
            finally:
                registry.release([claimed])
        else:
            with ports.allocate(32):
                pass

    def sockets():
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        return found

    armed = False

    def interrupt(*_):
        global armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    kept = ports.allocate(1)
    call()
    begin = time.monotonic()
    for _ in range(10):
        call()
    usual = (time.monotonic() - begin) / 10
    before = sockets()
    cancelled = 0
    deadline = time.monotonic() + 60
    while cancelled < 100 and time.monotonic() < deadline:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + usual * random.random())
            call()
            armed = False
        except KeyboardInterrupt:
            cancelled += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        gc.collect()
        entries = [e for e in fastports.host.HostRegistry().entries() if e.pid == os.getpid()]
        if len(entries) == 1 and sockets() <= before:
            break
        time.sleep(0.01)
    print(cancelled, len(entries), sockets() - before, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("through", ["claim", "allocate"])
def test_a_hundred_claims_interrupted_at_random_points_leave_no_key_and_no_hold(
    etcd_server: Etcd, namespace: str, through: str
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), etcd_server.endpoint, namespace,
         through],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        report = child.stdout.readline()
        if not report:
            pytest.fail(child.communicate()[1])
        assert [int(word) for word in report.split()] == [100, 1, 0]
        # While it lives: what is gone is gone by its own doing, not with its lease.
        wait_for(lambda: len(etcd_server.keys(f"v1/{namespace}/")) == 1)
    finally:
        child.kill()
        child.communicate()


def test_sixteen_threads_share_a_registry(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    barrier = threading.Barrier(16)
    leases = set(etcd_server.leases())

    def work(number: int) -> list[Any]:
        barrier.wait()
        kept = []
        for turn in range(10):
            mine = block(20000 + number * 100 + turn * 4, 4)
            assert not registry.claim([mine], search=SEARCH, timeout=10)
            if turn % 2:
                registry.release([mine])
            else:
                kept.append(mine)
        return kept

    with ThreadPoolExecutor(16) as pool:
        kept = [each for part in pool.map(work, range(16)) for each in part]
    assert len(etcd_server.keys(f"v1/{namespace}/")) == len(kept) * 4
    assert len(set(etcd_server.leases()) - leases) == 1


def test_a_forked_child_starts_anew_and_leaves_the_parents_keys(
    etcd_server: Etcd, namespace: str
) -> None:
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace) as registry:
        mine = block(20000, 4)
        registry.claim([mine], search=SEARCH, timeout=5)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                registry.release([mine])
                assert registry.claim([block(20002)], search=SEARCH, timeout=5)
                assert not registry.claim([block(21000)], search=SEARCH, timeout=5)
                registry.close()
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        assert not registry.claim([block(22000)], search=SEARCH, timeout=5)
        assert etcd_server.keys(f"v1/{namespace}/") == [
            key(namespace, p) for p in (20000, 20001, 20002, 20003, 22000)
        ]
