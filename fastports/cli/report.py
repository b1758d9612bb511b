"""``run --report``: what becomes of each program, for another program to read.

A line of JSON a change, whole lines only, never waited for: who does not read must not hold up who
looks after the programs.
"""

from __future__ import annotations

import json  # 7 ms, and only where a report is asked for
import os
import select
import time

from .bundle import Bundle
from .options import whole
from .say import Usage, complain, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..block import PortBlock
    from ..fleet import Change
    from .options import Options

__all__ = ["Report"]

#: A pipe that poll(2) calls writable takes this many bytes without blocking: pipe(7), PIPE_BUF.
_AT_ONCE = 4096
#: Lines that wait for a reader; then the oldest are dropped, as newer ones say more.
_WAITING = 1000
#: Seconds that a reader is given at the end for what still waits.
_AT_LAST = 1.0


class Report:
    """Lines on a descriptor of ours, or on one that is shared and is left as it is.

    Attributes
    ----------
    pending
        Whether lines wait for a reader; :meth:`flush` tries again.
    """

    def __init__(self, fd: int, name: str, *, ours: bool) -> None:
        self._fd = fd
        self._name = name
        self._ours = ours
        self._lines: list[bytes] = []
        self._rest = b""  # of a line longer than a pipe takes at once
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)

    @classmethod
    def asked(cls, options: Options) -> Report | None:
        """What ``--report`` and ``--report-fd`` ask for. Opening a FIFO waits for its reader."""
        if "report" in options and "report-fd" in options:
            raise Usage("--report and --report-fd name two places; leave one of them out.")
        path = options["report"]
        if "report-fd" in options or path == "-":
            text = options["report-fd"] or "1"
            fd = 1 if path == "-" else whole(text, "--report-fd", 0, 1048575)
            return cls(_writable(fd), "--report -" if path else f"--report-fd {fd}", ours=False)
        if path is None:
            return None
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC
        return cls(os.open(path, flags, 0o666), f"--report {printable(path)}", ours=True)

    @property
    def pending(self) -> bool:
        return bool(self._rest or self._lines)

    def change(self, change: Change, block: PortBlock | Bundle) -> None:
        """A change of a replica."""
        self.tell(
            block,
            replica=change.replica,
            label=change.label,
            ports=change.ports,
            pid=change.pid,
            state=change.state,
            returncode=change.returncode,
            seconds=change.seconds,
            restarts=change.restarts,
            reason=change.reason,
        )

    def tell(
        self,
        block: PortBlock | Bundle,
        *,
        replica: int = 0,
        label: str,
        ports: Sequence[int],
        pid: int | None,
        state: str,
        returncode: int | None,
        seconds: float,
        restarts: int = 0,
        reason: str = "",
    ) -> None:
        facts: dict[str, Any] = {
            "replica": replica,
            "label": label,
            "ports": list(ports),
            "pid": pid,
            "state": state,
            "returncode": returncode,
            "seconds": round(seconds, 3),
            "restarts": restarts,
            "reason": reason,
            # by the names that stand for them in the arguments
            "blocks": {name: list(one.ports) for name, one in block.blocks.items()}
            if isinstance(block, Bundle)
            else {"port": list(block.ports)},
        }
        self._lines.append(f"{json.dumps(facts)}\n".encode())
        del self._lines[:-_WAITING]
        self.flush()

    def flush(self, seconds: float = 0.0) -> None:
        """Write what can be written without waiting, or within that time."""
        until = time.monotonic() + seconds
        while self.pending and self._fd >= 0:
            left = max(until - time.monotonic(), 0.0)
            if not self._poller.poll(left * 1000):
                return
            data = self._rest or self._lines.pop(0)
            self._rest = b""
            try:
                # in one piece: lines of several writers stay whole, and so do those in a file
                done = os.write(self._fd, data if len(data) <= _AT_ONCE else data[:_AT_ONCE])
                self._rest = data[done:]
            except BlockingIOError:  # somebody else has made it non-blocking
                self._rest = data
                return
            except BrokenPipeError:
                pass  # nobody reads now; a FIFO may have a reader again
            except OSError as exc:
                complain(f"{self._name}: {exc.strerror}; nothing more is reported.")
                self._lines.clear()
                self._shut()

    def close(self) -> None:
        self.flush(_AT_LAST)
        self._shut()

    def _shut(self) -> None:
        fd, self._fd = self._fd, -1
        if self._ours and fd >= 0:
            os.close(fd)


def _writable(fd: int) -> int:
    import fcntl

    try:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        raise Usage(f"descriptor {fd} is not open; redirect it: {fd}>FILE.") from None
    if mode == os.O_RDONLY:
        raise Usage(f"descriptor {fd} is open for reading only; redirect it: {fd}>FILE.")
    if fd > 2:
        os.set_inheritable(fd, False)
    return fd
