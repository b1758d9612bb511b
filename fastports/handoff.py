"""Handing ports to a program: start it, let it in beside the hold, wait until it listens.

Each way of letting it in is a *mode*. They stand in one table, strongest first; ``"auto"`` takes
the first that works on this machine.
"""

from __future__ import annotations

import os
import time

from . import _spawn
from ._core import duplicate, pipe
from ._spawn import Process, start
from .brokered import BindDoor, Broker
from .child import Child, sweep
from .command import FIRST_DESCRIPTOR, Command, number
from .errors import HandoffError, InvalidRequest
from .events import emit
from .family import TOKEN
from .host import record_for
from .listening import facts
from .mode import Handover, Mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from io import FileIO
    from typing import Any, Protocol, TypeAlias

    from ._core import Descriptor
    from .block import PortBlock
    from .command import Text
    from .mode import Launch

    class HasFileno(Protocol):
        def fileno(self) -> int: ...

    Stream: TypeAlias = int | HasFileno | None

__all__ = ["DEVNULL", "PIPE", "STDOUT", "Child", "ModeStatus", "modes", "spawn"]

#: As in subprocess, so that either module's names can be used.
PIPE, STDOUT, DEVNULL = -1, -2, -3

#: The environment variable that lists the ports of the block, by commas.
PORTS = b"FASTPORTS_PORTS"

# Nobody reads the child's pipes before it listens: they are made as wide as an ordinary user may
# (/proc/sys/fs/pipe-max-size); the memory is taken as it fills.
_PIPE_SIZE = 1 << 20
_F_SETPIPE_SZ = 1031

_KEPT_FROM = 200  # above the descriptors that people give numbers to

_TAIL = 8192  # bytes of stderr that are looked at
_TAIL_LINES = 20


# --- modes ----------------------------------------------------------------------------------------


class _Launch:
    """Everything a mode needs to start the child: :meth:`__call__` with what the mode adds."""

    def __init__(
        self,
        command: Command,
        descriptors: dict[int, int],
        group: int,
        leash: int,
        *,
        exclusive: bool,
        listen: bool,
        detach: bool,
    ) -> None:
        self.command = command
        self.exclusive = exclusive
        self.listen = listen
        self.detach = detach
        self._descriptors = descriptors
        self._group = group
        self._leash = leash

    def __call__(self, **added: Any) -> Process:
        """Start the program; ``added`` are keyword arguments of :func:`fastports._spawn.start`."""
        command = self.command
        descriptors = {**self._descriptors, **added.pop("descriptors", {})}
        for fd in added.pop("kept", ()):
            number = max(_KEPT_FROM, *descriptors) if descriptors else _KEPT_FROM
            descriptors[number + 1] = fd
        if self.detach:
            added["death_signal"] = 0
        try:
            return start(
                command.programs,
                command.argv,
                command.env,
                cwd=command.cwd,
                descriptors=descriptors,
                group=self._group,
                leash=self._leash,
                **added,
            )
        except OSError as exc:
            raise self.explain(exc) from None

    def entry(self) -> socket | None:
        """A socket for a detached child to keep, so that its ports stay on record."""
        if not self.detach:
            return None
        from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_DGRAM, socket

        try:
            return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC)
        except OSError:
            return None

    def explain(self, exc: OSError) -> OSError:
        """The same error as ``subprocess.Popen`` words it: with the file that it is about."""
        stage = getattr(exc, "stage", "")
        if stage == "exec":
            return OSError(exc.errno, exc.strerror, self.command.args[0])
        if stage == "directory" and self.command.cwd is not None:
            return OSError(exc.errno, exc.strerror, os.fsdecode(self.command.cwd))
        return exc


