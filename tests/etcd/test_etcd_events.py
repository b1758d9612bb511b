"""What is told of the record in etcd, and how its calls are counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import fastports
from fastports import hooks
from fastports.etcd import EtcdRegistry
from fastports.hooks import Event

from .conftest import block
from .servers import Etcd, wait_for

SEARCH = (20000, 29999)


@pytest.fixture
def told() -> Iterator[list[Event]]:
    found: list[Event] = []
    with hooks.subscribe(found.append):
        yield found


def of(told: list[Event], name: str) -> list[Any]:
    return [event.facts for event in told if event.name == name]


def test_a_lease_that_is_lost_and_the_records_that_come_back_are_told(
    etcd_server: Etcd, namespace: str, told: list[Event]
) -> None:
    before = fastports.stats()
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace, ttl=2) as registry:
        blocks = [block(20000, 2, label="a"), block(21000, label="b")]
        registry.claim(blocks, search=SEARCH, timeout=5)
        lease = registry._here().lease
        etcd_server.ctl("lease", "revoke", f"{lease:x}")
        wait_for(lambda: len(of(told, "record_restored")) == 2)
    granted, again = of(told, "lease_granted")
    assert granted["lease"] == lease != again["lease"] and granted["ttl"] == 2
    (lost,) = of(told, "lease_lost")
    assert (lost["lease"], lost["blocks"]) == (lease, 2)
    assert "expired or was revoked" in lost["reason"]
    for event in ("record_lost", "record_restored"):
        assert [(f["ports"], f["label"]) for f in of(told, event)] == [
            ("20000-20001", "a"),
            ("21000", "b"),
        ]
    assert fastports.stats().leases_lost == before.leases_lost + 1


def test_another_owner_under_our_ports_is_told_and_counted(
    etcd_server: Etcd, namespace: str, told: list[Event]
) -> None:
    before = fastports.stats().contested
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace, ttl=2) as registry:
        held = [block(20000)]
        registry.claim(held, search=SEARCH, timeout=5)
        (key,) = etcd_server.keys(f"v1/{namespace}/")
        etcd_server.ctl("put", key, "somebody else's")
        etcd_server.ctl("lease", "revoke", f"{registry._here().lease:x}")
        wait_for(lambda: of(told, "record_contested"))
        etcd_server.ctl("del", key)
    (contested,) = of(told, "record_contested")
    assert (contested["first"], contested["protocol"]) == (20000, "tcp")
    assert fastports.stats().contested == before + 1


def test_silence_is_told_once_and_its_end_too(
    own_etcd: Etcd, namespace: str, told: list[Event]
) -> None:
    with EtcdRegistry(own_etcd.endpoint, namespace=namespace, ttl=2) as registry:
        held = [block(20000)]
        registry.claim(held, search=SEARCH, timeout=5)
        own_etcd.kill()
        wait_for(lambda: len(of(told, "etcd_fault")) >= 3)
        own_etcd.restart()
        wait_for(lambda: of(told, "etcd_back"))
        wait_for(lambda: registry.state(held[0]) == "held")
    assert [f["blocks"] for f in of(told, "etcd_silent")] == [1]
    assert len(of(told, "etcd_back")) == 1
    assert {f["endpoint"] for f in of(told, "etcd_fault")} == {own_etcd.endpoint}


def test_round_trips_their_time_and_their_faults_are_counted(
    etcd_server: Etcd, namespace: str
) -> None:
    before = fastports.stats()
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace, ttl=60) as registry:
        held = [block(20000)]
        registry.claim(held, search=SEARCH, timeout=5)  # a lease, a transaction
        registry.release(held)  # a transaction
        after = fastports.stats()
    assert after.etcd_calls - before.etcd_calls == 3
    assert after.etcd_faults == before.etcd_faults
    assert 0 < after.etcd_seconds - before.etcd_seconds < 60
    with (
        EtcdRegistry("127.0.0.1:1", namespace=namespace) as registry,
        pytest.raises(fastports.RegistryUnavailable),
    ):
        registry.claim([block(20000)], search=SEARCH, timeout=1)
    assert fastports.stats().etcd_faults > before.etcd_faults
