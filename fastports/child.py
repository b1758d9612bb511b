"""``Child``: a program that was started on ports of a block.

It has the methods and attributes of ``subprocess.Popen`` that launchers use, and ends with all its
descendants where Popen would leave them.
"""

from __future__ import annotations

import os
import time
from io import BufferedReader, BufferedWriter

from . import events
from ._spawn import Process, has_reader
from .errors import HandoffError, NotOwner
from .events import count, emit
from .family import Family, whose
from .listening import Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from io import FileIO
    from typing import Protocol

    from ._core import Descriptor
    from .block import PortBlock

    class Told(Protocol):
        def listening(self) -> None: ...
        def is_open(self) -> bool: ...
        def left(self) -> bool: ...
        def over(self) -> None: ...


__all__ = ["Child"]

_TERM, _KILL, _CONT = 15, 9, 18

# Between two looks at the ports, halved or doubled by chance; listening is noticed within two.
_TICK = 0.001

# How long bind-door mode may take to see that the child's last call is done.
_UNTIL_SHUT = 2.0

# How long to wait for a killed process to be gone: one that sits in a device driver may never be.
_AFTER_KILL = 5.0

# Children that run, and those that ended while members of their process group still run. They keep
# the hold and the leash. Global because they end with the process, which has one exit.
_running: set[Child] = set()
_lingering: set[Child] = set()
_at_exit: list[bool] = []


def sweep() -> None:
    """Reap what has ended and was not asked for since, and let go of groups that are empty."""
    for child in list(_running):
        child.poll()
    for child in list(_lingering):
        child._let_go()


def _end_all() -> None:
    """At the exit of the launcher: TERM to every child at once, a grace, then KILL."""
    mine = [child for child in _running | _lingering if not child._detached]
    for child in mine:
        child._signal_family(_TERM)
    since = time.monotonic()
    for child in mine:
        child._finish(max(child._grace - (time.monotonic() - since), 0.0))


def _forget_all() -> None:
    """In a forked child of the launcher: its copies must not keep the leashes from being let go."""
    for child in _running | _lingering:
        child._family.drop_leash()
    _running.clear()
    _lingering.clear()


def _remember(child: Child) -> None:
    if not _at_exit:
        import atexit

        _at_exit.append(True)
        atexit.register(_end_all)
        os.register_at_fork(after_in_child=_forget_all)
    _running.add(child)


def _writer(file: FileIO | None) -> BufferedWriter | None:
    return None if file is None else BufferedWriter(file)


def _reader(file: FileIO | None) -> BufferedReader | None:
    return None if file is None else BufferedReader(file)


def _jitter() -> float:
    """0.5 to 1.5, from the clock's last digits: all that several launchers need to fall apart."""
    return 0.5 + time.monotonic_ns() % 1000 / 1000  # random costs 1 ms at import


def _known(returncode: int | None) -> int:
    return 255 if returncode is None else returncode


