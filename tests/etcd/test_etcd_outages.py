"""What happens to records, and to what blocks say of themselves, when etcd is in trouble."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fastports
from fastports.errors import LeaseLost, RegistryError
from fastports.etcd import EtcdRegistry
from fastports.retry import Retry

from .conftest import block
from .servers import Etcd, Proxy, debian, etcd, no_hang, wait_for

SEARCH = (20000, 29999)


class Events:
    """What the callbacks were told, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, str]] = []

    def on_lost(self, lost: Any, error: LeaseLost) -> None:
        self.seen.append(("lost", lost, error.reason))

    def on_restored(self, restored: Any) -> None:
        self.seen.append(("restored", restored, ""))

    def kinds(self, of: Any) -> list[str]:
        return [kind for kind, block, _ in self.seen if block is of]


def open_registry(endpoint: str, namespace: str, **options: Any) -> tuple[EtcdRegistry, Events]:
    events = Events()
    registry = EtcdRegistry(
        endpoint,
        namespace=namespace,
        ttl=2,
        on_lost=events.on_lost,
        on_restored=events.on_restored,
        **options,
    )
    return registry, events


def stands(server: Etcd, namespace: str, count: int) -> bool:
    return len(server.keys(f"v1/{namespace}/")) == count


def test_c36_a_revoked_lease_is_noticed_and_the_keys_come_back_under_the_same_token(
    etcd_server: Etcd, namespace: str
) -> None:
    registry, events = open_registry(etcd_server.endpoint, namespace)
    with registry:
        mine, other = block(20000, 4), block(21000, 600, protocol="both")
        registry.claim([mine], search=SEARCH, timeout=5)
        registry.claim([other], search=SEARCH, timeout=5)
        lease = registry._here().lease
        etcd_server.ctl("lease", "revoke", f"{lease:x}")
        assert stands(etcd_server, namespace, 0)
        wait_for(lambda: stands(etcd_server, namespace, 1204))
        wait_for(lambda: events.kinds(mine) == events.kinds(other) == ["lost", "restored"])
        assert registry.state(mine) == "held"
        value = etcd_server.ctl(
            "get", f"v1/{namespace}/ports/{registry.host_id}/20000", "--print-value-only"
        )
        assert mine.owner.token in value
        registry.release([mine, other])
        assert stands(etcd_server, namespace, 0)


def test_c34_an_outage_costs_no_port_and_the_same_keys_are_back_afterwards(
    own_etcd: Etcd, namespace: str, soak: bool
) -> None:
    registry, events = open_registry(own_etcd.endpoint, namespace)
    with registry, fastports.Allocator(registry=registry).allocate(8) as mine:
        before = own_etcd.keys(f"v1/{namespace}/")
        own_etcd.kill()
        wait_for(lambda: mine.state == "degraded")
        until = time.monotonic() + (90 if soak else 1)
        while time.monotonic() < until:
            for port in mine:
                with socket.socket() as thief, pytest.raises(OSError):
                    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    thief.bind(("0.0.0.0", port))
            time.sleep(0.1)
        own_etcd.wipe()  # as if its disk was lost
        own_etcd.start()
        wait_for(lambda: mine.state == "held", 20)
        assert own_etcd.keys(f"v1/{namespace}/") == before
        wait_for(lambda: events.kinds(mine) == ["lost", "restored"])


def test_a_restart_on_the_same_data_loses_nothing(own_etcd: Etcd, namespace: str) -> None:
    registry, _ = open_registry(own_etcd.endpoint, namespace)
    with registry:
        mine = block(20000, 4)
        registry.claim([mine], search=SEARCH, timeout=5)
        for _ in range(2):
            own_etcd.restart()
            wait_for(lambda: registry.state(mine) == "held")
            wait_for(lambda: stands(own_etcd, namespace, 4))
            again = block(21000)
            assert not registry.claim([again], search=SEARCH, timeout=10)
            registry.release([again])


