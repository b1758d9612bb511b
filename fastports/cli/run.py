"""``fastports run``: a program on held ports, looked after as a good pid 1 would."""

from __future__ import annotations

import os
import sys

from .. import Allocator
from .._spawn import adopt_orphans, childless
from ..errors import HandoffError
from ..handoff import spawn
from ..ranges import PortRange
from . import cluster
from .bundle import Bundle
from .options import Options, parse, seconds, whole
from .say import Failure, Usage, complain, printable, reworded, say, spans

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Sequence
    from typing import Any

    from ..block import PortBlock
    from ..handoff import Child
else:
    import _signal  # what signal is made of; the module around it costs 4 ms

__all__ = ["run"]

HELP = """\
usage: fastports run [OPTION...] [--] COMMAND [ARGUMENT...]

Holds ports, starts COMMAND on them, and keeps them until it ends. Signals,
exit status and terminal are COMMAND's. In its arguments {port} is the port,
{port0} {port1}.. are those of a block; {first} {last} {ports} {host} work too.

  -n, --size N       ports in a row (default 1)
  --many NAME=N,...  several blocks; {NAME} {NAME0} {NAME1}.. in the arguments
  --range R          where to look: 20000-29999, or just one port
  --protocol P       tcp (default), udp or both
  --host H           the address to hold (default: all, IPv4 and IPv6)
  --label L          what `fastports ls` shows for them
  --handoff M        how COMMAND gets in (default auto; see `fastports doctor`)
  --wait S           seconds it may take to listen (default 30; 0: do not look)
  --etcd E, --namespace N   record them in etcd, too: see `fastports help etcd`
  -q, --quiet        tell nothing but why COMMAND could not be started

examples:
  fastports run -- python3 -m http.server {port}
  fastports run -n 8 --label decode-0 -- serve --port {port} --kv-base {port1}
  fastports run --many http=1,nixl=8 -- serve --port {http} --side {nixl0}

Exit status: COMMAND's, or 128 + its signal; 1 refused, 2 usage, 127 not found"""

_NAMES = {
    "-n": "size",
    "--size": "size",
    "--many": "many",
    "--range": "range",
    "--protocol": "protocol",
    "--host": "host",
    "--label": "label",
    "--handoff": "handoff",
    "--wait": "wait",
    **cluster.NAMES,
    "-q": "quiet",
    "--quiet": "quiet",
}

_HUP, _INT, _QUIT, _USR1, _USR2, _TERM, _CHLD, _WINCH = 1, 2, 3, 10, 12, 15, 17, 28
_FORWARDED = (_HUP, _INT, _QUIT, _USR1, _USR2, _TERM, _WINCH)
#: What a terminal sends to a whole process group.
_KEYS = (_INT, _QUIT)
#: After these the command is meant to end, and so is what it leaves behind.
_ENDING = (_INT, _QUIT, _TERM)


def run(words: Sequence[str]) -> int:
    options, command = parse(words, _NAMES, flags=("quiet",), leading=True)
    if "help" in options:
        print(HELP)
        return 0
    if not command:
        raise Usage("run needs a command to start, such as `python3 -m http.server {port}`.")
    limit = seconds(options["wait"] or "30", "--wait")
    sizes = _sizes(options) if "many" in options else None
    stderr = sys.stderr
    sys.stderr = _Told(quiet="quiet" in options)
    try:
        if cluster.given(options, environment=True):
            return _run_recorded(options, command, sizes, limit)
        return _run(_hold(Allocator(), options, sizes), command, limit, options)
    finally:
        sys.stderr = stderr


def _run(bundle: PortBlock | Bundle, command: list[str], limit: float, options: Options) -> int:
    try:
        if isinstance(bundle, Bundle):
            command = bundle.fill(command)
        return _Run(bundle, command, options["handoff"] or "auto", limit, options).status()
    finally:
        bundle.release()


