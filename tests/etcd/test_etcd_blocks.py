"""The whole: allocate() with the registry, against real sockets."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import warnings

import pytest
from programs import program

import fastports
from fastports.cli.bundle import Bundle
from fastports.etcd import EtcdRegistry

from .servers import Etcd, wait_for


def ports_of(server: Etcd, namespace: str) -> list[int]:
    return sorted(int(name[-5:]) for name in server.keys(f"v1/{namespace}/"))


def test_an_allocated_block_is_recorded_until_it_is_released(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    ports = fastports.Allocator(registry=registry)
    with ports.allocate(8, label="decode-0", metadata={"reason": "nixl"}) as block:
        assert block.state == "held"
        assert ports_of(etcd_server, namespace) == list(block)
        (entry,) = registry.entries()
        assert (entry.first, entry.last, entry.label) == (block.first, block.last, "decode-0")
        assert entry.extra["metadata"] == {"reason": "nixl"}
        assert entry.alive is True
    assert block.state == "released"
    assert ports_of(etcd_server, namespace) == []


def test_a_recorded_block_is_not_sent_away_from_the_lease_it_is_recorded_under(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    here, there = socket.socketpair()
    with here, there, fastports.Allocator(registry=registry).allocate(2) as block:
        with pytest.raises(fastports.HandoffError, match="under the lease of this process"):
            block.send(here)
        assert not block.released
        assert ports_of(etcd_server, namespace) == list(block)


def test_a_port_recorded_by_another_host_of_the_same_id_is_left_out_of_the_search(
    etcd_server: Etcd, namespace: str
) -> None:
    # Free in this kernel, taken in the record: as on a host seen through another namespace.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = min(probe.getsockname()[1], 65535 - 40)
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace, host_id="10.0.0.1") as registry:
        for port in range(first, first + 40, 2):
            etcd_server.ctl("put", f"v1/{namespace}/ports/10.0.0.1/{port:05d}", "theirs")
        ports = fastports.Allocator(registry=registry, range=(first, first + 39))
        with pytest.raises(fastports.PortsUnavailable) as caught:
            ports.allocate(2)
        assert caught.value.recorded == 20


def test_allocate_many_records_all_its_blocks(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    plan = fastports.Allocator(registry=registry).allocate_many({"http": 1, "kv": 1, "nixl": 8})
    assert ports_of(etcd_server, namespace) == sorted(p for b in plan.values() for p in b)
    for block in plan.values():
        block.release()
    assert ports_of(etcd_server, namespace) == []


def test_a_block_that_nobody_has_any_more_is_taken_off_the_record(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    block = fastports.Allocator(registry=registry).allocate(4)
    first = block.first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del block
        gc.collect()
    wait_for(lambda: not ports_of(etcd_server, namespace))
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", first))


def test_when_etcd_refuses_no_port_stays_held(namespace: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{nobody.getsockname()[1]}"
        with EtcdRegistry(endpoint, namespace=namespace) as registry:
            with pytest.raises(fastports.RegistryUnavailable) as caught:
                fastports.Allocator(registry=registry).allocate(4)
            assert caught.value.endpoint == endpoint
            assert caught.value.outcome == "not-applied"


CHILD = """
    import sys, threading, time, fastports
    from fastports.etcd import EtcdRegistry
    ttl = 2 if sys.argv[3] == "stay" else 60
    registry = EtcdRegistry(sys.argv[1], namespace=sys.argv[2], ttl=ttl)
    block = fastports.Allocator(registry=registry).allocate(4)
    print(block.first, flush=True)
    if sys.argv[3] == "stay":
        sys.stdin.read()
    while sys.argv[3] == "leave later" and any(
        thread.name == "fastports-etcd-calls" for thread in threading.enumerate()
    ):
        time.sleep(0.01)
