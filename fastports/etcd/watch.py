"""Reading what is recorded: listings in pages, and changes as they happen."""

from __future__ import annotations

import os
import threading
import weakref
from queue import Empty, SimpleQueue

from ..errors import RegistryDenied, RegistryError, RegistryUnavailable
from .connection import Call, translate
from .keys import EntryReader, after, check_seconds, decode, key, port_of, prefix, root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ..registry import Entry
    from .registry import EtcdRegistry
    from .session import Session

    Identity = tuple[str, str, str, int]  # namespace, host, token (or place), first port

#: Keys of one page; with a value of some hundred bytes each, far below gRPC's 4 MiB.
PAGE = 2000


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
            for start in (prefix(root(self.namespace), space, self.host) for space in spaces)
        ]

    def watched(self) -> tuple[bytes, bytes]:
        """One key range around all of them: ``ports-udp/`` sorts right before ``ports/``."""
        if self.namespace is None:
            return b"v1/", b"v10"
        start = f"v1/{self.namespace}/ports".encode()
        return start, start + b"0"

    def place(self, raw: bytes) -> tuple[str, str, str, int] | None:
        """(namespace, space, host, port) of a key; None for a stranger's key.

        Raises
        ------
        LookupError
            The key is in order but out of scope.
        """
        port = port_of(raw, len(raw) - 5)
        folder = self.folder(raw[:-5])
        if port is None or folder is None:
            return None
        if not self.covers(folder, port):
            raise LookupError
        return (*folder, port)

    def folder(self, head: bytes) -> tuple[str, str, str] | None:
        """(namespace, space, host) of a key without its port; None for a stranger's."""
        try:
            version, namespace, space, host, end = head.decode().split("/")
        except ValueError:  # UnicodeDecodeError is one
            return None
        if version != "v1" or space not in ("ports", "ports-udp") or not host or end:
            return None
        return namespace, space, host

    def covers(self, folder: tuple[str, str, str], port: int) -> bool:
        return self.first <= port <= self.last and self.host in (None, folder[2])


class Reader:
    """From keys and values to blocks; remembers the last key and value, for their neighbours."""

    def __init__(self, scope: Scope) -> None:
        self.skipped = 0
        self._scope = scope
        self._entries = EntryReader()
        self._head = b""
        self._folder: tuple[str, str, str] | None = None
        self._value = b""
        self._found: tuple[Identity, Entry] | None = None

    def read(self, raw: bytes, value: bytes) -> tuple[Identity, Entry] | None:
        """The block that a key tells of; None if it is out of scope or a stranger's."""
        head = raw[:-5]
        if head != self._head:
            self._head, self._folder, self._found = head, self._scope.folder(head), None
        folder = self._folder
        port = port_of(raw, len(head))
        if folder is None or port is None:
            self.skipped += 1
            return None
        if not self._scope.covers(folder, port):
            return None
        found = self._found
        if found and value == self._value and found[1].first <= port <= found[1].last:
            return found
        namespace, space, host = folder
        fields = decode(value)
        entry = self._entries.entry(fields, port, space, host, namespace) if fields else None
        if not fields or not entry:
            self._found = None
            self.skipped += 1
            return None
        token = fields.get("token")
        name: Identity = (
            namespace, host, token if isinstance(token, str) else f"{space} {port}", entry.first
        )  # fmt: skip
        self._value = value
        self._found = name, entry
        return self._found


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
        self._timeout = registry.timeout if timeout is None else check_seconds("timeout", timeout)
        self._entries = self._read()

    def __iter__(self) -> Listing:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def _read(self) -> Iterator[Entry]:
        reader = Reader(self._scope)
        told: set[Identity] = set()
        for kv in self._pairs():
            found = reader.read(kv.key, kv.value)
            if found is None:
                self.skipped = reader.skipped
            elif found[0] not in told:  # else a further port of a block, or the UDP half of it
                told.add(found[0])
                yield found[1]

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


class Change:
    """One change of the record.

    Attributes
    ----------
    kind
        ``"recorded"`` or ``"released"`` (by its owner, or because its owner's lease ended).
    entry
        The block.
    revision
        etcd's revision at which it happened; that of the reading for what stood before.
    """

    __slots__ = ("entry", "kind", "revision")

    def __init__(self, kind: str, entry: Entry, revision: int) -> None:
        self.kind: str = kind
        self.entry: Entry = entry
        self.revision: int = revision

    def __repr__(self) -> str:
        return f"Change({self.kind!r}, {self.entry!r}, revision={self.revision})"


class Changes:
    """Iterator of changes; made by :meth:`EtcdRegistry.watch`.

    A thread follows etcd from the first ``next`` or :meth:`get` until :meth:`close`.
    """

    def __init__(
        self, registry: EtcdRegistry, namespace: str | None, host: str | None, first: int, last: int
    ) -> None:
        self._feed = _Feed(registry, Scope(namespace, host, first, last))
        self._ended = False
        # The thread knows the feed alone, so that forgotten changes are collected and end it.
        self._end = weakref.finalize(self, self._feed.stop)
        self._end.atexit = False

    @property
    def skipped(self) -> int:
        """Keys and values passed over so far because nobody can make an entry of them."""
        return self._feed.reader.skipped

    def __iter__(self) -> Changes:
        return self

    def __next__(self) -> Change:
        change = self.get()
        if change is None:
            raise StopIteration
        return change

    def get(self, timeout: float | None = None) -> Change | None:
        """The next change; None after ``timeout`` seconds without one, or once closed."""
        if self._ended:
            return None
        self._feed.start()
        try:
            item = self._feed.changes.get(timeout=timeout)
        except Empty:
            return None
        if isinstance(item, Change):
            return item
        self._ended = True
        if item is not None:
            raise item
        return None

    def close(self) -> None:
        """End it; whoever waits in ``next`` gets StopIteration. Idempotent."""
        self._end()

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Again(Exception):
    """Read everything anew: the history between was compacted, or is another one."""


