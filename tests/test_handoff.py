"""block.spawn: a program is started on held ports, waited for, and ended without a rest."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from brokering import enter
from programs import program

import fastports
from fastports import HandoffError, InvalidRequest, NotOwner, PortBlock
from fastports.child import sweep
from fastports.handoff import DEVNULL, PIPE, STDOUT, Child, modes

HERE = Path(__file__).parent
WORKING = modes()
MODES = [
    pytest.param(
        mode,
        marks=pytest.mark.skipif(not WORKING[mode].works, reason=f"no {mode}: {WORKING[mode].why}"),
    )
    for mode in WORKING
]


@pytest.fixture
def block() -> Iterator[PortBlock]:
    with fastports.allocate(1) as held:
        yield held


@pytest.fixture
def unique() -> str:
    """A word by which a test finds its own processes; those of a family that end late, too."""
    return f"unique-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def four() -> Iterator[PortBlock]:
    with fastports.allocate(4) as held:
        yield held


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the state was not reached in time"
        time.sleep(0.002)


def asked(port: int, host: str = "127.0.0.1") -> int:
    """The pid with which the server on this port answers."""
    with socket.create_connection((host, port), timeout=10) as client:
        return int(client.makefile().read())


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def door_is_open(block: PortBlock) -> bool:
    states = set()
    for fd in block.filenos():
        with socket.socket(fileno=os.dup(fd)) as copy:
            states.add(bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)))
    assert len(states) == 1
    return states.pop()


def launcher(
    code: str, *arguments: str, prefix: Sequence[str] = (), **options: object
) -> subprocess.Popen[str]:
    """A process of its own that launches children."""
    head = "import os, sys, time\nimport fastports\nfrom programs import program\n"
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [*prefix, sys.executable, "-c", head + code, *arguments],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def output(code: str, *arguments: str) -> str:
    with launcher(code, *arguments) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return str(out)


# --- servers --------------------------------------------------------------------------------------

ASYNCIO = """
import asyncio, sys
async def main():
    async def handle(reader, writer):
        writer.write(b"1"); await writer.drain(); writer.close()
    server = await asyncio.start_server(handle, "0.0.0.0", int(sys.argv[1]))
    await server.serve_forever()
