"""Getting to etcd: endpoints, TLS, logins, client objects, and what the client gets wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import etcd3
import grpc
import pytest

from fastports import Allocator, aio
from fastports.errors import (
    InvalidRequest,
    RegistryDenied,
    RegistryError,
    RegistryTimeout,
    RegistryUnavailable,
)
from fastports.etcd import EtcdRegistry
from fastports.etcd.connection import parse_endpoints
from fastports.retry import Retry

from .conftest import block
from .servers import Etcd, certificates, debian, enable_auth, etcd, wait_for

SEARCH = (20000, 29999)


def works(registry: EtcdRegistry, first: int = 20000) -> bool:
    mine = block(first, 4)
    refused = registry.claim([mine], search=SEARCH, timeout=5)
    registry.release([mine])
    return not refused


def python_etcd3(server: Etcd, **options: Any) -> Any:
    return etcd3.client(host=server.host, port=server.port, **options)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return certificates(tmp_path_factory.mktemp("pem"))


@pytest.fixture(scope="module")
def tls_etcd(pem: dict[str, str]) -> Iterator[Etcd]:
    """TLS, and users enabled."""
    files = {"ca": pem["ca.pem"], "cert": pem["server.pem"], "key": pem["server.key"]}
    with etcd(tls=files) as server:
        enable_auth(server)
        yield server


@pytest.fixture(scope="module")
def auth_etcd() -> Iterator[Etcd]:
    """Users enabled, and tokens that end after a second without use."""
    with etcd(arguments=("--auth-token-ttl=1",)) as server:
        enable_auth(server)
        yield server


# -- endpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("etcd-0:2379", ["http://etcd-0:2379"]),
        ("etcd-0", ["http://etcd-0:2379"]),
        ("http://10.0.0.1:4001/", ["http://10.0.0.1:4001"]),
        ("https://etcd", ["https://etcd:2379"]),
        ("[fd00::1]:99", ["http://[fd00::1]:99"]),
        ("https://[fd00::1]", ["https://[fd00::1]:2379"]),
        ("fd00::1", ["http://[fd00::1]:2379"]),
        ("a:1, b:2 ,a:1", ["http://a:1", "http://b:2"]),
        (["a:1", "https://b:2"], ["http://a:1", "https://b:2"]),
    ],
)
def test_endpoints_are_read_as_they_are_written(given: Any, expected: list[str]) -> None:
    assert [repr(each) for each in parse_endpoints(given, tls=False)] == expected


@pytest.mark.parametrize(
    "given",
    [
        "", ",", [], "a:0", "a:65536", "a:x", ":2379", "ftp://a:1", "http://a:1/path",
        "http://u:p@a:1", "a b:1", "a:1\n", "[fd00::1", "[nonsense]:1", "1:2:3", "http://", "a:-1",
        "a:\u0661", [5], "a:1,,b:2", "unix:///run/etcd", "a:" + "9" * 5000, "a" * 254, "a\ud800:1",
        "HTTP://a:1", "etcd://a:1", "a:1;b:2", b"a:1",
    ],
)  # fmt: skip
def test_malformed_endpoints_are_refused_before_any_connection(given: Any) -> None:
    if isinstance(given, str) and given.endswith("\n"):
        given = [given + "x"]
    with pytest.raises(InvalidRequest) as caught:
        EtcdRegistry(given, namespace="n")
    assert caught.value.argument == "endpoints"


@contextmanager
def listening() -> Iterator[tuple[str, Callable[[], int]]]:
    """An endpoint, and how many connections came to it so far."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        came = 0

        def connections() -> int:
            nonlocal came
            with suppress(BlockingIOError):
                while True:
                    server.accept()[0].close()
                    came += 1
            return came

        yield f"127.0.0.1:{server.getsockname()[1]}", connections


def test_an_endpoint_is_not_connected_to_before_the_first_claim() -> None:
    """And the count that the tests below lean on counts."""
    with listening() as (endpoint, connections):
        with EtcdRegistry(endpoint, timeout=0.5) as registry:
            assert connections() == 0
            with pytest.raises(RegistryError):
                registry.claim([block(20000)], search=SEARCH, timeout=0.5)
        assert connections() > 0


