"""The command line's faces to a cluster: what they record, show, clean up, and how they refuse."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commanding import fastports, running, terminal

from fastports import Allocator
from fastports.cli import main
from fastports.etcd import EtcdRegistry

from .conftest import block
from .servers import Etcd, certificates, distro, enable_auth, etcd, proxy, wait_for

SERVER = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "{port}")
WAITS = (sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()")


@contextmanager
def held(server: Etcd, namespace: str, *sizes: int, label: str = "") -> Iterator[list[range]]:
    with ExitStack() as stack:
        registry = stack.enter_context(EtcdRegistry(server.endpoint, namespace=namespace))
        allocator = Allocator(registry=registry)
        blocks = [stack.enter_context(allocator.allocate(size, label=label)) for size in sizes]
        yield sorted((b.ports for b in blocks), key=lambda ports: ports.start)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short lease, so that what follows its end comes soon."""
    monkeypatch.setenv("FASTPORTS_ETCD_TTL", "3")


def where(server: Etcd, namespace: str) -> tuple[str, ...]:
    return "--etcd", server.endpoint, "--namespace", namespace


# --- run ------------------------------------------------------------------------------------------


def test_run_records_its_ports_for_as_long_as_the_program_runs(
    etcd_server: Etcd, namespace: str
) -> None:
    with running(
        "run", *where(etcd_server, namespace), "-n", "3", "--label", "decode-0", "--", *SERVER
    ) as command:
        command.line("listens", stream="stderr")
        (entry,) = json.loads(fastports("ls", *where(etcd_server, namespace), "--json").stdout)
        assert entry["label"] == "decode-0" and entry["pid"] == command.pid
        assert entry["last"] == entry["first"] + 2 and entry["alive"] is True
        assert len(etcd_server.keys(f"v1/{namespace}/")) == 3
        command.signal(signal.SIGTERM)
        assert command.end() == 128 + signal.SIGTERM
    assert etcd_server.keys(f"v1/{namespace}/") == []


def test_run_records_many_blocks_in_one_go(etcd_server: Etcd, namespace: str) -> None:
    words = ("--many", "a=1,b=4", "--wait", "0", "-q", "--", *WAITS)
    with running("run", *where(etcd_server, namespace), *words) as command:
        command.line("up")
        found = json.loads(fastports("ls", *where(etcd_server, namespace), "--json").stdout)
        assert sorted((e["label"], e["last"] - e["first"]) for e in found) == [("a", 0), ("b", 3)]
        command.signal(signal.SIGINT)
        assert command.end() == 128 + signal.SIGINT
    assert etcd_server.keys(f"v1/{namespace}/") == []


def test_replicas_stay_recorded_while_they_come_and_go(etcd_server: Etcd, namespace: str) -> None:
    words = ("--restart", "always", "--backoff", "0", "--count", "2", "--label", "web")
    # what the servers write, and when, is up to PYTHONUNBUFFERED: the report has stdout for itself
    server = ("sh", "-c", f"exec {shlex.join(SERVER)} >/dev/null")
    with running(
        "run", *where(etcd_server, namespace), *words, "--report", "-", "--", *server
    ) as command:
        before = json.loads(command.line('"listening"'))
        json.loads(command.line('"listening"'))
        recorded = etcd_server.keys(f"v1/{namespace}/")
        assert len(recorded) == 2
        os.kill(before["pid"], signal.SIGKILL)
        after = json.loads(command.line('"listening"'))
        assert after["ports"] == before["ports"] and after["pid"] != before["pid"]
        assert etcd_server.keys(f"v1/{namespace}/") == recorded
        found = json.loads(fastports("ls", *where(etcd_server, namespace), "--json").stdout)
        assert sorted(entry["label"] for entry in found) == ["web-0", "web-1"]
        command.signal(signal.SIGTERM)
        assert command.end() == 128 + signal.SIGTERM
    assert etcd_server.keys(f"v1/{namespace}/") == []


