"""``fastports run --restart``: replicas that are kept running, from the one thread there is."""

from __future__ import annotations

import os
import time

from .._spawn import adopt_orphans, childless
from ..fleet import RESTARTS, Fleet, Plan
from ..handoff import DEVNULL
from .bundle import Bundle
from .options import seconds, whole
from .program import not_executed
from .say import Usage, complain, reworded, say
from .signals import (
    CHLD,
    CONT,
    ENDING,
    HUP,
    KEYS,
    KILL,
    STOP,
    TERM,
    TSTP,
    block,
    children,
    exit_status,
    has_terminal,
    restore,
    to_take,
    wait,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from ..block import PortBlock
    from ..fleet import Change, Replica
    from ..handoff import Child
    from .options import Options
    from .report import Report
else:
    import _signal  # what signal is made of; the module around it costs 4 ms

__all__ = ["HELP", "Kept", "kept"]

HELP = """\
`fastports run` looks after a program, or K of them, each on ports of its own:

  fastports run --restart on-failure --count 4 --label web -- serve {port}

  --restart W        always, on-failure (not with status 0), or no (default)
  --count K          replicas; {replica} is the number of each, from 0, in the
                     arguments and in --label
  --max-restarts N   in a row, each up for less than 60 s; then the replica is
                     given up (default 5; none: never)
  --backoff S        pause before the first restart of a row, doubled with each
                     further one up to 30 s (default 0.5)
  --grace S          seconds from TERM to KILL (default 10)
  --report FILE      a JSON line for each change, for another program to read;
                     a FIFO too, and - is stdout
  --report-fd N      the same into a descriptor: 3>FILE, and N is 3

SIGTERM and Ctrl-C end all, in order; Ctrl-C once more ends the grace. SIGHUP
restarts one after another, the next once the former is up again. Other signals
go to all. stdin is empty. It ends when none is left to run: with status 0 if
all ended so, or the status of the first that did not."""


def kept(
    options: Options,
    command: Sequence[str],
    limit: float,
    grace: float | None,
    spawning: Mapping[str, Any],
) -> Callable[[list[PortBlock | Bundle], Report | None], int]:
    """What the options ask for, to be done once the ports are held."""
    if "restart" not in options:
        for name in ("max-restarts", "backoff"):
            if name in options:
                raise Usage(f"--{name} is for --restart; add it.")
    if "detach" in options:
        raise Usage("--detach ends fastports, which could not restart anything; leave it out.")
    restart = options["restart"] or ("no" if "restart" not in options else "")
    if restart not in RESTARTS:
        raise Usage(f"--restart is one of {', '.join(RESTARTS)}, not {restart!r}.")
    most = options["max-restarts"] or "5"
    plan = _Plan(
        lambda replica: _filled(replica, command),
        env=None,
        restart=restart,
        max_restarts=None if most == "none" else whole(most, "--max-restarts", 0, 999_999_999),
        backoff=seconds(options["backoff"] or "0.5", "--backoff"),
        max_backoff=30.0,
        stable_after=60.0,
        wait="listen" if limit else None,
        timeout=limit,
        grace=10.0 if grace is None else grace,
        # one terminal or pipe cannot feed several, nor one program again from its beginning
        options={"stdin": DEVNULL, **spawning},
    )
    quiet = "quiet" in options

    def work(held: list[PortBlock | Bundle], report: Report | None) -> int:
        try:
            return Kept(plan, held, quiet=quiet, report=report).status()
        except OSError as exc:
            raise not_executed(exc, command) or exc from None

    return work


def _filled(replica: Replica, command: Sequence[str]) -> Sequence[str]:
    held: PortBlock | Bundle = replica.block
    return held.fill(command) if isinstance(held, Bundle) else command


class _Plan(Plan):
    def start(self, replica: Replica) -> Child:
        child = super().start(replica)
        held: PortBlock | Bundle = replica.block
        if isinstance(held, Bundle):
            child.ports = held.named
        return child


class Kept:
    """The replicas from their start to their end.

    Everything happens in the main thread, which waits for signals, SIGCHLD among them, for as long
    as the fleet has nothing to do.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[PortBlock | Bundle],
        *,
        quiet: bool,
        report: Report | None,
    ) -> None:
        self._fleet = Fleet(plan, blocks, self._tell)  # type: ignore[arg-type]
        self._grace = plan.grace
        self._quiet = quiet
        self._report = report
        self._signals: list[int] = []
        self._stopped_by = 0
        self._hurry = False

    def status(self) -> int:
        """Run them; the exit status. What cannot be started the first time raises as spawn does."""
        fleet = self._fleet
        self._signals = to_take()
        on_terminal = has_terminal()
        if on_terminal and _signal.getsignal(TSTP) != _signal.SIG_IGN:
            self._signals.append(TSTP)
        blocked = block(self._signals)
        adopt_orphans()
        try:
            fleet.start()
        except BaseException:
            restore(blocked)
            raise
        try:
            while not fleet.over:
                pause = self._step()
                info = wait(self._signals, pause)
                if info is not None:
                    self._heed(info, on_terminal)
            self._end_orphans()
        finally:
            fleet.end()
        return self._status()

    def _step(self) -> float | None:
        fleet = self._fleet
        restarting = fleet.restarting
        pause = fleet.step()
        if restarting and not fleet.restarting and fleet.called_off:
            complain(f"the restart was called off: {fleet.called_off}.")
        if not fleet.restarting and all(replica.is_down for replica in fleet.replicas):
            fleet.stop()
            pause = 0.0
        if not self._reap():
            pause = 0.0
        if self._report is not None and self._report.pending:
            self._report.flush()
            pause = min(0.1, 0.1 if pause is None else pause)
        return pause

    def _heed(self, info: _signal.struct_siginfo, on_terminal: bool) -> None:
        number = info.si_signo
        fleet = self._fleet
        if number == CHLD:
            return
        if number in ENDING or (number == HUP and _hung_up(info, on_terminal)):
            if not self._stopped_by:
                self._stopped_by = number
                fleet.stop()
            elif number in KEYS:
                self._hurry = True
                fleet.stop(0)
        elif number == TSTP:
            self._stop_and_go_on()
        elif number != HUP:
            fleet.signal(number)
        elif not self._stopped_by:
            fleet.restart()

    def _stop_and_go_on(self) -> None:
        """Ctrl-Z: the terminal stops our process group alone, so the others are stopped here."""
        self._signal_groups(TSTP)
        os.kill(os.getpid(), STOP)
        self._signal_groups(CONT)  # fg or bg

    def _signal_groups(self, number: int) -> None:
        for replica in self._fleet.replicas:
            if replica.pid is not None:
                try:  # noqa: SIM105 - contextlib costs 2 ms at import
                    os.killpg(replica.pid, number)
                except (ProcessLookupError, PermissionError):
                    pass

    def _reap(self) -> bool:
        """Reap orphans that came to us; False if a replica has ended that step() has to see."""
        own = {replica.pid for replica in self._fleet.replicas}
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
            if info is None:
                return True
            if info.si_pid in own:
                return False
            os.waitpid(info.si_pid, 0)

    def _end_orphans(self) -> None:
        """End what the programs left behind and no longer shows whose it was: TERM, grace, KILL."""
        number = TERM
        until = time.monotonic() + (0 if self._hurry else self._grace)
        while not childless():
            for pid in children():
                try:  # noqa: SIM105 - contextlib costs 2 ms at import
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    pass
            self._reap()
            info = wait(self._signals, 0.05)
            if number == KILL and time.monotonic() > until:
                return  # one that sits in a device driver may never be gone
            if time.monotonic() > until or (info is not None and info.si_signo in KEYS):
                number, until = KILL, time.monotonic() + 5

    def _status(self) -> int:
        for replica in self._fleet.replicas:
            code = replica.status
            if code == -TERM and self._stopped_by:  # ours, on behalf of the signal that came
                return 128 + self._stopped_by
            if code:
                return exit_status(code)
        return 0

    def _tell(self, change: Change) -> None:
        if self._report is not None:
            self._report.change(change, self._fleet.replicas[change.replica].block)
        if change.state == "failed":  # a program that is given up is nothing to be quiet about
            complain(reworded(str(change)))
        elif not self._quiet:
            say(reworded(str(change)))


def _hung_up(info: _signal.struct_siginfo, on_terminal: bool) -> bool:
    """Whether a SIGHUP tells that the terminal is gone, be it through the shell that had it."""
    return info.si_code > 0 or (on_terminal and not has_terminal())