@pytest.mark.parametrize(
    ("name", "value", "argument"),
    [
        ("ENDPOINTS", "ftp://etcd:2379", "endpoints"),
        ("NAMESPACE", "a/b", "namespace"),
        ("NAMESPACE", "a\tb", "namespace"),
        ("HOST_ID", "a/b", "host_id"),
        ("ADVERTISE", "a\x1bb", "advertise"),
        ("USER", "u", "password"),
        ("CA", "/nonexistent.pem", "ca"),
        ("CERT", "/nonexistent.pem", "key"),
    ],
)
def test_bad_settings_of_the_environment_are_refused_like_arguments(
    name: str, value: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("ENDPOINTS", "NAMESPACE", "HOST_ID", "ADVERTISE", "USER", "CA", "CERT"):
        monkeypatch.delenv(f"FASTPORTS_ETCD_{each}", raising=False)
    monkeypatch.setenv("FASTPORTS_ETCD_ENDPOINTS", "etcd:2379")
    monkeypatch.setenv(f"FASTPORTS_ETCD_{name}", value)
    with pytest.raises(InvalidRequest) as caught:
        EtcdRegistry()
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"namespace": ""}, "namespace"),
        ({"namespace": "a/b"}, "namespace"),
        ({"namespace": "a\nb"}, "namespace"),
        ({"namespace": "a\x00"}, "namespace"),
        ({"namespace": "\ud800"}, "namespace"),
        ({"namespace": "x" * 201}, "namespace"),
        ({"namespace": "*"}, "namespace"),
        ({"namespace": b"n"}, "namespace"),
        ({"host_id": "a/b"}, "host_id"),
        ({"host_id": ""}, "host_id"),
        ({"advertise": "a\tb"}, "advertise"),
        ({"ttl": 1}, "ttl"),
        ({"ttl": 86401}, "ttl"),
        ({"ttl": 2.5}, "ttl"),
        ({"ttl": True}, "ttl"),
        ({"ttl": "30"}, "ttl"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": None}, "timeout"),
        ({"retry": 3}, "retry"),
        ({"timeout": True}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"user": "u"}, "password"),
        ({"user": 5, "password": "p"}, "user"),
        ({"user": "u", "password": "\ud800"}, "password"),
        ({"ca": "/"}, "ca"),
        ({"ca": __file__}, "ca"),
        ({"ca": "a\0b"}, "ca"),
        ({"cert": "/", "key": "/"}, "cert"),
        ({"password": "p"}, "user"),
        ({"ca": "/nonexistent.pem"}, "ca"),
        ({"cert": "/nonexistent.pem", "key": "/nonexistent.key"}, "cert"),
        ({"cert": __file__}, "key"),
        ({"ca": 5}, "ca"),
        ({"on_lost": 5}, "on_lost"),
    ],
)
def test_bad_arguments_are_refused_before_any_connection(
    options: dict[str, Any], argument: str
) -> None:
    with listening() as (endpoint, connections):
        with pytest.raises(InvalidRequest) as caught:
            EtcdRegistry(endpoint, **options)
        assert caught.value.argument == argument
        assert connections() == 0


@pytest.mark.parametrize(
    "metadata", [{"x": "y" * 70000}, {"x": object()}, {"x": float("nan")}, {"x": b"bytes"}]
)
def test_metadata_that_cannot_be_recorded_is_refused_before_any_connection(
    metadata: dict[str, object],
) -> None:
    with listening() as (endpoint, connections), EtcdRegistry(endpoint) as registry:
        with pytest.raises(InvalidRequest) as caught:
            registry.claim([block(20000, metadata=metadata)], search=SEARCH, timeout=1)
        assert caught.value.argument == "metadata"
        assert connections() == 0


def test_an_allocator_lets_go_of_ports_whose_metadata_cannot_be_recorded() -> None:
    with listening() as (endpoint, connections), EtcdRegistry(endpoint) as registry:
        with pytest.raises(InvalidRequest) as caught:
            Allocator(registry=registry).allocate(2, metadata={"x": "y" * 70000})
        assert caught.value.argument == "metadata"
        assert connections() == 0


