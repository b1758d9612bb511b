"""Blocks that change hands over a UNIX socket, between real processes."""

from __future__ import annotations

import array
import contextlib
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from brokering import entrances, until
from worlds import CLONE_NEWNET, ROOMY, Child, in_child, network, unshare

import fastports
from fastports import passing

KINDS = ["SOCK_STREAM", "SOCK_SEQPACKET", "SOCK_DGRAM"]

RECEIVER = """
import json, os, socket, sys
import fastports
sock = socket.socket(fileno=int(sys.argv[1]))
try:
    block = fastports.receive(sock, timeout=20)
except fastports.FastportsError as exc:
    print(json.dumps([type(exc).__name__, str(exc)]), flush=True)
    sys.exit()
print(json.dumps({
    "repr": repr(block), "ports": list(block), "protocol": block.protocol, "host": block.host,
    "label": block.label, "metadata": block.metadata, "pid": block.owner.pid,
    "inheritable": [fd for fd in block.filenos() if os.get_inheritable(fd)],
}), flush=True)
sys.stdin.readline()
block.release()
print(json.dumps(len(os.listdir("/proc/self/fd"))), flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def receiver(kind: str = "SOCK_STREAM") -> Iterator[tuple[socket.socket, Any]]:
    """A process that receives a block, our end of the socket to it, and its pipes."""
    mine, its = socket.socketpair(socket.AF_UNIX, getattr(socket, kind))
    with mine:
        argv = [sys.executable, "-c", RECEIVER, str(its.fileno())]
        process = subprocess.Popen(
            argv, pass_fds=[its.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        its.close()
        with process:
            try:
                yield mine, process
            finally:
                process.kill()


def entries_of(port: int) -> list[int]:
    return [entry.pid for entry in fastports.entries() if port in entry.ports]


@pytest.fixture(autouse=True)
def own_network() -> Iterator[None]:
    """Ports that are given back here are nobody else's a moment later."""
    with network():
        yield


@pytest.fixture
def block() -> Iterator[fastports.PortBlock]:
    with fastports.allocate(2, label="mine") as made:
        yield made


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    kind = getattr(socket, getattr(request, "param", "SOCK_STREAM"))
    here, there = socket.socketpair(socket.AF_UNIX, kind)
    with here, there:
        yield here, there


def still_held(block: fastports.PortBlock) -> bool:
    block.filenos()
    return not block.released and not any(entrances(port) for port in block)


