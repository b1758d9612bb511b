"""The pytest plugin, in sessions of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

if not any(point.name == "fastports" for point in entry_points(group="pytest11")):
    pytest.skip("the plugin is not registered: pip install -e . again", allow_module_level=True)

pytest_fastports = pytest.importorskip("pytest_fastports")
HERE = Path(__file__).parent
OUTCOMES = ("WRONG ANSWER", "NO ANSWER")
SERVER = f"{[sys.executable, '-m', 'http.server', '{port}']!r}"
#: Has said it when it listens; http.server says something only then.
TALK = (
    "import socket, sys, time; print('I am a server', flush=True);"
    " s = socket.create_server(('', int(sys.argv[1]))); time.sleep(600)"
)
TALKER = f"{[sys.executable, '-c', TALK, '{port}']!r}"


def start(folder: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    (folder / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-q"]
    unused = ["cacheprovider", "anyio", "benchmark", "hypothesispytest"]
    if env.get("FIXTURE") != "unused_tcp_port":
        unused.append("asyncio")
    for plugin in unused:
        command += ["-p", f"no:{plugin}"]  # a start takes a third of the time without them
    return subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(session: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = session.communicate(timeout=120)
    return session.returncode, output


def run(folder: Path, source: str, *arguments: str) -> tuple[int, str]:
    (folder / "test_inner.py").write_text(source)
    return end(start(folder, *arguments))


def passed(result: tuple[int, str]) -> int:
    code, output = result
    assert code == 0, output
    found = re.search(r"(\d+) passed", output)
    assert found, output
    return int(found[1])


def test_each_fixture_gives_ports_that_are_held_for_servers_alone(tmp_path: Path) -> None:
    source = """
import asyncio, pickle, socket, subprocess, sys
import pytest
import fastports

def binds(port, *options, kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_INET, kind) as sock:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

def test_port(port):
    assert type(port) is int
    assert not binds(port)
    assert not binds(port, socket.SO_REUSEPORT)
    assert binds(port, socket.SO_REUSEADDR)
    with pytest.raises(fastports.PortsUnavailable):
        fastports.reserve(port)

def test_udp_port(udp_port):
    assert type(udp_port) is int
    assert binds(udp_port, kind=socket.SOCK_DGRAM)
    with pytest.raises(fastports.PortsUnavailable):
        fastports.reserve(udp_port, protocol="udp")

def test_ports(ports):
    one, many = ports(), ports(8, protocol="both")
    assert len(one) == 1 and len(many) == 8
    assert many[7] == many[0] + 7
    assert not binds(many[3])
    assert binds(many[3], socket.SO_REUSEADDR)
    many.close_holds()
    assert binds(many[3])

def test_port_block(port_block):
    assert len(port_block) == 8
    assert not binds(port_block[0], socket.SO_REUSEADDR)

@pytest.mark.parametrize("port_block", [3], indirect=True)
def test_port_block_of_another_size(port_block):
    assert len(port_block) == 3

CHILD = '''
import socket, sys, time
for port in sys.argv[1:]:
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", int(port))); s.listen(); globals()[port] = s
time.sleep(60)
'''
pids = []

def test_server(server):
    argv = [sys.executable, "-c", CHILD, "{port2}", "{port}"]
    child = server(argv, env={"X": "{port4}"}, wait=None)
    assert len(child.block) == 5
    child = server([sys.executable, "-c", CHILD, "{port}"])
    pids.append(child.pid)
    with socket.create_connection(("127.0.0.1", child.ports[0])):
        pass

def test_server_on_a_block(server, port_block):
    child = server([sys.executable, "-c", CHILD, "{port5}"], block=port_block)
    assert list(child.ports) == [port_block[5]]

def test_the_server_of_an_earlier_test_has_ended():
    import os
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert [e for e in fastports.entries() if e.pid == os.getpid()] == []
"""
    assert passed(run(tmp_path, source)) == 8


def test_wider_scopes_keep_their_ports_and_servers(tmp_path: Path) -> None:
    source = f"""
import os, sys, socket
import fastports
seen = sys.modules["os"].__dict__.setdefault("seen", [])

def look(session_port, module_port, session_server, module_ports, session_udp_port, module_udp_port,
         session_ports, session_port_block, module_port_block, module_server):
    if not hasattr(os, "child"):
        os.child = session_server({SERVER})
    socket.create_connection(("127.0.0.1", os.child.ports[0])).close()
    seen.append((session_port, module_port))
    assert sum(e.pid == os.getpid() for e in fastports.entries()) >= 4

def test_1(session_port, module_port, session_server, module_ports, session_udp_port,
           module_udp_port, session_ports, session_port_block, module_port_block, module_server):
    look(**locals())
test_2 = test_1
"""
    (tmp_path / "test_other.py").write_text(
        source + "\ndef test_3():\n    assert len({a for a, b in seen}) == 1\n"
        "    assert len({b for a, b in seen}) == 2\n"
    )
    assert passed(run(tmp_path, source)) == 5


def test_a_failure_shows_what_its_servers_printed_and_no_frame_of_ours(tmp_path: Path) -> None:
    source = f"""
def test_1(server, session_server):
    session_server({TALKER})
    server({TALKER}, size=2)
    assert 1 == 2
def test_2(server):
    server(["sh", "-c", "echo out; echo sorry >&2; exit 3"])
def test_3(session_server):
    assert 3 == 4
def test_4(server):
    assert 5 == 6
