"""Children under a broker: forked, filtered, served; each answers with what it returned."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastports._broker import Broker, install, receive

WILDCARD = "::"


def hold(
    address: str = WILDCARD, port: int = 0, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    """A socket that is bound with no option and never listens."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, kind)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind((address, port))
    return sock


def port_of(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.001)


def enter(
    address: str,
    port: int,
    *,
    reuse_address: bool = False,
    reuse_port: bool = False,
    listen: bool = True,
    kind: socket.SocketKind = socket.SOCK_STREAM,
) -> socket.socket | None:
    """Try to bind (and listen) as a stranger; None if the kernel refuses."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
    if reuse_address:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((address, port))
        if listen and kind == socket.SOCK_STREAM:
            sock.listen()
    except OSError:
        sock.close()
        return None
    return sock


def entrances(port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[tuple[Any, ...]]:
    """Every way a stranger gets in right now."""
    found = []
    for address in ("0.0.0.0", "127.0.0.1", "::", "::1"):
        for options in ((False, False), (True, False), (False, True), (True, True)):
            sock = enter(address, port, reuse_address=options[0], reuse_port=options[1], kind=kind)
            if sock is not None:
                found.append((address, *options))
                sock.close()
    return found


class Child:
    """A forked child that runs ``function(say)`` behind the filter.

    ``say(value)`` sends a JSON value; what the function returns is sent last. The child ends when
    the test closes it.
    """

    def __init__(self, function: Callable[[Callable[[object], None]], object]) -> None:
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                ours.close()
                os.close(reader)
                listener = install()
                socket.send_fds(theirs, [b"x"], [listener])
                os.close(listener)

                def say(value: object) -> None:
                    os.write(writer, json.dumps(value).encode() + b"\n")

                say(function(say))
                status = 0
                theirs.recv(1)  # until the test closes its end
            except BaseException as exc:
                os.write(writer, json.dumps(f"failed: {exc!r}").encode() + b"\n")
            finally:
                os._exit(status)
        theirs.close()
        os.close(writer)
        self._end = ours
        self._reader = reader
        self._said = b""
        self.status: int | None = None
        self.listener = receive(ours.fileno())

    def answer(self, seconds: float = 20.0) -> Any:
        """The next value the child said."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._said:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._reader], [], [], left)[0], "no answer"
            chunk = os.read(self._reader, 65536)
            assert chunk, "the child ended without an answer"
            self._said += chunk
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        if self.status is None:
            self._end.close()
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]
            os.close(self._reader)


class Launcher:
    """A broker with its blocks and children, for one test."""

    def __init__(self) -> None:
        self.broker = Broker()
        self._held: list[socket.socket] = []
        self._children: list[Child] = []

    def block(self, *socks: socket.socket) -> int:
        self._held.extend(socks)
        return self.broker.add([sock.fileno() for sock in socks])

    def start(
        self,
        block: int,
        function: Callable[[Callable[[object], None]], object],
        *,
        fetch: bool = True,
        exclusive: bool = False,
    ) -> Child:
        child = Child(function)
        self._children.append(child)
        self.broker.serve(block, child.listener, fetch=fetch, exclusive=exclusive)
        return child

    def ask(
        self, block: int, function: Callable[[Callable[[object], None]], object], **options: bool
    ) -> Any:
        """What a child answers; it lives on until the launcher is closed."""
        return self.start(block, function, **options).answer()

    def close(self) -> None:
        for child in self._children:
            child.close()
        self.broker.close()
        until(lambda: not self.broker.running)
        for sock in self._held:
            sock.close()


@contextlib.contextmanager
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    try:
        yield made
    finally:
        made.close()


def attempt(call: Callable[[], object]) -> int:
    """0, or the errno of an OSError."""
    try:
        call()
    except OSError as exc:
        assert exc.errno is not None
        return exc.errno
    return 0


def served(
    port: int,
    address: str = "0.0.0.0",
    *,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    options: Sequence[int] = (),
    v6only: bool | None = None,
    proto: int = 0,
) -> socket.socket:
    """A plain binder: socket, the options asked for, bind, listen."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind, proto)
    if v6only is not None:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
    try:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((address, port))
        if kind == socket.SOCK_STREAM:
            sock.listen()
    except OSError:
        sock.close()
        raise
    return sock