def test_the_environment_is_enough_for_run(
    etcd_server: Etcd, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPORTS_ETCD_ENDPOINTS", etcd_server.endpoint)
    monkeypatch.setenv("FASTPORTS_ETCD_NAMESPACE", namespace)
    monkeypatch.setenv("FASTPORTS_ETCD_ADVERTISE", "203.0.113.9")
    monkeypatch.setenv("FASTPORTS_ETCD_HOST_ID", "node-7")
    monkeypatch.setenv("FASTPORTS_ETCD_USER", "")  # as templates leave them
    with running("run", "--wait", "0", "--", *WAITS) as command:
        command.line("up")
        (entry,) = json.loads(fastports("ls", "--etcd", "--json").stdout)
        assert entry["pid"] == command.pid
        assert (entry["address"], entry["host_id"]) == ("203.0.113.9", "node-7")
        assert "(203.0.113.9)" in fastports("ls", "--etcd").stdout
        command.signal(signal.SIGTERM)
        assert command.end() == 128 + signal.SIGTERM


def test_kubernetes_service_links_of_a_service_named_like_it_do_no_harm() -> None:
    links = {
        "FASTPORTS_ETCD_PORT": "tcp://10.43.1.39:2379",
        "FASTPORTS_ETCD_SERVICE_HOST": "10.43.1.39",
        "FASTPORTS_ETCD_SERVICE_PORT": "2379",
        "FASTPORTS_ETCD_PORT_2379_TCP": "tcp://10.43.1.39:2379",
        "FASTPORTS_ETCD_PORT_2379_TCP_ADDR": "10.43.1.39",
    }
    for words in (["run", "-q", "--", "true"], ["doctor"]):
        done = fastports(*words, env=links)
        assert "10.43" not in done.stdout + done.stderr
        assert "FASTPORTS_ETCD" not in done.stdout
    done = fastports("ls", "--etcd", status=2, env=links)
    assert "no etcd endpoint is named" in done.stderr


def test_the_programs_process_gets_no_socket_of_the_registry(
    etcd_server: Etcd, namespace: str
) -> None:
    script = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:4])"
    words = ("-q", "--wait", "0", "--", sys.executable, "-c", script)
    done = fastports("run", *where(etcd_server, namespace), *words)
    assert done.stdout == "[0, 1, 2, 3]\n"  # 3 is the listing's own


def test_a_full_range_recorded_by_others_is_a_refusal(etcd_server: Etcd, namespace: str) -> None:
    with EtcdRegistry(etcd_server.endpoint, namespace=namespace) as registry:
        assert not registry.claim([block(23000, 8)], search=(23000, 23007), timeout=None)
        done = fastports(
            "run", *where(etcd_server, namespace), "--range", "23000-23007", "-n", "2", "true",
            status=1,
        )  # fmt: skip
    assert "recorded" in done.stderr and done.stderr.count("\n") == 1


def test_signals_reach_the_program_and_not_a_thread_of_the_client(
    etcd_server: Etcd, namespace: str
) -> None:
    script = (
        "import signal\n"
        "mine = {signal.SIGUSR1, signal.SIGUSR2}\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, mine)\n"
        "print('up', flush=True)\n"
        "for count in range(1, 41): signal.sigwait(mine), print(count, flush=True)\n"
    )
    words = ("--wait", "0", "--", sys.executable, "-c", script)
    with running("run", *where(etcd_server, namespace), *words) as command:
        command.line("up")
        for count in range(1, 41):
            command.signal(signal.SIGUSR1 if count % 2 else signal.SIGUSR2)
            command.line(str(count))
        assert command.end() == 0


def test_a_signal_while_etcd_is_waited_for_ends_it_at_once(namespace: str) -> None:
    with etcd() as server:
        server.freeze()
        with running("run", *where(server, namespace), "--", "true") as command:
            wait_for(lambda: _threads_of(command.pid, "fastports-etcd"))
            command.signal(signal.SIGTERM)
            assert command.end(2.5) == 128 + signal.SIGTERM


def _threads_of(pid: int, name: str) -> list[str]:
    # the kernel has no Python thread names; more than one thread means that the call is under way
    return os.listdir(f"/proc/{pid}/task")[1:]


