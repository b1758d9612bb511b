"""Descriptors: the child gets the held sockets themselves, by the protocol of systemd."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokering import enter, entrances, port_of, until

import fastports
from fastports.child import _lingering, sweep
from fastports.handoff import PIPE

ADOPTS = """
import json, os, subprocess, sys
import fastports
block = fastports.adopt()
look = "import os, json; print(json.dumps([sorted(os.environ), os.listdir('/proc/self/fd')]))"
grandchild = subprocess.run(
    [sys.executable, "-ISc", look], capture_output=True, text=True, close_fds=False
)
print(json.dumps({
    "ports": list(block),
    "fds": block.filenos(),
    "protocol": block.protocol,
    "host": block.host,
    "label": block.label,
    "environment": [name for name in os.environ if name.startswith("LISTEN")],
    "inheritable": [os.get_inheritable(fd) for fd in block.filenos()],
    "grandchild": json.loads(grandchild.stdout),
}), flush=True)
import socket
if block.protocol != "udp":
    sock = socket.fromfd(block.filenos()[0], socket.AF_INET6, socket.SOCK_STREAM)
    sock.listen()
    while True:
        peer, _ = sock.accept()
        peer.sendall(b"%d" % os.getpid())
        peer.recv(1)  # the client closes first: no TIME_WAIT is left on the port
        peer.close()
