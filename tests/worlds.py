"""Places where something is missing: another network, another user, a sandbox, few descriptors.

Namespaces, limits and filters are the kernel's own; nothing is imitated. What cannot be undone
(a user id, a limit, a seccomp filter) is done in a forked child by :func:`in_child`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest

T = TypeVar("T")

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NOBODY = 65534

#: Where blocks of a hundred ports and more fit beside whatever a neighbouring test holds: outside
#: the default range, and away from the ports that tests name.
ROOMY = "13000-19990"

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ERRNO = 0x00050000
SECCOMP_RET_ALLOW = 0x7FFF0000

#: System call numbers of asm/unistd.h.
CALLS = {
    "x86_64": {"socket": 41, "bind": 49, "getrandom": 318},
    "aarch64": {"socket": 198, "bind": 200, "getrandom": 278},
}.get(platform.machine(), {})

libc = ctypes.CDLL(None, use_errno=True)

root_only = pytest.mark.skipif(
    os.geteuid() != 0, reason="makes network namespaces, which takes root"
)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def unshare(flags: int) -> None:
    _check(libc.unshare(flags), "unshare")


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        SIOCSIFFLAGS, IFF_UP = 0x8914, 1
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def set_sysctl(name: str, value: str) -> None:
    """Set a sysctl of the calling thread's network namespace, such as ``net.ipv4.tcp_tw_reuse``."""
    with open("/proc/sys/" + name.replace(".", "/"), "w") as file:
        file.write(value)


@contextmanager
def network(sysctls: Mapping[str, str] | None = None, *, loopback: bool = True) -> Iterator[None]:
    """A fresh network namespace for the calling thread, and what it starts, inside the block."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare(CLONE_NEWNET)
        try:
            if loopback:
                loopback_up()
            for name, value in (sysctls or {}).items():
                set_sysctl(name, value)
            yield
        finally:
            _check(libc.setns(before, CLONE_NEWNET), "setns")
    finally:
        os.close(before)


def deny(*rules: tuple[str, int | None, int]) -> None:
    """Have system calls fail from now on: ``(call, first argument or None, errno)``."""
    program = b""

    def add(code: int, jump_true: int, jump_false: int, value: int) -> None:
        nonlocal program
        program += struct.pack("HBBI", code, jump_true, jump_false, value)

    LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF_LD+BPF_W+BPF_ABS, BPF_JMP+BPF_JEQ, BPF_RET
    for call, argument, error in rules:
        add(LOAD, 0, 0, 0)  # seccomp_data.nr
        add(EQUAL, 0, 1 if argument is None else 3, CALLS[call])
        if argument is not None:
            add(LOAD, 0, 0, 16)  # the low half of args[0], little-endian
            add(EQUAL, 0, 1, argument)
        add(RETURN, 0, 0, SECCOMP_RET_ERRNO | error)
    add(RETURN, 0, 0, SECCOMP_RET_ALLOW)
    text = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(text))
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, fprog, 0, 0), "seccomp")


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    # as after an exec: a process that only changed its user may not read its own /proc/self/fd
    _check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")


class Child:
    """A forked process that runs one function. What it returns, or raises, is :meth:`result`.

    Made when the child runs Python again, all that is to be done after a fork behind it.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._pipe, write = os.pipe()
        self._answer: object = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._pipe)
                os.write(write, b"!")
                try:
                    answer: tuple[bool, object] = True, function()
                except BaseException:
                    answer = False, traceback.format_exc()
                with os.fdopen(write, "wb") as file:
                    pickle.dump(answer, file)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        assert os.read(self._pipe, 1) == b"!"

    def result(self, timeout: float = 60) -> object:
        data = b""
        deadline = time.monotonic() + timeout
        try:
            while True:
                ready, _, _ = select.select(
                    [self._pipe], [], [], max(deadline - time.monotonic(), 0)
                )
                if not ready:
                    raise AssertionError(f"the child did not answer within {timeout} s")
                more = os.read(self._pipe, 1 << 20)
                if not more:
                    break
                data += more
        except BaseException:
            os.kill(self.pid, signal.SIGKILL)
            raise
        finally:
            os.close(self._pipe)
            _, status = os.waitpid(self.pid, 0)
        if not data:
            raise AssertionError(f"the child died: wait status {status}")
        good, answer = pickle.loads(data)
        if not good:
            raise AssertionError(f"in the child:\n{answer}")
        return answer

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._pipe)
        os.waitpid(self.pid, 0)


def in_child(
    function: Callable[[], T],
    *,
    uid: int | None = None,
    descriptors: int | None = None,
    denied: Sequence[tuple[str, int | None, int]] = (),
    timeout: float = 60,
) -> T:
    """What ``function`` returns in a forked child with these bounds; its failure fails the test."""

    def bounded() -> T:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
        if uid is not None:
            become(uid)
        if denied:
            deny(*denied)
        return function()

    return Child(bounded).result(timeout)  # type: ignore[return-value]


def container(*, uid: int | None = None) -> None:
    """Make the calling (forked) process the first of a pid namespace, with a /tmp of its own.

    The network stays that of the caller. With ``uid`` it is a rootless container: another user, who
    is root in a user namespace only. Where the sources are below /tmp, they are brought along.
    """
    sources = {os.path.realpath(path) for path in (os.getcwd(), sys.prefix, sys.base_prefix)}
    if uid is not None:
        become(uid)
        unshare(CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"),
                           ("gid_map", f"0 {uid} 1")):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    unshare(CLONE_NEWNS | CLONE_NEWPID)
    first = os.fork()
    if first:  # stands in for the container: dies with it, and takes it along
        status = 1
        try:
            _check(libc.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0), "pdeathsig")
            status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        finally:
            os._exit(status & 0xFF)
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
    MS_REC, MS_PRIVATE, MS_BIND = 0x4000, 0x40000, 0x1000
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
    kept = [(path, os.open(path, os.O_PATH)) for path in sources if path.startswith("/tmp/")]
    _check(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), "/tmp")
    for path, fd in kept:
        os.makedirs(path, exist_ok=True)
        _check(libc.mount(b"/proc/self/fd/%d" % fd, path.encode(), None, MS_BIND, None), path)
        os.close(fd)
    _check(libc.mount(b"proc", b"/proc", b"proc", 0, None), "/proc")


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout} s: {what}")
        time.sleep(0.002)


def can_bind(
    port: int,
    address: str = "127.0.0.1",
    *,
    kind: int = socket.SOCK_STREAM,
    options: Sequence[int] = (),
    v6_only: bool = False,
    listen: bool = True,
) -> bool:
    """Whether a socket with these SOL_SOCKET options gets the port (and, for TCP, listens)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, kind) as sock:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            sock.bind((address, port))
            if listen and kind == socket.SOCK_STREAM:
                sock.listen()
        except OSError:
            return False
        return True


def time_wait(port: int, address: str = "127.0.0.1") -> None:
    """Leave a server-side TIME_WAIT on the port, and nothing else."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen()
        with socket.create_connection((address, port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the first to close keeps the TIME_WAIT
            assert client.recv(1) == b""