class Child:
    """A running program, made by ``block.spawn``.

    Use it as a context manager, or call :meth:`stop`: both end the program and its descendants.
    What is still running when the launcher exits is ended then, unless it is detached.

    Attributes
    ----------
    pid
        Process id.
    args
        The command line with the ports filled in.
    returncode
        None while it runs, as far as :meth:`poll` and :meth:`wait` have seen; minus the signal that
        killed it; 255 where somebody else took its status from the kernel.
    stdin, stdout, stderr
        Binary streams where PIPE was asked for, else None.
    block
        The block it runs on, kept alive by the child.
    mode
        The hand-off mode in use.
    ports
        The ports it has to listen on.
    listened_after
        Seconds from its start until all of them were seen listening; None before.
    """

    def __init__(
        self,
        process: Process,
        args: list[str],
        *,
        block: PortBlock,
        mode: str,
        ports: Sequence[int],
        token: bytes,
        leads: bool,
        leash: Descriptor | None,
        started: float,
        grace: float,
        detached: bool,
        pipes: tuple[FileIO | None, FileIO | None, FileIO | None],
        stderr_tail: Callable[[], str],
        hint: str,
        handover: Told,
    ) -> None:
        self._process = process
        self._family = Family(process.pid, token, leads=leads, leash=leash)
        self._grace = grace
        self._detached = detached
        self._stderr_tail = stderr_tail
        self._hint = hint
        self._handover = handover
        self._started = started
        self.owner: int = os.getpid()
        self.pid: int = process.pid
        self.args = args
        self.block = block
        self.mode = mode
        self.ports = ports
        self.listened_after: float | None = None
        self.stdin: BufferedWriter | None = _writer(pipes[0])
        self.stdout: BufferedReader | None = _reader(pipes[1])
        self.stderr: BufferedReader | None = _reader(pipes[2])
        self._over = False
        _remember(self)
        process.keep()

    # --- what Popen has ---

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def pidfd(self) -> int:
        """A descriptor that is readable once the child has ended, -1 where the kernel has none."""
        return self._process.pidfd

    def poll(self) -> int | None:
        """The return code, or None while it runs.

        Raises
        ------
        NotOwner
            In a forked child of the launcher; so do the other methods that act.
        """
        self._mine()
        # asked again when a signal handler raised between the two
        if self in _running and self._process.poll() is not None:
            self._reaped()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its return code.

        Raises
        ------
        subprocess.TimeoutExpired
            It still runs after ``timeout`` seconds.
        """
        self._mine()
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = -1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not self._process.ended(left) and timeout is not None:
                from subprocess import TimeoutExpired  # 8 ms

                raise TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal to the child alone; nothing happens once it has ended."""
        self._mine()
        if self.poll() is None:
            self._process.send_signal(int(sig))

    def terminate(self) -> None:
        """Send SIGTERM to the child alone."""
        self.send_signal(_TERM)

    def kill(self) -> None:
        """Send SIGKILL to the child alone."""
        self.send_signal(_KILL)

    def communicate(
        self, input: bytes | None = None, timeout: float | None = None
    ) -> tuple[bytes | None, bytes | None]:
        """Feed stdin, read stdout and stderr to their ends, wait; what was read, None if no pipe.

        Raises
        ------
        subprocess.TimeoutExpired
            With what was read so far; the child still runs.
        """
        import select

        self._mine()
        deadline = None if timeout is None else time.monotonic() + timeout
        read: dict[int, list[bytes]] = {}
        for stream in (self.stdout, self.stderr):
            if stream is not None and not stream.closed:
                read[stream.fileno()] = []
        poller = select.poll()
        for fd in read:
            poller.register(fd, select.POLLIN)
        left = memoryview(input or b"")
        feeding = -1
        if self.stdin is not None and not self.stdin.closed:
            if left:
                feeding = self.stdin.fileno()
                os.set_blocking(feeding, False)
                poller.register(feeding, select.POLLOUT)
            else:
                self._close_stdin()
        open_ends = set(read)

        def result() -> tuple[bytes | None, bytes | None]:
            out, err = (
                None if stream is None or stream.closed else b"".join(read[stream.fileno()])
                for stream in (self.stdout, self.stderr)
            )
            return out, err

        while open_ends or feeding >= 0:
            span = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = poller.poll(None if span is None else span * 1000)
            if not ready and span == 0.0:
                from subprocess import TimeoutExpired  # 8 ms

                assert timeout is not None
                raise TimeoutExpired(self.args, timeout, *result())
            for fd, _ in ready:
                if fd == feeding:
                    try:
                        left = left[os.write(fd, left[:65536]) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        poller.unregister(fd)
                        self._close_stdin()
                        feeding = -1
                    continue
                data = os.read(fd, 65536)
                if data:
                    read[fd].append(data)
                else:
                    poller.unregister(fd)
                    open_ends.discard(fd)
        self.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        both = result()
        self._close_pipes()
        return both

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.owner == os.getpid():
            self.stop()
            self._close_pipes()

    def __repr__(self) -> str:
        code = self.returncode
        state = "running" if code is None else f"returncode={code}"
        return f"<Child pid={self.pid} {self.args[0]!r} on {self.block!r} mode={self.mode} {state}>"

    # --- what Popen has not ---

    def stop(self, grace: float | None = None) -> int:
        """End the child and its descendants: SIGTERM, a grace, SIGKILL. Idempotent.

        Parameters
        ----------
        grace
            Seconds between the two; None takes what ``spawn`` was given.

        Returns
        -------
        int
            The return code of the child.
        """
        self._mine()
        if self._over:
            return _known(self.returncode)
        try:
            self._signal_family(_TERM)
        except BaseException:  # a Ctrl-C: nothing is left in any case
            self._finish(0.0)
            raise
        self._finish(self._grace if grace is None else grace)
        return _known(self.returncode)

    def _finish(self, grace: float) -> None:
        """What follows SIGTERM, which many programs take for "at once" when it comes twice."""
        try:
            self._until_gone(grace)
        finally:  # also on a Ctrl-C in the grace
            deadline = time.monotonic() + _AFTER_KILL
            while self._anybody() and time.monotonic() < deadline:
                self._signal_family(_KILL)  # again for those that were being forked just then
                self._until_gone(0.05)
            self._over = self.poll() is not None
            self._let_go()

    def wait_listening(self, timeout: float | None = 30.0) -> Child:
        """Wait until the child or a descendant listens on every port of :attr:`ports`.

        The door is closed then. ``spawn`` calls this unless it was given ``wait=None``.

        Parameters
        ----------
        timeout
            Seconds; None for no limit.

        Returns
        -------
        Child
            This one.

        Raises
        ------
        HandoffError
            It ended, took too long, or somebody else listens. Nothing of the child is left.
        """
        self._mine()
        try:
            for pause in self._listening(None if timeout is None else time.monotonic() + timeout):
                if self.returncode is None:
                    self._process.ended(pause)
                else:
                    time.sleep(pause)
        except BaseException:
            try:
                self.stop()
            finally:
                self._handover.over()
                self._close_pipes()
            raise
        return self

    # --- how ---

    def _mine(self) -> None:
        if self.owner != os.getpid():
            raise NotOwner(
                f"process {self.pid} is a child of process {self.owner}, not of its forked child"
                f" {os.getpid()}. Let process {self.owner} act on it.",
                owner=self.owner,
                caller=os.getpid(),
            )

    def tell(self, event: str, **facts: object) -> None:
        """Tell of something that happened to this child."""
        slot = {
            "child_started": events.STARTED + events.MODES.index(self.mode),
            "child_exited": events.EXITED,
            "handoff_failed": events.FAILED,
            "steal_seen": events.STEALS,
        }.get(event)
        if slot is not None:
            count(slot)
        emit(event, self.block, pid=self.pid, program=self.args[0], mode=self.mode, **facts)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _listening(self, deadline: float | None) -> Iterator[float]:
        """Look, step by step, until it listens; yields how many seconds to wait between two looks.

        0 says that the next step may take milliseconds: it reads /proc.
        """
        watch = Watch(self.block, self.ports, passed=self.mode == "fd")
        try:
            while not watch.all_up():
                if deadline is not None and time.monotonic() >= deadline:
                    raise self._too_late(watch)
                if not self._process.ended(0):
                    yield _TICK * _jitter()
                if not self._process.ended(0):
                    continue
                yield 0.0
                before = time.monotonic()
                # A program that turns into a daemon ends well before its daemon listens.
                if self.poll() != 0 or not self._family.members():
                    if watch.all_up():
                        break
                    raise self._ended(watch)
                yield max(_TICK, 4 * (time.monotonic() - before)) * _jitter()
            took = self._elapsed()
            self._handover.listening()
            latest = time.monotonic() + _UNTIL_SHUT
            while self._handover.is_open() and time.monotonic() < latest:
                yield _TICK * _jitter()
            # nobody else gets in from here on; who is in comes next
            yield 0.0
            self._check_owners(watch)
            if self.listened_after is None:
                events.handed_over(took)
                self.listened_after = took
                self.tell("child_listening", seconds=took, waited_for=list(self.ports))
        except HandoffError as exc:
            self.tell(
                "handoff_failed",
                why=str(exc),
                returncode=exc.returncode,
                seconds=float(exc.elapsed),
            )
            raise
        finally:
            watch.close()

    def _check_owners(self, watch: Watch) -> None:
        """Every listener has to be one of the family's."""
        strangers: list[tuple[int, int]] = []
        for _ in range(5):  # a socket may be on its way from one process to another
            listeners = watch.listeners()
            owned = self._family.owned(socket for _, socket in listeners)
            strangers = [
                (port, inode)
                for port, (inode, _) in listeners
                if inode not in owned and inode not in watch.own
            ]
            if not strangers:
                return
            time.sleep(_TICK * _jitter())
        port, inode = strangers[0]
        self.tell("steal_seen", port=port, inode=inode)
        raise HandoffError(
            f"{whose(inode)} listens on port {port} (socket inode {inode}), and it is neither"
            f" {self.args[0]} (pid {self.pid}) nor a descendant of it. Stop that process and start"
            " again; if it is the server you mean, started through a daemon, pass wait=None.",
            returncode=self.returncode,
            elapsed=self._elapsed(),
            port=port,
            inode=inode,
            mode=self.mode,
            stderr=self._stderr_tail(),
        )

    def _ended(self, watch: Watch) -> HandoffError:
        tail = self._stderr_tail()
        code = self.returncode
        how = "?" if code is None else f"status {code}" if code >= 0 else f"signal {-code}"
        port = watch.missing[0]
        lowered = tail.lower()
        text = (
            f"{self.args[0]} ended with {how} after {self._elapsed():.2f} s without listening on"
            f" port {port}{_and_more(watch)}."
        )
        if tail:
            text += f" Its last line: {tail.splitlines()[-1].strip()!r}."
        if "address already in use" in lowered or "eaddrinuse" in lowered:
            text += f" It could not bind: {self._hint}" if self._hint else ""
        elif not tail and self._hint:
            text += f" If it could not bind: {self._hint}"
        else:
            text += " Look at its output, and start it by hand to see more."
        return HandoffError(
            text,
            returncode=code,
            elapsed=self._elapsed(),
            port=port,
            stderr=tail,
            mode=self.mode,
        )

    def _too_late(self, watch: Watch) -> HandoffError:
        tail = self._stderr_tail()
        return HandoffError(
            f"{self.args[0]} (pid {self.pid}) does not listen on port {watch.missing[0]}"
            f"{_and_more(watch)} after {self._elapsed():.2f} s; it was ended. Give it more time"
            " (timeout=), or name the ports it does listen on (wait=[...]), or do not wait"
            " (wait=None).",
            returncode=self.returncode,
            elapsed=self._elapsed(),
            port=watch.missing[0],
            stderr=tail,
            mode=self.mode,
        )

    def _reaped(self) -> None:
        self.tell("child_exited", returncode=self.returncode, seconds=self._elapsed())
        _running.discard(self)
        _lingering.add(self)
        self._let_go()

    def _let_go(self) -> None:
        """Let go of what outlives the child for the sake of descendants that still run."""
        if self.returncode is None:
            return
        # Zombies of the group count for killpg, not for us; the walk tells, and is seldom needed.
        expected = (
            self._group_lives()
            or (self._family.scattered and self.returncode == 0)
            or (self._family.leash >= 0 and has_reader(self._family.leash))
        ) and not (self._handover.left() or self._family.alone())
        if self._over or not expected or not self._family.members():
            _lingering.discard(self)
            self._family.drop_leash()  # dropped before, it would kill the rest of the group
            self._handover.over()  # over before, it would leave a daemon at a closed door

    def _group_lives(self) -> bool:
        """Whether the child's own process group has members, zombies included."""
        try:
            if self._family.leads:
                os.killpg(self.pid, 0)
            return self._family.leads
        except ProcessLookupError:
            return False
        except PermissionError:
            return True

    def _signal_family(self, sig: int) -> None:
        members = self._family.members()
        whole_group = False
        if self.poll() is None:  # until reaped, the pid names this child and this group alone
            if self._family.leads:
                try:
                    os.killpg(self.pid, sig)
                    whole_group = True
                    if sig == _TERM:  # a stopped process would not get to it
                        os.killpg(self.pid, _CONT)
                except (ProcessLookupError, PermissionError):
                    pass
            else:
                self._process.send_signal(sig)
        for member in members:
            if member.pid != self.pid and not (whole_group and member.group == self.pid):
                member.signal(sig)

    def _anybody(self) -> bool:
        return not self._process.ended(0) or bool(self._family.members())

    def _until_gone(self, span: float) -> None:
        deadline = time.monotonic() + span
        self._process.ended(span)
        while (before := time.monotonic()) < deadline and self._family.members():
            pause = max(_TICK, 4 * (time.monotonic() - before)) * _jitter()
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))

    def _close_stdin(self) -> None:
        if self.stdin is not None:
            try:  # noqa: SIM105 - contextlib costs 2 ms at import
                self.stdin.close()
            except BrokenPipeError:
                pass

    def _close_pipes(self) -> None:
        self._close_stdin()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def _and_more(watch: Watch) -> str:
    others = len(watch.missing) - 1
    return f" and {others} more" if others else ""
