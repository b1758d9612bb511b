"""What one process has in etcd: its lease, its records, and the thread that keeps both true.

The hold in the kernel is the truth and etcd is the record. So nothing here ever gives a port up:
when the record is lost, the blocks are told, and it is written again as soon as etcd answers.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

from ..errors import LeaseLost, RegistryError, RegistryTimeout
from ..events import CONTESTED, LEASES_LOST, count, emit, wanted
from . import txn
from .connection import Call, let_go
from .keys import decode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from ..retry import Retry
    from .connection import Connection
    from .keys import Record

#: Seconds a release may wait for etcd before the thread takes over.
RELEASE_PATIENCE = 2.0
#: Seconds the end of a process may wait for the lease to be revoked.
CLOSING_PATIENCE = 1.0
#: Keys written in one transaction when records are restored.
BATCH = 2048

NEVER = float("inf")

_STOP = "stop"
_CLOSE = "close"
_WAKE = "wake"


def boot_clock() -> float:
    """Seconds that also pass while the machine sleeps, as they do for the lease."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def fraction() -> float:
    return int.from_bytes(os.urandom(4), "big") / 2.0**32


def later(looks: int) -> float:
    """Seconds until the next look for what arrives late: about half, then two, then eight."""
    return float(0.125 * 4.0 ** min(looks, 3) * (0.75 + 0.5 * fraction()))


def comeback(failures: int, granted: float) -> float:
    """Seconds until the thread asks again a server that was silent so often in a row.

    From anywhere in a third of the lease's time once an outage lasts: processes that all lost
    their records at one moment do not all write them again at one moment.
    """
    longest = min(granted / 3, 0.2 * 2.0 ** min(failures, 30))
    return max(0.02, longest * fraction())


