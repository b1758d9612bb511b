"""Reading what is recorded: listings in pages, and changes as they happen."""

from __future__ import annotations

from ..errors import RegistryError
from .connection import Call
from .keys import Reader, after, decode, key, port_of, prefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ..registry import Entry
    from .registry import EtcdRegistry

PAGE = 2000
#: Seconds of silence after which a watch asks whether the connection still is one.
SILENCE = 30.0


class Scope:
    """Which keys are meant, and what they say."""

    def __init__(self, namespace: str | None, host: str | None, first: int, last: int) -> None:
        self.namespace = namespace
        self.host = host
        self.first = first
        self.last = last

    def ranges(self) -> list[tuple[bytes, bytes]]:
        """Key ranges that hold everything in scope."""
        if self.namespace is None:
            return [(b"v1/", b"v10")]
        spaces = ("ports", "ports-udp")
        if self.host is None:
            starts = [f"v1/{self.namespace}/{space}/".encode() for space in spaces]
            return [(start, start[:-1] + b"0") for start in starts]
        return [
            (key(start, self.first), after(start, self.last))
            for start in (prefix(self.namespace, space, self.host) for space in spaces)
        ]

    def place(self, raw: bytes) -> tuple[str, str, str, int] | None:
        """(namespace, space, host, port) of a key; None for a stranger's key.

        Raises
        ------
        LookupError
            The key is in order but out of scope.
        """
        try:
            version, namespace, space, host, _ = raw.decode().split("/")
        except ValueError:  # UnicodeDecodeError is one
            return None
        port = port_of(raw, len(raw) - 5)
        if version != "v1" or space not in ("ports", "ports-udp") or port is None or not host:
            return None
        if raw[-6:-5] != b"/":
            return None
        if not self.first <= port <= self.last:
            raise LookupError
        if self.host is not None and host != self.host:
            raise LookupError
        return namespace, space, host, port


class Listing:
    """Iterator of entries; ``skipped`` counts keys and values nobody can make an entry of.

    ``revision`` is that of the whole listing, known from the first page on.
    """

    def __init__(
        self,
        registry: EtcdRegistry,
        namespace: str | None,
        host: str | None,
        first: int,
        last: int,
        *,
        timeout: float | None = None,
    ) -> None:
        self.skipped = 0
        self.revision = 0
        self._registry = registry
        self._scope = Scope(namespace, host, first, last)
        self._timeout = registry.timeout if timeout is None else timeout
        self._entries = self._read()

    def __iter__(self) -> Listing:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def _read(self) -> Iterator[Entry]:
        reader = Reader()
        told: set[tuple[str, str, int, int]] = set()
        for kv in self._pairs():
            try:
                place = self._scope.place(kv.key)
            except LookupError:
                continue
            if place is None:
                self.skipped += 1
                continue
            namespace, space, host, port = place
            fields = decode(kv.value)
            entry = fields and reader.entry(fields, port, space, host, namespace)
            if not entry:
                self.skipped += 1
                continue
            name = (namespace, host, entry.extra.get("token") or port, entry.first)
            if name in told:
                continue  # further ports of a block, or the UDP half of it
            told.add(name)  # type: ignore[arg-type]
            yield entry

    def _pairs(self) -> Iterator[Any]:
        for begin, end in self._scope.ranges():
            yield from pages(self._registry, begin, end, self._timeout, self)


def pages(
    registry: EtcdRegistry, begin: bytes, end: bytes, timeout: float, listing: Any
) -> Iterator[Any]:
    """Every key-value message of a range, at ``listing.revision`` (0: the newest, noted there)."""
    session = registry._here()
    while True:
        call = Call(timeout)
        session.connection.open(call)
        request = session.connection.rpc.RangeRequest(
            key=begin, range_end=end, limit=PAGE, revision=listing.revision
        )
        try:
            answer = registry.retry.call(
                lambda request=request, call=call: session.ask("range", request, call),  # type: ignore[misc]
                deadline=call.deadline,
            )
        except RegistryError as exc:
            if listing.revision and "compacted" in str(exc):
                listing.revision = 0  # go on with what stands now
                continue
            raise
        listing.revision = listing.revision or answer.header.revision
        yield from answer.kvs
        if not answer.more:
            return
        begin = answer.kvs[-1].key + b"\0"