asyncio.run(main())
"""


def test_http_server_comes_up_on_a_held_port_and_answers(block: PortBlock) -> None:
    command = [sys.executable, "-m", "http.server", "--bind", "{host}", "{port}"]
    with block.spawn(command, stdout=DEVNULL, stderr=DEVNULL, handoff="door") as child:
        assert child.mode == "door"
        assert child.listened_after is not None
        assert child.poll() is None
        assert not door_is_open(block)
        with socket.create_connection(("127.0.0.1", block.first)) as client:
            client.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.0 200")
    assert child.returncode == -signal.SIGTERM
    assert block.state == "held"


def test_asyncio_comes_up_on_a_held_port(block: PortBlock) -> None:
    with block.spawn([sys.executable, "-c", ASYNCIO, "{port}"], handoff="door"):
        assert asked(block.first) == 1


def test_uvicorn_comes_up_on_a_held_port(block: PortBlock, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    (tmp_path / "app.py").write_text(
        "async def app(scope, receive, send):\n"
        "    await send({'type': 'http.response.start', 'status': 204, 'headers': []})\n"
        "    await send({'type': 'http.response.body', 'body': b''})\n"
    )
    command = [sys.executable, "-m", "uvicorn", "--lifespan", "off", "--port", "{port}", "app:app"]
    with (
        block.spawn(command, cwd=tmp_path, stdout=DEVNULL, stderr=DEVNULL, handoff="door") as child,
        socket.create_connection(("127.0.0.1", block.first)) as client,
    ):
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 204")
        assert child.poll() is None


@pytest.mark.parametrize("name", ["server", "worker", "thread", "closes_streams"])
def test_whoever_of_the_program_listens_is_known(block: PortBlock, name: str) -> None:
    with block.spawn(program(name, "{port}"), handoff="door") as child:
        pid = asked(block.first)
        assert (pid == child.pid) == (name != "worker")
        assert not door_is_open(block)
    until(lambda: not runs(pid))


@pytest.mark.parametrize("name", ["daemon", "background", "runaway"])
def test_a_program_that_becomes_a_daemon_is_waited_for_and_ended(
    block: PortBlock, name: str
) -> None:
    with block.spawn(program(name, "{port}"), handoff="door") as child:
        pid = asked(block.first)
        assert pid != child.pid
        assert child.poll() == 0
        assert runs(pid)
    assert not runs(pid)


@pytest.mark.parametrize(
    ("name", "address"),
    [("server", "127.0.0.1"), ("server", "127.0.0.2"), ("server6", "::1"), ("server6", "::")],
)
def test_any_address_of_a_wildcard_hold_counts(block: PortBlock, name: str, address: str) -> None:
    with block.spawn(program(name, "{port}", address), handoff="door") as child:
        assert asked(block.first, "::1" if address == "::" else address) == child.pid


def test_a_hold_of_one_address_is_handed_over() -> None:
    with (
        fastports.allocate(1, host="127.0.0.3") as block,
        block.spawn(program("server", "{port}", "{host}"), handoff="door") as child,
    ):
        assert asked(block.first, "127.0.0.3") == child.pid


@pytest.mark.parametrize("protocol", ["udp", "both"])
@pytest.mark.parametrize("handoff", ["door", "close"])
def test_udp_counts_as_listening_once_it_is_bound(protocol: str, handoff: str) -> None:
    with (
        fastports.allocate(1, protocol=protocol) as block,
        block.spawn(program(protocol, "{port}"), handoff=handoff) as child,
    ):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if handoff == "door":
                assert not door_is_open(block)
                with pytest.raises(OSError):
                    thief.bind(("", block.first))
        assert child.poll() is None


def test_a_child_crashes_and_is_restarted_behind_the_hold(block: PortBlock) -> None:
    for _ in range(3):
        with block.spawn(program("server", "{port}"), handoff="door") as child:
            assert asked(block.first) == child.pid  # leaves a TIME_WAIT on the server's side
            child.kill()
            assert child.wait(10) == -signal.SIGKILL
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError):
                thief.bind(("", block.first))


def test_close_mode_lets_a_plain_binder_in_and_marks_the_port(block: PortBlock) -> None:
    with block.spawn(program("plain", "{port}"), handoff="close") as child:
        assert block.state == "closed"
        assert child.poll() is None
        with pytest.raises(fastports.PortsUnavailable):
            fastports.reserve(block.first)
    with pytest.raises(fastports.PortsUnavailable) as refused:  # the markers stay until release
        fastports.reserve(block.first)
    assert refused.value.cause == "marked"
    with pytest.raises(HandoffError, match="closed"):
        block.spawn(program("server", "{port}"), handoff="door")
    with block.spawn(program("server", "{port}")) as child:
        assert child.mode == "close"


def test_the_child_finds_no_copy_of_a_hold_in_close_mode(block: PortBlock) -> None:
    # plain binds fail as long as any copy of the hold is open anywhere
    for _ in range(5):
        with (
            fastports.allocate(1) as other,
            other.spawn(program("plain", "{port}"), handoff="close") as child,
        ):
            assert child.poll() is None


# --- what the child is given ----------------------------------------------------------------------


def said(block: PortBlock, *arguments: str, env: dict[str, str] | None = None) -> list[str]:
    with block.spawn(
        program("says", *arguments), wait=None, stdout=PIPE, env=env, handoff="door"
    ) as child:
        out, _ = child.communicate(timeout=20)
    assert out is not None
    return out.decode().splitlines()


def test_placeholders_are_filled_in_and_other_braces_are_not(four: PortBlock) -> None:
    first = four.first
    expected = {
        "{port}": f"{first}",
        "--p={port0},{port3}!": f"--p={first},{first + 3}!",
        "{first}-{last}": f"{first}-{first + 3}",
        "{ports}": f"{first},{first + 1},{first + 2},{first + 3}",
        "{host}:{port1}": f"0.0.0.0:{first + 1}",
        '{"a": 1, "b": {"c": []}}': '{"a": 1, "b": {"c": []}}',
        '{"port": {port}, "x": {}}': f'{{"port": {first}, "x": {{}}}}',
        "{": "{", "}": "}", "{}": "{}", "{{port}}": f"{{{first}}}", "{port": "{port",
        "{ port }": "{ port }", "{porto}": "{porto}", "{port01}": "{port01}",
        "{port-1}": "{port-1}", "{Port}": "{Port}", "{fdx}": "{fdx}", "{port²}": "{port²}", "": "",
    }  # fmt: skip
    shown, ports, _ = said(four, *expected)
    assert eval(shown) == list(expected.values())
    assert ports == f"{first},{first + 1},{first + 2},{first + 3}"


def test_the_environment_is_filled_in_when_given_and_inherited_when_not(
    four: PortBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("X", "{port9}")
    assert said(four)[2] == "{port9}"
    assert said(four, env={"X": "a{port2}{}"})[2] == f"a{four.first + 2}{{}}"
    with pytest.raises(InvalidRequest, match="port9"):
        said(four, env={"X": "{port9}"})


def test_kubernetes_service_links_do_no_harm(
    block: PortBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PORT", "PORTS", "CHILD", "SERVICE_HOST", "PORT_8000_TCP_PROTO"):
        monkeypatch.setenv(f"FASTPORTS_{name}", "tcp://10.43.1.39:8000")
    assert said(block)[1] == str(block.first)


def test_a_child_inherits_no_held_port_and_no_other_descriptor(block: PortBlock) -> None:
    with socket.socket() as other:
        os.set_inheritable(other.fileno(), True)
        with block.spawn(
            program("server", "{port}"),
            pass_fds=[other.fileno()],
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
            handoff="door",
        ) as child:
            links = {
                int(fd): os.readlink(f"/proc/{child.pid}/fd/{fd}")
                for fd in os.listdir(f"/proc/{child.pid}/fd")
            }
            inode = f"socket:[{os.fstat(other.fileno()).st_ino}]"
            assert links.pop(other.fileno()) == inode
    sockets = [link for link in links.values() if link.startswith("socket:")]
    assert len(sockets) == 1  # its own listener
    beyond = {fd: link for fd, link in links.items() if fd > 2 and link not in sockets}
    assert all(link.startswith("pipe:") and fd >= 200 for fd, link in beyond.items())
    assert len(beyond) == 1


def test_c30_a_grandchild_that_inherits_everything_does_not_keep_the_port() -> None:
    with fastports.allocate(1) as block:
        port = block.first
        with subprocess.Popen(["sleep", "100"], close_fds=False) as sleeper:
            block.release()
            with socket.socket() as sock:
                sock.bind(("", port))
            sleeper.kill()


def test_streams_go_where_they_are_sent(block: PortBlock, tmp_path: Path) -> None:
    with (
        (tmp_path / "out").open("wb") as file,
        block.spawn(
            program("echo"), wait=None, stdin=PIPE, stdout=file, stderr=STDOUT, handoff="door"
        ) as child,
    ):
        assert child.communicate(b"abc", timeout=20) == (None, None)
        assert child.returncode == 0
    assert sorted((tmp_path / "out").read_bytes()) == sorted(b"ABC3")
    with block.spawn(
        program("echo"), wait=None, stdin=PIPE, stdout=PIPE, stderr=PIPE, handoff="door"
    ) as child:
        big = b"x" * 3_000_000
        assert child.communicate(big, timeout=20) == (big.upper(), b"3000000")
    with block.spawn(
        program("echo"), wait=None, stdin=DEVNULL, stdout=PIPE, handoff="door"
    ) as child:
        assert child.communicate(timeout=20) == (b"", None)


def test_a_server_that_talks_before_it_listens_is_not_stuck_on_its_pipe(block: PortBlock) -> None:
    code = "import os, sys; os.write(2, b'x' * 500_000)\n"
    command = program("server", "{port}")
    command[4] = code + command[4]
    with block.spawn(command, stderr=PIPE, handoff="door") as child:
        assert child.stderr is not None
        assert child.stderr.read(500_000) == b"x" * 500_000


# --- waiting --------------------------------------------------------------------------------------


def test_the_named_ports_are_waited_for_and_others_are_not(four: PortBlock) -> None:
    with four.spawn(program("several", "{port0}", "{port2}"), handoff="door") as child:
        assert list(child.ports) == [four[0], four[2]]
    with four.spawn(
        program("several", "{last}", str(four[1])), wait=[four[1]], handoff="door"
    ) as child:
        assert list(child.ports) == [four[1]]
    for timeout in (0.3, 3.0, 30.0):  # in which a busy machine has two ports listening
        with pytest.raises(HandoffError) as failed:
            four.spawn(
                program("several", str(four[0]), str(four[1])), timeout=timeout, handoff="door"
            )
        if failed.value.port == four[2]:
            break
    assert failed.value.port == four[2]
    assert "1 more" in str(failed.value)


def test_without_waiting_the_door_stays_open_until_it_listens_or_ends(block: PortBlock) -> None:
    with block.spawn(program("late", "{port}", "0.2"), wait=None, handoff="door") as child:
        assert door_is_open(block)
        assert child.listened_after is None
        assert child.wait_listening() is child
        assert not door_is_open(block)
        assert child.listened_after is not None
        assert child.listened_after > 0.2
    with block.spawn(program("never"), wait=None, handoff="door") as child:
        assert door_is_open(block)
        child.kill()
        child.wait(10)
        assert not door_is_open(block)


def test_one_childs_end_does_not_close_the_door_before_another(four: PortBlock) -> None:
    with (
        four.spawn(program("never"), wait=None, handoff="door") as first,
        four.spawn(program("late", "{port}", "0.2"), wait=None, handoff="door") as second,
    ):
        first.stop()
        assert door_is_open(four)
        second.wait_listening()
        assert not door_is_open(four)


def test_a_child_that_is_already_dead_is_not_taken_for_its_successor(block: PortBlock) -> None:
    with block.spawn(program("daemon", "{port}"), handoff="door"):
        with pytest.raises(HandoffError) as failed:
            block.spawn(program("never"), wait=[block.first], handoff="door")
        assert failed.value.inode


# --- failures -------------------------------------------------------------------------------------


def test_an_early_exit_tells_status_time_and_last_words(block: PortBlock, tmp_path: Path) -> None:
    with pytest.raises(HandoffError) as failed:
        block.spawn(program("fails"), stderr=PIPE, handoff="door")
    error = failed.value
    assert (error.returncode, error.port, error.mode) == (3, block.first, "door")
    assert error.stderr == "first\nboom at last"
    assert 0 < error.elapsed < 20
    assert "status 3" in str(error)
    assert "boom at last" in str(error)
    (tmp_path / "log").write_text("of an earlier run\n")
    with (tmp_path / "log").open("a") as log, pytest.raises(HandoffError) as failed:
        block.spawn(program("fails"), stderr=log, handoff="door")
    assert failed.value.stderr == "first\nboom at last"
    assert not door_is_open(block)


def test_a_child_killed_by_a_signal_is_told_as_such(block: PortBlock) -> None:
    with pytest.raises(HandoffError, match="signal 9") as failed:
        block.spawn(["/bin/sh", "-c", "kill -9 $$"], handoff="door")
    assert failed.value.returncode == -9


def test_a_plain_binder_at_an_open_door_gets_the_name_of_the_mode_to_use(block: PortBlock) -> None:
    with pytest.raises(HandoffError, match="handoff='close'") as failed:
        block.spawn(program("plain", "{port}"), handoff="door", stderr=PIPE)
    assert "in use" in failed.value.stderr


def test_a_timeout_ends_the_whole_family(block: PortBlock, unique: str) -> None:
    with pytest.raises(HandoffError) as failed:
        block.spawn(program("tree", unique), timeout=0.5, grace=0.2, handoff="door")
    assert failed.value.port == block.first
    assert failed.value.elapsed >= 0.5
    assert not relatives(unique)
    assert not door_is_open(block)


def relatives(text: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text.encode() in command and runs(int(name)):
            found.append(int(name))
    return found


def test_ctrl_c_while_waiting_ends_the_whole_family(block: PortBlock, unique: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            block.spawn(program("tree", unique), grace=0.2, handoff="door")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not relatives(unique)
    assert not door_is_open(block)


@pytest.mark.parametrize("handoff", ["door", "close"])
@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["/nonexistent/program"], FileNotFoundError),
        (["no-such-program-on-the-path"], FileNotFoundError),
        (["/etc/passwd"], PermissionError),
        (["/etc"], PermissionError),
    ],
)
def test_a_missing_program_is_told_as_by_popen_and_the_block_stays_held(
    block: PortBlock, handoff: str, argv: list[str], error: type[OSError]
) -> None:
    with pytest.raises(error) as ours:
        block.spawn(argv, handoff=handoff)
    with pytest.raises(error) as theirs:
        subprocess.Popen(argv)
    assert str(ours.value) == str(theirs.value)
    assert block.state == "held"
    assert not door_is_open(block)


def test_a_missing_directory_is_told_as_by_popen(block: PortBlock) -> None:
    with pytest.raises(FileNotFoundError, match="/nonexistent"):
        block.spawn(["/bin/true"], cwd="/nonexistent", handoff="door")
    assert not door_is_open(block)


def test_the_path_of_the_childs_environment_is_searched(block: PortBlock, tmp_path: Path) -> None:
    script = tmp_path / "mine"
    script.write_text("#!/bin/sh\necho found\n")
    script.chmod(0o755)
    env = {"PATH": f"/nonexistent:{tmp_path}"}
    with block.spawn(["mine"], wait=None, stdout=PIPE, env=env, handoff="door") as child:
        assert child.communicate(timeout=20)[0] == b"found\n"


BAD: list[tuple[str, dict[str, object]]] = [
    ("argv", {"argv": []}),
    ("argv", {"argv": [""]}),
    ("argv", {"argv": "true"}),
    ("argv", {"argv": b"true"}),
    ("argv", {"argv": 5}),
    ("argv", {"argv": ["true", 5]}),
    ("argv", {"argv": ["true", None]}),
    ("argv", {"argv": ["a\0b"]}),
    ("argv", {"argv": ["true", "a\0b"]}),
    ("argv", {"argv": ["true", "{port1}"]}),
    ("argv", {"argv": ["true", "{port70000000000000000000}"]}),
    ("handoff", {"handoff": "magic"}),
    ("handoff", {"handoff": None}),
    ("timeout", {"timeout": -1}),
    ("timeout", {"timeout": math.nan}),
    ("timeout", {"timeout": True}),
    ("timeout", {"timeout": "3"}),
    ("grace", {"grace": -1.0}),
    ("grace", {"grace": None}),
    ("wait", {"wait": "bound"}),
    ("wait", {"wait": 5}),
    ("wait", {"wait": []}),
    ("wait", {"wait": [1]}),
    ("env", {"env": {"A": 1}}),
    ("env", {"env": {"A=B": "1"}}),
    ("env", {"env": {"": "1"}}),
    ("env", {"env": {"A": "a\0b"}}),
    ("env", {"env": ["A=1"]}),
    ("cwd", {"cwd": 5}),
    ("cwd", {"cwd": "a\0b"}),
    ("stdin", {"stdin": "file"}),
    ("stdin", {"stdin": STDOUT}),
    ("stdout", {"stdout": STDOUT}),
    ("stdout", {"stdout": -7}),
    ("stderr", {"stderr": True}),
    ("pass_fds", {"pass_fds": [1]}),
    ("pass_fds", {"pass_fds": 5}),
    ("pass_fds", {"pass_fds": ["a"]}),
    ("foreground", {"new_session": True, "foreground": True}),
]


@pytest.mark.parametrize(("argument", "options"), BAD, ids=lambda value: repr(value)[:40])
def test_bad_input_is_refused_before_anything_is_touched(
    block: PortBlock, argument: str, options: dict[str, object]
) -> None:
    arguments = {"argv": ["/bin/true"], **options}
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidRequest) as refused:
        block.spawn(**arguments)  # type: ignore[arg-type]
    assert refused.value.argument == argument
    assert str(refused.value)[-1] == "."
    assert set(os.listdir("/proc/self/fd")) == before
    assert not door_is_open(block)


@pytest.mark.parametrize("handoff", ["auto", *MODES])
def test_a_released_block_and_a_forked_launcher_are_refused(block: PortBlock, handoff: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            block.spawn(["/bin/true"], handoff=handoff)
        except NotOwner:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    block.release()
    with pytest.raises(fastports.BlockReleased):
        block.spawn(["/bin/true"], handoff=handoff)


# --- strangers ------------------------------------------------------------------------------------


def test_a_stranger_who_entered_through_the_open_door_is_told(block: PortBlock) -> None:
    block.open_door()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("", block.first))
        stranger.listen()
        with pytest.raises(HandoffError) as failed:
            block.spawn(program("never"), handoff="door")
        assert failed.value.port == block.first
        assert failed.value.inode == os.fstat(stranger.fileno()).st_ino
        assert f"process {os.getpid()}" in str(failed.value)


def test_the_stated_limit_a_reuse_address_stranger_enters_before_the_child_and_is_told(
    block: PortBlock,
) -> None:
    with block.spawn(program("never"), handoff="door", wait=None) as child:
        assert enter("0.0.0.0", block.first) is None
        assert enter("0.0.0.0", block.first, reuse_port=True) is None
        stranger = enter("0.0.0.0", block.first, reuse_address=True)
        assert stranger is not None
        with stranger, pytest.raises(HandoffError) as failed:
            child.wait_listening(20)
        assert failed.value.inode is not None
        assert f"process {os.getpid()}" in str(failed.value)
        assert child.returncode is not None
    assert enter("0.0.0.0", block.first, reuse_address=True) is None


def test_the_stated_limit_in_close_mode_any_program_enters_before_the_child_and_is_told(
    block: PortBlock,
) -> None:
    argv = ["sh", "-c", 'read line; exec "$@"', "sh", *program("plain", "{port}")]
    with block.spawn(argv, wait=None, handoff="close", stdin=PIPE, stderr=PIPE) as child:
        with pytest.raises(fastports.PortsUnavailable):
            fastports.reserve(block.first)  # who uses fastports does not
        stranger = enter("0.0.0.0", block.first)
        assert stranger is not None and child.stdin is not None
        with stranger, pytest.raises(HandoffError) as told:
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.wait_listening(30)
    assert told.value.port == block.first


def test_a_stranger_on_another_address_of_the_port_is_told(block: PortBlock) -> None:
    block.open_door()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.9", block.first))
        stranger.listen()
        with pytest.raises(HandoffError) as failed:
            block.spawn(program("server", "{port}", "127.0.0.1"), handoff="door")
        assert failed.value.inode == os.fstat(stranger.fileno()).st_ino


# --- the end --------------------------------------------------------------------------------------


def test_a_child_quacks_like_popen(block: PortBlock) -> None:
    with block.spawn(program("server", "{port}"), handoff="door") as child:
        assert child.args[-1] == str(block.first)
        assert isinstance(child.pid, int)
        assert (child.stdin, child.stdout, child.stderr) == (None, None, None)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0)
        child.send_signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        assert child.poll() == child.returncode == -signal.SIGTERM
        for end in (child.terminate, child.kill):
            end()  # nothing happens any more
    assert f"pid={child.pid}" in repr(child)


def test_term_is_given_its_grace_and_kill_follows(block: PortBlock) -> None:
    with block.spawn(program("graceful", "{port}"), stdout=PIPE, handoff="door") as child:
        assert child.stdout is not None
        assert child.stop() == 5
        assert child.stdout.read() == b"bye\n"
        assert child.stop() == 5
    with block.spawn(program("stubborn", "{port}"), grace=0.1, handoff="door") as child:
        assert child.stop() == -signal.SIGKILL


def test_a_stopped_child_is_ended_too(block: PortBlock) -> None:
    with block.spawn(program("server", "{port}"), handoff="door") as child:
        os.kill(child.pid, signal.SIGSTOP)
        assert child.stop() == -signal.SIGTERM


@pytest.mark.parametrize("options", [{}, {"new_session": True}, {"foreground": True}], ids=str)
def test_the_family_ends_in_every_kind_of_group(
    block: PortBlock, unique: str, options: dict[str, bool]
) -> None:
    command = program("tree", unique)
    with block.spawn(
        command, wait=None, stdout=PIPE, grace=0.2, **options, handoff="door"
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"planted\n"
        shares = os.getpgid(child.pid) == os.getpgid(0)
        assert shares == ("foreground" in options)
        assert (os.getsid(child.pid) == child.pid) == ("new_session" in options)
    assert not relatives(unique)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_what_a_killed_child_left_in_a_session_of_its_own_is_ended_by_stop(
    block: PortBlock,
) -> None:
    """As PostgreSQL's processes are, which overwrite their environment, too."""
    code = "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n"
    code += "    os.execve('/bin/sh', ['sh', '-c', 'echo $$; exec sleep 1000'], {})\n"
    code += "time.sleep(1000)"
    argv = [sys.executable, "-ISc", code]
    with block.spawn(argv, handoff="door", wait=None, stdout=PIPE) as child:
        assert child.stdout is not None
        left = int(child.stdout.readline())
        child.kill()
        assert child.wait(20) == -signal.SIGKILL
        assert runs(left)
        child.stop(0)
        assert not runs(left)


