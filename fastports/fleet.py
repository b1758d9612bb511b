"""Programs that are kept running behind their ports, step by step: nothing here waits.

A *replica* is a program on a block of its own. Its life is a generator that says how long it has
nothing to do; who drives it waits for that time, or for a child to end, as it sees fit: a thread in
:mod:`fastports.supervisor`, the wait for signals in ``fastports run``.
"""

from __future__ import annotations

import os
import time

from .child import _jitter
from .errors import FastportsError, HandoffError, InvalidRequest
from .handoff import spawn
from .ranges import spans

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, TypeAlias

    from .block import PortBlock
    from .command import Text
    from .handoff import Child

    Argv: TypeAlias = Sequence[Text] | Callable[["Replica"], Sequence[Text]]

__all__ = ["RESTARTS", "UP", "Change", "Fleet", "Plan", "Replica"]

#: When a program that ended is started again.
RESTARTS = ("always", "on-failure", "no")

#: The states in which a replica does its work.
UP = ("listening", "running")
#: Those in which it stays until somebody asks for a restart.
_DOWN = ("ended", "failed")

_TERM = 15
_TICK = 0.001
_LOOK = 0.05  # between two looks at a child for whose end there is no descriptor to wait on
_PLACEHOLDER = "{replica}"


class Change:
    """A replica's change of state.

    Attributes
    ----------
    replica
        Its number, from 0.
    label
        Of its block.
    name
        Of its program, and its number where there are several replicas: what messages call it.
    ports, protocol
        The ports that the program has to listen on, ascending.
    state
        ``"starting"``; ``"listening"`` (``"running"`` where nobody looks); ``"waiting"`` (it ended
        and is started again after ``delay``); ``"stopping"``; ``"ended"``; ``"failed"`` (given up).
    pid
        Of the program, None if it could not be started.
    returncode
        As ``subprocess.Popen`` has it, None while the program runs.
    seconds
        From its start to this change.
    delay
        Seconds until the next start; None unless it waits for one.
    restarts
        How often it was started again by itself, in all.
    reason
        Why, in words, where a program did not come up or was given up; else empty.
    time
        Seconds since the epoch.
    """

    __slots__ = (
        "delay", "label", "name", "pid", "ports", "protocol", "reason", "replica", "restarts",
        "returncode", "seconds", "state", "time",
    )  # fmt: skip

    def __init__(
        self,
        replica: int,
        state: str,
        *,
        label: str,
        name: str,
        ports: Sequence[int],
        protocol: str,
        pid: int | None,
        returncode: int | None,
        seconds: float,
        delay: float | None,
        restarts: int,
        reason: str,
    ) -> None:
        self.replica: int = replica
        self.state: str = state
        self.label: str = label
        self.name: str = name
        self.ports: list[int] = list(ports)
        self.protocol: str = protocol
        self.pid: int | None = pid
        self.returncode: int | None = returncode
        self.seconds: float = seconds
        self.delay: float | None = delay
        self.restarts: int = restarts
        self.reason: str = reason
        self.time: float = time.time()

    def __repr__(self) -> str:
        return f"<Change {self}>"

    def __str__(self) -> str:
        """A sentence for a log."""
        who = self.name if self.pid is None else f"{self.name} (pid {self.pid})"
        kind = {"tcp": "", "udp": "udp ", "both": "tcp and udp "}[self.protocol]
        ports = f"{kind}port{'s' if len(self.ports) > 1 else ''} {spans(self.ports)}"
        if self.state == "starting":
            return f"{who} starts on {ports}."
        if self.state == "running":
            return f"{who} has {ports}."
        if self.state == "listening":
            return f"{who} listens on {ports} after {self.seconds:.2f} s."
        if self.state == "stopping":
            return f"{who} is being ended."
        text = f"{who} {self._how()}"
        text += f": {self.reason.removesuffix('.')}." if self.reason else "."
        if self.state == "waiting":
            text += f" It is started again in {self.delay or 0:.2f} s."
        return text

    def _how(self) -> str:
        code = self.returncode
        if code is None:
            return "could not be started"
        how = f"ended with status {code}" if code >= 0 else f"was ended by signal {-code}"
        return f"{how} after {self.seconds:.2f} s"


