"""The host registry: who has which ports in this network namespace, without file or daemon.

Abstract UNIX sockets have exactly the scope of a port (the network namespace), die with their
owner and need no permission (unix(7)). One *entry* per block, an abstract name such as ::

    fastports/t/20417-20424/3039/4f3a2b/1c20.9e07/decode-0
              |      |       |     |      |        label
              |      |       |     |      made at, seconds of CLOCK_BOOTTIME, hexadecimal
              |      |       pid and its start time in clock ticks, hexadecimal
              |      ports; @ and the packed address in hexadecimal where one address is held
              t(cp), u(dp) or b(oth)

is read back from ``/proc/net/unix``. Anybody may bind any name: what is read is not trusted.
"""

from __future__ import annotations

from os import getpid
from time import CLOCK_BOOTTIME, clock_gettime

from ._core import parse_address, read_file
from .registry import Entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Collection, Iterator, Sequence

    from .block import PortBlock
    from .registry import Recordable

__all__ = ["HostRegistry", "entries", "process_start"]

#: How the name of an entry begins, for each protocol.
HEADS = {"tcp": b"fastports/t/", "udp": b"fastports/u/", "both": b"fastports/b/"}
_PROTOCOLS = {"t": "tcp", "u": "udp", "b": "both"}
_NAME_BYTES = 107  # sizeof(sun_path) less the leading NUL (unix(7))
_PREFIX = b"@fastports/"


def process_start(pid: int | str = "self") -> int | None:
    """Start time of a process in clock ticks since boot (proc(5)); None where there is none."""
    text = read_file(b"/proc/%b/stat" % str(pid).encode())
    if not text:  # gone, or going
        return None
    # the command name may hold spaces and parentheses: count from the last one
    return int(text[text.rindex(b")") + 2 :].split()[19])


def address_part(address: tuple[int, bytes] | None) -> bytes:
    """How an entry has the one address that is held."""
    return b"" if address is None else b"@" + address[1].hex().encode()


class HostRegistry:
    """Writes an entry for each block of this process. Needs no service; cannot fail a claim."""

    def __init__(self) -> None:
        # pid and start time, and how an entry has them
        self._self = (0, 0), b""

    def names(self) -> tuple[tuple[int, int], bytes]:
        """Pid and start time of this process, and how an entry has them; read once."""
        known = self._self
        if known[0][0] != getpid():  # first use, or first use in a forked child
            pid, start = getpid(), process_start() or 0
            known = self._self = (pid, start), b"/%x/%x/" % (pid, start)
        return known

    def claim(
        self,
        blocks: Sequence[PortBlock],
        *,
        search: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> Collection[int]:
        """Write the blocks' entries. Always succeeds: the hold itself excludes others.

        A block whose name somebody has taken on purpose, or for which there are no UNIX sockets,
        goes without an entry; it is held all the same.
        """
        middle = self.names()[1]
        for block in blocks:
            at = b"" if block.host is None else address_part(parse_address(block.host))
            head = HEADS[block.protocol]
            block._hold.record(head, block.first, block.last, at + middle, block.label)
        return ()

    def release(self, blocks: Sequence[Recordable]) -> None:
        """Nothing to do: the entry is closed with the hold."""

    def release_later(self, blocks: Sequence[Recordable]) -> None:
        """Nothing to do either."""

    def state(self, block: Recordable) -> str:
        """An entry cannot be lost while the block is held."""
        return "held"

    def entries(self) -> Iterator[Entry]:
        return entries()

    def close(self) -> None:
        """Nothing to give back."""


def record_for(block: PortBlock, pid: int, sock: socket) -> None:
    """Make an unbound UNIX datagram socket an entry of ``block``, as process ``pid``'s."""
    at = b"" if block.host is None else address_part(parse_address(block.host))
    now = int(clock_gettime(CLOCK_BOOTTIME))
    span = b"%s%d-%d%s" % (HEADS[block.protocol], block.first, block.last, at)
    for attempt in range(8):  # somebody may have taken the name
        name = b"%s/%x/%x/%x/" % (span, pid, process_start(pid) or 0, now - attempt)
        # the label is cut, not inside a character
        label = block.label.encode()[: _NAME_BYTES - len(name)].decode(errors="ignore")
        try:
            sock.bind(b"\0" + name + label.encode())
        except OSError:
            continue
        return


def entries() -> Iterator[Entry]:
    """Blocks held in the calling thread's network namespace, by whomever, in port order.

    Yields
    ------
    Entry
        As its owner wrote it. ``alive`` tells whether the pid and start time it names match a
        process visible here; names that are not well-formed are passed over.

    Raises
    ------
    OSError
        Where ``/proc/net/unix`` cannot be read.
    """
    with open("/proc/thread-self/net/unix", "rb") as file:
        text = file.read()
    now = clock_gettime(CLOCK_BOOTTIME)
    alive: dict[tuple[int, int], bool | None] = {}
    found = []
    for line in text.split(b"\n"):
        # Num RefCount Protocol Flags Type St Inode Path (proc(5)); the path ends the line
        at = line.find(_PREFIX)
        if at < 0:
            continue
        columns = line[:at].split()
        if len(columns) != 7 or columns[4] != b"0002":  # SOCK_DGRAM
            continue
        entry = _parse(line[at + len(_PREFIX) :], now)
        if entry is None:
            continue
        who = entry.pid, entry.start
        if who not in alive:
            alive[who] = _runs_here(*who)
        entry.alive = alive[who]
        found.append(entry)
    found.sort(key=lambda entry: (entry.first, entry.last, entry.protocol, entry.pid))
    return iter(found)


def _parse(name: bytes, now: float) -> Entry | None:
    """The entry that ``name`` (after ``fastports/``) spells, or None. The name is anybody's."""
    fields = name.split(b"/", 5)
    if len(fields) != 6 or len(name) > _NAME_BYTES:
        return None
    letter, ports, pid, start, made, label = fields
    protocol = _PROTOCOLS.get(letter.decode("latin-1"))
    span, at, address = ports.partition(b"@")
    low, dash, high = span.partition(b"-")
    if protocol is None or not dash or not (low.isdigit() and high.isdigit()):
        return None
    first, last = int(low), int(high)
    if not (1 <= first <= last <= 65535 and len(low) <= 5 and len(high) <= 5):
        return None
    made, dot, fraction = made.partition(b".")
    if dot and len(fraction) != 4:
        return None
    numbers = []
    for field in (pid, start, made, fraction or b"0"):
        # int(, 16) would take signs, spaces, underscores and 0x
        if not 1 <= len(field) <= 12 or field.strip(b"0123456789abcdef"):
            return None
        numbers.append(int(field, 16))
    host = _address(address) if at else None
    if at and host is None:
        return None
    try:
        text = label.decode()
    except UnicodeDecodeError:
        return None
    if not text.isprintable():
        return None
    return Entry(
        first,
        last,
        protocol=protocol,
        host=host,
        pid=numbers[0],
        start=numbers[1],
        label=text,
        age=max(now - numbers[2] - numbers[3] / 65536, 0.0),
        alive=None,
    )


def _address(text: bytes) -> str | None:
    if len(text) not in (8, 32) or text.strip(b"0123456789abcdef"):
        return None
    packed = bytes.fromhex(text.decode("ascii"))
    if len(packed) == 4:
        return ".".join(str(byte) for byte in packed)
    import socket  # 7 ms; only for a listing that shows an IPv6 address

    return socket.inet_ntop(socket.AF_INET6, packed)


def _runs_here(pid: int, start: int) -> bool | None:
    seen = process_start(pid)
    return None if seen is None else seen == start