"""
    code, output = run(tmp_path, source)
    assert code == 1
    first, second, third, fourth = re.split(r"_{10,} test_\d _{10,}", output)[1:]
    assert first.count("\nI am a server\n") == 2
    assert second.count("Captured output of sh on") == 1
    assert "out\nsorry\n" in second
    assert "HandoffError: sh ended with status 3" in second
    assert "child.py" not in second and "pytest_plugin.py" not in second
    assert third.count("\nI am a server\n") == 1
    assert "Captured" not in fourth.partition("short test summary")[0]


def test_the_range_is_kept_to_and_a_bad_one_is_a_usage_error(tmp_path: Path) -> None:
    source = (
        "def test(port, port_block):\n    assert {port, *port_block} <= {*range(28000, 28100)}\n"
    )
    assert passed(run(tmp_path, source, "--fastports-range", "28000-28099")) == 1
    assert passed(run(tmp_path, source, "-o", "fastports_range=28000-28099")) == 1
    code, output = run(tmp_path, source, "--fastports-range", "nonsense")
    assert code == 4
    assert "ERROR: --fastports-range: 'nonsense' is no range of ports" in output
    assert "Traceback" not in output


def test_a_suite_that_does_not_use_it_does_not_load_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\ndef pytest_sessionfinish():\n"
        "    print('loaded:', [name for name in sys.modules if name.startswith('fastports')])\n"
    )
    source = "def test():\n    assert 1 == 1\ndef test_fails():\n    assert 0\n"
    output = run(tmp_path, source)[1]
    assert "1 failed, 1 passed" in output
    assert "loaded: []" in output


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    source = "def test_1(): pass\ndef test_2(port): pass\n"
    code, output = run(tmp_path, source, "-p", "no:fastports")
    assert code == 1
    assert "fixture 'port' not found" in output
    assert "1 passed, 1 error" in output


def test_a_fixture_of_the_suite_with_the_same_name_wins(tmp_path: Path) -> None:
    source = (
        "import pytest\n@pytest.fixture\ndef port(): return 'mine'\n"
        "def test(port, session_port): assert port == 'mine' and session_port > 1\n"
    )
    assert passed(run(tmp_path, source)) == 1


def test_no_name_is_that_of_a_fixture_of_the_async_plugins() -> None:
    ours = {"port", "udp_port", "ports", "port_block", "server"}
    names = {f"{scope}{name}" for scope in ("", "module_", "session_") for name in ours}
    assert names <= {name[1:] for name in vars(pytest_fastports)}
    theirs = {
        "event_loop", "event_loop_policy", "unused_tcp_port", "unused_tcp_port_factory",
        "unused_udp_port", "unused_udp_port_factory", "anyio_backend", "anyio_backend_name",
        "anyio_backend_options", "free_tcp_port", "free_tcp_port_factory", "free_udp_port",
        "free_udp_port_factory",
    }  # fmt: skip
    assert not names & theirs


@pytest.mark.parametrize("reuse_port", ["0", "1"], ids=["c25", "c26"])
def test_c25_c26_two_sessions_of_xdist_at_once_never_answer_for_each_other(
    reuse_port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when every server would share its port (SO_REUSEPORT), which is C26.

    FASTPORTS_XDIST=full: 400 tests on 8 workers, and beside it pytest-asyncio's fixture, counted.
    """
    full = os.environ.get("FASTPORTS_XDIST") == "full"
    count, workers = ("400", "8") if full else ("40", "2")
    shutil.copy(HERE / "nonce_suite.py", tmp_path / "test_nonce.py")

    def two_sessions(**env: str) -> list[tuple[int, str]]:
        env.update(COUNT=count, REUSE_PORT=reuse_port)
        sessions = [start(tmp_path, "-n", workers, **env) for _ in range(2)]
        return [end(session) for session in sessions]

    for session in two_sessions():
        assert passed(session) == int(count)
    if not full:
        return
    pytest.importorskip("pytest_asyncio")
    theirs = two_sessions(FIXTURE="unused_tcp_port")
    outputs = "".join(output for _, output in theirs)
    wrong, failed = (len(re.findall(f"FAILED .*{what}", outputs)) for what in OUTCOMES)
    served = sum(map(int, re.findall(r"(\d+) passed", outputs)))
    assert served + wrong + failed == 2 * int(count), outputs
    with capsys.disabled():
        print(
            f"\nwith unused_tcp_port and SO_REUSEPORT={reuse_port} {served} of 800 tests got their"
            f" own answer, {wrong} another server's, {failed} none; with port all got their own"
        )


def test_an_interrupted_session_leaves_no_server(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(
        f"import time\ndef test(server):\n    child = server({SERVER})\n"
        "    with open('pid', 'w') as file: file.write(f'{child.pid}\\n')\n    time.sleep(60)\n"
    )
    sessions = []
    for number in (signal.SIGINT, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir()
        shutil.copy(tmp_path / "test_inner.py", folder)
        sessions.append((number, folder / "pid", start(folder)))
    for number, path, session in sessions:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.read_text().endswith("\n")):
            assert time.monotonic() < deadline and session.poll() is None
            time.sleep(0.01)
        session.send_signal(number)
        session.communicate(timeout=60)
        while os.path.exists(f"/proc/{path.read_text().strip()}/fd/0"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_example_of_the_document_passes(tmp_path: Path) -> None:
    text = (HERE.parent / "docs" / "pytest.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 2
    for number, example in enumerate(examples):
        (tmp_path / f"test_{number}.py").write_text(example)
    assert passed(end(start(tmp_path))) >= len(examples)
