"""The port server: clients that only ask for a number get one that nobody else gets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import portpicker as original
import pytest

import fastports
from fastports import cli, portserver
from fastports.compat import portpicker
from fastports.compat.picked import set_timeout

ROOT = os.geteuid() == 0
COMMAND = [sys.executable, "-W", "error", "-m", "fastports.portserver"]


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.005)


class Server:
    """``python -m fastports.portserver`` at an address of its own."""

    def __init__(
        self, *options: str, address: str | None = None, most_descriptors: int = 0
    ) -> None:
        self.address = address or f"@fastports-test-{os.getpid()}-{time.monotonic_ns()}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by stop)
        self.process = subprocess.Popen(
            [*COMMAND, "--address", self.address, *options],
            stderr=self.log,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most_descriptors,) * 2))
            if most_descriptors
            else None,
        )
        try:
            until(self.serves)
        except BaseException:
            self.stop()
            raise

    def serves(self) -> bool:
        assert self.process.poll() is None, self.said()
        try:
            return bool(self.ask("status"))
        except OSError:
            return False

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def ask(self, request: object) -> str:
        return portserver.ask(self.address, str(request))

    def port(self, pid: int | None = None) -> int:
        return int(self.ask(os.getpid() if pid is None else pid))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def count(self, name: str) -> int:
        lines = self.ask("status").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self.log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.fixture(scope="module")
def door() -> Iterator[Server]:
    with Server("--handoff", "door") as made:
        yield made


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as made:
        try:
            yield made
        finally:
            made.kill()


def connected(server: Server) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    set_timeout(sock, 20)
    sock.connect("\0" + server.address[1:])
    return sock


def kept(port: int) -> bool:
    """Whether a user of fastports is refused the port."""
    try:
        fastports.reserve(port, protocol="both").release()
    except fastports.PortsUnavailable:
        return True
    return False


def bound(port: int, *, reuse: bool = False, kind: int = socket.SOCK_STREAM) -> bool:
    with socket.socket(socket.AF_INET, kind) as sock:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            if kind == socket.SOCK_STREAM:
                sock.listen()
        except OSError:
            return False
    return True


# --- clients ---


def test_the_portpicker_package_gets_ports_that_it_can_bind(server: Server) -> None:
    ports = [original.pick_unused_port(portserver_address=server.address) for _ in range(20)]
    assert len(set(ports)) == 20
    assert all(original.is_port_free(port) and kept(port) for port in ports)


def test_our_own_client_gets_ports_that_it_can_bind_plainly(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTSERVER_ADDRESS", server.address)
    port = portpicker.pick_unused_port()
    assert kept(port)
    assert bound(port) and bound(port, kind=socket.SOCK_DGRAM)
    portpicker.return_port(port)
    assert portpicker.pick_unused_port() == port, "it is this process's own until its end"
    portpicker._owned_ports.clear()


def test_a_python_socket_is_a_client(server: Server) -> None:
    with connected(server) as sock:
        sock.sendall(b"%d\n" % os.getpid())
        answer = sock.makefile("rb").read()
    assert answer.endswith(b"\n")
    assert kept(int(answer))


PERL = """
use IO::Socket::UNIX;
my $server = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die $!;
print $server readline(STDIN);
$server->flush;
print readline($server);
"""


@pytest.mark.parametrize(
    "tool",
    ["nc.openbsd -U $0", "socat - UNIX-CONNECT:$0", f"perl -e '{PERL}' $0"],
    ids=["nc", "socat", "perl"],
)
def test_a_shell_is_a_client(tool: str, tmp_path: Path) -> None:
    program = tool.split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    with Server(address=str(tmp_path / "socket")) as server:
        script = f"port=$(echo $$ | {tool}); echo $port; read -r; echo done"
        shell = subprocess.Popen(
            ["bash", "-c", script, server.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with shell:
            assert shell.stdin is not None and shell.stdout is not None
            port = int(shell.stdout.readline())
            assert kept(port)  # while the shell lives
            shell.stdin.write("\n")
            shell.stdin.flush()
            assert shell.stdout.read() == "done\n"
        until(lambda: not kept(port))


@pytest.mark.parametrize("pieces", [[b"%d"], [b"%d", b"\n"], [b" %d \n"], [b"%d\r\n"]])
def test_a_request_may_lack_its_newline_or_come_in_pieces(
    server: Server, pieces: list[bytes]
) -> None:
    with connected(server) as sock:
        for piece in pieces:
            sock.sendall(piece % os.getpid() if b"%" in piece else piece)
        assert kept(int(sock.makefile().read()))


def test_a_client_that_shuts_its_side_down_gets_its_answer(server: Server) -> None:
    with connected(server) as sock:
        sock.sendall(b"%d" % os.getpid())
        sock.shutdown(socket.SHUT_WR)
        assert kept(int(sock.makefile().read()))


# --- how long a port is kept ---


def test_a_port_is_kept_until_its_process_dies_and_no_longer(
    server: Server, process: subprocess.Popen[bytes]
) -> None:
    ports = [server.port(process.pid) for _ in range(3)]
    mine = server.port()
    assert len({*ports, mine}) == 4
    assert all(map(kept, ports))
    process.kill()
    until(lambda: not any(map(kept, ports)))
    assert kept(mine)


def test_a_server_left_behind_by_a_dead_process_keeps_its_port_by_itself(
    server: Server, process: subprocess.Popen[bytes]
) -> None:
    port = server.port(process.pid)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        process.kill()
        until(lambda: f"{process.pid} " not in server.ask("status"))
        assert kept(port)


def test_a_zombie_is_no_process_to_keep_a_port_for(
    server: Server, process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert server.ask(process.pid) == ""


def test_two_servers_on_the_same_ports_give_out_disjoint_ones(server: Server) -> None:
    with fastports.allocate(16) as block:
        pool = f"{block.first}-{block.last}"
    with Server("--range", pool) as first, Server("--range", pool) as second:
        ports = [each.port() for _ in range(8) for each in (first, second)]
        assert len(set(ports)) == 16
        assert all(block.first <= port <= block.last for port in ports)
        assert first.ask(os.getpid()) == "" == second.ask(os.getpid())
        assert "no port for pid" in first.said() and "16 busy" in first.said()


def test_the_end_of_the_server_gives_every_port_back() -> None:
    with Server() as server:
        port = server.port()
        assert server.stop() == 0
    assert not kept(port)


def test_several_ranges_are_used_one_after_the_other() -> None:
    with fastports.allocate(3) as block:
        low, _, high = block
    with Server("--portserver_static_pool", f"{low}-{low},{high}-{high}") as server:
        assert [server.port(), server.port(), server.ask(os.getpid())] == [low, high, ""]
        assert "num-ports-managed 2\n" in server.ask("status")


# --- the door ---


def test_with_the_door_a_stranger_cannot_bind_plainly_at_any_time(door: Server) -> None:
    port = door.port()
    assert not bound(port)
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
            until(lambda: not bound(port, reuse=True))  # it listens: nobody gets in beside it
            assert not bound(port)
            child.terminate()
    assert not bound(port)


def test_with_the_door_the_portpicker_package_and_plain_udp_work(door: Server) -> None:
    port = original.pick_unused_port(portserver_address=door.address)
    assert original.is_port_free(port)
    assert bound(port, kind=socket.SOCK_DGRAM)


def test_with_the_door_a_port_is_given_back_when_its_process_dies(
    door: Server, process: subprocess.Popen[bytes]
) -> None:
    port = door.port(process.pid)
    process.kill()
    until(lambda: not kept(port))


# --- refusals ---


@pytest.mark.parametrize(
    "request_", ["0", "1", "-1", "-7", "2147483648", "4194305", "99999999999999999999"]
)
def test_a_number_that_is_no_process_gets_nothing_and_is_counted(
    server: Server, request_: str
) -> None:
    before = server.count("denied-allocations")
    assert server.ask(request_) == ""
    assert server.count("denied-allocations") == before + 1


@pytest.mark.parametrize(
    "data",
    [
        *(b"\n", b"99Z\n", b"99 8\n", b"1e3\n", b"0x10\n", b"--5\n", b"-\n", b"5\0\n", b"\xff\n"),
        *("٣\n".encode(), b"9" * 21 + b"\n", b"GET / HTTP/1.0\r\n\r\n"),
        *(b"\0" * (1 << 20), b"7" * (1 << 20)),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_garbage_gets_nothing_and_costs_nothing(server: Server, data: bytes) -> None:
    before = server.count("client-request-errors"), server.descriptors()
    with connected(server) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    until(lambda: server.count("client-request-errors") > before[0])
    until(lambda: server.descriptors() <= before[1])


def test_clients_that_say_nothing_or_leave_in_the_middle_cost_nothing(server: Server) -> None:
    before = server.descriptors()
    silent = [connected(server) for _ in range(100)]
    for sock in silent[::2]:
        sock.sendall(b"12")
    for sock in silent:
        sock.close()
    until(lambda: server.descriptors() <= before)
    assert kept(server.port())


def test_the_number_of_silent_clients_is_bounded_and_others_are_served() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 600:
        pytest.skip("this process may not open 600 descriptors")
    with Server(most_descriptors=256) as server:
        silent = [connected(server) for _ in range(400)]
        assert kept(server.port())
        for sock in silent:
            sock.close()


def test_a_port_whose_number_never_reached_its_client_is_taken_back() -> None:
    async def scenario() -> tuple[int, int]:
        address = f"@fastports-test-{os.getpid()}-gone"
        server = portserver.PortServer()
        await server.start(portserver.listen(address))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + address[1:])
            sock.sendall(b"%d\n" % os.getpid())
        deadline = time.monotonic() + 20
        for accepted in (True, False):  # comes, and is gone
            while bool(server._clients) != accepted:
                assert time.monotonic() < deadline
                await asyncio.sleep(0)
        counts = server.counts()
        await server.stop()
        return counts["num-ports-kept"], counts["total-allocations"]

    assert asyncio.run(scenario()) == (0, 0)


def test_a_thousand_clients_at_once_get_a_thousand_distinct_ports() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8000:
        pytest.skip("the hard limit of descriptors is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        with Server() as server:
            clients = [connected(server) for _ in range(1000)]
            for sock in clients:
                sock.sendall(b"%d\n" % os.getpid())
            ports = set()
            for sock in clients:
                with sock, sock.makefile() as file:
                    ports.add(int(file.read()))
            assert len(ports) == 1000
            assert "num-ports-kept 1000\n" in server.ask("status")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- other pid namespaces ---


@pytest.mark.skipif(not ROOT, reason="a pid namespace needs root")
def test_a_client_in_a_pid_namespace_of_its_own_is_recognised_by_its_own_number(
    server: Server,
) -> None:
    source = f"""
