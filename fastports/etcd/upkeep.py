"""Cleaning up after others, and finding out what is wrong with an etcd."""

from __future__ import annotations

import time

from ..errors import RegistryDenied, RegistryError
from .connection import Call
from .keys import EntryReader, check_seconds, decode
from .watch import Scope, pages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ..registry import Entry
    from .connection import Connection, Endpoint, Link
    from .registry import EtcdRegistry

#: Releases whose data may be inconsistent after a kill under load (etcd issue 13766).
KNOWN_BAD = ("3.5.0", "3.5.1", "3.5.2")
OLDEST = (3, 4)
_SLOW = 0.1
_BATCH = 64


class Remainder:
    """A key that nobody needs any more.

    Attributes
    ----------
    key
        As it stands in etcd.
    reason
        Why it may go.
    entry
        What it says, where that can be read.
    removed
        Whether it is gone now; False when it changed meanwhile, or in a dry run.
    """

    __slots__ = ("entry", "key", "reason", "removed", "revision")

    def __init__(self, key: str, reason: str, entry: Entry | None, revision: int) -> None:
        self.key: str = key
        self.reason: str = reason
        self.entry: Entry | None = entry
        self.revision: int = revision
        self.removed: bool = False

    def __repr__(self) -> str:
        return f"Remainder({self.key!r}, {self.reason!r}, removed={self.removed})"


def gc(
    registry: EtcdRegistry,
    *,
    dry_run: bool = False,
    older_than: float | None = None,
    timeout: float | None = None,
) -> list[Remainder]:
    """Remove what dead owners left in the registry's namespace.

    That is, on this host (the same ``host_id``, or the same boot and pid namespace): keys whose
    owner certainly does not run any more, and keys without a lease, which nothing would ever
    remove. Keys that somebody writes meanwhile are left alone.

    Parameters
    ----------
    registry
        Whose namespace, and whose host.
    dry_run
        Only say what would be removed.
    older_than
        Seconds. Also keys without a lease of *other* hosts, if they were recorded before that.
    timeout
        Seconds for each call to etcd; None for the registry's own.

    Returns
    -------
    list of Remainder
        In the order of the keys.
    """
    if older_than is not None and older_than != 0:
        check_seconds("older_than", older_than)
    seconds = registry.timeout if timeout is None else check_seconds("timeout", timeout)
    found = list(_remainders(registry, older_than, seconds))
    if dry_run:
        return found
    session = registry._here()
    for start in range(0, len(found), _BATCH):
        batch = found[start : start + _BATCH]
        call = Call(seconds)
        session.connection.open(call)
        rpc = session.connection.rpc
        # One condition each: a key that came to life must not keep the others.
        operations = [
            rpc.RequestOp(
                request_txn=rpc.TxnRequest(
                    compare=[
                        rpc.Compare(
                            result=rpc.Compare.EQUAL,
                            target=rpc.Compare.MOD,
                            key=each.key.encode(errors="surrogateescape"),
                            mod_revision=each.revision,
                        )
                    ],
                    success=[
                        rpc.RequestOp(
                            request_delete_range=rpc.DeleteRangeRequest(
                                key=each.key.encode(errors="surrogateescape")
                            )
                        )
                    ],
                )
            )
            for each in batch
        ]
        request = rpc.TxnRequest(success=operations)
        answer = registry.retry.call(
            lambda request=request, call=call: session.ask("txn", request, call),  # type: ignore[misc]
            deadline=call.deadline,
        )
        for each, response in zip(batch, answer.responses, strict=True):
            each.removed = response.response_txn.succeeded
    return found


class _Page:
    revision = 0


def _remainders(
    registry: EtcdRegistry, older_than: float | None, seconds: float
) -> Iterator[Remainder]:
    scope = Scope(registry.namespace, None, 1, 65535)
    reader = EntryReader()
    here = registry.host_id
    page = _Page()
    for begin, end in scope.ranges():
        for kv in pages(registry, begin, end, seconds, page):
            place = scope.place(kv.key)
            if place is None:
                continue  # not ours to judge
            namespace, space, host, port = place
            fields = decode(kv.value)
            entry = reader.entry(fields, port, space, host, namespace) if fields else None
            reason = ""
            if entry is not None and entry.alive is False:
                reason = f"its owner, process {entry.pid} of this host, does not run any more"
            elif not kv.lease and host == here:
                reason = "it has no lease, so that nothing would ever remove it"
            elif (
                not kv.lease
                and older_than is not None
                and entry is not None
                and entry.age > older_than
            ):
                reason = f"it has no lease and was recorded {ago(entry.age)}"
            if reason:
                name = kv.key.decode(errors="surrogateescape")
                yield Remainder(name, reason, entry, kv.mod_revision)


