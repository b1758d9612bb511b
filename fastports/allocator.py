"""The policy: what to search, when to look elsewhere, when to give up.

The core finds and holds; registries record; this module decides. It never looks at a socket.
"""

from __future__ import annotations

import errno
import os
import time

from . import ranges
from ._core import BUSY, EXHAUSTED, FOUND, Ground, Search, check_ports, descriptor_usage
from .block import (
    PROTOCOLS,
    PortBlock,
    _forking,
    _searching,
    searched,
    searching,
    stand_still,
    watch_forks,
)
from .errors import (
    AllocationTimeout,
    DescriptorLimit,
    FastportsError,
    InvalidRequest,
    PortsUnavailable,
    PrivilegedPort,
)
from .events import ALLOCATIONS, PORTS, PROBES, emit, heard, refused, tally
from .host import HEADS, HostRegistry, address_part
from .ranges import PortRange
from .request import (
    Request,
    as_ports,
    bad_array,
    check_address,
    check_generator,
    check_label,
    check_metadata,
    check_protocol,
    check_retry,
    check_size,
    check_timeout,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Protocol, TypeVar

    import numpy
    import numpy.typing

    from .ranges import RangeLike
    from .registry import Registry

    T = TypeVar("T")

    class Pacing(Protocol):
        """How long to wait between looks: full jitter over base * 2**n seconds, at most cap."""

        @property
        def base(self) -> float: ...
        @property
        def cap(self) -> float: ...


__all__ = ["Allocator", "PortState"]


class _Unset:
    def __repr__(self) -> str:
        return "<the allocator's>"


_UNSET = _Unset()

_KEEP = 512  # descriptors a search may keep for overlapping windows; more would gain nothing
_HEADROOM = 16  # descriptors left to the rest of the process
_PLAN_ROUNDS = 3
_LIMIT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WAIT_BASE, _WAIT_CAP = 0.005, 0.25  # seconds between two looks while waiting for ports


class PortState:
    """What :meth:`Allocator.probe` says of a port (int8 values)."""

    FREE = 0
    BUSY = 1
    DENIED = 2
    PRIVILEGED = 3
    RESERVED = 4

    NAMES = ("free", "busy", "denied", "privileged", "reserved")


class Patience:
    """Under ``timeout=``: whether to look once more, and after which pause."""

    def __init__(self, request: Request, timeout: float, pacing: Pacing | None) -> None:
        self._request = request
        self._timeout = timeout
        self._base: float = _WAIT_BASE if pacing is None else pacing.base
        self._cap: float = _WAIT_CAP if pacing is None else pacing.cap
        self._begin = time.monotonic()
        self._attempts = 0
        self.deadline: float = self._begin + timeout

    def after(self, refusal: PortsUnavailable) -> float:
        """Seconds to wait after this refusal; AllocationTimeout when there is no time left."""
        self._attempts += 1
        now = time.monotonic()
        if now >= self.deadline:
            from .refusal import counts, facts_of, what  # what follows needs no hurry

            raise AllocationTimeout(
                f"{what(self._request)} did not come free within {self._timeout:g} s"
                f" ({self._attempts} looks); {counts(refusal)}. Wait longer, free some ports, or"
                " widen range=.",
                timeout=self._timeout,
                elapsed=now - self._begin,
                attempts=self._attempts,
                **facts_of(refusal),
            ) from refusal
        self._request.recorded = frozenset()  # others may have given back what they had recorded
        jitter = (int.from_bytes(os.urandom(2), "little") + 1) / 65536
        pause: float = min(self._cap, self._base * 2 ** min(self._attempts, 30)) * jitter
        return min(pause, self.deadline - now)


def _failure(status: int, port: int, host: str | None, needed: int) -> Exception:
    """The error for an errno that says something of this process or its address, not of a port."""
    if status not in _LIMIT_ERRORS:
        from .refusal import from_errno

        return from_errno(status, port, host)
    # nothing is imported here: that takes a descriptor, too
    used, soft, hard = descriptor_usage()
    return DescriptorLimit(
        f"the kernel opens no more sockets ({os.strerror(status)}): {used} descriptors are open and"
        f" the limit is {soft} (hard limit {hard}). Raise it with `ulimit -n`, or release blocks.",
        needed=needed,
        open=used,
        soft=soft,
        hard=hard,
        errno=status,
    )


def _count(blocks: int, ports: int) -> None:
    tally.add(ALLOCATIONS, blocks)
    tally.add(PORTS, ports)


def _tell(block: PortBlock) -> None:
    try:
        emit("allocated", block)
    except BaseException:  # an interrupt in a hook
        block._release()
        raise


class Allocator:
    """Allocates ports with shared settings. Safe to use from many threads at once.

    Parameters
    ----------
    range
        Where to look: anything :class:`PortRange` takes. Default: 20000-29999 less the ephemeral
        range and the reserved ports of the caller's network namespace (read at each call).
    registry
        A cluster registry that records blocks besides this host's own, such as
        ``fastports.etcd.EtcdRegistry``.
    host
        Address to hold; None (default) for the wildcard of every family.
    protocol
        ``"tcp"`` (default), ``"udp"`` or ``"both"``.
    rng
        A ``numpy.random.Generator`` that fixes the order of the search, for reproducible runs.
    retry
        An object with ``base`` and ``cap`` in seconds: the pace of waiting for ports under
        ``timeout=``. Default: 5 ms, at most 250 ms, fully jittered.
    include_reserved
        Also hand out ports of ``net.ipv4.ip_local_reserved_ports``, for a range that was reserved
        for just this use.

    Raises
    ------
    InvalidRequest
        For settings that cannot be served.
    """

    _block = PortBlock

    def __init__(
        self,
        *,
        range: RangeLike | None = None,
        registry: Registry | None = None,
        host: str | None = None,
        protocol: str = "tcp",
        rng: numpy.random.Generator | None = None,
        retry: Pacing | None = None,
        include_reserved: bool = False,
    ) -> None:
        self._range = None if range is None else PortRange(range)
        if registry is not None and not hasattr(registry, "claim"):
            raise InvalidRequest(
                f"registry must be a fastports.etcd.EtcdRegistry or the like, not {registry!r}."
                " Leave it out to record nothing beyond this host.",
                argument="registry",
                value=registry,
            )
        self._registry = registry
        self._host = host
        self._address = check_address(host)
        self._protocol = check_protocol(protocol)
        self._bits = PROTOCOLS[self._protocol]
        self._rng = check_generator(rng)
        self._retry = check_retry(retry)
        self._include_reserved = include_reserved
        self._entries = HostRegistry()
        self._warned: set[str] = set()
        # sysctl texts and the plan they gave: parsing is most of the cost of reading them
        self._planned: tuple[object, object, ranges.Plan] | None = None
        # the same for the calls that name no range, in the core's terms
        self._ground: Ground | None = None
        self._head = HEADS[self._protocol]
        self._at = address_part(self._address)

    def __repr__(self) -> str:
        where = "default range" if self._range is None else str(self._range)
        return f"<Allocator {where}/{self._protocol} host={self._host!r}>"

    @property
    def registry(self) -> Registry | None:
        """The cluster registry given, or None."""
        return self._registry

    # --- the public verbs ---

    def allocate(
        self,
        size: int = 1,
        *,
        range: RangeLike | None = None,
        protocol: str | None = None,
        host: str | _Unset | None = _UNSET,
        timeout: float | None = None,
        label: str = "",
        metadata: Mapping[str, object] | None = None,
        rng: numpy.random.Generator | None = None,
        candidates: object = None,
    ) -> PortBlock:
        """Find ``size`` contiguous free ports and hold them.

        Every port is held from the moment it is found: nobody else can bind it, with any socket
        option, until the block is released or this process ends. A free block that exists when the
        call starts, and stays free, is found; a refusal is certain.

        Parameters
        ----------
        size
            Number of consecutive ports, 1 to 65535.
        range, protocol, host
            As for :class:`Allocator`, for this call only.
        timeout
            Seconds to wait for ports to come free. None: refuse at once when nothing is.
        label
            Up to 64 bytes of printable text that names the use; shown by ``fastports ls``.
        metadata
            A dict for cluster registries, at most 4096 bytes as JSON.
        rng
            Draw from this generator: the same seed tries the same ports in the same order.
        candidates
            Array (uint16; int32 and int64 are converted) of the first ports to try, in this order
            and no others. Ports may be reserved or ephemeral: they were asked for.

        Returns
        -------
        PortBlock

        Raises
        ------
        InvalidRequest
            Before anything is bound.
        PortsUnavailable
            Nothing fits; with the counts. PrivilegedPort where a privilege is what is missing.
        AllocationTimeout
            Nothing came free within ``timeout``.
        BindDenied
            A sandbox forbids binding.
        DescriptorLimit
            The block needs more descriptors than this process may open.
        RegistryError
            From the cluster registry, if there is one; nothing is held then.
        """
        try:
            ground = self._ground
            if (
                ground is not None
                and type(size) is int
                and range is None
                and protocol is None
                and host is _UNSET
                and timeout is None
                and metadata is None
                and rng is None
                and candidates is None
            ):  # nothing but the allocator's settings: as worked out before
                if label != "":
                    check_label(label)
                search = ground.begin(size)
                if search is not None:
                    return self._search_again(search, size, label, ground.plan)
            size = check_size(size)
            request = self._request(size, range, protocol, host, label, metadata, rng, candidates)
            if timeout is None:
                return self._attempt(request, None)
            return self._wait(request, check_timeout(timeout), self._attempt)
        except FastportsError as exc:
            refused(exc)
            raise

    def reserve(
        self,
        ports: RangeLike,
        *,
        protocol: str | None = None,
        host: str | _Unset | None = _UNSET,
        timeout: float | None = None,
        label: str = "",
        metadata: Mapping[str, object] | None = None,
    ) -> PortBlock:
        """Hold exactly this port, or exactly this range of ports.

        A port on which only connections in TIME_WAIT are left is taken too: SO_REUSEADDR is set for
        its bind(2) and cleared right after (less than a microsecond in which a socket that asks for
        this very port with SO_REUSEADDR could join). The parameters, and the errors, are those of
        :meth:`allocate`; ``PortsUnavailable.cause`` says what is on a single port.
        """
        try:
            exact = PortRange(ports)
            request = self._request(
                len(exact), exact, protocol, host, label, metadata, None, None, exact=True
            )
            if timeout is None:
                return self._attempt(request, None)
            return self._wait(request, check_timeout(timeout), self._attempt)
        except FastportsError as exc:
            refused(exc)
            raise

    def allocate_many(
        self,
        sizes: Mapping[str, int],
        *,
        range: RangeLike | None = None,
        protocol: str | None = None,
        host: str | _Unset | None = _UNSET,
        timeout: float | None = None,
        label: str = "",
        metadata: Mapping[str, object] | None = None,
        rng: numpy.random.Generator | None = None,
    ) -> dict[str, PortBlock]:
        """Hold several disjoint blocks, all or none.

        The largest is placed first; where that leaves no room for the others, all placements are
        tried within a bound of 50,000 steps. Each block is released on its own.

        Parameters
        ----------
        sizes
            Number of ports by name, such as ``{"http": 1, "nixl": 8}``. A block's label is its
            name, after ``label`` and a hyphen where that is given.

        Returns
        -------
        dict[str, PortBlock]
            In the order of ``sizes``.

        Raises
        ------
        InvalidRequest, PortsUnavailable, AllocationTimeout, BindDenied, DescriptorLimit
            As :meth:`allocate`; ``wanted`` counts all ports together.
        """

        def attempt(request: Request, deadline: float | None) -> dict[str, PortBlock]:
            return self._attempt_many(request, wanted, deadline)

        try:
            request, wanted = self._request_many(sizes, range, protocol, host, label, metadata, rng)
            if timeout is None:
                return attempt(request, None)
            return self._wait(request, check_timeout(timeout), attempt)
        except FastportsError as exc:
            refused(exc)
            raise

    def probe(
        self,
        candidates: object,
        *,
        protocol: str | None = None,
        host: str | _Unset | None = _UNSET,
    ) -> numpy.typing.NDArray[numpy.int8]:
        """What can be said of ports at this moment. Nothing is kept: use it to look, not to choose.

        Parameters
        ----------
        candidates
            Ports: a numpy array (uint16 without a copy; int32 and int64 are converted), any buffer
            of such items, a list, or a range.

        Returns
        -------
        numpy.ndarray
            int8, one :class:`PortState` value for each candidate. With ``protocol="both"`` a port
            is free if it is free in both.

        Raises
        ------
        InvalidRequest, DescriptorLimit
        """
        ports = as_ports(candidates, "candidates")
        bad = check_ports(ports, 1, 65535, False)
        if bad >= 0:
            raise bad_array(candidates, "candidates", f"item {bad} is {ports[bad]}")
        bits = self._bits if protocol is None else PROTOCOLS[check_protocol(protocol)]
        address = self._address if isinstance(host, _Unset) else check_address(host)
        import numpy as np  # 84 ms, for the arrays of this call's contract

        states = np.empty(len(ports), dtype=np.int8)
        error = self._look(ports, states, bits, address, 1, 65535)
        if error:
            raise _failure(error, 0, self._host if isinstance(host, _Unset) else host, 1)
        numbers = np.asarray(ports)
        privileged = states == PortState.PRIVILEGED  # EACCES, whatever the port
        if privileged.any():
            high = numbers >= ranges.unprivileged_start()
            states[privileged & high] = PortState.DENIED
        for low_end, high_end in ranges.parse_reserved(ranges.read_reserved()):
            inside = (numbers >= low_end) & (numbers <= high_end)
            states[inside & (states == PortState.FREE)] = PortState.RESERVED
        return states

    # --- what is asked ---

    def _request(
        self,
        size: int,
        range: RangeLike | None,
        protocol: str | None,
        host: str | _Unset | None,
        label: str,
        metadata: Mapping[str, object] | None,
        rng: Any,
        candidates: object,
        exact: bool = False,
        plan: ranges.Plan | None = None,
    ) -> Request:
        request = Request()
        request.size = size
        if protocol is None:
            request.protocol = self._protocol
            request.bits = self._bits
        else:
            request.protocol = check_protocol(protocol)
            request.bits = PROTOCOLS[request.protocol]
        if host is _UNSET:
            request.host = self._host
            request.address = self._address
        else:
            request.host = host  # type: ignore[assignment]
            request.address = check_address(host)
        if label != "":
            request.label = check_label(label)
        if metadata is not None:
            request.metadata = check_metadata(metadata)
        if rng is not None or self._rng is not None:
            request.rng = self._rng if rng is None else check_generator(rng)
        named = self._range if range is None else PortRange(range)
        if exact:
            assert named is not None
            request.exact = True
            request.first, request.last = named.first, named.last
        elif candidates is not None:
            self._take_candidates(request, candidates, named, rng)
        else:
            plan = self._plan(named) if plan is None else plan
            request.first, request.last, request.cuts = plan.first, plan.last, plan.cuts
            if plan.warning is not None:
                self._warn(plan.warning)
        if size > request.last - request.first + 1:
            raise self._too_large(size, request)
        return request

    def _request_many(
        self,
        sizes: Mapping[str, int],
        range: RangeLike | None,
        protocol: str | None,
        host: str | _Unset | None,
        label: str,
        metadata: Mapping[str, object] | None,
        rng: Any,
    ) -> tuple[Request, dict[str, int]]:
        wanted = self._sizes(sizes)
        for name in wanted:
            check_label(f"{label}-{name}" if label else name)
        request = self._request(
            sum(wanted.values()), range, protocol, host, label, metadata, rng, None
        )
        biggest = max(wanted.values())
        if biggest > request.last - request.first + 1:
            raise self._too_large(biggest, request)
        return request, wanted

    def _take_candidates(
        self, request: Request, candidates: object, named: PortRange | None, rng: Any
    ) -> None:
        if rng is not None:
            raise InvalidRequest(
                "candidates give the order of the search and rng would draw another."
                " Pass one of the two.",
                argument="candidates",
                value=candidates,
            )
        starts = as_ports(candidates, "candidates")
        if len(starts) == 0:
            raise bad_array(candidates, "candidates", "it is empty")
        low = 1 if named is None else named.first
        high = (65535 if named is None else named.last) - request.size + 1
        bad = check_ports(starts, low, high, True)
        if bad >= 0:
            why = f"item {bad} ({starts[bad]}) is repeated"
            if not low <= starts[bad] <= high:
                why = f"item {bad} ({starts[bad]}) is not in {low}-{high}, where a block can start"
            raise bad_array(candidates, "candidates", why)
        request.starts = starts
        request.first, request.last = min(starts), max(starts) + request.size - 1

    def _plan(self, named: PortRange | None) -> ranges.Plan:
        """The range to search under the sysctls of this moment, in this network namespace."""
        texts = ranges.read_both()
        planned = self._planned
        if planned is not None and planned[0] == texts and planned[1] == named:
            plan = planned[2]
            # the fallback range depends on one more sysctl, and is not worth remembering
            if named is not None or plan.first == ranges.DEFAULT_FIRST:
                return plan
        ephemeral = ranges.parse_ephemeral(texts[0][1])
        pairs = () if self._include_reserved else ranges.parse_reserved(texts[1][1])
        if named is None:
            plan = ranges.default_plan(ephemeral, pairs)
        else:
            plan = ranges.explicit_plan(named.first, named.last, ephemeral, pairs)
        self._planned = texts, named, plan
        if named is self._range and self._registry is None and self._rng is None:
            self._ground = None
            watch_forks()
            if named is not None or plan.first == ranges.DEFAULT_FIRST:
                self._ground = Ground(
                    texts, plan.first, plan.last, self._bits, self._address, plan.cuts,
                    _HEADROOM, _KEEP, plan,
                )  # fmt: skip
        return plan

    def _sizes(self, sizes: object) -> dict[str, int]:
        items = getattr(sizes, "items", None)
        if items is None:
            raise InvalidRequest(
                f"sizes must map names to numbers of ports, not {sizes!r}."
                " Write allocate_many({'http': 1, 'nixl': 8}).",
                argument="sizes",
                value=sizes,
            )
        wanted: dict[str, int] = {}
        for name, size in items():
            if not isinstance(name, str) or not name:
                raise InvalidRequest(
                    f"a block's name must be a non-empty string, not {name!r}.",
                    argument="sizes",
                    value=sizes,
                )
            wanted[name] = check_size(size, f"sizes[{name!r}]")
        if not wanted:
            raise InvalidRequest(
                "sizes is empty: there is nothing to allocate. Name at least one block.",
                argument="sizes",
                value=sizes,
            )
        return wanted

    def _too_large(self, size: int, request: Request) -> InvalidRequest:
        return InvalidRequest(
            f"{size} ports do not fit into {request.range}, which has"
            f" {request.last - request.first + 1}. Ask for fewer, or widen range=.",
            argument="size",
            value=size,
        )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            emit("range_doubtful", why=text)

    # --- searching ---

    def _wait(
        self,
        request: Request,
        timeout: float | None,
        attempt: Callable[[Request, float | None], T],
    ) -> T:
        """Try until it works, with jittered pauses, for ``timeout`` seconds at most."""
        if timeout is None:
            return attempt(request, None)
        patience = Patience(request, timeout, self._retry)
        while True:
            try:
                return attempt(request, patience.deadline)
            except PrivilegedPort:
                raise
            except PortsUnavailable as exc:
                pause = patience.after(exc)
            time.sleep(pause)

    def _search_again(self, search: Search, size: int, label: str, plan: ranges.Plan) -> PortBlock:
        """A block of the allocator's own ground: at once, or by :meth:`_attempt`."""
        _searching.add(search)  # forks are watched since the ground was laid out
        if _forking:
            stand_still(search)
        try:
            process, middle = self._entries.names()
            middle = self._at + middle if self._at else middle
            hold = search.find(self._head, middle, label, tally)
            if hold is not None:
                block = self._block(
                    hold, search.taken_first, size, self._protocol, self._host, label, None, process
                )
                if heard():
                    _tell(block)
                return block
            request = self._request(size, None, None, _UNSET, label, None, None, None, plan=plan)
            request.reserved = search.reserved
            return self._attempt(request, None, search)
        except BaseException:
            search.abandon()
            raise
        finally:
            try:
                search.close()
            finally:  # also when a signal comes in between
                searched(search)

    def _attempt(
        self, request: Request, deadline: float | None, search: Search | None = None
    ) -> PortBlock:
        """One complete search for one block, registered when it returns.

        ``search`` may have been begun, for this request, by the caller.
        """
        if search is None:
            search = self._begin(request, request.size, request.size, 1)
        block: PortBlock | None = None
        try:
            while True:
                block = self._find(search, request, request.size, request.label)
                taken: set[int] | None = None
                if self._registry is None:
                    self._entries.claim((block,))
                else:
                    taken = self._claim([block], request, deadline)
                if not taken:
                    _count(1, request.size)
                    tally.add(PROBES, search.probed)
                    if heard():
                        emit("allocated", block)
                    return block
                block._release()
                search.put_back(block.first, len(block))
                self._leave_recorded(search, request, taken)
        except BaseException:
            if block is not None:
                block._release()
            tally.add(PROBES, search.probed)
            search.abandon()
            raise
        finally:
            try:
                search.close()
            finally:  # also when a signal comes in between
                searched(search)

    def _begin(self, request: Request, size: int, ports: int, blocks: int) -> Search:
        """A search that leaves out what is reserved or recorded; checked before it binds.

        ``ports`` in ``blocks`` are what the request still has to hold, this search included.
        """
        keep = 0
        if request.size > 1:
            keep = self._check_descriptors(request, ports, blocks)
        rng = request.rng
        search = Search(
            request.first,
            request.last,
            size,
            request.bits,
            request.address,
            request.starts,
            None if rng is None else rng.bit_generator.capsule,
            keep,
        )
        if request.cuts:
            request.reserved = sum(search.exclude(low, high) for low, high in request.cuts)
        if request.reserved and not search.viable():
            raise InvalidRequest(
                f"no {size} contiguous ports of {request.range} are left beside"
                f" net.ipv4.ip_local_reserved_ports and the ephemeral range"
                f" ({request.reserved} ports)."
                " Choose another range=, name the ports with reserve(), or pass"
                " include_reserved=True.",
                argument="range",
                value=request.range,
            )
        if request.recorded:
            for port in request.recorded:
                search.exclude(port, port)
        searching(search)
        return search

    def _check_descriptors(self, request: Request, ports: int, blocks: int) -> int:
        """Refuse what cannot be opened, before the first socket; how many more may be kept."""
        used, soft, hard = descriptor_usage()
        # an entry for each block, and the socket in hand
        needed = ports * (2 if request.protocol == "both" else 1) + blocks + 1
        if used + needed > soft:
            raise DescriptorLimit(
                f"{ports} ports ({request.protocol}) need {needed} descriptors, {used} are"
                f" open, and the limit is {soft} (hard limit {hard}). Raise it with `ulimit -n` or"
                " resource.setrlimit, or ask for fewer ports.",
                needed=needed,
                open=used,
                soft=soft,
                hard=hard,
                errno=errno.EMFILE,
            )
        return max(min(_KEEP, (soft - used - needed - _HEADROOM) // 2), 0)

    def _find(self, search: Search, request: Request, size: int, label: str) -> PortBlock:
        """Run the search until a block is held, or say why not."""
        waiting: set[int] | None = None
        while True:
            if request.rng is None:
                status = search.run()
            else:
                with request.rng.bit_generator.lock:
                    status = search.run()
            if status == FOUND:
                first = search.start
                return self._block(
                    search.take(),
                    first,
                    size,
                    request.protocol,
                    request.host,
                    label,
                    request.metadata,
                    self._entries.names()[0],
                )
            if status == EXHAUSTED:
                try:
                    from . import refusal  # 0.6 ms, when there is something to explain
                except OSError as exc:  # no descriptor left to read the module through
                    raise _failure(exc.errno or errno.EMFILE, 0, request.host, 1) from exc
                if waiting is None and request.bits & 1:  # TIME_WAIT is TCP's
                    waiting = refusal.only_time_wait(search, request)
                    for port in waiting:
                        search.allow_reuse(port)
                    if waiting:
                        search.retry()
                        continue
                raise refusal.refusal(search, request, size, waiting or ())
            port = search.error_port
            if status == errno.EACCES:
                start = ranges.unprivileged_start()
                if port < start:
                    low = search.exclude(request.first, min(start - 1, request.last))
                    request.denied = max(request.denied, low)
                    continue
            raise _failure(status, port, request.host, request.descriptors + 2)

    def _claim(
        self, blocks: Sequence[PortBlock], request: Request, deadline: float | None
    ) -> set[int]:
        """Record the held blocks, here and in the cluster; the ports of others that forbid it."""
        registry = self._registry
        if registry is not None:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            for block in blocks:  # before the claim: an interrupt right after it is a release, too
                block._registry = registry
            taken = registry.claim(blocks, search=(request.first, request.last), timeout=left)
            if taken:
                return set(taken)
        self._entries.claim(blocks)
        return set()

    @staticmethod
    def _leave_recorded(search: Search, request: Request, ports: set[int]) -> None:
        request.recorded |= ports
        for port in ports:
            search.exclude(port, port)

    @staticmethod
    def _look(
        ports: Any,
        states: object,
        bits: int,
        address: tuple[int, bytes] | None,
        first: int,
        last: int,
    ) -> int:
        """Probe ``ports`` of first..last into ``states``; 0 or an errno."""
        search = Search(first, last, 1, bits, address)
        searching(search)
        try:
            tally.add(PROBES, len(ports))
            return search.probe(ports, states)
        finally:
            try:
                search.close()
            finally:  # also when a signal comes in between
                searched(search)

    # --- several blocks ---

    def _attempt_many(
        self, request: Request, wanted: Mapping[str, int], deadline: float | None
    ) -> dict[str, PortBlock]:
        while True:
            blocks: dict[str, PortBlock] = {}
            try:
                try:
                    self._place(request, wanted, blocks)
                except PortsUnavailable as exc:
                    if len(wanted) == 1 or isinstance(exc, PrivilegedPort):
                        raise
                    self._release_all(blocks)
                    self._place_tightly(request, wanted, blocks, exc)
                taken = self._claim(list(blocks.values()), request, deadline)
                if not taken:
                    _count(len(blocks), request.size)
                    for name in wanted if heard() else ():
                        emit("allocated", blocks[name])
                    return {name: blocks[name] for name in wanted}
            except BaseException:
                self._release_all(blocks)
                raise
            self._release_all(blocks)
            request.recorded |= taken

    def _place(
        self, request: Request, wanted: Mapping[str, int], blocks: dict[str, PortBlock]
    ) -> None:
        """Hold one block after the other, the largest first, wherever each finds room."""
        ports = request.size
        for name, size in sorted(wanted.items(), key=lambda item: -item[1]):
            search = self._begin(request, size, ports, len(wanted) - len(blocks))
            ports -= size
            try:
                for block in blocks.values():
                    search.exclude(block.first, block.last)
                blocks[name] = self._find(search, request, size, self._name(request, name))
            except BaseException:
                search.abandon()
                raise
            finally:
                tally.add(PROBES, search.probed)
                try:
                    search.close()
                finally:  # also when a signal comes in between
                    searched(search)

    def _place_tightly(
        self,
        request: Request,
        wanted: Mapping[str, int],
        blocks: dict[str, PortBlock],
        refusal: PortsUnavailable,
    ) -> None:
        """Look at every port of the range, work out a placement, and hold just that."""
        from array import array

        from .packing import free_runs, place
        from .refusal import no_room

        for _ in range(_PLAN_ROUNDS):
            ports = array("H", range(request.first, request.last + 1))
            states = bytearray(len(ports))
            error = self._look(
                ports,
                memoryview(states).cast("b"),
                request.bits,
                request.address,
                request.first,
                request.last,
            )
            if error:
                raise _failure(error, 0, request.host, request.descriptors + 2)
            for low, high in request.cuts:
                for port in range(max(low, request.first), min(high, request.last) + 1):
                    states[port - request.first] = BUSY
            for port in request.recorded:
                if request.first <= port <= request.last:
                    states[port - request.first] = BUSY
            placement = place(free_runs(states), sorted(wanted.values(), reverse=True))
            if placement is None:
                refusal.longest_free = max((length for _, length in free_runs(states)), default=0)
                raise no_room(request, wanted, refusal)
            order = sorted(wanted.items(), key=lambda item: -item[1])
            left = request.size
            try:
                for (name, size), at in zip(order, placement, strict=True):
                    exact = self._exactly(request, request.first + at, size)
                    search = self._begin(exact, size, left, len(wanted) - len(blocks))
                    left -= size
                    try:
                        blocks[name] = self._find(search, exact, size, self._name(request, name))
                    except BaseException:
                        search.abandon()
                        raise
                    finally:
                        tally.add(PROBES, search.probed)
                        try:
                            search.close()
                        finally:  # also when a signal comes in between
                            searched(search)
                return
            except PortsUnavailable as exc:
                self._release_all(blocks)  # somebody was quicker: look anew
                refusal = exc
        raise no_room(request, wanted, refusal)

    @staticmethod
    def _exactly(request: Request, first: int, size: int) -> Request:
        exact = Request()
        vars(exact).update(vars(request))
        exact.first, exact.last, exact.size = first, first + size - 1, size
        exact.cuts, exact.exact = (), True
        return exact

    @staticmethod
    def _name(request: Request, name: str) -> str:
        return f"{request.label}-{name}" if request.label else name

    @staticmethod
    def _release_all(blocks: dict[str, PortBlock]) -> None:
        for block in blocks.values():
            block._release()
        blocks.clear()