sys.stdin.read()
"""


def adopter(*prefix: str) -> list[str]:
    return [*prefix, sys.executable, "-c", ADOPTS]


@pytest.fixture
def block() -> Iterator[fastports.PortBlock]:
    with fastports.allocate(1, label="web:1") as made:
        yield made


def who_answers(port: int) -> int:
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        return int(sock.recv(100))


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("protocol", ["tcp", "both"])
def test_c31_a_child_adopts_its_block_and_its_own_children_get_nothing_of_it(
    protocol: str,
) -> None:
    with (
        fastports.allocate(2, protocol=protocol, label="engine") as block,
        block.spawn(adopter(), handoff="fd", wait=[block.first], stdout=PIPE, stdin=PIPE) as child,
    ):
        assert child.stdout is not None
        told = json.loads(child.stdout.readline())
        count = 4 if protocol == "both" else 2
        assert told["ports"] == list(block)
        assert told["fds"] == list(range(3, 3 + count))
        assert (told["protocol"], told["host"], told["label"]) == (protocol, None, "engine")
        assert told["environment"] == []
        assert told["inheritable"] == [False] * count
        names, fds = told["grandchild"]
        assert not [name for name in names if name.startswith("LISTEN")]
        assert {fd for fd in fds if int(fd) < 100} <= {"0", "1", "2", "3"}  # 3 lists them
        assert who_answers(block.first) == child.pid
        assert entrances(block.first) == []
        # one entry: what a launcher of ours has on record is not recorded twice
        assert [e.pid for e in fastports.entries() if block.first in e.ports] == [os.getpid()]


def test_a_shell_that_executes_the_server_passes_it_on(block: fastports.PortBlock) -> None:
    argv = adopter("sh", "-c", 'exec "$@"', "sh")
    with block.spawn(argv, handoff="fd", stdout=PIPE) as child:
        assert who_answers(block.first) == child.pid


def test_a_shell_that_forks_does_not_as_under_systemd(block: fastports.PortBlock) -> None:
    argv = adopter("sh", "-c", '"$@"; exit 7', "sh")
    with block.spawn(argv, handoff="fd", wait=None, stderr=PIPE) as child:
        _, err = child.communicate(timeout=20)
        assert child.returncode == 7
    assert err is not None and b"the sockets were passed to process %d" % child.pid in err


def test_the_listen_variables_are_those_of_systemd() -> None:
    code = "import os; print(os.getpid(), *(os.environ['LISTEN_' + n] for n in ('PID', 'FDS',"
    code += " 'FDNAMES')), '{fd} {fd0} {fd2}', flush=True)"
    with (
        fastports.allocate(3, label="a:b c") as block,
        block.spawn([sys.executable, "-c", code], handoff="fd", wait=None, stdout=PIPE) as child,
    ):
        out, _ = child.communicate(timeout=20)
    pid = str(child.pid)
    assert out is not None
    assert out.decode().split() == [
        pid,
        pid,
        "3",
        *["a_b_c"] * 0,
        "a_b_c:a_b_c:a_b_c",
        "3",
        "3",
        "5",
    ]


def test_clients_may_connect_before_the_program_runs_if_we_listen_first(
    block: fastports.PortBlock,
) -> None:
    code = "import socket, sys\nsys.stdin.read(1)\ns = socket.socket(fileno=int(sys.argv[1]))\n"
    code += "peer, _ = s.accept(); peer.sendall(b'served'); sys.stdin.read()"
    argv = [sys.executable, "-c", code, "{fd}"]
    with block.spawn(argv, handoff="fd", listen=True, stdin=PIPE) as child:
        assert child.listened_after is not None
        with socket.create_connection(("127.0.0.1", block.first), 10) as early:
            assert child.stdin is not None
            child.stdin.write(b"x")
            child.stdin.flush()
            assert early.recv(100) == b"served"


def test_a_program_that_ends_at_once_is_not_taken_for_robbed_of_sockets_that_listen(
    block: fastports.PortBlock,
) -> None:
    reader, writer = os.pipe()
    argv = ["sh", "-c", "read line"]
    for _ in range(2):
        with block.spawn(argv, handoff="fd", listen=True, stdin=reader, wait=None) as child:
            os.write(writer, b"x\n")
            assert child.wait(20) == 0
            child.wait_listening(20)  # the launcher listens, whoever is to take the connections
    os.close(reader)
    os.close(writer)


def test_c19_in_another_mode_the_sockets_are_holds_again_and_eat_no_connection(
    block: fastports.PortBlock,
) -> None:
    with block.spawn(adopter(), handoff="fd", stdout=PIPE) as child:
        assert who_answers(block.first) == child.pid
    server = "import os, socket, sys\ns = socket.socket(); s.setsockopt(1, 2, 1)\n"
    server += "s.bind(('', int(sys.argv[1]))); s.listen()\n"
    server += (
        "while True:\n    c, _ = s.accept(); c.sendall(b'%d' % os.getpid()); c.recv(1); c.close()"
    )
    for mode in ("auto", "door"):
        with block.spawn([sys.executable, "-ISc", server, "{port}"], handoff=mode) as child:
            assert [who_answers(block.first) for _ in range(20)] == [child.pid] * 20


def test_options_that_a_program_sets_on_its_socket_open_no_door_for_others(
    block: fastports.PortBlock,
) -> None:
    code = "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\n"
    code += "s.setsockopt(1, 2, 1); s.setsockopt(1, 15, 1)\n"
    code += "if sys.argv[2] == 'listens': s.listen(); sys.stdin.read()"
    argv = [sys.executable, "-ISc", code, "{fd}"]
    with block.spawn([*argv, "ends"], handoff="fd", wait=None, stdin=PIPE) as child:
        assert child.wait(20) == 0
    assert entrances(block.first) == []
    with block.spawn([*argv, "listens"], handoff="fd", stdin=PIPE):
        assert [way for way in entrances(block.first) if not way[2]] == []
    assert entrances(block.first) == []


CLOSES_FIRST = """
import socket, sys
s = socket.socket(fileno=int(sys.argv[1]))
if sys.argv[2] == "listens":
    s.listen()
while True:  # what the client gets is the end: TIME_WAIT is this side's
    peer, _ = s.accept()
    peer.close()
