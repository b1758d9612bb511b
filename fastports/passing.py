"""A block on its way to another process: ``block.send(sock)`` and ``fastports.receive(sock)``.

The descriptors cross a connected UNIX socket (SCM_RIGHTS, unix(7)), and ownership follows::

    sender                                  receiver
    OFFER, in as many parts as it takes
                                            makes the block and its entry
                                            READY, or REFUSED and why
    TAKE
    closes its copies and its entry         the block is its own

Both have the ports in between, so that nobody else gets them. TAKE decides, also when one of the
two gives up or dies: once queued, the block is the receiver's. A receiver that waits no longer
shuts its end before it looks at what is queued for the last time. The kernel looks at the one and
does the other under one lock, so that a TAKE either fails or counts.
"""

from __future__ import annotations

import errno
import math
import os
import select
import time
from array import array
from contextlib import suppress
from socket import (
    AF_UNIX,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    SCM_RIGHTS,
    SHUT_RD,
    SHUT_RDWR,
    SOCK_DGRAM,
    SOCK_STREAM,
    SOL_SOCKET,
    socket,
)
from struct import Struct

from ._core import Hold, descriptor_usage, parse_address
from .activation import shape_of
from .block import PortBlock, searched, searching, watch_forks
from .command import number
from .errors import DescriptorLimit, FastportsError, HandoffError, InvalidRequest
from .events import emit, heard
from .host import HostRegistry
from .request import check_label, check_metadata

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["receive", "send"]

# What it is and its version, kind, number of this part, of parts, of descriptors in it, of bytes.
_HEADER = Struct("!8sBHHHI")
_MAGIC = b"fports/1"
_OFFER, _READY, _REFUSED, _TAKE = range(1, 5)

_CROSSING = 252  # SCM_MAX_FD is 253 (unix(7)); musl's sendmsg takes 1,024 bytes of them
_BODY = 16384  # bytes of one part: a packet must fit into a socket's buffer
_PARTS = 1024  # more than 65535 ports of both protocols take
_BYE = b"it gave up."
_SO_NETNS_COOKIE = 71  # Linux 5.14


def send(block: PortBlock, sock: socket, timeout: float | None = 30.0) -> None:
    """See :meth:`fastports.PortBlock.send`."""
    line = _Line(sock, timeout, "send")
    fds = block.filenos()  # a released block, or another process's, says so
    shown = f"ports {block.first}-{block.last}"
    if block.holds_closed:
        raise HandoffError(
            f"the holds of {shown} were closed for a child: there is nothing to send. Send a block"
            " whose ports are held.",
            mode="send",
        )
    if block._registry is not None:
        raise HandoffError(
            f"{shown} are on record in a cluster under the lease of this process, which would end"
            " with it. Have the receiver allocate, or send a block of an Allocator without"
            " a registry.",
            mode="send",
        )
    from json import dumps

    manifest = dumps(
        {
            "protocol": block.protocol,
            "first": block.first,
            "size": len(block),
            "host": block.host,
            "label": block.label,
            "metadata": block._metadata,
            "network": _namespace(),
        }
    ).encode()
    parts = max(math.ceil(len(fds) / _CROSSING), math.ceil(len(manifest) / _BODY))
    try:
        for index in range(parts):
            line.send(
                _OFFER,
                manifest[index * _BODY : (index + 1) * _BODY],
                fds[index * _CROSSING : (index + 1) * _CROSSING],
                index,
                parts,
            )
        kind, why = line.word(_READY, _REFUSED)
        if kind == _READY:
            line.send(_TAKE)
    except BaseException:
        line.shut()  # the receiver need not wait for what will not come
        raise
    if kind == _REFUSED:
        raise line.failed(
            f"the receiver refused {shown}: {why.decode(errors='replace')} They stay held here:"
            " send them again when it can take them."
        )
    if block._release() and heard():
        emit("sent", block)


def receive(sock: socket, *, timeout: float | None = 30.0) -> PortBlock:
    """Take over the block that another process gives away by :meth:`PortBlock.send`.

    Parameters
    ----------
    sock
        A connected UNIX socket: stream, seqpacket or datagram, blocking or not. Nobody else may
        read or write at either end meanwhile.
    timeout
        Seconds until it must be done, the wait for the sender included; None for no limit.

    Returns
    -------
    PortBlock
        This process's own, with its own entry, and with the protocol, host, label and metadata it
        had. Its door is closed.

    Raises
    ------
    HandoffError
        The sender is gone, did not send in time, or changed its mind; what came is not from
        fastports, is cut, or is no block of ports of this network namespace. No descriptor stays.
        If the two are out of step then, ``sock`` is shut down.
    DescriptorLimit
        There are not enough descriptors left; the sender keeps the block.
    InvalidRequest
        ``sock`` is no connected UNIX socket.
    """
    line = _Line(sock, timeout, "receive")
    block: PortBlock | None = None
    with _Arriving() as arriving:
        try:
            manifest, trouble = line.offer(arriving)
            if trouble is None:
                try:
                    block = _as_told(manifest, arriving, line)
                except FastportsError as exc:
                    trouble = exc
            if trouble is not None:
                arriving.hold.close()
                line.send(_REFUSED, str(trouble).encode()[:_BODY])
        except BaseException:
            line.shut()
            raise
        if trouble is not None:
            raise trouble
    assert block is not None
    try:
        line.send(_READY)
        try:
            line.word(_TAKE)
        except HandoffError:
            if not line.was_taken():
                raise
        block.close_door()
    except BaseException:
        line.shut()
        block._release()
        raise
    if heard():
        emit("received", block)
    return block


