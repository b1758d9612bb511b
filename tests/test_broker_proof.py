"""Servers as they are, started again and again on a held port that is under attack all the while.

The attacker binds and listens with every combination of SO_REUSEADDR and SO_REUSEPORT on the
wildcard and the loopback of both families, as fast as it can. Where the launcher has CAP_NET_RAW
nothing enters. Without it the door is open for microseconds, an attacker that fast gets in
now and then, and what is tested is that every start comes up all the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from brokering import Launcher, hold, launcher, port_of, until

from fastports import _broker

WHY = _broker.probe()["broker"]
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no broker here: {WHY}")
STAYS_SHUT = _broker.stays_shut()
STARTS = int(os.environ.get("FASTPORTS_PROOF_STARTS", "10"))

ATTACKER = r"""
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
static volatile int over;
static void end(int s) { over = s; }
int main(int n, char **v) {
    long attacks = 0, bound = 0, entered = 0; int one = 1, i, o;
    unsigned short port = htons(atoi(v[1])); (void)n;
    signal(SIGTERM, end); puts("ready"); fflush(stdout);
    while (!over) for (i = 0; i < 4; i++) for (o = 0; o < 4; o++) {
        struct sockaddr_in a; struct sockaddr_in6 b; int s, r;
        memset(&a, 0, sizeof a); memset(&b, 0, sizeof b);
        a.sin_family = AF_INET; a.sin_port = port; b.sin6_family = AF_INET6; b.sin6_port = port;
        if (i == 1) a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (i == 3) b.sin6_addr = in6addr_loopback;
        s = socket(i < 2 ? AF_INET : AF_INET6, SOCK_STREAM, 0);
        if (o & 1) setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (o & 2) setsockopt(s, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one);
        r = i < 2 ? bind(s, (void *)&a, sizeof a) : bind(s, (void *)&b, sizeof b);
        attacks++;
        if (r == 0) { bound++; if (listen(s, 1) == 0) entered++; }
        close(s);
    }
    printf("%ld %ld %ld\n", attacks, bound, entered); return 0;
}
"""
ATTACKER_WITHOUT_A_COMPILER = r"""
import signal, socket, sys
over = []
signal.signal(signal.SIGTERM, lambda *_: over.append(1))
port = int(sys.argv[1])
attacks = bound = entered = 0
print("ready", flush=True)
while not over:
    for address in ("0.0.0.0", "127.0.0.1", "::", "::1"):
        for options in ((), (2,), (15,), (2, 15)):
            s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            for option in options:
                s.setsockopt(socket.SOL_SOCKET, option, 1)
            attacks += 1
            try:
                s.bind((address, port))
                bound += 1
                s.listen()
                entered += 1
            except OSError:
                pass
            s.close()
print(attacks, bound, entered)
"""
PLAIN_C = r"""
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
int main(int n, char **v) {
    struct sockaddr_in a; char b[512]; int c, s = socket(AF_INET, SOCK_STREAM, 0); (void)n;
    memset(&a, 0, sizeof a); a.sin_family = AF_INET; a.sin_port = htons(atoi(v[1]));
    if (bind(s, (void *)&a, sizeof a) || listen(s, 16)) return 1;
    while ((c = accept(s, 0, 0)) >= 0) {
        if (read(c, b, sizeof b) > 0 && write(c, "HTTP/1.0 200 plain\r\n\r\n", 22) == 22)
            while (read(c, b, sizeof b) > 0);
        close(c);
    }
    return 1;
}
"""
PLAIN_PYTHON = """
import socket, sys
s = socket.socket()
s.bind(("", int(sys.argv[1])))
s.listen()
while True:
    c, _ = s.accept()
    c.recv(512)
    c.sendall(b"HTTP/1.0 200 plain\\r\\n\\r\\n")
    while c.recv(512):
        pass
    c.close()
"""
ASYNCIO = """
import asyncio, sys
async def answer(reader, writer):
    await reader.read(512)
    writer.write(b"HTTP/1.0 200 asyncio\\r\\n\\r\\n")
    writer.close()
async def main():
    server = await asyncio.start_server(answer, None, int(sys.argv[1]))
    await server.serve_forever()
asyncio.run(main())
"""
AIOHTTP = """
import sys
from aiohttp import web
web.run_app(web.Application(), port=int(sys.argv[1]))
"""
TORNADO = """
import asyncio, sys
import tornado.web
async def main():
    tornado.web.Application([]).listen(int(sys.argv[1]))
    await asyncio.Event().wait()
asyncio.run(main())
"""
GRPCIO = """
import sys
from concurrent import futures
import grpc
server = grpc.server(futures.ThreadPoolExecutor(1))
if server.add_insecure_port(f"[::]:{sys.argv[1]}") == 0:
    sys.exit(1)
server.start()
server.wait_for_termination()
"""
PYZMQ = """
import sys, time
import zmq
sock = zmq.Context().socket(zmq.ROUTER)
sock.bind(f"tcp://*:{sys.argv[1]}")
time.sleep(600)
"""
GO = r"""
package main

import (
    "net"
    "os"
)

func main() {
    for i := 0; i < 2; i++ { // the runtime preempts these by SIGURG, also while others bind
        go func() {
            for {
            }
        }()
    }
    listener, err := net.Listen("tcp", ":"+os.Args[1])
    if err != nil {
        os.Exit(1)
    }
    for {
        peer, err := listener.Accept()
        if err == nil {
            peer.Write([]byte("HTTP/1.0 200 go\r\n\r\n"))
            peer.Close()
        }
    }
}
"""
FILES = {
    "main.go": GO,
    "asgi.py": """