class Plan:
    """What is asked of every replica; checked here.

    Attributes
    ----------
    argv, env
        The program; ``{replica}`` is filled in here, the rest by :func:`fastports.handoff.spawn`.
    options
        The other options of ``spawn``.
    restart, max_restarts, backoff, max_backoff, stable_after
        When, how often and how soon it is started again.
    """

    def __init__(
        self,
        argv: Argv,
        *,
        env: Mapping[str, str] | Mapping[bytes, bytes] | None,
        restart: str,
        max_restarts: int | None,
        backoff: float,
        max_backoff: float,
        stable_after: float,
        wait: str | None,
        timeout: float | None,
        grace: float,
        options: Mapping[str, Any],
    ) -> None:
        from .command import number

        if restart not in RESTARTS:
            raise InvalidRequest(
                f"restart={restart!r} is none of {', '.join(map(repr, RESTARTS))}. Pass one of"
                " them.",
                argument="restart",
                value=restart,
            )
        if max_restarts is not None and (
            isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0
        ):
            raise InvalidRequest(
                f"max_restarts={max_restarts!r} is no count. Pass a whole number, 0 or more, or"
                " None for no limit.",
                argument="max_restarts",
                value=max_restarts,
            )
        if wait not in ("listen", None):
            raise InvalidRequest(
                f"wait={wait!r}: a replica is waited for with 'listen', or not with None. Pass one"
                " of these; the ports are those that argv names.",
                argument="wait",
                value=wait,
            )
        for name in ("stdin", "stdout", "stderr"):
            if options.get(name) == -1:
                raise InvalidRequest(
                    f"{name}=PIPE has nobody at its other end. Pass a file, DEVNULL or None.",
                    argument=name,
                    value=options[name],
                )
        self.argv = argv
        self.env = env
        self.restart = restart
        self.max_restarts = max_restarts
        self.backoff: float = number(backoff, "backoff")
        self.max_backoff: float = number(max_backoff, "max_backoff")
        self.stable_after: float = number(stable_after, "stable_after")
        self.wait = wait
        self.timeout: float | None = None if timeout is None else number(timeout, "timeout")
        self.grace: float = number(grace, "grace")
        self.options: dict[str, Any] = dict(options)

    def start(self, replica: Replica) -> Child:
        """Start the program once."""
        argv = self.argv(replica) if callable(self.argv) else self.argv
        if not isinstance(argv, (str, bytes, os.PathLike)):  # spawn says what is wrong with those
            argv = [_fill(item, replica.number) for item in argv]
        env: Any = self.env
        if env is not None:
            env = {name: _fill(value, replica.number) for name, value in env.items()}
        return spawn(replica.block, argv, env=env, wait=None, grace=self.grace, **self.options)


def _why(exc: Exception) -> str:
    """Why it did not come up; that it ended, and how, is said already."""
    if not isinstance(exc, HandoffError) or exc.returncode is None or exc.inode is not None:
        return str(exc)
    text = f"it did not listen on port {exc.port}."
    if exc.mode == "door":
        text += " If it found its port in use, pass handoff='close'."
    return text


def _fill(item: Any, number: int) -> Any:
    if isinstance(item, bytes):
        return item.replace(_PLACEHOLDER.encode(), b"%d" % number)
    if isinstance(item, str):
        return item.replace(_PLACEHOLDER, str(number))
    return item


