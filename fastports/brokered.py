"""The two modes in which the launcher watches the child's bind and listen calls.

In broker mode it performs them itself, on the child's own sockets; where it may not take these, it
opens the door for each call. What serves the calls is :mod:`fastports._broker`, one thread for all
children of the process.
"""

from __future__ import annotations

import os

from . import _broker
from .errors import HandoffError
from .listening import facts
from .mode import Handover, Mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._spawn import Process
    from .block import PortBlock
    from .command import Command
    from .mode import Launch

__all__ = ["BindDoor", "Broker"]

# One serving thread for the process, which is what children are children of; by pid, because a
# forked launcher needs its own.
_brokers: dict[int, _broker.Broker] = {}
# What the rehearsal said, which runs once in a process, in some 150 us.
_rehearsed: list[dict[str, str | None]] = []


def shared() -> _broker.Broker:
    """The broker of this process."""
    return _brokers.get(os.getpid()) or _brokers.setdefault(os.getpid(), _broker.Broker())


def rehearsed() -> dict[str, str | None]:
    """What :func:`fastports._broker.probe` found when it was first asked."""
    if not _rehearsed:
        _rehearsed.append(_broker.probe())
    return _rehearsed[0]


# The numbers that the broker knows blocks by, with the process that asked, by the block's id; an
# entry goes with the block's sockets.
_numbers: dict[int, tuple[int, int]] = {}


def _number(block: PortBlock) -> int:
    pid, number = _numbers.get(id(block), (0, 0))
    if pid != os.getpid():
        broker = shared()
        number = broker.add(block.filenos())
        _numbers[id(block)] = (os.getpid(), number)

        def forget(key: int = id(block)) -> None:
            broker.discard(number)
            _numbers.pop(key, None)

        block._served = forget
    return number


class Broker(Mode):
    """The launcher performs the calls."""

    name = "broker"
    hint = (
        "another socket of the program listens there already, or connections of an earlier server"
        " are in TIME_WAIT on the port; a call that could not be served is in the launcher's log."
    )
    fetch = True

    def why_not(self) -> str:
        return rehearsed()[self.name] or ""

    def why_not_for(self, command: Command) -> str:
        """A program that gains a privilege when executed would not get it."""
        for program in command.programs:
            path = program if command.cwd is None else os.path.join(command.cwd, program)
            try:
                status = os.stat(path)
            except OSError:
                continue
            gains = (status.st_mode & 0o4000 and status.st_uid != os.geteuid()) or (
                status.st_mode & 0o2010 == 0o2010
                and status.st_gid not in (os.getegid(), *os.getgroups())
            )
            if not gains and os.geteuid() != 0:
                try:
                    gains = bool(os.getxattr(path, "security.capability"))
                except OSError:
                    gains = False
            if gains:
                return (
                    f"{os.fsdecode(path)} gains a privilege when it is executed (set-uid, set-gid"
                    " or file capabilities), and no_new_privs, which the filter needs, takes it"
                )
            break
        return ""

    def start(self, block: PortBlock, launch: Launch) -> tuple[Process, Handover]:
        number = _number(block)
        ours, theirs = _broker.pair()
        try:
            process = launch(
                gate=True,
                filter=_broker.program(),
                filter_flags=_broker.FLAGS,
                filter_to=theirs.fd,
            )
        except OSError as exc:
            if getattr(exc, "stage", "") != "filter":
                raise
            raise HandoffError(
                f"handoff={self.name!r} does not work for this child: its seccomp filter was"
                f" refused ({exc.strerror}). Pass handoff='door'.",
                mode=self.name,
            ) from exc
        finally:
            theirs.close()
        try:
            listener = _broker.receive(ours.fd)
            broker = shared()
            child = broker.serve(number, listener, fetch=self.fetch, exclusive=launch.exclusive)
            process.go()
        except OSError as exc:
            process.abort()
            raise launch.explain(exc) from None
        except BaseException:
            process.abort()
            raise
        finally:
            ours.close()
        return process, self.handover(broker, child, number)

    def handover(self, broker: _broker.Broker, child: int, block: int) -> Handover:
        return _Served(broker, child)


class _Served(Handover):
    """The broker knows whether any process with the child's filter is left."""

    def __init__(self, broker: _broker.Broker, child: int) -> None:
        self._broker = broker
        self._child = child

    def left(self) -> bool:
        return self._broker.left(self._child)


class _Following(_Served):
    """The door of the block follows the calls of the child."""

    def __init__(self, broker: _broker.Broker, child: int, block: int) -> None:
        super().__init__(broker, child)
        self._block = block

    def is_open(self) -> bool:
        return self._broker.is_open(self._block)


class BindDoor(Broker):
    """The door is open while the child makes its calls."""

    name = "bind-door"
    hint = "it binds without SO_REUSEADDR, which no open door admits; pass handoff='close'."
    fetch = False

    def why_not(self) -> str:
        return super().why_not() or facts()[0]

    def handover(self, broker: _broker.Broker, child: int, block: int) -> Handover:
        return _Following(broker, child, block)