ALONE = """
import os, subprocess
from fastports.family import Family
def ends(code="pass"):
    code = "import os; " + code
    process = subprocess.Popen([sys.executable, "-ISc", code])
    family = Family(process.pid, b"token", leads=False)
    process.wait()
    return family
print(ends().alone(), ends("os.fork()").alone())
family = ends()
ends()
print(family.alone())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs process numbers of its own, as root has them")
def test_a_child_after_which_no_process_was_made_is_known_to_be_alone() -> None:
    with launcher(ALONE, prefix=["unshare", "--pid", "--fork", "--mount-proc"]) as process:
        out, err = process.communicate(timeout=60)
    assert out.split() == ["True", "False", "False"], err


def test_a_child_belongs_to_the_process_that_started_it(block: PortBlock) -> None:
    with block.spawn(program("server", "{port}"), handoff="door") as child:
        pid = os.fork()
        if pid == 0:
            refused = 0
            for act in (child.poll, child.wait, child.kill, child.stop, child.wait_listening):
                try:
                    act()
                except NotOwner:
                    refused += 1
            with child:
                pass  # leaving it here must not end it
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        assert asked(block.first) == child.pid


def test_a_child_that_nobody_keeps_runs_on_with_its_block() -> None:
    def forget() -> int:
        block = fastports.allocate(1)
        block.spawn(program("server", "{port}"), handoff="door")
        return block.first

    port = forget()
    gc.collect()
    pid = asked(port)
    with pytest.raises(fastports.PortsUnavailable):
        fastports.reserve(port)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not runs(pid))
    with pytest.warns(ResourceWarning, match="unreleased"):
        sweep()
        gc.collect()
    fastports.reserve(port).release()


@pytest.mark.parametrize("handoff", MODES)
def test_a_launcher_thread_that_ends_leaves_its_child_alone(block: PortBlock, handoff: str) -> None:
    children: list[Child] = []
    thread = threading.Thread(
        target=lambda: children.append(block.spawn(program("server", "{port}"), handoff=handoff))
    )
    thread.start()
    task = f"/proc/self/task/{thread.native_id}"
    thread.join()
    until(lambda: not os.path.exists(task))
    with children[0] as child:
        assert asked(block.first) == child.pid


@pytest.mark.parametrize("name", ["server", "worker", "background"])
@pytest.mark.parametrize("handoff", MODES)
def test_a_launcher_that_is_killed_takes_its_children_along_and_frees_the_ports(
    name: str, handoff: str
) -> None:
    code = """
