"""Listings and watches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from fastports.errors import InvalidRequest, RegistryDenied
from fastports.etcd import EtcdRegistry, watch
from fastports.etcd.connection import Call

from .conftest import block
from .servers import Etcd, Proxy, enable_auth, etcd, wait_for

SEARCH = (20000, 29999)


def spans(listing: Any) -> list[tuple[int, int]]:
    return [(entry.first, entry.last) for entry in listing]


@pytest.fixture
def three(etcd_server: Etcd, namespace: str) -> Iterator[list[EtcdRegistry]]:
    """Three hosts with two blocks each."""
    made = []
    for number in range(3):
        registry = EtcdRegistry(
            etcd_server.endpoint, namespace=namespace, host_id=f"10.0.0.{number}"
        )
        made.append(registry)
        registry.claim(
            [block(20000 + number, 4, label=f"a{number}"), block(25000, 2, protocol="both")],
            search=SEARCH,
            timeout=5,
        )
    yield made
    for registry in made:
        registry.close()


def test_entries_show_the_whole_cluster_or_one_host_or_a_range(three: list[EtcdRegistry]) -> None:
    registry = three[0]
    assert len(list(registry.entries())) == 6
    assert spans(registry.entries(host="10.0.0.1")) == [(20001, 20004), (25000, 25001)]
    assert spans(registry.entries(range="25001-25999", host="10.0.0.2")) == [(25000, 25001)]
    assert spans(registry.entries(range=(20000, 20000))) == [(20000, 20003)]
    assert spans(registry.entries(range=range(1, 100))) == []
    assert spans(registry.entries(namespace="of-nobody")) == []
    mine = {e.extra["host_id"] for e in registry.entries(namespace="*") if e.label[:1] == "a"}
    assert mine >= {"10.0.0.0", "10.0.0.1", "10.0.0.2"}


def test_an_entry_tells_what_its_owner_recorded(three: list[EtcdRegistry], namespace: str) -> None:
    entry = next(three[1].entries(host="10.0.0.1"))
    assert (entry.label, entry.protocol, entry.pid) == ("a1", "tcp", os.getpid())
    assert entry.alive is True and 0 <= entry.age < 600
    assert entry.extra["namespace"] == namespace
    assert entry.extra["hostname"] == os.uname().nodename


@pytest.mark.parametrize("word", ["", "a/b", "a\nb", "a\x00b", 5, "x" * 201, "\ud800"])
def test_a_namespace_or_host_that_is_none_is_refused(registry: EtcdRegistry, word: Any) -> None:
    for argument in ("namespace", "host"):
        for look in (registry.entries, registry.watch):
            with pytest.raises(InvalidRequest) as caught:
                look(**{argument: word})
            assert caught.value.argument == argument


@pytest.mark.parametrize("ports", ["x", (5, 1), (0, 5), 7, range(1, 9, 2), "1-70000"])
def test_a_malformed_range_is_refused(registry: EtcdRegistry, ports: Any) -> None:
    with pytest.raises(InvalidRequest):
        registry.entries(range=ports)


def test_listings_are_read_in_pages_at_one_revision(
    registry: EtcdRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PAGE", 7)
    blocks = [block(20000 + 10 * n, 3) for n in range(20)]
    registry.claim(blocks, search=SEARCH, timeout=5)
    listing = registry.entries()
    first = next(listing)
    registry.release(blocks[10:])  # what ends in between still stands in this listing
    assert [first.first, *(e.first for e in listing)] == [20000 + 10 * n for n in range(20)]
    assert len(list(registry.entries())) == 10


def test_what_strangers_wrote_is_counted_and_not_listed(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    registry.claim([block(20000, 2)], search=SEARCH, timeout=5)
    place = f"v1/{namespace}/ports/{registry.host_id}"
    session = registry._here()
    rpc = session.connection.rpc
    strange = {
        f"{place}/20010": b"plain words",
        f"{place}/20011": b"x" * (1 << 20),
        f"{place}/20012": b"\xff\x00\xfe",
        f"{place}/20013": b'{"v":1,"first":30000,"size":2,"protocol":"tcp","token":"t"}',
        f"{place}/20014": b"[1, 2]",
        f"{place}/20015": b'{"v":1,"first":20015,"size":"many"}',
        f"{place}/20016": b'{"v":1,"first":20016,"size":1,"protocol":["tcp"]}',
        f"{place}/20017": b"[" * 30_000,
        f"{place}/99999": b'{"v":1}',
        f"{place}/020019": b'{"v":1}',
        f"{place}/2001x": b'{"v":1}',
        f"{place}/20014\udcff": b'{"v":1}',
        f"v1/{namespace}/ports/20018": b'{"v":1}',
        f"v1/{namespace}/ports//20018": b'{"v":1}',
        f"v1/{namespace}/ports-udp/{registry.host_id}/20018": b'{"first":20018,"protocol":"tcp"}',
    }
    for name, value in strange.items():
        request = rpc.PutRequest(key=name.encode(errors="surrogateescape"), value=value)
        put = rpc.TxnRequest(success=[rpc.RequestOp(request_put=request)])
        session.ask("txn", put, Call(5))
    listing = registry.entries()
    assert spans(listing) == [(20000, 20001)]
    assert listing.skipped == len(strange)
    taken = registry.claim([block(20010, 8)], search=SEARCH, timeout=5)
    assert set(taken) == {20000, 20001, *range(20010, 20018)}
    assert registry.claim([block(20018, protocol="both")], search=SEARCH, timeout=5)
    assert not registry.claim([block(20018)], search=SEARCH, timeout=5)


def test_a_pid_that_is_none_is_not_shown(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    for port, pid in ((21000, 10**30), (21001, -1), (21002, '"77"'), (21003, 77)):
        place = f"v1/{namespace}/ports/{registry.host_id}/{port}"
        etcd_server.ctl("put", place, text=f'{{"pid": {pid}, "start": 5}}')
    assert [entry.pid for entry in registry.entries()] == [0, 0, 0, 77]


def test_fields_nobody_knows_yet_and_the_ancestors_values_are_read(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    place = f"v1/{namespace}/ports/{registry.host_id}"
    etcd_server.ctl(
        "put", f"{place}/21000",
        text='{"worker_id":"vllm-backend-dp0","reason":"zmq_kv_event_port",'
        '"reserved_at":1700000000.5,"pid":77,"block_size":1}',
    )  # fmt: skip
    etcd_server.ctl(
        "put", f"{place}/21001",
        text='{"v":9,"first":21001,"size":1,"protocol":"tcp","colour":"blue","reserved_at":"x"}',
    )  # fmt: skip
    old, new = registry.entries()
    assert (old.first, old.label, old.pid) == (21000, "vllm-backend-dp0", 77)
    assert old.age > 1e6 and old.alive is None
    assert new.extra["colour"] == "blue"


def take(changes: Any, count: int) -> list[tuple[str, int]]:
    """The next changes, as (kind, first port); fails if they do not come."""
    seen: list[tuple[str, int]] = []
    for _ in range(count):
        change = changes.get(timeout=10)
        assert change is not None, seen
        seen.append((change.kind, change.entry.first))
    return seen


def test_a_watch_tells_what_stands_and_then_every_change_once(
    registry: EtcdRegistry, namespace: str
) -> None:
    old, new = block(20000, 4), block(21000, 300, protocol="both")
    registry.claim([old], search=SEARCH, timeout=5)
    with registry.watch() as changes:
        assert take(changes, 1) == [("recorded", 20000)]
        registry.claim([new], search=SEARCH, timeout=5)
        assert take(changes, 1) == [("recorded", 21000)]
        registry.release([old, new])
        assert sorted(take(changes, 2)) == [("released", 20000), ("released", 21000)]
        assert changes.get(timeout=0.2) is None


def test_a_watch_ends_when_it_is_closed(registry: EtcdRegistry) -> None:
    import threading

    changes = registry.watch()
    ended = threading.Event()

    def follow() -> None:
        for _ in changes:
            pass
        ended.set()

    thread = threading.Thread(target=follow)
    thread.start()
    mine = block(20000)
    registry.claim([mine], search=SEARCH, timeout=5)
    changes.close()
    changes.close()
    thread.join(5)
    assert ended.is_set()
    assert changes.get(timeout=1) is None


def test_a_watch_may_be_closed_at_the_moment_it_begins(registry: EtcdRegistry) -> None:
    import threading

    for _ in range(200):
        changes = registry.watch()
        both = threading.Barrier(2)

        def follow(changes: Any = changes, both: Any = both) -> None:
            both.wait(5)
            list(changes)

        thread = threading.Thread(target=follow)
        thread.start()
        both.wait(5)
        changes.close()
        thread.join(5)
        assert not thread.is_alive()


def test_a_forgotten_watch_ends_its_thread(registry: EtcdRegistry) -> None:
    mine = block(20000)
    registry.claim([mine], search=SEARCH, timeout=5)
    changes = registry.watch()
    assert take(changes, 1)
    del changes  # the leak check of every test sees a thread that stays


def test_a_watch_goes_on_after_cuts_and_compactions(
    own_etcd: Etcd, own_proxy: Proxy, namespace: str
) -> None:
    with (
        EtcdRegistry(own_etcd.endpoint, namespace=namespace) as registry,
        EtcdRegistry(own_proxy.endpoint, namespace=namespace) as watcher,
        watcher.watch() as changes,
    ):
        blocks = [block(20000 + n * 10, 2) for n in range(12)]
        expected = []
        for number, mine in enumerate(blocks):
            if number % 3 == 1:
                own_proxy.cut()
            elif number % 3 == 2:
                own_proxy.refuse = True
                own_proxy.cut()
            registry.claim([mine], search=SEARCH, timeout=5)
            expected.append(("recorded", mine.first))
            if number % 3 == 2:
                # What happened while nobody was listening is compacted away before it can.
                own_etcd.ctl("compact", str(registry._here().history[2]))
                own_proxy.refuse = False
            assert take(changes, 1) == expected[-1:]
        registry.release(blocks[:6])
        assert sorted(take(changes, 6)) == [("released", b.first) for b in blocks[:6]]
        assert changes.get(timeout=0.2) is None


def test_a_watch_survives_an_emptied_etcd(own_etcd: Etcd, namespace: str) -> None:
    with EtcdRegistry(own_etcd.endpoint, namespace=namespace, ttl=2) as registry:
        mine, gone = block(20000), block(21000)
        with registry.watch() as changes:
            registry.claim([mine, gone], search=SEARCH, timeout=5)
            assert sorted(take(changes, 2)) == [("recorded", 20000), ("recorded", 21000)]
            for number in range(10):  # a history that is longer than what the new one will have
                passing = block(22000 + number)
                registry.claim([passing], search=SEARCH, timeout=5)
                registry.release([passing])
            take(changes, 20)
            own_etcd.kill()
            registry.release([gone])
            own_etcd.wipe()
            own_etcd.start()
            seen: list[tuple[str, int]] = []

            def settled() -> bool:
                change = changes.get(timeout=0.05)
                if change is not None:
                    seen.append((change.kind, change.entry.first))
                standing = {first: kind for kind, first in seen}
                return standing.get(21000) == "released" and standing.get(20000) != "released"

            wait_for(settled, 15)
            wait_for(lambda: registry.state(mine) == "held")
            assert [kind for kind, first in seen if first == 21000] == ["released"]


def test_a_watch_without_the_right_to_read_is_told(namespace: str) -> None:
    with etcd() as server:
        enable_auth(server)
        with (
            EtcdRegistry(
                server.endpoint, namespace=namespace, user="stranger", password="pw"
            ) as registry,
            registry.watch() as changes,
            pytest.raises(RegistryDenied),
        ):
            changes.get(timeout=10)
