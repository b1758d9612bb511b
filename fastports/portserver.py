"""A port server: one process per host that picks ports for programs that only ask for a number.

It speaks the protocol of portpicker's port server on a UNIX stream socket, so that portpicker in
any language is a client, and a shell is one too::

    printf '%d\\n' $$ | nc -U -q 1 /run/portserver

A client sends a process id in decimal and a newline; the answer is a port that is free in TCP and
UDP and a newline, or nothing. The port is kept as long as that process lives
(:mod:`fastports.compat.picked` has the two ways to keep it, and the race each leaves), which is
seen through a pidfd, so that a process id used again is no matter. A client that sends ``status``
instead gets the server's state as text.

Clients are not trusted: what they may send is 20 bytes within 10 seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import stat
import struct
import sys
import time

from . import ranges
from ._diag import BOUND, CONNECTED, LISTENING, sockets
from .allocator import Allocator
from .compat.picked import HANDOFFS, Picked, check_handoff, pick, set_timeout
from .errors import DescriptorLimit, FastportsError, InvalidRequest, PortsUnavailable
from .ranges import PortRange

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["DEFAULT_ADDRESS", "PortServer", "add_arguments", "ask", "listen", "main", "run"]

DEFAULT_ADDRESS = "@unittest-portserver"

_REQUEST_BYTES = 20  # the longest request; more is an error, as in portpicker's server
_PATIENCE = 10.0  # seconds a client may take
_GRACE = 0.2  # seconds after which a request without its newline counts as complete
_BACKLOG = 4096  # a connect beyond it would block; the kernel caps it at net.core.somaxconn
_PID_LIMIT = 2**31

_log = logging.getLogger("fastports.portserver")


class _Asker:
    """A process for which ports are kept, and the pidfd that tells of its end."""

    __slots__ = ("kept", "pid", "pidfd")

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.kept: dict[int, tuple[Picked, float]] = {}  # by port, with the time of the answer


class PortServer:
    """Picks ports and keeps them for the processes that asked.

    Parameters
    ----------
    pools
        Where to look, in this order. Empty: the default range of fastports. A range given here may
        hold ports of ``net.ipv4.ip_local_reserved_ports``: reserving it there is a good idea.
    handoff
        ``"close"`` (default) or ``"door"``, see :mod:`fastports.compat.picked`.

    Notes
    -----
    Not thread-safe: everything happens in the event loop's thread. A pick takes about 0.1 ms.
    """

    def __init__(self, pools: Sequence[PortRange] = (), *, handoff: str = HANDOFFS[0]) -> None:
        self.pools: tuple[PortRange, ...] = tuple(pools)
        self.handoff: str = check_handoff(handoff)
        self._allocators = [Allocator(range=pool, include_reserved=True) for pool in pools]
        if not pools:
            self._allocators.append(Allocator())
        self._askers: dict[int, _Asker] = {}
        self._clients: dict[_Client, None] = {}  # oldest first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._most_clients = 0
        self.allocations = 0
        self.denials = 0
        self.request_errors = 0

    # --- life ---

    async def start(self, listener: socket.socket) -> None:
        """Serve on a listening UNIX stream socket, which belongs to the server from now on."""
        import resource  # 0.3 ms

        self._loop = asyncio.get_running_loop()
        # every connection is one descriptor, every kept port three or four
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_clients = max(min(soft // 4, _BACKLOG), 8)
        self._server = await self._loop.create_unix_server(
            lambda: _Client(self), sock=listener, backlog=self._most_clients
        )
        # to the loop a backlog is how many it accepts in one go; the kernel may queue more
        listener.listen(_BACKLOG)

    async def stop(self) -> None:
        """Drop the clients and give every port back. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for client in list(self._clients):
            client.drop()
        if server is not None:
            await server.wait_closed()
        for asker in list(self._askers.values()):
            self._forget(asker)

    # --- requests ---

    def answer(self, request: bytes, peer: int) -> tuple[bytes, int, int]:
        """What a request gets: the bytes, and the process and port they stand for (or 0, 0)."""
        text = request.strip()
        if text == b"status":
            return self.status().encode(), 0, 0
        if not text.removeprefix(b"-").isdigit() or len(request) > _REQUEST_BYTES:
            self.request_errors += 1
            _log.debug("no request: %.40r", request)
            return b"", 0, 0
        pid = int(text)
        # portpicker refuses init too: an orphan that asks for its parent means somebody else
        if not 1 < pid < _PID_LIMIT:
            return self._deny(pid, "no process to keep a port for")
        try:
            asker = self._asker(_visible_pid(pid, peer))
        except OSError as exc:
            return self._deny(pid, exc.strerror or str(exc))
        if asker is None:
            return self._deny(pid, "it has ended")
        try:
            picked = pick(self._allocators, self.handoff, f"for pid {asker.pid}")
        except (FastportsError, OSError) as exc:
            if not asker.kept:
                self._forget(asker)
            loud = isinstance(exc, (PortsUnavailable, DescriptorLimit))
            return self._deny(pid, str(exc), logging.WARNING if loud else logging.ERROR)
        asker.kept[picked.port] = picked, time.monotonic()
        self.allocations += 1
        _log.debug("port %d for pid %d", picked.port, asker.pid)
        return b"%d\n" % picked.port, asker.pid, picked.port

    def _deny(self, pid: int, why: str, level: int = logging.INFO) -> tuple[bytes, int, int]:
        self.denials += 1
        _log.log(level, "no port for pid %d: %s", pid, why)
        return b"", 0, 0

    def _asker(self, pid: int) -> _Asker | None:
        """The record of a running process; None if it has ended."""
        asker = self._askers.get(pid)
        if asker is not None and not _ended(asker.pidfd):
            return asker
        if asker is not None:
            self._forget(asker)  # ended, and its id used again, before the loop heard of it
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        if _ended(pidfd):  # a zombie
            os.close(pidfd)
            return None
        asker = self._askers[pid] = _Asker(pid, pidfd)
        if self._loop is not None:
            self._loop.add_reader(pidfd, self._forget, asker)
        return asker

    def _forget(self, asker: _Asker) -> None:
        """The process has ended: give its ports back. What it left bound stays bound."""
        if self._askers.get(asker.pid) is not asker:
            return
        del self._askers[asker.pid]
        if self._loop is not None:
            self._loop.remove_reader(asker.pidfd)
        os.close(asker.pidfd)
        for picked, _ in asker.kept.values():
            picked.release()

    def take_back(self, pid: int, port: int) -> None:
        """Give up a port whose number never reached its client."""
        asker = self._askers.get(pid)
        if asker is None or port not in asker.kept:
            return
        asker.kept.pop(port)[0].release()
        self.allocations -= 1
        if not asker.kept:
            self._forget(asker)

    # --- seeing ---

    def counts(self) -> dict[str, int]:
        """The counters, under the names that portpicker's server gives them."""
        return {
            "client-request-errors": self.request_errors,
            "denied-allocations": self.denials,
            "num-ports-managed": _managed(self.pools),
            "num-ports-kept": sum(len(asker.kept) for asker in self._askers.values()),
            "total-allocations": self.allocations,
        }

    def status(self) -> str:
        """The counters and one line for each kept port, for people and for ``grep``."""
        lines = [f"{name} {value}" for name, value in self.counts().items()]
        lines.append(f"handoff {self.handoff}")
        rows = [
            (port, asker.pid, time.monotonic() - since)
            for asker in self._askers.values()
            for port, (_, since) in asker.kept.items()
        ]
        if rows:
            seen = _in_use(min(rows)[0], max(rows)[0])
            lines += ["", f"{'PORT':>5} {'PID':>8} {'SECONDS':>8} STATE      COMMAND"]
            for port, pid, age in sorted(rows):
                state = seen.get(port, "waiting")
                lines.append(f"{port:>5} {pid:>8} {age:>8.1f} {state:<10} {_command(pid)}")
        return "\n".join(lines) + "\n"