class _Arriving:
    """Descriptors on their way in: closed at the end, and in a forked child, unless kept."""

    def __init__(self) -> None:
        self.hold = Hold()
        self.kept = False

    def __enter__(self) -> _Arriving:
        searching(self)
        return self

    def __exit__(self, *exc: object) -> None:
        searched(self)
        if not self.kept:
            self.hold.close()

    def pause(self) -> None:
        """Nothing to do before a fork: the core has what arrived on record at once."""

    resume = pause

    def abandon(self, *, forked: bool = False) -> None:
        self.hold.close()


class _Line:
    """One end of the conversation: whole messages, within the time there is."""

    def __init__(self, sock: socket, timeout: float | None, side: str) -> None:
        if not isinstance(sock, socket) or sock.family != AF_UNIX:
            raise self.unfit(sock)
        try:
            sock.getpeername()
        except OSError as exc:
            raise self.unfit(sock) from exc
        self.sock = sock
        self.side = side
        self.begun = time.monotonic()
        self.deadline = None if timeout is None else self.begun + number(timeout, "timeout")

    def unfit(self, sock: object) -> InvalidRequest:
        return InvalidRequest(
            f"{sock!r} is no connected UNIX socket. Pass one end of socket.socketpair(), or an"
            " AF_UNIX socket after connect() or accept().",
            argument="sock",
            value=sock,
        )

    def failed(self, text: str) -> HandoffError:
        return HandoffError(text, mode=self.side, elapsed=time.monotonic() - self.begun)

    def foreign(self) -> HandoffError:
        return self.failed(
            "what came over the socket is no message of this version of fastports. Use one socket"
            " for this alone, with send() at one end and receive() at the other."
        )

    def gone(self, exc: OSError | None = None) -> HandoffError:
        other = "receiver" if self.side == "send" else "sender"
        why = "" if exc is None else f" ({exc.strerror})"
        return self.failed(
            f"the {other} is gone, or has given up{why}. Connect again, and repeat both calls."
        )

    def wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self.sock, event)
        left = None
        if self.deadline is not None:
            left = max(math.ceil((self.deadline - time.monotonic()) * 1000), 0)
        if not poll.poll(left):
            other = "receiver" if self.side == "send" else "sender"
            raise self.failed(
                f"the {other} did not answer in time. See that it runs and calls"
                f" {'receive' if other == 'receiver' else 'send'}(), or pass a longer timeout."
            )

    def send(
        self, kind: int, body: bytes = b"", fds: Sequence[int] = (), index: int = 0, parts: int = 1
    ) -> None:
        data = _HEADER.pack(_MAGIC, kind, index, parts, len(fds), len(body)) + body
        rights = [(SOL_SOCKET, SCM_RIGHTS, array("i", fds))] if fds else []
        while data:
            self.wait(select.POLLOUT)
            try:
                sent = self.sock.sendmsg([data], rights, MSG_DONTWAIT | MSG_NOSIGNAL)
            except (BlockingIOError, TimeoutError):
                continue
            except OSError as exc:
                raise self.gone(exc) from exc
            data, rights = data[sent:], []

    def receive(self, arriving: _Arriving) -> tuple[int, int, int, int, bytes]:
        """A message: kind, number of this part, of parts, of descriptors it should have, body."""
        streams = self.sock.type == SOCK_STREAM
        data = self._read(arriving, _HEADER.size + (0 if streams else _BODY))
        if len(data) < _HEADER.size:
            raise self.foreign()
        magic, kind, index, parts, count, length = _HEADER.unpack_from(data)
        if magic != _MAGIC or length > _BODY:
            raise self.foreign()
        body = self._read(arriving, length) if streams and length else data[_HEADER.size :]
        if len(body) != length:
            raise self.foreign()
        if kind == _REFUSED and self.side == "receive":
            raise self.gone()
        return kind, index, parts, count, body

    def _read(self, arriving: _Arriving, size: int) -> bytes:
        """``size`` bytes of a stream, or a packet of at most that many."""
        data = b""
        while True:
            self.wait(select.POLLIN)
            try:
                more, cut, _ = arriving.hold.receive(self.sock.fileno(), size - len(data))
            except BlockingIOError:
                if self.deadline is not None and time.monotonic() >= self.deadline:
                    raise self.gone() from None
                continue
            except OSError as exc:
                raise self.gone(exc) from exc
            if cut:
                raise self.foreign()
            if not more:
                raise self.gone()
            data += more
            if len(data) == size or self.sock.type != SOCK_STREAM:
                return data

    def word(self, *kinds: int) -> tuple[int, bytes]:
        """A message of one of these kinds: without parts, without descriptors."""
        with _Arriving() as none:
            kind, _, _, _, body = self.receive(none)
            if kind not in kinds or len(none.hold):
                raise self.foreign()
        return kind, body

    def offer(self, arriving: _Arriving) -> tuple[bytes, FastportsError | None]:
        """The manifest, and what is wrong with what came along; reads all parts in any case."""
        manifest = b""
        trouble: FastportsError | None = None
        index, parts = 0, 1
        while index < parts:
            before = len(arriving.hold)
            kind, number, parts_told, count, body = self.receive(arriving)
            if kind != _OFFER or number != index or not index < parts_told <= _PARTS:
                raise self.foreign()
            parts = parts_told
            index += 1
            manifest += body
            if trouble is None and len(arriving.hold) - before < count:
                trouble = _limit(count, errno.EMFILE)
            if trouble is not None:
                arriving.hold.close()
        return manifest, trouble

    def was_taken(self) -> bool:
        """Let nothing in any more; whether the sender's last word came in before."""
        with suppress(OSError):
            self.sock.shutdown(SHUT_RD)
        self.deadline = self.begun
        try:
            self.word(_TAKE)
        except HandoffError:
            return False
        return True

    def shut(self) -> None:
        """Give up, so that the other end need not wait."""
        with suppress(OSError):
            if self.sock.type == SOCK_DGRAM:  # nobody notices that such a socket is shut
                bye = _HEADER.pack(_MAGIC, _REFUSED, 0, 1, 0, len(_BYE)) + _BYE
                self.sock.sendmsg([bye], [], MSG_DONTWAIT | MSG_NOSIGNAL)
        with suppress(OSError):
            self.sock.shutdown(SHUT_RDWR)


