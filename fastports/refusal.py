"""Why not: what the kernel answered, as an error with the facts and a way out."""

from __future__ import annotations

import errno
import os

from . import _diag, ranges
from ._core import Search, read_file
from .block import PROTOCOLS
from .errors import (
    BindDenied,
    InvalidRequest,
    PortsUnavailable,
    PrivilegedPort,
)
from .host import entries

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .request import Request

_ADDRESS_ERRORS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
_NOT_LISTENING = _diag.BOUND | _diag.TIME_WAIT | _diag.CONNECTED
_NOT_WAITING = _diag.LISTENING | _diag.BOUND | _diag.CONNECTED
_BY_STATE = (
    (_diag.LISTENING, "listening"),
    (_diag.CONNECTED, "connected"),
    (_diag.BOUND, "bound"),
    (_diag.TIME_WAIT, "time_wait"),
)


def refusal(
    search: Search, request: Request, size: int, waiting: Collection[int] = ()
) -> PortsUnavailable:
    """The error for a search that came to its end; asks the kernel what is on a single port.

    ``waiting`` is what :func:`only_time_wait` said of it.
    """
    busy = search.busy
    facts: dict[str, object] = {
        "range": request.range,
        "wanted": size,
        "protocol": request.protocol,
        "host": request.host,
        "probed": search.probed,
        "busy": busy,
        "denied": request.denied,
        "reserved": request.reserved,
        "recorded": len(request.recorded),
        "longest_free": search.longest_free,
    }
    if request.denied and request.denied + size > request.last - request.first + 1:
        start = ranges.unprivileged_start()
        return PrivilegedPort(
            f"{what(request, size)} cannot be bound: ports below {start} need the capability"
            " CAP_NET_BIND_SERVICE. Choose ports from"
            f" {start} on, or set: sysctl -w net.ipv4.ip_unprivileged_port_start="
            f"{request.first}",
            unprivileged_start=start,
            errno=errno.EACCES,
            **facts,
        )
    if waiting:  # those that SO_REUSEADDR did not get
        facts["time_wait"] = len(set(waiting).intersection(search.busy_ports()))
    error = PortsUnavailable("", **facts)
    if request.exact and size == 1:
        cause = error.cause = "marked" if search.marked else _cause(request)
        message = f"port {request.first} ({request.protocol}, {_where(request.host)}) is taken"
        message += f": {_CAUSES[cause]}."
        message += f" {_CURES.get(cause, 'Choose another port, or wait with timeout=.')}"
    elif request.exact:
        ports = search.busy_ports()
        shown = ", ".join(map(str, ports[:8])) + (", ..." if len(ports) > 8 else "")
        message = (
            f"ports {request.range} ({request.protocol}, {_where(request.host)}) are not all"
            f" free: {shown} {'are' if len(ports) > 1 else 'is'} taken. Choose another range,"
            " let allocate() choose, or wait with timeout=."
        )
    else:
        message = (
            f"no {what(request, size)} free; {counts(error)}. Free some ports, widen range=,"
            " or wait with timeout=."
        )
    error.message = message
    error.args = (message,)
    return error


def from_errno(status: int, port: int, host: str | None) -> Exception:
    """The error for an errno that says something of this process or its address, not of a port."""
    text = os.strerror(status)
    if status in _ADDRESS_ERRORS:
        return InvalidRequest(
            f"host={host!r} cannot be bound here ({text}): it is no address of this machine in"
            " this network namespace, or its family is switched off, or it needs a scope. Give"
            " one that `ip address` shows, or None.",
            argument="host",
            value=host,
        )
    if status in (errno.EACCES, errno.EPERM):
        return BindDenied(
            f"this process may not bind port {port} ({text}): a sandbox (seccomp, an LSM, a"
            " cgroup's BPF program) forbids it; no port would do. Allow bind(2) there, or"
            " allocate outside the sandbox and pass the sockets in.",
            port=port,
            errno=status,
        )
    return OSError(status, text)


