"""Every kind of trouble a claim can meet, and how it ends."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import etcd3
import grpc
import pytest

import fastports
from fastports.errors import (
    PortsUnavailable,
    RegistryDenied,
    RegistryError,
    RegistryTimeout,
    RegistryUnavailable,
)
from fastports.etcd import EtcdRegistry
from fastports.retry import Retry

from .conftest import block
from .servers import Etcd, Proxy, enable_auth, etcd, wait_for

SEARCH = (20000, 29999)
PATIENT = Retry(1000, base=0.05, cap=0.2)


def claim_in_thread(registry: EtcdRegistry, wanted: Any, timeout: float) -> Any:
    """Start a claim; a function that waits for its result."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(registry.claim([wanted], search=SEARCH, timeout=timeout))
        except RegistryError as exc:
            results.append(exc)

    thread = threading.Thread(target=work)
    thread.start()

    def finish() -> Any:
        thread.join(30)
        (result,) = results
        return result

    return finish


def test_a_claim_goes_through_when_a_frozen_etcd_goes_on(own_etcd: Etcd, namespace: str) -> None:
    with EtcdRegistry(own_etcd.endpoint, namespace=namespace) as registry:
        registry.claim([block(30000)], search=SEARCH, timeout=5)
        own_etcd.freeze()
        finish = claim_in_thread(registry, block(20000, 4), 20)
        own_etcd.thaw()
        assert finish() == ()
        assert len(own_etcd.keys(f"v1/{namespace}/")) == 5


@pytest.mark.parametrize("emptied", [False, True])
def test_a_claim_goes_through_when_etcd_is_restarted(
    own_etcd: Etcd, namespace: str, emptied: bool
) -> None:
    with EtcdRegistry(own_etcd.endpoint, namespace=namespace, retry=PATIENT) as registry:
        registry.claim([block(30000)], search=SEARCH, timeout=5)
        own_etcd.kill()
        if emptied:
            own_etcd.wipe()
        finish = claim_in_thread(registry, block(20000, 4), 20)
        own_etcd.start()
        assert finish() == ()
        wait_for(lambda: len(own_etcd.keys(f"v1/{namespace}/")) == 5)


def test_c35_a_claim_without_etcd_names_the_endpoint_within_three_seconds(
    own_etcd: Etcd, namespace: str
) -> None:
    own_etcd.kill()
    with EtcdRegistry(own_etcd.endpoint, namespace=namespace) as registry:
        # A refused connection costs no time, and so often it is tried with pauses of so much.
        longest = [min(registry.retry.cap, registry.retry.base * 2**n) for n in range(7)]
        assert registry.retry.attempts == 8 and sum(longest) < 3
        before = fastports.stats().etcd_calls
        with pytest.raises(RegistryUnavailable, match="refused") as caught:
            registry.claim([block(20000)], search=SEARCH, timeout=None)
        assert 1 < fastports.stats().etcd_calls - before <= 8
        assert caught.value.endpoint == own_etcd.endpoint
        assert caught.value.outcome == "not-applied"
        assert caught.value.retryable


def test_a_claim_goes_through_when_a_member_dies(cluster: list[Etcd], namespace: str) -> None:
    with EtcdRegistry(
        [m.endpoint for m in cluster], namespace=namespace, retry=PATIENT
    ) as registry:
        registry.claim([block(30000)], search=SEARCH, timeout=5)
        statuses = {
            member: json.loads(member.ctl("endpoint", "status", "-w", "json"))[0]["Status"]
            for member in cluster
        }
        leader = next(m for m, s in statuses.items() if s["leader"] == s["header"]["member_id"])
        leader.kill()
        assert not registry.claim([block(20000, 4)], search=SEARCH, timeout=20)
        other = next(m for m in cluster if m is not leader)
        assert len(other.keys(f"v1/{namespace}/")) == 5