class _OpenDoor(Handover):
    def __init__(self, block: PortBlock) -> None:
        self._block: PortBlock | None = block
        block._entering.add(self)
        try:
            block.open_door()
        except BaseException:
            self.over()
            raise

    def listening(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        block._entering.discard(self)
        if not (block._entering or block.released or block.holds_closed):
            block.close_door()

    over = listening


class _Door(Mode):
    name = "door"
    hint = "it binds without SO_REUSEADDR, which no open door admits; pass handoff='close'."

    def why_not(self) -> str:
        return facts()[0]

    def start(self, block: PortBlock, launch: Launch) -> tuple[Process, Handover]:
        door = _OpenDoor(block)
        try:
            return launch(), door
        except BaseException:
            door.over()
            raise


class _Passed(Handover):
    """The child can set options on the very holds; what opens their door is taken back."""

    def __init__(self, block: PortBlock) -> None:
        self._block = block

    def listening(self) -> None:
        self._do(_settle)

    def over(self) -> None:
        self._do(_hold_again)
        self._do(_settle)

    def _do(self, act: Callable[[Any], None]) -> None:
        if not (self._block.released or self._block.holds_closed):
            _each(self._block, act)


class _Descriptors(Mode):
    name = "fd"
    hint = "it binds its port by itself; pass handoff='auto', or tell it to use descriptor {fd}."
    in_auto = False

    def why_not(self) -> str:
        return ""

    def start(self, block: PortBlock, launch: Launch) -> tuple[Process, Handover]:
        fds = block.filenos()
        block._passed = True
        if launch.listen:
            _each(block, _listen)
        descriptors = {FIRST_DESCRIPTOR + index: fd for index, fd in enumerate(fds)}
        entry = launch.entry()
        try:
            kept = () if entry is None else (entry.fileno(),)
            process = launch(descriptors=descriptors, kept=kept, listen_pid=True)
            if entry is not None:
                record_for(block, process.pid, entry)
        finally:
            if entry is not None:
                entry.close()
        return process, _Passed(block)


_BACKLOG = 4096  # the kernel takes net.core.somaxconn if that is less


def _each(block: PortBlock, act: Callable[[Any], None]) -> None:
    """Do something to each socket of a block."""
    for fd in block.filenos():
        sock = duplicate(fd)
        try:
            act(sock)
        finally:
            sock.close()


def _listen(sock: Any) -> None:
    from _socket import SOCK_STREAM

    if sock.type == SOCK_STREAM:
        sock.listen(_BACKLOG)
    _settle(sock)


def _settle(sock: Any) -> None:
    """SO_REUSEADDR on a passed socket that listens, and on no other.

    A listening socket admits nobody, whatever its options. Its connections inherit the option, and
    in TIME_WAIT those that lack it keep the port from everybody for a minute, once the block is
    given back.
    """
    from _socket import SO_ACCEPTCONN, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET

    listens = sock.type == SOCK_STREAM and sock.getsockopt(SOL_SOCKET, SO_ACCEPTCONN)
    sock.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1 if listens else 0)


def _hold_again(sock: Any) -> None:
    """Take back what lets others bind beside this socket."""
    from _socket import (
        SHUT_RD,
        SO_ACCEPTCONN,
        SO_REUSEADDR,
        SO_REUSEPORT,
        SOCK_STREAM,
        SOL_SOCKET,
    )

    sock.setsockopt(SOL_SOCKET, SO_REUSEADDR, 0)
    if not sock.getsockopt(SOL_SOCKET, SO_REUSEPORT):
        return
    sock.setsockopt(SOL_SOCKET, SO_REUSEPORT, 0)
    if sock.type != SOCK_STREAM:
        return
    # The kernel's bucket of the port remembers SO_REUSEPORT until a socket without it listens.
    listens = sock.getsockopt(SOL_SOCKET, SO_ACCEPTCONN)
    if listens:
        sock.shutdown(SHUT_RD)
    try:
        sock.listen(_BACKLOG)
    except OSError:
        return  # somebody who joined the program listens there
    if not listens:
        sock.shutdown(SHUT_RD)


def _stop_listening(block: PortBlock) -> None:
    """Make the holds holds again: a listening socket of ours would swallow the child's clients."""
    if not block._passed:
        return
    block._passed = False

    def stop(sock: Any) -> None:
        from _socket import SHUT_RD, SO_ACCEPTCONN, SOCK_STREAM, SOL_SOCKET

        _hold_again(sock)
        if sock.type == SOCK_STREAM and sock.getsockopt(SOL_SOCKET, SO_ACCEPTCONN):
            sock.shutdown(SHUT_RD)  # tcp_disconnect(): bound as before, and listening no more

    _each(block, stop)


