"""``PortBlock``: ports that are held, and by whom.

A block belongs to the process that made it. After ``os.fork()`` the child's copies of the
descriptors are closed at once and its blocks refuse to act, so that a port is free the moment its
owner says so.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock
from _weakref import ref  # what weakref.ref is; the module around it costs 0.9 ms at import
from os import getpid

from . import events
from ._core import TCP, UDP, Hold, Holder
from .errors import BlockReleased, NotOwner, PortsUnavailable
from .events import emit, emit_later, heard
from .registry import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from socket import socket
    from typing import Any, Protocol, overload

    from .handoff import Child

    class Halting(Protocol):
        """A search, or what else has descriptors that no block has yet."""

        def pause(self) -> None: ...
        def resume(self) -> None: ...
        def abandon(self, *, forked: bool = False) -> None: ...

    class Releaser(Protocol):
        def release(self, blocks: Sequence[PortBlock]) -> None: ...
        def release_later(self, blocks: Sequence[PortBlock]) -> None: ...
        def state(self, block: PortBlock) -> str: ...


else:

    def overload(function):
        return function


__all__ = ["PROTOCOLS", "PortBlock"]

#: The core's bit mask for each protocol name.
PROTOCOLS = {"tcp": TCP, "udp": UDP, "both": TCP | UDP}

# What a forked child must close: it has copies of our descriptors and, maybe, none of our threads.
# Global because fork is: os.register_at_fork cannot be undone, so it is called once.
_live: dict[int, ref[PortBlock]] = {}
_searching: set[Halting] = set()
_forking: list[bool] = []
_watching_forks: list[bool] = []
_naming = allocate_lock()


def watch_forks() -> None:
    """Have the descriptors of blocks and running searches closed in children of os.fork()."""
    if not _watching_forks:
        _watching_forks.append(True)
        os.register_at_fork(before=_halt, after_in_parent=_go_on, after_in_child=_close_in_child)
        events.watch_forks()


def held() -> list[int]:
    """How many ports each block of this process has."""
    blocks = [reference() for reference in list(_live.values())]
    return [len(block) for block in blocks if block is not None]


def searching(search: Halting) -> None:
    """Remember a search until :func:`searched`, for a fork in between."""
    if not _watching_forks:
        watch_forks()
    _searching.add(search)
    if _forking:
        stand_still(search)


def stand_still(search: Halting) -> None:
    """Have a search that begins amid a fork wait for its end."""
    search.pause()
    if not _forking:  # it ended before the pause, and nobody else would end that
        search.resume()


searched = _searching.discard


# Hooks run Python code, so other threads may run in between: they begin and end searches, and fork.


def _halt() -> None:
    """Before a fork: what searches have on record must be what is open when the copy is made."""
    _forking.append(True)
    for search in list(_searching):
        search.pause()


def _go_on() -> None:
    _forking.pop()
    if not _forking:
        for search in list(_searching):
            search.resume()


def _close_in_child() -> None:
    global _naming
    _naming = allocate_lock()  # another thread of the parent may have had it
    _forking.clear()
    for search in list(_searching):
        search.resume()
        search.abandon(forked=True)
    _searching.clear()
    for reference in list(_live.values()):
        block = reference()
        if block is not None:
            block._close_copies()
    _live.clear()


class PortBlock(Holder):
    """Contiguous ports that nobody else can take. Made by ``allocate`` and ``reserve``.

    A block is a sequence of its port numbers. It is held until :meth:`release`, the end of its
    ``with`` statement, its last reference, or the end of the process, whichever comes first.

    Attributes
    ----------
    first, last
        Port numbers, inclusive.
    host
        The address held; None for the wildcard of every family.
    protocol
        ``"tcp"``, ``"udp"`` or ``"both"``.
    label
        As given to the call that made the block.

    Notes
    -----
    A hold is a socket that is bound with no option set and does not listen. While it lives, bind(2)
    of its port fails with EADDRINUSE for every other socket, whatever options it sets, and connect
    gets ECONNREFUSED. While the door is open, a socket with SO_REUSEADDR can bind and listen beside
    the hold; the program meant for the port, but also a stranger who asks for this very port.
    """

    __slots__ = (
        "__weakref__", "_entering", "_markers", "_metadata", "_owner", "_passed", "_process",
        "_registry", "_served", "first", "host", "label", "last", "protocol",
    )  # fmt: skip

    first: int
    last: int
    host: str | None
    protocol: str
    label: str
    _owner: Owner

    def __init__(
        self,
        hold: Hold,
        first: int,
        size: int,
        protocol: str,
        host: str | None,
        label: str,
        metadata: Mapping[str, object] | None,
        process: tuple[int, int],
    ) -> None:
        self._entering: set[object] = set()  # for whom the door is open
        self._markers: Hold | None = None
        self._metadata = metadata
        self._passed = False  # another process has the sockets too, or had: they may listen
        self._registry: Releaser | None = None
        self._served: Callable[[], None] | None = None  # called before the sockets close
        self._process = process  # pid and start time
        self.first = first
        self.last = first + size - 1
        self.host = host
        self.protocol = protocol
        self.label = label
        self._hold = hold  # last: whatever has it is whole
        _live[id(self)] = ref(self)

    # --- looking ---

    @property
    def ports(self) -> range:
        """The ports as a range, ascending."""
        return range(self.first, self.last + 1)

    @property
    def owner(self) -> Owner:
        """The process that made the block, and the block's token."""
        try:
            return self._owner
        except AttributeError:  # most blocks are never asked
            with _naming:  # two threads must not name two owners
                if not hasattr(self, "_owner"):
                    self._owner = Owner(*self._process)
                return self._owner

    @property
    def metadata(self) -> dict[str, object]:
        """A copy of the metadata given to the call that made the block."""
        return dict(self._metadata or {})

    @property
    def released(self) -> bool:
        """Whether the block was given back. In a forked child: whether it was when it forked."""
        return self._hold is None

    @property
    def state(self) -> str:
        """``"held"``, ``"closed"`` (handed over in close mode: kept by markers) or ``"released"``.

        A cluster registry adds ``"degraded"`` (its record of the block is lost for the moment; the
        ports are held as before) and ``"contested"`` (it names another owner).
        """
        if self._hold is None:
            return "released"
        registry = self._registry
        if registry is not None:
            state = registry.state(self)
            if state != "held":
                return state
        return "held" if self._markers is None else "closed"

    @property
    def holds_closed(self) -> bool:
        """Whether :meth:`close_holds` has left the ports to markers, whatever a registry says."""
        return self._markers is not None

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(self.ports)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> range: ...  # noqa: F811 (an overload)
    def __getitem__(self, index: int | slice) -> int | range:  # noqa: F811
        return self.ports[index]

    def __contains__(self, port: object) -> bool:
        return port in self.ports

    def __repr__(self) -> str:
        shown = f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"
        parts = [f"{shown}/{self.protocol}"]
        if self.host is not None:
            parts.append(f"host={self.host!r}")
        if self.label:
            parts.append(f"label={self.label!r}")
        parts.append(self.state if self._process[0] == getpid() else f"of pid {self._process[0]}")
        return f"<PortBlock {' '.join(parts)}>"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "a PortBlock cannot be pickled or copied: it owns descriptors of this process. Send its"
            " port numbers (list(block)), or pass the sockets themselves with spawn."
        )

    # --- acting ---

    def filenos(self) -> list[int]:
        """The held descriptors in port order; with both protocols tcp, udp, tcp, udp, ..."""
        return self._acting().filenos()

    def open_door(self, *ports: int) -> None:
        """Let a socket with SO_REUSEADDR bind ``ports`` (default: all) beside the hold.

        Until somebody listens on it, a stranger that binds this very port with SO_REUSEADDR can
        enter too. Close the door as soon as the program listens.

        Raises
        ------
        BlockReleased, NotOwner
        """
        self._set_door(True, ports)

    def close_door(self, *ports: int) -> None:
        """Let nobody (else) bind ``ports`` (default: all). The opposite of :meth:`open_door`."""
        self._set_door(False, ports)

    def _set_door(self, is_open: bool, ports: tuple[int, ...]) -> None:
        hold = self._acting()
        name = "door_opened" if is_open else "door_closed"
        if not ports:
            hold.set_door(is_open)
            if heard():
                emit(name, self)
            return
        each = 2 if self.protocol == "both" else 1
        for port in ports:
            if port not in self.ports:
                raise IndexError(f"port {port} is not one of {self.first}-{self.last}")
            hold.set_door(is_open, (port - self.first) * each, each)
            if heard():
                emit(name, self, port=port)

    def close_holds(self) -> None:
        """Close the sockets for a program that binds plainly; markers keep the ports taken.

        One marker (an abstract UNIX socket) per port is bound *before* its socket is closed, and
        every fastports user looks for the marker *after* its own bind, so that no other fastports
        user can get the port in between. Programs that do not use fastports can: this is the one
        mode with that race. :meth:`release` lets the markers go. Idempotent.

        Raises
        ------
        PortsUnavailable
            When somebody else has bound one of the markers; the block stays held.
        """
        hold = self._acting()
        self._mark()
        self._unserve()
        if hold.close_sockets():
            emit("holds_closed", self)

    def _mark(self) -> list[int]:
        """Bind the markers; the holds stay, until :meth:`close_holds` or :meth:`_unmark`."""
        self._acting()
        if self._markers is not None:
            return self._markers.filenos()
        # on record before anything is bound: a fork or a release may come at any moment
        markers = self._markers = Hold()
        error, port = markers.mark(PROTOCOLS[self.protocol], self.first, len(self))
        if error:
            self._markers = None
            raise PortsUnavailable(
                f"port {port} cannot be marked as taken ({os.strerror(error)}); it is still held."
                " Release this block and allocate another.",
                range=f"{self.first}-{self.last}",
                wanted=len(self),
                protocol=self.protocol,
                host=self.host,
                cause="marked",
            )
        if self._hold is None:  # released meanwhile by another thread
            markers.close()
        return markers.filenos()

    def _unmark(self) -> None:
        markers, self._markers = self._markers, None
        if markers is not None:
            markers.close()

    def spawn(self, argv: Sequence[str], **options: Any) -> Child:
        """Start a program on these ports; see :func:`fastports.handoff.spawn`."""
        # an upward import, for the sake of block.spawn(...); 1 ms, when used
        from .handoff import spawn

        return spawn(self, argv, **options)

    def send(self, sock: socket, *, timeout: float | None = 30.0) -> None:
        """Give the block to the process that calls :func:`fastports.receive` at the other end.

        The ports are free at no time: this process's copies close when the receiver has the block
        and its entry stands. Protocol, host, label and metadata go along. Programs that were
        started on the block stay, and what this process did for them ends, as with
        :meth:`release`.

        Parameters
        ----------
        sock
            A connected UNIX socket: stream, seqpacket or datagram, blocking or not. Nobody else may
            read or write at either end meanwhile. That a receiver is gone shows at once on the
            first two kinds, and on datagram sockets when the time is up.
        timeout
            Seconds until it must be done; None for no limit.

        Raises
        ------
        HandoffError
            The receiver is gone, did not answer in time, refused (it says why), or answered what
            fastports does not; or a cluster registry has the block on record under this process's
            lease, or its holds were closed for a child. The block stays held here.
            Unless the receiver refused, the two are out of step, and ``sock`` is shut down.
        InvalidRequest
            ``sock`` is no connected UNIX socket.
        BlockReleased, NotOwner
        """
        # as in spawn
        from .passing import send

        send(self, sock, timeout)

    def release(self) -> None:
        """Give the ports back. Idempotent; any thread of the owning process may call it.

        Raises
        ------
        NotOwner
            In another process than the one that made the block (after a fork).
        """
        if self._process[0] != getpid():
            raise self._not_owner()
        if self._release() and heard():
            emit("released", self)

    def _release(self, *, finalizing: bool = False) -> bool:
        """Give the ports back; whether it was this call that did it."""
        hold = self._hold
        if hold is None:
            return False
        if self._registry is not None:
            return self._release_recorded(hold, self._registry, finalizing)
        try:
            if not hold.give_back():
                return False
            self._let_go(hold)
            return True
        except BaseException:  # an interrupt, at any point
            self._let_go(hold)
            raise

    def _release_recorded(self, hold: Hold, registry: Releaser, finalizing: bool) -> bool:
        try:
            if not hold.give_back():
                return False
            if finalizing:  # inside any code of the process: nothing that waits or locks
                registry.release_later([self])
            else:
                registry.release([self])
            self._let_go(hold)
            return True
        except BaseException:  # an interrupt, at any point: the ports go, so the record must
            registry.release_later([self])
            self._let_go(hold)
            raise

    def _let_go(self, hold: Hold) -> None:
        if self._served is not None:
            self._unserve()
        hold.close()
        self._hold = None  # type: ignore[assignment]
        if self._markers is not None:  # looked for last, as close_holds looks for the hold
            self._close_copies()
        _live.pop(id(self), None)  # last: what is open must be known to a fork at any moment

    def _unserve(self) -> None:
        served, self._served = self._served, None
        if served is not None:
            served()

    def _close_copies(self) -> None:
        if self._served is not None:
            self._unserve()
        hold = self._hold
        if hold is not None:
            hold.close()
            self._hold = None  # type: ignore[assignment]
        markers = self._markers  # now: another thread that marks looks for the hold at last
        if markers is not None:
            markers.close()
            self._markers = None

    def __enter__(self) -> PortBlock:
        self._acting()
        return self

    def __exit__(self, *exc: object) -> None:
        # a forked child leaves the statement too, and must not hide its own way out
        if self._process[0] == getpid() and self._release() and heard():
            emit("released", self)

    def _dropped(self) -> None:
        """The last reference is gone, and the block was not released."""
        if os is None:  # an interpreter that is going down has nothing to tell
            return
        if self._process[0] != getpid():  # forked by other means than os.fork: the owner's record
            _live.pop(id(self), None)  # is the owner's
            self._close_copies()
            return
        try:
            if not sys.is_finalizing():
                import warnings  # loaded by then in all but the smallest programs

                warnings.warn(
                    f"unreleased {self!r}: its ports are given back now. Keep the block for as long"
                    " as they are needed, and release it or use `with`.",
                    ResourceWarning,
                    source=self,
                    stacklevel=2,
                )
        finally:  # the warning may be an error, and who catches that may keep the block
            if self._release(finalizing=True) and heard():
                emit_later("released", self)

    def _acting(self) -> Hold:
        """The hold, for a method that acts on it: only in the owner, only before release."""
        if self._process[0] != getpid():
            raise self._not_owner()
        hold = self._hold
        if hold is None:
            raise BlockReleased(
                f"ports {self.first}-{self.last} were released and may be anybody's by now."
                " Allocate a new block.",
                range=f"{self.first}-{self.last}",
            )
        return hold

    def _not_owner(self) -> NotOwner:
        return NotOwner(
            f"ports {self.first}-{self.last} belong to process {self._process[0]}, not to its"
            f" forked child {getpid()}: the child may read the block, the parent acts on it."
            " Allocate in the child what the child needs.",
            owner=self._process[0],
            caller=getpid(),
        )
