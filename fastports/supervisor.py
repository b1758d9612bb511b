"""``Supervisor``: programs that are kept running behind ports that are never given up."""

from __future__ import annotations

import os
import threading

from .errors import InvalidRequest, NotOwner
from .fleet import Change, Fleet, Plan, Replica

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType
    from typing import Any

    from .allocator import Allocator
    from .block import PortBlock
    from .fleet import Argv
    from .ranges import RangeLike

__all__ = ["Change", "Replica", "Supervisor"]

_HUP, _INT, _TERM = 1, 2, 15


class Supervisor:
    """Keeps replicas of a program running, each behind a block of its own.

    A replica that ends is started again on the same ports, which are held all the while, after a
    pause that grows with every restart in a row. Use it as a context manager, or call
    :meth:`start` and :meth:`stop`; or :meth:`run` for a program that does nothing else.

    Parameters
    ----------
    argv
        Program and arguments as for :func:`fastports.handoff.spawn`; the program has to stay in the
        foreground. ``{replica}`` is filled in as the number of the replica, from 0; also in the
        values of ``env``. Or a function that returns them for a :class:`Replica`.
    count
        How many replicas.
    size, range, protocol, host, metadata, allocator
        The block of each, as for :meth:`fastports.Allocator.allocate`; all or none are allocated.
    label
        Of the blocks: with several replicas their numbers follow after a hyphen, or stand where
        ``{replica}`` is.
    blocks
        Blocks to use, one for each replica, instead of allocating them. They stay the caller's.
    restart
        ``"on-failure"``: after an exit status that is not 0, a signal, or when it did not listen in
        time; ``"always"``; ``"no"``.
    max_restarts
        A replica that was started again this often in a row is given up the next time; None for
        never. Runs of ``stable_after`` seconds begin a new row.
    backoff, max_backoff
        Seconds before the first restart of a row, give or take half at random, doubled with each
        further one up to ``max_backoff``.
    stable_after
        Seconds of listening that make a run a good one.
    wait, timeout
        ``"listen"``: a replica is up once it listens on the ports that ``argv`` and ``env`` name,
        which has to be within ``timeout`` seconds. None: as soon as it was started.
    grace
        Seconds between SIGTERM and SIGKILL.
    on_change
        Called with each :class:`Change`, from one thread at a time. It may call :meth:`restart`,
        and :meth:`stop`, which then does not wait.
    **options
        The other options of ``spawn``, such as ``handoff``, ``cwd`` and ``stdout``. Files have to
        stay open for the restarts.

    Attributes
    ----------
    replicas
        The replicas, in the order of their numbers; empty before :meth:`start`.

    Notes
    -----
    Every change is one line of the logger ``fastports.supervisor``. All methods may be called from
    any thread of the process that made the supervisor. When that process ends the programs end.
    """

    def __init__(
        self,
        argv: Argv,
        *,
        count: int = 1,
        size: int = 1,
        range: RangeLike | None = None,
        protocol: str | None = None,
        host: str | None = None,
        label: str = "",
        metadata: Mapping[str, object] | None = None,
        allocator: Allocator | None = None,
        blocks: Sequence[PortBlock] | None = None,
        restart: str = "on-failure",
        max_restarts: int | None = 5,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        stable_after: float = 60.0,
        wait: str | None = "listen",
        timeout: float | None = 30.0,
        grace: float = 10.0,
        env: Mapping[str, str] | Mapping[bytes, bytes] | None = None,
        on_change: Callable[[Change], object] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 65535:
            raise InvalidRequest(
                f"count={count!r} is no number of replicas. Pass a whole number from 1.",
                argument="count",
                value=count,
            )
        if blocks is not None and not blocks:
            raise InvalidRequest(
                "blocks is empty. Pass one block for each replica, or None to allocate them.",
                argument="blocks",
                value=blocks,
            )
        self._plan = Plan(
            argv,
            env=env,
            restart=restart,
            max_restarts=max_restarts,
            backoff=backoff,
            max_backoff=max_backoff,
            stable_after=stable_after,
            wait=wait,
            timeout=timeout,
            grace=grace,
            options=options,
        )
        self._count = count
        self._size = size
        self._label = label
        self._wanted: dict[str, Any] = {"metadata": metadata}
        for name, value in (("range", range), ("protocol", protocol), ("host", host)):
            if value is not None:
                self._wanted[name] = value
        self._allocator = allocator
        self._given = blocks
        self._mine: list[PortBlock] = []
        self._on_change = on_change
        self._fleet: Fleet | None = None
        self._thread: threading.Thread | None = None
        self._requests: list[Callable[[Fleet], None]] = []
        self._changed = threading.Condition()
        self._wake = -1
        self._turn = threading.RLock()  # who writes to it or closes it; re-entered by signals
        self._restarting = False
        self._over = False
        self._owner = os.getpid()

    # --- looking ---

    @property
    def replicas(self) -> tuple[Replica, ...]:
        fleet = self._fleet
        return () if fleet is None else tuple(fleet.replicas)

    @property
    def returncode(self) -> int | None:
        """None while a replica runs or is to be started again; then that of :meth:`wait`."""
        replicas = self.replicas
        if not replicas or not (self._over or all(one.is_down for one in replicas)):
            return None
        return next((code for replica in replicas if (code := replica.status)), 0)

    def __repr__(self) -> str:
        states = ", ".join(replica.state for replica in self.replicas) or "not started"
        return f"<Supervisor {states}>"

    # --- acting ---

    def start(self) -> Supervisor:
        """Hold the ports and start the programs; they come up by and by.

        Returns
        -------
        Supervisor
            This one.

        Raises
        ------
        InvalidRequest, PortsUnavailable, BindDenied, DescriptorLimit
            As :meth:`fastports.Allocator.allocate_many`.
        HandoffError, OSError
            As :func:`fastports.handoff.spawn`: no program can be started so. None is left.
        """
        self._check_owner()
        if self._fleet is not None:
            raise RuntimeError("a Supervisor is started once. Make another one.")
        blocks = self._given or self._allocate()
        fleet = Fleet(self._plan, list(blocks), self._tell)
        self._fleet = fleet
        try:
            fleet.start()
            reader, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._thread = threading.Thread(
                target=self._supervise, args=(fleet, reader), name="fastports-supervisor"
            )
            # a forgotten supervisor must not keep the interpreter from ending: _at_exit stops it
            self._thread.daemon = True
            import atexit

            atexit.register(self._at_exit)
            self._thread.start()
        except BaseException:
            self._fleet = self._thread = None
            fleet.end()
            self._release()
            raise
        return self

    def restart(self) -> None:
        """Start all programs anew, one after another, and return at once.

        The next one is ended when the former is up again, so that one is up at every moment where
        there are several. Replicas that are down, given up ones included, come first. Where one
        does not come up again the rest stay as they are, which is logged; as does :meth:`wait_up`.
        """
        self._check_owner()
        self._restarting = not self._over
        self._request(Fleet.restart)

    def stop(self, grace: float | None = None) -> None:
        """End all programs and give the ports back: SIGTERM to all in order, a grace, SIGKILL.

        Parameters
        ----------
        grace
            Seconds between the two; None takes the one the supervisor was made with.
        """
        self._check_owner()
        self._request(lambda fleet: fleet.stop(grace))
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        try:
            thread.join()
        except BaseException:  # a Ctrl-C in the grace
            self._request(lambda fleet: fleet.stop(0))
            thread.join()
            raise
        finally:
            import atexit

            atexit.unregister(self._at_exit)

    def wait_up(self, timeout: float | None = None) -> Supervisor:
        """Wait until all replicas are up and no round of restarts is under way.

        Returns
        -------
        Supervisor
            This one.

        Raises
        ------
        HandoffError
            One of them ended for good, or was given up; it tells why.
        TimeoutError
            After ``timeout`` seconds.
        """

        def settled() -> bool:
            down = [replica for replica in self.replicas if replica.is_down]
            up = all(replica.is_up for replica in self.replicas)
            return not self._restarting and (bool(down) or up or self._over)

        self._wait(settled, timeout, "are not up")
        for replica in self.replicas:
            if replica.is_down:
                from .errors import HandoffError

                child = replica.child
                raise HandoffError(
                    str(replica.last),
                    returncode=replica.returncode,
                    elapsed=replica.last.seconds if replica.last is not None else 0.0,
                    mode=None if child is None else child.mode,
                )
        return self

    def wait(self, timeout: float | None = None) -> int:
        """Wait until all replicas have ended and none is to be started again.

        Returns
        -------
        int
            0 if all ended so, else the return code of the first that did not (in the order of their
            numbers; 1 for one that did not come up).

        Raises
        ------
        TimeoutError
            After ``timeout`` seconds.
        """
        self._wait(lambda: self.returncode is not None, timeout, "still run")
        code = self.returncode
        assert code is not None
        return code

    def run(self) -> int:
        """Start, wait, stop. In the main thread SIGTERM and SIGINT stop it, SIGHUP restarts.

        Returns
        -------
        int
            As :meth:`wait`; minus the signal's number if a signal stopped it.
        """
        if threading.current_thread() is not threading.main_thread():
            with self:
                return self.wait()
        import signal

        stopped_by: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            stopped_by.append(number)
            grace = 0 if len(stopped_by) > 1 else None  # a second one ends it
            self._request(lambda fleet: fleet.stop(grace))

        def restart(number: int, frame: FrameType | None) -> None:
            self.restart()

        before = [
            (number, signal.signal(number, stop if number != _HUP else restart))
            for number in (_INT, _TERM, _HUP)
        ]
        try:
            with self:
                code = self.wait()
            return -stopped_by[0] if stopped_by else code
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def __enter__(self) -> Supervisor:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self._owner == os.getpid():
            self.stop()

    # --- how ---

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise NotOwner(
                f"the supervisor belongs to process {self._owner}, not to its forked child"
                f" {os.getpid()}. Let process {self._owner} act on it.",
                owner=self._owner,
                caller=os.getpid(),
            )

    def _allocate(self) -> list[PortBlock]:
        from .allocator import Allocator

        allocator = self._allocator or Allocator()
        if self._count == 1:
            label = self._label.replace("{replica}", "0")
            self._mine = [allocator.allocate(self._size, label=label, **self._wanted)]
            return self._mine
        # a block's label is its name in the mapping
        label = self._label or "replica"
        if "{replica}" not in label:
            label += "-{replica}"
        names = [label.replace("{replica}", str(number)) for number in range(self._count)]
        blocks = allocator.allocate_many(dict.fromkeys(names, self._size), **self._wanted)
        self._mine = list(blocks.values())
        return self._mine

    def _release(self) -> None:
        for block in self._mine:
            block.release()

    def _request(self, what: Callable[[Fleet], None]) -> None:
        self._requests.append(what)
        with self._turn:
            if self._wake >= 0:
                try:  # noqa: SIM105 - contextlib costs 2 ms at import
                    os.write(self._wake, b"!")
                except BlockingIOError:
                    pass  # full: it will look anyway

    def _wait(self, condition: Callable[[], bool], timeout: float | None, what: str) -> None:
        self._check_owner()
        if self._fleet is None:
            raise RuntimeError("the Supervisor was not started. Call start(), or use `with`.")
        if self._thread is threading.current_thread():
            raise RuntimeError("on_change cannot wait: nothing changes before it returns.")
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                running = [one.number for one in self.replicas if not one.is_down]
                raise TimeoutError(f"replicas {running} {what} after {timeout:g} s")

    def _supervise(self, fleet: Fleet, reader: int) -> None:
        import select

        poller = select.poll()
        poller.register(reader, select.POLLIN)
        watched: set[int] = set()
        try:
            while not fleet.over:
                while self._requests:
                    self._requests.pop(0)(fleet)
                pause = fleet.step()
                if self._restarting and not fleet.restarting and not self._requests:
                    self._restarted(fleet)
                if self._requests:
                    continue
                now = set(fleet.descriptors())
                for fd in watched - now:
                    poller.unregister(fd)
                for fd in now:
                    poller.register(fd, select.POLLIN)
                watched = now
                if any(fd == reader for fd, _ in poller.poll(_milliseconds(pause))):
                    os.read(reader, 4096)
        except BaseException:
            _logger().exception("the supervisor failed; its programs are ended")
            fleet.end()
        finally:
            with self._turn:
                os.close(self._wake)
                self._wake = -1
            os.close(reader)
            self._release()
            with self._changed:
                self._over = True
                self._restarting = False
                self._changed.notify_all()

    def _restarted(self, fleet: Fleet) -> None:
        self._restarting = False
        if fleet.called_off:
            _logger().error("the restart was called off: %s", fleet.called_off)
        with self._changed:
            self._changed.notify_all()

    def _tell(self, change: Change) -> None:
        level = {"failed": "error", "waiting": "warning"}.get(change.state, "info")
        getattr(_logger(), level)("%s", change)
        if self._on_change is not None:
            try:
                self._on_change(change)
            except Exception:  # the caller's mistake must not take the programs down
                _logger().exception("on_change failed")
        with self._changed:
            self._changed.notify_all()

    def _at_exit(self) -> None:
        if self._owner == os.getpid():
            self.stop()


def _milliseconds(pause: float | None) -> float | None:
    return None if pause is None else pause * 1000


def _logger() -> Any:
    import logging  # 11 ms

    return logging.getLogger("fastports.supervisor")
