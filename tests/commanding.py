"""The command line as its users run it: a process with pipes, or on a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

COMMAND = (sys.executable, "-m", "fastports")


def fastports(
    *words: str,
    status: int = 0,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, in a session of its own, and check its exit status."""
    done = subprocess.run(
        [*COMMAND, *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env=None if env is None else {**os.environ, **env},
        start_new_session=True,
    )
    assert done.returncode == status, done
    # a program may have one; the command itself never has
    assert "fastports/cli" not in done.stderr, done
    return done


class Running:
    """The command under way. Its stdout and stderr are read as lines, with a deadline."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        assert process.stdout is not None and process.stderr is not None
        self._pipes = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno()}
        self._read = {"stdout": b"", "stderr": b""}

    def line(self, containing: str, *, stream: str = "stdout", timeout: float = 20) -> str:
        """The next line of a stream that contains this; what came before it is dropped."""
        deadline = time.monotonic() + timeout
        while True:
            head, newline, rest = self._read[stream].partition(b"\n")
            if newline:
                self._read[stream] = rest
                if containing in head.decode():
                    return head.decode()
                continue
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._pipes[stream]], [], [], left)[0], (
                f"no {containing!r} on {stream}, only {head!r}"
            )
            data = os.read(self._pipes[stream], 65536)
            assert data, f"{stream} ended without {containing!r}"
            self._read[stream] += data

    def rest(self, stream: str = "stdout") -> str:
        """What is left of a stream, to its end."""
        deadline = time.monotonic() + 20
        while select.select([self._pipes[stream]], [], [], deadline - time.monotonic())[0]:
            data = os.read(self._pipes[stream], 65536)
            if not data:
                return self._read[stream].decode()
            self._read[stream] += data
        raise AssertionError(f"{stream} does not end: {self._read[stream]!r}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout: float = 20) -> int:
        return self.process.wait(timeout)


@contextmanager
def running(
    *words: str, prefix: Sequence[str] = (), preexec: Callable[[], None] | None = None
) -> Iterator[Running]:
    """``fastports`` with these words, killed at the end of the block if it still runs."""
    with subprocess.Popen(
        [*prefix, *COMMAND, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=preexec,
    ) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


class Terminal:
    """A program that leads a session on a terminal of 80 x 24."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.fd = fd
        self.shown = ""

    def expect(self, text: str, timeout: float = 20) -> str:
        """Read until the terminal shows this; what it showed up to there."""
        deadline = time.monotonic() + timeout
        while text not in self.shown:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.fd], [], [], left)[0], (
                f"no {text!r} on the terminal, only {self.shown!r}"
            )
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # EIO: nobody has the other end open
                data = b""
            assert data, f"the terminal was left without {text!r}: {self.shown!r}"
            self.shown += data.decode()
        head, found, self.shown = self.shown.partition(text)
        return head + found

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def close(self) -> None:
        """Hang up."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def end(self) -> int:
        """Exit status once it has ended; the terminal is read meanwhile, or it might block."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            while self.fd >= 0 and select.select([self.fd], [], [], 0 if pid else 0.01)[0]:
                try:
                    self.shown += os.read(self.fd, 65536).decode()
                except OSError:  # EIO: nobody has the other end open
                    break
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"it does not end: {self.shown!r}")


@contextmanager
def shell() -> Iterator[Terminal]:
    """An interactive Bash on a terminal of its own, at its prompt."""
    argv = ("/bin/bash", "--norc", "--noprofile", "-i")
    with terminal(*argv, env={"PS1": "$ "}) as term:
        term.expect("$ ")
        yield term


@contextmanager
def terminal(*argv: str, env: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    """A program on a terminal of its own, killed at the end of the block."""
    import fcntl
    import struct
    import termios

    environment = {**os.environ, "TERM": "xterm", **(env or {})}
    pid, fd = pty.fork()
    if pid == 0:
        try:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            # Ctrl-C would drop output that nobody has read yet, the answer to it perhaps
            modes = termios.tcgetattr(0)
            modes[3] |= termios.NOFLSH
            termios.tcsetattr(0, termios.TCSANOW, modes)
            os.execve(argv[0], argv, environment)
        finally:
            os._exit(127)
    os.set_inheritable(fd, False)
    term = Terminal(pid, fd)
    try:
        yield term
    finally:
        if term.pid:
            os.kill(term.pid, 9)
            os.waitpid(term.pid, 0)
        term.close()