class Replica:
    """A program on a block of its own, started again when it ends.

    Attributes
    ----------
    number
        From 0.
    block
        What it has; held for as long as the supervisor lives, whether the program runs or not.
    state
        See :class:`Change`.
    child
        The program that runs, or ran last; None before the first start.
    returncode
        Of the program that ended last; None while one runs.
    restarts
        How often it was started again by itself.
    last
        The change that led to this state; None before the first.
    """

    def __init__(
        self, number: int, block: PortBlock, plan: Plan, tell: Callable[[Change], None], many: bool
    ) -> None:
        self.number = number
        self.block = block
        self.state = "new"
        self.child: Child | None = None
        self.returncode: int | None = None
        self.restarts = 0
        self.last: Change | None = None
        self._plan = plan
        self._tell = tell
        self._many = many
        self._life = self._live()
        self._row = 0  # restarts since it last ran for long enough
        self._asked = ""  # "stop" or "restart": what the life has not heeded yet
        self._closing = False
        self._grace = plan.grace
        self._began = 0.0
        self._up_since = 0.0  # 0 until it is up
        self._problem = ""  # why it did not come up
        self._evicted = False  # it was ended for that
        self._runs = False  # as far as its life has seen; others may have reaped it since
        self._name = ""
        self._ports: Sequence[int] = block.ports
        self.due: float | None = 0.0

    @property
    def label(self) -> str:
        """Of its block."""
        return self.block.label

    @property
    def ports(self) -> list[int]:
        """The ports it has to listen on, ascending; those of its block before the first start."""
        return list(self._ports)

    @property
    def pid(self) -> int | None:
        """Of the program that runs; None while none does."""
        child = self.child
        return None if child is None or self.returncode is not None else child.pid

    @property
    def status(self) -> int | None:
        """The return code, or 1 of a program that was ended because it did not come up."""
        if self._evicted or (self.state == "failed" and self.returncode is None):
            return 1
        return self.returncode

    @property
    def is_up(self) -> bool:
        return self.state in UP and not self._asked

    @property
    def is_down(self) -> bool:
        """Whether it stays down, unless somebody asks for a restart."""
        return self.state in _DOWN and not self._asked

    @property
    def over(self) -> bool:
        """Whether its life has ended: it was stopped."""
        return self.due is None and self._closing

    @property
    def reason(self) -> str:
        """Why it did not come up or was given up, if it was; else empty."""
        return self.last.reason if self.last is not None else ""

    def __repr__(self) -> str:
        return f"<Replica {self.number} on {self.block!r} {self.state} pid={self.pid}>"

    # --- what the fleet asks ---

    def ask(self, what: str, grace: float | None = None) -> None:
        """``"stop"`` for good, or ``"restart"``."""
        if what == "stop":
            self._closing = True
            if grace is not None:
                self._grace = min(self._grace, grace) if self._asked == "stop" else grace
        elif self._closing:
            return
        self._asked = what
        self.due = 0.0

    @property
    def ready(self) -> bool:
        """Whether :meth:`step` has something to do."""
        if self.due is not None and self.due <= time.monotonic():
            return True
        return self.descriptor >= 0 and self.child is not None and self.child._process.ended(0)

    def step(self) -> None:
        """Do what is to be done now, and note when to look again."""
        pause = next(self._life, None)
        if pause is None and self.pid is not None and self.descriptor < 0:
            pause = _LOOK
        self.due = None if pause is None else time.monotonic() + pause

    @property
    def descriptor(self) -> int:
        """Readable once the program has ended; -1 where there is none to wait for."""
        child = self.child
        if child is None or (child.returncode is not None and not self._runs):
            return -1
        return child.pidfd

    def close(self) -> None:
        """End the program at once, and its life wherever it stands."""
        self._closing = True
        self._life.close()  # type: ignore[attr-defined]
        self.due = None
        if self.child is not None:
            self.child.stop(0)

    # --- its life ---

    def _live(self) -> Iterator[float | None]:
        """What it does; yields for how long it has nothing to do, None for until something ends."""
        first = True
        while not self._closing:
            if self._asked:
                self._asked, self._row = "", 0
            yield from self._once(first)
            first = False
            if self._closing:
                break
            if not self._asked:
                yield from self._after()
        if self.state not in _DOWN:
            self._set("ended")
        self._asked = ""

    def _once(self, first: bool) -> Iterator[float | None]:
        """One program from its start to its end."""
        self._began = time.monotonic()
        self._up_since = 0.0
        self._problem = ""
        self._evicted = False
        try:
            child = self._plan.start(self)
        except (FastportsError, OSError) as exc:
            if first:
                raise
            self._problem = str(exc)
            self.child = self.returncode = None
            return
        self.child = child
        self.returncode = None
        self._ports = child.ports
        self._name = self._named(child.args[0])
        self._runs = True
        self._set("starting")
        if self._plan.wait is None:
            self._set("running")
        else:
            yield from self._until_up(child)
        if not self._problem:
            while not self._asked and child.poll() is None:
                yield None
        self._runs = False
        if self._asked and child.poll() is None:
            self._set("stopping")
        yield from self._end(child)
        self.returncode = child.returncode

    def _until_up(self, child: Child) -> Iterator[float | None]:
        limit = self._plan.timeout
        looks = child._listening(None if limit is None else time.monotonic() + limit)
        try:
            for pause in looks:
                yield pause
                if self._asked:
                    return
            self._set("listening")
        except (FastportsError, OSError) as exc:
            self._problem = _why(exc)
        finally:
            looks.close()  # type: ignore[attr-defined]

    def _end(self, child: Child) -> Iterator[float | None]:
        """End the program and whatever it left behind: TERM, a grace, KILL."""
        self._evicted = bool(self._problem) and child.poll() is None
        if child._anybody():
            child._signal_family(_TERM)
            since = before = time.monotonic()
            while before < since + self._grace and child._anybody():
                # while the program itself is there its end wakes us; then /proc has to be read
                pause = _TICK if child.poll() is not None else _LOOK
                yield max(pause, 4 * (time.monotonic() - before)) * _jitter()
                before = time.monotonic()
        child.stop(0)

    def _after(self) -> Iterator[float | None]:
        """It ended by itself: start it again after a pause, or not."""
        plan = self._plan
        good = self.returncode == 0
        if self._up_since and time.monotonic() - self._up_since >= plan.stable_after:
            self._row = 0
        if plan.restart == "no" or (plan.restart == "on-failure" and good):
            self._set("failed" if self._problem and not good else "ended", reason=self._problem)
        elif plan.max_restarts is not None and self._row >= plan.max_restarts:
            self._set("failed", reason=self._loop())
        else:
            delay = min(plan.max_backoff, plan.backoff * 2 ** min(self._row, 30)) * _jitter()
            self._row += 1
            self._set("waiting", delay=delay, reason=self._problem)
            until = time.monotonic() + delay
            while not self._asked and (left := until - time.monotonic()) > 0:
                yield left
            if not self._asked:
                self.restarts += 1
            return
        while not self._asked:
            yield None

    def _loop(self) -> str:
        count = self._row
        text = (
            f"given up after {count} restart{'s' if count != 1 else ''} in a row, each up for less"
            f" than {self._plan.stable_after:g} s. Look at its output, mend it, and restart it."
        )
        return f"{text} The last time: {self._problem}" if self._problem else text

    def _set(self, state: str, *, delay: float | None = None, reason: str = "") -> None:
        child = self.child
        seconds = time.monotonic() - self._began
        if state == "listening" and child is not None and child.listened_after is not None:
            seconds = child.listened_after
        if state in UP:
            self._up_since = time.monotonic()
        self.state = state
        self.last = Change(
            self.number,
            state,
            label=self.label,
            name=self._name,
            ports=self.ports,
            protocol=self.block.protocol,
            pid=None if child is None else child.pid,
            returncode=self.returncode,
            seconds=seconds,
            delay=delay,
            restarts=self.restarts,
            reason=reason,
        )
        self._tell(self.last)

    def _named(self, program: str) -> str:
        name = os.path.basename(program) or program
        name = "".join(letter if letter.isprintable() else "?" for letter in name)
        return f"replica {self.number}: {name}" if self._many else name