def test_a_slow_etcd_is_waited_for(own_etcd: Etcd, own_proxy: Proxy, namespace: str) -> None:
    with EtcdRegistry(own_proxy.endpoint, namespace=namespace, ttl=5) as registry:
        mine = block(20000, 4)
        own_proxy.delay = 0.1
        assert not registry.claim([mine], search=SEARCH, timeout=10)
        assert registry.state(mine) == "held"
        own_proxy.delay = 0.4
        with pytest.raises(RegistryTimeout, match="in time"):
            registry.claim([block(21000)], search=SEARCH, timeout=0.3)
        own_proxy.delay = 0.0
        wait_for(lambda: len(own_etcd.keys(f"v1/{namespace}/")) == 4)


def test_a_full_disk_quota_is_told_and_passes(namespace: str) -> None:
    with (
        etcd(arguments=("--quota-backend-bytes=200000",)) as server,
        EtcdRegistry(server.endpoint, namespace=namespace, ttl=3600) as registry,
    ):
        mine = block(20000)
        registry.claim([mine], search=SEARCH, timeout=5)
        with pytest.raises(AssertionError):
            for number in range(40):
                server.ctl("put", f"filler{number}", text="x" * 100_000)
        before = fastports.stats().etcd_calls
        with pytest.raises(RegistryError, match="database space exceeded") as caught:
            registry.claim([block(21000)], search=SEARCH, timeout=10)
        assert fastports.stats().etcd_calls == before + 1  # not tried again: it would not help
        assert caught.value.outcome == "not-applied"
        assert not caught.value.retryable
        registry.release([mine])  # may have to wait: etcd may refuse even a deleting transaction
        server.ctl("del", "filler", "--prefix")
        revision = json.loads(server.ctl("endpoint", "status", "-w", "json"))[0]["Status"][
            "header"
        ]["revision"]
        server.ctl("compact", str(revision))
        server.ctl("defrag")
        server.ctl("alarm", "disarm")
        registry._here().suspect()  # not to wait for the next keepalive
        wait_for(lambda: server.keys(f"v1/{namespace}/") == [])
        assert not registry.claim([block(22000)], search=SEARCH, timeout=10)


def test_too_many_requests_are_told_and_waited_for(own_etcd: Etcd, namespace: str) -> None:
    """etcd takes no more when 5,000 requests are agreed upon and wait to be applied."""
    rpc = etcd3.etcdrpc
    with (
        EtcdRegistry(own_etcd.endpoint, namespace=namespace, ttl=600, retry=Retry(1)) as impatient,
        EtcdRegistry(own_etcd.endpoint, namespace=namespace, ttl=600, retry=PATIENT) as patient,
        grpc.insecure_channel(own_etcd.endpoint) as channel,
    ):
        for number, registry in enumerate((impatient, patient)):
            assert not registry.claim([block(30000 + number)], search=SEARCH, timeout=20)
        stub = rpc.KVStub(channel)
        put = rpc.PutRequest(key=b"filler")
        for start in range(0, 5000, 100):
            stub.Txn(
                rpc.TxnRequest(
                    success=[
                        rpc.RequestOp(
                            request_put=rpc.PutRequest(key=b"sorted/%05d" % (start + number))
                        )
                        for number in range(100)
                    ]
                ),
                timeout=20,
            )
        # Sorting takes its time, and everybody else waits for whoever writes in the same breath.
        by_value = rpc.RangeRequest(
            key=b"sorted/", range_end=b"sorted0", limit=1,
            sort_order=rpc.RangeRequest.DESCEND, sort_target=rpc.RangeRequest.VALUE,
        )  # fmt: skip
        begin = time.monotonic()
        for _ in range(5):
            stub.Range(by_value, timeout=20)
        often = min(64, max(1, round(8 / 64 / ((time.monotonic() - begin) / 5))))
        many = rpc.TxnRequest(success=[rpc.RequestOp(request_range=by_value)] * often)
        slow = rpc.TxnRequest(
            success=[
                rpc.RequestOp(request_put=put),
                *[rpc.RequestOp(request_txn=many)] * 63,
            ]
        )
        waiting: list[Any] = []
        refused = False
        for number in range(24_000):
            if number % 8000 == 0:
                waiting.append(stub.Txn.future(slow, timeout=60))
            waiting.append(stub.Put.future(put, timeout=60))
            if number >= 5000 and number % 100 == 0:
                refused = any(
                    each.done() and "too many requests" in str(each.exception())
                    for each in waiting[-500:]
                )
            if refused:
                break
        assert refused
        with pytest.raises(RegistryError, match="too many requests") as caught:
            impatient.claim([block(20000)], search=SEARCH, timeout=20)
        assert caught.value.retryable and caught.value.outcome == "not-applied"
        assert not patient.claim([block(21000)], search=SEARCH, timeout=60)
        for each in waiting:
            each.cancel()
        assert len(own_etcd.keys(f"v1/{namespace}/")) == 3


