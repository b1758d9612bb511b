"""What docs/etcd.md shows runs against a real etcd, and prints what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import etcd3
import grpc
import pytest

from fastports.etcd import EtcdRegistry

from .conftest import block
from .servers import Etcd, certificates, distro, enable_auth, etcd, wait_for

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "etcd.md").read_text()
CLUSTER = (ROOT / "README.md").read_text().split("## In a cluster")[1].split("\n## ")[0]
EXAMPLE = re.compile(
    r"^(?:% server: (?P<server>\w+)\n)?^```(?P<kind>python|console)\n(?P<text>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)


def examples() -> list[object]:
    return [
        pytest.param(match, id=f"line-{PAGE.count(chr(10), 0, match.start()) + 1}")
        for match in EXAMPLE.finditer(PAGE)
    ]


def normal(text: str) -> str:
    """What stays the same from run to run and from host to host."""
    name = re.escape(os.uname().nodename)
    for pattern, stand_in in (
        (r"[0-9a-f-]{36}-\d+", "BOOT-NETNS"),
        (r"[0-9a-f-]{36}", "BOOT"),
        (r"[0-9a-f]{32}", "TOKEN"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+", "MOMENT"),
        (rf"\b{name}\b|\bnode-3\b", "NODE"),
        (r"\d+(\.\d+)? ?m?s\b", "TIME"),
        (r"\d+ (s|minutes|hours|days) ago", "AGE ago"),
        (r"\d{2,}", "#"),
        (r" {2,}", " "),
    ):
        text = re.sub(pattern, stand_in, text)
    return text.strip()


def environment(server: Etcd) -> dict[str, str]:
    program = distro("etcdctl")
    assert program is not None
    path = (str(Path(sys.executable).parent), str(Path(program).parent), os.environ["PATH"])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FASTPORTS_", "ETCD"))}
    return kept | {
        "PATH": ":".join(path),
        "FASTPORTS_ETCD_ENDPOINTS": server.endpoint,
        "ETCDCTL_ENDPOINTS": server.endpoint,
        "ETCDCTL_API": "3",
    }


def run(text: str, kind: str, server: Etcd, folder: Path) -> str:
    """What a program prints, or the commands of a session on both streams."""
    text = text.replace("etcd-0:2379", server.endpoint)
    text = text.replace('"etcd-0", port=2379', f'"{server.host}", port={server.port}')
    if kind == "python":
        command = [sys.executable, "-W", "error", "-c", text]
    else:
        lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        command = ["bash", "-e", "-c", "\n".join(lines)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if kind == "python" else subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
        cwd=folder,
        env=environment(server),
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "Warning" not in (done.stderr or "") and "Error" not in (done.stderr or "")
    return done.stdout.replace(server.endpoint, "etcd-0:2379")


@contextmanager
def wanted(kind: str | None, folder: Path) -> Iterator[Etcd]:
    """A server for one example; ``tls`` has certificates and users as the page tells of them."""
    tls = None
    if kind == "tls":
        pem = certificates(folder)
        tls = {"ca": pem["ca.pem"], "cert": pem["server.pem"], "key": pem["server.key"]}
    with etcd(tls=tls) as server:
        if kind == "tls":
            enable_auth(server, user="alice", password="secret1")
        yield server


@pytest.mark.parametrize("example", examples())
def test_an_example_prints_what_the_page_says(example: re.Match[str], tmp_path: Path) -> None:
    with wanted(example["server"], tmp_path) as server:
        printed = run(example["text"], example["kind"], server, tmp_path)
    expected = example["output"] or ""
    if example["kind"] == "console":
        lines = example["text"].splitlines()
        expected = "\n".join(line for line in lines if not line.startswith("$ "))
    assert normal(printed) == normal(expected)


def test_the_commands_of_the_readme_record_and_list(tmp_path: Path) -> None:
    session, program = re.findall(r"^```(?:console|python)\n(.*?)^```", CLUSTER, re.M | re.S)
    export, start, look = (line.removeprefix("$ ") for line in session.splitlines())
    assert export.startswith("export FASTPORTS_ETCD_ENDPOINTS=") and start.endswith(" &")
    with etcd() as server:
        assert run(program, "python", server, tmp_path).splitlines() == ["held", "['decode-0']"]
        assert server.keys() == []
        # the shell's own job, listed once it serves, ended by its own pid
        lines = [
            start,
            f"for i in {{1..100}}; do {look} | grep web && break; sleep 0.1; done",
            "kill $!",
            "wait $! || true",
        ]
        printed = run("\n".join(f"$ {line}" for line in lines), "console", server, tmp_path)
        assert re.search(r"^\d{5} +tcp .* web$", printed, re.M)
        assert server.keys() == []


@pytest.mark.skipif("FASTPORTS_TEST_ETCD" in os.environ, reason="the figures are of etcd 3.5")
def test_the_figures_for_sizing_are_those_of_real_records() -> None:
    table = PAGE[PAGE.index("**Sizing.**") : PAGE.index("**Compaction")]
    key_size, value_size, fleet, churn = map(float, re.findall(r"\| ([\d.]+)(?: MB)? \|", table))
    longer = 2 * (len(os.uname().nodename) - 10)
    with etcd() as server:
        before = size_of(server)
        with EtcdRegistry(server.endpoint) as registry:
            blocks = [
                block(20000 + 8 * i, 8, label="decode-dp0", metadata={"model": "m"})
                for i in range(500)
            ]
            for start in range(0, 500, 100):
                assert not registry.claim(
                    blocks[start : start + 100], search=(20000, 29999), timeout=10
                )
            pair = server.ctl("get", "--prefix", "v1/", "--limit=1").encode().split(b"\n")
            # etcd commits, and counts, a moment later
            wait_for(lambda: 2 * (size_of(server) - before) / (fleet * 1e6) > 0.6)
            grown = size_of(server) - before
            registry.release(blocks)
            wait_for(lambda: 60 * 2 * (size_of(server) - before) / (churn * 1e6) > 0.6)
            churned = size_of(server) - before
    assert abs(len(pair[0]) - key_size) <= 2
    assert abs(len(pair[1]) - longer - value_size) <= 20
    assert 2 * grown / (fleet * 1e6) < 1.6
    assert 60 * 2 * churned / (churn * 1e6) < 1.6


def size_of(server: Etcd) -> int:
    # What it has taken may wait for 100 ms, and longer on a busy machine, to become pages of its
    # file, which alone are counted. A hash is made of all of them.
    with grpc.insecure_channel(server.endpoint) as channel:
        etcd3.etcdrpc.MaintenanceStub(channel).Hash(etcd3.etcdrpc.HashRequest(), timeout=20)
    status = json.loads(server.ctl("endpoint", "status", "--write-out=json"))
    return int(status[0]["Status"]["dbSizeInUse"])