class Session:
    """Made by the first claim of a process; never used by another one.

    ``lock`` guards the bookkeeping and is never held over a call to etcd or to the user.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        namespace: str,
        ttl: int,
        retry: Retry,
        on_lost: Callable[[Any, LeaseLost], object] | None,
        on_restored: Callable[[Any], object] | None,
    ) -> None:
        self.pid: int = os.getpid()
        self.connection = connection
        self.namespace = namespace
        self.ttl = ttl
        self.retry = retry
        self.on_lost = on_lost
        self.on_restored = on_restored
        self.lock = threading.Lock()
        self.lease_lock = threading.RLock()
        self.records: dict[str, Record] = {}
        self.doomed: dict[str, Record] = {}
        self.lease = 0
        self.granted = float(ttl)
        self.expires = 0.0
        self.reachable = True
        self.failures = 0
        self.complained = False
        # How often etcd is still to be compared with what we hold, when next, how often it was.
        self.checks = 0
        self.look = NEVER
        self.looks = 0
        self.due = 0.0
        self.history = (0, 0, 0)
        self.closed = False
        self.mail: SimpleQueue[str] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self.news: list[tuple[str, Record | None, dict[str, Any], LeaseLost | None]] = []
        self.teller: threading.Thread | None = None

    # -- calls -----------------------------------------------------------------------------------

    def ask(self, name: str, request: Any, call: Call) -> Any:
        """One call; what its answer tells of the cluster's history is looked at, too."""
        before = self.history
        header = (answer := self.connection.invoke(name, request, call)).header
        self.history = now = (header.cluster_id, header.raft_term, header.revision)
        # A cluster that was emptied or restored from a snapshot forgot some of our keys, perhaps
        # between two keepalives. Compared with what was known before the call was made: answers
        # to several threads overtake each other.
        if before[0] and (now[:2] != before[:2] or now[2] < before[2]):
            self.suspect()
        if not self.reachable:
            self.reachable = True
            self._announce("etcd_back")
            self.suspect()
        return answer

    def suspect(self, checks: int = 1) -> None:
        """Have the thread compare etcd with what we hold, now and so often again soon."""
        self.checks = max(self.checks, checks)
        self.look = 0.0
        self.mail.put(_WAKE)

    # -- the lease -------------------------------------------------------------------------------

    def ensure_lease(self, call: Call) -> int:
        """The id of our lease; granted now if there is none."""
        if self.lease:
            return self.lease
        try:
            if not self.lease_lock.acquire(timeout=max(0.0, call.remaining)):
                raise RegistryTimeout(
                    "another thread still waits for the lease; allow a longer timeout",
                    outcome="not-applied",
                )
            if self.lease:
                return self.lease
            self.connection.open(call)
            request = self.connection.rpc.LeaseGrantRequest(TTL=self.ttl)
            asked = 0.0
            ambiguous = call.ambiguous

            def grant() -> Any:
                nonlocal asked
                asked = boot_clock()
                return self.ask("grant", request, call)

            try:
                answer = self.retry.call(grant, deadline=call.deadline)
            except RegistryError as exc:
                exc.outcome = "not-applied"  # a lease without a key is nothing
                raise
            call.ambiguous = ambiguous
            with self.lock:
                self.granted = float(answer.TTL)
                self.expires = asked + answer.TTL
                self.due = asked + self._pace()
                self.lease = answer.ID
                self.failures = 0
                if self.thread is None and not self.closed:
                    self.thread = threading.Thread(
                        target=self._run, name="fastports-etcd", daemon=True
                    )
                    self.thread.start()
            self._announce("lease_granted", lease=answer.ID, ttl=self.granted)
            self.mail.put(_WAKE)
            lease: int = answer.ID
            return lease
        finally:
            let_go(self.lease_lock)

    def _pace(self) -> float:
        """A third of the TTL, a little less and not the same for all processes."""
        return self.granted / 3 * (0.85 + 0.15 * fraction())

    def lose(self, lease: int, reason: str) -> None:
        """The server says that it has no such lease."""
        with self.lock:
            if self.lease != lease:
                return
            self.lease = 0
            self.expires = 0.0
            self.checks = max(self.checks, 1)
        count(LEASES_LOST)
        self._announce("lease_lost", lease=lease, reason=reason, blocks=len(self.records))
        self._degrade(reason)
        self.mail.put(_WAKE)

    def _degrade(self, reason: str) -> None:
        with self.lock:
            hit = [r for r in self.records.values() if r.state == "held"]
            for record in hit:
                record.state = "degraded"
        self._tell((record, LeaseLost(
            f"ports {record.first}-{record.last} are held, but etcd has no valid record of them "
            f"({reason}); nothing need be done: they are recorded again when etcd answers",
            reason=reason, retryable=True,
        )) for record in hit)  # fmt: skip

    def state(self, token: str) -> str:
        if self.closed:
            return "degraded"
        record = self.records.get(token)
        if record is None:
            return "degraded" if token in self.doomed else "held"
        if record.state == "held" and boot_clock() >= self.expires:
            return "degraded"  # e.g. this process was stopped; the thread has not run yet
        return "held" if record.state == "claiming" else record.state

    # -- records ---------------------------------------------------------------------------------

    def add(self, records: Sequence[Record]) -> None:
        with self.lock:
            for record in records:
                self.records[record.token] = record

    def confirm(self, records: Sequence[Record], lease: int) -> None:
        """The records are in etcd under ``lease``."""
        with self.lock:
            lost = self.lease != lease
            for record in records:
                record.lease = lease
                record.state = "degraded" if lost else "held"
        if lost:
            self.suspect()

    def drop(self, records: Iterable[Record]) -> list[Record]:
        """Take records off the books; the ones that were there, now awaiting removal."""
        with self.lock:
            found = [r for r in records if r.token in self.records]
            for record in found:  # never on neither list: an interrupt may come at any point
                self.doomed[record.token] = record
                self.records.pop(record.token, None)
        return found

    def forget(self, records: Iterable[Record]) -> None:
        """Records that certainly are not in etcd."""
        with self.lock:
            for record in records:
                self.records.pop(record.token, None)
                self.doomed.pop(record.token, None)

    def remove(self, records: Sequence[Record], call: Call) -> None:
        """Delete from etcd what is still theirs: one transaction if nobody interfered.

        Raises
        ------
        RegistryError
            The keys may still be there; the records stay among the doomed.
        """
        for batch in batches(records):
            self.connection.open(call)
            rpc = self.connection.rpc
            answer = self.ask("txn", txn.remove(rpc, batch), call)
            rounds = 0
            while not answer.succeeded:
                found = txn.values(answer)
                chosen, _ = txn.runs(batch, found)
                chosen = [run for run in chosen if run[4]]
                if not chosen:
                    break
                rounds += 1
                if rounds > 8:
                    raise RegistryError("the keys keep changing", retryable=True)
                for start in range(0, len(chosen), txn.MAX_OPERATIONS):
                    part = chosen[start : start + txn.MAX_OPERATIONS]
                    answer = self.ask("txn", txn.delete_runs(rpc, part), call)
                    if not answer.succeeded:
                        break
                if not answer.succeeded:
                    answer = self.ask("txn", rpc.TxnRequest(success=txn.reads(rpc, batch)), call)
                    answer.succeeded = False  # it read; the runs are to be made anew
            with self.lock:
                for record in batch:
                    self.doomed.pop(record.token, None)

    def clear(self, names: set[bytes], call: Call) -> bool:
        """Remove what is nobody's: the doomed records, and keys of ours without one at ``names``.

        Returns
        -------
        bool
            Whether there was anything.
        """
        with self.lock:
            doomed = list(self.doomed.values())
        self.remove(doomed, call)
        return self._purge(names, call) > 0 or bool(doomed)

    def release(self, records: Sequence[Record]) -> None:
        found = self.drop(records)
        if not found or self.closed:
            return
        if not self.reachable:
            self.mail.put(_WAKE)  # etcd was silent just now; the thread removes them in its time
            return
        try:
            self.remove(found, Call(RELEASE_PATIENCE))
        except RegistryError:
            self.suspect(3)
        except BaseException:  # an interrupt
            self.suspect(3)
            raise

    def release_later(self, token: str) -> None:
        """For finalizers, which may run inside any code: takes no lock, calls nobody."""
        self.mail.put(token)

    def compensate(self, records: Sequence[Record], ambiguous: bool) -> None:
        """Undo a claim that did not end well. What cannot be undone now, the thread undoes.

        A request that was cut off may reach etcd after we removed its keys, so the thread looks
        again for a while; and the lease ends with the process.
        """
        if not ambiguous:
            self.forget(records)
            return
        found = self.drop(records)
        self.suspect(3)
        if self.reachable:
            with suppress(RegistryError):
                self.remove(found, Call(0.1))

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.closed:
            try:
                soonest = min(self.due, self.look) if self.reachable else self.due
                wait = soonest - boot_clock()
                message = self.mail.get(timeout=max(0.0, min(wait, 3600.0)))
            except Empty:
                message = ""
            tokens = []
            while message:
                if message == _STOP:
                    return
                if message == _CLOSE:
                    self.close()
                    return
                if message != _WAKE:
                    tokens.append(message)
                try:
                    message = self.mail.get_nowait()
                except Empty:
                    break
            try:
                with self.lock:
                    gone = [self.records[token] for token in tokens if token in self.records]
                self.drop(gone)
                now = boot_clock()
                if now >= self.due:
                    self._beat()
                elif self.reachable and (now >= self.look or self.doomed or not self.lease):
                    self._mend()
            # A defect here must not end the keepalive of every block of the process.
            except Exception:
                from logging import getLogger

                getLogger("fastports.etcd").exception("the etcd thread met an unexpected error")
                self._fail()

    def _share(self) -> float:
        """Seconds a call of the thread may take; a keepalive that waits longer is of no use."""
        return max(0.5, min(self.granted / 3, 5.0))

    def _fail(self) -> None:
        """Come back later, and not together with everybody else."""
        self.failures += 1
        if self.reachable:
            self._announce("etcd_silent", blocks=len(self.records))
        self.reachable = False
        self.checks = max(self.checks, 1)
        self.due = boot_clock() + comeback(self.failures, self.granted)
        if self.lease and boot_clock() >= self.expires:
            self._degrade("etcd did not answer until the lease had run out")

    def _beat(self) -> None:
        lease = self.lease
        if not lease:
            self._mend()
            return
        call = Call(self._share())
        asked = boot_clock()
        try:
            self.connection.open(call)
            request = self.connection.rpc.LeaseKeepAliveRequest(ID=lease)
            answer = self.ask("keepalive", request, call)
        except RegistryError:
            self._fail()
            return
        self.reachable = True
        self.failures = 0
        if answer.TTL <= 0:
            self.checks = max(self.checks, 1)
            self.lose(lease, "the lease expired or was revoked")
            self._mend()
            return
        with self.lock:
            before = self.expires
            self.granted = float(answer.TTL)
            self.expires = asked + answer.TTL
            self.due = asked + self._pace()
        # Read after the new time is set: whoever was told "degraded" by the old one is told, too,
        # that it is over.
        if boot_clock() >= before:
            self._degrade("etcd did not answer until the lease had run out")
        with self.lock:
            shaken = any(r.state in ("degraded", "contested") for r in self.records.values())
        if shaken or self.checks or self.doomed:
            self._mend()

    def _mend(self) -> None:
        """Make etcd say what we hold: write what is missing, remove what is nobody's."""
        with self.lock:
            idle = not self.lease and not self.records and not self.doomed
        if idle:
            self.due = boot_clock() + self._pace()  # the next claim asks for a lease
            self.checks = self.looks = 0
            self.look = NEVER
            return
        call = Call(self._share())
        self.look = NEVER  # whoever sets it from here on means a look after this one
        try:
            self._settle(call)
        except RegistryError as exc:
            if exc.retryable:
                self._fail()
                return
            # etcd answers but refuses (no space, no permission): no use in hurrying.
            if not self.complained:
                from logging import getLogger

                self.complained = True
                getLogger("fastports.etcd").warning("records cannot be put right: %s", exc)
            self.checks = max(self.checks, 1)
            self.look = NEVER
            self.due = boot_clock() + self._pace()
            return
        self.reachable = True
        self.failures = 0
        self.complained = False
        if self.look == NEVER:
            self.checks = max(0, self.checks - 1)
            self.looks = self.looks + 1 if self.checks else 0
            self.look = boot_clock() + later(self.looks) if self.checks else NEVER
        if self.due <= boot_clock():
            self.due = boot_clock() + self._pace()

    def _settle(self, call: Call) -> None:
        fresh = not self.lease
        lease = self.ensure_lease(call)
        rpc = self.connection.rpc
        present: set[bytes] = set()
        if not fresh:
            answer = self.ask("time_to_live", rpc.LeaseTimeToLiveRequest(ID=lease, keys=True), call)
            if answer.TTL <= 0:
                self.lose(lease, "the lease expired or was revoked")
                lease = self.ensure_lease(call)
            else:
                present.update(answer.keys)
        with self.lock:
            doomed = list(self.doomed.values())
            known = {name for r in self.records.values() for name, _ in r.items()}
            wanted = [r for r in self.records.values() if r.state != "claiming"]
        if doomed:
            self.remove(doomed, call)
        missing = [
            record
            for record in wanted
            if record.lease != lease or not present.issuperset(name for name, _ in record.items())
        ]
        if fresh:
            # Names that are known to be gone need no message; those that stood under another lease
            # until now might have been found missing by somebody: say so once.
            self._degrade("the lease was lost")
        elif missing:
            with self.lock:
                gone = [r for r in missing if r.state == "held"]
                for record in gone:
                    record.state = "degraded"
            self._tell((record, LeaseLost(
                f"ports {record.first}-{record.last} are held, but etcd forgot them (it was "
                "restored, or somebody deleted the keys); they are being recorded again",
                reason="etcd forgot the keys", retryable=True,
            )) for record in gone)  # fmt: skip
        self._write(missing, lease, call)
        whole = [r for r in wanted if r.state != "held" and r not in missing]
        self._restored(whole, lease)
        self._purge(present - known, call)

    def _write(self, records: list[Record], lease: int, call: Call) -> None:
        for batch in batches(records):
            if self._put(txn.write(batch, lease), lease, call).succeeded:
                self._restored(batch, lease)
                continue
            for record in batch:
                self._write_one(record, lease, call)

    def _put(self, request: Any, lease: int, call: Call) -> Any:
        try:
            return self.ask("txn", request, call)
        except RegistryError as exc:
            if "lease not found" in str(exc):
                self.lose(lease, "the lease expired or was revoked")
                exc.retryable = True
            raise

    def _write_one(self, record: Record, lease: int, call: Call) -> None:
        """Write what of a record is free or ours already, and see who stands on the rest."""
        rpc = self.connection.rpc
        for _ in range(4):
            answer = self.ask("txn", rpc.TxnRequest(success=txn.reads(rpc, [record])), call)
            found = txn.values(answer)
            chosen, rival = txn.runs([record], found)
            if all(
                self._put(txn.write_runs(part, lease), lease, call).succeeded
                for part in portions(chosen)
            ):
                break
        else:
            raise RegistryError("the keys keep changing", retryable=True)
        if not rival:
            self._restored([record], lease)
            return
        with self.lock:
            news = record.state != "contested" and record.token in self.records
            record.state = "contested"
            record.lease = lease
            record.rival = rival
        if news:
            reason = "contested: " + describe(rival)
            self._tell([(record, LeaseLost(
                f"ports {record.first}-{record.last} are held here, but etcd names another owner "
                f"({describe(rival)}); find out which of the two is to go, and end it",
                reason=reason, retryable=False,
            ))])  # fmt: skip
        self._take_back([record])

    def _restored(self, records: Sequence[Record], lease: int) -> None:
        with self.lock:
            news = [r for r in records if r.state != "held" and r.token in self.records]
            for record in records:
                record.lease = lease
                record.rival = b""
                record.state = "held" if self.lease == lease else "degraded"
        self._tell((record, None) for record in news)
        self._take_back(records)

    def _take_back(self, records: Sequence[Record]) -> None:
        """A block may have been released while its keys were being written."""
        with self.lock:
            late = [r for r in records if r.token not in self.records]
            for record in late:
                self.doomed[record.token] = record
        if late:
            self.suspect()

    def _purge(self, names: set[bytes], call: Call) -> int:
        """Remove keys under our lease that belong to no record, such as late arrivals; how many."""
        rpc = self.connection.rpc
        compare = rpc.Compare
        ordered = sorted(names)
        removed = 0
        for start in range(0, len(ordered), 64):
            reads = [
                rpc.RequestOp(request_range=rpc.RangeRequest(key=name))
                for name in ordered[start : start + 64]
            ]
            found = txn.values(self.ask("txn", rpc.TxnRequest(success=reads), call))
            deletes = []
            for name, kv in found.items():
                fields = decode(kv.value) or {}
                with self.lock:
                    token = fields.get("token")
                    ours = kv.lease == self.lease and token not in self.records
                if ours:
                    deletes.append(rpc.RequestOp(request_txn=rpc.TxnRequest(
                        compare=[compare(
                            result=compare.EQUAL, target=compare.MOD, key=name,
                            mod_revision=kv.mod_revision,
                        )],
                        success=[rpc.RequestOp(
                            request_delete_range=rpc.DeleteRangeRequest(key=name)
                        )],
                    )))  # fmt: skip
            if deletes:
                answer = self.ask("txn", rpc.TxnRequest(success=deletes), call)
                removed += sum(each.response_txn.succeeded for each in answer.responses)
        return removed

    # -- telling ---------------------------------------------------------------------------------

    def _tell(self, news: Iterable[tuple[Record, LeaseLost | None]]) -> None:
        """Have it told what became of records, the callbacks of the registry included."""
        self._add_news([(_event(error), record, {}, error) for record, error in news])

    def _announce(self, event: str, **facts: object) -> None:
        if wanted(event):
            self._add_news([(event, None, facts, None)])

    def _add_news(
        self, news: list[tuple[str, Record | None, dict[str, Any], LeaseLost | None]]
    ) -> None:
        """Have it told by a thread of its own: a slow listener costs no lease."""
        with self.lock:
            self.news.extend(news)
            if not self.news or self.teller is not None:
                return
            self.teller = threading.Thread(
                target=self._call_back, name="fastports-etcd-callbacks", daemon=True
            )
            self.teller.start()

    def _call_back(self) -> None:
        while True:
            with self.lock:
                if not self.news:
                    self.teller = None
                    return
                event, record, facts, error = self.news.pop(0)
            if record is None:
                emit(event, **facts)
                continue
            block = record.block()
            if block is None:
                continue
            if event == "record_contested":
                count(CONTESTED)
            emit(event, block, reason="" if error is None else error.reason)
            try:
                if error is not None:
                    if self.on_lost is not None:
                        self.on_lost(block, error)
                elif self.on_restored is not None:
                    self.on_restored(block)
            except Exception:  # the caller's code; whatever it does, the next block is told, too
                from logging import getLogger

                getLogger("fastports.etcd").exception("a callback of the registry failed")

    # -- the end ---------------------------------------------------------------------------------

    def close_later(self) -> None:
        """For a registry that nobody has any more; like ``release_later``."""
        self.mail.put(_CLOSE)

    def close(self) -> None:
        """Revoke the lease, stop the thread, close the channels. Only in our own process."""
        if self.pid != os.getpid():
            return
        with self.lock:
            if self.closed:
                return
            self.closed = True
            thread, teller = self.thread, self.teller
        self.mail.put(_STOP)
        lease = self.lease
        if lease:
            try:
                request = self.connection.rpc.LeaseRevokeRequest(ID=lease)
                patience = CLOSING_PATIENCE if self.reachable else CLOSING_PATIENCE / 4
                self.connection.invoke("revoke", request, Call(patience))
            except RegistryError:
                pass  # it runs out by itself
        self.connection.close()
        for each in (thread, teller):
            if each is not None and each is not threading.current_thread():
                each.join(CLOSING_PATIENCE)


def _event(error: LeaseLost | None) -> str:
    if error is None:
        return "record_restored"
    return "record_lost" if error.retryable else "record_contested"


def describe(value: bytes) -> str:
    """Who wrote a value, in a few words."""
    fields = decode(value)
    if fields is None:
        return "a value of another program"
    words = [
        f"{name} {fields[name]!r}"
        for name in ("hostname", "address", "pid", "label", "worker_id")
        if fields.get(name)
    ]
    return ", ".join(words)[:300] or "a value of another program"


def batches(records: Sequence[Record]) -> list[list[Record]]:
    """Groups small enough for one transaction each."""
    made: list[list[Record]] = []
    parts = keys = 0
    for record in records:
        size = sum(last - first + 1 for _, first, last, _ in record.parts)
        if not made or parts + len(record.parts) > 64 or keys + size > BATCH:
            made.append([])
            parts = keys = 0
        made[-1].append(record)
        parts += len(record.parts)
        keys += size
    return made


def portions(
    chosen: Sequence[tuple[bytes, int, int, bytes, bool]],
) -> list[list[tuple[bytes, int, int, bytes, bool]]]:
    """Runs in groups of at most 64."""
    return [list(chosen[i : i + 64]) for i in range(0, len(chosen), 64)]
