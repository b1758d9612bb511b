"""One program on held ports, from its start to its end: what ``fastports run`` does by itself."""

from __future__ import annotations

import os
import time

from .._spawn import adopt_orphans, childless
from ..errors import HandoffError
from ..handoff import spawn
from .bundle import Bundle
from .say import Failure, complain, printable, reworded, say, spans
from .signals import (
    CHLD,
    CONT,
    ENDING,
    HUP,
    INT,
    KEYS,
    STOP,
    STOPS,
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
    from collections.abc import Sequence
    from typing import Any

    from ..block import PortBlock
    from ..handoff import Child
    from .report import Report
else:
    import _signal  # what signal is made of; the module around it costs 4 ms

__all__ = ["Program", "not_executed"]


class Program:
    """One program, from its start to its end.

    Everything of ours happens in the main thread, which waits for signals; a second thread waits
    until the program listens, and says so by one more SIGCHLD.
    """

    def __init__(
        self,
        held: PortBlock | Bundle,
        command: list[str],
        *,
        limit: float,
        grace: float | None,
        quiet: bool,
        report: Report | None,
        spawning: dict[str, Any],
    ) -> None:
        self._block = held
        self._command = held.fill(command) if isinstance(held, Bundle) else command
        self._limit = limit
        self._grace = grace  # asked for: then a SIGTERM that is passed on is not all
        self._killed_at: float | None = None
        self._quiet = quiet
        self._report = report
        self._spawning = {"grace": 10.0 if grace is None else grace, **spawning}
        self._detach = bool(spawning.get("detach"))
        self._began = time.monotonic()
        self._name = printable(os.path.basename(command[0]) or command[0])
        self._foreground = False
        self._signals: list[int] = []
        self._settled = False  # the wait for its listening is over
        self._failure: BaseException | None = None
        self._told = False
        self._ending = False

    def status(self) -> int:
        blocked = self._take_signals()
        try:
            child = self._start()
        except BaseException:
            restore(blocked)
            raise
        if self._limit:
            import _thread  # builtin; threading costs 3 ms

            _thread.start_new_thread(self._await_listening, (child, _thread.get_ident()))
        else:
            self._settled = True
            self._note(f"{self._name} (pid {child.pid}) has {_ports(self._block, child)}.")
            self._tell("running", child)
            self._told = True
        # What came before the child was there reached nobody else, the terminal's keys included.
        while (info := _signal.sigtimedwait(self._signals, 0)) is not None:
            self._forward(child, info, early=True)
        while not self._is_over(child):
            info = wait(self._signals, self._pause())
            if info is not None:
                self._forward(child, info)
            self._go_on(child)
        return self._end(child)

    def _pause(self) -> float | None:
        """For how long there is nothing to do but to take signals."""
        dues = []
        if self._killed_at is not None:
            dues.append(max(self._killed_at - time.monotonic(), 0.0))
        if self._report is not None and self._report.pending:
            dues.append(0.1)
        return min(dues, default=None)

    def _go_on(self, child: Child) -> None:
        if self._report is not None:
            self._report.flush()
        if self._killed_at is not None and time.monotonic() >= self._killed_at:
            self._killed_at = None
            child.stop(0)

    def _take_signals(self) -> set[int]:
        """From here on signals wait until the loop takes them. Ignored ones stay ignored."""
        self._signals = to_take()
        blocked = block(self._signals)
        # In our process group the command gets the terminal's keys, and may read from it. Started
        # with nohup, or in the background of a script, it must not get what we ignore.
        usual = {HUP, INT} <= set(self._signals)
        self._foreground = not self._detach and usual and has_terminal()
        if self._foreground and _signal.getsignal(TSTP) != _signal.SIG_IGN:
            # Else Ctrl-Z would stop us at once, and the shell, which waits for us alone, would read
            # the terminal beside a command that has not stopped yet, or never does.
            self._signals.append(TSTP)
            block(self._signals)
        return blocked

    def _start(self) -> Child:
        if not self._detach:  # what is left running is not ours to reap
            adopt_orphans()
        try:
            child = spawn(
                self._block,  # type: ignore[arg-type]
                self._command,
                wait=None,
                foreground=self._foreground,
                **self._spawning,
            )
        except OSError as exc:
            failure = not_executed(exc, self._command)
            if failure is None:
                raise
            self._tell("failed", None, reason=str(failure))
            raise failure from None
        if isinstance(self._block, Bundle):
            child.ports = self._block.named
        self._tell("starting", child)
        return child

    def _await_listening(self, child: Child, main: int) -> None:
        try:
            child.wait_listening(self._limit)
        except BaseException as exc:
            self._failure = exc
        self._settled = True
        _signal.pthread_kill(main, CHLD)

    def _is_over(self, child: Child) -> bool:
        if not self._settled:
            return False
        if self._failure is not None:
            return True
        if not self._told:
            self._told = True
            self._note(
                f"{self._name} (pid {child.pid}) listens on {_ports(self._block, child)}"
                f" after {child.listened_after or 0:.2f} s."
            )
            self._tell("listening", child)
        if child.poll() is None:
            return self._detach
        # a program that went into the background left a process that listens where it should
        return child.returncode != 0 or self._ending or not self._daemon_listens(child)

    def _daemon_listens(self, child: Child) -> bool:
        if not self._limit or childless():
            return False
        from ..listening import Watch

        watch = Watch(self._block, child.ports)  # type: ignore[arg-type]
        try:
            return watch.all_up()
        finally:
            watch.close()

    def _reap(self, child: Child) -> None:
        """Reap whoever has ended: the child, and orphans that the kernel gave us."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            if info.si_pid == child.pid and child.returncode is None:
                child.poll()
                continue
            try:  # noqa: SIM105 - contextlib costs 2 ms at import
                os.waitpid(info.si_pid, os.WNOHANG)
            except ChildProcessError:
                pass  # the thread that waits for the child to listen has reaped it since

    def _forward(self, child: Child, info: _signal.struct_siginfo, *, early: bool = False) -> None:
        number = info.si_signo
        if number == CHLD:
            self._reap(child)
            self._stop_with(child)
            return
        if number in ENDING:
            self._ending = True
        if number == TERM and self._grace is not None and self._killed_at is None:
            self._killed_at = time.monotonic() + self._grace
        if child.returncode is not None:  # its daemons are our children
            for pid in children():
                try:  # noqa: SIM105 - contextlib costs 2 ms at import
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    pass
            if number == TSTP:
                os.kill(os.getpid(), STOP)
            return
        if self._foreground and not early and info.si_code > 0 and _same_group(child.pid):
            # The terminal sent it to the whole group; but a hang-up to its session's leader alone.
            if number == HUP and os.getsid(0) == os.getpid():
                child.send_signal(number)
            return
        if number in KEYS and not self._foreground and child.poll() is None:
            # as a terminal does: a shell heeds Ctrl-C only if the program that it waits for does
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)
        if number in (HUP, TERM) and _state(child.pid) == "T":
            child.send_signal(CONT)  # a stopped command would not get to it

    def _stop_with(self, child: Child) -> None:
        """Stop when the command has been stopped from the terminal; the shell continues both."""
        if TSTP not in self._signals or child.returncode is not None or not _same_group(child.pid):
            return
        try:
            info = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:
            return  # the thread that waits for it to listen has reaped it since
        if info is not None and info.si_status in STOPS:
            os.kill(os.getpid(), STOP)

    def _end(self, child: Child) -> int:
        failure = self._failure
        if failure is not None and not isinstance(failure, HandoffError):
            raise failure
        if failure is None and self._detach and self._is_left(child):
            ports = _ports(self._block, child)
            print(f"{self._name} is left running on {ports}; to end it: kill {child.pid}")
            return 0
        if not childless():
            self._end_family(child)
        if failure is None:
            self._tell("ended", child)
            return exit_status(child.returncode)
        return self._failed(failure, child)

    def _is_left(self, child: Child) -> bool:
        return not self._ending and (child.poll() is None or self._daemon_listens(child))

    def _end_family(self, child: Child) -> None:
        """End what the command left behind: TERM, a grace, KILL. One more signal cuts it short."""
        for number in ENDING:
            _signal.signal(number, _signal.default_int_handler)
        try:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, ENDING)
            child.stop()
        except KeyboardInterrupt:
            child.stop(0)
        finally:
            _signal.pthread_sigmask(_signal.SIG_BLOCK, ENDING)
        self._reap(child)

    def _failed(self, failure: HandoffError, child: Child) -> int:
        code = failure.returncode
        self._tell("ended" if code == 0 else "failed", child, reason=str(failure))
        after = f"{failure.elapsed:.2f} s"
        ports = _ports(self._block, child)
        if failure.inode is not None:
            text = str(failure).partition(". Stop that process")[0]
            complain(
                f"{printable(text)}. Stop that process, or use --wait 0 if it is the server"
                " you mean."
            )
            return 1
        if code is None:
            complain(
                f"{self._name} (pid {child.pid}) did not listen on {ports} within"
                f" {self._limit:g} s and was ended. Give it more time with --wait, name the ports"
                " it listens on in its arguments, or use --wait 0."
            )
            return 1
        if not self._ending:
            how = f"with status {code}" if code >= 0 else f"by signal {-code}"
            text = f"{self._name} ended {how} after {after} and did not listen on {ports}."
            if code > 0 and failure.mode == "door":
                text += " If it found its port in use, start it with --handoff close."
            self._note(text)
        return exit_status(code)

    def _tell(self, state: str, child: Child | None, *, reason: str = "") -> None:
        """A line for the report, if there is one."""
        if self._report is None:
            return
        seconds = time.monotonic() - self._began
        if state == "listening" and child is not None:
            seconds = child.listened_after or 0.0
        self._report.tell(
            self._block,
            label=self._block.label,
            ports=self._block.ports if child is None else child.ports,
            pid=None if child is None else child.pid,
            state=state,
            returncode=None if child is None else child.returncode,
            seconds=seconds,
            reason=reworded(reason),
        )

    def _note(self, text: str) -> None:
        if not self._quiet:
            say(text)


def _ports(block: PortBlock | Bundle, child: Child) -> str:
    ports = child.ports
    kind = "" if block.protocol == "tcp" else "udp " if block.protocol == "udp" else "tcp and udp "
    return f"{kind}port{'s' if len(ports) > 1 else ''} {spans(ports)}"


def _state(pid: int) -> str:
    """One letter of proc(5), "" for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rpartition(b") ")[2][0])
    except OSError:
        return ""


def _same_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == os.getpgrp()
    except ProcessLookupError:
        return True


def not_executed(exc: OSError, command: Sequence[str]) -> Failure | None:
    """What a shell says of a program that it cannot execute; None for any other trouble."""
    if exc.filename is None:
        return None
    missing = isinstance(exc, (FileNotFoundError, NotADirectoryError))
    return Failure(f"{printable(command[0])}: {exc.strerror}.", 127 if missing else 126)
