"""What a registry is: who records that a held block belongs to somebody.

The hold in the kernel is what keeps a port; a registry only records it, for people and for other
hosts. :mod:`fastports.host` implements this protocol without any service, :mod:`fastports.etcd`
with one. The policy (:mod:`fastports.allocator`) talks to registries through these names alone.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import Protocol

    class Recordable(Protocol):
        """What a registry may read of a block it is asked to record."""

        @property
        def first(self) -> int: ...
        @property
        def last(self) -> int: ...
        @property
        def protocol(self) -> str: ...
        @property
        def host(self) -> str | None: ...
        @property
        def label(self) -> str: ...
        @property
        def metadata(self) -> Mapping[str, object]: ...
        @property
        def owner(self) -> Owner: ...

    class Registry(Protocol):
        """A place where held blocks are recorded. All methods may be called from any thread."""

        def claim(
            self, blocks: Sequence[Recordable], *, search: tuple[int, int], timeout: float | None
        ) -> Collection[int]:
            """Record all of ``blocks`` for their owner, or none.

            Called with the ports already held by the caller.

            Parameters
            ----------
            blocks
                Disjoint blocks of one request.
            search
                First and last port of the range the caller would search next, inclusive.
            timeout
                Seconds this call may take; None leaves it to the registry's own limits.

            Returns
            -------
            Collection[int]
                Empty when everything is recorded. Otherwise nothing is, and these are all ports of
                ``search`` and of ``blocks`` that other owners have recorded, so that the next
                search can go without them.

            Raises
            ------
            RegistryError
                With ``outcome == "not-applied"`` where nothing can have been recorded.
            """
            ...

        def release(self, blocks: Sequence[Recordable]) -> None:
            """Remove what ``blocks`` recorded under their owner's token; never anybody else's.

            Idempotent. Blocks that were never claimed are passed over.
            """
            ...

        def release_later(self, blocks: Sequence[Recordable]) -> None:
            """As ``release``, but for finalizers, which run inside any code of the process.

            Takes no lock that is not re-entrant, waits for nobody, raises nothing.
            """
            ...

        def state(self, block: Recordable) -> str:
            """How the record of a held block stands.

            Returns
            -------
            str
                ``"held"``; ``"degraded"``: there is no valid record at the moment;
                ``"contested"``: the record names another owner.
            """
            ...

        def entries(self) -> Iterator[Entry]:
            """What is recorded now, by everybody the registry can see, in port order."""
            ...

        def close(self) -> None:
            """Give back the registry's own connections, threads and leases. Idempotent."""
            ...


class Owner:
    """Who owns a block: one token for each block, and the process that made it.

    Attributes
    ----------
    token
        128 random bits as 32 hexadecimal digits.
    pid
        Process id, in the owner's pid namespace.
    start
        Start time of that process in clock ticks since boot (field 22 of ``/proc/PID/stat``,
        proc(5)); with the pid it names one process even when pids are used again.
    """

    __slots__ = ("_token", "pid", "start")

    def __init__(self, pid: int, start: int, token: str | None = None) -> None:
        self.pid: int = pid
        self.start: int = start
        self._token = token

    @property
    def token(self) -> str:
        token = self._token
        if token is None:  # drawn when first asked for: a block without a cluster needs none
            from os import urandom

            token = self._token = urandom(16).hex()
        return token

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Owner):
            return NotImplemented
        return (self.pid, self.start, self.token) == (other.pid, other.start, other.token)

    def __hash__(self) -> int:
        return hash((self.pid, self.start))

    def __repr__(self) -> str:
        return f"Owner(pid={self.pid}, start={self.start})"


class Entry:
    """One block as a registry shows it. What another process wrote is not to be trusted blindly.

    Attributes
    ----------
    first, last
        The block's ports, inclusive.
    protocol
        ``"tcp"``, ``"udp"`` or ``"both"``.
    host
        The address held, None for the wildcard.
    pid, start
        The owner as it named itself.
    label
        As given to ``allocate``, possibly cut to fit.
    age
        Seconds since the block was made.
    alive
        True when a process with this pid *and* start time runs here, False when it certainly does
        not, None when this cannot be seen from here (another pid namespace, another host).
    extra
        What only some registries know (metadata, host name, key).
    """

    __slots__ = (
        "age", "alive", "extra", "first", "host", "label", "last", "pid", "protocol", "start"
    )  # fmt: skip

    def __init__(
        self,
        first: int,
        last: int,
        *,
        protocol: str,
        host: str | None,
        pid: int,
        start: int,
        label: str,
        age: float,
        alive: bool | None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        self.first: int = first
        self.last: int = last
        self.protocol: str = protocol
        self.host: str | None = host
        self.pid: int = pid
        self.start: int = start
        self.label: str = label
        self.age: float = age
        self.alive: bool | None = alive
        self.extra: Mapping[str, object] = {} if extra is None else extra

    @property
    def ports(self) -> range:
        return range(self.first, self.last + 1)

    def as_dict(self) -> dict[str, object]:
        """The fields by name, ready for JSON."""
        return {name: getattr(self, name) for name in sorted(self.__slots__)}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entry):
            return NotImplemented
        return self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((self.first, self.last, self.protocol, self.pid, self.start))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items())
        return f"Entry({fields})"