def ago(seconds: float) -> str:
    """A past time in the largest unit of which there are two or more."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


class Finding:
    """One line of a report: ``level`` is ``"ok"``, ``"note"`` or ``"BAD"``; ``line`` to type."""

    __slots__ = ("level", "line", "text", "topic")

    def __init__(self, level: str, topic: str, text: str, line: str = "") -> None:
        self.level: str = level
        self.topic: str = topic
        self.text: str = text
        self.line: str = line

    def __repr__(self) -> str:
        return f"Finding({self.level!r}, {self.topic!r}, {self.text!r})"


OK, NOTE, BAD = "ok", "note", "BAD"


def diagnose(registry: EtcdRegistry, *, timeout: float = 3.0) -> Iterator[Finding]:
    """Try what the registry needs of its etcd, and say in a line each what was found.

    Looks at each endpoint (does it answer, which version, how fast, has it a leader, whose clock),
    then at the login, the rights, the space and the lease's time to live. Writes nothing but a
    lease that it revokes.

    Parameters
    ----------
    registry
        Which etcd, and with which login.
    timeout
        Seconds for each step.
    """
    check_seconds("timeout", timeout)
    try:
        connection = registry._here().connection
        connection.open(Call(timeout))
    except RegistryDenied as exc:
        yield Finding(BAD, "login", str(exc))
        return
    except RegistryError as exc:
        yield Finding(BAD, "etcd", str(exc))
        if not registry._here().connection.links():
            return
        connection = registry._here().connection
    endpoints = registry._parsed or (None,) * len(connection.links())
    reached = 0
    for link, endpoint in zip(connection.links(), endpoints, strict=False):
        findings = list(_endpoint(connection, link, timeout))
        yield from findings
        reached += all(finding.level != BAD for finding in findings)
        if endpoint is not None and findings[0].level != BAD:
            yield from _clock(registry, endpoint, timeout)
    if reached:
        try:
            yield from _rights(registry, connection, timeout)
        except RegistryDenied as exc:
            yield Finding(BAD, "rights", str(exc))
        except RegistryError as exc:
            yield Finding(BAD, "etcd", str(exc))


def _endpoint(connection: Connection, link: Link, timeout: float) -> Iterator[Finding]:
    fastest = float("inf")
    status: Any = None
    call = Call(timeout)
    try:
        for _ in range(3):
            begin = time.perf_counter()
            status = connection.ask_one(link, "status", connection.rpc.StatusRequest(), call)
            fastest = min(fastest, time.perf_counter() - begin)
    except RegistryError as exc:
        yield Finding(BAD, "etcd", str(exc))
        return
    text = f"{link.endpoint} answers in {fastest * 1000:.1f} ms; etcd {status.version}"
    numbers = tuple(int(part) for part in status.version.split(".")[:2] if part.isdigit())
    if status.version in KNOWN_BAD:
        yield Finding(
            NOTE,
            "etcd",
            f"{text}, which may corrupt its data when it is killed under load: use 3.5.3 or later.",
        )
    elif numbers < OLDEST:
        yield Finding(NOTE, "etcd", f"{text}: fastports is tested with 3.4 and later.")
    elif fastest > _SLOW:
        yield Finding(NOTE, "etcd", f"{text}: slow; look after its disk and the way there.")
    else:
        yield Finding(OK, "etcd", text)
    if not status.leader:
        yield Finding(
            BAD, "leader", f"{link.endpoint} has no leader: too few members of its cluster run."
        )


def _clock(registry: EtcdRegistry, endpoint: Endpoint, timeout: float) -> Iterator[Finding]:
    """Compare clocks by the Date of an HTTP answer, which etcd gives on the same port."""
    import http.client
    from email.utils import parsedate_to_datetime

    made: http.client.HTTPConnection
    if endpoint.secure:
        import ssl

        files = registry._credentials
        context = ssl.create_default_context(cafile=files.ca)
        # as strict as gRPC; Python 3.13 asks for extensions that many a private CA leaves out
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if files.cert is not None:
            context.load_cert_chain(files.cert, files.key)
        made = http.client.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=timeout, context=context
        )
    else:
        made = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout)
    try:
        before = time.time()
        made.request("GET", "/version")
        date = made.getresponse().getheader("Date")
        after = time.time()
        if not date:
            return
        theirs = parsedate_to_datetime(date).timestamp()
    except (OSError, ValueError, http.client.HTTPException):
        return  # a gRPC-only port tells no time; whether it is reached was said before
    finally:
        made.close()
    # The header has whole seconds, cut off.
    apart = max(before - (theirs + 1), theirs - after, 0.0)
    if apart > 1:
        yield Finding(
            NOTE,
            "clock",
            f"the clock of {endpoint.netloc} is {apart:.0f} s off: ages are wrong by that much, "
            "leases are not.",
        )
    else:
        yield Finding(OK, "clock", f"the clock of {endpoint.netloc} agrees with ours")


def _rights(registry: EtcdRegistry, connection: Connection, timeout: float) -> Iterator[Finding]:
    rpc = connection.rpc
    user = connection.credentials.user
    begin = f"v1/{registry.namespace}/ports".encode()
    answer = connection.invoke(
        "range", rpc.RangeRequest(key=begin, range_end=begin + b"0", count_only=True), Call(timeout)
    )
    keys = "1 key" if answer.count == 1 else f"{answer.count or 'no'} keys"
    what = f"the namespace {registry.namespace!r}, which has {keys}"
    whom = f"user {user!r} may read" if user is not None else "etcd asks for no login to read"
    yield Finding(OK, "rights", f"{whom} {what}")
    if _ask_alarms(connection, timeout):
        yield Finding(
            BAD,
            "space",
            "etcd has run out of its quota and takes no claim; compact and defragment it first.",
            "etcdctl alarm disarm",
        )
    granted = connection.invoke("grant", rpc.LeaseGrantRequest(TTL=registry.ttl), Call(timeout))
    connection.invoke("revoke", rpc.LeaseRevokeRequest(ID=granted.ID), Call(timeout))
    if registry.ttl == granted.TTL:
        yield Finding(OK, "lease", f"a dead process's ports are taken off after {granted.TTL} s")
    else:
        yield Finding(
            NOTE,
            "lease",
            f"{registry.ttl} s were asked for, etcd grants {granted.TTL} s at the least: so long "
            "do a dead process's ports stay recorded.",
        )


def _ask_alarms(connection: Connection, timeout: float) -> bool:
    rpc = connection.rpc
    try:
        answer: Any = connection.invoke(
            "alarm", rpc.AlarmRequest(action=rpc.AlarmRequest.GET), Call(timeout)
        )
    except RegistryDenied:
        return False  # root's to ask where users are enabled
    return any(each.alarm == rpc.NOSPACE for each in answer.alarms)