async def app(scope, receive, send):
    if scope["type"] != "http":
        raise RuntimeError
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})
""",
    "wsgi.py": "def app(environ, start):\n    start('200 OK', [])\n    return [b'ok']\n",
    "plain.py": PLAIN_PYTHON,
    "with_asyncio.py": ASYNCIO,
    "with_aiohttp.py": AIOHTTP,
    "with_tornado.py": TORNADO,
    "with_grpcio.py": GRPCIO,
    "with_pyzmq.py": PYZMQ,
}
PYTHON = sys.executable
NODE = "require('http').createServer((q, r) => r.end('ok')).listen(process.argv[1])"
# name: (what must be there, command, whether it sets SO_REUSEPORT itself)
SERVERS: dict[str, tuple[str | None, list[str], bool]] = {
    "plain-python": (None, [PYTHON, "-IS", "plain.py", "{port}"], False),
    "plain-c": ("bin:cc", ["./plain", "{port}"], False),
    "http.server": (None, [PYTHON, "-m", "http.server", "{port}"], False),
    "asyncio": (None, [PYTHON, "with_asyncio.py", "{port}"], False),
    "uvicorn": (
        "uvicorn",
        [PYTHON, "-m", "uvicorn", "asgi:app", "--host", "0.0.0.0", "--port", "{port}"],
        False,
    ),
    "hypercorn": (
        "hypercorn",
        [PYTHON, "-m", "hypercorn", "asgi:app", "-b", "0.0.0.0:{port}"],
        False,
    ),
    "gunicorn": ("gunicorn", [PYTHON, "-m", "gunicorn", "wsgi:app", "-b", "0.0.0.0:{port}"], False),
    "waitress": ("waitress", [PYTHON, "-m", "waitress", "--port={port}", "wsgi:app"], False),
    "daphne": (
        "daphne",
        [PYTHON, "-m", "daphne", "-b", "0.0.0.0", "-p", "{port}", "asgi:app"],
        False,
    ),
    "aiohttp": ("aiohttp", [PYTHON, "with_aiohttp.py", "{port}"], False),
    "tornado": ("tornado", [PYTHON, "with_tornado.py", "{port}"], False),
    "pyzmq": ("zmq", [PYTHON, "with_pyzmq.py", "{port}"], False),
    "granian": (
        "granian",
        [
            PYTHON,
            "-m",
            "granian",
            "--interface=asgi",
            "--host=0.0.0.0",
            "--port={port}",
            "asgi:app",
        ],
        True,
    ),
    "grpcio": ("grpc", [PYTHON, "with_grpcio.py", "{port}"], True),
    "go": ("bin:go", ["./server-in-go", "{port}"], False),
    "node": ("bin:node", ["node", "-e", NODE, "{port}"], False),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs."""
    path = tmp_path_factory.mktemp("proof")
    for name, text in FILES.items():
        (path / name).write_text(text)
    for name, text in (("plain", PLAIN_C), ("attacker", ATTACKER)):
        (path / f"{name}.c").write_text(text)
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["cc", "-O2", "-o", path / name, path / f"{name}.c"], check=True)
    return path


@pytest.fixture
def launch() -> Iterator[Launcher]:
    with launcher() as made:
        yield made


@contextlib.contextmanager
def attack(place: Path, port: int, counts: list[int]) -> Iterator[None]:
    argv = [str(place / "attacker")]
    if not os.path.exists(argv[0]):
        argv = [PYTHON, "-c", ATTACKER_WITHOUT_A_COMPILER]
    with subprocess.Popen([*argv, str(port)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.terminate()
            counts.extend(int(count) for count in process.stdout.read().split())


def answers(port: int) -> bool:
    """Whether something accepts here and says something to an HTTP request."""
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            sock.settimeout(10)
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return bool(sock.recv(512))
    except OSError:
        return False


def missing(need: str | None) -> bool:
    if need is None:
        return False
    if need.startswith("bin:"):
        return shutil.which(need[4:]) is None
    return importlib.util.find_spec(need) is None


@pytest.mark.parametrize("name", SERVERS)
def test_c01_nobody_else_enters_the_port_of_a_server_that_starts_under_attack(
    launch: Launcher, place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    need, command, shares = SERVERS[name]
    if missing(need):
        pytest.skip(f"{need} is not installed")
    if name == "go":
        settings = {"GOCACHE": str(place), "CGO_ENABLED": "0"}
        build = ["go", "build", "-o", "server-in-go", "main.go"]
        subprocess.run(build, cwd=place, check=True, env={**os.environ, **settings})
    held = hold()
    port = port_of(held)
    block = launch.block(held)
    argv = [part.format(port=port) for part in command]
    counts: list[int] = []
    answered = 0

    def run(say: Callable[[object], None]) -> object:
        os.chdir(place)
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.execvp(argv[0], argv)

    with attack(place, port, counts):
        for _ in range(STARTS):
            # a server that asks for SO_REUSEPORT lets others of its user in, unless that is taken
            child = launch.start(block, run, exclusive=shares)
            try:
                until(lambda: answers(port), 30)
                answered += 1
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.close()
                until(lambda: launch.broker.children == 0)
    attacks, bound, entered = counts
    with capsys.disabled():
        print(f"\n{name}: {answered} starts, {attacks} attacks, {bound} bound, {entered} entered")
    assert attacks > STARTS
    assert answered == STARTS
    assert entered == 0 or not STAYS_SHUT