class _Close(Mode):
    name = "close"
    hint = (
        "another program took the port after the hold was closed, or connections of an earlier"
        " server are in TIME_WAIT on it; start again on a new block."
    )

    def why_not(self) -> str:
        return ""

    def start(self, block: PortBlock, launch: Launch) -> tuple[Process, Handover]:
        launch.command.check_program()
        kept: list[int] = []
        entry = launch.entry()
        marked = block.holds_closed
        try:
            if launch.detach:
                kept += block._mark()
            if entry is not None:
                kept.append(entry.fileno())
            try:
                process = launch(gate=True, kept=kept)
            except BaseException:
                if launch.detach and not marked:
                    block._unmark()
                raise
            try:
                block.close_holds()  # the markers first; the child has no copy of the holds by now
                if entry is not None:
                    record_for(block, process.pid, entry)
                process.go()
            except OSError as exc:
                process.abort()
                raise launch.explain(exc) from None
            except BaseException:
                process.abort()
                raise
        finally:
            if entry is not None:
                entry.close()
        return process, Handover()


# Strongest first.
_MODES: tuple[Mode, ...] = (
    Broker(),
    _Descriptors(),
    BindDoor(),
    _Door(),
    _Close(),
)
_told: set[str] = set()


class ModeStatus:
    """Whether a hand-off mode works here, and if not why; see :func:`modes`."""

    __slots__ = ("name", "why", "works")

    def __init__(self, name: str, why: str) -> None:
        self.name: str = name
        self.works: bool = not why
        self.why: str = why

    def __repr__(self) -> str:
        return f"<ModeStatus {self.name}: {'works' if self.works else self.why}>"


def modes() -> dict[str, ModeStatus]:
    """Which hand-off modes work in this process, strongest first, and why the others do not."""
    return {mode.name: ModeStatus(mode.name, mode.why_not()) for mode in _MODES}


def _choose(
    handoff: str, block: PortBlock, command: Command, *, exclusive: bool, detach: bool
) -> Mode:
    by_name = {mode.name: mode for mode in _MODES}
    if detach:
        if handoff not in ("auto", "close", "fd") or exclusive:
            raise InvalidRequest(
                "detach=True leaves the program to itself, and what handoff="
                f"{'broker' if exclusive else handoff!r} does for it ends with this process. Pass"
                " handoff='close', or 'fd' for a program that takes sockets.",
                argument="detach",
                value=detach,
            )
        handoff = "close" if handoff == "auto" else handoff
    if exclusive and handoff not in ("auto", "broker"):
        raise InvalidRequest(
            f"exclusive=True takes an option from the child's sockets, which handoff={handoff!r}"
            " never sees. Pass handoff='broker'.",
            argument="exclusive",
            value=exclusive,
        )
    if block.holds_closed:  # by an earlier close mode: the markers stand, the holds do not
        if handoff in ("auto", "close") and not exclusive:
            return by_name["close"]
        raise HandoffError(
            f"the holds of ports {block.first}-{block.last} were closed for an earlier child:"
            f" handoff={handoff!r} has nothing to work with. Pass handoff='close', or allocate a"
            " new block.",
            mode=handoff,
        )
    if exclusive:
        handoff = "broker"
    if handoff != "auto":
        mode = by_name[handoff]
        why = mode.why_not() or mode.why_not_for(command)
        if why:
            raise HandoffError(
                f"handoff={handoff!r} does not work here: {why}. Pass handoff='auto'.",
                mode=handoff,
            )
        return mode
    missed = []
    mode = _MODES[-1]
    for mode in _MODES:
        if not mode.in_auto:
            continue
        why = mode.why_not()
        if not why and not mode.why_not_for(command):
            break
        if why:
            missed.append(f"{mode.name}: {why}")
    if missed and mode.name not in _told:
        _told.add(mode.name)
        emit("mode_fallback", block, mode=mode.name, why="; ".join(missed))
    return mode