import os, sys
from fastports.portserver import ask
assert os.getpid() < 10
print(ask({server.address!r}, str(os.getpid())), end="", flush=True)
if os.fork() == 0:  # asks for its parent, as a shell's $(...) does
    print(ask({server.address!r}, str(os.getppid())), end="", flush=True)
    os._exit(0)
input()
"""
    # the shell is the namespace's first process: 1 is refused
    script = [sys.executable, source]
    with subprocess.Popen(
        [
            *["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c"],
            '"$0" -c "$1"; exit',
            *script,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        ports = [int(child.stdout.readline()) for _ in range(2)]
        status = server.ask("status")
        rows = [line.split() for line in status.split("\n\n")[1].splitlines()[1:]]
        pids = {int(pid) for port, pid, *_ in rows if int(port) in ports}
        assert len(pids) == 1 and pids.pop() > 10
        assert all(map(kept, ports))
        child.communicate("\n")
    until(lambda: not any(map(kept, ports)))


# --- seeing ---


def test_the_status_names_each_port_its_process_and_its_state(
    server: Server, process: subprocess.Popen[bytes]
) -> None:
    waiting, listening = server.port(process.pid), server.port(process.pid)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", listening))
        sock.listen()
        rows = {
            int(words[0]): words[1:]
            for words in map(str.split, server.ask("status").split("\n\n")[1].splitlines()[1:])
        }
    assert rows[waiting][0] == str(process.pid)
    assert rows[waiting][2:] == ["waiting", "sleep", "600"]
    assert rows[listening][2] == "listening"


def test_fastports_entries_show_the_kept_ports(server: Server) -> None:
    port = server.port()
    labels = {entry.label for entry in fastports.entries() if entry.first == port}
    assert f"for pid {os.getpid()}" in labels


def test_sigusr1_logs_the_counts_under_portpickers_names() -> None:
    with Server() as server:
        server.port()
        server.ask("garbage")
        server.process.send_signal(signal.SIGUSR1)
        until(lambda: "total-allocations 1" in server.said())
        for line in ("client-request-errors 1", "denied-allocations 0", "num-ports-managed "):
            assert line in server.said()


def test_it_is_a_command_of_fastports(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["portserver", "--status", "--address", server.address]) == 0
    assert "total-allocations " in capsys.readouterr().out
    assert cli.main(["portserver", "--status", "--address", "@nobody"]) == 1


def test_the_status_option_prints_the_status_of_a_running_server(server: Server) -> None:
    command = [sys.executable, "-m", "fastports.portserver", "--status", "--address"]
    done = subprocess.run([*command, server.address], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("client-request-errors ")
    done = subprocess.run([*command, "@nobody"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Connection refused" in done.stderr and done.stderr.count("\n") == 1


# --- its socket ---


def test_a_socket_file_is_removed_at_the_end_and_replaced_when_stale(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Server(address=str(path)) as server:
        server.process.kill()
        server.process.wait()
    assert path.is_socket()
    with Server(address=str(path)) as server:
        assert kept(server.port())
        assert server.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize("kind", ["abstract", "path", "file"])
def test_an_address_that_is_taken_is_refused_and_left_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    address = str(path) if kind != "abstract" else f"@fastports-test-{os.getpid()}-taken"
    listener: socket.socket | None = None
    if kind == "file":
        path.write_text("precious")
    else:
        listener = portserver.listen(address)
    done = subprocess.run(
        [sys.executable, "-m", "fastports.portserver", "--address", address],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert "in use" in done.stderr and done.stderr.count("\n") == 1
    if listener is not None:
        listener.close()
    else:
        assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "options",
    [
        *("--range=x", "--range=9-1", "--range=0-70000", "--range=1-2,,x", "--handoff=window"),
        *("--address=", "--address=@" + "n" * 200, "surplus"),
    ],
)
def test_a_bad_option_is_a_line_and_exit_status_2(
    options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = portserver.main([options])
    except SystemExit as exc:  # argparse
        status = exc.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.splitlines()[-1].startswith("fastports portserver: ")


ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="portserver.socket")
os.execv(sys.executable, [sys.executable, "-m", "fastports.portserver"])
"""