def _as_told(manifest: bytes, arriving: _Arriving, line: _Line) -> PortBlock:
    """The block that arrived, with its entry. What the sender says of it is checked."""
    from json import loads

    try:
        told = loads(manifest)
        label, metadata = check_label(told["label"]), check_metadata(told["metadata"])
        wanted = told["first"], told["size"], told["protocol"]
        host, network = told["host"], told["network"]
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise line.foreign() from exc
    socks: list[socket] = []
    own, here = None, False
    try:
        with socket(AF_UNIX, SOCK_DGRAM) as ours:  # the entry wants a descriptor, too
            own = _cookie(ours)
        for fd in arriving.hold.filenos():
            socks.append(socket(fileno=fd))
        shape = shape_of(socks) if socks else None
        here = all(_cookie(sock) == own for sock in socks)
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise _limit(1, exc.errno) from exc
        shape = None
    finally:
        for sock in socks:
            sock.detach()
    if shape is None or shape[:3] != wanted or not _is_same(host, shape[3]):
        raise line.failed(
            "what arrived is not the sockets of the block that was announced. Send a block of"
            " fastports by its send()."
        )
    if not here or (own is None and network != _namespace()):
        raise line.failed(
            f"ports {told['first']}-{told['first'] + told['size'] - 1} are those of another network"
            " namespace, and say nothing about this one. Receive them there."
        )
    registry = HostRegistry()
    watch_forks()
    block = PortBlock(arriving.hold, *shape[:3], host, label, metadata, registry.names()[0])
    block._passed = True
    arriving.kept = True
    registry.claim([block])
    return block


def _limit(needed: int, error: int) -> DescriptorLimit:
    in_use, soft, hard = descriptor_usage()
    return DescriptorLimit(
        f"{needed} more descriptor{'s' if needed > 1 else ''} cannot be taken: {in_use} are open,"
        f" the limit is {soft}. Raise it (ulimit -n, RLIMIT_NOFILE) or close some.",
        needed=needed,
        open=in_use,
        soft=soft,
        hard=hard,
        errno=error,
    )


def _is_same(told: object, seen: str | None) -> bool:
    """Whether the address a block was allocated for is the one that its sockets are bound to."""
    if told is None:
        return seen is None
    address = parse_address(told) if isinstance(told, str) else None
    if address is None:
        return False
    return not any(address[1]) if seen is None else address == parse_address(seen)


def _cookie(sock: socket) -> bytes | None:
    """What tells the network namespace of a socket from all others; None before Linux 5.14."""
    try:
        return sock.getsockopt(SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    except OSError as exc:
        if exc.errno == errno.ENOPROTOOPT:
            return None
        raise


def _namespace() -> list[int]:
    """The thread's network namespace, as far as another process can compare it."""
    found = os.stat("/proc/thread-self/ns/net")
    return [found.st_dev, found.st_ino]