def aside(function: Callable[[], object]) -> Any:
    """Run it in a thread; call what comes back for its result or its error."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as exc:
            found.append(exc)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> object:
        thread.join(30)
        assert found, "it does not end"
        return found[0]

    return result


# ------------------------------------------------------------------ it arrives


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_changes_hands_with_all_that_is_known_of_it(kind: str) -> None:
    with receiver(kind) as (sock, process):
        block = fastports.allocate(3, protocol="both", label="kv-0", metadata={"rank": [1, None]})
        ports = list(block)
        block.send(sock)
        assert block.released
        told = json.loads(process.stdout.readline())
        assert told["ports"] == ports
        assert (told["protocol"], told["host"], told["label"]) == ("both", None, "kv-0")
        assert (told["metadata"], told["inheritable"]) == ({"rank": [1, None]}, [])
        assert told["pid"] == process.pid
        assert entries_of(ports[0]) == [process.pid]
        assert entrances(ports[0]) == []
        process.stdin.write("release\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) <= 5  # 0, 1, 2, the socket, the listing
        assert len(entrances(ports[0])) == 16
        fastports.reserve(ports[0]).release()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::", "0:0:0:0:0:0:0:1"])
def test_the_address_arrives_as_it_was_given(
    pair: tuple[socket.socket, socket.socket], host: str
) -> None:
    result = aside(lambda: fastports.receive(pair[1]))
    fastports.allocate(1, host=host).send(pair[0])
    with result() as block:
        assert block.host == host


def test_the_ports_are_free_at_no_time_and_on_record_all_the_time() -> None:
    stop = threading.Event()
    entered: list[object] = []
    gaps: list[object] = []
    with receiver() as (sock, process):
        block = fastports.allocate(1)
        port = block.first

        def attack() -> None:
            while not stop.is_set():
                entered.extend(entrances(port))

        def look() -> None:
            while not stop.is_set():
                if not entries_of(port):
                    gaps.append(time.monotonic())

        threads = [threading.Thread(target=attack), threading.Thread(target=look)]
        for thread in threads:
            thread.start()
        try:
            block.send(sock)
            assert json.loads(process.stdout.readline())["ports"] == [port]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert (entered, gaps) == ([], [])


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_more_sockets_than_one_message_takes_arrive_in_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    result = aside(lambda: fastports.receive(pair[1]))
    block = fastports.allocate(150, protocol="both", range=ROOMY)
    ports = list(block)
    block.send(pair[0])
    with result() as received:
        assert list(received) == ports
        bound = []
        for fd in received.filenos():
            with socket.socket(fileno=os.dup(fd)) as sock:
                bound.append((sock.getsockname()[1], sock.type))
    both = socket.SOCK_STREAM, socket.SOCK_DGRAM
    assert bound == [(port, kind) for port in ports for kind in both]


@pytest.mark.parametrize("pair", KINDS, indirect=True)
@pytest.mark.parametrize("timeout", [0.0, 0.001, 5.0])
def test_a_socket_that_does_not_block_serves_as_well(
    pair: tuple[socket.socket, socket.socket], timeout: float
) -> None:
    for sock in pair:
        sock.settimeout(timeout)
    result = aside(lambda: fastports.receive(pair[1], timeout=20))
    with fastports.allocate(300, range=ROOMY) as block:
        block.send(pair[0])
    with result() as received:
        assert len(received) == 300


def test_one_socket_serves_for_one_block_after_another_in_both_directions(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    block = fastports.allocate(1)
    port = block.first
    for number in range(4):
        here, there = pair if number % 2 else pair[::-1]
        result = aside(functools.partial(fastports.receive, there))
        block.send(here)
        block = result()
        assert (block.first, entries_of(port)) == (port, [os.getpid()])
    block.release()


def test_a_received_block_takes_a_program_and_its_door_is_shut(
    pair: tuple[socket.socket, socket.socket], block: fastports.PortBlock
) -> None:
    block.open_door()
    result = aside(lambda: fastports.receive(pair[1]))
    block.send(pair[0])
    code = "import socket,sys\ns=socket.socket();s.setsockopt(1,2,1);s.bind(('',int(sys.argv[1])))"
    code += "\ns.listen();sys.stdin.read()"
    with result() as received:
        assert entrances(received.first) == []
        with received.spawn([sys.executable, "-ISc", code, "{port}"], stdin=-1) as child:
            assert child.listened_after is not None


def test_a_block_whose_sockets_listen_eats_no_connection_of_the_receivers_program(
    pair: tuple[socket.socket, socket.socket], block: fastports.PortBlock
) -> None:
    with block.spawn(["sleep", "0"], handoff="fd", listen=True) as child:
        child.wait(20)
    socket.create_connection(("127.0.0.1", block.first), 5).close()
    result = aside(lambda: fastports.receive(pair[1]))
    block.send(pair[0])
    code = "import os,socket,sys\ns=socket.socket();s.setsockopt(1,2,1)\n"
    code += "s.bind(('',int(sys.argv[1])));s.listen()\n"
    code += "while True:\n    c,_=s.accept();c.sendall(b'%d'%os.getpid());c.recv(1);c.close()"
    with (
        result() as received,
        received.spawn([sys.executable, "-ISc", code, "{port}"], wait=[received.first]) as child,
    ):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", received.first), 5) as sock:
                sock.settimeout(5)
                assert int(sock.recv(100)) == child.pid


# ------------------------------------------------------------------ it does not


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_is_gone_leaves_the_block_with_the_sender(
    kind: str, block: fastports.PortBlock
) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, getattr(socket, kind))
    there.close()
    with here, pytest.raises(fastports.HandoffError, match="receiver is gone") as caught:
        block.send(here)
    assert caught.value.mode == "send"
    assert still_held(block)
    assert entries_of(block.first) == [os.getpid()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_is_killed_amid_leaves_the_block_with_the_sender(
    kind: str, block: fastports.PortBlock
) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, getattr(socket, kind))
    child = Child(lambda: there.recv(20) and time.sleep(60))  # type: ignore[func-returns-value]
    there.close()
    with here:
        result = aside(lambda: block.send(here, timeout=0.5 if kind == "SOCK_DGRAM" else 20))
        # it has read, or the offer is queued: either way it will not answer
        child.kill()
        assert isinstance(result(), fastports.HandoffError)
    assert still_held(block)


def test_a_receiver_that_does_not_answer_in_time_is_told_of(
    pair: tuple[socket.socket, socket.socket], block: fastports.PortBlock
) -> None:
    with pytest.raises(fastports.HandoffError, match="did not answer in time") as caught:
        block.send(pair[0], timeout=0.05)
    assert caught.value.elapsed >= 0.05
    assert still_held(block)
    # the one that comes too late leaves it alone
    with pytest.raises(fastports.HandoffError, match="sender is gone"):
        fastports.receive(pair[1], timeout=5)
    assert entries_of(block.first) == [os.getpid()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_is_killed_amid_leaves_nothing_with_the_receiver(kind: str) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, getattr(socket, kind))

    def offers() -> None:
        block = fastports.allocate(1, label="doomed")
        os.write(writer, b"%d\n" % block.first)
        block.send(here, timeout=60)

    reader, writer = os.pipe()
    child = Child(offers)
    here.close()
    os.close(writer)
    port = int(os.read(reader, 100))
    os.close(reader)
    with there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, b"\0" * 16)
        until(lambda: there.recv(1, socket.MSG_PEEK))  # the offer is there
        child.kill()
        with pytest.raises(fastports.HandoffError, match=r"gone|in time"):
            fastports.receive(there, timeout=0.5)
    assert entries_of(port) == []
    assert len(entrances(port)) == 16


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_a_receiver_that_waits_no_longer_says_so(
    pair: tuple[socket.socket, socket.socket], block: fastports.PortBlock
) -> None:
    with pytest.raises(fastports.HandoffError, match="sender did not answer in time"):
        fastports.receive(pair[1], timeout=0.02)
    with pytest.raises(fastports.HandoffError, match="receiver is gone"):
        block.send(pair[0])
    assert still_held(block)


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_when_both_give_up_at_any_moment_exactly_one_has_the_block(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The sender's last word is queued, or the receiver has shut its end: the kernel decides."""
    kind = pair[0].type
    for attempt in range(150):
        here, there = socket.socketpair(socket.AF_UNIX, kind)
        with here, there:
            block = fastports.allocate(1)
            port = block.first
            waits = 0.0002 * (attempt % 10)
            result = aside(functools.partial(fastports.receive, there, timeout=waits))
            with contextlib.suppress(fastports.HandoffError):
                block.send(here, timeout=5)
            received = result()
            has = isinstance(received, fastports.PortBlock)
            assert has == block.released, received
            assert entries_of(port) == [os.getpid()]
            if has:
                received.release()
            block.release()
            assert entries_of(port) == []


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_a_last_word_that_came_before_the_end_was_shut_counts(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].send(passing._HEADER.pack(passing._MAGIC, passing._TAKE, 0, 1, 0, 0))
    line = passing._Line(pair[1], 0, "receive")
    assert line.was_taken()
    with pytest.raises(BrokenPipeError):
        pair[0].send(b"too late")
    assert not line.was_taken()