class _Client(asyncio.Protocol):
    """One connection: reads one request, writes one answer, closes."""

    def __init__(self, server: PortServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._data = b""
        self._given: tuple[int, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        clients = self._server._clients
        if len(clients) >= self._server._most_clients:
            next(iter(clients)).drop()  # the oldest has had its time
        clients[self] = None
        self._wait(_PATIENCE, self.drop)

    def data_received(self, data: bytes) -> None:
        if self._given is not None:
            return
        self._data += data[: _REQUEST_BYTES + 2]
        if b"\n" in self._data or len(self._data) > _REQUEST_BYTES:
            self._answer()
        else:  # a client may leave the newline out, or send it by itself
            self._wait(_GRACE, self._answer)

    def eof_received(self) -> bool:
        if self._given is None:
            self._answer()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._server._clients.pop(self, None)
        if exc is not None and self._given is not None:
            self._server.take_back(*self._given)

    def drop(self) -> None:
        """End the connection without an answer."""
        if self._timer is not None:
            self._timer.cancel()
        self._server._clients.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def _wait(self, seconds: float, call: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert callable(call)
        self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def _answer(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self._given is not None:
            return
        peer = _peer(transport.get_extra_info("socket"))
        answer, *given = self._server.answer(self._data.split(b"\n")[0], peer)
        self._given = given[0], given[1]
        if not answer:
            self.drop()
            return
        # nothing else is read, and a peer that does not read its answer is not waited for
        self._wait(_PATIENCE, self.drop)
        transport.write(answer)
        transport.close()


def _managed(named: Sequence[PortRange]) -> int:
    """How many ports there are to give out, whoever has them now."""
    if named:
        return len({port for each in named for port in each})
    reserved = ranges.parse_reserved(ranges.read_reserved())
    plan = ranges.default_plan(ranges.parse_ephemeral(ranges.read_ephemeral()), reserved)
    return ranges.left_over(plan.first, plan.last, plan.cuts)


# --- processes ---


def _peer(sock: object) -> int:
    """The process at the other end, in our pid namespace; 0 where it cannot be seen from here."""
    try:
        raw = sock.getsockopt(  # type: ignore[attr-defined]
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
    except OSError:
        return 0
    return int(struct.unpack("3i", raw)[0])


def _visible_pid(pid: int, peer: int) -> int:
    """The number under which *we* see the process that ``peer`` calls ``pid``.

    Containers that share a network often have pid namespaces of their own. Who asks there means
    itself or one of its ancestors; ``NSpid`` of /proc/PID/status (proc(5)) has each one's numbers
    from our namespace down to its own.
    """
    at, steps = peer, 0
    while at > 1 and steps < 64:
        steps += 1
        try:
            with open(f"/proc/{at}/status", "rb") as file:
                fields = dict(line.split(b":", 1) for line in file.read().splitlines())
            numbers = [int(number) for number in fields[b"NSpid"].split()]
            parent = int(fields[b"PPid"])
        except (OSError, KeyError, ValueError):
            break
        if len(numbers) < 2:
            break  # our own namespace: the number means what it says
        if numbers[-1] == pid:
            return at
        at = parent
    return pid


def _ended(pidfd: int) -> bool:
    import select  # loaded by asyncio

    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"
    return "".join(char if char.isprintable() else "?" for char in words)[:80] or "?"


def _in_use(first: int, last: int) -> dict[int, str]:
    """What the kernel shows on the ports of a range. Sockets of ours are among the bound ones."""
    found: dict[int, str] = {}
    try:
        for port, *_ in sockets(first, last, "udp", BOUND | CONNECTED):
            found[port] = "udp"
        for port, *_ in sockets(first, last, "tcp", LISTENING):
            found[port] = "listening"
    except OSError:  # no netlink here
        pass
    return found


# --- the socket ---


def _sockaddr(address: str) -> str:
    if not address or "\0" in address or len(os.fsencode(address)) > 107:
        raise InvalidRequest(
            f"address={address!r} is no UNIX socket address: give a path of at most 107 bytes, or"
            " @NAME for the abstract namespace.",
            argument="address",
            value=address,
        )
    return "\0" + address[1:] if address[0] == "@" else address


def listen(address: str = DEFAULT_ADDRESS) -> socket.socket:
    """A listening UNIX stream socket at ``@NAME`` (abstract) or at a path.

    A socket file that nobody listens on any more is replaced.

    Raises
    ------
    OSError
        EADDRINUSE when somebody serves there already, or the path is no socket.
    InvalidRequest
    """
    name = _sockaddr(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(name)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or name[0] == "\0" or not _is_stale(name):
                raise OSError(
                    exc.errno, f"{os.strerror(exc.errno or 0)}: a server at {address}?"
                ) from exc
            os.unlink(name)
            sock.bind(name)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_stale(path: str) -> bool:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        return sock.connect_ex(path) == errno.ECONNREFUSED


def _activated() -> socket.socket | None:
    """The socket that systemd passed, if it did (sd_listen_fds(3)).

    Raises
    ------
    InvalidRequest
        It is not one listening UNIX stream socket.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()):
        return None
    try:
        if count == "1":
            sock = socket.socket(fileno=3)
            if (
                sock.family == socket.AF_UNIX
                and sock.type == socket.SOCK_STREAM
                and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            ):
                os.set_inheritable(3, False)
                return sock
            sock.detach()
    except OSError:
        pass
    raise InvalidRequest(
        "the service manager passed something else than one listening UNIX stream socket"
        f" (LISTEN_FDS={count}). Use ListenStream=@unittest-portserver, once, in the socket unit.",
        argument="LISTEN_FDS",
        value=count,
    )


def _notify(state: str) -> None:
    """Tell the service manager, if it wants to be told (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path[:1] not in ("@", "/"):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(state.encode(), "\0" + path[1:] if path[0] == "@" else path)
        except OSError as exc:
            _log.warning("the service manager cannot be told %s: %s", state, exc)


# --- the program ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastports portserver``, and those of portpicker's server as aliases."""
    parser.add_argument(
        "--address",
        "--portserver_address",
        "--portserver_unix_socket_address",
        metavar="@NAME|PATH",
        default=DEFAULT_ADDRESS,
        help="UNIX socket to serve on, or to ask (default: %(default)s)",
    )
    parser.add_argument(
        "--range",
        "--portserver_static_pool",
        metavar="FIRST-LAST[,...]",
        default="",
        help="ports to give out (default: the default range, outside the ephemeral one)",
    )
    parser.add_argument(
        "--handoff",
        choices=HANDOFFS,
        default=HANDOFFS[0],
        help="how a port is kept until its program binds it: close, for any program; door, against"
        " strangers too, for programs that set SO_REUSEADDR (default: %(default)s)",
    )
    parser.add_argument("--status", action="store_true", help="show a running server, and exit")
    parser.add_argument("--verbose", action="store_true", help="log every request")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, or show the status; the exit status."""
    try:
        if options.status:
            print(ask(options.address, "status"), end="")
            return 0
        pools = [PortRange(part.strip()) for part in options.range.split(",") if part.strip()]
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="fastports portserver: %(message)s"
        )
        _log.setLevel(logging.DEBUG if options.verbose else logging.INFO)
        return asyncio.run(_serve(options.address, PortServer(pools, handoff=options.handoff)))
    except InvalidRequest as exc:
        print(f"fastports portserver: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"fastports portserver: {options.address}: {exc}", file=sys.stderr)
        return 1


async def _serve(address: str, server: PortServer) -> int:
    _raise_descriptor_limit()
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)

    def log_counts() -> None:
        for name, value in server.counts().items():
            _log.info("%s %d", name, value)

    loop.add_signal_handler(signal.SIGUSR1, log_counts)
    listener = _activated()
    path = None
    if listener is None:
        listener = listen(address)
        if address[0] != "@":
            path = address, os.stat(address).st_ino
    try:
        await server.start(listener)
        _log.info("serving %d ports on %s", server.counts()["num-ports-managed"], address)
        _notify("READY=1")
        await done.wait()
        _notify("STOPPING=1")
    finally:
        await server.stop()
        if path is not None and os.path.exists(path[0]) and os.stat(path[0]).st_ino == path[1]:
            os.unlink(path[0])
    log_counts()
    return 0


def _raise_descriptor_limit() -> None:
    import resource  # 0.3 ms

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def ask(address: str = DEFAULT_ADDRESS, request: str = "status", *, timeout: float = 10.0) -> str:
    """Send one request to a port server and return its answer, empty if it gave none.

    Raises
    ------
    OSError
        Nobody serves there, or no answer came within ``timeout`` seconds.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        set_timeout(sock, timeout)
        sock.connect(_sockaddr(address))
        sock.sendall(request.encode() + b"\n")
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts).decode()


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m fastports.portserver``."""
    import argparse  # 6 ms

    parser = argparse.ArgumentParser(
        prog="fastports portserver", description=(__doc__ or "").split("\n")[0]
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
