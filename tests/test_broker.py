"""Bind and listen on a child's behalf: any program comes up on its port, and nobody else does."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from brokering import (
    Child,
    Launcher,
    attempt,
    enter,
    entrances,
    hold,
    launcher,
    port_of,
    served,
    until,
)

from fastports import _broker

WHY = _broker.probe()["broker"]
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no broker here: {WHY}")
ROOT = os.geteuid() == 0
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def launch() -> Iterator[Launcher]:
    with launcher() as made:
        yield made


def serve_echo(sock: socket.socket) -> None:
    """Answer every connection with the port it came to."""

    def run() -> None:
        while True:
            with contextlib.suppress(OSError):
                peer, _ = sock.accept()
                peer.sendall(b"%d" % port_of(sock))
                peer.close()

    threading.Thread(target=run, daemon=True).start()


def ask(address: str, port: int) -> int:
    with socket.create_connection((address, port), 5) as sock:
        return int(sock.recv(100))


# ------------------------------------------------------------------ who comes in, and who does not


def test_a_plain_binder_listens_on_a_held_port_and_is_reached(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        serve_echo(served(port))
        return "up"

    assert launch.ask(launch.block(held), child) == "up"
    assert ask("127.0.0.1", port) == port


def test_without_the_broker_the_same_binder_is_refused() -> None:
    with hold() as held:
        assert attempt(lambda: served(port_of(held))) == errno.EADDRINUSE


def test_no_stranger_enters_before_between_and_after_the_calls(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    go, gone = os.pipe(), None

    def child(say: Callable[[object], None]) -> object:
        sock = socket.socket()
        sock.bind(("0.0.0.0", port))
        say("bound")
        os.read(go[0], 1)
        sock.listen()
        return "listening"

    assert entrances(port) == []
    started = launch.start(launch.block(held), child)
    assert started.answer() == "bound"
    between = entrances(port)
    os.write(go[1], b"x")
    assert started.answer() == "listening"
    after = entrances(port)
    started.close()
    gone = entrances(port)
    for fd in go:
        os.close(fd)
    assert (between, after, gone) == ([], [], [])


@pytest.mark.parametrize("set_before", [0, 1])
def test_the_childs_reuse_address_option_is_as_the_child_left_it_until_it_listens(
    launch: Launcher, set_before: int
) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, set_before)
        sock.bind(("0.0.0.0", port))
        first = sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        sock.listen()
        return [first, sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)]

    assert launch.ask(launch.block(held), child) == [set_before, 1]
    assert held.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 0
    assert entrances(port) == []


ADDRESSES: list[tuple[str, bool | None]] = [
    ("0.0.0.0", None),
    ("127.0.0.1", None),
    ("::", False),
    ("::", True),
    ("::1", None),
    ("::ffff:127.0.0.1", False),
    ("::ffff:0.0.0.0", False),
]


@pytest.mark.parametrize(("address", "v6only"), ADDRESSES)
def test_every_family_and_address_binds_beside_a_dual_stack_hold(
    launch: Launcher, address: str, v6only: bool | None
) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        served(port, address, v6only=v6only)
        return "up"

    assert launch.ask(launch.block(held), child) == "up"
    assert launch.broker.counts()["performed"] == 2
    assert entrances(port) == []


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"])
def test_a_hold_on_one_address_lets_its_child_in_there(launch: Launcher, address: str) -> None:
    held = hold("127.0.0.1")
    port = port_of(held)
    assert launch.ask(launch.block(held), lambda say: bool(served(port, address))) is True
    assert launch.broker.counts()["performed"] == 2


def test_an_address_the_hold_does_not_cover_is_left_to_the_kernel(launch: Launcher) -> None:
    held = hold("127.0.0.1")
    port = port_of(held)
    assert launch.ask(launch.block(held), lambda say: bool(served(port, "127.0.0.2"))) is True
    assert launch.broker.counts() == {"performed": 0, "passed": 2, "denied": 0, "refused": 0}


def test_a_program_that_binds_two_families_on_one_port_gets_both(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        four = socket.socket(socket.AF_INET)
        six = socket.socket(socket.AF_INET6)
        six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        four.bind(("0.0.0.0", port))
        six.bind(("::", port))
        four.listen()
        six.listen()
        serve_echo(four)
        serve_echo(six)
        return "up"

    assert launch.ask(launch.block(held), child) == "up"
    assert ask("127.0.0.1", port) == ask("::1", port) == port


def test_a_udp_program_gets_the_datagrams_of_its_held_port(launch: Launcher) -> None:
    held = hold(kind=socket.SOCK_DGRAM)
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        sock = served(port, kind=socket.SOCK_DGRAM)
        say("up")
        return sock.recv(100).decode()

    started = launch.start(launch.block(held), child)
    assert started.answer() == "up"
    assert entrances(port, socket.SOCK_DGRAM) == []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"for the child", ("127.0.0.1", port))
    assert started.answer() == "for the child"


def test_c24_a_program_that_needs_both_protocols_of_a_number_gets_both(launch: Launcher) -> None:
    tcp = hold()
    port = port_of(tcp)
    udp = hold(port=port, kind=socket.SOCK_DGRAM)

    def child(say: Callable[[object], None]) -> object:
        served(port, kind=socket.SOCK_STREAM)
        served(port, kind=socket.SOCK_DGRAM)
        return "up"

    assert launch.ask(launch.block(tcp, udp), child) == "up"
    assert launch.broker.counts()["performed"] == 3


def test_c23_a_udp_bind_on_a_port_held_for_tcp_is_none_of_our_business(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    answer = launch.ask(launch.block(held), lambda say: bool(served(port, kind=socket.SOCK_DGRAM)))
    assert answer is True
    assert launch.broker.counts()["performed"] == 0


def test_an_mptcp_socket_counts_as_tcp(launch: Launcher) -> None:
    mptcp = 262
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, mptcp).close()
    except OSError as exc:
        pytest.skip(f"no MPTCP here: {exc}")
    held = hold()
    port = port_of(held)
    assert launch.ask(launch.block(held), lambda say: bool(served(port, proto=mptcp))) is True
    assert launch.broker.counts()["performed"] == 2
    assert entrances(port) == []


def test_all_ports_of_a_block_are_served(launch: Launcher) -> None:
    held = [hold() for _ in range(8)]
    ports = [port_of(sock) for sock in held]

    def child(say: Callable[[object], None]) -> object:
        return [port_of(served(port)) for port in ports]

    assert launch.ask(launch.block(*held), child) == ports


# ------------------------------------------------------------------ who may be the one that binds


def test_a_thread_of_the_child_may_bind(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(attempt(lambda: served(port))))
        thread.start()
        thread.join()
        return answers

    assert launch.ask(launch.block(held), child) == [0]
    assert launch.broker.counts()["performed"] == 2


def test_a_thread_with_descriptors_of_its_own_binds_its_own_socket(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        answers: list[Any] = []
        decoy = socket.socket()

        def run() -> None:
            libc.unshare(0x400)  # CLONE_FILES
            mine = socket.socket()
            os.dup2(mine.fileno(), decoy.fileno())  # in this thread's table alone
            mine.close()
            mine = socket.socket(fileno=decoy.fileno())
            answers.append(attempt(lambda: mine.bind(("0.0.0.0", port))))
            answers.append(port_of(mine))
            mine.detach()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return [*answers, decoy.getsockname()[1]]

    answer = launch.ask(launch.block(held), child)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release >= (6, 9):
        assert answer == [0, port, 0]
    else:
        assert answer == [errno.EADDRINUSE, 0, 0]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forked_worker_and_a_grandchild_may_bind(launch: Launcher, depth: int) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        for _ in range(depth):
            pid = os.fork()
            if pid:
                status = os.waitpid(pid, 0)[1]
                if _ == 0:
                    return os.waitstatus_to_exitcode(status)
                os._exit(os.waitstatus_to_exitcode(status))
        os._exit(attempt(lambda: served(port)))

    assert launch.ask(launch.block(held), child) == 0
    assert launch.broker.counts()["performed"] == 2


def test_a_worker_that_listens_on_the_socket_its_parent_bound_is_served(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        sock = socket.socket()
        sock.bind(("0.0.0.0", port))
        pid = os.fork()
        if pid == 0:
            os._exit(attempt(sock.listen))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert launch.ask(launch.block(held), child) == 0


def test_an_executed_program_is_served_as_its_parent_was(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    code = f"import socket; s = socket.socket(); s.bind(('', {port})); s.listen(); print('up')"

    def child(say: Callable[[object], None]) -> object:
        run = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True)
        return [run.stdout, run.stderr]

    assert launch.ask(launch.block(held), child) == ["up\n", ""]


@pytest.mark.parametrize("namespaces", ["pid", "user", "both"])
def test_a_child_in_its_own_pid_or_user_namespace_is_served(
    launch: Launcher, namespaces: str
) -> None:
    held = hold()
    port = port_of(held)
    flags = {"pid": 0x20000000, "user": 0x10000000, "both": 0x30000000}[namespaces]

    def child(say: Callable[[object], None]) -> object:
        if libc.unshare(flags) != 0:
            return f"no namespace: {os.strerror(ctypes.get_errno())}"
        pid = os.fork()  # the first process of the new pid namespace
        if pid == 0:
            os._exit(attempt(lambda: served(port)))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    answer = launch.ask(launch.block(held), child)
    if isinstance(answer, str):
        pytest.skip(answer)
    assert answer == 0
    assert launch.broker.counts()["performed"] == 2


@pytest.mark.skipif(not ROOT, reason="only root may become another user")
def test_a_child_of_another_user_is_served_where_the_launcher_may_trace_it(
    launch: Launcher,
) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        os.setgid(65534)
        os.setuid(65534)
        return attempt(lambda: served(port))

    assert launch.ask(launch.block(held), child) == 0


def test_a_child_in_another_network_namespace_binds_there_as_it_likes(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        if libc.unshare(0x40000000) != 0 and libc.unshare(0x50000000) != 0:
            return "no namespace"
        return attempt(lambda: served(port))

    answer = launch.ask(launch.block(held), child)
    if answer == "no namespace":
        pytest.skip(answer)
    assert answer == 0
    assert launch.broker.counts()["performed"] == 0


def test_a_program_binds_closes_binds_again_and_restarts_over_time_wait(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    block = launch.block(held)

    def child(say: Callable[[object], None]) -> object:
        served(port).close()
        sock = served(port, options=[socket.SO_REUSEADDR])
        say("up")
        peer, _ = sock.accept()
        peer.close()  # this side closes first: TIME_WAIT is ours
        return "closed"

    for _ in range(3):
        started = launch.start(block, child)
        assert started.answer() == "up"
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            assert sock.recv(1) == b""
        assert started.answer() == "closed"
        started.close()


def test_a_plain_binder_restarts_over_time_wait_too_and_lets_nobody_in(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    block = launch.block(held)

    def child(say: Callable[[object], None]) -> object:
        with socket.socket() as sock:
            sock.bind(("0.0.0.0", port))
            say(sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))
            sock.listen()
            say("up")
            peer, _ = sock.accept()
            peer.close()
            sock.shutdown(socket.SHUT_RDWR)  # listens no more: only the hold is left
            say("shut")
            signal.pause()
        return None

    for _ in range(3):
        started = launch.start(block, child)
        assert started.answer() == 0
        assert started.answer() == "up"
        assert enter("0.0.0.0", port, reuse_address=True) is None
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            assert sock.recv(1) == b""
        assert started.answer() == "shut"
        assert enter("0.0.0.0", port, reuse_address=True) is None
        started.close()
        assert enter("0.0.0.0", port, reuse_address=True) is None


# ------------------------------------------------------------------ SO_REUSEPORT


def test_workers_that_share_a_port_by_reuse_port_all_listen(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        pids = []
        pipe = os.pipe()
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                sock = served(port, options=[socket.SO_REUSEPORT])
                os.write(pipe[1], b"x")
                signal.pause()
                sock.close()
            pids.append(pid)
        up = b""
        while len(up) < 4 and select.select([pipe[0]], [], [], 5)[0]:
            up += os.read(pipe[0], 4)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return len(up)

    assert launch.ask(launch.block(held), child) == 4


def test_stated_rest_a_same_user_stranger_may_join_a_server_that_asked_for_reuse_port(
    launch: Launcher,
) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        return bool(served(port, options=[socket.SO_REUSEPORT]))

    assert launch.ask(launch.block(held), child) is True
    stranger = enter("0.0.0.0", port, reuse_port=True)
    assert stranger is not None
    stranger.close()
    assert enter("0.0.0.0", port, reuse_address=True) is None


def test_exclusive_keeps_reuse_port_strangers_out(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("0.0.0.0", port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.listen()
        return "up"

    assert launch.ask(launch.block(held), child, exclusive=True) == "up"
    assert entrances(port) == []


# ------------------------------------------------------------------ everything else goes on


def test_errors_are_the_kernels_own(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        sock = served(port)
        other = socket.socket()
        away = socket.socket()
        file = os.open("/dev/null", os.O_RDONLY)
        plain = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + bytes(12)

        def raw(fd: int, address: bytes | int, size: int) -> int:
            return ctypes.get_errno() if libc.bind(fd, address, size) else 0

        return {
            "bound already": attempt(lambda: sock.bind(("0.0.0.0", port))),
            "listens already": attempt(lambda: other.bind(("0.0.0.0", port))),
            "no such address": attempt(lambda: away.bind(("192.0.2.1", port))),
            "no descriptor": raw(1000, plain, 16),
            "no socket": raw(file, plain, 16),
            "bad pointer": raw(away.fileno(), 1, 16),
            "too short": raw(away.fileno(), plain, 8),
            "too long": raw(away.fileno(), plain, 4096),
            "listen on a file": ctypes.get_errno() if libc.listen(file, 1) else 0,
        }

    assert launch.ask(launch.block(held), child) == {
        "bound already": errno.EINVAL,
        "listens already": errno.EADDRINUSE,
        "no such address": errno.EADDRNOTAVAIL,
        "no descriptor": errno.EBADF,
        "no socket": errno.ENOTSOCK,
        "bad pointer": errno.EFAULT,
        "too short": errno.EINVAL,
        "too long": errno.EINVAL,
        "listen on a file": errno.ENOTSOCK,
    }


def test_other_ports_and_other_families_are_left_to_the_kernel(
    launch: Launcher, tmp_path: Path
) -> None:
    held = hold()

    def child(say: Callable[[object], None]) -> object:
        served(0).close()
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        netlink.bind((0, 0))
        unbound = socket.socket()
        unbound.listen()  # the kernel picks a port
        return "done"

    assert launch.ask(launch.block(held), child) == "done"
    assert launch.broker.counts() == {"performed": 0, "passed": 6, "denied": 0, "refused": 0}


def test_a_port_of_another_block_of_the_launcher_is_refused_even_with_its_door_open(
    launch: Launcher,
) -> None:
    mine, other = hold(), hold()
    port = port_of(other)
    block = launch.block(mine)
    launch.block(other)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for address in ("0.0.0.0", "127.0.0.1", "::", "::1"):

        def child(say: Callable[[object], None], address: str = address) -> object:
            return attempt(lambda: served(port, address, options=[socket.SO_REUSEADDR]))

        assert launch.ask(block, child) == errno.EADDRINUSE
    assert launch.broker.counts()["denied"] == 4


def test_two_children_of_one_block_cannot_both_listen_on_a_port(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    block = launch.block(held)
    kept: list[socket.socket] = []
    first = launch.ask(block, lambda say: attempt(lambda: kept.append(served(port))))
    second = launch.ask(block, lambda say: attempt(lambda: kept.append(served(port))))
    assert (first, second) == (0, errno.EADDRINUSE)


def test_bytes_that_change_after_the_look_do_not_matter(launch: Launcher, tmp_path: Path) -> None:
    program = compiled(
        tmp_path,
        """
        #include <arpa/inet.h>
        #include <netinet/in.h>
        #include <pthread.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <sys/socket.h>
        #include <unistd.h>
        static struct sockaddr_in at;
        static volatile unsigned short *port;
        static unsigned short mine, theirs;
        static void *flip(void *x) { for (;;) { *port = mine; *port = theirs; } return x; }
        int main(int n, char **v) {
            pthread_t t; int i, got = 0; (void)n;
            mine = htons(atoi(v[1])); theirs = htons(atoi(v[2]));
            at.sin_family = AF_INET; port = &at.sin_port; *port = mine;
            pthread_create(&t, 0, flip, 0);
            for (i = 0; i < 2000; i++) {
                int s = socket(AF_INET, SOCK_STREAM, 0), one = 1; struct sockaddr_in is;
                socklen_t l = sizeof is;
                setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
                if (bind(s, (void *)&at, sizeof at) == 0 && getsockname(s, (void *)&is, &l) == 0) {
                    if (is.sin_port != mine) { puts("entered another's"); return 1; }
                    got++;
                }
                close(s);
            }
            printf("%s\\n", got ? "only its own" : "never"); return 0;
        }
        """,
    )
    held, other = hold(), hold()
    block = launch.block(held)
    launch.block(other)

    def child(say: Callable[[object], None]) -> object:
        argv = [program, str(port_of(held)), str(port_of(other))]
        return subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout

    assert launch.ask(block, child) == "only its own\n"


# ------------------------------------------------------------------ signals


def compiled(directory: Path, source: str) -> str:
    """A program in C, built on the spot."""
    path = directory / "program"
    (directory / "program.c").write_text(source)
    try:
        subprocess.run(
            ["cc", "-O1", "-pthread", "-o", str(path), str(directory / "program.c")], check=True
        )
    except FileNotFoundError:
        pytest.skip("no C compiler here")
    return str(path)


@pytest.mark.parametrize("restart", [0, 1])
def test_a_child_under_a_10_khz_timer_binds_once_and_is_told_the_truth(
    launch: Launcher, tmp_path: Path, restart: int
) -> None:
    """With SA_RESTART no call fails. Without it a call that a signal meets before the launcher has
    received it may say EINTR, and then nothing was done: the next bind of that socket succeeds."""
    program = compiled(
        tmp_path,
        """
        #include <arpa/inet.h>
        #include <errno.h>
        #include <netinet/in.h>
        #include <signal.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/socket.h>
        #include <sys/time.h>
        #include <unistd.h>
        static volatile long n;
        static void count(int s) { n += s; }
        static int interrupted(int strict) { return !strict && errno == EINTR; }
        int main(int c, char **v) {
            struct sigaction a; struct itimerval t = {{0, 100}, {0, 100}}; int i, r;
            int restart = atoi(v[2]); (void)c;
            memset(&a, 0, sizeof a); a.sa_handler = count; a.sa_flags = restart ? SA_RESTART : 0;
            sigaction(SIGALRM, &a, 0); setitimer(ITIMER_REAL, &t, 0);
            for (i = 0; i < 300; i++) {
                struct sockaddr_in b; int s = socket(AF_INET, SOCK_STREAM, 0);
                memset(&b, 0, sizeof b); b.sin_family = AF_INET; b.sin_port = htons(atoi(v[1]));
                while ((r = bind(s, (void *)&b, sizeof b)) && interrupted(restart));
                if (r) { printf("bind %d %s\\n", i, strerror(errno)); return 1; }
                while ((r = listen(s, 5)) && interrupted(restart));
                if (r) { printf("listen %d %s\\n", i, strerror(errno)); return 1; }
                close(s);
            }
            puts(n ? "bound under signals" : "no signals"); return 0;
        }
        """,
    )
    held = hold()
    block = launch.block(held)

    def child(say: Callable[[object], None]) -> object:
        argv = [program, str(port_of(held)), str(restart)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout

    assert launch.ask(block, child) == "bound under signals\n"
    assert launch.broker.counts()["performed"] == 600


# ------------------------------------------------------------------ foreign system calls

FOREIGN = """
    #include <arpa/inet.h>
    #include <errno.h>
    #include <netinet/in.h>
    #include <signal.h>
    #include <stdint.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <sys/mman.h>
    #include <sys/socket.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    static long i386(long number, long a, long b, long c) {
        long result;
        __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c)
                         : "memory", "r8", "r9", "r10", "r11");
        return result;
    }
    static long x32(long number, long a, long b, long c) {
        long result = syscall(0x40000000 | number, a, b, c);
        return result < 0 ? -errno : result;
    }
    static void none(int s) { (void)s; puts("no i386 here"); fflush(stdout); _exit(0); }
    int main(int n, char **v) {
        struct sockaddr_in *at;
        int free = atoi(v[2]), s = socket(AF_INET, SOCK_STREAM, 0); (void)n;
        setvbuf(stdout, 0, _IONBF, 0);
        signal(SIGSEGV, none); signal(SIGILL, none);
        /* an address of 32 bits, which an i386 call can name */
        at = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
        at->sin_family = AF_INET; at->sin_port = htons(atoi(v[1]));
        if (i386(20, 0, 0, 0) != getpid()) none(0);
        /* the numbers of our bind and listen mean geteuid and getegid there */
        printf("%d %d\\n", i386(49, s, (long)at, sizeof *at) == geteuid(),
               i386(50, s, (long)at, sizeof *at) == getegid());
        printf("%ld\\n", i386(361, s, (long)at, sizeof *at));
        printf("%ld\\n", x32(SYS_bind, s, (long)at, sizeof *at));
        printf("%d\\n", bind(s, (void *)at, sizeof *at));
        s = socket(AF_INET, SOCK_STREAM, 0); at->sin_port = htons(free);
        printf("%ld ", i386(361, s, (long)at, sizeof *at));
        printf("%ld\\n", i386(363, s, 5, 0));
        return 0;
    }
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="i386 and x32 are of x86-64")
def test_calls_of_i386_and_x32_meet_the_hold_and_are_never_taken_for_others(
    launch: Launcher, tmp_path: Path
) -> None:
    program = compiled(tmp_path, FOREIGN)
    held, free = hold(), hold()
    block, port = launch.block(held), port_of(free)
    free.close()

    def child(say: Callable[[object], None]) -> object:
        argv = [program, str(port_of(held)), str(port)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout.split("\n")

    answer = launch.ask(block, child)
    if "no i386 here" in answer:
        pytest.skip(answer[0])
    others, i386, x32, own, elsewhere, end = answer
    assert (others, end) == ("1 1", "")
    assert int(i386) == -errno.EADDRINUSE
    assert int(x32) in (-errno.EADDRINUSE, -errno.ENOSYS)  # most kernels are built without x32
    assert own == "0"
    assert elsewhere == "0 0"
    assert launch.broker.counts()["performed"] == 1
    assert launch.broker.counts()["passed"] == 0  # nobody was asked about the foreign ones


# ------------------------------------------------------------------ beginning and end


def test_one_thread_serves_all_children_and_ends_with_the_last(launch: Launcher) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    assert not launch.broker.running
    children: list[Child] = []
    for _ in range(10):
        held = hold()
        port = port_of(held)

        def child(say: Callable[[object], None], port: int = port) -> object:
            return port_of(served(port))

        children.append(launch.start(launch.block(held), child))
        assert children[-1].answer() == port
        assert threads() == before + 1
    assert launch.broker.children == 10
    for started in children:
        started.close()
    until(lambda: not launch.broker.running)
    until(lambda: threads() == before)
    assert launch.broker.children == 0


def test_a_broker_whose_thread_ended_starts_another(launch: Launcher) -> None:
    held = hold()
    block = launch.block(held)
    for _ in range(3):
        child = launch.start(block, lambda say: attempt(lambda: served(port_of(held))))
        assert child.answer() == 0
        child.close()
        until(lambda: not launch.broker.running)


def test_service_goes_on_for_descendants_of_a_child_that_ended(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    go = os.pipe()
    said = os.pipe()

    def child(say: Callable[[object], None]) -> object:
        if os.fork() == 0:
            os.read(go[0], 1)
            os.write(said[1], b"%d" % attempt(lambda: served(port)))
            os._exit(0)
        return "left"

    started = launch.start(launch.block(held), child)
    assert started.answer() == "left"
    started.close()
    assert launch.broker.children == 1
    os.write(go[1], b"x")
    assert os.read(said[0], 10) == b"0"
    for fd in (*go, *said):
        os.close(fd)
    until(lambda: not launch.broker.running)


def test_a_child_has_left_when_nobody_with_its_filter_is_there_any_more(launch: Launcher) -> None:
    go = os.pipe()

    def leave_a_worker(say: Callable[[object], None]) -> object:
        if os.fork() == 0:
            os.setsid()
            os.read(go[0], 1)
            os._exit(0)
        return "left"

    child = Child(leave_a_worker)
    number = launch.broker.serve(launch.block(hold()), child.listener)
    assert child.answer() == "left"
    assert not launch.broker.left(number)
    child.close()
    assert not launch.broker.left(number)
    os.write(go[1], b"x")
    until(lambda: launch.broker.left(number))
    until(lambda: not launch.broker.running)
    assert launch.broker.left(number)
    for fd in go:
        os.close(fd)
    other = launch.start(launch.block(hold()), lambda say: "here")
    launch.broker.close()
    until(lambda: not launch.broker.running)
    assert not launch.broker.left(number)  # nobody looks any more
    assert other.answer() == "here"


def test_after_stop_a_bind_fails_at_once_with_enosys(launch: Launcher) -> None:
    held = hold()
    go = os.pipe()

    def bind_late(say: Callable[[object], None]) -> object:
        os.read(go[0], 1)
        return attempt(lambda: served(port_of(held)))

    child = Child(bind_late)
    number = launch.broker.serve(launch.block(held), child.listener)
    launch.broker.stop(number)
    until(lambda: not launch.broker.running)
    os.write(go[1], b"x")
    assert child.answer() == errno.ENOSYS
    child.close()
    for fd in go:
        os.close(fd)


LAUNCHER_THAT_DIES = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from brokering import Launcher, attempt, hold, served
launch = Launcher()
held = hold()
go, said = int(sys.argv[2]), int(sys.argv[3])
def child(say):
    if os.fork() == 0:  # a daemon: its parent ends, it stays
        os.setsid()
        os.write(said, b"ready ")
        os.read(go, 1)
        os.write(said, b"%d" % attempt(lambda: served(0)))
        os._exit(0)
    os._exit(0)
launch.start(launch.block(held), child)
never = int(sys.argv[5])
if sys.argv[4] == "fork" and os.fork() == 0:
    os.write(said, b"forked ")
    os.read(never, 1)  # a forked copy of the launcher lives on, and must not keep the listener
    os._exit(0)
os.write(said, b"launched ")
os.read(never, 1)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_daemon_that_outlives_its_launcher_gets_enosys_and_does_not_hang(how: str) -> None:
    go, said, never = os.pipe(), os.pipe(), os.pipe()
    here = str(Path(__file__).parent)
    argv = [sys.executable, "-c", LAUNCHER_THAT_DIES, here, str(go[0]), str(said[1]), how]
    process = subprocess.Popen([*argv, str(never[0])], pass_fds=[go[0], said[1], never[0]])
    heard = b""
    while heard.count(b" ") < (3 if how == "fork" else 2):
        assert select.select([said[0]], [], [], 20)[0]
        heard += os.read(said[0], 100)
    process.kill()
    process.wait()
    os.write(go[1], b"x")
    assert select.select([said[0]], [], [], 20)[0], "the bind hangs"
    assert int(os.read(said[0], 100)) == errno.ENOSYS
    for fd in (*go, *said, *never):
        os.close(fd)


# ------------------------------------------------------------------ told, when it cannot be done


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    until(lambda: caplog.records)
    return [record.getMessage() for record in caplog.records if record.name == "fastports"]


def test_a_bind_after_the_block_was_closed_is_refused_and_told(
    launch: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    held = hold()
    port = port_of(held)
    block = launch.block(held)
    held.close()
    stranger = hold(port=port)  # the port is somebody else's by now
    assert launch.ask(block, lambda say: attempt(lambda: served(port))) == errno.EADDRINUSE
    assert f"port {port}" in warnings_of(caplog)[0]
    assert "released" in warnings_of(caplog)[0]
    stranger.close()


def test_a_discarded_block_is_left_to_the_kernel(launch: Launcher) -> None:
    held = hold()
    block = launch.block(held)
    launch.broker.discard(block)
    launch.broker.discard(block)
    answer = launch.ask(block, lambda say: attempt(lambda: served(port_of(held))))
    assert answer == errno.EADDRINUSE


def in_process(function: Callable[[], object]) -> Any:
    """Run a function in a forked launcher of its own, whose rights it may give away."""
    import json

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.write(writer, json.dumps(function()).encode())
        except BaseException as exc:
            os.write(writer, json.dumps(f"failed: {exc!r}").encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = b""
    while chunk := os.read(reader, 65536):
        text += chunk
    os.close(reader)
    os.waitpid(pid, 0)
    return json.loads(text)


CAP_NET_RAW, CAP_SYS_PTRACE = 13, 19


def give_up(capability: int) -> None:
    """Be a launcher without this right, as an ordinary user is."""
    if ROOT:
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
        header = struct.pack("=Ii", 0x20080522, 0)
        data = ctypes.create_string_buffer(24)
        libc.capget(header, data)
        words = list(struct.unpack("=6I", data.raw))
        for at in (0, 1, 2):
            words[at] &= ~(1 << capability)
        assert libc.capset(header, struct.pack("=6I", *words)) == 0


def collect_log() -> list[str]:
    import logging

    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("fastports").addHandler(Ear())
    return heard


def test_a_process_that_is_not_dumpable_is_refused_and_the_cause_is_logged() -> None:
    def run() -> object:
        give_up(CAP_SYS_PTRACE)
        heard = collect_log()
        with launcher() as launch:
            held = hold()
            port = port_of(held)

            def child(say: Callable[[object], None]) -> object:
                libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
                return [attempt(lambda: served(port)), attempt(lambda: served(port))]

            answer = launch.ask(launch.block(held), child)
            until(lambda: heard)
            return [answer, heard]

    answer, heard = in_process(run)
    assert answer == [errno.EADDRINUSE] * 2
    assert len(heard) == 1  # each cause once a child
    assert "non-dumpable" in heard[0]
    assert "Operation not permitted" in heard[0]


def test_without_a_free_descriptor_the_bind_is_refused_and_the_cause_is_logged() -> None:
    def run() -> object:
        import resource

        heard = collect_log()
        with launcher() as launch:
            held = hold()
            block = launch.block(held)
            go = os.pipe()

            def child(say: Callable[[object], None]) -> object:
                os.read(go[0], 1)
                return attempt(lambda: served(port_of(held)))

            started = launch.start(block, child)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            os.write(go[1], b"x")
            until(lambda: launch.broker.counts()["refused"])
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            answer = started.answer()
            until(lambda: heard)
            return [answer, heard]

    answer, heard = in_process(run)
    assert answer == errno.EADDRINUSE
    assert os.strerror(errno.EMFILE) in heard[0]


# ------------------------------------------------------------------ with and without CAP_NET_RAW

SO_BINDTOIFINDEX = 62


def test_neither_socket_stays_on_the_device_it_was_moved_to(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)

    def child(say: Callable[[object], None]) -> object:
        sock = socket.socket()
        sock.bind(("0.0.0.0", port))
        first = sock.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX)
        sock.listen()
        return [first, sock.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX)]

    assert launch.ask(launch.block(held), child) == [0, 0]
    assert held.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX) == 0


def test_a_socket_that_is_on_a_device_stays_there(launch: Launcher) -> None:
    held = hold()
    port = port_of(held)
    loopback = socket.if_nametoindex("lo")

    def child(say: Callable[[object], None]) -> object:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, loopback)
        sock.bind(("0.0.0.0", port))
        sock.listen()
        return sock.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX)

    assert launch.ask(launch.block(held), child) == loopback