def test_a_request_that_is_too_large_is_not_sent_twice(namespace: str) -> None:
    with (
        etcd(arguments=("--max-request-bytes=20000",)) as server,
        EtcdRegistry(server.endpoint, namespace=namespace) as registry,
    ):
        with pytest.raises(RegistryError, match="too large") as caught:
            registry.claim(
                [block(20000, 2, metadata={"x": "y" * 15000})], search=SEARCH, timeout=10
            )
        assert caught.value.outcome == "not-applied" and not caught.value.retryable
        assert server.keys(f"v1/{namespace}/") == []
        assert not registry.claim([block(20000, 2)], search=SEARCH, timeout=10)


def test_a_right_taken_away_is_told_and_works_again_when_given_back(namespace: str) -> None:
    with etcd() as server:
        enable_auth(server)
        with EtcdRegistry(
            server.endpoint, namespace=namespace, user="launcher", password="pw"
        ) as registry:
            assert not registry.claim([block(20000)], search=SEARCH, timeout=5)
            server.ctl("user", "revoke-role", "launcher", "ports")
            with pytest.raises(RegistryDenied, match="permission denied"):
                registry.claim([block(21000)], search=SEARCH, timeout=5)
            server.ctl("user", "grant-role", "launcher", "ports")
            assert not registry.claim([block(22000)], search=SEARCH, timeout=5)


def test_sixty_cuts_end_in_what_was_asked_for(
    own_etcd: Etcd, own_proxy: Proxy, namespace: str
) -> None:
    """Cuts at a walking position of both directions while four threads claim and release."""
    with EtcdRegistry(own_proxy.endpoint, namespace=namespace, retry=PATIENT) as registry:
        registry.claim([block(30000)], search=SEARCH, timeout=5)
        done = threading.Event()
        failures: list[Any] = []
        kept: list[Any] = []

        def work(number: int) -> None:
            for turn in range(25):
                mine = block(20000 + number * 1000 + turn * 8, 4)
                try:
                    if registry.claim([mine], search=SEARCH, timeout=60):
                        failures.append(mine.first)
                except RegistryError as exc:
                    failures.append(exc)
                if turn % 2:
                    registry.release([mine])
                else:
                    kept.append(mine)

        def saw() -> None:
            position = 0
            for _ in range(60):
                if done.wait(0.03):
                    return
                position = (position * 7 + 13) % 1500
                if position % 2:
                    own_proxy.cut_answer_at = position
                else:
                    own_proxy.cut_request_at = position

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        saw_thread = threading.Thread(target=saw)
        for thread in (*threads, saw_thread):
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        saw_thread.join()
        own_proxy.cut_answer_at = own_proxy.cut_request_at = None
        assert failures == []
        wait_for(lambda: len(own_etcd.keys(f"v1/{namespace}/")) == 1 + 4 * len(kept))
        assert all(registry.state(each) == "held" for each in kept)


def test_an_error_of_the_registry_is_no_refusal(namespace: str) -> None:
    assert not issubclass(RegistryError, PortsUnavailable)
