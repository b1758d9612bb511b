"""portpicker's interface over the hold: change the import, keep the program.

>>> from fastports.compat import portpicker
>>> port = portpicker.pick_unused_port()

The names, arguments, return values and the one error are those of portpicker 1.6; the old CapWords
names work too. What differs:

* A picked port is *kept* for this process until :func:`return_port` or the end of the process. No
  other user of fastports on this host (in this network namespace) gets it meanwhile, with no port
  server running. portpicker alone keeps nothing.
* Ports come from outside the ephemeral range, so that no ``bind(0)`` and no outgoing connection of
  anybody can take one between the pick and the program's own bind. portpicker takes them from it.
* A pick fails only when no port of the range is free, and says why.

The race that remains depends on how the port is kept; see :mod:`fastports.compat.picked` and the
``handoff`` argument of :func:`pick_unused_port`:

* ``"close"`` (default), for every program: from the pick to the program's bind, a program that
  binds *this very number* by itself, without asking fastports, gets it.
* ``"door"``, for programs that set SO_REUSEADDR: from the pick until the program listens, a program
  that binds this very number with SO_REUSEADDR gets it. A plain bind gets EADDRINUSE.

A port of a port server (``PORTSERVER_ADDRESS``) is kept by that server, in its way.

References
----------
The interface: https://github.com/google/python_portpicker, release 1.6.0.
"""

from __future__ import annotations

import logging
import os
import socket

from ..allocator import Allocator
from ..errors import FastportsError
from .picked import HANDOFFS, Picked, check_handoff, pick, set_timeout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NoFreePortFoundError",
    "add_reserved_port",
    "bind",
    "get_port_from_port_server",
    "is_port_free",
    "pick_unused_port",
    "return_port",
]

_log = logging.getLogger("fastports.portpicker")

_SERVER_TIMEOUT = 30.0  # seconds a port server may take to answer
_REPEATS = 20  # picks set aside, at most, because this process was given the number before

# This module stands for one picker per process, as its model does: hence state of the module.
# Every change is one operation of a set or a dict, so that threads need no lock.
_free_ports: set[int] = set()  # reserved by the user, or returned to us by him; given out first
_owned_ports: set[int] = set()  # from a port server or reserved, and given out
_random_ports: dict[int, Picked | None] = {}  # picked here, oldest first; None: no longer kept
_pid = os.getpid()


class NoFreePortFoundError(Exception):
    """No port of the range is free in TCP and UDP; the text, and ``__cause__``, say why."""


def _own_state() -> None:
    """Forget what a parent process had: a forked child must not give it out a second time."""
    global _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        _free_ports.clear()
        _owned_ports.clear()
        _random_ports.clear()  # the blocks in it were closed at the fork: they are the parent's


def add_reserved_port(port: int) -> None:
    """Have ``port``, which the caller got by other means, given out before any other.

    It is not held and not looked at: whoever reserved it answers for it.
    """
    _own_state()
    _free_ports.add(port)


def return_port(port: int) -> None:
    """Give a port back that is no longer used.

    A port picked here is free for everybody from now on. One of a port server, or reserved with
    :func:`add_reserved_port`, is given out again by this process. Anything else is logged and
    otherwise ignored, as is a port that was returned before.
    """
    _own_state()
    if port in _random_ports:
        picked = _random_ports.pop(port, None)
        if picked is not None:
            picked.release()
    elif port in _owned_ports:
        _owned_ports.discard(port)
        _free_ports.add(port)
    elif port in _free_ports:
        _log.info("port %s was returned before", port)
    else:
        _log.info("port %s was returned, but not picked here", port)


def bind(port: int, socket_type: int, socket_proto: int) -> int | None:
    """Try whether a port can be bound (and listened on) in every address family there is.

    The sockets set SO_REUSEADDR, so that a port in TIME_WAIT, or a held one whose door is open,
    counts as free. They are closed again: this says how it was a moment ago.

    Parameters
    ----------
    port
        0 lets the kernel choose.
    socket_type, socket_proto
        As for ``socket.socket``.

    Returns
    -------
    int or None
        The port, or None where it cannot be bound in one of the families, or there is none.
    """
    found = None
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            sock = socket.socket(family, socket_type, socket_proto)
        except OSError:
            continue
        with sock:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("", port))
                if socket_type == socket.SOCK_STREAM:
                    sock.listen(1)
                found = port = int(sock.getsockname()[1])
            except OSError:
                return None
    return found