def test_with_net_raw_a_brokered_bind_leaves_the_door_shut(launch: Launcher) -> None:
    if not _broker.stays_shut():
        pytest.skip("no CAP_NET_RAW here")
    held = hold()
    port = port_of(held)
    go = os.pipe()

    def child(say: Callable[[object], None]) -> object:
        os.write(go[1], b"x")
        for _ in range(300):
            served(port).close()
        return "done"

    started = launch.start(launch.block(held), child)
    os.read(go[0], 1)
    tries = entered = 0
    while not select.select([started._reader], [], [], 0)[0]:
        for reuse_port in (False, True):
            tries += 1
            sock = enter("0.0.0.0", port, reuse_address=True, reuse_port=reuse_port, listen=False)
            if sock is not None:
                entered += 1
                sock.close()
    assert started.answer() == "done"
    assert tries and not entered
    for fd in go:
        os.close(fd)


def test_without_net_raw_the_broker_works_through_a_door_open_for_the_call() -> None:
    def run() -> object:
        give_up(CAP_NET_RAW)
        with launcher() as launch:
            held = hold()
            port = port_of(held)

            def child(say: Callable[[object], None]) -> object:
                sock = served(port)
                return sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)

            answer = launch.ask(launch.block(held), child)
            door = held.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
            return [_broker.stays_shut(), answer, door, entrances(port)]

    assert in_process(run) == [False, 1, 0, []]