"""


def launcher(server: Etcd, namespace: str, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CHILD), server.endpoint, namespace,
         how],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip


def first_port(child: subprocess.Popen[str]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


@pytest.mark.parametrize("how", ["leave", "leave later"])  # later there is no thread for calls
def test_a_normal_exit_revokes_at_once(etcd_server: Etcd, namespace: str, how: str) -> None:
    child = launcher(etcd_server, namespace, how)
    try:
        first_port(child)
        assert child.wait(20) == 0
        assert ports_of(etcd_server, namespace) == []
    finally:
        end(child)


def test_after_kill_9_the_ports_are_free_at_once_and_the_keys_within_the_ttl(
    etcd_server: Etcd, namespace: str
) -> None:
    child = launcher(etcd_server, namespace, "stay")
    try:
        first = first_port(child)
        assert ports_of(etcd_server, namespace) == [first, first + 1, first + 2, first + 3]
        child.kill()
        child.wait()
        with socket.socket() as probe:
            probe.bind(("0.0.0.0", first))
        wait_for(lambda: not ports_of(etcd_server, namespace), 8)
    finally:
        end(child)


def test_the_package_without_etcd_never_loads_grpc(etcd_server: Etcd) -> None:
    code = """
        import sys, json, fastports
        fastports.allocate(2).release()
        early = [m for m in sys.modules if m.split(".")[0] in ("grpc", "etcd3", "pyetcd")]
        from fastports.etcd import EtcdRegistry
        EtcdRegistry(sys.argv[1])
        late = [m for m in sys.modules if m.split(".")[0] in ("grpc", "etcd3", "pyetcd")]
        print(json.dumps([early, late, "fastports.etcd" in sys.modules]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), etcd_server.endpoint],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [[], [], True]


def test_a_stopped_launcher_learns_at_once_that_its_record_is_gone(
    etcd_server: Etcd, namespace: str
) -> None:
    code = """
        import sys, fastports
        from fastports.etcd import EtcdRegistry
        events = []
        registry = EtcdRegistry(sys.argv[1], namespace=sys.argv[2], ttl=2, host_id="10.0.0.1",
            on_lost=lambda block, error: events.append(error.reason),
            on_restored=lambda block: events.append("restored"))
        block = fastports.Allocator(registry=registry).allocate(2)
        print(block.first, flush=True)
        for line in sys.stdin:
            print(block.state, events, flush=True)
        block.release()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), etcd_server.endpoint, namespace],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None

    def ask() -> str:
        assert child.stdin is not None and child.stdout is not None
        print("?", file=child.stdin, flush=True)
        return child.stdout.readline()

    try:
        first = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: not ports_of(etcd_server, namespace), 10)
        # Somebody else takes one of the two meanwhile, in the record (the port itself is held).
        etcd_server.ctl("put", f"v1/{namespace}/ports/10.0.0.1/{first:05d}", '{"label": "rival"}')
        os.kill(child.pid, signal.SIGCONT)
        assert ask().split()[0] in ("degraded", "contested")
        # the state is there first, the callback a moment later, on a thread of its own
        report = wait_for(lambda: "rival" in (line := ask()) and line)
        assert report.startswith("contested")
        assert ports_of(etcd_server, namespace) == [first, first + 1]
        etcd_server.ctl("del", f"v1/{namespace}/ports/10.0.0.1/{first:05d}")
        report = wait_for(lambda: (line := ask()).rstrip().endswith("'restored']") and line)
        assert report.startswith("held")
    finally:
        end(child)


def test_what_was_handed_over_is_known_as_such_also_without_a_record(
    registry: EtcdRegistry,
) -> None:
    with fastports.Allocator(registry=registry).allocate() as block:
        block.close_holds()
        registry.close()
        assert block.state == "degraded"
        # by close mode again, and with an eye on the listener alone: there are no holds
        with block.spawn(program("server", "{port}"), handoff="close") as child:
            assert child.poll() is None
            child.kill()


def test_many_blocks_without_a_record_are_still_held(registry: EtcdRegistry) -> None:
    blocks = fastports.Allocator(registry=registry).allocate_many({"a": 1, "b": 1})
    registry.close()
    bundle = Bundle(blocks)
    try:
        assert not bundle.holds_closed and not bundle.released
        assert [block.state for block in blocks.values()] == ["degraded", "degraded"]
    finally:
        bundle.release()
