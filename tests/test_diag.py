"""What the kernel answers about sockets, asked over sock_diag."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from fastports import _diag

V4 = socket.inet_pton(socket.AF_INET, "127.0.0.1")
V6 = socket.inet_pton(socket.AF_INET6, "::1")
MAPPED = socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1")
EVERYTHING = _diag.LISTENING | _diag.BOUND | _diag.CONNECTED | _diag.TIME_WAIT


@contextmanager
def bound(
    address: str, port: int = 0, *, kind: int = socket.SOCK_STREAM, only_v6: bool = False
) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, kind) as sock:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        sock.bind((address, port))
        yield sock


def port_of(sock: socket.socket) -> int:
    port = sock.getsockname()[1]
    assert isinstance(port, int)
    return port


def inode_of(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


@pytest.fixture
def diag() -> Iterator[_diag.Diag]:
    asked = _diag.Diag()
    yield asked
    asked.close()


def test_a_bound_socket_is_no_listener_until_it_listens(diag: _diag.Diag) -> None:
    with bound("0.0.0.0") as sock:
        assert diag.lookup("tcp", V4, port_of(sock)) is None
        sock.listen()
        assert diag.lookup("tcp", V4, port_of(sock)) == (
            _diag.LISTENING, inode_of(sock), os.getuid()
        )  # fmt: skip
        port = port_of(sock)
    assert diag.lookup("tcp", V4, port) is None


@pytest.mark.parametrize(
    ("address", "only_v6", "found_by"),
    [
        ("0.0.0.0", False, {V4, MAPPED}),
        ("127.0.0.1", False, {V4, MAPPED}),
        ("::", False, {V4, V6, MAPPED}),
        ("::", True, {V6}),
        ("::1", False, {V6}),
        ("::ffff:127.0.0.1", False, {V4, MAPPED}),
        ("127.0.0.2", False, set()),
    ],
)
def test_a_listener_is_found_by_every_address_it_would_serve(
    diag: _diag.Diag, address: str, only_v6: bool, found_by: set[bytes]
) -> None:
    with bound(address, only_v6=only_v6) as sock:
        sock.listen()
        seen = {asked for asked in (V4, V6, MAPPED) if diag.lookup("tcp", asked, port_of(sock))}
        assert seen == found_by
        rows = diag.sockets(port_of(sock), port_of(sock), "tcp", _diag.LISTENING)
        assert rows == [
            (port_of(sock), _diag.LISTENING, inode_of(sock), os.getuid(), int(sock.family))
        ]


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::"])
def test_udp_is_found_as_soon_as_it_is_bound(diag: _diag.Diag, address: str) -> None:
    with bound(address, kind=socket.SOCK_DGRAM) as sock:
        port = port_of(sock)
        row = (_diag.BOUND, inode_of(sock), os.getuid())
        assert diag.lookup("udp", V4, port) == row
        assert diag.sockets(port, port, "udp", _diag.BOUND) == [(port, *row, int(sock.family))]
        assert diag.sockets(port, port, "udp", _diag.LISTENING) == []
        assert diag.lookup("tcp", V4, port) is None
    assert diag.lookup("udp", V4, port) is None


def test_a_port_shows_its_listener_its_connections_and_its_time_wait(diag: _diag.Diag) -> None:
    with bound("127.0.0.1") as server:
        server.listen()
        port = port_of(server)
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            rows = diag.sockets(port, port, "tcp", EVERYTHING)
            assert sorted(row[1:3] for row in rows) == sorted(
                [(_diag.LISTENING, inode_of(server)), (_diag.CONNECTED, inode_of(accepted))]
            )
            accepted.close()
            client.recv(1)
    rows = diag.sockets(port, port, "tcp", EVERYTHING)
    assert [row[:4] for row in rows] == [(port, _diag.TIME_WAIT, 0, 0)]


def test_a_bound_socket_is_listed_where_the_kernel_shows_it(diag: _diag.Diag) -> None:
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 8):
        pytest.skip("Linux shows bound TCP sockets from 6.8 on")
    with bound("::") as sock:
        port = port_of(sock)
        assert diag.sockets(port, port, "tcp", _diag.BOUND) == [
            (port, _diag.BOUND, inode_of(sock), os.getuid(), int(socket.AF_INET6))
        ]
        assert diag.sockets(port, port, "tcp", _diag.LISTENING | _diag.CONNECTED) == []


def test_only_the_range_asked_for_is_listed_whatever_else_listens() -> None:
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(bound("0.0.0.0" if n % 2 else "::", only_v6=True))
            for n in range(600)  # more than one netlink message holds
        ]
        for sock in listeners:
            sock.listen(1)
        ports = sorted({port_of(sock) for sock in listeners})
        first, last = ports[50], ports[-50]
        inside = {inode_of(sock) for sock in listeners if first <= port_of(sock) <= last}
        rows = _diag.sockets(first, last, "tcp", _diag.LISTENING)
        assert all(first <= row[0] <= last for row in rows)
        assert inside <= {row[2] for row in rows}
        everything = _diag.sockets(1, 65535, "tcp", _diag.LISTENING)
        assert {inode_of(sock) for sock in listeners} <= {row[2] for row in everything}


@pytest.mark.parametrize(
    ("first", "last", "protocol"),
    [(0, 5, "tcp"), (5, 4, "tcp"), (5, 65536, "tcp"), (5, 6, "both"), (5, 6, "")],
)
def test_a_bad_range_or_protocol_is_refused(first: int, last: int, protocol: str) -> None:
    with pytest.raises(ValueError):
        _diag.sockets(first, last, protocol, _diag.LISTENING)


def test_a_closed_asker_says_so_and_closes_twice(diag: _diag.Diag) -> None:
    diag.close()
    diag.close()
    with pytest.raises(OSError, match="sock_diag"):
        diag.lookup("tcp", V4, 80)


def test_a_sandbox_without_netlink_is_a_clear_oserror() -> None:
    # socket(AF_NETLINK, ...) answers EPROTONOSUPPORT, as where CONFIG_INET_DIAG's family is absent.
    code = """
import ctypes, errno, platform, struct
numbers = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
arch, socket_call = numbers[platform.machine()]
op = lambda code, yes, no, value: struct.pack("HBBI", code, yes, no, value)
program = b"".join([
    op(0x20, 0, 0, 0), op(0x15, 0, 3, socket_call),
    op(0x20, 0, 0, 16), op(0x15, 0, 1, 16),
    op(0x06, 0, 0, 0x00050000 | errno.EPROTONOSUPPORT), op(0x06, 0, 0, 0x7FFF0000),
])
buffer = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
assert libc.prctl(22, 2, ctypes.create_string_buffer(fprog), 0, 0) == 0
from fastports import _diag
try:
    _diag.Diag()
except OSError as error:
    assert error.errno == errno.EPROTONOSUPPORT, error
    assert "sock_diag" in str(error)
    print("told")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "told\n", result.stderr