def test_an_outage_is_told_and_so_is_its_end_and_nothing_is_stopped(
    brief: None, namespace: str
) -> None:
    with etcd() as server, running(
        "run", *where(server, namespace), "--wait", "0", "--", *WAITS
    ) as command:  # fmt: skip
        command.line("up")
        server.kill()
        server.wipe()
        server.start()
        command.line("etcd has the record of", stream="stderr", timeout=30)
        assert len(server.keys(f"v1/{namespace}/")) == 1
        command.signal(signal.SIGTERM)
        assert command.end() == 128 + signal.SIGTERM


def test_two_owners_of_a_port_are_told_even_when_quiet(
    brief: None, etcd_server: Etcd, namespace: str
) -> None:
    words = ("-q", "--wait", "0", "--", *WAITS)
    with running("run", *where(etcd_server, namespace), *words) as command:
        command.line("up")
        (name,) = etcd_server.keys(f"v1/{namespace}/")
        lease = json.loads(etcd_server.ctl("get", name, "-w", "json"))["kvs"][0]["lease"]
        etcd_server.ctl("put", name, '{"hostname":"elsewhere"}')
        etcd_server.ctl("lease", "revoke", f"{lease:x}")
        line = command.line("another owner", stream="stderr", timeout=30)
        assert "elsewhere" in line
        command.signal(signal.SIGTERM)
        assert command.end() == 128 + signal.SIGTERM
    assert etcd_server.keys(f"v1/{namespace}/") == [name]