@pytest.mark.parametrize("pair", ["SOCK_DGRAM"], indirect=True)
def test_who_gives_up_on_a_datagram_socket_says_so(
    pair: tuple[socket.socket, socket.socket], block: fastports.PortBlock
) -> None:
    result = aside(lambda: block.send(pair[0], timeout=60))
    until(lambda: pair[1].recv(1, socket.MSG_PEEK))
    pair[1].recv(20000)
    with pytest.raises(fastports.HandoffError, match="in time"):
        fastports.receive(pair[1], timeout=0)
    assert "it gave up" in str(result())
    assert still_held(block)


@pytest.mark.parametrize("pair", KINDS, indirect=True)
@pytest.mark.parametrize(
    "what",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"x",
        b"fports/1",
        passing._HEADER.pack(passing._MAGIC, passing._TAKE, 0, 1, 0, 0),
        passing._HEADER.pack(passing._MAGIC, passing._READY, 0, 1, 0, 5) + b"cut",
        passing._HEADER.pack(passing._MAGIC, passing._OFFER, 1, 2, 0, 0),
    ],
    ids=["http", "short", "cut", "out of turn", "cut body", "second part"],
)
def test_a_foreign_message_is_refused_by_both(
    pair: tuple[socket.socket, socket.socket], block: fastports.PortBlock, what: bytes
) -> None:
    for at_the_sender in (False, True):
        here, there = socket.socketpair(socket.AF_UNIX, pair[0].type)
        with here, there:
            there.send(what)
            if here.type == socket.SOCK_STREAM:
                there.shutdown(socket.SHUT_WR)
            with pytest.raises(fastports.HandoffError, match=r"no message|gone"):
                if at_the_sender:
                    block.send(here)
                else:
                    fastports.receive(here)
    assert still_held(block)