@pytest.mark.parametrize("registry", [5, "etcd:2379", True, object()])
def test_an_allocator_refuses_a_registry_that_is_none(registry: Any) -> None:
    for make in (Allocator, aio.Allocator):
        with pytest.raises(InvalidRequest) as caught:
            make(registry=registry)
        assert caught.value.argument == "registry"


def test_a_thing_that_is_no_client_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        EtcdRegistry(5)


def test_settings_come_from_the_environment(
    etcd_server: Etcd, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTPORTS_ETCD_ENDPOINTS", raising=False)
    with pytest.raises(InvalidRequest, match="FASTPORTS_ETCD_ENDPOINTS"):
        EtcdRegistry()
    monkeypatch.setenv("FASTPORTS_ETCD_ENDPOINTS", etcd_server.url)
    monkeypatch.setenv("FASTPORTS_ETCD_NAMESPACE", namespace)
    with EtcdRegistry() as registry:
        registry.claim([block(20000)], search=SEARCH, timeout=5)
        assert len(etcd_server.keys(f"v1/{namespace}/")) == 1


def test_the_first_endpoint_that_answers_is_used(etcd_server: Etcd, namespace: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{nobody.getsockname()[1]}"
        for _ in range(8):  # each begins with an endpoint of its own choice
            with EtcdRegistry(
                [dead, etcd_server.endpoint], namespace=namespace, retry=Retry(1)
            ) as registry:
                assert works(registry)


def test_ipv6_endpoints_work(namespace: str) -> None:
    with etcd(host="::1") as server, EtcdRegistry(server.url, namespace=namespace) as registry:
        assert works(registry)


def test_debians_etcd_works_as_well(namespace: str) -> None:
    program = debian()
    if program is None:
        pytest.skip("Debian's etcd-server is not installed")
    with (
        etcd(program=program) as server,
        EtcdRegistry(server.url, namespace=namespace) as registry,
    ):
        assert works(registry)
        big = block(30000, 4096)
        assert not registry.claim([big], search=SEARCH, timeout=10)
        registry.release([big])


# -- TLS and logins --------------------------------------------------------------------------------


def test_tls_with_a_user(tls_etcd: Etcd, pem: dict[str, str], namespace: str) -> None:
    with EtcdRegistry(
        tls_etcd.url, namespace=namespace, ca=pem["ca.pem"], user="launcher", password="pw"
    ) as registry:
        assert works(registry)
    with EtcdRegistry(  # certificates alone mean https
        tls_etcd.endpoint, namespace=namespace, ca=Path(pem["ca.pem"]).as_posix(),
        cert=pem["client.pem"], key=pem["client.key"], user="launcher", password="pw",
    ) as registry:  # fmt: skip
        assert works(registry)


def test_a_client_certificate_is_shown_where_etcd_wants_one(
    pem: dict[str, str], namespace: str
) -> None:
    files = {
        "ca": pem["ca.pem"], "cert": pem["server.pem"], "key": pem["server.key"],
        "client-ca": pem["ca.pem"],
    }  # fmt: skip
    with etcd(tls=files) as server:
        with EtcdRegistry(
            server.url, namespace=namespace, ca=pem["ca.pem"], cert=pem["client.pem"],
            key=pem["client.key"],
        ) as registry:  # fmt: skip
            assert works(registry)
        with (
            EtcdRegistry(server.url, namespace=namespace, ca=pem["ca.pem"]) as registry,
            pytest.raises(RegistryUnavailable),
        ):
            registry.claim([block(20000)], search=SEARCH, timeout=2)


def test_a_server_that_another_ca_signed_is_not_trusted(
    tls_etcd: Etcd, tmp_path: Path, namespace: str
) -> None:
    other = certificates(tmp_path)
    with (
        EtcdRegistry(
            tls_etcd.url, namespace=namespace, ca=other["ca.pem"], user="launcher", password="pw"
        ) as registry,
        pytest.raises(RegistryUnavailable, match=r"(?i)certificate|handshake|ssl|tls"),
    ):
        registry.claim([block(20000)], search=SEARCH, timeout=2)


def test_a_wrong_scheme_and_a_stranger_at_the_endpoint_are_told_apart(
    tls_etcd: Etcd, etcd_server: Etcd, namespace: str
) -> None:
    with HTTPServer(("127.0.0.1", 0), Deaf) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            for url, words in (
                (f"http://{tls_etcd.endpoint}", "may want TLS"),
                (f"https://{etcd_server.endpoint}", "may want no TLS"),
                (f"https://{tls_etcd.endpoint}", "whoever signed"),
                (f"http://127.0.0.1:{server.server_port}", "no etcd"),
            ):
                with (
                    EtcdRegistry(url, namespace=namespace) as registry,
                    pytest.raises(RegistryUnavailable, match=words) as caught,
                ):
                    registry.claim([block(20000)], search=SEARCH, timeout=20)
                assert "last error" not in str(caught.value)
        finally:
            server.shutdown()
            thread.join()


class Deaf(BaseHTTPRequestHandler):
    """A server that knows HTTP/1 alone, and nothing to log."""

    def log_message(self, *_: object) -> None:
        pass


def test_certificates_and_plain_http_contradict_each_other(pem: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        EtcdRegistry("http://127.0.0.1:1", ca=pem["ca.pem"])


@pytest.mark.parametrize(
    ("login", "words"),
    [
        ({}, r"wants a login \(etcdserver: user name is empty\)"),
        ({"user": "launcher", "password": "wrong"}, "authentication failed"),
        ({"user": "nobody", "password": "pw"}, "authentication failed"),
        ({"user": "stranger", "password": "pw"}, "permission denied"),
    ],
)
def test_a_refused_login_is_told_in_the_servers_words(
    auth_etcd: Etcd, namespace: str, login: dict[str, Any], words: str
) -> None:
    with EtcdRegistry(auth_etcd.url, namespace=namespace, **login) as registry:
        with pytest.raises(RegistryDenied, match=words) as caught:
            registry.claim([block(20000)], search=SEARCH, timeout=5)
        assert caught.value.outcome == "not-applied"
        assert isinstance(caught.value, PermissionError)


def test_a_user_where_etcd_has_no_users_is_let_in(etcd_server: Etcd, namespace: str) -> None:
    with EtcdRegistry(
        etcd_server.url, namespace=namespace, user="launcher", password="pw"
    ) as registry:
        assert works(registry)


# -- client objects --------------------------------------------------------------------------------


def test_a_client_object_is_used_and_not_closed(etcd_server: Etcd, namespace: str) -> None:
    client = python_etcd3(etcd_server)
    try:
        with EtcdRegistry(client, namespace=namespace) as registry:
            assert works(registry)
        assert client.status().version
    finally:
        client.close()


def test_a_factory_is_called_once_and_its_client_closed(etcd_server: Etcd, namespace: str) -> None:
    made: list[Any] = []

    def factory() -> Any:
        made.append(python_etcd3(etcd_server))
        return made[-1]

    registry = EtcdRegistry(factory, namespace=namespace)
    assert made == []
    assert works(registry) and works(registry)
    registry.close()
    assert len(made) == 1
    with pytest.raises(ValueError):
        made[0].status()


def test_a_factory_is_called_again_in_a_forked_child(etcd_server: Etcd, namespace: str) -> None:
    with EtcdRegistry(lambda: python_etcd3(etcd_server), namespace=namespace) as registry:
        assert works(registry)
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if works(registry, 21000) else 2)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert works(registry)


def test_a_client_object_is_refused_in_a_forked_child(etcd_server: Etcd, namespace: str) -> None:
    client = python_etcd3(etcd_server)
    with EtcdRegistry(client, namespace=namespace) as registry:
        assert works(registry)
        pid = os.fork()
        if pid == 0:
            try:
                works(registry)
            except RegistryError as exc:
                os._exit(0 if "function that makes" in str(exc) else 2)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
    client.close()


def test_pyetcd_clients_are_accepted(etcd_server: Etcd, namespace: str) -> None:
    pyetcd = pytest.importorskip("pyetcd")
    client = pyetcd.client(host=etcd_server.host, port=etcd_server.port)
    try:
        with EtcdRegistry(client, namespace=namespace) as registry:
            assert works(registry)
    finally:
        client.close()


# -- the six defects of the client -----------------------------------------------------------------


def test_defect_1_an_endpoint_that_failed_once_is_not_locked_out(
    own_etcd: Etcd, namespace: str
) -> None:
    client = python_etcd3(own_etcd, timeout=1)
    try:
        with EtcdRegistry(client, namespace=namespace) as registry:
            assert works(registry)
            own_etcd.kill()
            with pytest.raises(etcd3.Etcd3Exception):
                client.put("a", "b")
            with pytest.raises(RegistryUnavailable):
                registry.claim([block(20000)], search=SEARCH, timeout=20)
            own_etcd.start()
            with pytest.raises(ValueError, match="failed node"):  # for 300 s
                client.put("a", "b")
            assert works(registry)
    finally:
        client.close()


def test_defect_2_a_password_works_without_tls(auth_etcd: Etcd, namespace: str) -> None:
    client = python_etcd3(auth_etcd, user="launcher", password="pw", timeout=2)
    try:
        with pytest.raises((grpc.RpcError, etcd3.Etcd3Exception, ValueError)):
            client.put("v1/x", "y")
        with EtcdRegistry(client, namespace=namespace) as registry:
            assert works(registry)
        with EtcdRegistry(
            auth_etcd.url, namespace=namespace, user="launcher", password="pw"
        ) as registry:
            assert works(registry)
    finally:
        client.close()


def test_defect_2_a_client_with_a_password_works_with_tls(
    tls_etcd: Etcd, pem: dict[str, str], namespace: str
) -> None:
    def factory() -> Any:
        return python_etcd3(tls_etcd, user="launcher", password="pw", ca_cert=pem["ca.pem"])

    with EtcdRegistry(factory, namespace=namespace) as registry:
        assert works(registry)


def test_defect_3_an_expired_token_is_renewed(auth_etcd: Etcd, namespace: str) -> None:
    def factory() -> Any:
        return python_etcd3(auth_etcd, user="launcher", password="pw")

    bare = factory()
    with (
        EtcdRegistry(
            auth_etcd.url, namespace=namespace, user="launcher", password="pw", ttl=60
        ) as mine,
        EtcdRegistry(factory, namespace=namespace, ttl=60) as made,
        EtcdRegistry(bare, namespace=namespace, ttl=60) as given,
    ):
        assert works(mine) and works(made) and works(given)

        def expired() -> bool:
            # Asking keeps a token alive, so each look waits for longer than the token lives.
            time.sleep(2.5)
            try:
                bare.kvstub.Range(
                    etcd3.etcdrpc.RangeRequest(key=b"v1/x"), 2, metadata=bare.metadata
                )
            except grpc.RpcError as exc:
                return "invalid auth token" in str(exc)
            return False

        wait_for(expired, 20)
        assert works(mine)
        assert works(made)
        with pytest.raises(RegistryDenied, match="invalid auth token"):
            given.claim([block(20000)], search=SEARCH, timeout=5)
    bare.close()


def test_defect_4_a_client_without_a_timeout_does_not_wait_for_ever(
    own_etcd: Etcd, namespace: str
) -> None:
    client = python_etcd3(own_etcd, timeout=None)
    told: list[RegistryError] = []

    def claim() -> None:
        # Of the main thread's calls another one takes care, see runner.py; here gRPC must.
        try:
            registry.claim([block(20000)], search=SEARCH, timeout=0.4)
        except RegistryError as exc:
            told.append(exc)

    try:
        with EtcdRegistry(client, namespace=namespace) as registry:
            assert works(registry)
            own_etcd.freeze()
            thread = threading.Thread(target=claim)
            thread.start()
            thread.join(30)
            own_etcd.thaw()
            thread.join(30)
        (error,) = told
        assert isinstance(error, RegistryTimeout)
        assert "did not answer in time (Deadline Exceeded)" in str(error)
    finally:
        client.close()


def test_defect_5_raw_errors_arrive_as_the_registrys_own(
    registry: EtcdRegistry, etcd_server: Etcd
) -> None:
    assert works(registry)
    session = registry._here()
    rpc = session.connection.rpc
    from fastports.etcd.connection import Call

    put = rpc.RequestOp(request_put=rpc.PutRequest(key=b"v1/x", value=b"y", lease=12345))
    with pytest.raises(RegistryError, match="lease not found") as caught:
        session.ask("txn", rpc.TxnRequest(success=[put]), Call(5))
    assert not caught.value.retryable and caught.value.outcome == "not-applied"
    many = [rpc.RequestOp(request_range=rpc.RangeRequest(key=b"v1/x"))] * 200
    with pytest.raises(RegistryError, match="too many operations"):
        session.ask("txn", rpc.TxnRequest(success=many), Call(5))


def test_defect_5_a_lease_that_the_server_lost_is_granted_anew(
    registry: EtcdRegistry, etcd_server: Etcd, namespace: str
) -> None:
    assert works(registry)
    lease = registry._here().lease
    etcd_server.ctl("lease", "revoke", f"{lease:x}")
    assert not registry.claim([block(20000)], search=SEARCH, timeout=5)
    assert registry._here().lease != lease
    assert len(etcd_server.keys(f"v1/{namespace}/")) == 1


def test_defect_5_a_keepalive_of_a_lost_lease_is_known_by_its_ttl(
    etcd_server: Etcd, namespace: str
) -> None:
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace, ttl=2) as registry:
        mine = block(20000)
        assert not registry.claim([mine], search=SEARCH, timeout=5)
        session = registry._here()
        genuine, lease = session.connection._pass, session.lease
        calls: list[str] = []

        def noting(name: str, request: Any, call: Any) -> Any:
            calls.append(name)
            return genuine(name, request, call)

        session.connection._pass = noting  # type: ignore[method-assign]
        etcd_server.ctl("lease", "revoke", f"{lease:x}")
        calls.clear()
        wait_for(lambda: "txn" in calls and registry.state(mine) == "held")
        # nothing at all where it was on its way already
        assert calls[: calls.index("grant")] in (["keepalive"], [])


def test_defect_6_the_lease_is_kept_alive_and_other_endpoints_are_tried(
    cluster: list[Etcd], namespace: str
) -> None:
    with EtcdRegistry([m.endpoint for m in cluster], namespace=namespace, ttl=2) as registry:
        mine = block(20000, 4)
        assert not registry.claim([mine], search=SEARCH, timeout=5)
        used = registry._here().connection.current.endpoint
        next(m for m in cluster if m.endpoint == used).kill()
        other = next(m for m in cluster if m.process is not None)
        assert not registry.claim([block(21000)], search=SEARCH, timeout=5)
        until = time.monotonic() + 5  # two and a half TTLs
        while time.monotonic() < until:
            assert registry.state(mine) == "held"
            time.sleep(0.05)
        assert len(other.keys(f"v1/{namespace}/")) == 5


# -- a client that is missing or broken ------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "not installed"),
        ("raise TypeError('Descriptors cannot be created directly.')", "Descriptors cannot"),
        ("x = undefined", "NameError"),
    ],
)
def test_a_missing_or_broken_client_is_told_with_the_line_to_type(
    tmp_path: Path, content: str | None, words: str
) -> None:
    code = """
        import sys
        missing = ["pyetcd"]
        if sys.argv[1]:
            sys.path.insert(0, sys.argv[1])
        else:
            missing.append("etcd3")
        class Nothing:
            def find_spec(self, name, path=None, target=None):
                if name in missing:
                    raise ModuleNotFoundError(name=name)
        sys.meta_path.insert(0, Nothing())
        from fastports.etcd import EtcdRegistry
        from types import SimpleNamespace as Block
        from fastports.registry import Owner
        block = Block(first=20000, last=20000, protocol="tcp", host=None, label="", metadata={},
                      owner=Owner(1, 1))
        try:
            EtcdRegistry("127.0.0.1:1").claim([block], search=(1, 2), timeout=1)
        except Exception as exc:
            print(type(exc).__name__, exc)
    """
    if content is not None:
        (tmp_path / "etcd3").mkdir()
        (tmp_path / "etcd3" / "__init__.py").write_text(content)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), "" if content is None else str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("RegistryError")
    assert words in done.stdout
    assert "pip install 'fastports[etcd]'" in done.stdout