block = fastports.allocate(1)
child = block.spawn(program(sys.argv[1], "{port}"), handoff=sys.argv[2])
print(block.first, flush=True)
time.sleep(100)
"""
    with launcher(code, name, handoff) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        pid = asked(port)
        process.kill()
    until(lambda: not runs(pid))

    def bindable() -> bool:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
            except OSError:
                return False
            return True

    until(bindable)
    with fastports.reserve(port):
        pass


@pytest.mark.parametrize("handoff", MODES)
def test_a_launcher_without_standard_descriptors_hands_over_in_every_mode(handoff: str) -> None:
    """Its own sockets are 0, 1 and 2 then, not to be confused with the child's."""
    code = """
import fcntl, socket
out = fcntl.fcntl(1, fcntl.F_DUPFD, 50)
for fd in (0, 1, 2):
    os.close(fd)
with fastports.allocate(1) as block:
    with block.spawn(program("server", "{port}"), handoff=sys.argv[1]) as child:
        with socket.create_connection(("127.0.0.1", block.first), 10) as client:
            os.write(out, b"%d" % (int(client.recv(20)) == child.pid))
"""
    assert output(code, handoff) == "1"


@pytest.mark.parametrize("name", ["graceful", "daemon"])
def test_a_launcher_that_exits_ends_its_children_in_order(name: str) -> None:
    code = """
block = fastports.allocate(1)
block.spawn(program(sys.argv[1], "{port}"), handoff="door")
print(block.first, flush=True)
"""
    with launcher(code, name) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert ("bye" in out) == (name == "graceful")
    assert "Traceback" not in err
    fastports.reserve(int(out.split()[0])).release()