def test_a_descriptor_where_none_belongs_is_closed_and_refused(
    pair: tuple[socket.socket, socket.socket], block: fastports.PortBlock
) -> None:
    ready = passing._HEADER.pack(passing._MAGIC, passing._READY, 0, 1, 0, 0)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pair[1].fileno()]))
    pair[1].sendmsg([ready], [rights])
    with pytest.raises(fastports.HandoffError, match="no message"):
        block.send(pair[0])
    assert still_held(block)


def targets() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def offer(sock: socket.socket, fds: list[int], parts: int = 1, **changed: object) -> None:
    """What send() writes first, with other facts or other descriptors."""
    told = {"protocol": "tcp", "first": 1, "size": len(fds), "host": None, "label": "",
            "metadata": None, "network": [], **changed}  # fmt: skip
    body = json.dumps(told).encode()
    header = passing._HEADER.pack(passing._MAGIC, passing._OFFER, 0, parts, len(fds), len(body))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    sock.sendmsg([header + body], rights)


def told_no(sock: socket.socket) -> bytes:
    header = passing._HEADER.unpack_from(data := sock.recv(20000))
    assert header[1] == passing._REFUSED
    return data[passing._HEADER.size :]


@pytest.mark.parametrize("what", ["file", "unbound", "connected", "another port", "unix", "extra"])
def test_descriptors_that_are_no_sockets_of_a_block_are_refused_and_closed(
    pair: tuple[socket.socket, socket.socket], what: str
) -> None:
    with contextlib.ExitStack() as stack:
        if what == "file":
            given = [stack.enter_context(open(os.devnull)).fileno()]
            port = 1
        else:
            family = socket.AF_UNIX if what == "unix" else socket.AF_INET
            sock = stack.enter_context(socket.socket(family))
            port = 1
            if what in ("another port", "extra", "connected"):
                sock.bind(("0.0.0.0", 0))
                port = sock.getsockname()[1]
            if what == "connected":
                server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                sock.connect(server.getsockname())
            given = [sock.fileno()] * (2 if what == "extra" else 1)
            if what == "another port":
                port ^= 1
        result = aside(lambda: fastports.receive(pair[1]))
        host = "127.0.0.1" if what == "connected" else None
        offer(pair[0], given, first=port, size=1, host=host)
        error = result()
        assert isinstance(error, fastports.HandoffError)
        assert "not the sockets of the block" in str(error)
        assert told_no(pair[0]).decode() == str(error)


@pytest.mark.parametrize(
    "changed",
    [
        {"label": 7},
        {"label": "a\nb"},
        {"metadata": [1]},
        {"protocol": "udp"},
        {"host": "::1"},
        {"host": 3},
        {"size": 2},
        {"size": "1"},
        {"first": None},
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    pair: tuple[socket.socket, socket.socket], changed: dict[str, object]
) -> None:
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        result = aside(lambda: fastports.receive(pair[1]))
        offer(pair[0], [sock.fileno()], **{"first": sock.getsockname()[1], "size": 1, **changed})
        assert isinstance(result(), fastports.HandoffError)
        assert told_no(pair[0])


def test_without_enough_descriptors_the_receiver_says_so_and_keeps_none(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair

    def receives() -> object:
        here.close()
        before = os.listdir("/proc/self/fd")
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 20, 4096))
        try:
            fastports.receive(there, timeout=20)
        except fastports.DescriptorLimit as exc:
            assert os.listdir("/proc/self/fd") == before
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            with fastports.receive(there, timeout=20) as block:  # the two are in step
                return exc.needed, exc.soft, len(before) + 20, list(block)
        return "taken"

    child = Child(receives)
    with fastports.allocate(300, range=ROOMY) as block:
        ports = list(block)
        with pytest.raises(fastports.HandoffError, match=r"receiver refused.*the limit is"):
            block.send(here)
        assert entries_of(ports[0]) == [os.getpid()]
        block.send(here)
    result: Any = child.result()
    needed, soft, expected, arrived = result
    assert (needed, soft, arrived) == (252, expected, ports)


