"""Who can bind a held port: every hold, address, option and protocol, against the kernel."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator

import pytest
from worlds import NOBODY, can_bind, in_child, network, root_only

import fastports

pytestmark = root_only

OPTIONS = {
    "plain": (),
    "reuseaddr": (socket.SO_REUSEADDR,),
    "reuseport": (socket.SO_REUSEPORT,),
    "both": (socket.SO_REUSEADDR, socket.SO_REUSEPORT),
}
# name: address, v6 only
ADDRESSES = {
    "0.0.0.0": ("0.0.0.0", False),
    "127.0.0.1": ("127.0.0.1", False),
    "127.0.0.2": ("127.0.0.2", False),
    "[::] dual": ("::", False),
    "[::] v6 only": ("::", True),
    "[::1]": ("::1", False),
    "[::ffff:127.0.0.1]": ("::ffff:127.0.0.1", False),
}
V4 = {"0.0.0.0", "127.0.0.1", "127.0.0.2", "[::] dual", "[::ffff:127.0.0.1]"}
COVERED = {
    None: set(ADDRESSES),
    "::": set(ADDRESSES),
    "0.0.0.0": V4,
    "127.0.0.1": V4 - {"127.0.0.2"},
    "::1": {"[::] dual", "[::] v6 only", "[::1]"},
}
KINDS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}


@pytest.fixture(autouse=True)
def own_network() -> Iterator[None]:
    with network():
        yield


def who_enters(port: int, kind: int) -> set[tuple[str, str]]:
    """Pairs of address and option that get in."""
    return {
        (name, option)
        for (name, (address, v6_only)), (option, options) in itertools.product(
            ADDRESSES.items(), OPTIONS.items()
        )
        if can_bind(port, address, kind=kind, options=options, v6_only=v6_only)
    }


@pytest.mark.parametrize("host", COVERED)
@pytest.mark.parametrize("protocol", KINDS)
def test_c16_c17_c22_only_so_reuseaddr_enters_a_held_port_and_only_through_an_open_door(
    host: str | None, protocol: str
) -> None:
    """C16, C17, C22: from another process, of the same and of another user."""
    outside = set(itertools.product(set(ADDRESSES) - COVERED[host], OPTIONS))
    through_the_door = set(itertools.product(COVERED[host], ("reuseaddr", "both")))
    with fastports.allocate(host=host, protocol=protocol) as block:
        port, kind = block.first, KINDS[protocol]

        def attack() -> set[tuple[str, str]]:
            return who_enters(port, kind)

        assert in_child(attack) == outside
        assert in_child(attack, uid=NOBODY) == outside
        block.open_door()
        assert in_child(attack) == outside | through_the_door
        assert in_child(attack, uid=NOBODY) == outside | through_the_door
        block.close_door()
        assert in_child(attack) == outside
    assert in_child(attack) == set(itertools.product(ADDRESSES, OPTIONS))


def test_tcp_and_udp_are_separate_spaces() -> None:
    with fastports.allocate(protocol="tcp") as block:
        assert can_bind(block.first, kind=socket.SOCK_DGRAM)
        with fastports.reserve(block.first, protocol="udp"):
            assert not can_bind(block.first, kind=socket.SOCK_DGRAM)


def test_c24_both_holds_each_number_in_tcp_and_udp() -> None:
    """C24"""
    with fastports.allocate(3, protocol="both") as block:
        descriptors = block.filenos()
        assert len(descriptors) == 6
        for port, (tcp, udp) in zip(
            block, zip(descriptors[::2], descriptors[1::2], strict=True), strict=True
        ):
            for fd, kind in ((tcp, socket.SOCK_STREAM), (udp, socket.SOCK_DGRAM)):
                with socket.socket(fileno=os.dup(fd)) as sock:
                    assert sock.type == kind
                    assert sock.getsockname()[1] == port
                assert who_enters(port, kind) == set()


def test_one_port_of_a_block_can_be_opened_alone() -> None:
    with fastports.allocate(3, protocol="both") as block:
        block.open_door(block[1])
        for port, kind in itertools.product(block, KINDS.values()):
            entered = can_bind(port, kind=kind, options=OPTIONS["reuseaddr"])
            assert entered == (port == block[1]), (port, kind)
        block.close_door(block[1])
        assert not can_bind(block[1], options=OPTIONS["reuseaddr"])


def test_a_listening_child_keeps_everybody_else_out_though_the_door_is_open() -> None:
    with fastports.allocate() as block, socket.socket() as server:
        block.open_door()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", block.first))
        server.listen()
        assert not {pair for pair in who_enters(block.first, socket.SOCK_STREAM)
                    if pair[0] in V4}  # fmt: skip


def test_a_server_restarts_behind_the_hold_over_its_own_time_wait() -> None:
    with fastports.allocate() as block:
        for _ in range(3):
            block.open_door()
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("127.0.0.1", block.first))
                server.listen()
                block.close_door()
                with socket.create_connection(("127.0.0.1", block.first)) as client:
                    accepted, _ = server.accept()
                    accepted.close()
                    assert client.recv(1) == b""
            assert who_enters(block.first, socket.SOCK_STREAM) == set()


def test_a_client_of_a_held_port_is_refused_and_never_connects_to_itself() -> None:
    low, high = 40000, 40009
    with (
        network({"net.ipv4.ip_local_port_range": f"{low} {high}"}),
        fastports.reserve((low, high - 3), protocol="tcp") as block,
    ):
        block.open_door()
        for _ in range(300):
            for port in (block.first, block.last):
                with socket.socket() as client, pytest.raises(ConnectionRefusedError):
                    client.connect(("127.0.0.1", port))


def test_the_kernel_gives_a_held_port_to_nobody_until_its_own_are_used_up() -> None:
    low, high = 40000, 40007
    with (
        network({"net.ipv4.ip_local_port_range": f"{low} {high}"}),
        fastports.reserve((low, low + 3)) as block,
    ):
        block.open_door(low, low + 1)
        for options in OPTIONS.values():
            taken = []
            try:
                while True:
                    sock = socket.socket()
                    taken.append(sock)
                    for option in options:
                        sock.setsockopt(socket.SOL_SOCKET, option, 1)
                    sock.bind(("127.0.0.1", 0))
                    sock.listen()
                    assert len(taken) < 20
            except OSError:
                ports = {sock.getsockname()[1] for sock in taken[:-1]}
            for sock in taken:
                sock.close()
            assert ports == set(range(low + 4, high + 1))
