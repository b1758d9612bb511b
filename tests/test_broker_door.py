"""bind-door: no socket is fetched; the door opens for the child's bind and for its listen."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from brokering import Launcher, attempt, entrances, hold, launcher, port_of, served, until

from fastports import _broker

WHY = _broker.probe()["bind-door"]
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no bind-door here: {WHY}")
REUSE = [socket.SO_REUSEADDR]


@pytest.fixture
def launch() -> Iterator[Launcher]:
    with launcher() as made:
        yield made


def is_shut(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 0


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::", "::1", "::ffff:127.0.0.1"])
def test_a_server_that_sets_reuse_address_comes_up_and_the_door_shuts_behind_it(
    launch: Launcher, address: str
) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        return port_of(served(port, address, options=REUSE))

    assert launch.ask(launch.block(held), child, fetch=False) == port
    until(lambda: is_shut(held))
    assert entrances(port) == []
    assert len(launch.broker.windows()) == 2


def test_between_its_bind_and_its_listen_the_door_is_shut(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    go = os.pipe()

    def child(say: Callable[[object], None]) -> object:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", port))
        say("bound")
        os.read(go[0], 1)
        sock.listen()
        return "listening"

    started = launch.start(launch.block(held), child, fetch=False)
    assert started.answer() == "bound"
    until(lambda: is_shut(held))
    assert entrances(port) == []
    os.write(go[1], b"x")
    assert started.answer() == "listening"
    for fd in go:
        os.close(fd)


def test_the_door_shuts_also_while_the_child_computes_after_its_call(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", port))
        while not is_shut(held):  # the same socket: a fork shares it
            pass
        sock.listen()
        while not is_shut(held):
            pass
        return "up"

    assert launch.ask(launch.block(held), child, fetch=False) == "up"


def test_a_plain_binder_is_refused_as_the_door_alone_cannot_let_it_in(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    answer = launch.ask(launch.block(held), lambda say: attempt(lambda: served(port)), fetch=False)
    assert answer == errno.EADDRINUSE
    until(lambda: is_shut(held))


def test_a_bind_that_fails_shuts_the_door_too(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        return [
            attempt(lambda: served(port, "192.0.2.1", options=REUSE)),
            attempt(lambda: served(port, options=REUSE).close()),
        ]

    answer = launch.ask(launch.block(held), child, fetch=False)
    assert answer == [errno.EADDRNOTAVAIL, 0]
    until(lambda: is_shut(held))


def test_a_child_that_is_killed_in_its_call_leaves_the_door_shut(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    block = launch.block(held)

    def child(say: Callable[[object], None]) -> object:
        if os.fork() == 0:
            while True:
                served(port, options=REUSE).close()
        return "started"

    for _ in range(10):
        started = launch.start(block, child, fetch=False)
        assert started.answer() == "started"
        before = len(launch.broker.windows())
        until(lambda before=before: len(launch.broker.windows()) > before)  # type: ignore[misc]
        with open(f"/proc/{started.pid}/task/{started.pid}/children") as file:
            os.kill(int(file.read().split()[0]), signal.SIGKILL)
        until(lambda: is_shut(held))
        started.close()
        until(lambda: not launch.broker.running)
    assert is_shut(held)
    assert entrances(port) == []


def test_two_families_on_one_port_are_told_apart(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        four, six = socket.socket(socket.AF_INET), socket.socket(socket.AF_INET6)
        six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        for sock, address in ((four, "0.0.0.0"), (six, "::")):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
        for sock in (four, six):
            sock.listen()
            while not is_shut(held):  # shut after the first listen: the second opens it again
                pass
        return "up"

    assert launch.ask(launch.block(held), child, fetch=False) == "up"
    assert len(launch.broker.windows()) == 4


def test_a_udp_server_that_sets_reuse_address_comes_up(launch: Launcher) -> None:
    held = hold(kind=socket.SOCK_DGRAM)
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        sock = served(port, kind=socket.SOCK_DGRAM, options=REUSE)
        while not is_shut(held):
            pass
        say("up")
        return sock.recv(100).decode()

    started = launch.start(launch.block(held), child, fetch=False)
    assert started.answer() == "up"
    assert entrances(port, socket.SOCK_DGRAM) == []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"for the child", ("127.0.0.1", port))
    assert started.answer() == "for the child"


def test_threads_and_workers_listen_at_once_and_the_door_shuts_after_the_last(
    launch: Launcher,
) -> None:
    held = [hold() for _ in range(4)]
    ports = [port_of(sock) for sock in held]

    def child(say: Callable[[object], None]) -> object:
        import threading

        kept: list[socket.socket] = []
        threads = [
            threading.Thread(target=lambda port=port: kept.append(served(port, options=REUSE)))
            for port in ports
            for _ in range(1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(port_of(sock) for sock in kept)

    assert launch.ask(launch.block(*held), child, fetch=False) == sorted(ports)
    until(lambda: all(is_shut(sock) for sock in held))


ASGI = """
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})
"""
SERVERS = {
    "http.server": ["-m", "http.server", "{port}"],
    "asyncio": [
        "-c",
        "import asyncio, sys\n"
        "async def main():\n"
        "    async def answer(r, w):\n"
        "        w.write(b'HTTP/1.0 200 OK\\r\\n\\r\\n'); w.close()\n"
        "    server = await asyncio.start_server(answer, None, int(sys.argv[1]))\n"
        "    await server.serve_forever()\n"
        "asyncio.run(main())",
        "{port}",
    ],
    "uvicorn": ["-m", "uvicorn", "asgi:app", "--host", "0.0.0.0", "--port", "{port}"],
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_real_server_comes_up_through_bind_door(
    launch: Launcher, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if name == "uvicorn":
        pytest.importorskip("uvicorn")
    place = tmp_path_factory.mktemp("server")
    (place / "asgi.py").write_text(ASGI)
    held = hold()
    port = port_of(held)
    argv = [sys.executable, *(part.format(port=port) for part in SERVERS[name])]

    def child(say: Callable[[object], None]) -> object:
        with subprocess.Popen(
            argv, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            say(server.pid)
            return server.wait()

    started = launch.start(launch.block(held), child, fetch=False)
    pid = started.answer()

    def reached() -> bool:
        return attempt(lambda: socket.create_connection(("127.0.0.1", port), 5).close()) == 0

    try:
        until(reached, 20)
        until(lambda: is_shut(held))
        assert entrances(port) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        started.answer()
