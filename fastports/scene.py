"""Who has which ports of this network namespace, and who listens on them: for people to look at."""

from __future__ import annotations

import os

from ._diag import BOUND, LISTENING, Diag
from .family import look_at, sockets_of
from .host import entries
from .listening import ProcDiag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .registry import Entry

__all__ = ["Held", "Listener", "Scene"]

_DEPTH = 64  # generations between a launcher and its listener that are looked at


class Listener:
    """A process that listens on a port; ``pid`` is 0 where it cannot be seen from here."""

    __slots__ = ("name", "pid", "port", "related", "uid")

    def __init__(self, port: int, pid: int, name: str, uid: int, related: bool | None) -> None:
        self.port: int = port
        self.pid: int = pid
        self.name: str = name
        self.uid: int = uid
        #: Whether it is the owner of the block or comes of it; None where that cannot be seen.
        self.related: bool | None = related


class Held:
    """An entry, and who listens on its ports."""

    __slots__ = ("entry", "listeners")

    def __init__(self, entry: Entry, listeners: Sequence[Listener]) -> None:
        self.entry: Entry = entry
        self.listeners: Sequence[Listener] = listeners

    @property
    def up(self) -> int:
        """How many of its ports are listened on."""
        return len({listener.port for listener in self.listeners})

    @property
    def state(self) -> str:
        """``"held"`` (nobody listens), ``"partly"``, ``"up"``, or what needs a look: ``"stranger"``
        (somebody listens who does not come of the owner), ``"unsure"`` (no process is as the entry
        says)."""
        if any(listener.related is False for listener in self.listeners):
            return "stranger"
        if self.entry.alive is False:
            return "unsure"
        if not self.listeners:
            return "held"
        return "up" if self.up == len(self.entry.ports) else "partly"


class Scene:
    """Looks at the whole namespace, again and again; what it learnt of a socket it keeps.

    A look reads one table for the entries, one or two for the listeners. ``/proc`` is walked only
    when a socket listens that was not there before.
    """

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}  # of a socket's inode, 0 where it is not to be seen

    def look(self) -> list[Held]:
        """What is held now, in port order.

        Raises
        ------
        OSError
            Where the kernel's tables cannot be read.
        """
        found = list(entries())
        wanted: set[tuple[str, int]] = set()
        for entry in found:
            for protocol in _protocols(entry):
                wanted.update((protocol, port) for port in entry.ports)
        sockets = _sockets(wanted)
        self._learn({inode for rows in sockets.values() for inode, _ in rows})
        related: dict[tuple[int, int], bool | None] = {}
        names: dict[int, str] = {}
        return [Held(entry, self._listeners(entry, sockets, related, names)) for entry in found]

    def _listeners(
        self,
        entry: Entry,
        sockets: Mapping[tuple[str, int], Sequence[tuple[int, int]]],
        related: dict[tuple[int, int], bool | None],
        names: dict[int, str],
    ) -> list[Listener]:
        listeners = []
        for protocol in _protocols(entry) if sockets else ():
            for port in entry.ports:
                for inode, uid in sockets.get((protocol, port), ()):
                    pid = self._owners.get(inode, 0)
                    if protocol == "udp" and pid in (0, entry.pid):
                        continue  # the hold itself is bound, too
                    if pid not in names:
                        names[pid] = _name(pid) if pid else ""
                    pair = pid, entry.pid
                    if pair not in related:
                        related[pair] = _comes_of(*pair) if pid and entry.alive else None
                    listeners.append(Listener(port, pid, names[pid], uid, related[pair]))
        return listeners

    def _learn(self, inodes: set[int]) -> None:
        """Find out who has these sockets, as far as it is not known."""
        self._owners = {i: pid for i, pid in self._owners.items() if i in inodes}
        unknown = inodes - self._owners.keys()
        if not unknown:
            return
        for name in os.listdir("/proc"):
            if name.isdigit():
                for inode in unknown & (sockets_of(int(name)) or set()):
                    # parent and worker share a socket: the parent came first, and has the lower pid
                    if not 0 < self._owners.get(inode, 0) < int(name):
                        self._owners[inode] = int(name)
        for inode in unknown - self._owners.keys():
            self._owners[inode] = 0


def _protocols(entry: Entry) -> tuple[str, ...]:
    return ("tcp", "udp") if entry.protocol == "both" else (entry.protocol,)


def _sockets(wanted: set[tuple[str, int]]) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Inode and user of what listens (tcp) or is bound (udp), by protocol and port."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    asker: Diag | ProcDiag
    try:
        asker = Diag()
    except OSError:
        asker = ProcDiag()
    try:
        for protocol, states in (("tcp", LISTENING), ("udp", BOUND)):
            ports = [port for name, port in wanted if name == protocol]
            if not ports:
                continue
            for port, _, inode, uid, _ in asker.sockets(min(ports), max(ports), protocol, states):
                if (protocol, port) in wanted:
                    found.setdefault((protocol, port), []).append((inode, uid))
    finally:
        asker.close()
    return found


def _comes_of(pid: int, owner: int) -> bool | None:
    """Whether a process is the owner or one of its descendants."""
    for _ in range(_DEPTH):
        if pid == owner:
            return True
        if pid <= 1:
            return False
        member = look_at(pid)
        if member is None:
            return None
        pid = member.parent
    return None


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            text = file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