def test_a_launcher_that_exits_sends_each_child_one_sigterm() -> None:
    """Many programs take the second one for "at once"."""
    code = """
blocks = [fastports.allocate(1) for _ in range(3)]
for block in blocks:
    block.spawn(program("counts_terms", "{port}"), handoff="door")
"""
    with launcher(code) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.split() == ["term"] * 3


def test_a_child_that_is_kept_to_the_very_end_of_the_launcher_goes_in_silence() -> None:
    code = "import os, fastports\nblock = fastports.allocate(1)\n"
    code += "os.kept = block.spawn(['true'], wait=None)\nos.kept.wait(); block.release()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")


def test_every_thread_of_the_launcher_may_spawn_at_once() -> None:
    def work() -> None:
        with (
            fastports.allocate(1) as mine,
            mine.spawn(program("server", "{port}"), handoff="door") as child,
        ):
            answers.append(asked(mine.first) == child.pid)

    answers: list[bool] = []
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8


# --- where the kernel or a sandbox says no --------------------------------------------------------


def refusing(call: dict[str, int], error: int, *, second: int = -1, third: int = -1) -> str:
    """Code after which a system call (with these arguments) fails in a process."""
    arch, number = {
        "x86_64": (0xC000003E, call["x86_64"]),
        "aarch64": (0xC00000B7, call["aarch64"]),
    }[platform.machine()]
    return f"""
import ctypes, struct
op = lambda code, yes, no, value: struct.pack("HBBI", code, yes, no, value)
tests = [(4, {arch}), (0, {number}), *[(24, {second})] * ({second} >= 0),
         *[(32, {third})] * ({third} >= 0)]
body = [op(0x06, 0, 0, 0x00050000 | {error}), op(0x06, 0, 0, 0x7FFF0000)]
for position, (offset, value) in enumerate(reversed(tests)):
    body = [op(0x20, 0, 0, offset), op(0x15, 0, 2 * position + 1, value)] + body
program_ = b"".join(body)
buffer = ctypes.create_string_buffer(program_)
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
fprog = struct.pack("HxxxxxxP", len(program_) // 8, ctypes.addressof(buffer))
assert libc.prctl(22, 2, ctypes.create_string_buffer(fprog), 0, 0) == 0
"""