def test_a_stranger_that_slipped_in_beside_a_bind_does_not_cost_the_child_its_port() -> None:
    """The stranger's mark on the port's bucket lets it listen; it goes when the child listens."""

    def run() -> object:
        give_up(CAP_NET_RAW)
        with launcher() as launch:
            held = hold()
            port = port_of(held)
            go = os.pipe()

            def child(say: Callable[[object], None]) -> object:
                sock = socket.socket()
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("0.0.0.0", port))
                say("bound")
                os.read(go[0], 1)
                return attempt(sock.listen)

            started = launch.start(launch.block(held), child)
            assert started.answer() == "bound"
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as in the moment of a call
            slipped = enter("0.0.0.0", port, reuse_address=True, reuse_port=True, listen=False)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            assert slipped is not None
            before = len(entrances(port))
            os.write(go[1], b"x")
            answer = started.answer()
            return [before > 0, answer, entrances(port), attempt(slipped.listen)]

    assert in_process(run) == [True, 0, [], errno.EADDRINUSE]


# ------------------------------------------------------------------ what works here


def refuse_calls(number: int, error: int = errno.EPERM) -> None:
    """A filter on this process that refuses one system call, as a container's profile does."""
    libc.prctl(38, 1, 0, 0, 0)
    ops = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | error), (6, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *op) for op in ops))
    program = struct.pack("=HxxxxxxQ", len(ops), ctypes.addressof(code))
    assert libc.prctl(22, 2, program, 0, 0) == 0


