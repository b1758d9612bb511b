"""What happens, told once: to the counts, to ``logging`` where it is loaded, and to hooks.

Whoever changes a state calls :func:`emit`, on the hot path after asking :func:`heard`. What each
event is called, where it is logged, at which level and in which words stands in :data:`EVENTS`.
"""

from __future__ import annotations

import os
import sys

from ._core import Ear, Tally
from .errors import (
    AllocationTimeout,
    BindDenied,
    DescriptorLimit,
    FastportsError,
    InvalidRequest,
    PortsUnavailable,
    PrivilegedPort,
    RegistryError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Subject(Protocol):
        """The block that an event is about."""

        first: int
        last: int
        host: str | None
        protocol: str
        label: str


DEBUG, INFO, WARNING = 10, 20, 30  # as in logging

#: name: (logger below ``fastports.``, level, text for ``%`` with the facts). What is raised to the
#: caller as well is INFO: whoever catches it decides whether it is trouble.
EVENTS = {
    "allocated": ("ports", DEBUG, "%(ports)s/%(protocol)s held"),
    "released": ("ports", DEBUG, "%(ports)s/%(protocol)s released"),
    "sent": ("ports", DEBUG, "%(ports)s/%(protocol)s given to another process"),
    "received": ("ports", DEBUG, "%(ports)s/%(protocol)s taken over from another process"),
    "refused": ("ports", INFO, "refused: %(why)s"),
    "door_opened": ("ports", DEBUG, "%(ports)s/%(protocol)s: door opened"),
    "door_closed": ("ports", DEBUG, "%(ports)s/%(protocol)s: door closed"),
    "holds_closed": ("ports", DEBUG, "%(ports)s/%(protocol)s: holds closed, markers stand"),
    "range_doubtful": ("ports", WARNING, "%(why)s"),
    "mode_chosen": ("handoff", DEBUG, "%(ports)s/%(protocol)s: handed over in mode %(mode)r"),
    "mode_fallback": ("handoff", WARNING, "ports are handed over in mode %(mode)r (%(why)s)"),
    "child_started": (
        "handoff", INFO, "%(program)s (pid %(pid)d) started on %(ports)s/%(protocol)s",
    ),
    "child_listening": ("handoff", INFO, "pid %(pid)d listens after %(seconds).3f s"),
    "child_exited": ("handoff", INFO, "pid %(pid)d ended with %(returncode)d"),
    "handoff_failed": ("handoff", INFO, "hand-off to pid %(pid)d failed: %(why)s"),
    "steal_seen": (
        "handoff", WARNING, "somebody else listens on port %(port)d (socket inode %(inode)d)",
    ),
    "etcd_fault": ("etcd", DEBUG, "%(endpoint)s: %(call)s failed: %(why)s"),
    "etcd_silent": ("etcd", WARNING, "etcd does not answer; %(blocks)d blocks stay held"),
    "etcd_back": ("etcd", INFO, "etcd answers again"),
    "lease_granted": ("etcd", INFO, "lease %(lease)x granted for %(ttl)g s"),
    "lease_lost": ("etcd", WARNING, "lease %(lease)x lost (%(reason)s); it is asked for again"),
    "record_lost": ("etcd", INFO, "%(ports)s/%(protocol)s held, not recorded: %(reason)s"),
    "record_restored": ("etcd", INFO, "%(ports)s/%(protocol)s recorded again"),
    "record_contested": (
        "etcd", WARNING, "%(ports)s/%(protocol)s held here, recorded for another: %(reason)s",
    ),
}  # fmt: skip

# --- counts ---------------------------------------------------------------------------------------

REFUSALS = (
    "full", "listening", "connected", "bound", "time_wait", "marked", "busy", "privileged",
    "timeout", "denied", "descriptors", "invalid", "registry", "other",
)  # fmt: skip
MODES = ("broker", "bind-door", "door", "fd", "close")
#: Upper bounds, inclusive, in seconds; what is above the last one has a bucket of its own.
HANDOFF_BOUNDS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

# The first three are counted in the core, too: Search.find knows where they are.
ALLOCATIONS, PORTS, PROBES, STEALS, LISTENING, EXITED, FAILED = range(7)
ETCD_CALLS, ETCD_MICROSECONDS, ETCD_FAULTS, LEASES_LOST, CONTESTED = range(7, 12)
REFUSED = 12
STARTED = REFUSED + len(REFUSALS)
HANDOFF_MICROSECONDS = STARTED + len(MODES)
HANDOFFS = HANDOFF_MICROSECONDS + 1

# Global because it is the process that is counted.
tally = Tally()
_watching_forks: list[bool] = []


def watch_forks() -> None:
    """Have children of os.fork() count from zero."""
    if not _watching_forks:
        _watching_forks.append(True)
        os.register_at_fork(after_in_child=tally.clear)


def count(slot: int, amount: int = 1) -> None:
    """Add to a number, off the hot path."""
    watch_forks()
    tally.add(slot, amount)


# --- listeners ------------------------------------------------------------------------------------

_hook: Callable[[str, dict[str, object]], None] | None = None

_modules = sys.modules

# Looks where the logger of single blocks keeps its answers, which is what makes asking cheap. What
# it does not find there is asked for properly, in wanted().
_ear = Ear(_modules, "logging", DEBUG)

#: Whether somebody may want to hear of single blocks; takes some 25 ns.
heard = _ear.heard

# What finalizers have to tell. They run inside any code, which may hold any lock: somebody else's
# too, of a log handler or of a hook. The next event takes it along.
_postponed: list[tuple[str, dict[str, object]]] = []


def call(listener: Callable[[str, dict[str, object]], None] | None) -> None:
    """Have this called with the name and the facts of each event; for ``hooks`` alone."""
    global _hook
    _hook = listener
    _ear.hooked = listener is not None


def wanted(name: str) -> bool:
    """Whether anybody wants to hear of this event."""
    if _hook is not None:
        return True
    logger, level, _ = EVENTS[name]
    if level < WARNING and "logging" not in _modules:
        return False
    from logging import getLogger  # 15 ms, where nobody loaded it and there is trouble

    log = getLogger(f"fastports.{logger}")
    if _ear.cache is None and logger == "ports":
        _ear.cache = getattr(log, "_cache", {})
    return log.isEnabledFor(level)


def emit(name: str, block: Subject | None = None, /, **facts: object) -> None:
    """Tell that something happened. Raises nothing, and below WARNING imports nothing."""
    while _postponed:
        try:
            before, its = _postponed.pop(0)
        except IndexError:  # another thread was quicker
            break
        _deliver(before, its)
    if wanted(name):
        _deliver(name, facts if block is None else {**about(block), **facts})


def emit_later(name: str, block: Subject) -> None:
    """Tell it with the next event; for finalizers."""
    _postponed.append((name, about(block)))


def _deliver(name: str, facts: dict[str, object]) -> None:
    listener = _hook
    if listener is not None:
        listener(name, facts)
    logger, level, text = EVENTS[name]
    if level >= WARNING or "logging" in _modules:
        from logging import getLogger

        log = getLogger(f"fastports.{logger}")
        if log.isEnabledFor(level):
            log.log(level, text, facts, extra={"event": name, **facts})


def about(block: Subject) -> dict[str, object]:
    """The facts of a block."""
    first, last = block.first, block.last
    return {
        "ports": f"{first}-{last}" if last > first else f"{first}",
        "first": first,
        "last": last,
        "protocol": block.protocol,
        "host": block.host,
        "label": block.label,
    }


# --- refusals and hand-offs -----------------------------------------------------------------------

_BY_CLASS = (
    (PrivilegedPort, "privileged"),
    (AllocationTimeout, "timeout"),
    (BindDenied, "denied"),
    (DescriptorLimit, "descriptors"),
    (InvalidRequest, "invalid"),
    (RegistryError, "registry"),
)
_FACTS = ("range", "wanted", "protocol", "host", "probed", "busy", "argument", "port", "endpoint")


def cause_of(exc: FastportsError) -> str:
    """One of :data:`REFUSALS`."""
    for cls, cause in _BY_CLASS:
        if isinstance(exc, cls):
            return cause
    if isinstance(exc, PortsUnavailable):
        cause = exc.cause or "full"
        return cause if cause in REFUSALS else "busy"
    return "other"


def refused(exc: FastportsError) -> None:
    """An allocation ends in an error."""
    cause = cause_of(exc)
    count(REFUSED + REFUSALS.index(cause))
    facts = {name: getattr(exc, name) for name in _FACTS if hasattr(exc, name)}
    emit("refused", cause=cause, error=type(exc).__name__, why=str(exc), **facts)


def handed_over(seconds: float) -> None:
    """A program listens, this long after its start."""
    bucket = 0
    while bucket < len(HANDOFF_BOUNDS) and seconds > HANDOFF_BOUNDS[bucket]:
        bucket += 1
    count(HANDOFFS + bucket)
    count(HANDOFF_MICROSECONDS, round(seconds * 1e6))
    count(LISTENING)
