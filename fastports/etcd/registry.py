"""The registry on etcd, as the policy and its users see it."""

from __future__ import annotations

import os
import threading
import weakref

from ..errors import InvalidRequest, RegistryError, RegistryTimeout
from ..retry import Retry
from . import txn
from .connection import Call, Connection, Credentials, parse_endpoints
from .keys import Identity, Record, check_seconds, check_word, network_identity, root
from .session import Session

__all__ = ["EtcdRegistry"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import Any

    from ..errors import LeaseLost
    from ..registry import Recordable
    from .upkeep import Finding, Remainder
    from .watch import Changes, Listing

# What a fork left behind: another process's channels. Closing them here would talk over its
# sockets, and so would their finalizers.
_abandoned: list[object] = []


class EtcdRegistry:
    """Records held blocks in etcd, for a whole cluster to see and respect.

    Nothing is connected, imported or started before the first claim. One lease and one thread for
    each process, however many blocks. All methods may be called from any thread; a forked child
    starts anew, with its own connection and lease.

    Parameters
    ----------
    endpoints
        Where etcd is: ``"etcd-0:2379,etcd-1:2379"``, ``"https://etcd:2379"``, ``"[fd00::1]:2379"``
        or a sequence of these; or a function that makes a python-etcd3 client (cslab-etcd3,
        python3-etcd3 or pyetcd); or such a client, which then must not be used after a fork and
        cannot log in again by itself. None: ``FASTPORTS_ETCD_ENDPOINTS``.
    namespace
        Blocks of one namespace exclude each other on the same ``host_id``. None:
        ``FASTPORTS_ETCD_NAMESPACE``, else ``"default"``.
    host_id
        What a port is exclusive to. None: ``FASTPORTS_ETCD_HOST_ID``, else boot id and network
        namespace, which is right without any configuration. An address makes the keys those of
        Dynamo's allocator.
    ttl
        Seconds, 2 to 86400, after which the keys of a dead process vanish. etcd may grant more.
    timeout
        Seconds for a claim whose caller gave none.
    retry
        How often and how fast a claim that failed for the moment is tried again.
    user, password
        Login, with or without TLS. None: ``FASTPORTS_ETCD_USER``, ``FASTPORTS_ETCD_PASSWORD``.
    ca, cert, key
        Paths of PEM files. None: ``FASTPORTS_ETCD_CA``, ``FASTPORTS_ETCD_CERT``,
        ``FASTPORTS_ETCD_KEY``.
    advertise
        The address that others shall use to reach the ports; only recorded. None:
        ``FASTPORTS_ETCD_ADVERTISE``, else the block's host, or the host name as it is.
    on_lost, on_restored
        Called as ``on_lost(block, error)`` when the record of a held block is lost or contested
        (``error.reason`` tells), and ``on_restored(block)`` when it stands again: on a thread of
        the registry, without any lock. What they raise is logged.

    Raises
    ------
    InvalidRequest
        For anything malformed, before any connection.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] | Callable[[], Any] | Any | None = None,
        *,
        namespace: str | None = None,
        host_id: str | None = None,
        ttl: int = 30,
        timeout: float = 5.0,
        retry: Retry | None = None,
        user: str | None = None,
        password: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        advertise: str | None = None,
        on_lost: Callable[[Any, LeaseLost], object] | None = None,
        on_restored: Callable[[Any], object] | None = None,
    ) -> None:
        def environ(name: str) -> str | None:
            return os.environ.get(name) or None  # templates leave variables that are empty

        credentials = Credentials(
            user if user is not None else environ("FASTPORTS_ETCD_USER"),
            password if password is not None else environ("FASTPORTS_ETCD_PASSWORD"),
            _path(ca, "ca") or environ("FASTPORTS_ETCD_CA"),
            _path(cert, "cert") or environ("FASTPORTS_ETCD_CERT"),
            _path(key, "key") or environ("FASTPORTS_ETCD_KEY"),
        )
        if endpoints is None:
            endpoints = environ("FASTPORTS_ETCD_ENDPOINTS")
            if not endpoints:
                raise InvalidRequest(
                    "no etcd endpoint is named; give one, or set FASTPORTS_ETCD_ENDPOINTS",
                    argument="endpoints",
                )
        self._parsed = self._factory = self._client = None
        if isinstance(endpoints, (str, list, tuple)):
            self._parsed = parse_endpoints(endpoints, tls=credentials.tls)
        elif callable(endpoints):
            self._factory = endpoints
        elif hasattr(endpoints, "endpoints") or hasattr(endpoints, "channel"):
            self._client = endpoints
        else:
            raise InvalidRequest(
                f"a {type(endpoints).__name__} is neither endpoints nor a python-etcd3 client nor "
                "a function that makes one",
                argument="endpoints",
                value=endpoints,
            )
        if namespace is None:
            namespace = environ("FASTPORTS_ETCD_NAMESPACE") or "default"
        if host_id is None:
            host_id = environ("FASTPORTS_ETCD_HOST_ID")
        if advertise is None:
            advertise = environ("FASTPORTS_ETCD_ADVERTISE")
        self.namespace: str = check_word("namespace", namespace)
        if namespace == "*":
            raise InvalidRequest(
                "'*' stands for all namespaces where one looks; name one to record in",
                argument="namespace",
                value=namespace,
            )
        if isinstance(ttl, bool) or not isinstance(ttl, int) or not 2 <= ttl <= 86400:
            raise InvalidRequest(
                f"ttl is a whole number of seconds from 2 to 86400, not {ttl!r}",
                argument="ttl",
                value=ttl,
            )
        if retry is not None and not isinstance(retry, Retry):
            raise InvalidRequest(
                "retry is a fastports.retry.Retry, or None", argument="retry", value=retry
            )
        for name, hook in (("on_lost", on_lost), ("on_restored", on_restored)):
            if hook is not None and not callable(hook):
                raise InvalidRequest(f"{name} must be callable", argument=name, value=hook)
        self._host_id = None if host_id is None else check_word("host_id", host_id)
        self.ttl = ttl
        self.timeout = check_seconds("timeout", timeout)
        self.retry: Retry = Retry() if retry is None else retry
        self.on_lost = on_lost
        self.on_restored = on_restored
        self._credentials = credentials
        self._advertise = None if advertise is None else check_word("advertise", advertise)
        self._identity: Identity | None = None
        self._session: Session | None = None
        self._opening = threading.Lock()
        self._opened_by = os.getpid()
        self._closed = False
        self._owner_pid = os.getpid()

    def __repr__(self) -> str:
        where = self._parsed or self._factory or self._client
        return f"EtcdRegistry({where!r}, namespace={self.namespace!r}, ttl={self.ttl})"

    @property
    def host_id(self) -> str:
        """Under which name the ports of the calling thread's network namespace are recorded."""
        return network_identity() if self._host_id is None else self._host_id

    # -- the session of this process ---------------------------------------------------------------

    def _here(self) -> Session:
        """The session of this process; made now if there is none."""
        session = self._session
        pid = os.getpid()
        if session is not None and session.pid == pid:
            return session
        if self._opened_by != pid:
            # After a fork: the lock may have been held by a thread that does not exist here.
            self._opening = threading.Lock()
            self._opened_by = pid
        with self._opening:
            session = self._session
            if session is not None and session.pid == pid:
                return session
            if session is not None:
                _abandoned.append(session)
                if self._client is not None:
                    raise RegistryError(
                        "a client object cannot be used after a fork; give a function that makes "
                        "one, or endpoints"
                    )
            if self._closed:
                raise RegistryError("the registry is closed; make a new one")
            self._identity = Identity(self._advertise)
            session = Session(
                Connection(self._parsed, self._credentials, self._factory, self._client),
                namespace=self.namespace,
                ttl=self.ttl,
                retry=self.retry,
                on_lost=self.on_lost,
                on_restored=self.on_restored,
            )
            import atexit

            atexit.register(session.close)
            weakref.finalize(self, _leave, session).atexit = False
            self._session = session
            return session

    # -- the protocol ----------------------------------------------------------------------------

    def claim(
        self, blocks: Sequence[Recordable], *, search: tuple[int, int], timeout: float | None
    ) -> Collection[int]:
        """Record all of ``blocks`` in one transaction, or none; see :class:`Registry`.

        Raises
        ------
        RegistryUnavailable, RegistryTimeout
            After the retries, or at the deadline. With ``outcome == "unknown"`` the keys may stand
            for a moment; they are removed as soon as etcd answers, or end with the lease.
        RegistryDenied
            The login or the role does not allow it.
        RegistryError
            etcd refuses for another reason, in its own words.
        InvalidRequest
            The record of a block is too large.
        """
        call = Call(self.timeout if timeout is None else timeout)
        session = self._here()
        assert self._identity is not None
        host_id = self.host_id
        records = [
            Record(
                block,
                self._root(),
                host_id,
                self._identity,
                _reference(block),
                self._further(block),
            )
            for block in blocks
        ]
        if not records:
            return ()
        return self._claim(session, records, search, call)

    def _root(self) -> str:
        """Where the keys stand; elsewhere for registries that record where another one does."""
        return root(self.namespace)

    def _further(self, block: Recordable) -> Mapping[str, object]:
        """Fields that a block's value has beside ours; for registries that write another's, too."""
        return {}

    def _claim(
        self, session: Session, records: list[Record], search: tuple[int, int], call: Call
    ) -> Collection[int]:
        sent = False
        try:
            session.add(records)
            prefixes = txn.read_prefixes(records, self._root())
            strays: Sequence[bytes] = ()
            # Each turn but the last ends because something changed: the lease, or what is known
            # about the range. The deadline ends them all.
            for _ in range(8):
                lease = session.ensure_lease(call)
                request = txn.claim(records, lease, self._root(), search, strays)
                sent = True
                try:
                    answer = self.retry.call(
                        lambda request=request: session.ask("txn", request, call),  # type: ignore[misc]
                        deadline=call.deadline,
                    )
                except RegistryError as exc:
                    if "lease not found" not in str(exc):
                        raise
                    session.lose(lease, "the lease expired or was revoked")
                    continue
                if answer.succeeded:
                    session.confirm(records, lease)
                    return ()
                found, strays = txn.occupied(answer, prefixes)
                mine = [
                    kv
                    for start, first, last, _ in (part for r in records for part in r.parts)
                    for port in range(first, last + 1)
                    if (kv := found[start].get(port)) is not None
                ]
                if mine and all(kv.lease == lease for kv in mine):
                    if self.retry.call(
                        lambda: self._stands(session, records, call), deadline=call.deadline
                    ):
                        session.confirm(records, lease)
                        return ()
                    # Keys of ours for ports that we hold anew: a release, or a claim broken off, is
                    # still to reach etcd or did so late. Clear them away, then ask again.
                    names = {kv.key for kv in mine}
                    if not self.retry.call(
                        lambda names=names: session.clear(names, call),  # type: ignore[misc]
                        deadline=call.deadline,
                    ):
                        return self._refused(session, records, found, search, call)
                    continue
                if mine:
                    return self._refused(session, records, found, search, call)
                if not strays:  # the compare failed, and the read in the same transaction is empty
                    return self._refused(session, records, found, search, call)
            raise RegistryTimeout(
                "the keys of the range keep changing; try again", outcome="not-applied"
            )
        except BaseException as exc:
            ambiguous = sent and (call.ambiguous or not isinstance(exc, RegistryError))
            session.compensate(records, ambiguous)
            if isinstance(exc, RegistryError):
                exc.outcome = "unknown" if ambiguous else "not-applied"
            raise

    def _refused(
        self,
        session: Session,
        records: Sequence[Record],
        found: dict[bytes, dict[int, Any]],
        search: tuple[int, int],
        call: Call,
    ) -> Collection[int]:
        if call.ambiguous:  # an earlier attempt that seemed lost may still arrive
            session.drop(records)
            session.suspect(3)
        else:
            session.forget(records)
        return self._foreign(found, records, search)

    @staticmethod
    def _foreign(
        found: dict[bytes, dict[int, Any]], records: Sequence[Record], search: tuple[int, int]
    ) -> set[int]:
        low, high = search
        ports = set[int]().union(*found.values())
        if all(low <= r.first and r.last <= high for r in records):
            return ports
        return {
            port
            for port in ports
            if low <= port <= high or any(r.first <= port <= r.last for r in records)
        }

    @staticmethod
    def _stands(session: Session, records: Sequence[Record], call: Call) -> bool:
        """Whether an attempt whose answer was lost has written all of the records."""
        rpc = session.connection.rpc
        found: dict[bytes, Any] = {}
        for start in range(0, len(records), 64):
            reads = txn.reads(rpc, records[start : start + 64])
            found.update(txn.values(session.ask("txn", rpc.TxnRequest(success=reads), call)))
        return all(
            name in found and found[name].value == value
            for record in records
            for name, value in record.items()
        )

    def release(self, blocks: Sequence[Recordable]) -> None:
        """Remove the records of ``blocks``: one transaction, only what carries their tokens.

        Waits two seconds for etcd at the most; what it could not do in that time is done later.
        In a forked child the parent's blocks are passed over.
        """
        session = self._session
        if session is None or session.pid != os.getpid():
            return
        records = [
            session.records[token]
            for token in (block.owner.token for block in blocks)
            if token in session.records
        ]
        session.release(records)

    def release_later(self, blocks: Sequence[Recordable]) -> None:
        """Have the records of blocks removed soon; never waits, so that finalizers may call it."""
        session = self._session
        if session is not None and session.pid == os.getpid():
            for block in blocks:
                session.release_later(block.owner.token)

    def state(self, block: Recordable) -> str:
        """How the record of a held block stands.

        Returns
        -------
        str
            ``"held"``; ``"degraded"``: etcd has no valid record at the moment; ``"contested"``:
            etcd names another owner, see ``on_lost``.
        """
        session = self._session
        if session is None or session.pid != os.getpid():
            return "held"  # of a parent's block nothing is known here
        return session.state(block.owner.token)

    def entries(
        self,
        *,
        range: object = None,
        host: str | None = None,
        namespace: str | None = None,
        timeout: float | None = None,
    ) -> Listing:
        """Who has what, in the order of host and port.

        Parameters
        ----------
        range
            ``"20000-29999"``, (first, last) or a Python range; None for all ports.
        host
            One ``host_id``; None for the whole cluster.
        namespace
            None for the registry's own, ``"*"`` for all.
        timeout
            Seconds for each page.

        Returns
        -------
        iterator of Entry
            Reads in pages, all at one revision. Its ``skipped`` counts the keys and values that
            are not ours to understand; their ports are taken all the same.
        """
        from .watch import Listing

        return Listing(self, *self._scope(range, host, namespace), timeout=timeout)

    def watch(
        self, *, range: object = None, host: str | None = None, namespace: str | None = None
    ) -> Changes:
        """What is claimed and released from now on, after what stands now.

        Parameters as for :meth:`entries`.

        Returns
        -------
        iterator of Change
            First one ``"recorded"`` for each entry that stands, then every change. It goes on
            over lost connections, and over compactions by reading again: no change is told twice,
            and the last state is always told. Ends when closed (``close()``, or ``with``).
        """
        from .watch import Changes

        return Changes(self, *self._scope(range, host, namespace))

    def gc(
        self,
        *,
        dry_run: bool = False,
        older_than: float | None = None,
        timeout: float | None = None,
    ) -> list[Remainder]:
        """Remove what dead owners left in the namespace; see :func:`fastports.etcd.gc`."""
        from .upkeep import gc

        return gc(self, dry_run=dry_run, older_than=older_than, timeout=timeout)

    def diagnose(self, *, timeout: float = 3.0) -> Iterator[Finding]:
        """Whether this etcd serves, in a line each; see :func:`fastports.etcd.diagnose`."""
        from .upkeep import diagnose

        return diagnose(self, timeout=timeout)

    def _scope(
        self, ports: object, host: str | None, namespace: str | None
    ) -> tuple[str | None, str | None, int, int]:
        if host is not None:
            check_word("host", host)
        if namespace is None:
            namespace = self.namespace
        elif namespace != "*":
            check_word("namespace", namespace)
        first, last = _bounds(ports)
        return (None if namespace == "*" else namespace), host, first, last

    def close(self) -> None:
        """Revoke the lease, so that all records of this process end, and close the connection.

        Blocks stay held; their state is ``"degraded"`` from here on. Idempotent.
        """
        self._closed = True
        session = self._session
        if session is not None and session.pid == os.getpid():
            _leave_now(session)

    def __enter__(self) -> EtcdRegistry:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _leave(session: Session) -> None:
    """The registry was collected: its session ends on the session's own thread."""
    if session.pid != os.getpid():
        _abandoned.append(session)
        return
    import atexit

    atexit.unregister(session.close)
    if session.thread is None:
        session.close()
    else:
        session.close_later()


def _leave_now(session: Session) -> None:
    import atexit

    atexit.unregister(session.close)
    session.close()


def _reference(block: object) -> Callable[[], Any]:
    """Weak, so that a block that nobody has any more is finalized and released."""
    try:
        return weakref.ref(block)
    except TypeError:  # a stand-in of the caller's, which no finalizer of ours waits for
        return lambda: block


def _path(given: object, name: str) -> str | None:
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidRequest(f"{name} is the path of a PEM file", argument=name, value=given)
    return os.fspath(given)


def _bounds(ports: object) -> tuple[int, int]:
    if ports is None:
        return 1, 65535
    if isinstance(ports, range) and len(ports) and ports.step == 1:
        first, last = ports[0], ports[-1]
    elif isinstance(ports, str):
        low, dash, high = ports.partition("-")
        try:
            first, last = int(low), int(high if dash else low)
        except ValueError:
            first, last = 0, 0
    else:
        try:
            first, last = ports  # type: ignore[misc]
        except (TypeError, ValueError):
            first = getattr(ports, "first", 0)
            last = getattr(ports, "last", 0)
    if type(first) is not int or type(last) is not int or not 0 < first <= last < 65536:
        raise InvalidRequest(
            f'{ports!r} is no range of ports; write "20000-29999"', argument="range", value=ports
        )
    return first, last
