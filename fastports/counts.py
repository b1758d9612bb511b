"""``stats()``: what this process did since it began, in numbers."""

from __future__ import annotations

import os
import time

from . import events
from .block import held
from .events import HANDOFF_BOUNDS, MODES, REFUSALS, tally

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

__all__ = ["Histogram", "Stats", "stats"]


class _Fixed:
    """Attributes are set once."""

    __slots__: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a snapshot does not change: {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a snapshot does not change: {name!r} cannot be deleted")

    def as_dict(self) -> dict[str, object]:
        """The attributes by name, ready for JSON."""
        found: dict[str, object] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, _Fixed):
                value = value.as_dict()
            elif not isinstance(value, (int, float)):
                value = dict(value) if hasattr(value, "items") else list(value)
            found[name] = value
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), tuple(getattr(self, name) for name in self.__slots__))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.as_dict() == other.as_dict()

    __hash__: None = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({fields})"


def _rebuild(cls: type[_Fixed], values: tuple[object, ...]) -> _Fixed:
    made = cls.__new__(cls)
    for name, value in zip(cls.__slots__, values, strict=True):
        object.__setattr__(made, name, value)
    return made


class Histogram(_Fixed):
    """How long something took, by buckets.

    Attributes
    ----------
    bounds
        Upper bounds of the buckets in seconds, inclusive, ascending.
    counts
        How many fell into each bucket; one more than ``bounds``, for what is above the last.
    count
        How many there were.
    sum
        Seconds of all of them together.
    """

    __slots__ = ("bounds", "count", "counts", "sum")

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    count: int
    sum: float


class Stats(_Fixed):
    """A snapshot of :func:`stats`; it does not change, and can be pickled and compared.

    Attributes
    ----------
    pid
        The process it is about.
    taken
        When, in seconds since the epoch.
    allocations
        Blocks given out by ``allocate``, ``reserve`` and ``allocate_many``, of every allocator of
        the process, the awaitable ones too.
    ports
        Ports in these blocks.
    probes
        Ports that were tried, by searches and by ``probe``.
    held, held_ports
        Blocks and ports held at this moment.
    refusals
        How many calls ended in an error, by cause: ``full`` (no block of the range fits);
        ``listening``, ``connected``, ``bound``, ``time_wait``, ``marked`` and ``busy`` (what was on
        a single port); ``privileged``, ``timeout``, ``denied``, ``descriptors``, ``invalid``,
        ``registry``, ``other``.
    children
        Programs started by ``spawn``, by hand-off mode.
    listening, exited, failed
        How many of them came up on their ports, ended, did not come up.
    steals
        How often somebody else was found listening on a port that was handed over.
    handoff
        Seconds from the start of a program until it listened.
    etcd_calls, etcd_faults, etcd_seconds
        Round trips to etcd, those that failed, and the time all of them took.
    leases_lost, contested
        Leases that etcd took back; records that it had under another owner.
    """

    __slots__ = (
        "allocations",
        "children",
        "contested",
        "etcd_calls",
        "etcd_faults",
        "etcd_seconds",
        "exited",
        "failed",
        "handoff",
        "held",
        "held_ports",
        "leases_lost",
        "listening",
        "pid",
        "ports",
        "probes",
        "refusals",
        "steals",
        "taken",
    )  # fmt: skip

    pid: int
    taken: float
    allocations: int
    ports: int
    probes: int
    held: int
    held_ports: int
    refusals: Mapping[str, int]
    children: Mapping[str, int]
    listening: int
    exited: int
    failed: int
    steals: int
    handoff: Histogram
    etcd_calls: int
    etcd_faults: int
    etcd_seconds: float
    leases_lost: int
    contested: int


def _made(cls: type[_Fixed], facts: dict[str, object]) -> _Fixed:
    return _rebuild(cls, tuple(facts[name] for name in cls.__slots__))


def stats() -> Stats:
    """What this process did so far. Takes microseconds, and may be called from any thread.

    The numbers belong to one process: a child of ``os.fork()`` begins at zero. Each is exact; read
    while other threads are at work, two of them need not be of the same instant.

    Returns
    -------
    Stats
    """
    numbers = tally.read()
    blocks = held()
    counts = tuple(numbers[events.HANDOFFS : events.HANDOFFS + len(HANDOFF_BOUNDS) + 1])
    handoff = {
        "bounds": HANDOFF_BOUNDS,
        "counts": counts,
        "count": sum(counts),
        "sum": numbers[events.HANDOFF_MICROSECONDS] / 1e6,
    }
    made = _made(
        Stats,
        {
            "pid": os.getpid(),
            "taken": time.time(),
            "allocations": numbers[events.ALLOCATIONS],
            "ports": numbers[events.PORTS],
            "probes": numbers[events.PROBES],
            "held": len(blocks),
            "held_ports": sum(blocks),
            "refusals": _by_name(REFUSALS, numbers[events.REFUSED :]),
            "children": _by_name(MODES, numbers[events.STARTED :]),
            "listening": numbers[events.LISTENING],
            "exited": numbers[events.EXITED],
            "failed": numbers[events.FAILED],
            "steals": numbers[events.STEALS],
            "handoff": _made(Histogram, handoff),
            "etcd_calls": numbers[events.ETCD_CALLS],
            "etcd_faults": numbers[events.ETCD_FAULTS],
            "etcd_seconds": numbers[events.ETCD_MICROSECONDS] / 1e6,
            "leases_lost": numbers[events.LEASES_LOST],
            "contested": numbers[events.CONTESTED],
        },
    )
    assert isinstance(made, Stats)
    return made


class _Names(dict[str, int]):
    """A mapping that does not change; unlike a ``MappingProxyType`` it can be pickled."""

    def _no(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a snapshot does not change")

    __setitem__ = __delitem__ = update = setdefault = pop = popitem = clear = __ior__ = _no  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[object, ...]:
        return _Names, (dict(self),)


def _by_name(names: tuple[str, ...], numbers: list[int]) -> _Names:
    return _Names(zip(names, numbers, strict=False))
