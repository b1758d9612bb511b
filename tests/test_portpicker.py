"""portpicker's interface over the hold: what its users do next must work."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import portpicker as original
import pytest

import fastports
from fastports.compat import portpicker

PLAIN_SERVER = """
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self): self.request.sendall(b"served")
server = socketserver.TCPServer(("127.0.0.1", int(sys.argv[1])), Echo)
assert not server.allow_reuse_address
server.handle_request()
"""


@pytest.fixture(autouse=True)
def _every_port_is_returned() -> Iterator[None]:
    yield
    for port in list(portpicker._random_ports):
        portpicker.return_port(port)
    portpicker._free_ports.clear()
    portpicker._owned_ports.clear()


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.005)


def bound(
    port: int,
    *,
    reuse: bool = False,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    listen: bool = True,
) -> bool:
    """Whether a socket can be bound (and listen) now; it is closed again."""
    with socket.socket(socket.AF_INET, kind) as sock:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            if kind == socket.SOCK_STREAM and listen:
                sock.listen()
        except OSError:
            return False
    return True


def free_again(port: int) -> bool:
    try:
        fastports.reserve(port, protocol="both").release()
    except fastports.PortsUnavailable:
        return False
    return True


def answer(port: int) -> bytes | None:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            return sock.recv(100)
    except ConnectionRefusedError:
        return None


# --- the names ---


def test_every_public_name_of_the_original_is_there_with_its_parameters() -> None:
    legacy = {"Bind", "IsPortFree", "PickUnusedPort", "GetPortFromPortServer"}
    for name in {*original.__all__, *legacy}:
        theirs = inspect.signature(getattr(original, name)).parameters
        ours = inspect.signature(getattr(portpicker, name)).parameters
        for (their_name, their), (our_name, our) in zip(
            theirs.items(), list(ours.items())[: len(theirs)], strict=True
        ):
            assert (our_name, our.kind, our.default) == (their_name, their.kind, their.default)
        more = list(ours.values())[len(theirs) :]
        assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in more)
    assert issubclass(portpicker.NoFreePortFoundError, Exception)


def test_the_old_names_are_the_new_functions() -> None:
    assert portpicker.PickUnusedPort is portpicker.pick_unused_port
    assert portpicker.ReturnPort is portpicker.return_port
    assert portpicker.AddReservedPort is portpicker.add_reserved_port
    assert portpicker.Bind is portpicker.bind
    assert portpicker.IsPortFree is portpicker.is_port_free
    assert portpicker.GetPortFromPortServer is portpicker.get_port_from_port_server


# --- what its user does next ---


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_the_same_process_binds_its_port_in_any_way(reuse: bool, kind: socket.SocketKind) -> None:
    port = portpicker.pick_unused_port()
    assert bound(port, reuse=reuse, kind=kind)
    assert bound(port, reuse=reuse, kind=kind), "and once more"


def test_a_child_that_binds_plainly_serves_on_the_port() -> None:
    port = portpicker.pick_unused_port()
    with subprocess.Popen([sys.executable, "-c", PLAIN_SERVER, str(port)]):
        until(lambda: answer(port) == b"served")


@pytest.mark.parametrize("handoff", ["close", "door"])
def test_a_child_that_sets_so_reuseaddr_serves_on_the_port(handoff: str) -> None:
    port = portpicker.pick_unused_port(handoff=handoff)
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    for _ in range(2):  # it comes back on the same port, too
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
            until(lambda: not bound(port, reuse=True))
            child.terminate()


def test_with_the_door_a_plain_udp_program_binds() -> None:
    port = portpicker.pick_unused_port(handoff="door")
    assert bound(port, kind=socket.SOCK_DGRAM)


@pytest.mark.parametrize("handoff", ["close", "door"])
def test_the_picked_port_is_free_in_the_sense_of_is_port_free(handoff: str) -> None:
    port = portpicker.pick_unused_port(handoff=handoff)
    assert portpicker.is_port_free(port)
    assert original.is_port_free(port)
    for proto in ((socket.SOCK_STREAM, socket.IPPROTO_TCP), (socket.SOCK_DGRAM, 0)):
        assert portpicker.bind(port, *proto) == port


def test_a_bound_port_is_not_free() -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family, kind) as sock:
                sock.bind((address, 0))
                assert not portpicker.is_port_free(sock.getsockname()[1])
    with fastports.allocate(1) as block:
        assert not portpicker.is_port_free(block.first)


def test_bind_of_port_0_returns_the_kernels_choice() -> None:
    port = portpicker.bind(0, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    assert port is not None and 0 < port < 65536


# --- who else could get it ---


@pytest.mark.parametrize("handoff", ["close", "door"])
@pytest.mark.parametrize("protocol", ["tcp", "udp", "both"])
def test_no_other_user_of_fastports_gets_a_picked_port(handoff: str, protocol: str) -> None:
    port = portpicker.pick_unused_port(handoff=handoff)
    with pytest.raises(fastports.PortsUnavailable):
        fastports.reserve(port, protocol=protocol)


def test_three_processes_that_pick_at_once_get_distinct_ports() -> None:
    source = """