"""


@pytest.mark.parametrize("who", ["launcher", "listens"])
def test_connections_that_a_program_closed_do_not_keep_the_port_once_it_is_given_back(
    who: str,
) -> None:
    argv = [sys.executable, "-ISc", CLOSES_FIRST, "{fd}", who]
    with fastports.allocate(1) as block:
        port = block.first
        for _ in range(2):
            with block.spawn(argv, handoff="fd", listen=who == "launcher"):
                with socket.create_connection(("127.0.0.1", port), 10) as client:
                    assert client.recv(1) == b""
                assert entrances(port) == []
            assert entrances(port) == []
    fastports.reserve(port).release()
    for address in ("0.0.0.0", "127.0.0.1", "::"):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((address, port))
            server.listen()


def test_the_stated_limit_a_program_that_shuts_its_socket_down_lets_reuse_address_in(
    block: fastports.PortBlock,
) -> None:
    code = "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\nsys.stdin.read(1)\n"
    code += "s.shutdown(socket.SHUT_RD); print('shut', flush=True); sys.stdin.read()"
    argv = [sys.executable, "-ISc", code, "{fd}"]
    with block.spawn(argv, handoff="fd", listen=True, stdin=PIPE, stdout=PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        assert entrances(block.first) == []
        child.stdin.write(b"x")
        child.stdin.flush()
        assert child.stdout.readline() == b"shut\n"
        assert enter("0.0.0.0", block.first) is None
        stranger = enter("0.0.0.0", block.first, reuse_address=True)
        assert stranger is not None
        stranger.close()
    assert entrances(block.first) == []


ASGI = """
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})
"""
WSGI = "def app(environ, start):\n    start('200 OK', [])\n    return [b'ok']\n"
NODE = "require('http').createServer((q, r) => r.end('ok')).listen({fd: Number(process.argv[1])})"
TORCH = """
import sys, torch.distributed as d
port, fd = int(sys.argv[1]), int(sys.argv[2])
store = d.TCPStore("127.0.0.1", port, 1, True, wait_for_workers=False, master_listen_fd=fd)
sys.stdin.read()
"""
PYTHON = sys.executable
SERVERS = {
    "uvicorn": ["-m", "uvicorn", "asgi:app", "--fd", "{fd}"],
    "gunicorn": ["-m", "gunicorn", "wsgi:app"],
    "hypercorn": ["-m", "hypercorn", "asgi:app", "-b", "fd://{fd}"],
    "torch": ["-c", TORCH, "{port}", "{fd}"],
}


@pytest.mark.parametrize("name", [*SERVERS, "node"])
def test_a_real_server_takes_the_socket(
    block: fastports.PortBlock, name: str, tmp_path: Path
) -> None:
    (tmp_path / "asgi.py").write_text(ASGI)
    (tmp_path / "wsgi.py").write_text(WSGI)
    if name == "node":
        if shutil.which("node") is None:
            pytest.skip("node is not installed")
        argv = ["node", "-e", NODE, "{fd}"]
    else:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
        argv = [PYTHON, *SERVERS[name]]
    log = tmp_path / "log"
    with (
        log.open("wb") as output,
        block.spawn(
            argv, handoff="fd", cwd=str(tmp_path), stdin=PIPE, stdout=output, stderr=output
        ),
    ):
        assert connects(block.first)
        if name != "torch":
            with socket.create_connection(("127.0.0.1", block.first), 10) as sock:
                sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert b"200" in sock.recv(100), log.read_text()
        assert entrances(block.first) == []

    def nobody_lingers() -> bool:  # helpers of the server, until somebody has reaped them
        sweep()
        return not _lingering

    until(nobody_lingers)


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="no systemd here")
def test_a_program_under_systemd_socket_activate_adopts_its_sockets() -> None:
    with fastports.allocate(1) as block:
        port = block.first
    code = "import fastports, os, socket; b = fastports.adopt(); print(list(b), flush=True)\n"
    code += "s = socket.fromfd(b.filenos()[0], 10, 1)\n"
    code += "while True:\n    c, _ = s.accept(); c.sendall(b'1'); c.recv(1); c.close()"
    argv = ["systemd-socket-activate", "-l", str(port), sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        until(lambda: connects(port))
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == [port]
        assert who_answers(port) == 1
        process.terminate()


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="no systemd here")
def test_systemd_socket_activate_takes_our_sockets_and_passes_them_on(
    block: fastports.PortBlock,
) -> None:
    """It waits for the first client, and becomes the program then."""
    argv = adopter("systemd-socket-activate")
    with block.spawn(argv, handoff="fd", listen=True, stdout=PIPE, stderr=PIPE) as child:
        assert who_answers(block.first) == child.pid
        assert child.stdout is not None
        told = json.loads(child.stdout.readline())
        assert (told["ports"], told["fds"]) == (list(block), [3])


def test_a_program_under_circus_adopts_its_sockets(tmp_path: Path) -> None:
    if importlib.util.find_spec("circus") is None:
        pytest.skip("circus is not installed")
    with fastports.allocate(1) as block:
        port = block.first
    code = "import fastports, socket, sys; b = fastports.adopt(descriptors=[int(sys.argv[1])])\n"
    code += "s = socket.fromfd(b.filenos()[0], 2, 1)\n"
    code += "while True:\n    c, _ = s.accept(); c.sendall(b'%d' % b.first); c.recv(1); c.close()"
    (tmp_path / "program.py").write_text(code)
    (tmp_path / "circus.ini").write_text(f"""
