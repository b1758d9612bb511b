"""``block.spawn`` in broker mode: what is chosen, what is refused, and what is left behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokering import entrances, until

import fastports
from fastports import _broker
from fastports.handoff import DEVNULL, PIPE, modes

WHY = _broker.probe()["broker"]
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no broker here: {WHY}")

PLAIN = """
import os, socket, sys
socks = []
for port in sys.argv[1:]:
    s = socket.socket()
    s.bind(("", int(port)))
    s.listen()
    socks.append(s)
while True:
    peer, _ = socks[0].accept()
    peer.sendall(b"%d" % os.getpid())
    peer.recv(1)
"""


def plain(*ports: str) -> list[str]:
    return [sys.executable, "-ISc", PLAIN, *(ports or ("{port}",))]


def who_answers(port: int) -> int:
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        return int(sock.recv(100))


@pytest.fixture
def block() -> Iterator[fastports.PortBlock]:
    with fastports.allocate(1) as made:
        yield made


def test_auto_takes_the_broker_where_it_works_and_a_plain_binder_comes_up(
    block: fastports.PortBlock,
) -> None:
    assert next(iter(modes().values())).works
    with block.spawn(plain()) as child:
        assert child.mode == "broker"
        assert who_answers(block.first) == child.pid
        assert entrances(block.first) == []
    assert entrances(block.first) == []


def test_a_plain_binder_that_crashes_comes_back_behind_the_hold(
    block: fastports.PortBlock,
) -> None:
    for _ in range(3):
        with block.spawn(plain()) as child:
            assert who_answers(block.first) == child.pid
            os.kill(child.pid, signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL


def test_all_ports_of_a_block_of_both_protocols_and_one_address_are_served() -> None:
    with (
        fastports.allocate(3, protocol="both", host="127.0.0.1") as block,
        block.spawn(plain("{port0}", "{port1}", "{port2}"), wait=None) as child,
    ):
        until(lambda: all(connects(port) for port in block))
        assert child.mode == "broker"


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def test_the_child_has_no_descriptor_but_its_own(block: fastports.PortBlock) -> None:
    code = "import os; print(sorted(os.listdir('/proc/self/fd')))"
    with block.spawn(
        [sys.executable, "-ISc", code], wait=None, stdin=DEVNULL, stdout=PIPE, handoff="broker"
    ) as child:
        out, _ = child.communicate(timeout=20)
    assert out is not None
    numbers = [int(fd) for fd in eval(out)]
    assert [fd for fd in numbers if fd < 100] == [0, 1, 2, 3]  # 3 is the listing's own


def test_exclusive_keeps_a_server_that_sets_reuse_port_for_itself(
    block: fastports.PortBlock,
) -> None:
    code = PLAIN.replace("s = socket.socket()", "s = socket.socket(); s.setsockopt(1, 15, 1)")
    with block.spawn([sys.executable, "-ISc", code, "{port}"], exclusive=True) as child:
        assert child.mode == "broker"
        assert entrances(block.first) == []
    with pytest.raises(fastports.InvalidRequest, match="exclusive"):
        block.spawn(plain(), exclusive=True, handoff="door")


def test_a_program_that_cannot_be_executed_leaves_no_child_thread_or_filter(
    block: fastports.PortBlock,
) -> None:
    with pytest.raises(FileNotFoundError):
        block.spawn(["/nonexistent/program", "{port}"], handoff="broker")
    with open("/proc/self/status") as file:
        assert "NoNewPrivs:\t0\n" in file.read()
    with block.spawn(plain()) as child:
        assert child.mode == "broker"


@pytest.mark.skipif(os.geteuid() == 0 or shutil.which("su") is None, reason="for ordinary users")
def test_a_set_uid_program_is_refused_by_the_broker_and_started_otherwise(
    block: fastports.PortBlock,
) -> None:
    with pytest.raises(fastports.HandoffError, match="gains a privilege"):
        block.spawn(["su", "--version"], handoff="broker")
    with block.spawn(["su", "--version"], wait=None, stdout=DEVNULL) as child:
        assert child.mode == "door"


def test_a_program_that_would_gain_another_users_rights_is_told_to_lose_them(
    block: fastports.PortBlock, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    try:
        os.chown(program, 65534, 65534)
    except PermissionError:
        pytest.skip("only root may give a file away")
    program.chmod(0o4755)
    with pytest.raises(fastports.HandoffError, match="gains a privilege"):
        block.spawn([str(program)], handoff="broker")
    with block.spawn([str(program)], wait=None) as child:
        assert child.mode == "door"


def test_a_released_block_is_forgotten_before_its_sockets_close(
    block: fastports.PortBlock,
) -> None:
    """A child that binds after the release gets what the kernel says, like anybody."""
    code = "import sys; sys.stdin.read(1)\n" + PLAIN.replace('"", ', '"127.0.0.1", ')
    with block.spawn(
        [sys.executable, "-ISc", code, "{port}"], wait=None, stdin=PIPE, handoff="broker"
    ) as child:
        block.release()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", block.first))
            assert child.stdin is not None
            child.stdin.write(b"x")
            child.stdin.close()
            assert child.wait(20) == 1


NESTED = """
import sys, fastports
from fastports.handoff import modes
inner = "import socket,sys;s=socket.socket();s.setsockopt(1,2,1);s.bind(('',int(sys.argv[1])))\\n"
inner += "s.listen();sys.stdin.read()"
own = fastports.allocate(1)
try:
    own.spawn(["/bin/true"], handoff="broker")