def test_where_the_door_does_not_work_the_hand_off_is_close_and_says_so_once() -> None:
    # setsockopt(.., SO_REUSEADDR, ..) is refused: no door can be opened
    code = refusing({"x86_64": 54, "aarch64": 208}, 1, second=1, third=2)
    # seccomp(2) too: nothing that stands on filters
    code += refusing({"x86_64": 317, "aarch64": 277}, 38)
    told = output(
        code
        + """
import logging
lines = []
class Handler(logging.Handler):
    def emit(self, record):
        lines.append((record.name, record.levelname, record.getMessage()))
logging.getLogger("fastports").addHandler(Handler())
for _ in range(2):
    with fastports.allocate(1) as block:
        with block.spawn(program("plain", "{port}")) as child:
            print(child.mode)
from fastports.child import sweep
from fastports.handoff import modes
print([(m.name, m.works) for m in modes().values() if m.name in ("door", "close")])
with fastports.allocate(1) as block:
    try:
        block.spawn(program("plain", "{port}"), handoff="door")
    except fastports.HandoffError as error:
        print("SO_REUSEADDR" in str(error))
import json
print(json.dumps(lines))
"""
    ).splitlines()
    assert told[:4] == ["close", "close", "[('door', False), ('close', True)]", "True"]
    (line,) = json.loads(told[4])
    assert line[:2] == ["fastports.handoff", "WARNING"]
    assert re.search("close.*SO_REUSEADDR", line[2])


