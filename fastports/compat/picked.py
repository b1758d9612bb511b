"""One port number, kept in TCP and UDP for a program that binds it by itself.

Such a program was told a number and nothing else: it cannot be started by us, is given no
descriptor, and may bind with SO_REUSEADDR or without. Two ways are left to keep the number for it
(the same two words as in the hand-off to a child):

``"close"``
    The port is found by binding it in both protocols, its markers are bound, and only then are the
    held sockets closed. Any program can bind it now, in any way. Until it does, every fastports
    user is kept off by the markers, and the kernel gives the port to nobody by itself as long as it
    lies outside the ephemeral range; a program that binds *this very number* without asking
    fastports gets it.
``"door"``
    TCP stays held with the door open: nobody can bind it but who sets SO_REUSEADDR, as nearly all
    servers do. A program that binds plainly is refused with EADDRINUSE, be it the right one. Until
    the right one listens, a stranger that binds this very number with SO_REUSEADDR can enter. UDP
    goes the way of ``"close"``: UDP programs rarely set SO_REUSEADDR, and where two do, both bind.
"""

from __future__ import annotations

from ..errors import InvalidRequest, PortsUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from ..allocator import Allocator
    from ..block import PortBlock

__all__ = ["HANDOFFS", "Picked", "check_handoff", "pick", "set_timeout"]

HANDOFFS = ("close", "door")
_TRIES = 64  # ports set aside at most, because UDP is taken there or a marker is squatted on


def check_handoff(handoff: str) -> str:
    """The same text if it is a way to keep a port, else InvalidRequest."""
    if handoff not in HANDOFFS:
        raise InvalidRequest(
            f"handoff={handoff!r} is not a way to keep a port for a program that binds it by"
            " itself. Use 'close' (any program) or 'door' (programs that set SO_REUSEADDR).",
            argument="handoff",
            value=handoff,
        )
    return handoff


class Picked:
    """A port kept for somebody; :meth:`release` gives it back.

    Attributes
    ----------
    port
        The number, free in TCP and UDP when it was picked.
    blocks
        What keeps it: one block for both protocols, or one each.
    """

    __slots__ = ("blocks", "port")

    def __init__(self, *blocks: PortBlock) -> None:
        self.port: int = blocks[0].first
        self.blocks: tuple[PortBlock, ...] = blocks

    def release(self) -> None:
        """Stop keeping the port. Idempotent; a program that has bound it is not disturbed."""
        for block in self.blocks:
            block.release()


def pick(allocators: Sequence[Allocator], handoff: str, label: str = "") -> Picked:
    """Find a port that is free in TCP and UDP and keep it until its release.

    Parameters
    ----------
    allocators
        One for each range, tried in this order.
    handoff
        ``"close"`` or ``"door"``, see above.
    label
        Shown by ``fastports ls``.

    Raises
    ------
    PortsUnavailable
        The refusal of the last allocator.
    BindDenied, DescriptorLimit
    """
    for allocator in allocators[:-1]:
        try:
            return _pick(allocator, handoff, label)
        except PortsUnavailable:
            continue
    return _pick(allocators[-1], handoff, label)


def _pick(allocator: Allocator, handoff: str, label: str) -> Picked:
    aside: list[PortBlock] = []  # what did not work out stays held meanwhile: no second look at it
    try:
        while True:
            try:
                if handoff == "close":
                    block = allocator.allocate(1, protocol="both", label=label)
                    aside.append(block)
                    block.close_holds()
                    return Picked(aside.pop())
                block = allocator.allocate(1, protocol="tcp", label=label)
                aside.append(block)
                datagrams = allocator.reserve(block.first, protocol="udp", label=label)
                aside.append(datagrams)
                datagrams.close_holds()
                block.open_door()
                return Picked(aside.pop(-2), aside.pop())
            except PortsUnavailable as exc:
                # about the one port in hand, or about the whole range
                if exc.cause is None or len(aside) >= _TRIES:
                    raise
    finally:
        for block in aside:
            block.release()


def set_timeout(sock: socket.socket, seconds: float) -> None:
    """Bound each call on a UNIX socket, which stays blocking.

    With ``settimeout`` a connect to a server whose queue is full fails at once (EAGAIN) instead of
    waiting its turn (unix(7), connect(2)).
    """
    import socket
    import struct

    interval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