[circus]
endpoint = ipc://{tmp_path}/endpoint
pubsub_endpoint = ipc://{tmp_path}/pubsub
[watcher:web]
cmd = {sys.executable} {tmp_path}/program.py $(circus.sockets.web)
use_sockets = True
copy_env = True
[socket:web]
host = 127.0.0.1
port = {port}
""")
    argv = [sys.executable, "-m", "circus.circusd", str(tmp_path / "circus.ini")]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: connects(port), 30)
        assert who_answers(port) == port
        process.terminate()


# ------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("argv", "options", "words"),
    [
        (["true", "{fd}"], {}, "no socket is passed"),
        (["true", "{fd1}"], {"handoff": "fd"}, r"\{fd0\} to \{fd0\}"),
        (["true"], {"listen": True}, "handoff='fd'"),
        (["true"], {"handoff": "fd", "pass_fds": [3]}, "collides"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_touched(
    block: fastports.PortBlock, argv: list[str], options: dict[str, object], words: str
) -> None:
    with pytest.raises(fastports.InvalidRequest, match=words):
        block.spawn(argv, **options)


def test_other_braces_stay_as_they_are(block: fastports.PortBlock) -> None:
    text = '{"fd": 3, "a": {fdx}, "b": {fd01}, "c": {}}'
    argv = [sys.executable, "-c", "import sys; print(sys.argv[1])", text]
    with block.spawn(argv, handoff="fd", wait=None, stdout=PIPE) as child:
        assert child.communicate(timeout=20)[0] == text.encode() + b"\n"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "LISTEN_FDS is not set"),
        ({"LISTEN_FDS": "1"}, "LISTEN_PID is not set"),
        ({"LISTEN_FDS": "1", "LISTEN_PID": "1"}, "passed to process 1"),
        ({"LISTEN_FDS": "x", "LISTEN_PID": "me"}, "no count"),
        ({"LISTEN_FDS": "0", "LISTEN_PID": "me"}, "no count"),
        ({"LISTEN_FDS": "60000", "LISTEN_PID": "me"}, "not open|no socket"),
    ],
)
def test_adopt_refuses_what_was_not_passed_to_this_process(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(os.getpid()) if value == "me" else value)
    with pytest.raises(fastports.HandoffError, match=words):
        fastports.adopt()
    assert all(name in os.environ for name in variables)  # nothing was changed


def test_adopt_refuses_descriptors_that_are_no_sockets() -> None:
    reader, writer = os.pipe()
    with pytest.raises(fastports.HandoffError, match="no socket"):
        fastports.adopt(descriptors=[reader])
    os.close(reader)
    os.close(writer)


def test_plain_descriptor_numbers_become_a_block_as_from_circus() -> None:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    port = port_of(sock)
    block = fastports.adopt(descriptors=[sock.detach()])
    assert isinstance(block, fastports.PortBlock)
    with block:
        assert (list(block), block.host, block.protocol) == ([port], "127.0.0.1", "tcp")
        assert [entry.pid for entry in fastports.entries() if port in entry.ports] == [os.getpid()]
    assert not connects(port)


def test_sockets_that_are_no_block_come_as_sockets_and_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run in a child, whose descriptors from 3 on may be anything."""
    code = """
import fastports, os, socket
a, b = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
c = socket.socket()
c.bind(("127.0.0.1", 0))
for number, sock in ((10, a), (11, b), (12, c)):
    os.dup2(sock.fileno(), number)
    sock.close()
for number in (3, 4, 5):
    os.dup2(number + 7, number)
    os.close(number + 7)
os.environ.update(LISTEN_FDS="3", LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="one:two:three")
try:
    fastports.adopt(["four"])
except fastports.HandoffError as exc:
    print("one, two, three" in str(exc))
got = fastports.adopt(["two", "one"])
print([s.fileno() for s in got], [s.family.name for s in got])
try:
    os.fstat(5)
except OSError:
    print("closed")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines() == ["True", "[4, 3] ['AF_UNIX', 'AF_UNIX']", "closed"], run
