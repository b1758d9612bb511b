"""PortRange in every form, and the default range under the sysctls of the caller's network."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import threading

import pytest
from worlds import CLONE_NEWNET, libc, network, root_only, set_sysctl

import fastports
from fastports import PortRange


@pytest.mark.parametrize(
    ("spec", "first", "last"),
    [
        ("20000-29999", 20000, 29999),
        ("8080", 8080, 8080),
        ("1-65535", 1, 65535),
        ("00080-00081", 80, 81),
        (8080, 8080, 8080),
        ((20000, 29999), 20000, 29999),
        ([20000, 20000], 20000, 20000),
        (range(20000, 30000), 20000, 29999),
        (range(65535, 65536), 65535, 65535),
        (PortRange("5-6"), 5, 6),
    ],
)
def test_a_range_can_be_given_in_every_form(
    spec: fastports.PortRange, first: int, last: int
) -> None:
    ports = PortRange(spec)
    assert (ports.first, ports.last) == (first, last)
    assert len(ports) == last - first + 1
    assert list(ports) == list(range(first, last + 1))
    assert first in ports and last in ports
    assert first - 1 not in ports and last + 1 not in ports
    assert PortRange(str(ports)) == ports
    assert eval(repr(ports)) == ports
    assert pickle.loads(pickle.dumps(ports)) == copy.deepcopy(ports) == ports
    assert hash(PortRange(first, last)) == hash(ports)


def test_integers_of_numpy_are_integers() -> None:
    import numpy as np

    assert PortRange(np.uint16(80)) == PortRange(80)  # type: ignore[arg-type]
    assert PortRange((np.int64(80), np.int32(90))) == PortRange("80-90")  # type: ignore[arg-type]
    assert np.uint16(85) in PortRange("80-90")
    with fastports.allocate(np.int64(3)) as block:  # type: ignore[arg-type]
        assert len(block) == 3


def test_a_range_cannot_be_changed_and_equals_only_ranges() -> None:
    ports = PortRange("80-90")
    with pytest.raises(AttributeError):
        ports.first = 1  # type: ignore[misc]
    assert ports != "80-90"
    assert ports != PortRange("80-91")
    assert "80" not in ports
    assert True not in PortRange("1-2")


# --- the default range ------------------------------------------------------------------------


def where(allocator: fastports.Allocator, draws: int = 60) -> tuple[int, int]:
    firsts = []
    for _ in range(draws):
        with allocator.allocate() as block:
            firsts.append(block.first)
    return min(firsts), max(firsts)


@root_only
@pytest.mark.parametrize(
    ("ephemeral", "reserved", "low", "high"),
    [
        ("32768 60999", "", 20000, 29999),
        ("25000 60999", "", 20000, 24999),
        ("1024 28999", "", 29000, 29999),  # just 1000 are left
        ("1024 29000", "", 29001, 65535),  # 999 are left: elsewhere
        ("9000 65000", "", 1024, 8999),
        ("2000 65000", "", 1024, 1999),
        ("32768 60999", "20000-28999", 29000, 29999),
        ("32768 60999", "20000-29000", 1024, 32767),
        ("32768 60999", "1024-30000", 61000, 65535),
    ],
)
def test_c08_the_default_range_keeps_out_of_what_the_kernel_gives_away(
    ephemeral: str, reserved: str, low: int, high: int, caplog: pytest.LogCaptureFixture
) -> None:
    with network({"net.ipv4.ip_local_port_range": ephemeral,
                  "net.ipv4.ip_local_reserved_ports": reserved or "\n"}):  # fmt: skip
        first, last = where(fastports.Allocator())
    assert low <= first <= last <= high
    assert last - first > (high - low) // 2  # and all of it is used
    assert not caplog.records


@root_only
def test_c09_without_a_port_outside_the_ephemeral_range_it_works_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C09"""
    with network({"net.ipv4.ip_local_port_range": "1024 65535"}):
        allocator = fastports.Allocator()
        first, last = where(allocator)
        assert 20000 <= first <= last <= 29999
        allocator.allocate_many({"a": 1})["a"].release()
    warnings = [record for record in caplog.records if record.name == "fastports.ports"]
    assert [record.levelno for record in warnings] == [logging.WARNING]
    assert 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"' in warnings[0].getMessage()


@root_only
def test_an_explicit_range_is_honoured_with_one_warning_where_it_is_ephemeral(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with network({"net.ipv4.ip_local_port_range": "40000 50000"}):
        allocator = fastports.Allocator(range="39999-40002")
        for _ in range(5):
            with allocator.allocate(4) as block:
                assert block.first == 39999
    assert len(caplog.records) == 1
    assert "net.ipv4.ip_local_reserved_ports=39999-40002" in caplog.text


@root_only
def test_a_long_list_of_reserved_ports_is_read_whole() -> None:
    """The kernel gives such a list to the first read(2) only."""
    with network():
        # every second port: 12 kB of text, in which the last is the one that counts
        odd = ",".join(str(port) for port in range(20001, 24000, 2))
        set_sysctl("net.ipv4.ip_local_reserved_ports", odd)
        with open("/proc/sys/net/ipv4/ip_local_reserved_ports") as file:
            assert len(file.read()) > 4096
        allocator = fastports.Allocator(range=(23990, 23999))
        for _ in range(60):
            with allocator.allocate() as block:
                assert block.first % 2 == 0
        with pytest.raises(fastports.InvalidRequest):
            allocator.allocate(2)


@root_only
def test_sysctls_are_those_of_the_calling_thread_at_the_time_of_the_call() -> None:
    """One allocator, two threads in two networks."""
    allocator = fastports.Allocator()
    seen: dict[str, tuple[int, int]] = {}
    turn = threading.Barrier(2, timeout=20)

    def there() -> None:
        with network({"net.ipv4.ip_local_port_range": "9000 65000"}):
            turn.wait()
            for name in ("there", "there again"):
                seen[name] = where(allocator)
            turn.wait()

    thread = threading.Thread(target=there)
    thread.start()
    turn.wait()
    seen["here"] = where(allocator)
    turn.wait()
    thread.join()
    assert seen["here"][0] >= 20000
    assert seen["there"][1] <= 8999
    assert seen["there again"][1] <= 8999


@root_only
def test_c28_ports_of_two_networks_are_told_apart() -> None:
    """The same number in another network namespace is another port."""
    with network():
        with fastports.allocate(4, label="outside") as outside:
            with network():
                assert list(fastports.entries()) == []
                with fastports.reserve((outside.first, outside.last), label="inside") as inside:
                    assert list(inside) == list(outside)
                    assert inside.owner != outside.owner
                    assert [entry.label for entry in fastports.entries()] == ["inside"]
            assert [entry.label for entry in fastports.entries()] == ["outside"]
        # the hold stays with its network, wherever its owner goes
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            block = fastports.allocate()
            with network():
                fastports.reserve(block.first).release()
                block.open_door()
                block.close_door()
                assert libc.setns(here, CLONE_NEWNET) == 0
                with pytest.raises(fastports.PortsUnavailable):
                    fastports.reserve(block.first)
            block.release()
        finally:
            os.close(here)