# --- standard streams -----------------------------------------------------------------------------


class _Streams:
    """The child's 0, 1 and 2, and our ends of the pipes."""

    def __init__(self, stdin: Stream, stdout: Stream, stderr: Stream) -> None:
        self._asked = [_stream(stdin, 0), _stream(stdout, 1), _stream(stderr, 2)]
        self.pipes: list[FileIO | None] = [None, None, None]
        self.descriptors: dict[int, int] = {}
        self._close: list[Descriptor | FileIO] = []
        self._file: tuple[int, int] | None = None

    def open(self) -> None:
        for target, asked in enumerate(self._asked):
            if asked is None:
                continue
            if asked == PIPE:
                reader, writer = pipe()
                mine, end = (writer, reader) if target == 0 else (reader, writer)
                self._close.append(end)
                theirs = end.fd
                self.pipes[target] = file = mine.file("wb" if target == 0 else "rb")
                _widen(file.fileno())
            elif asked == DEVNULL:
                null = open(os.devnull, "r+b", buffering=0)  # noqa: SIM115 - closed by started()
                self._close.append(null)
                theirs = null.fileno()
            elif asked == STDOUT:
                theirs = self.descriptors.get(1, 1)
            else:
                theirs = asked
            self.descriptors[target] = theirs
        if self.pipes[2] is None and 2 in self.descriptors:
            self._file = _regular(self.descriptors[2])

    def started(self) -> None:
        """The child has its ends; ours of them go."""
        for end in self._close:
            end.close()
        self._close.clear()

    def close(self) -> None:
        """Nothing came of it: close everything that was made here."""
        self.started()
        for file in self.pipes:
            if file is not None:
                file.close()

    def tail(self) -> str:
        """The last lines of stderr so far, where a pipe or a file has them."""
        if self._file is not None:
            data = _end_of(*self._file)
        elif self.pipes[2] is not None and not self.pipes[2].closed:
            data = _drain(self.pipes[2].fileno())
        else:
            return ""
        lines = data.decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _stream(asked: Stream, target: int) -> int | None:
    name = ("stdin", "stdout", "stderr")[target]
    fd: object = asked
    if asked is not None and not isinstance(asked, int):
        try:
            fd = asked.fileno()
        except (AttributeError, OSError, ValueError):
            fd = None
        if not isinstance(fd, int):
            raise InvalidRequest(
                f"{name}={asked!r} has no descriptor. Pass a file, a descriptor, PIPE, DEVNULL"
                " or None.",
                argument=name,
                value=asked,
            )
    if fd is None:
        return None
    assert isinstance(fd, int)
    lowest = STDOUT if target == 2 else PIPE
    if isinstance(asked, bool) or not (fd >= lowest or fd == DEVNULL):
        raise InvalidRequest(
            f"{name}={asked!r} is neither a file nor a descriptor. Pass one, PIPE, DEVNULL"
            f"{', STDOUT' if target == 2 else ''} or None.",
            argument=name,
            value=asked,
        )
    return fd


def _widen(pipe: int) -> None:
    from fcntl import fcntl  # 0.2 ms

    try:  # noqa: SIM105 - contextlib costs 2 ms at import
        fcntl(pipe, _F_SETPIPE_SZ, _PIPE_SIZE)
    except OSError:
        pass  # the user's share of pipe memory is used up: the usual 64 KiB do


def _regular(fd: int) -> tuple[int, int] | None:
    """The descriptor of a regular file and its size now; None for anything else."""
    from stat import S_ISREG

    try:
        status = os.fstat(fd)
    except OSError:
        return None  # the start will say so
    return (fd, status.st_size) if S_ISREG(status.st_mode) else None


def _end_of(fd: int, start: int) -> bytes:
    """What was appended to a file since ``start``, or its last part; the file may be write-only."""
    try:
        with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as again:
            size = os.fstat(again.fileno()).st_size
            return os.pread(again.fileno(), _TAIL, max(start, size - _TAIL))
    except OSError:
        return b""  # the caller closed it, or the number is another file's now