except fastports.HandoffError as exc:
    print("in place already" in str(exc), flush=True)
with own.spawn([sys.executable, "-ISc", inner, "{" + "port}"], stdin=-1) as child:
    print(child.mode, own.first, flush=True)
    sys.stdin.read()
own.release()
"""


def test_a_brokered_child_that_spawns_itself_falls_to_the_door(
    block: fastports.PortBlock,
) -> None:
    with block.spawn(
        [sys.executable, "-c", NESTED], wait=None, stdin=PIPE, stdout=PIPE, handoff="broker"
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == b"True\n"
        mode, port = child.stdout.readline().split()
        assert mode == b"door"
        assert connects(int(port))
        child.stdin.close()
        assert child.wait(20) == 0


REFUSED = """
import ctypes, errno, logging, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
ops = [(32, 0, 0, 0), (21, 0, 1, 438), (6, 0, 0, 0x50000 | errno.EPERM), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *op) for op in ops))
libc.prctl(22, 2, struct.pack("=HxxxxxxQ", len(ops), ctypes.addressof(code)), 0, 0)
logging.basicConfig(format="%(message)s", stream=sys.stdout)
import fastports
from fastports.handoff import modes
server = "import socket,sys;s=socket.socket();s.setsockopt(1,2,1);s.bind(('',int(sys.argv[1])))\\n"
server += "s.listen();sys.stdin.read()"
with fastports.allocate(1) as block:
    try:
        block.spawn([sys.executable, "-ISc", server, "{port}"], handoff="broker")
    except fastports.HandoffError as exc:
        print("refused:", exc, exc.mode)
    for _ in range(2):
        with block.spawn([sys.executable, "-ISc", server, "{port}"], stdin=-1) as child:
            print("mode", child.mode)
"""


def test_where_pidfd_getfd_is_refused_broker_says_why_and_auto_takes_bind_door_and_says_so_once(
    tmp_path: Path,
) -> None:
    run = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert lines[0].startswith("refused: handoff='broker' does not work here: pidfd_getfd(2)")
    assert lines[0].endswith("broker")
    told = [line for line in lines if "handed over in mode 'bind-door'" in line]
    assert len(told) == 1 and "pidfd_getfd" in told[0]
    assert lines.count("mode bind-door") == 2, run


ENDS = """
import os, sys, fastports
block = fastports.allocate(1)
code = "import socket,sys;s=socket.socket();s.bind(('',int(sys.argv[1])));s.listen()\\n"
code += "import time\\nwhile True: time.sleep(100)"
child = block.spawn([sys.executable, "-ISc", code, "{port}"], handoff="broker")
print(child.pid, block.first, flush=True)
sys.stdin.read()
"""


def test_a_brokered_child_ends_with_a_launcher_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pid, port = map(int, launcher.stdout.readline().split())
        assert connects(port)
        launcher.kill()
    until(lambda: not connects(port))
    until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_listener_of_a_stranger_is_still_found_out(block: fastports.PortBlock) -> None:
    assert block.first
    with block.spawn(plain()) as child, socket.socket() as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError) as refused:
            late.bind(("", block.first))
        assert refused.value.errno == errno.EADDRINUSE
        assert child.listened_after is not None


def test_twenty_children_at_once_are_served_by_one_thread() -> None:
    blocks = [fastports.allocate(1) for _ in range(20)]
    before = set(os.listdir("/proc/self/task"))
    children = [block.spawn(plain(), wait=None, handoff="broker") for block in blocks]
    serving = set(os.listdir("/proc/self/task")) - before
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in serving]
    assert names.count("fastports-serve") == 1
    for child in children:
        child.wait_listening(60)
    answered = [who_answers(block.first) for block in blocks]
    assert answered == [child.pid for child in children]
    for child in children:
        child.stop()
    for block in blocks:
        block.release()


BUSY = """
import socket, sys
s = socket.socket()
s.setsockopt(1, 2, 1)
s.bind(("", int(sys.argv[1])))
s.listen()
while True:  # nothing of /proc tells that a running thread has left its call
    pass
"""


def test_when_a_bind_door_child_is_said_to_listen_its_door_is_shut(
    block: fastports.PortBlock,
) -> None:
    for _ in range(5):
        with block.spawn([sys.executable, "-ISc", BUSY, "{port}"], handoff="bind-door"):
            with socket.fromfd(block.filenos()[0], socket.AF_INET6, socket.SOCK_STREAM) as hold:
                assert hold.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 0
            assert entrances(block.first) == []