def test_a_last_descriptor_is_wanted_for_the_entry(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair

    def receives() -> list[str]:
        here.close()
        found = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        filled = []
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.dup(0))
        for _ in range(2):  # the socket fits, or one more
            os.close(filled.pop())
            try:
                with fastports.receive(there, timeout=20) as block:
                    os.close(filled.pop())
                    found.append(str(os.getpid() in entries_of(block.first)))
            except fastports.FastportsError as exc:
                found.append(type(exc).__name__)
        return found

    child = Child(receives)
    with fastports.allocate(1) as block:
        with pytest.raises(fastports.HandoffError, match="receiver refused"):
            block.send(here)
        assert still_held(block)
        block.send(here)
    assert child.result() == ["DescriptorLimit", "True"]


def test_c28_a_block_is_not_taken_over_into_another_network(
    pair: tuple[socket.socket, socket.socket], block: fastports.PortBlock
) -> None:
    here, there = pair

    def receives() -> tuple[str, int]:
        unshare(CLONE_NEWNET)
        try:
            fastports.receive(there, timeout=20)
        except fastports.HandoffError as exc:
            return str(exc), len(list(fastports.entries()))
        return "", 0

    child = Child(receives)
    with pytest.raises(fastports.HandoffError, match="another network namespace"):
        block.send(here)
    told: Any = child.result()
    text, count = told
    assert "another network namespace" in text
    assert count == 0
    assert still_held(block)


# ------------------------------------------------------------------ wrong use


def test_what_is_no_connected_unix_socket_is_refused(block: fastports.PortBlock) -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as alone:
        for sock in (tcp, alone, 3, None):
            for act in (block.send, fastports.receive):
                with pytest.raises(fastports.InvalidRequest) as caught:
                    act(sock)  # type: ignore[arg-type]
                assert caught.value.argument == "sock"
    assert still_held(block)


@pytest.mark.parametrize("timeout", [-1, "1", float("nan"), True])
def test_a_timeout_that_is_no_time_is_refused(
    pair: tuple[socket.socket, socket.socket], block: fastports.PortBlock, timeout: Any
) -> None:
    with pytest.raises(fastports.InvalidRequest):
        block.send(pair[0], timeout=timeout)
    with pytest.raises(fastports.InvalidRequest):
        fastports.receive(pair[1], timeout=timeout)


def test_only_the_owner_can_send_and_only_what_it_holds(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    block = fastports.allocate(1)

    def sends() -> str:
        try:
            block.send(pair[0])
        except fastports.NotOwner as exc:
            return str(exc)
        return ""

    assert "belong to process" in in_child(sends)
    block.close_holds()
    with pytest.raises(fastports.HandoffError, match="nothing to send"):
        block.send(pair[0])
    block.release()
    with pytest.raises(fastports.BlockReleased):
        block.send(pair[0])
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):  # not a byte was sent
        pair[1].recv(1)


@pytest.mark.parametrize("parts", [1, 2], ids=["before the last word", "amid the offer"])
def test_a_fork_amid_leaves_no_copy_in_the_child(
    pair: tuple[socket.socket, socket.socket], parts: int
) -> None:
    here, there = pair
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        port = sock.getsockname()[1]
        result = aside(lambda: fastports.receive(there, timeout=20))
        offer(here, [sock.fileno()], first=port, size=1, parts=parts)
        if parts == 1:
            assert passing._HEADER.unpack(here.recv(passing._HEADER.size))[1] == passing._READY
        else:
            until(lambda: targets().count(f"socket:[{os.fstat(sock.fileno()).st_ino}]") == 2)
    child = Child(lambda: time.sleep(60))
    if parts == 1:
        here.sendall(passing._HEADER.pack(passing._MAGIC, passing._TAKE, 0, 1, 0, 0))
        result().release()
    else:
        here.shutdown(socket.SHUT_RDWR)
        assert isinstance(result(), fastports.HandoffError)
    assert len(entrances(port)) == 16
    child.kill()


def test_ctrl_c_in_a_wait_leaves_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair

    def receives() -> int:
        before = len(os.listdir("/proc/self/fd"))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            fastports.receive(there)
        except KeyboardInterrupt:
            return len(os.listdir("/proc/self/fd")) - before
        return -1

    child = Child(receives)
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        offer(here, [sock.fileno()], first=sock.getsockname()[1], size=1)
        assert passing._HEADER.unpack(here.recv(passing._HEADER.size))[1] == passing._READY
        os.kill(child.pid, signal.SIGINT)
        assert child.result() == 0
    assert here.recv(1) == b""  # shut, so that nobody waits at this end