from fastports.compat import portpicker
print(*[portpicker.pick_unused_port() for _ in range(50)], flush=True)
input()
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    ports = []
    for child in children:
        assert child.stdout is not None
        ports += child.stdout.readline().split()
    for child in children:
        child.communicate("\n")
    assert len(set(ports)) == 150


def test_the_remaining_race_of_close_is_an_explicit_bind_of_this_very_number() -> None:
    port = portpicker.pick_unused_port(handoff="close")
    stranger = socket.socket()
    with stranger:
        stranger.bind(("127.0.0.1", port))  # nothing keeps a stranger off: it is documented so
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not low <= port <= high, "the kernel gives it to nobody by itself"


def test_with_the_door_a_plain_stranger_stays_outside_before_and_after_the_server() -> None:
    port = portpicker.pick_unused_port(handoff="door")
    assert not bound(port)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        assert not bound(port)
        assert not bound(port, reuse=True, listen=False)
    assert not bound(port)


def test_the_remaining_race_of_the_door_is_a_stranger_with_so_reuseaddr_until_it_listens() -> None:
    port = portpicker.pick_unused_port(handoff="door")
    assert bound(port, reuse=True)


# --- giving back ---


@pytest.mark.parametrize("handoff", ["close", "door"])
def test_a_returned_port_is_anybodys(handoff: str) -> None:
    port = portpicker.pick_unused_port(handoff=handoff)
    portpicker.return_port(port)
    with fastports.reserve(port, protocol="both"):
        pass


def test_returning_what_was_not_picked_is_logged_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "fastports.portpicker")
    with fastports.allocate(1) as block:
        portpicker.return_port(block.first)
        assert block.state == "held"
    portpicker.add_reserved_port(4242)
    portpicker.return_port(4242)
    assert [record.getMessage() for record in caplog.records] == [
        f"port {block.first} was returned, but not picked here",
        "port 4242 was returned before",
    ]


def test_a_returned_port_is_not_picked_again_by_this_process_while_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(portpicker, "_allocator", fastports.Allocator(range="20000-20063"))
    seen = []
    for _ in range(8):
        seen.append(portpicker.pick_unused_port())
        portpicker._random_ports[seen[-1]].release()  # type: ignore[union-attr]
        portpicker._random_ports[seen[-1]] = None
    assert len(set(seen)) == 8


def test_reserved_ports_are_given_out_first_and_again() -> None:
    portpicker.add_reserved_port(28465)
    for _ in range(3):
        assert portpicker.pick_unused_port() == 28465
        portpicker.return_port(28465)
    assert portpicker.pick_unused_port() == 28465
    assert portpicker.pick_unused_port() != 28465


def test_the_end_of_the_process_gives_everything_back() -> None:
    source = "from fastports.compat import portpicker; print(portpicker.pick_unused_port())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stderr == ""
    with fastports.reserve(int(done.stdout), protocol="both"):
        pass


def test_a_forked_child_neither_repeats_nor_returns_what_its_parent_has() -> None:
    portpicker.add_reserved_port(28465)
    port = portpicker.pick_unused_port()
    assert port == 28465
    portpicker.return_port(port)
    kept = portpicker._pick_unused_port_without_server()
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            portpicker.return_port(kept)
            mine = portpicker.pick_unused_port()
            os.write(sender, f"{mine} {free_again(kept):d}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(sender)
    with os.fdopen(receiver) as file:
        mine, free = map(int, file.read().split())
    assert mine not in (port, kept)
    assert not free
    assert not free_again(kept)


# --- refusals and limits ---


def test_a_full_range_is_refused_with_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    with fastports.allocate(4) as block:
        only = fastports.Allocator(range=(block.first, block.last))
        monkeypatch.setattr(portpicker, "_allocator", only)
        with pytest.raises(portpicker.NoFreePortFoundError, match="4 busy") as refusal:
            portpicker.pick_unused_port()
    assert isinstance(refusal.value.__cause__, fastports.PortsUnavailable)


def test_with_the_door_a_port_taken_in_udp_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with fastports.allocate(4) as block:
        first, last = block.first, block.last
    monkeypatch.setattr(portpicker, "_allocator", fastports.Allocator(range=(first, last)))
    with fastports.reserve((first, last - 1), protocol="udp"):
        assert portpicker.pick_unused_port(handoff="door") == last
        with pytest.raises(portpicker.NoFreePortFoundError):
            portpicker.pick_unused_port(handoff="door")


def test_another_word_for_the_handoff_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fastports.InvalidRequest, match="'close'"):
        portpicker.pick_unused_port(handoff="open")
    monkeypatch.setenv("FASTPORTS_PORTPICKER_HANDOFF", "window")
    with pytest.raises(fastports.InvalidRequest, match="'window'"):
        portpicker.pick_unused_port()


