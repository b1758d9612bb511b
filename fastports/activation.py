"""The receiving end of socket activation: take over sockets that whoever started us has made.

Speaks the protocol of systemd (sd_listen_fds(3)), which ``handoff="fd"`` speaks too, and takes
plain descriptor numbers, as circus puts them on a command line.
"""

from __future__ import annotations

import os

from ._core import Hold
from .block import PortBlock, watch_forks
from .command import FIRST_DESCRIPTOR
from .errors import HandoffError, InvalidRequest
from .host import HostRegistry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from socket import socket

__all__ = ["adopt", "shape_of"]

_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


def adopt(
    names: Iterable[str] | None = None, *, descriptors: Iterable[int] | None = None
) -> PortBlock | list[socket]:
    """Take over the sockets that this process was started with.

    Makes them close-on-exec and takes ``LISTEN_FDS``, ``LISTEN_PID`` and ``LISTEN_FDNAMES`` out of
    the environment, so that no program started from here mistakes them for its own.

    Parameters
    ----------
    names
        Take the sockets with these names (``LISTEN_FDNAMES``), in this order; the others are
        closed. None takes all.
    descriptors
        Take these instead of what the environment names, for a launcher that passes numbers on the
        command line.

    Returns
    -------
    PortBlock or list[socket.socket]
        A block if they are what a block holds: TCP, UDP or both of contiguous ports on one address,
        in port order. It is this process's own: it may release it, or start programs on it. Serve
        on ``socket.fromfd(block.filenos()[0], ...)``. Otherwise the sockets, in order.

    Raises
    ------
    HandoffError
        Nothing was passed, it was passed to another process (``LISTEN_PID``), a descriptor is not
        open or is no socket, or a name is missing. Nothing was changed then.
    """
    if descriptors is not None:
        fds = list(descriptors)
        labels = [""] * len(fds)
        if names is not None:
            raise InvalidRequest(
                "names= are looked up in LISTEN_FDNAMES, descriptors= are not. Pass one of them.",
                argument="names",
                value=names,
            )
        if not fds:
            raise InvalidRequest(
                "descriptors= is empty. Pass the numbers of open sockets.",
                argument="descriptors",
                value=fds,
            )
    else:
        fds, labels = _environment()
    for fd in fds:
        _check(fd)
    chosen = list(range(len(fds))) if names is None else _chosen(names, labels)
    for fd in fds:
        os.set_inheritable(fd, False)
    if descriptors is None:
        for variable in _VARIABLES:
            os.environ.pop(variable, None)
    kept = [fds[index] for index in chosen]
    for fd in fds:
        if fd not in kept:
            os.close(fd)
    from socket import socket  # 9 ms

    socks = [socket(fileno=fd) for fd in kept]
    block = _as_block(socks, labels[chosen[0]])
    return socks if block is None else block


def _environment() -> tuple[list[int], list[str]]:
    count, pid = os.environ.get("LISTEN_FDS"), os.environ.get("LISTEN_PID")
    if count is None or pid is None:
        missing = "LISTEN_FDS" if count is None else "LISTEN_PID"
        raise HandoffError(
            f"no sockets were passed to this process: {missing} is not set. Start it by"
            " spawn(..., handoff='fd') or another program that speaks socket activation.",
            mode="fd",
        )
    if not pid.isascii() or not pid.isdigit() or int(pid) != os.getpid():
        raise HandoffError(
            f"the sockets were passed to process {pid}, and this is process {os.getpid()}. Start"
            " the program itself, or have the shell in between `exec` it.",
            mode="fd",
        )
    if not count.isascii() or not count.isdigit() or not 1 <= int(count) <= 65536:
        raise HandoffError(
            f"LISTEN_FDS is {count!r}, which is no count of sockets. Start this program by"
            " something that speaks socket activation.",
            mode="fd",
        )
    fds = list(range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)))
    text = os.environ.get("LISTEN_FDNAMES")
    labels = text.split(":") if text is not None else []
    if len(labels) != len(fds):
        labels = ["unknown"] * len(fds)  # as sd_listen_fds_with_names(3) calls them
    return fds, labels


def _check(fd: int) -> None:
    from stat import S_ISSOCK

    try:
        mode = os.fstat(fd).st_mode
    except OSError as exc:
        raise HandoffError(
            f"descriptor {fd} was passed, and it is not open ({exc.strerror}). Look at what closed"
            " it between the launcher and this call.",
            mode="fd",
        ) from exc
    if not S_ISSOCK(mode):
        raise HandoffError(
            f"descriptor {fd} was passed, and it is no socket. Pass sockets only.", mode="fd"
        )


def _chosen(names: Iterable[str], labels: Sequence[str]) -> list[int]:
    wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise InvalidRequest(
            "names= is empty. Pass the names of sockets, or None for all.",
            argument="names",
            value=names,
        )
    chosen = [index for name in wanted for index, label in enumerate(labels) if label == name]
    for name in wanted:
        if name not in labels:
            raise HandoffError(
                f"no socket named {name!r} was passed; there are {', '.join(labels)}. Ask for one"
                " of these.",
                mode="fd",
            )
    return chosen


def _as_block(socks: Sequence[socket], label: str) -> PortBlock | None:
    """A block of these sockets, which it owns from here on; None if they are not one."""
    shape = shape_of(socks)
    if shape is None:
        return None
    watch_forks()
    registry = HostRegistry()
    block = PortBlock(
        Hold.adopt([sock.detach() for sock in socks]),
        *shape,
        "" if label in ("unknown", "fastports") else label,
        None,
        registry.names()[0],
    )
    block._passed = True
    if "FASTPORTS_PORTS" not in os.environ:  # else they are on record as what we were started on
        registry.claim([block])
    return block


def shape_of(socks: Sequence[socket]) -> tuple[int, int, str, str | None] | None:
    """First port, number of ports, protocol and address of the block that these are, or None."""
    from socket import (
        AF_INET,
        AF_INET6,
        IPPROTO_IPV6,
        IPV6_V6ONLY,
        SOCK_DGRAM,
        SOCK_STREAM,
    )

    rows = []
    for sock in socks:
        if sock.family not in (AF_INET, AF_INET6) or sock.type not in (SOCK_STREAM, SOCK_DGRAM):
            return None
        address, port = sock.getsockname()[:2]
        if port == 0 or _is_connected(sock):
            return None
        dual = sock.family == AF_INET6 and not sock.getsockopt(IPPROTO_IPV6, IPV6_V6ONLY)
        if address == "0.0.0.0" or (address == "::" and dual):
            address = None
        rows.append((port, "tcp" if sock.type == SOCK_STREAM else "udp", address))
    first, host = rows[0][0], rows[0][2]
    for protocols in (["tcp"], ["udp"], ["tcp", "udp"]):
        each = len(protocols)
        if rows == [
            (first + index // each, protocols[index % each], host)
            for index in range(len(rows) // each * each)
        ]:
            return first, len(rows) // each, "both" if each == 2 else protocols[0], host
    return None


def _is_connected(sock: socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True