def _drain(pipe: int) -> bytes:
    data = b""
    os.set_blocking(pipe, False)
    try:
        while part := os.read(pipe, 65536):
            data = (data + part)[-_TAIL:]
    except BlockingIOError:
        pass
    finally:
        os.set_blocking(pipe, True)
    return data


# --- spawn ----------------------------------------------------------------------------------------


def spawn(
    block: PortBlock,
    argv: Sequence[Text],
    *,
    handoff: str = "auto",
    wait: str | Iterable[int] | None = "listen",
    timeout: float | None = 30.0,
    env: Mapping[str, str] | Mapping[bytes, bytes] | None = None,
    cwd: Text | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    pass_fds: Iterable[int] = (),
    new_session: bool = False,
    foreground: bool = False,
    exclusive: bool = False,
    listen: bool = False,
    detach: bool = False,
    grace: float = 5.0,
) -> Child:
    """Start a program on the ports of a block and wait until it listens on them.

    Parameters
    ----------
    block
        A held block; it stays held behind the program for the program's life, which can crash and
        be started again on it as often as wanted.
    argv
        Program and arguments; no shell. ``{port}`` (the first), ``{port0}``, ``{port1}``...,
        ``{first}``, ``{last}``, ``{ports}`` (by commas) and ``{host}`` (``0.0.0.0`` for the
        wildcard) are filled in, in the values of ``env`` too. Every other brace is passed as it is.
    handoff
        ``"broker"``: any program; its bind and listen calls on the block's ports are performed by
        the launcher on its own sockets, beside the hold. ``"bind-door"``: where its sockets cannot
        be fetched, the door is open during these calls alone, for programs that set SO_REUSEADDR.
        ``"door"``: the program binds beside the hold, which admits sockets with SO_REUSEADDR until
        it listens. ``"close"``: the holds are closed just before the program is executed, for
        programs that bind plainly; markers keep every other user of fastports off.
        ``"fd"``: the program gets the held sockets, as descriptors from 3 on in port order (tcp
        before udp), with ``LISTEN_FDS``, ``LISTEN_PID`` and ``LISTEN_FDNAMES`` as systemd sets
        them; ``{fd}``, ``{fd0}``, ``{fd1}``... are their numbers. ``LISTEN_PID`` is the pid of the
        process that is started: a shell has to ``exec`` the server, or the server finds another
        pid in it and takes no socket, as under systemd. What the program made listen stays so when
        it ends, and clients wait for the next one, until the block is handed over in another mode.
        ``"auto"``: the strongest of broker, bind-door and door that works here; see :func:`modes`.
    wait
        ``"listen"`` waits for the ports that ``argv`` and ``env`` name, or for all of the block if
        they name none, or ``{ports}`` or ``{last}``. A collection of port numbers waits for those.
        None does not wait and leaves the door open until :meth:`Child.wait_listening` or the
        program's end.
    timeout
        Seconds until it has to listen; None for no limit.
    env
        The child's environment, None for this process's as it is. ``FASTPORTS_PORTS`` (the block's
        ports, by commas) and ``FASTPORTS_CHILD`` (a token that tells descendants) are added.
    cwd, stdin, stdout, stderr, pass_fds
        As for ``subprocess.Popen``; pipes are binary. No other descriptor is inherited, but for one
        end of a pipe, through which the kernel ends the program's group with the launcher.
    new_session
        Whether the child leads a session of its own (setsid(2)), away from the terminal. Otherwise
        it leads a process group of its own in this session.
    foreground
        Leave the child in the launcher's process group, so that it can read the terminal and gets
        Ctrl-C and Ctrl-Z from it.
    exclusive
        Take SO_REUSEPORT from the child's sockets, so that no other program of this user can join
        them; for a server that sets it although it needs one listener only. The broker's.
    listen
        In fd mode: have the sockets listen before the program starts, so that clients can connect
        from now on and wait for it.
    detach
        Leave the child running when this process ends, in a session of its own. In close mode,
        which ``"auto"`` takes then, it inherits the markers of the ports (descriptors above 200),
        so that no other user of fastports takes them until it and all that inherited them have
        ended; in fd mode it has the sockets themselves. Either way it is on record with its own
        pid. :meth:`Child.stop` and a ``with`` statement end it as they end any child.
    grace
        Seconds between SIGTERM and SIGKILL wherever the child is ended.

    Returns
    -------
    Child
        What quacks like ``subprocess.Popen``. The child gets SIGKILL when this process ends,
        however it ends; not when the calling thread does, and not with ``detach``.

    Raises
    ------
    InvalidRequest
        Before anything is touched.
    FileNotFoundError, PermissionError, NotADirectoryError, OSError
        As ``subprocess.Popen``; the block is held as before. (In close mode only a program that
        cannot be executed for a reason that nobody can see before, such as a broken ``#!`` line,
        leaves the block closed.)
    HandoffError
        The program ended, did not listen in time, or somebody else listens on the port. Nothing of
        the program is left, and the block is held.
    BlockReleased, NotOwner
        The block is not ours to use.

    Notes
    -----
    In broker mode nothing enters where the launcher has CAP_NET_RAW. Without it a program that
    binds and listens on this very port with SO_REUSEADDR within the microseconds of a call can. The
    child and all that it starts run with no_new_privs. A server that sets SO_REUSEPORT itself can
    be joined by programs of its user that do so too; see ``exclusive``.

    In door mode, until the program listens, a stranger that binds this very port with SO_REUSEADDR
    can enter; in bind-door mode during the program's bind and listen calls. That is found out and
    told, not taken for the program. In close mode any program can take the port until this one has
    bound it.
    """
    names = ["auto", *(mode.name for mode in _MODES)]
    if handoff not in names:
        raise InvalidRequest(
            f"handoff={handoff!r} is no mode. Pass one of {', '.join(names)}.",
            argument="handoff",
            value=handoff,
        )
    budget = None if timeout is None else number(timeout, "timeout")
    grace = number(grace, "grace")
    if new_session and foreground:
        raise InvalidRequest(
            "new_session=True leaves the terminal, foreground=True keeps it. Pass one of them.",
            argument="foreground",
            value=foreground,
        )
    if detach and foreground:
        raise InvalidRequest(
            "detach=True leaves the terminal, foreground=True keeps it. Pass one of them.",
            argument="foreground",
            value=foreground,
        )
    streams = _Streams(stdin, stdout, stderr)
    kept = _kept(pass_fds)
    token = os.urandom(8).hex().encode()
    ports = b",".join(b"%d" % port for port in block.ports)
    variables = {PORTS: ports, TOKEN: token}
    count = 0
    if handoff == "fd":
        count = len(block) * (2 if block.protocol == "both" else 1)
        variables[b"LISTEN_FDS"] = b"%d" % count
        variables[b"LISTEN_FDNAMES"] = b":".join([_name(block)] * count)
        if any(fd < FIRST_DESCRIPTOR + count for fd in kept):
            raise InvalidRequest(
                f"pass_fds={sorted(kept)} collides with the sockets, which are descriptors"
                f" {FIRST_DESCRIPTOR} to {FIRST_DESCRIPTOR + count - 1} of the child. Pass higher"
                " ones.",
                argument="pass_fds",
                value=sorted(kept),
            )
    elif listen:
        raise InvalidRequest(
            f"listen=True is for sockets that are passed, not for handoff={handoff!r}. Pass"
            " handoff='fd'.",
            argument="listen",
            value=listen,
        )
    command = Command(block, argv, env, cwd, variables, descriptors=count)
    wanted = _wanted(block, wait, command.named)

    block.filenos()  # a released block, or another process's, says so
    mode = _choose(handoff, block, command, exclusive=exclusive, detach=detach)
    emit("mode_chosen", block, mode=mode.name, asked=handoff)
    if mode.name != "fd" and not block.holds_closed:
        _stop_listening(block)
    sweep()
    group = _spawn.OWN_SESSION if new_session or detach else _spawn.OWN_GROUP
    if foreground:
        group = _spawn.SHARED
    child = _start(
        block,
        command,
        mode,
        streams,
        kept,
        group,
        exclusive=exclusive,
        listen=listen,
        detach=detach,
        wanted=wanted,
        token=token,
        grace=grace,
    )
    if wait is not None:
        child.wait_listening(budget)
    return child


