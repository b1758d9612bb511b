"""A child and its descendants, as far as /proc shows them.

Descendants are looked for by parentage, by process group and session, and, when a daemon has left
all three, by the token that the child was given in its environment, and at last by the pipe that
all inherit. The token tells relatives from accidents, not from an attacker of the same user, who
can read and copy it.
"""

from __future__ import annotations

import os
import time
from _signal import pidfd_send_signal  # type: ignore[import-not-found]  # signal costs 2 ms

from ._core import read_file
from ._spawn import adopts_orphans, childless, has_reader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._core import Descriptor

__all__ = ["TOKEN", "Family", "Member"]

#: The environment variable that carries a child's token.
TOKEN = b"FASTPORTS_CHILD"

_WALKS = 3


class Member:
    """One process: its pid and start time name it for good."""

    __slots__ = ("group", "parent", "pid", "session", "start", "zombie")

    def __init__(self, pid: int, stat: bytes) -> None:
        # proc(5): pid (comm) state ppid pgrp session ... starttime is field 22; comm is any text
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.pid: int = pid
        self.zombie: bool = fields[0] in b"ZX"
        self.parent: int = int(fields[1])
        self.group: int = int(fields[2])
        self.session: int = int(fields[3])
        self.start: int = int(fields[19])

    def signal(self, number: int) -> None:
        """Send a signal to this very process; nothing happens if it is gone or not ours."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            again = look_at(self.pid)
            if again is not None and again.start == self.start:
                pidfd_send_signal(pidfd, number)
        except (ProcessLookupError, PermissionError):
            pass
        finally:
            os.close(pidfd)


def look_at(pid: int) -> Member | None:
    stat = read_file(b"/proc/%d/stat" % pid)
    return Member(pid, stat) if stat else None


def _processes() -> list[Member]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    found = (look_at(int(name)) for name in names if name.isdigit())
    return [member for member in found if member is not None]


def sockets_of(pid: int) -> set[int] | None:
    """Inodes of the sockets a process has; None if it may not be looked into."""
    found: set[int] = set()
    refused = False
    for folder in (f"/proc/{pid}/fd", f"/proc/{pid}/task"):
        try:
            names = os.listdir(folder)
        except PermissionError:
            refused = True
            continue
        except OSError:
            continue
        if folder.endswith("/fd"):
            found |= _links(folder, names)
            if names:
                return found
            continue
        # The main thread has ended: its table shows nothing, those of the others do.
        for name in names:
            try:
                found |= _links(f"{folder}/{name}/fd", os.listdir(f"{folder}/{name}/fd"))
            except PermissionError:
                refused = True
            except OSError:
                continue
    return None if refused and not found else found


def _links(folder: str, names: list[str]) -> set[int]:
    found = set()
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def _has(pid: int, link: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{name}") == link for name in os.listdir(folder))
    except OSError:
        return False


class Family:
    """The child ``pid`` and whoever came of it.

    Parameters
    ----------
    pid
        The child.
    token
        Value of :data:`TOKEN` in its environment.
    leads
        Whether it leads a process group of its own.
    leash
        Write end of a pipe whose read end the child and its descendants inherit; None, and once it
        is closed: no leash.
    """

    def __init__(
        self, pid: int, token: bytes, *, leads: bool, leash: Descriptor | None = None
    ) -> None:
        self.pid = pid
        self.leads = leads
        self._leash = leash
        self.scattered = True  # until the child alone is known to have what was asked for
        self._mark = b"\0" + TOKEN + b"=" + token + b"\0"
        self._adopted = adopts_orphans()
        leader = look_at(pid)
        self.start: int = leader.start if leader is not None else 0

    @property
    def leash(self) -> int:
        """The leash's descriptor; -1 where there is none, or none any more."""
        return -1 if self._leash is None else self._leash.fd

    def drop_leash(self) -> None:
        """Close it: who still has the other end, and is of the child's group, ends."""
        if self._leash is not None:
            self._leash.close()

    def alone(self) -> bool:
        """Whether the child certainly has no descendant: no process was made since it was.

        The last number that the kernel gave out, and that is the child's still: proc(5), loadavg.
        Costs 10 us where a walk through /proc costs as much for each process of the machine.
        """
        load = read_file(b"/proc/loadavg")
        return load is not None and load.split()[-1] == b"%d" % self.pid

    def members(self) -> list[Member]:
        """Every living member that can be seen, the child first if it is there; no zombies.

        A walk through /proc misses a process that is made in its course by one that ends in its
        course, as daemons come about. What every descendant inherits, unless it closes it, misses
        nobody: while somebody has it, the walk is repeated, and at last done by it.
        """
        # Orphans have come to this process since before the child was made: without a child of any
        # kind there is no descendant, and 15 us for each process of the machine are saved.
        if self._adopted and childless():
            return []
        living = self._walk()
        for _ in range(_WALKS - 1):
            if living or (self.leash >= 0 and not has_reader(self.leash)):
                return living
            time.sleep(0.001)
            living = self._walk()
        return living or self._leashed()

    def _leashed(self) -> list[Member]:
        """Who has the pipe, whatever else it got rid of."""
        if self.leash < 0:
            return []
        link = f"pipe:[{os.fstat(self.leash).st_ino}]"
        return [
            member
            for member in _processes()
            if member.start >= self.start and member.pid != os.getpid() and _has(member.pid, link)
        ]

    def _walk(self) -> list[Member]:
        # A relative is no older than the child; the start times of one tick cannot be told apart.
        processes = [member for member in _processes() if member.start >= self.start]
        family = {
            member.pid
            for member in processes
            if member.pid == self.pid
            or (self.leads and self.pid in (member.group, member.session))
            or self._marked(member.pid)
        }
        size = 0
        while size != len(family):
            size = len(family)
            family.update(member.pid for member in processes if member.parent in family)
        family.discard(os.getpid())
        living = [member for member in processes if member.pid in family and not member.zombie]
        living.sort(key=lambda member: member.pid != self.pid)
        return living

    def _marked(self, pid: int) -> bool:
        environ = read_file(b"/proc/%d/environ" % pid)
        return environ is not None and self._mark in b"\0" + environ

    def owned(self, sockets: Iterable[tuple[int, int]]) -> set[int]:
        """Which of these sockets, given as inode and uid, a member has.

        Where a member may not be looked into (it changed its user, or is not dumpable), sockets of
        its user pass for its own.
        """
        wanted = dict(sockets)
        found: set[int] = set()
        leader = sockets_of(self.pid)  # nearly always enough, and spares the walk
        if leader is not None:
            found |= leader & wanted.keys()
        self.scattered = found != wanted.keys()
        if not self.scattered:
            return found
        for member in self.members():
            theirs = sockets_of(member.pid)
            if theirs is None:
                users = _users(member.pid)
                found |= {inode for inode, uid in wanted.items() if uid in users}
            else:
                found |= theirs & wanted.keys()
        return found


def _users(pid: int) -> set[int]:
    for line in (read_file(b"/proc/%d/status" % pid) or b"").splitlines():
        if line.startswith(b"Uid:"):
            return {int(uid) for uid in line.split()[1:]}
    return set()


def whose(inode: int) -> str:
    """Who has a socket, in words: ``"process 4242 (nginx)"``, or that it cannot be seen."""
    try:
        names = os.listdir("/proc")
    except OSError:
        names = []
    for name in names:
        if name.isdigit() and inode in (sockets_of(int(name)) or ()):
            comm = os.fsdecode(read_file(b"/proc/%b/comm" % name.encode()) or b"").strip()
            return f"process {name} ({comm})" if comm.isprintable() else f"process {name}"
    return "a process that cannot be seen from here"
