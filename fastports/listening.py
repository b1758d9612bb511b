"""Whether ports are listened on, asked of the kernel and never by connecting.

A TCP port counts when a socket listens on it, a UDP port when a socket other than the hold is
bound.
"""

from __future__ import annotations

import os
import time

from ._core import parse_address
from ._diag import BOUND, CONNECTED, LISTENING, Diag, door_facts, shows_listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol, TypeAlias

    from .block import PortBlock

    Socket: TypeAlias = tuple[int, int]  # inode, uid

    class Asker(Protocol):
        def lookup(
            self, protocol: str, address: bytes, port: int
        ) -> tuple[int, int, int] | None: ...
        def sockets(
            self, first: int, last: int, protocol: str, states: int
        ) -> list[tuple[int, int, int, int, int]]: ...
        def close(self) -> None: ...


__all__ = ["ProcDiag", "Watch"]

_V4 = b"\x7f\0\0\1"
_V6 = bytes(15) + b"\1"

# A dump of listeners costs 30 us with few of them and grows with their number. It may take this
# share of the time; more where it is all there is (/proc/net: 10 ms and more).
_DUMP_SHARE, _PROC_SHARE = 0.02, 0.25


class ProcDiag:
    """The questions of :class:`fastports._diag.Diag` answered from /proc/net, where netlink is not.

    Slower by orders of magnitude with many sockets, and blind to bound TCP sockets.
    """

    _LISTEN, _CLOSE, _ESTABLISHED = 10, 7, 1

    def lookup(self, protocol: str, address: bytes, port: int) -> tuple[int, int, int] | None:
        for row in self.sockets(port, port, protocol, LISTENING if protocol == "tcp" else BOUND):
            return row[1], row[2], row[3]
        return None

    def sockets(
        self, first: int, last: int, protocol: str, states: int
    ) -> list[tuple[int, int, int, int, int]]:
        classes = {self._LISTEN: LISTENING, self._CLOSE: BOUND, self._ESTABLISHED: CONNECTED}
        rows = []
        for suffix, family in (("", 2), ("6", 10)):
            try:
                with open(f"/proc/net/{protocol}{suffix}", "rb") as table:
                    lines = table.read().splitlines()[1:]
            except FileNotFoundError:
                continue  # a kernel without IPv6
            for line in lines:
                fields = line.split()
                port = int(fields[1].rpartition(b":")[2], 16)
                state = classes.get(int(fields[3], 16), 0)
                if first <= port <= last and state & states:
                    rows.append((port, state, int(fields[9]), int(fields[7]), family))
        return rows

    def close(self) -> None:
        """Nothing to give back."""


_facts: list[tuple[str, bool]] = []


def facts() -> tuple[str, bool]:
    """What the self-test of the kernel says; it runs once in a process, in some 50 us.

    Returns
    -------
    tuple[str, bool]
        The fact of the door that does not hold here (empty: all do), and whether sock_diag answers.
    """
    if not _facts:
        _facts.append((door_facts(), shows_listeners()))
    return _facts[0]


class Watch:
    """Watches ports of a block for listeners.

    Parameters
    ----------
    block
        The block; its holds are told apart from other sockets.
    ports
        Those that have to be listened on.
    passed
        The child has the held sockets themselves: they count, too.
    """

    def __init__(self, block: PortBlock, ports: Sequence[int], *, passed: bool = False) -> None:
        self.block = block
        self.ports = ports
        self.protocols: tuple[str, ...] = (
            ("tcp", "udp") if block.protocol == "both" else (block.protocol,)
        )
        self._missing = [(protocol, port) for port in ports for protocol in self.protocols]
        self._missing.reverse()  # popped from the end
        held = [] if block.holds_closed else block.filenos()
        self._holds = {os.fstat(fd).st_ino for fd in held}
        self.own = frozenset(self._holds)
        address = None if block.host is None else parse_address(block.host)
        self._addresses = [_V4, _V6]
        if address is not None and any(address[1]):
            self._addresses = [address[1]]
        self._next_dump = 0.0
        self._asker = self._ask_whom(held)
        if passed:
            self._holds = set()

    def _ask_whom(self, held: Sequence[int]) -> Asker:
        if not facts()[1]:
            return ProcDiag()
        try:
            asker = Diag()
        except OSError:
            return ProcDiag()
        if "udp" in self.protocols and held:
            # UDP has a kernel module of its own; a hold that it does not show proves its absence
            first = self.block.first
            try:
                shown = asker.sockets(first, first, "udp", BOUND)
            except OSError:
                shown = []
            if not any(row[2] in self._holds for row in shown):
                asker.close()
                return ProcDiag()
        return asker

    def close(self) -> None:
        """Give the netlink socket back."""
        self._asker.close()

    @property
    def missing(self) -> list[int]:
        """The ports not seen listening yet."""
        return sorted({port for _, port in self._missing})

    def all_up(self) -> bool:
        """Whether each port has been seen listening; asks only about the first that was not."""
        while self._missing:
            if not self._is_up(*self._missing[-1]):
                return False
            self._missing.pop()
        return True

    def _is_up(self, protocol: str, port: int) -> bool:
        if isinstance(self._asker, Diag):
            for address in self._addresses:
                row = self._asker.lookup(protocol, address, port)
                if row is not None and row[1] not in self._holds:
                    return True
        # A listener on one address of many is only shown by a dump.
        before = time.monotonic()
        if before < self._next_dump:
            return False
        found = any(self._listeners(port, port, protocol))
        after = time.monotonic()
        share = _DUMP_SHARE if isinstance(self._asker, Diag) else _PROC_SHARE
        self._next_dump = after + (after - before) / share
        return found

    def _listeners(self, first: int, last: int, protocol: str) -> list[tuple[int, Socket]]:
        states = LISTENING if protocol == "tcp" else BOUND | CONNECTED
        return [
            (port, (inode, uid))
            for port, _, inode, uid, _ in self._asker.sockets(first, last, protocol, states)
            if inode not in self._holds
        ]

    def listeners(self) -> list[tuple[int, Socket]]:
        """Everybody who listens on the watched ports now: port, and the socket's inode and uid."""
        wanted = set(self.ports)
        found = {
            row
            for protocol in self.protocols
            for row in self._listeners(self.block.first, self.block.last, protocol)
            if row[0] in wanted
        }
        return sorted(found)