def activate(listener: socket.socket, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ACTIVATE, str(listener.fileno())],
        pass_fds=[listener.fileno()],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_it_serves_on_the_socket_that_systemd_passes_and_says_when_it_is_ready() -> None:
    address = f"@fastports-test-{os.getpid()}-activated"
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify = f"fastports-test-notify-{os.getpid()}"
    manager.bind("\0" + notify)
    manager.settimeout(20)
    with manager, portserver.listen(address) as listener:
        process = activate(listener, NOTIFY_SOCKET="@" + notify)
        with process:
            # asked before it runs: the answer waits in the socket, as it does under systemd
            assert kept(int(portserver.ask(address, str(os.getpid()), timeout=20)))
            assert manager.recv(100) == b"READY=1"
            process.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(20) == 0


def test_another_socket_from_systemd_is_refused() -> None:
    with socket.socket() as listener:
        listener.listen()
        with activate(listener) as process:
            assert process.wait(20) == 2
            assert process.stderr is not None
            assert "ListenStream=" in process.stderr.read()


def test_the_answers_of_a_server_that_is_stopped_by_sigint_end_cleanly() -> None:
    with Server() as server:
        sock = connected(server)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        assert select.select([sock], [], [], 20)[0]
        sock.close()
        assert "Traceback" not in server.said()
