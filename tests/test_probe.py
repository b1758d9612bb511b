"""``probe``: what can be said of ports without holding them."""

from __future__ import annotations

import array
import errno
import os
import socket

import numpy as np
import pytest
from worlds import can_bind, in_child, network, root_only

import fastports
from fastports import PortState

FREE, BUSY, DENIED, PRIVILEGED, RESERVED = range(5)


def test_states_have_the_published_numbers_and_names() -> None:
    assert (
        PortState.FREE, PortState.BUSY, PortState.DENIED, PortState.PRIVILEGED, PortState.RESERVED,
    ) == (FREE, BUSY, DENIED, PRIVILEGED, RESERVED)  # fmt: skip
    assert PortState.NAMES == ("free", "busy", "denied", "privileged", "reserved")


@root_only
def test_each_state_has_its_cause() -> None:
    def look() -> list[int]:
        found: list[int] = fastports.probe([20000, 20001, 80, 43001, 43003]).tolist()
        return found

    with network({"net.ipv4.ip_local_reserved_ports": "43001-43002"}), fastports.reserve(20001):
        assert in_child(look, uid=65534) == [FREE, BUSY, PRIVILEGED, RESERVED, FREE]
        assert in_child(look, denied=[("bind", None, errno.EPERM)]) == [DENIED] * 5


def test_the_answer_is_an_int8_array_with_a_state_for_each_candidate() -> None:
    with fastports.allocate(3) as block:
        states = fastports.probe([*block, block.first])
        assert isinstance(states, np.ndarray) and states.dtype == np.int8
        assert states.tolist() == [BUSY] * 4


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda ports: f"{ports[0]}-{ports[-1]}",
        lambda ports: fastports.PortRange((ports[0], ports[-1])),
        lambda ports: range(ports[0], ports[-1] + 1),
        lambda ports: array.array("H", ports),
        lambda ports: array.array("i", ports),
        lambda ports: np.array(ports, dtype=np.uint16),
        lambda ports: np.array(ports, dtype=np.int32),
        lambda ports: np.array(ports, dtype=np.int64),
        lambda ports: memoryview(array.array("H", ports)),
        lambda ports: np.repeat(np.array(ports, dtype=np.uint16), 2)[::2],
    ],
    ids=["list", "tuple", "text", "PortRange", "range", "array H", "array i", "uint16", "int32",
         "int64", "memoryview", "every other item"],
)  # fmt: skip
def test_candidates_of_every_kind(make: object) -> None:
    with fastports.allocate(4) as block:
        assert fastports.probe(make(list(block))).tolist() == [BUSY] * 4  # type: ignore[operator]


def test_a_read_only_array_is_read_and_stays_as_it_is() -> None:
    with fastports.allocate(4) as block:
        ports = np.array(list(block), dtype=np.uint16)
        ports.flags.writeable = False
        assert fastports.probe(ports).tolist() == [BUSY] * 4
        assert ports.tolist() == list(block)


def test_no_candidates_no_states() -> None:
    states = fastports.probe([])
    assert states.shape == (0,) and states.dtype == np.int8


@pytest.mark.parametrize(
    "bad",
    [
        [0], [65536], [-1], [1.5], ["x"], [True], "80-", "x", None, 80,
        np.zeros((2, 2), "uint16"), np.array([1.0]), range(10), range(1, 10**12),
    ],
    ids=repr,
)  # fmt: skip
def test_candidates_that_are_no_ports_are_told_before_any_bind(bad: object) -> None:
    with pytest.raises(fastports.InvalidRequest, match=r"Use numpy\.array|Give '20000-29999'"):
        fastports.probe(bad)


@root_only
def test_with_both_protocols_a_port_is_free_if_it_is_free_in_both() -> None:
    with network(), fastports.reserve(20000, protocol="udp"), fastports.reserve(20001):
        look = [20000, 20001, 20002]
        assert fastports.probe(look, protocol="tcp").tolist() == [FREE, BUSY, FREE]
        assert fastports.probe(look, protocol="udp").tolist() == [BUSY, FREE, FREE]
        assert fastports.probe(look, protocol="both").tolist() == [BUSY, BUSY, FREE]


def test_a_port_of_another_address_is_told_apart() -> None:
    with fastports.allocate(1, host="127.0.0.2") as block:
        assert fastports.probe([block.first], host="127.0.0.3").tolist() == [FREE]
        assert fastports.probe([block.first], host="127.0.0.2").tolist() == [BUSY]
        assert fastports.probe([block.first]).tolist() == [BUSY]  # the wildcard covers it


def test_a_server_and_a_marker_are_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert fastports.probe([server.getsockname()[1]]).tolist() == [BUSY]
    with fastports.allocate(1) as block:
        block.close_holds()  # what keeps fastports away now is its marker
        assert can_bind(block.first)
        assert fastports.probe([block.first]).tolist() == [BUSY]


def test_nothing_is_kept() -> None:
    with fastports.allocate(64) as block:
        ports = list(block)
    before = set(os.listdir("/proc/self/fd"))
    assert fastports.probe(ports).tolist() == [FREE] * 64
    assert set(os.listdir("/proc/self/fd")) == before
    assert all(can_bind(port) for port in ports)