PIDFD_GETFD = 438
PROCESS_VM_READV = 310 if os.uname().machine == "x86_64" else 270
SECCOMP = 317 if os.uname().machine == "x86_64" else 277


def test_the_probe_leaves_the_calling_thread_as_it_was() -> None:
    def status() -> list[str]:
        lines = Path("/proc/thread-self/status").read_text().splitlines()
        return [line for line in lines if line.startswith(("NoNewPrivs", "Seccomp"))]

    before = status()
    assert _broker.probe() == {"broker": None, "bind-door": None}
    assert status() == before


@pytest.mark.parametrize(
    ("number", "error", "broker", "door"),
    [
        (PIDFD_GETFD, errno.EPERM, "pidfd_getfd", None),
        (PROCESS_VM_READV, errno.EPERM, "process_vm_readv", "process_vm_readv"),
        (SECCOMP, errno.EPERM, "seccomp", "seccomp"),
        (SECCOMP, errno.EINVAL, "Linux 5.19", "Linux 5.19"),  # as an older kernel answers
        (SECCOMP, errno.EBUSY, "in place already", "in place already"),
    ],
)
def test_the_probe_names_the_call_that_is_refused(
    number: int, error: int, broker: str, door: str | None
) -> None:
    def run() -> object:
        refuse_calls(number, error)
        return _broker.probe()

    found = in_process(run)
    assert broker in found["broker"]
    assert found["bind-door"] is None if door is None else door in found["bind-door"]


def test_a_brokered_child_is_told_that_it_cannot_broker_itself(launch: Launcher) -> None:
    held = hold()
    found = launch.ask(launch.block(held), lambda say: _broker.probe())
    assert "in place already" in found["broker"]
    assert "in place already" in found["bind-door"]
