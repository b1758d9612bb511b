"""Signals for a launcher that takes them one by one, and what a shell makes of an end."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal  # what signal is made of; the module around it costs 4 ms

__all__ = [
    "CHLD", "CONT", "ENDING", "HUP", "INT", "KEYS", "KILL", "STOP", "STOPS", "TERM", "TSTP",
    "block", "children", "exit_status", "has_terminal", "restore", "to_take", "wait",
]  # fmt: skip

HUP, INT, QUIT, KILL, USR1, USR2, TERM, CHLD, WINCH = 1, 2, 3, 9, 10, 12, 15, 17, 28
CONT, STOP, TSTP, TTIN, TTOU = 18, 19, 20, 21, 22
_TAKEN = (HUP, INT, QUIT, USR1, USR2, TERM, WINCH)
#: What a terminal sends to a whole process group.
KEYS = (INT, QUIT)
#: After these a command is meant to end, and so is what it leaves behind.
ENDING = (INT, QUIT, TERM)
#: What job control stops a process with.
STOPS = (TSTP, TTIN, TTOU)


def to_take() -> list[int]:
    """The signals to pass on, less those that are ignored, and SIGCHLD."""
    return [*(n for n in _TAKEN if _signal.getsignal(n) != _signal.SIG_IGN), CHLD]


def block(signals: list[int]) -> set[int]:
    """From here on signals wait until they are taken. What was blocked before."""
    # whoever started us may have had SIGCHLD ignored, and then no child leaves a status
    _signal.signal(CHLD, _signal.SIG_DFL)
    return set(_signal.pthread_sigmask(_signal.SIG_BLOCK, signals))


def restore(blocked: set[int]) -> None:
    _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)


def wait(signals: list[int], pause: float | None) -> _signal.struct_siginfo | None:
    """The next signal; None after ``pause`` seconds without one."""
    if pause is None:
        return _signal.sigwaitinfo(signals)
    return _signal.sigtimedwait(signals, pause)


def exit_status(returncode: int | None) -> int:
    """What a shell makes of it: 128 and the number of the signal that ended the child."""
    if returncode is None:
        return 1
    return returncode if returncode >= 0 else 128 - returncode


def has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def children() -> list[int]:
    """Those of all threads, zombies included."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
        except OSError:
            continue
    return found
