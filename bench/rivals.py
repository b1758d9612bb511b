"""What fastports is measured beside: the floor in C, other libraries, what a user would write."""

from __future__ import annotations

import compileall
import ctypes
import os
import random
import shutil
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import IO

import fastports

HERE = Path(__file__).parent
FIRST, LAST = 20000, 29999


class Floor:
    """The same system calls in C."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "floor.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(self.path), str(HERE / "floor.c")]
        subprocess.run(command, check=True)
        self._lib = ctypes.CDLL(str(self.path))
        for name in ("floor_allocate", "floor_refuse", "floor_until"):
            getattr(self._lib, name).restype = ctypes.c_int64

    def allocate(
        self, calls: int, size: int = 1, *, entry: bool = True, per_probe: bool = False
    ) -> tuple[float, int]:
        """``allocate(size)`` and release: seconds, and calls (or probes) that took them."""
        probes = ctypes.c_int64(0)
        took = self._lib.floor_allocate(calls, FIRST, LAST, size, int(entry), ctypes.byref(probes))
        return _seconds(took), probes.value if per_probe else calls

    def refuse(self, calls: int, probes: int) -> tuple[float, int]:
        """Refusals after ``probes`` probes each: seconds, and probes in all."""
        return _seconds(self._lib.floor_refuse(calls, FIRST, LAST, probes)), calls * probes


def _seconds(nanoseconds: int) -> float:
    if nanoseconds < 0:
        raise OSError(-nanoseconds, os.strerror(-nanoseconds))
    return nanoseconds / 1e9


def times(calls: int, work: Callable[[], object]) -> Callable[[], int]:
    """``work``, ``calls`` times, as something to be timed."""

    def run() -> int:
        for _ in range(calls):
            work()
        return calls

    return run


def bind_zero() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port


def sample_loop() -> int | None:
    """What a user writes; gives up after 100 tries."""
    for port in random.sample(range(FIRST, LAST + 1), 100):
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port
    return None


def sample_loop_block(size: int) -> int | None:
    """The same for ``size`` ports in a row."""
    for first in random.sample(range(FIRST, LAST + 2 - size), 100):
        held: list[socket.socket] = []
        try:
            for port in range(first, first + size):
                sock = socket.socket()
                held.append(sock)
                sock.bind(("", port))
            return first
        except OSError:
            continue
        finally:
            for sock in held:
                sock.close()
    return None


class Helper:
    """A script of this folder in a process of its own: takes a line, answers with a line."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, line: str) -> None:
        pipe = self._pipe(self._process.stdin)
        pipe.write(line + "\n")
        pipe.flush()

    def answer(self) -> str:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return line.strip()

    def ask(self, line: str) -> str:
        self.send(line)
        return self.answer()

    def close(self) -> None:
        self._process.communicate()  # the end of its input is the end of the script

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


class Installed:
    """The installed package, with its bytecode, in an environment that has nothing else.

    An editable install would load pathlib at every start and so hide what the package itself loads;
    a wheel that was never imported would be compiled. The peers are found on PYTHONPATH.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self._python = str(folder / "bin" / "python")
        environment = {"base": str(folder), "platbase": str(folder)}
        library = Path(sysconfig.get_path("platlib", vars=environment))
        package = Path(fastports.__file__).parent
        skip = shutil.ignore_patterns("__pycache__", "*.pyx", "*.pxd", "*.c")
        shutil.copytree(package, library / "fastports", ignore=skip)
        compileall.compile_dir(library / "fastports", quiet=1)
        self.has_cli = (package / "cli.py").exists() or (package / "cli").exists()
        self._script = folder / "bin" / "fastports"  # as installers write it
        self._script.write_text("import sys\nfrom fastports.cli import main\nsys.exit(main())\n")
        self._environment = dict(os.environ)
        self._environment["PYTHONPATH"] = sysconfig.get_path("purelib")
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def python(self, code: str) -> Command:
        """``python -c CODE``."""
        return Command([self._python, "-c", code], self._environment)

    def command(self, *arguments: str) -> Command:
        """``fastports ARGUMENTS``."""
        return Command([self._python, str(self._script), *arguments], self._environment)


class Command:
    """A program to be run to its end, as something to be timed; its output is thrown away."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self._argv = argv
        self._environment = environment
        self.processor: list[float] = []  # seconds that each run spent there

    def __call__(self) -> int:
        output = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        pid = os.posix_spawn(self._argv[0], self._argv, self._environment, file_actions=output)
        _, status, usage = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            raise RuntimeError(f"{self._argv} ended with {code}")
        self.processor.append(usage.ru_utime + usage.ru_stime)
        return 1