def _run_recorded(
    options: Options, command: list[str], sizes: dict[str, int] | None, limit: float
) -> int:
    on_lost, on_restored = cluster.telling(quiet="quiet" in options)
    registry = cluster.registry(options, on_lost=on_lost, on_restored=on_restored)
    allocator = Allocator(registry=registry)
    try:
        bundle = cluster.undisturbed(lambda: _hold(allocator, options, sizes), _to_take())
        return _run(bundle, command, limit, options)
    except cluster.Interrupted as exc:
        return exc.status
    finally:
        registry.close()


class _Told:
    """Stands in for sys.stderr: what the library logs where logging is not set up comes here."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def write(self, text: str) -> int:
        if not self._quiet and text.strip():
            say(reworded(text.strip()))
        return len(text)

    def flush(self) -> None:
        pass


# --- ports ----------------------------------------------------------------------------------------


def _shared(options: Options) -> dict[str, Any]:
    shared: dict[str, Any] = {"label": options["label"] or ""}
    for name in ("range", "protocol", "host"):
        if name in options:
            shared[name] = options[name]
    return shared


def _hold(
    allocator: Allocator, options: Options, sizes: dict[str, int] | None
) -> PortBlock | Bundle:
    shared = _shared(options)
    if sizes is not None:
        return Bundle(allocator.allocate_many(sizes, **shared))
    size = whole(options["size"] or "1", "-n", 1, 65535)
    if "range" in shared and len(wanted := PortRange(shared["range"])) == size:
        # just these ports: also over a TIME_WAIT, and without the warning about where they lie
        del shared["range"]
        return allocator.reserve(wanted, **shared)
    return allocator.allocate(size, **shared)


def _sizes(options: Options) -> dict[str, int]:
    if "size" in options:
        raise Usage("--many gives the sizes itself; leave -n out.")
    sizes: dict[str, int] = {}
    for text in options.all("many"):
        for part in text.split(","):
            name, equals, number = part.partition("=")
            if not equals:
                raise Usage(f"--many takes NAME=N, such as http=1,nixl=8, not {part!r}.")
            if name in sizes:
                raise Usage(f"--many names {name!r} twice.")
            sizes[name] = whole(number, f"--many {name}=", 1, 65535)
    Bundle.check_names(sizes)
    return sizes


# --- the program ----------------------------------------------------------------------------------


class _Run:
    """One program, from its start to its end.

    Everything of ours happens in the main thread, which waits for signals; a second thread waits
    until the program listens, and says so by one more SIGCHLD.
    """

    def __init__(
        self,
        block: PortBlock | Bundle,
        command: list[str],
        handoff: str,
        limit: float,
        options: Options,
    ) -> None:
        self._block = block
        self._command = command
        self._handoff = handoff
        self._limit = limit
        self._quiet = "quiet" in options
        self._name = printable(os.path.basename(command[0]) or command[0])
        self._foreground = False
        self._signals: list[int] = []
        self._settled = False  # the wait for its listening is over
        self._failure: BaseException | None = None
        self._told = False
        self._ending = False

    def status(self) -> int:
        self._take_signals()
        child = self._start()
        if self._limit:
            import _thread  # builtin; threading costs 3 ms

            _thread.start_new_thread(self._await_listening, (child, _thread.get_ident()))
        else:
            self._settled = True
            self._note(f"{self._name} (pid {child.pid}) has {_ports(self._block, child)}.")
            self._told = True
        # What came before the child was there reached nobody else, the terminal's keys included.
        while (info := _signal.sigtimedwait(self._signals, 0)) is not None:
            self._forward(child, info, early=True)
        while not self._is_over(child):
            self._forward(child, _signal.sigwaitinfo(self._signals))
        return self._end(child)

    def _take_signals(self) -> None:
        """From here on signals wait until the loop takes them. Ignored ones stay ignored."""
        self._signals = _to_take()
        # whoever started us may have had SIGCHLD ignored, and then no child leaves a status
        _signal.signal(_CHLD, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_BLOCK, self._signals)
        # In our process group the command gets the terminal's keys, and may read from it. Started
        # with nohup, or in the background of a script, it must not get what we ignore.
        self._foreground = _has_terminal() and {_HUP, _INT} <= set(self._signals)

    def _start(self) -> Child:
        adopt_orphans()
        try:
            child = spawn(
                self._block,  # type: ignore[arg-type]
                self._command,
                handoff=self._handoff,
                wait=None,
                foreground=self._foreground,
            )
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise Failure(f"{printable(self._command[0])}: {exc.strerror}.", 127) from None
        except PermissionError as exc:
            raise Failure(f"{printable(self._command[0])}: {exc.strerror}.", 126) from None
        except OSError as exc:
            if exc.filename is None:
                raise
            raise Failure(f"{printable(self._command[0])}: {exc.strerror}.", 126) from None
        if isinstance(self._block, Bundle):
            child.ports = self._block.named
        return child

    def _await_listening(self, child: Child, main: int) -> None:
        try:
            child.wait_listening(self._limit)
        except BaseException as exc:
            self._failure = exc
        self._settled = True
        _signal.pthread_kill(main, _CHLD)

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
        if child.poll() is None:
            return False
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
        if number == _CHLD:
            self._reap(child)
            return
        if number in _ENDING:
            self._ending = True
        if child.returncode is not None:  # its daemons are our children
            for pid in _children():
                try:  # noqa: SIM105 - contextlib costs 2 ms at import
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    pass
            return
        if self._foreground and not early and info.si_code > 0 and _same_group(child.pid):
            # The terminal sent it to the whole group; but a hang-up to its session's leader alone.
            if number == _HUP and os.getsid(0) == os.getpid():
                child.send_signal(number)
            return
        if number in _KEYS and not self._foreground and child.poll() is None:
            # as a terminal does: a shell heeds Ctrl-C only if the program that it waits for does
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)

    def _end(self, child: Child) -> int:
        failure = self._failure
        if failure is not None and not isinstance(failure, HandoffError):
            raise failure
        if not childless():
            self._end_family(child)
        if failure is None:
            return _status(child.returncode)
        return self._failed(failure, child)

    def _end_family(self, child: Child) -> None:
        """End what the command left behind: TERM, a grace, KILL. One more signal cuts it short."""
        for number in _ENDING:
            _signal.signal(number, _signal.default_int_handler)
        try:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _ENDING)
            child.stop()
        except KeyboardInterrupt:
            child.stop(0)
        finally:
            _signal.pthread_sigmask(_signal.SIG_BLOCK, _ENDING)
        self._reap(child)

    def _failed(self, failure: HandoffError, child: Child) -> int:
        after = f"{failure.elapsed:.2f} s"
        ports = _ports(self._block, child)
        if failure.inode is not None:
            text = str(failure).partition(". Stop that process")[0]
            complain(
                f"{printable(text)}. Stop that process, or use --wait 0 if it is the server"
                " you mean."
            )
            return 1
        code = failure.returncode
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
        return _status(code)

    def _note(self, text: str) -> None:
        if not self._quiet:
            say(text)


def _to_take() -> list[int]:
    """The signals to pass on, less those that are ignored, and SIGCHLD."""
    return [*(n for n in _FORWARDED if _signal.getsignal(n) != _signal.SIG_IGN), _CHLD]


def _status(returncode: int | None) -> int:
    """What a shell makes of it: 128 and the number of the signal that ended the child."""
    if returncode is None:
        return 1
    return returncode if returncode >= 0 else 128 - returncode


def _ports(block: PortBlock | Bundle, child: Child) -> str:
    ports = child.ports
    kind = "" if block.protocol == "tcp" else "udp " if block.protocol == "udp" else "tcp and udp "
    return f"{kind}port{'s' if len(ports) > 1 else ''} {spans(ports)}"


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _same_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == os.getpgrp()
    except ProcessLookupError:
        return True


def _children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
        except OSError:
            continue
    return found
