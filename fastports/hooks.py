"""Hear of what fastports does, as plain calls.

>>> import fastports
>>> from fastports import hooks
>>> with hooks.subscribe(lambda event: print(event.name, event.facts["label"]), "allocated"):
...     fastports.allocate(1, label="decode-0").release()
allocated decode-0

The events are the ones that are logged, under the same names and with the same facts. A hook is
called in the thread in which the thing happens, right after it (those of a cluster registry on a
thread of the registry), and what it takes is added to that call: it had better be quick. What it
raises is logged to ``fastports.hooks`` and stops there. What fastports does inside a hook is logged
and counted, but calls no hooks.
"""

from __future__ import annotations

import os
import time
from _thread import _local, allocate_lock  # threading costs 1 ms at import

from . import events
from .errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["NAMES", "Event", "Subscription", "subscribe"]

#: Every event there is.
NAMES = tuple(events.EVENTS)


class Event:
    """One thing that happened.

    Attributes
    ----------
    name
        One of :data:`NAMES`.
    level
        As in ``logging``: 10 (DEBUG), 20 (INFO) or 30 (WARNING).
    time
        Seconds since the epoch.
    facts
        By name, as in the log's records; not to be changed, other hooks get the same.
    """

    __slots__ = ("facts", "level", "name", "time")

    def __init__(self, name: str, facts: Mapping[str, object]) -> None:
        self.name: str = name
        self.level: int = events.EVENTS[name][1]
        self.time: float = time.time()
        self.facts: Mapping[str, object] = facts

    @property
    def message(self) -> str:
        """The same in words, as it is logged."""
        return events.EVENTS[self.name][2] % self.facts

    def __repr__(self) -> str:
        return f"<Event {self.name}: {self.message}>"


class Subscription:
    """What :func:`subscribe` returns; ends with :meth:`cancel`, or with its ``with`` statement."""

    __slots__ = ("_callback", "_names")

    def __init__(self, callback: Callable[[Event], object], names: frozenset[str]) -> None:
        self._callback = callback
        self._names = names

    def cancel(self) -> None:
        """Have it called no more. Idempotent; a call under way in another thread goes on."""
        _change(lambda all_: tuple(each for each in all_ if each is not self))

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return f"<Subscription of {self._callback!r} to {', '.join(sorted(self._names))}>"


# Who is to be called: replaced as a whole, so that a call goes through one state of it. Global
# because what it is about is the process.
_subscriptions: tuple[Subscription, ...] = ()
_changing = allocate_lock()
_inside = _local()
_watching_forks: list[bool] = []


def subscribe(callback: Callable[[Event], object], *names: str) -> Subscription:
    """Have ``callback(event)`` called for events of these names, for every event if none is given.

    Children of ``os.fork()`` inherit it, and call it for what they do themselves.

    Parameters
    ----------
    callback
        Called with an :class:`Event`; what it returns is ignored, what it raises is logged.
    *names
        Some of :data:`NAMES`.

    Returns
    -------
    Subscription
        Keep it to cancel; losing it changes nothing.

    Raises
    ------
    InvalidRequest
        For a name that does not exist, or a callback that cannot be called.
    """
    if not callable(callback):
        raise InvalidRequest(
            f"a hook is called with an event, and {callback!r} cannot be called. Pass a function.",
            argument="callback",
            value=callback,
        )
    for name in names:
        if name not in events.EVENTS:
            raise InvalidRequest(
                f"there is no event {name!r}. Pass some of {', '.join(NAMES)}.",
                argument="names",
                value=name,
            )
    made = Subscription(callback, frozenset(names or NAMES))
    _change(lambda all_: (*all_, made))
    return made


def _change(
    change: Callable[[tuple[Subscription, ...]], tuple[Subscription, ...]],
) -> None:
    global _subscriptions
    if not _watching_forks:
        _watching_forks.append(True)
        os.register_at_fork(after_in_child=_renew)
    with _changing:
        _subscriptions = change(_subscriptions)
        events.call(_call if _subscriptions else None)


def _renew() -> None:
    """In a forked child: the thread that had the lock may not exist here."""
    global _changing
    _changing = allocate_lock()


def _call(name: str, facts: dict[str, object]) -> None:
    """What :mod:`fastports.events` calls."""
    if getattr(_inside, "hook", False):
        return
    event = Event(name, facts)
    _inside.hook = True
    try:
        for subscription in _subscriptions:
            if name not in subscription._names:
                continue
            try:
                subscription._callback(event)
            except Exception:  # the caller's code: no port is lost for its sake
                from logging import getLogger  # 15 ms, where nobody loaded it

                getLogger("fastports.hooks").exception(
                    "the hook %r failed on %r", subscription._callback, event
                )
    finally:
        _inside.hook = False