class _Feed:
    """Follows etcd on a thread and puts changes (None at the end, or an error) on a queue."""

    def __init__(self, registry: EtcdRegistry, scope: Scope) -> None:
        self.registry = registry
        self.scope = scope
        self.reader = Reader(scope)
        self.changes: SimpleQueue[Change | RegistryError | None] = SimpleQueue()
        self.revision = 0
        self._cluster = 0
        self._places: dict[bytes, Identity] = {}
        self._blocks: dict[Identity, tuple[Entry, set[bytes]]] = {}
        self._stopped = threading.Event()
        self._stream: Any = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                thread = threading.Thread(
                    target=self._run, name="fastports-etcd-watch", daemon=True
                )
                thread.start()
                self._thread = thread  # now: stop() waits for it, which it must have begun for

    def stop(self) -> None:
        self._stopped.set()
        self.changes.put(None)
        stream = self._stream
        if stream is not None:
            stream.cancel()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2)

    def _run(self) -> None:
        pid = os.getpid()
        failures = 0
        anew = True
        while not self._stopped.is_set() and pid == os.getpid():
            try:
                session = self.registry._here()
                if anew:
                    self._read()
                    anew = False
                before = self.revision
                try:
                    self._follow(session)
                finally:
                    if self.revision != before:
                        failures = 0
            except _Again:
                anew = True
            except RegistryError as exc:
                if self._stopped.is_set():
                    break
                if not exc.retryable:
                    self.changes.put(exc)
                    return
            failures += 1
            self._stopped.wait(self.registry.retry.pause(min(failures, 10)))
        self.changes.put(None)

    # -- reading everything ----------------------------------------------------------------------

    def _read(self) -> None:
        listing = Listing(
            self.registry, self.scope.namespace, self.scope.host, self.scope.first, self.scope.last
        )
        pairs = {kv.key: kv.value for kv in listing._pairs()}
        for raw in [raw for raw in self._places if raw not in pairs]:
            self._gone(raw, listing.revision)
        for raw, value in pairs.items():
            self._stands(raw, value, listing.revision)
        self.revision = listing.revision

    def _stands(self, raw: bytes, value: bytes, revision: int) -> None:
        found = self.reader.read(raw, value)
        known = self._places.get(raw)
        if found is None:
            if known is not None:
                self._gone(raw, revision)
            return
        name, entry = found
        if known == name:
            return  # written again under a new lease
        if known is not None:
            self._gone(raw, revision)
        self._places[raw] = name
        block = self._blocks.get(name)
        if block is None:
            self._blocks[name] = entry, {raw}
            self.changes.put(Change("recorded", entry, revision))
        else:
            block[1].add(raw)

    def _gone(self, raw: bytes, revision: int) -> None:
        name = self._places.pop(raw, None)
        if name is None:
            return
        entry, keys = self._blocks[name]
        keys.discard(raw)
        if not keys:
            del self._blocks[name]
            self.changes.put(Change("released", entry, revision))

    # -- following -------------------------------------------------------------------------------

    def _follow(self, session: Session) -> None:
        connection = session.connection
        begin, end = self.scope.watched()
        call = Call(self.registry.timeout)
        connection.open(call)
        rpc = connection.rpc
        # Renews an expired login, and tells whether this is still the history we know: from a
        # cluster that was restored to the past no event would come for a long time.
        header = session.ask("range", rpc.RangeRequest(key=begin, limit=1), call).header
        known, self._cluster = self._cluster, header.cluster_id
        if header.revision < self.revision or (known and known != header.cluster_id):
            self.revision = 0
            raise _Again
        link = connection.current
        request = rpc.WatchRequest(
            create_request=rpc.WatchCreateRequest(
                key=begin, range_end=end, start_revision=self.revision + 1
            )
        )
        stream: Any = None
        try:
            stream = self._stream = link.watch(request, metadata=connection.metadata)
            if self._stopped.is_set():
                stream.cancel()
            for response in stream:
                self._take(response, link.endpoint)
        except connection.rpc_error as exc:
            connection.advance()
            raise translate(exc, link) from exc
        except ValueError as exc:
            raise RegistryError("the registry was closed; make a new one") from exc
        finally:
            self._stream = None
            if stream is not None:
                stream.cancel()
        raise RegistryUnavailable(f"etcd at {link.endpoint} ended the watch; it is begun again")

    def _take(self, response: Any, endpoint: str) -> None:
        if response.canceled:
            if response.compact_revision:
                raise _Again
            reason = response.cancel_reason
            if "permission" in reason.lower():
                raise RegistryDenied(
                    f"etcd at {endpoint} refuses to watch ({reason}); check the role's key range "
                    "v1/",
                    endpoint=endpoint,
                )
            raise RegistryUnavailable(f"etcd at {endpoint} ended the watch ({reason})")
        for event in response.events:
            kv = event.kv
            if kv.mod_revision <= self.revision:
                continue
            if event.type == event.DELETE:
                self._gone(kv.key, kv.mod_revision)
            else:
                self._stands(kv.key, kv.value, kv.mod_revision)
        if response.events:
            self.revision = response.events[-1].kv.mod_revision
        elif not response.created:
            self.revision = max(self.revision, response.header.revision)