@pytest.mark.parametrize("protocol", ["tcp", "udp", "both"])
def test_where_netlink_is_refused_listening_is_read_from_proc(protocol: str) -> None:
    code = refusing({"x86_64": 41, "aarch64": 198}, 93).replace("(4, ", "(16, 16), (4, ", 1)
    name = "server" if protocol == "tcp" else protocol
    told = output(
        code
        + """
from fastports import _diag
try:
    _diag.Diag()
except OSError as error:
    print(error.errno)
with fastports.allocate(1, protocol=sys.argv[1]) as block:
    with block.spawn(program(sys.argv[2], "{port}"), handoff="door") as child:
        print(child.mode, child.listened_after is not None)
    block.open_door()
    import socket
    if sys.argv[1] == "tcp":
        with socket.socket() as stranger:
            stranger.setsockopt(1, 2, 1)
            stranger.bind(("", block.first))
            stranger.listen()
            try:
                block.spawn(program("never"), handoff="door")
            except fastports.HandoffError as error:
                print(error.inode == os.fstat(stranger.fileno()).st_ino)
""",
        protocol,
        name,
    ).splitlines()
    assert told[:2] == ["93", "door True"]
    assert told[2:] == (["True"] if protocol == "tcp" else [])


@pytest.mark.parametrize("handoff", [mode for mode in MODES if mode.values != ("close",)])
def test_a_full_descriptor_table_leaves_no_child_and_no_open_door(
    block: PortBlock, handoff: str
) -> None:
    import resource

    def start() -> None:
        with block.spawn(
            program("server", "{port}"), stdin=PIPE, stderr=PIPE, handoff=handoff
        ) as child:
            assert child.poll() is None

    start()  # whatever is imported is
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, hard))
    opened: list[int] = []
    failed = 0
    try:
        with pytest.raises(OSError):
            while True:
                opened.append(os.dup(0))
        while True:  # fails at every step there is, then not any more
            try:
                start()
                break
            except (OSError, HandoffError):
                failed += 1
                assert handoff == "fd" or not door_is_open_without_descriptors(block)
            os.close(opened.pop())  # an IndexError: it fails with all that it needs
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failed >= 5
    assert enter("127.0.0.1", block.first, reuse_address=True) is None