def _start(
    block: PortBlock,
    command: Command,
    mode: Mode,
    streams: _Streams,
    kept: dict[int, int],
    group: int,
    *,
    exclusive: bool,
    listen: bool,
    detach: bool,
    wanted: Sequence[int],
    token: bytes,
    grace: float,
) -> Child:
    leash: Descriptor | None = None
    reader: Descriptor | None = None
    process: Process | None = None
    child: Child | None = None
    handover = _Told(Handover())
    began = time.monotonic()
    try:
        streams.open()
        if group != _spawn.SHARED and not detach:
            reader, leash = pipe()
        descriptors = {**streams.descriptors, **kept}
        launch = _Launch(
            command,
            descriptors,
            group,
            -1 if reader is None else reader.fd,
            exclusive=exclusive,
            listen=listen,
            detach=detach,
        )
        process, made = mode.start(block, launch)
        handover = _Told(made)
        child = Child(
            process,
            command.args,
            block=block,
            mode=mode.name,
            ports=wanted,
            token=token,
            leads=group != _spawn.SHARED,
            leash=leash,
            started=began,
            grace=grace,
            detached=detach,
            pipes=(streams.pipes[0], streams.pipes[1], streams.pipes[2]),
            stderr_tail=streams.tail,
            hint=mode.hint,
            handover=handover,
        )
        streams.started()
        child.tell("child_started")
        return child
    except BaseException:
        if process is not None:
            process.send_signal(9)
            process.ended()
            process.poll()
        if child is not None:
            child.poll()  # it is known to have ended
        handover.over()
        streams.close()
        if leash is not None:
            leash.close()
        raise
    finally:
        if reader is not None:
            reader.close()