def is_port_free(port: int) -> bool:
    """Whether ``port`` can be bound now in both TCP and UDP: the kernel's word, nobody's record.

    A port that somebody picked and has not bound yet is free in this sense, here as in portpicker.
    """
    return (
        bind(port, socket.SOCK_STREAM, socket.IPPROTO_TCP) is not None
        and bind(port, socket.SOCK_DGRAM, socket.IPPROTO_UDP) is not None
    )


def pick_unused_port(
    pid: int | None = None,
    portserver_address: str | None = None,
    *,
    handoff: str | None = None,
) -> int:
    """Pick a port that is free in TCP and UDP, and keep it for the caller to bind.

    Parameters
    ----------
    pid
        For a port server: whose life the port is bound to. Default: this process.
    portserver_address
        Ask the port server at this UNIX socket first (a leading ``@`` means the abstract
        namespace), then the one that the environment variable ``PORTSERVER_ADDRESS`` names.
    handoff
        How the port is kept where no port server gave it: ``"close"`` or ``"door"``, see the top of
        this module. Default: the environment variable ``FASTPORTS_PORTPICKER_HANDOFF``, or
        ``"close"``.

    Returns
    -------
    int
        A port returned or reserved before, one of a port server, or one from the default range of
        fastports, in this order. Kept until :func:`return_port` or the end of this process; when
        kept ports take a quarter of the descriptors this process may open, the oldest are let go.

    Raises
    ------
    NoFreePortFoundError
    InvalidRequest
        For a ``handoff`` that is none.
    """
    _own_state()
    if handoff is not None:
        check_handoff(handoff)
    try:
        free = _free_ports.pop()
    except KeyError:
        pass
    else:
        _owned_ports.add(free)
        return free
    for address in (portserver_address, os.environ.get("PORTSERVER_ADDRESS")):
        if address:
            port = get_port_from_port_server(address, pid=pid)
            if port is not None:
                return port
    return _pick_unused_port_without_server(handoff)


def _pick_unused_port_without_server(handoff: str | None = None) -> int:
    """A port of our own; not one that this process was given before, if there is another."""
    if handoff is None:
        handoff = check_handoff(os.environ.get("FASTPORTS_PORTPICKER_HANDOFF") or HANDOFFS[0])
    _make_room()
    repeated: list[Picked] = []
    try:
        while True:
            try:
                picked = pick((_allocator,), handoff, "portpicker")
            except FastportsError as exc:
                if not repeated:
                    raise NoFreePortFoundError(str(exc)) from exc
                picked = repeated.pop()
            else:
                if picked.port in _random_ports and len(repeated) < _REPEATS:
                    repeated.append(picked)
                    continue
            _random_ports.pop(picked.port, None)  # the newest stands last
            _random_ports[picked.port] = picked
            return picked.port
    finally:
        for picked in repeated:
            picked.release()


def _make_room() -> None:
    """Let go of the oldest ports once those kept take a quarter of the descriptors."""
    import resource  # 0.3 ms

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = limit // 4 // 4  # a port costs three or four descriptors
    if limit == resource.RLIM_INFINITY or len(_random_ports) < most:
        return
    kept = [(port, picked) for port, picked in list(_random_ports.items()) if picked is not None]
    for port, picked in kept[: max(len(kept) - most + 1, 0)]:
        _random_ports[port] = None
        picked.release()