def test_the_environment_chooses_the_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPORTS_PORTPICKER_HANDOFF", "door")
    port = portpicker.pick_unused_port()
    assert not bound(port)


def test_picks_without_end_leave_three_quarters_of_the_descriptors_alone() -> None:
    source = """
import os
from fastports.compat import portpicker
ports = [portpicker.pick_unused_port() for _ in range(300)]
assert len(set(ports)) == 300
print(len(os.listdir("/proc/self/fd")), *ports[-16:])
input()
"""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
    ) as child:
        assert child.stdout is not None
        used, *newest = map(int, child.stdout.readline().split())
        assert used < 80
        for port in newest:
            with pytest.raises(fastports.PortsUnavailable):
                fastports.reserve(port)
        child.communicate("\n")


# --- a port server that is none ---


def serving(answer: bytes) -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX)
    name = f"fastports-test-{os.getpid()}-{time.monotonic_ns()}"
    listener.bind("\0" + name)
    listener.listen()
    return listener, "@" + name


@pytest.mark.parametrize(
    "text", [b"", b"0\n", b"-5\n", b"70000\n", b"no\n", b"\xff\n", b"9" * 2000, "٣\n".encode()]
)
def test_nonsense_of_a_port_server_is_no_port(text: bytes) -> None:
    listener, address = serving(text)
    child = os.fork()
    if child == 0:
        peer, _ = listener.accept()
        peer.recv(100)
        peer.sendall(text)
        os._exit(0)
    listener.close()
    assert portpicker.get_port_from_port_server(address) is None
    os.waitpid(child, 0)


def test_an_absent_port_server_is_logged_and_the_pick_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTSERVER_ADDRESS", "@nobody-serves-here")
    assert portpicker.get_port_from_port_server("") is None
    port = portpicker.pick_unused_port(portserver_address="/nonexistent/server")
    assert not free_again(port)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


# --- the command ---


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PICK": f"{sys.executable} -m fastports.compat.portpicker"} | {
        **environment
    }
    environment.pop("PORTSERVER_ADDRESS", None)
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment
    )


def test_the_command_keeps_its_port_for_the_life_of_the_script() -> None:
    done = shell(
        'port=$($PICK $$); echo $port; grep -c "@fastports/m/t/$port$" /proc/net/unix; exec 1>&-'
    )
    port, kept = map(int, done.stdout.split())
    assert kept == 1, done.stderr
    until(lambda: free_again(port))


def test_the_command_takes_its_parent_for_the_process_by_default() -> None:
    done = shell('port=$($PICK); echo $port; grep -c "@fastports/m/t/$port$" /proc/net/unix')
    assert done.stdout.split()[1] == "1", done.stderr
    until(lambda: free_again(int(done.stdout.split()[0])))


def test_the_command_keeps_its_port_no_longer_than_its_second_argument() -> None:
    done = shell(f"$PICK {os.getpid()} 0.05")
    assert done.returncode == 0, done.stderr
    until(lambda: free_again(int(done.stdout)))


def test_the_commands_keeper_dies_with_a_process_that_is_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        port = int(shell(f"$PICK {process.pid}").stdout)
        assert not free_again(port)
        process.kill()
        until(lambda: free_again(port))


@pytest.mark.parametrize("arguments", ["x", "0", "-1", "99999999999", "1 x", "1 -1", "1 nan"])
def test_a_bad_argument_of_the_command_is_a_usage_line(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert portpicker.main(["portpicker", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "usage: portpicker [PID [SECONDS]]\n"


def test_the_command_prints_nothing_for_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        done = shell(f"$PICK {process.pid}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "No such process" in done.stderr


def test_the_import_opens_nothing_and_starts_nothing() -> None:
    # the import is all it takes: no descriptor, no thread, no socket before the first pick
    source = "import os; before = len(os.listdir('/proc/self/fd'));"
    source += "import fastports.compat.portpicker, threading;"
    source += "print(len(os.listdir('/proc/self/fd')) - before, threading.active_count())"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.split() == ["0", "1"]