def test_run_without_an_etcd_that_answers_is_refused_and_names_it(namespace: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
        done = fastports("run", "--etcd", endpoint, "true", status=1)
    assert endpoint in done.stderr and done.stderr.count("\n") == 1


# --- ls -------------------------------------------------------------------------------------------


def test_ls_lists_the_whole_cluster_in_a_table(etcd_server: Etcd, namespace: str) -> None:
    with held(etcd_server, namespace, 1, 8, label="decode-0") as ports:
        lines = fastports("ls", *where(etcd_server, namespace)).stdout.splitlines()
    assert lines[0].split() == ["PORTS", "PROTO", "HOST", "PID", "AGE", "LABEL"]
    for line, port in zip(lines[1:], ports, strict=True):
        shown = f"{port[0]}-{port[-1]}" if len(port) > 1 else f"{port[0]}"
        assert line.split()[:2] == [shown, "tcp"] and line.split()[-1] == "decode-0"
        assert str(os.getpid()) in line.split() and os.uname().nodename in line


def test_ls_of_every_namespace_says_which(etcd_server: Etcd, namespace: str) -> None:
    with held(etcd_server, namespace, 2), held(etcd_server, namespace + "-b", 1):
        listed = fastports("ls", "--etcd", etcd_server.endpoint, "--namespace", "*").stdout
    names = [line.split()[0] for line in listed.splitlines()]
    assert names[0] == "NAMESPACE" and {namespace, namespace + "-b"} <= set(names)


def test_ls_of_nothing_says_so(etcd_server: Etcd, namespace: str) -> None:
    done = fastports("ls", *where(etcd_server, namespace))
    assert done.stdout == "" and f"no ports are recorded in the namespace {namespace!r}" in (
        done.stderr
    )
    assert json.loads(fastports("ls", *where(etcd_server, namespace), "--json").stdout) == []


def test_ls_counts_what_it_cannot_read_and_is_not_fooled_by_it(
    etcd_server: Etcd, namespace: str
) -> None:
    start = f"v1/{namespace}/ports/node/"
    etcd_server.ctl("put", start + "20001", "no JSON")
    etcd_server.ctl("put", start + "nonsense", "{}")
    etcd_server.ctl("put", start + "20003", json.dumps({"first": 20009, "label": "liar"}))
    etcd_server.ctl(
        "put", start + "20002",
        json.dumps({"label": "\x1b[31mred\n", "hostname": "a\tb\r" + 99 * "x", "pid": -5}),
    )  # fmt: skip
    done = fastports("ls", *where(etcd_server, namespace))
    assert "3 keys are not in a form that fastports can list; their ports are" in done.stderr
    assert done.stdout.count("\n") == 2 and done.stdout.isprintable() is False
    assert "\x1b" not in done.stdout and "\t" not in done.stdout and "\r" not in done.stdout
    assert "?[31mred?" in done.stdout
    for name in ("20001", "20003"):
        etcd_server.ctl("del", start + name)
    done = fastports("ls", *where(etcd_server, namespace))
    assert "1 key is not in a form that fastports can list; its port is" in done.stderr


def test_ls_shows_what_dynamos_allocator_recorded(etcd_server: Etcd, namespace: str) -> None:
    context = {"worker_id": "vllm-backend-dp0", "reason": "nixl_side_channel_port", "pid": 77,
               "reserved_at": time.time() - 7, "block_size": 1}  # fmt: skip
    etcd_server.ctl("put", f"v1/{namespace}/ports/10.0.0.7/20017", json.dumps(context))
    (entry,) = json.loads(fastports("ls", *where(etcd_server, namespace), "--json").stdout)
    assert (entry["first"], entry["last"], entry["host_id"]) == (20017, 20017, "10.0.0.7")
    assert entry["metadata"]["reason"] == "nixl_side_channel_port" and entry["age"] >= 7
    line = fastports("ls", *where(etcd_server, namespace)).stdout.splitlines()[1]
    assert "10.0.0.7" in line and line.endswith("vllm-backend-dp0")


def test_ls_watch_tells_what_stands_and_then_each_change(etcd_server: Etcd, namespace: str) -> None:
    with held(etcd_server, namespace, 2, label="first") as (ports,):
        words = ("ls", *where(etcd_server, namespace), "--watch")
        with running(*words) as plain, running(*words, "--json") as machine:
            before = json.loads(machine.line("{"))
            assert (before["kind"], before["first"]) == ("recorded", ports[0])
            assert f"{ports[0]}-{ports[-1]}" in plain.line("recorded")
            with held(etcd_server, namespace, 1, label="second"):
                after = json.loads(machine.line("{"))
                assert (after["kind"], after["label"]) == ("recorded", "second")
                assert after["revision"] > before["revision"]
            assert json.loads(machine.line("{"))["kind"] == "released"
            assert plain.line("released").split()[-1] == "second"
            plain.signal(signal.SIGINT)
            assert plain.end() == 130
            machine.signal(signal.SIGTERM)
            assert machine.end() == -signal.SIGTERM


def test_ls_watch_goes_on_over_a_lost_connection(etcd_server: Etcd, namespace: str) -> None:
    with proxy(etcd_server) as between, running(
        "ls", "--etcd", between.endpoint, "--namespace", namespace, "--watch"
    ) as command:  # fmt: skip
        with held(etcd_server, namespace, 1, label="before"):
            command.line("before")
            between.cut()
        with held(etcd_server, namespace, 1, label="after"):
            assert "recorded" in command.line("after")


def test_ls_fits_on_a_terminal(etcd_server: Etcd, namespace: str) -> None:
    with (
        held(etcd_server, namespace, 1, label=60 * "x"),
        terminal(sys.executable, "-m", "fastports", "ls", *where(etcd_server, namespace)) as screen,
    ):
        assert screen.end() == 0
        lines = screen.shown.splitlines()
        assert len(lines) == 2 and max(map(len, lines)) <= 80 and lines[1].endswith("xxx+")


# --- gc -------------------------------------------------------------------------------------------


def test_gc_removes_what_the_dead_left_and_tells_before_if_asked(
    etcd_server: Etcd, namespace: str
) -> None:
    with running(
        "run", *where(etcd_server, namespace), "--wait", "0", "--", *WAITS
    ) as command:  # fmt: skip
        command.line("up")
        (dead,) = etcd_server.keys(f"v1/{namespace}/")
        command.signal(signal.SIGKILL)
        command.end()
    with held(etcd_server, namespace, 1):
        words = ("gc", *where(etcd_server, namespace))
        told = fastports(*words, "--dry-run").stdout
        assert told.startswith(f"would remove {dead}: its owner, process {command.pid} ")
        assert told.count("\n") == 1 and dead in etcd_server.keys(f"v1/{namespace}/")
        assert fastports(*words).stdout.startswith(f"removed {dead}: ")
        assert len(etcd_server.keys(f"v1/{namespace}/")) == 1
        assert "nothing is to be cleaned up" in fastports(*words).stderr


def test_gc_removes_by_age_on_other_hosts_only_if_told(etcd_server: Etcd, namespace: str) -> None:
    value = json.dumps({"reserved_at": time.time() - 3600, "worker_id": "w"})
    etcd_server.ctl("put", f"v1/{namespace}/ports/10.0.0.7/20017", value)
    words = ("gc", *where(etcd_server, namespace))
    for age in ((), ("--older-than", "2h"), ("--older-than", "61m")):
        assert fastports(*words, *age).stdout == ""
    assert fastports(*words, "--older-than", "59m").stdout.startswith("removed ")


# --- doctor and map -------------------------------------------------------------------------------


def test_doctor_tells_of_each_endpoint_and_of_the_rights(etcd_server: Etcd, namespace: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
        whole = fastports("doctor", *where(etcd_server, namespace)).stdout
        half = fastports("doctor", "--etcd", f"{etcd_server.endpoint},{gone}", status=1).stdout
        none = fastports("doctor", "--etcd", gone, status=1).stdout
    words = " ".join(whole.split())
    assert f"{etcd_server.endpoint} answers in" in words
    if etcd_server.program == distro():  # which has a known defect
        assert "etcd 3.5.1, which may" in words
    assert "ok clock" in words and "taken off after 30 s" in words
    assert f"ok rights etcd asks for no login to read the namespace {namespace!r}, which" in words
    words = " ".join(half.split())
    assert f"BAD etcd etcd at {gone} cannot be reached" in words and "ok rights" in words
    assert f"BAD etcd etcd at {gone} cannot be reached" in " ".join(none.split())


def test_doctor_mentions_an_etcd_that_run_would_use() -> None:
    text = fastports("doctor", env={"FASTPORTS_ETCD_ENDPOINTS": "127.0.0.1:1"}).stdout
    assert "type: fastports doctor --etcd" in text


def test_map_shows_what_is_recorded_for_this_host_but_not_held(
    etcd_server: Etcd, namespace: str
) -> None:
    with held(etcd_server, namespace, 3) as (ports,):
        first = ports[0] - ports[0] % 10
        name = etcd_server.keys(f"v1/{namespace}/")[0].rpartition("/")[0]
        free = next(port for port in range(first + 20, first + 30))
        etcd_server.ctl("put", f"{name}/{free:05d}", '{"label":"x"}')
        etcd_server.ctl("put", f"v1/{namespace}/ports/elsewhere/{free + 1:05d}", '{"label":"x"}')
        drawn = fastports("map", f"{first}-{first + 39}", *where(etcd_server, namespace)).stdout
    assert "h held through fastports 3" in drawn and "e recorded, not held 1" in drawn
    assert drawn.splitlines()[-1] == "recorded in etcd for this host: 4 ports"


# --- login, certificates --------------------------------------------------------------------------


def test_login_and_certificates_come_from_the_environment(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    tls = {"ca": files["ca.pem"], "cert": files["server.pem"], "key": files["server.key"]}
    with etcd(tls=tls) as server:
        enable_auth(server)
        environment = {
            "FASTPORTS_ETCD_ENDPOINTS": server.endpoint,
            "FASTPORTS_ETCD_CA": files["ca.pem"],
            "FASTPORTS_ETCD_USER": "launcher",
            "FASTPORTS_ETCD_PASSWORD": "pw",
        }
        assert fastports("run", "-q", "--", "true", env=environment).stderr == ""
        text = " ".join(fastports("doctor", "--etcd", env=environment).stdout.split())
        assert "user 'launcher' may read the namespace 'default', which has" in text
        untrusted = dict(environment, FASTPORTS_ETCD_ENDPOINTS=server.url, FASTPORTS_ETCD_CA="")
        for words in (["ls", "--etcd"], ["gc", "--etcd"]):
            done = fastports(*words, status=1, env=untrusted)
            assert "set FASTPORTS_ETCD_CA" in done.stderr and done.stderr.count("\n") == 1
        for changed, status, part in (
            ({"FASTPORTS_ETCD_PASSWORD": "wrong"}, 1, "check FASTPORTS_ETCD_USER"),
            ({"FASTPORTS_ETCD_USER": "stranger"}, 1, "check FASTPORTS_ETCD_USER"),
            ({"FASTPORTS_ETCD_PASSWORD": ""}, 2, "set FASTPORTS_ETCD_PASSWORD"),
            ({"FASTPORTS_ETCD_CERT": files["client.pem"]}, 2, "set FASTPORTS_ETCD_KEY, too"),
            ({"FASTPORTS_ETCD_CA": "/nowhere.pem"}, 2, "set FASTPORTS_ETCD_CA to the path"),
        ):
            for words in (["ls", "--etcd"], ["run", "true"], ["gc", "--etcd"]):
                done = fastports(*words, status=status, env=environment | changed)
                assert part in done.stderr and done.stderr.count("\n") == 1, done.stderr


# --- wrong usage ----------------------------------------------------------------------------------

WRONG = [
    "run --etcd",
    "run --etcd -- true",
    "run --etcd ftp://etcd:2379 true",
    "run --etcd http://etcd:2379/path true",
    "run --etcd etcd:0 true",
    "run --etcd etcd:70000 true",
    "run --etcd etcd:x true",
    "run --etcd [::1 true",
    "run --etcd ::zz true",
    "run --etcd a,,b true",
    "run --etcd user@etcd true",
    "run --etcd= true",
    "run --namespace x true",
    "run --etcd etcd --namespace a/b true",
    "run --etcd etcd --namespace= true",
    "run --etcd etcd --namespace \a true",
    "run --etcd etcd --namespace * true",
    "run --etcd etcd --namespace " + 201 * "x" + " true",
    "run --etcd 127.0.0.1:1 -n 0 true",
    "ls --watch",
    "ls --namespace x",
    "ls --etcd",
    "ls --etcd ftp://x",
    "ls --etcd etcd --namespace a/b",
    "ls --etcd etcd extra",
    "ls --etcd etcd --watch=1",
    "map --namespace x",
    "map --etcd 20000-20010",
    "map --etcd a:b:c",
    "doctor --etcd ftp://x",
    "doctor --namespace x",
    "doctor --etcd etcd --namespace *",
    "gc",
    "gc --etcd",
    "gc --etcd ftp://x",
    "gc --etcd etcd extra",
    "gc --etcd etcd --older-than x",
    "gc --etcd etcd --older-than -1",
    "gc --etcd etcd --older-than 1w",
    "gc --etcd etcd --older-than \u0661d",
    "gc --etcd etcd --namespace *",
    "gc --dry-run=1",
]


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_one_line_on_stderr_and_status_2(
    line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split(" ")) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("fastports: ") and err.count("\n") == 1, err
    for word in ("endpoints=", "host_id=", "user=", "ca=", "None", "factory", "client"):
        assert word not in err, err


@pytest.mark.parametrize("ttl", ["1", "x", "3.5", "100000"])
def test_a_time_to_live_out_of_bounds_is_wrong_usage(
    ttl: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FASTPORTS_ETCD_TTL", ttl)
    assert main(["run", "--etcd", "127.0.0.1:1", "true"]) == 2
    assert "FASTPORTS_ETCD_TTL takes a whole number" in capfd.readouterr().err


def test_a_client_that_is_not_installed_is_told_with_the_line_to_type(tmp_path: Path) -> None:
    for name in ("etcd3", "pyetcd"):
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError('No module named {name!r}', name={name!r})\n"
        )
    done = fastports(
        "ls", "--etcd", "127.0.0.1:1", status=1, env={"PYTHONPATH": str(tmp_path)}
    )  # fmt: skip
    assert "pip install 'fastports[etcd]'" in done.stderr and done.stderr.count("\n") == 1