def get_port_from_port_server(portserver_address: str, pid: int | None = None) -> int | None:
    """Ask a port server for a port.

    The protocol: the process id in decimal and a newline go to the server's UNIX stream socket; the
    port in decimal and a newline come back, or nothing.

    Parameters
    ----------
    portserver_address
        A path, or ``@NAME`` for the abstract namespace.
    pid
        The process for whose life the port is to be kept. Default: this one.

    Returns
    -------
    int or None
        None, and a line in the log, where the server cannot be reached, has no port, or does not
        answer within 30 s.
    """
    _own_state()
    if not portserver_address:
        return None
    if pid is None:
        pid = os.getpid()
    address = portserver_address
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            set_timeout(sock, _SERVER_TIMEOUT)
            sock.connect(address)
            sock.sendall(f"{pid}\n".encode())
            answer = b""
            while b"\n" not in answer and len(answer) < 1024:
                more = sock.recv(1024)
                if not more:
                    break
                answer += more
        finally:
            sock.close()
    except OSError as exc:
        _log.warning("the port server at %s cannot be asked: %s", portserver_address, exc)
        return None
    text = answer.split(b"\n")[0].strip()
    port = int(text) if text.isdigit() and len(text) <= 5 else 0
    if not 1 <= port <= 65535:
        _log.warning("the port server at %s found no port", portserver_address)
        return None
    _owned_ports.add(port)
    return port


_allocator = Allocator()

AddReservedPort = add_reserved_port
Bind = bind
GetPortFromPortServer = get_port_from_port_server
IsPortFree = is_port_free
PickUnusedPort = pick_unused_port
ReturnPort = return_port


# --- python -m fastports.compat.portpicker ---


def main(argv: Sequence[str]) -> int:
    """Print a port for a shell script and keep it for the script's life.

    If passed an argument, it is the process for whose life the port is kept; by default that is
    the parent process, usually the script. A second argument, in seconds, ends it earlier:

      #!/bin/bash
      port="$(python -m fastports.compat.portpicker $$)"
      test_my_server "$port"

    With PORTSERVER_ADDRESS in the environment the port server keeps the port. Without, a small
    process stays behind that keeps it and ends with the process named.

    Older versions of portpicker took their own process for the default, and ignored all arguments
    but the first: it is best to be explicit and pass $$.
    """
    if "-h" in argv or "--help" in argv:
        import inspect  # 10 ms

        print(f"usage: {argv[0]} [PID [SECONDS]]\n")
        print(inspect.getdoc(main))
        return 1  # as portpicker
    try:
        pid = int(argv[1]) if len(argv) > 1 else os.getppid()
        seconds = float(argv[2]) if len(argv) > 2 else None
        if not 0 < pid < 2**31 or not (seconds is None or 0 <= seconds < 10**7):
            raise ValueError
    except ValueError:
        import sys

        print(f"usage: {argv[0]} [PID [SECONDS]]", file=sys.stderr)
        return 2
    address = os.environ.get("PORTSERVER_ADDRESS")
    port = get_port_from_port_server(address, pid=pid) if address else None
    if port is None:
        port = _leave_keeper(pid, seconds)
    if port is None:
        return 1
    print(port)
    return 0


def _leave_keeper(pid: int, seconds: float | None) -> int | None:
    """Fork a process that picks a port and keeps it while ``pid`` runs; the port, or None."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(receiver)
            _keep(pid, seconds, sender)
            status = 0
        except (OSError, NoFreePortFoundError, FastportsError) as exc:
            os.write(2, f"fastports.compat.portpicker: {exc}\n".encode())
        finally:
            os._exit(status)
    os.close(sender)
    with os.fdopen(receiver, "rb") as file:
        text = file.read()
    if not text:
        os.waitpid(child, 0)
        return None
    return int(text)


def _keep(pid: int, seconds: float | None, sender: int) -> None:
    import contextlib
    import select  # 0.5 ms

    # what we inherited may be the pipe of a $(...), which waits until everybody has closed it
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (1, 2, sender):
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
    process = os.pidfd_open(pid)
    port = _pick_unused_port_without_server()
    os.setsid()
    os.chdir("/")
    os.close(1)
    os.close(2)
    os.write(sender, str(port).encode())
    os.close(sender)
    poller = select.poll()
    poller.register(process, select.POLLIN)
    poller.poll(None if seconds is None else seconds * 1000)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv))