def facts_of(error: PortsUnavailable) -> dict[str, object]:
    return {name: getattr(error, name) for name in PortsUnavailable._facts}


def no_room(
    request: Request, wanted: Mapping[str, int], last: PortsUnavailable
) -> PortsUnavailable:
    """The error for blocks that do not fit together; ``last`` is what the last search said."""
    facts = facts_of(last)
    facts.update(wanted=request.size, range=request.range)
    shown = ", ".join(f"{name}={size}" for name, size in wanted.items())
    return PortsUnavailable(
        f"{shown} do not fit together into {request.range}"
        f" ({request.protocol}, {_where(request.host)}); the longest free stretch is"
        f" {last.longest_free}. Free some ports, widen range=, or wait with timeout=.",
        **facts,
    )


def _where(host: str | None) -> str:
    return "all addresses" if host is None else host


def what(request: Request, size: int | None = None) -> str:
    size = request.size if size is None else size
    ports = "port" if size == 1 else f"{size} contiguous ports"
    return f"{ports} in {request.range} ({request.protocol}, {_where(request.host)})"


def counts(error: PortsUnavailable) -> str:
    parts = [f"{error.probed} probed", f"{error.busy} busy"]
    for name, text in (
        ("time_wait", "in TIME_WAIT"),
        ("denied", "need a privilege"),
        ("reserved", "reserved or ephemeral"),
        ("recorded", "recorded by others"),
    ):
        if getattr(error, name):
            parts.append(f"{getattr(error, name)} {text}")
    if error.wanted > 1:
        parts.append(f"the longest free stretch seen is {error.longest_free}")
    return ", ".join(parts)


_CAUSES = {
    "listening": "a server listens on it",
    "connected": "a connection uses it as its local port",
    "bound": "a socket is bound to it",
    "time_wait": "only connections in TIME_WAIT are left on it",
    "marked": "another user of fastports has handed it to a program",
    "busy": "the kernel does not say by whom",
}
_CURES = {
    "listening": "See `ss -ltnp`, stop that server or choose another port.",
    "connected": "Choose a port outside net.ipv4.ip_local_port_range, or wait with timeout=.",
    "marked": "See `fastports ls`, or choose another port.",
}


def _any_time_wait() -> bool:
    """Whether this namespace has any TCP socket in TIME_WAIT; 2 us, before a dump of 2 ms."""
    words = (read_file(b"/proc/thread-self/net/sockstat") or b"").split()
    try:
        return int(words[words.index(b"tw") + 1]) > 0
    except (ValueError, IndexError):
        return True


def only_time_wait(search: Search, request: Request) -> set[int]:
    """The busy ports on which the kernel shows TCP sockets in TIME_WAIT and nothing else.

    A dump is a walk through all of the kernel's connections, so the second, for the other states,
    is made only where the first leaves something to ask.
    """
    if not search.busy or not _any_time_wait():
        return set()
    try:
        rows = _diag.sockets(request.first, request.last, "tcp", _diag.TIME_WAIT)
        waiting = {port for port, *_ in rows}.intersection(search.busy_ports())
        if not waiting:
            return waiting
        for port, *_ in _diag.sockets(min(waiting), max(waiting), "tcp", _NOT_WAITING):
            waiting.discard(port)
        # before Linux 6.8 bound sockets are not shown; those of fastports have entries
        for entry in entries():
            waiting.difference_update(entry.ports)
    except OSError:  # no netlink, or no /proc: nothing is known
        return set()
    return waiting


def _cause(request: Request) -> str:
    """What is on the one port of the request, as far as the kernel tells."""
    found: set[int] = set()
    try:
        for states in (_diag.LISTENING, _NOT_LISTENING):  # the first takes no walk
            for protocol in ("tcp", "udp"):
                if request.bits & PROTOCOLS[protocol]:
                    rows = _diag.sockets(request.first, request.first, protocol, states)
                    found.update(state for _, state, *_ in rows)
            if found:
                break
    except OSError:  # no netlink here
        return "busy"
    for state, cause in _BY_STATE:
        if state in found:
            return cause
    return "busy"