def test_a_frozen_etcd_makes_a_block_degraded_and_whole_again(
    own_etcd: Etcd, namespace: str
) -> None:
    registry, events = open_registry(own_etcd.endpoint, namespace)
    with registry:
        mine = block(20000, 4)
        registry.claim([mine], search=SEARCH, timeout=5)
        own_etcd.freeze()
        wait_for(lambda: registry.state(mine) == "degraded")
        own_etcd.thaw()
        wait_for(lambda: registry.state(mine) == "held")
        wait_for(lambda: stands(own_etcd, namespace, 4))
        wait_for(lambda: events.kinds(mine)[-1:] == ["restored"])


def test_whoever_may_have_seen_a_block_degraded_is_told_that_it_was_and_is_not(
    own_etcd: Etcd, own_proxy: Proxy, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a keepalive is on its way while the lease, for all we know, runs out."""
    registry, events = open_registry(own_proxy.endpoint, namespace)
    with registry:
        mine = block(20000, 4)
        registry.claim([mine], search=SEARCH, timeout=5)
        # It goes on waiting for that answer, which etcd gives long before it drops the lease.
        monkeypatch.setattr(registry._here(), "_share", lambda: 20.0)
        own_proxy.gate.clear()
        wait_for(lambda: registry.state(mine) == "degraded")
        own_proxy.gate.set()
        wait_for(lambda: registry.state(mine) == "held")
        wait_for(lambda: events.kinds(mine)[-1:] == ["restored"])
        assert events.kinds(mine)[0] == "lost"


def test_keys_that_a_restored_snapshot_forgot_are_written_again(
    own_etcd: Etcd, namespace: str, tmp_path: Path
) -> None:
    registry, events = open_registry(own_etcd.endpoint, namespace)
    with registry:
        early, late = block(20000, 4), block(21000, 4)
        registry.claim([early], search=SEARCH, timeout=5)
        saved = str(tmp_path / "saved.db")
        own_etcd.ctl("snapshot", "save", saved)
        registry.claim([late], search=SEARCH, timeout=5)
        own_etcd.kill()
        own_etcd.wipe()
        own_etcd.ctl(
            "snapshot", "restore", saved, f"--data-dir={own_etcd.data}", f"--name={own_etcd.name}",
            f"--initial-cluster={own_etcd.name}={own_etcd.peer_url}",
            f"--initial-advertise-peer-urls={own_etcd.peer_url}", program="etcdutl",
        )  # fmt: skip
        own_etcd.start()
        wait_for(lambda: stands(own_etcd, namespace, 8))
        wait_for(lambda: registry.state(early) == registry.state(late) == "held")
        wait_for(lambda: events.kinds(late)[-1:] == ["restored"])


def test_compaction_disturbs_nobody(etcd_server: Etcd, namespace: str) -> None:
    registry, events = open_registry(etcd_server.endpoint, namespace)
    with registry:
        mine = block(20000, 4)
        registry.claim([mine], search=SEARCH, timeout=5)
        revision = registry._here().history[2]
        etcd_server.ctl("compact", str(revision))
        lease = registry._here().lease
        etcd_server.ctl("lease", "revoke", f"{lease:x}")
        wait_for(lambda: events.kinds(mine) == ["lost", "restored"])
        assert stands(etcd_server, namespace, 4)


def test_a_member_without_a_leader_is_left_for_one_that_has_one(
    cluster: list[Etcd], namespace: str
) -> None:
    registry, _ = open_registry(",".join(m.endpoint for m in cluster), namespace)
    with registry:
        mine = block(20000, 4)
        registry.claim([mine], search=SEARCH, timeout=5)
        # Two of three gone: nobody can answer; the hold stays, the record is told to be lost.
        cluster[0].freeze()
        cluster[1].freeze()
        wait_for(lambda: registry.state(mine) == "degraded")
        with pytest.raises(RegistryError):
            registry.claim([block(21000)], search=SEARCH, timeout=1)
        cluster[1].thaw()
        wait_for(lambda: registry.state(mine) == "held", 20)
        assert not registry.claim([block(22000)], search=SEARCH, timeout=10)
        cluster[0].thaw()


def test_another_owner_who_came_meanwhile_makes_the_block_contested_and_then_held_again(
    own_etcd: Etcd, namespace: str
) -> None:
    registry, events = open_registry(own_etcd.endpoint, namespace, host_id="10.0.0.1")
    with registry:
        mine = block(20000, 4)
        registry.claim([mine], search=SEARCH, timeout=5)
        lease = registry._here().lease
        with EtcdRegistry(own_etcd.endpoint, namespace=namespace, host_id="10.0.0.1") as other:
            theirs = block(20002, 1, label="usurper")
            key = f"v1/{namespace}/ports/10.0.0.1/20002"
            own_etcd.ctl("del", key)
            assert not other.claim([theirs], search=SEARCH, timeout=5)
            own_etcd.ctl("lease", "revoke", f"{lease:x}")
            wait_for(lambda: registry.state(mine) == "contested")
            assert "usurper" in own_etcd.ctl("get", key)
            assert stands(own_etcd, namespace, 4)  # three of ours and theirs
            wait_for(lambda: "usurper" in events.seen[-1][2])
            registry.release([block(20002)])
            other.release([theirs])
            wait_for(lambda: registry.state(mine) == "held")
            assert stands(own_etcd, namespace, 4)
            wait_for(lambda: events.seen[-1][0] == "restored")


def test_a_release_during_an_outage_is_done_when_etcd_is_back(
    own_etcd: Etcd, own_proxy: Proxy, namespace: str
) -> None:
    with EtcdRegistry(own_proxy.endpoint, namespace=namespace, ttl=60) as registry:
        mine, kept = block(20000, 4), block(21000)
        registry.claim([mine, kept], search=SEARCH, timeout=5)
        own_proxy.refuse = True
        own_proxy.cut()
        registry.release([mine])
        assert stands(own_etcd, namespace, 5)
        own_proxy.refuse = False
        wait_for(lambda: stands(own_etcd, namespace, 1))


def test_ports_released_while_their_keys_are_lost_do_not_come_back(
    own_etcd: Etcd, namespace: str
) -> None:
    registry, _ = open_registry(own_etcd.endpoint, namespace)
    with registry:
        gone, kept = block(20000, 4), block(21000)
        registry.claim([gone, kept], search=SEARCH, timeout=5)
        own_etcd.kill()
        wait_for(lambda: registry.state(kept) == "degraded")
        registry.release([gone])
        own_etcd.wipe()
        own_etcd.start()
        wait_for(lambda: registry.state(kept) == "held")
        assert stands(own_etcd, namespace, 1)


def test_an_idle_process_sends_one_keepalive_for_all_its_blocks(
    own_etcd: Etcd, namespace: str
) -> None:
    registry, _ = open_registry(own_etcd.endpoint, namespace)
    with registry:
        for number in range(100):
            registry.claim([block(20000 + number * 4, 4)], search=SEARCH, timeout=5)
        connection = registry._here().connection
        calls: list[tuple[float, str]] = []  # when it was due, and what it was
        genuine = connection._pass

        def counting(name: str, request: Any, call: Any) -> Any:
            calls.append((registry._here().due, name))
            return genuine(name, request, call)

        connection._pass = counting  # type: ignore[method-assign]
        wait_for(lambda: len(calls) >= 6)
        assert {name for _, name in calls} == {"keepalive"}
        gaps = [b[0] - a[0] for a, b in pairwise(calls)]
        assert min(gaps) > 2 / 3 * 0.84  # a third of the TTL, not more often


def test_a_callback_may_be_slow_or_raise_and_costs_no_lease(
    etcd_server: Etcd, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    go = threading.Event()

    def slow(lost: Any, error: LeaseLost) -> None:
        told.append(lost)
        assert not registry._here().lock.locked()
        go.wait(10)
        raise RuntimeError("the caller's mistake")

    with EtcdRegistry(etcd_server.endpoint, namespace=namespace, ttl=2, on_lost=slow) as registry:
        blocks = [block(20000), block(21000)]
        registry.claim(blocks, search=SEARCH, timeout=5)
        with caplog.at_level(logging.ERROR, "fastports.etcd"):
            etcd_server.ctl("lease", "revoke", f"{registry._here().lease:x}")
            wait_for(lambda: told)
            wait_for(lambda: all(registry.state(b) == "held" for b in blocks))
            go.set()
            wait_for(lambda: told == blocks)
            wait_for(lambda: caplog.text.count("a callback of the registry failed") == 2)


def test_sigstop_for_twice_the_ttl_is_survived(etcd_server: Etcd, namespace: str) -> None:
    code = """
        import sys
        from types import SimpleNamespace as Block
        from fastports.etcd import EtcdRegistry
        from fastports.registry import Owner
        registry = EtcdRegistry(sys.argv[1], namespace=sys.argv[2], ttl=2)
        block = Block(first=20000, last=20003, protocol="tcp", host=None, label="", metadata={},
                      owner=Owner(1, 1))
        registry.claim([block], search=(20000, 29999), timeout=5)
        print("up", flush=True)
        for line in sys.stdin:
            print(registry.state(block), flush=True)
        registry.close()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), etcd_server.endpoint, namespace],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "up\n"
        os.kill(child.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        wait_for(lambda: stands(etcd_server, namespace, 0))
        wait_for(lambda: time.monotonic() - stopped > 4)
        os.kill(child.pid, signal.SIGCONT)
        wait_for(lambda: stands(etcd_server, namespace, 4), 5)
        child.stdin.write("?\n")
        child.stdin.flush()
        assert child.stdout.readline() == "held\n"
        child.stdin.close()
        assert child.wait(10) == 0
        assert stands(etcd_server, namespace, 0)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize("trouble", ["frozen", "silent", "refused", "frozen from the start"])
def test_a_timeout_is_honoured_in_every_state_of_etcd(
    own_etcd: Etcd, own_proxy: Proxy, namespace: str, trouble: str
) -> None:
    """How closely is measured in bench/test_etcd.py; without its timeout a call goes on here."""
    with EtcdRegistry(
        own_proxy.endpoint, namespace=namespace, timeout=60.0, retry=Retry(100_000)
    ) as registry:
        if trouble != "frozen from the start":
            registry.claim([block(20000)], search=SEARCH, timeout=5)
        if trouble.startswith("frozen"):
            own_etcd.freeze()
        elif trouble == "silent":
            own_proxy.silent = True
        else:
            own_proxy.refuse = True
            own_proxy.cut()
        for timeout in (0.0, 0.2, 0.6):
            with pytest.raises(RegistryError) as caught, no_hang():
                registry.claim([block(21000)], search=SEARCH, timeout=timeout)
            assert own_proxy.endpoint in str(caught.value)
        own_proxy.silent = own_proxy.refuse = False
        own_etcd.thaw()


BLACK_HOLE = """
    import subprocess
    # A tunnel that nobody reads: packets go in and are never seen again.
    for line in ("link set lo up", "tuntap add mode tun dev hole",
                 "addr add 10.99.0.1/24 dev hole", "link set hole up"):
        subprocess.run(["ip", *line.split()], check=True)
    from types import SimpleNamespace as Block
    from fastports.etcd import EtcdRegistry
    from fastports.errors import RegistryError, RegistryUnavailable
    from fastports.registry import Owner
    block = Block(first=20000, last=20003, protocol="tcp", host=None, label="", metadata={},
                  owner=Owner(1, 1))
    registry = EtcdRegistry("10.99.0.2:2379", timeout=60.0)
    # While the client is being loaded, which a busy machine takes its time for, the first one ends
    # before anything is sent.
    for timeout, expected in ((0.3, RegistryError), (3.0, RegistryUnavailable)):
        try:
            registry.claim([block], search=(20000, 29999), timeout=timeout)
        except expected as exc:
            assert "10.99.0.2:2379" in str(exc), exc
            print("told")
    registry.close()
    print("done")
"""


def test_c35_a_black_hole_ends_at_the_deadline() -> None:
    import shutil

    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs root, unshare and ip")
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", textwrap.dedent(BLACK_HOLE)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "told\ntold\ndone\n", done.stderr


def test_debians_etcd_is_survived_as_well(namespace: str) -> None:
    program = debian()
    if program is None:
        pytest.skip("Debian's etcd-server is not installed")
    with etcd(program=program) as server:
        registry, events = open_registry(server.endpoint, namespace)
        with registry:
            mine = block(20000, 4)
            registry.claim([mine], search=SEARCH, timeout=5)
            server.kill()
            wait_for(lambda: registry.state(mine) == "degraded")
            server.wipe()
            server.start()
            wait_for(lambda: registry.state(mine) == "held")
            wait_for(lambda: events.kinds(mine) == ["lost", "restored"])