def door_is_open_without_descriptors(block: PortBlock) -> bool:
    sock = socket.socket(fileno=block.filenos()[0])
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))
    finally:
        sock.detach()


def test_the_modes_that_work_here_are_listed_strongest_first() -> None:
    names = list(modes())
    assert names[-2:] == ["door", "close"]
    assert modes()["close"].works
    assert all(status.works == (not status.why) for status in modes().values())


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_at_any_point_of_a_start_leaves_nothing(mode: str) -> None:
    """By chance, so many times over: no descriptor, and no child once the next one is started."""
    code = """
import gc, os, random, signal, sys, time
import fastports
from fastports.child import sweep

def start():
    with fastports.allocate() as block, block.spawn(
        ["true"], handoff=sys.argv[1], wait=None, stdout=-1, stderr=-1
    ) as child:
        child.wait()

def left():
    sweep()
    gc.collect()
    children = []
    for task in os.listdir("/proc/self/task"):
        try:
            children += open(f"/proc/self/task/{task}/children").read().split()
        except OSError:
            pass  # the thread is gone, and its children are another one's
    return len(os.listdir("/proc/self/fd")), children

def loop():  # in a frame of its own: CPython 3.13 does not guard all of a loop right in the try
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0003, 0.006))
    while time.monotonic() < end:
        start()

signal.signal(signal.SIGALRM, signal.default_int_handler)
start()
before = left()
for _ in range(150):
    end = time.monotonic() + 5
    try:
        loop()
        sys.exit("not heard")
    except KeyboardInterrupt:
        pass
    end = time.monotonic() + 10
    while left() != before:
        if time.monotonic() > end:
            sys.exit(f"left: {left()}, before: {before}")
        time.sleep(0.005)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, mode], capture_output=True, text=True, check=False, timeout=90
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not WORKING["door"].works, reason=f"no door: {WORKING['door'].why}")
def test_a_signal_as_the_door_opens_shuts_it_again(
    block: PortBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_door = PortBlock.open_door

    def interrupted(self: PortBlock, *ports: int) -> None:
        open_door(self, *ports)
        raise KeyboardInterrupt  # as by a handler, right after

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PortBlock, "open_door", interrupted)
        block.spawn(["true"], handoff="door")
    assert enter("0.0.0.0", block.first, reuse_address=True) is None
    with block.spawn(program("server", "{port}"), handoff="door"):
        pass  # and the next one does, too
    assert enter("0.0.0.0", block.first, reuse_address=True) is None