class _Told(Handover):
    """Passes on to a handover what happens, each thing once."""

    def __init__(self, handover: Handover) -> None:
        self._handover: Handover | None = handover
        self._listening = False

    def listening(self) -> None:
        if not self._listening and self._handover is not None:
            self._listening = True
            self._handover.listening()

    def is_open(self) -> bool:
        return self._handover is not None and self._handover.is_open()

    def left(self) -> bool:
        return self._handover is not None and self._handover.left()

    def over(self) -> None:
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.over()


def _name(block: PortBlock) -> bytes:
    """What the sockets are called in LISTEN_FDNAMES: printable ASCII without a colon."""
    text = "".join(c if " " < c <= "~" and c != ":" else "_" for c in block.label)
    return text[:255].encode() or b"fastports"


def _kept(pass_fds: Iterable[int]) -> dict[int, int]:
    kept: dict[int, int] = {}
    try:
        kept = {fd: fd for fd in pass_fds}
        good = all(isinstance(fd, int) and not isinstance(fd, bool) and fd > 2 for fd in kept)
    except TypeError:
        good = False
    if not good:
        raise InvalidRequest(
            f"pass_fds={pass_fds!r} is no collection of descriptors above 2. Pass their numbers;"
            " 0, 1 and 2 have arguments of their own.",
            argument="pass_fds",
            value=pass_fds,
        )
    return kept


def _wanted(
    block: PortBlock, wait: str | Iterable[int] | None, named: Sequence[int]
) -> Sequence[int]:
    if wait is None or wait == "listen":
        return named
    wanted: list[int] | None = None
    if not isinstance(wait, (str, bytes, int)):
        try:
            wanted = sorted(set(wait))
        except TypeError:
            wanted = None
    if not wanted or any(port not in block.ports for port in wanted):
        raise InvalidRequest(
            f"wait={wait!r} is neither 'listen', nor None, nor some of the ports"
            f" {block.first}-{block.last}. Pass one of these.",
            argument="wait",
            value=wait,
        )
    return wanted
