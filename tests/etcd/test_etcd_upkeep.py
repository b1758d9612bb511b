"""Cleaning up, and finding out what is wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from fastports.errors import InvalidRequest
from fastports.etcd import EtcdRegistry, gc
from fastports.etcd.upkeep import ago

from .conftest import block
from .servers import Etcd, certificates, enable_auth, etcd, wait_for

SEARCH = (20000, 29999)


def ports(server: Etcd, namespace: str) -> list[int]:
    return sorted(int(name[-5:]) for name in server.keys(f"v1/{namespace}/"))


@pytest.fixture
def leftovers(registry: EtcdRegistry, etcd_server: Etcd, namespace: str) -> Any:
    """A live block, a killed owner's with a long lease, and keys without a lease."""
    registry.claim([block(20000, 2)], search=SEARCH, timeout=5)
    code = """
        import os, sys
        from types import SimpleNamespace as Block
        from fastports.etcd import EtcdRegistry
        from fastports.host import process_start
        from fastports.registry import Owner
        block = Block(first=21000, last=21002, protocol="tcp", host=None, label="", metadata={},
                      owner=Owner(os.getpid(), process_start()))
        EtcdRegistry(sys.argv[1], namespace=sys.argv[2], ttl=3600).claim(
            [block], search=(20000, 29999), timeout=5)
        os._exit(0)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), etcd_server.endpoint, namespace], check=True
    )
    put = etcd_server.ctl
    put("put", f"v1/{namespace}/ports/{registry.host_id}/22000", text="without a lease")
    old = '{"v":1,"first":23000,"size":1,"protocol":"tcp","reserved_at":1700000000}'
    put("put", f"v1/{namespace}/ports/10.9.9.9/23000", text=old)
    put("put", f"v1/{namespace}/ports/10.9.9.9/23001", text="nothing to read an age from")
    assert ports(etcd_server, namespace) == [
        20000, 20001, 21000, 21001, 21002, 22000, 23000, 23001,
    ]  # fmt: skip


@pytest.mark.usefixtures("leftovers")
def test_gc_removes_what_the_dead_of_this_host_left(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    would = registry.gc(dry_run=True)
    assert [int(each.key[-5:]) for each in would] == [21000, 21001, 21002, 22000]
    assert not any(each.removed for each in would)
    assert len(ports(etcd_server, namespace)) == 8
    done = gc(registry)
    assert [each.key for each in done] == [each.key for each in would]
    assert all(each.removed for each in done)
    assert "does not run" in done[0].reason and "no lease" in done[-1].reason
    assert ports(etcd_server, namespace) == [20000, 20001, 23000, 23001]
    assert gc(registry) == []


@pytest.mark.usefixtures("leftovers")
def test_gc_removes_old_keys_without_a_lease_of_other_hosts_only_when_told(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    assert 23000 not in [int(r.key[-5:]) for r in gc(registry, older_than=1e12, dry_run=True)]
    gc(registry, older_than=3600)
    assert ports(etcd_server, namespace) == [20000, 20001, 23001]


@pytest.mark.usefixtures("leftovers")
def test_gc_leaves_a_key_alone_that_somebody_wrote_meanwhile(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastports.etcd import upkeep

    genuine = upkeep._remainders

    def meanwhile(*arguments: Any) -> Any:
        found = list(genuine(*arguments))
        etcd_server.ctl("put", found[1].key, text="somebody came")
        return found

    monkeypatch.setattr(upkeep, "_remainders", meanwhile)
    assert [each.removed for each in gc(registry)] == [True, False, True, True]
    assert 21001 in ports(etcd_server, namespace)


@pytest.mark.parametrize("seconds", [-1, "x", float("nan"), float("inf"), True])
def test_an_age_or_a_time_that_is_none_is_refused(seconds: Any) -> None:
    with EtcdRegistry("127.0.0.1:1") as registry:
        for argument, call in (
            ("older_than", lambda: gc(registry, older_than=seconds)),
            ("timeout", lambda: gc(registry, timeout=seconds)),
            ("timeout", lambda: list(registry.diagnose(timeout=seconds))),
            ("timeout", lambda: registry.entries(timeout=seconds)),
        ):
            with pytest.raises(InvalidRequest) as caught:
                call()
            assert caught.value.argument == argument


def report(registry: EtcdRegistry) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for finding in registry.diagnose(timeout=20):
        found.setdefault(finding.topic, []).append((finding.level, finding.text))
    return found


def test_diagnose_tells_version_latency_clock_rights_and_lease(
    registry: EtcdRegistry, etcd_server: Etcd
) -> None:
    leases = etcd_server.leases()
    found = report(registry)
    assert set(found) == {"etcd", "clock", "rights", "lease"}
    ((level, text),) = found["etcd"]
    assert etcd_server.endpoint in text and " ms; etcd 3." in text
    assert level == ("note" if "3.5.1" in text else "ok")  # a release with a known defect
    assert found["clock"][0][0] == found["rights"][0][0] == found["lease"][0][0] == "ok"
    assert etcd_server.leases() == leases


def test_diagnose_tells_each_endpoint_apart(etcd_server: Etcd, namespace: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{nobody.getsockname()[1]}"
        with EtcdRegistry([dead, etcd_server.endpoint], namespace=namespace) as registry:
            found = report(registry)
        with EtcdRegistry(dead, namespace=namespace) as registry:
            alone = report(registry)
    first, second = found["etcd"]
    assert first[0] == "BAD" and dead in first[1]
    assert second[0] != "BAD" and etcd_server.endpoint in second[1]
    assert found["rights"]
    assert [level for level, _ in alone["etcd"]] == ["BAD"]
    assert set(alone) == {"etcd"}


def test_diagnose_tells_of_a_member_that_has_lost_its_leader(
    cluster: list[Etcd], namespace: str
) -> None:
    for member in cluster[1:]:
        member.kill()

    def leaderless() -> dict[str, list[tuple[str, str]]] | None:
        with EtcdRegistry(cluster[0].endpoint, namespace=namespace) as registry:
            found = report(registry)
        return found if "leader" in found else None

    found = wait_for(leaderless, 20)
    assert found["etcd"][0][0] != "BAD" and " ms; etcd 3." in found["etcd"][0][1]
    ((level, text),) = found["leader"]
    assert level == "BAD" and "too few members" in text
    assert "rights" not in found  # nobody there could tell
    other = cluster[1].start()
    assert other.healthy() and report_of(cluster[0], namespace)["rights"][0][0] == "ok"


def report_of(server: Etcd, namespace: str) -> dict[str, list[tuple[str, str]]]:
    with EtcdRegistry(server.endpoint, namespace=namespace) as registry:
        return report(registry)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s ago"), (119, "119 s ago"), (120, "2 minutes ago"), (7199, "119 minutes ago"),
        (7200, "2 hours ago"), (172_799, "47 hours ago"), (26_370_128, "305 days ago"),
    ],
)  # fmt: skip
def test_a_past_time_is_told_in_a_unit_that_can_be_read(seconds: float, words: str) -> None:
    assert ago(seconds) == words


def test_diagnose_tells_a_refused_login_and_missing_rights(namespace: str) -> None:
    with etcd() as server:
        enable_auth(server)
        for login, topic in (
            ({"user": "launcher", "password": "wrong"}, "login"),
            ({"user": "stranger", "password": "pw"}, "rights"),
        ):
            with EtcdRegistry(server.url, namespace=namespace, **login) as registry:  # type: ignore[arg-type]
                assert report(registry)[topic][0][0] == "BAD"
        with EtcdRegistry(
            server.url, namespace=namespace, user="launcher", password="pw"
        ) as registry:
            assert report(registry)["rights"][0][0] == "ok"


def test_diagnose_works_over_tls(tmp_path: Path, namespace: str) -> None:
    pem = certificates(tmp_path)
    files = {"ca": pem["ca.pem"], "cert": pem["server.pem"], "key": pem["server.key"]}
    with (
        etcd(tls=files) as server,
        EtcdRegistry(server.url, namespace=namespace, ca=pem["ca.pem"]) as registry,
    ):
        found = report(registry)
    assert found["clock"][0][0] == found["rights"][0][0] == "ok"


def test_diagnose_tells_a_short_ttl_and_a_full_quota(namespace: str) -> None:
    with (
        etcd(arguments=("--election-timeout=4000", "--quota-backend-bytes=200000")) as server,
        EtcdRegistry(server.endpoint, namespace=namespace, ttl=2) as registry,
    ):
        ((level, text),) = report(registry)["lease"]
        assert level == "note" and "2 s were asked for" in text
        with pytest.raises(AssertionError):
            for number in range(40):
                server.ctl("put", f"filler{number}", text="x" * 100_000)
        assert report(registry)["space"][0][0] == "BAD"
