"""Many processes whose etcd was away: they come back one after another, with little to say."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

from fastports.etcd import EtcdRegistry
from fastports.etcd.session import comeback, later

from .conftest import block
from .servers import Etcd, wait_for

SEARCH = (20000, 29999)


def first_call_after(outage: float, granted: float, asked: float) -> float:
    """When a process comes back whose last keepalive before the outage was due at ``asked``."""
    now, failures = asked, 0
    while now < outage:
        failures += 1
        now += comeback(failures, granted)
    return now


def test_ten_thousand_processes_do_not_come_back_together() -> None:
    draw = random.Random(8)
    granted, outage = 30.0, 90.0
    arrivals = [
        first_call_after(outage, granted, draw.random() * granted / 3) for _ in range(10_000)
    ]
    assert max(arrivals) <= outage + granted / 3  # and none is forgotten
    tenths = Counter(int((at - outage) * 10) for at in arrivals)
    # 200 in the first tenth of a second if they know nothing of each other; fewer later on.
    assert max(tenths.values()) < 300


def test_ten_thousand_processes_that_failed_together_do_not_ask_again_together() -> None:
    """The server fails all of them at one moment: a reset of all connections, say."""
    tenths = Counter(int(comeback(1, 30.0) * 10) for _ in range(10_000))
    assert len(tenths) == 4 and max(tenths.values()) < 3_000
    tenths = Counter(int(comeback(9, 30.0) * 10) for _ in range(10_000))
    assert len(tenths) == 100 and max(tenths.values()) < 200


def test_looks_for_late_arrivals_are_jittered_too() -> None:
    for looks, usual in ((0, 0.125), (1, 0.5), (2, 2.0), (3, 8.0), (9, 8.0)):
        pauses = [later(looks) for _ in range(400)]
        assert 0.75 * usual <= min(pauses) < 0.8 * usual
        assert 1.2 * usual < max(pauses) <= 1.25 * usual


def test_launchers_whose_records_are_lost_need_few_calls_each_to_write_them_again(
    own_etcd: Etcd, namespace: str, soak: bool
) -> None:
    count = 300 if soak else 30
    with contextlib.ExitStack() as stack:
        registries = [
            stack.enter_context(EtcdRegistry(own_etcd.endpoint, namespace=namespace, ttl=3))
            for _ in range(count)
        ]
        blocks = [block(20000 + number * 10, 4) for number in range(count)]
        both = list(zip(registries, blocks, strict=True))
        for registry, mine in both:
            assert not registry.claim([mine], search=SEARCH, timeout=10)
        own_etcd.kill()
        wait_for(lambda: all(registry.state(mine) == "degraded" for registry, mine in both), 30)
        own_etcd.wipe()
        own_etcd.start()
        wait_for(lambda: all(registry.state(mine) == "held" for registry, mine in both), 60)
        served = own_etcd.served()
        assert len(own_etcd.keys(f"v1/{namespace}/")) == 4 * count
        # A keepalive that finds the lease gone, a new lease, the records; then a look or two.
        assert served["Txn"] + served.get("Range", 0) <= count * 4
        assert served["LeaseGrant"] <= count * 2