class Fleet:
    """Replicas of one program, each behind a block of its own.

    Whoever drives it calls :meth:`start` once, then :meth:`step` again and again until
    :attr:`over`, all from one thread.

    Parameters
    ----------
    plan
        What they do.
    blocks
        One for each.
    tell
        Called with every change, in the driving thread.
    """

    def __init__(
        self, plan: Plan, blocks: Sequence[PortBlock], tell: Callable[[Change], None]
    ) -> None:
        self.replicas: list[Replica] = [
            Replica(number, block, plan, tell, len(blocks) > 1)
            for number, block in enumerate(blocks)
        ]
        self.called_off = ""  # why the last round of restarts was not finished
        self._round: Iterator[None] | None = None

    def start(self) -> None:
        """Start all programs; after an error none is left."""
        try:
            for replica in self.replicas:
                replica.step()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End what runs, at once and for good. Waits for it."""
        for replica in self.replicas:
            replica.close()

    @property
    def over(self) -> bool:
        return all(replica.over for replica in self.replicas)

    @property
    def restarting(self) -> bool:
        return self._round is not None

    def step(self) -> float | None:
        """Do what is to be done now; how many seconds until there is more, None for no limit.

        A program that ends is a reason to call it earlier.
        """
        for replica in self.replicas:
            if replica.ready:
                replica.step()
        if self._round is not None:
            next(self._round)
            for replica in self.replicas:
                if replica.ready:
                    replica.step()
        dues = [replica.due for replica in self.replicas if replica.due is not None]
        if self.over:
            return 0.0
        if self._round is not None:
            dues.append(time.monotonic() + _LOOK)
        return max(min(dues) - time.monotonic(), 0.0) if dues else None

    def descriptors(self) -> list[int]:
        """Each readable once a program has ended."""
        return [fd for replica in self.replicas if (fd := replica.descriptor) >= 0]

    def stop(self, grace: float | None = None) -> None:
        """Ask for the end of all, in order. A second time the grace can only become shorter."""
        self._round = None
        for replica in self.replicas:
            if not replica.over:
                replica.ask("stop", grace)

    def restart(self) -> None:
        """Ask for a restart of all, one after another, those that are down first."""
        self._round = self._one_after_another()
        self.called_off = ""

    def signal(self, number: int) -> None:
        """Send a signal to each program that runs."""
        for replica in self.replicas:
            if replica.child is not None and replica.returncode is None:
                replica.child.send_signal(number)

    def _one_after_another(self) -> Iterator[None]:
        for replica in sorted(self.replicas, key=lambda replica: replica.is_up):
            others = [other for other in self.replicas if other is not replica]
            while replica.is_up and others and not any(other.is_up for other in others):
                if all(other.is_down for other in others):
                    yield from self._call_off(
                        f"replica {replica.number} is the only one that is up"
                    )
                    return
                yield
            replica.ask("restart")
            while not replica.is_up:
                if replica.is_down:
                    yield from self._call_off(f"replica {replica.number} did not come up again")
                    return
                yield
        self._round = None
        yield

    def _call_off(self, why: str) -> Iterator[None]:
        self.called_off = why
        self._round = None
        yield
