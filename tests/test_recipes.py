"""Every recipe runs as the page has it: with the program itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import standins
from worlds import can_bind, network, wait_until

from fastports import Entry, entries

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
TORCH = importlib.util.find_spec("torch") is not None

REAL_TRAINING = """\
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
one = torch.ones(1)
torch.distributed.all_reduce(one)
assert one.item() == 2
torch.distributed.destroy_process_group()
"""
TRAINING = """\
import os, socket, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
assert os.environ["WORLD_SIZE"] == "2"
if os.environ["RANK"] == "0" and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    store.bind(("", address[1]))
    store.listen()
    store.accept()
else:
    until = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(address)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)
"""


def blocks(heading: str, language: str) -> list[str]:
    """The code below a heading, as the page has it."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


class Recipe:
    """A shell block under way, and what the stand-ins in it have told."""

    def __init__(self, process: subprocess.Popen[str], told: Path) -> None:
        self.process = process
        self._told = told

    def programs(self, count: int) -> list[dict[str, Any]]:
        """What the programs have bound, once so many have told."""

        def lines() -> list[str]:
            assert self.process.poll() is None, self.process.communicate()
            return self._told.read_text().splitlines() if self._told.exists() else []

        wait_until(lambda: len(lines()) >= count, f"{count} programs")
        return [json.loads(line) for line in lines()]

    def held(self, label: str) -> list[Entry]:
        """The blocks of this recipe by the beginning of their labels, in port order."""
        mine = [entry for entry in entries() if group_of(entry.pid) == self.process.pid]
        return [entry for entry in mine if entry.label.startswith(label)]


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:  # another test's, gone since
        return 0


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Other tests may have left no 64 free ports in a row: as root each recipe has its own."""
    with network() if os.geteuid() == 0 else nullcontext():
        yield


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "programs"
    folder.mkdir()
    (tmp_path / "train.py").write_text(REAL_TRAINING if TORCH else TRAINING)
    return standins.install(folder, real=("torchrun",) if TORCH else ())


@pytest.fixture
def recipe(environment: dict[str, str], tmp_path: Path) -> Callable[[str], Any]:
    @contextmanager
    def running(block: str) -> Iterator[Recipe]:
        process = subprocess.Popen(
            ["bash", "-euc", block],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
        )
        with process:
            try:
                yield Recipe(process, Path(environment["STANDINS"]))
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                process.communicate(timeout=30)

    return running


def run(block: str, environment: dict[str, str], folder: Path, seconds: float = 90) -> str:
    """A block that ends by itself; its output."""
    done = subprocess.run(
        ["bash", "-euc", block],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    assert done.returncode == 0, done
    return done.stdout


def is_held(entry: Entry, options: list[int]) -> bool:
    return not any(can_bind(port, options=options) for port in entry.ports)


def test_a_vllm_engine_binds_the_whole_of_what_it_was_given(recipe: Callable[[str], Any]) -> None:
    first, _ = blocks("vLLM", "bash")
    with recipe(first) as running:
        (engine,) = running.programs(1)
        held = {entry.label: entry for entry in running.held("decode-0")}
        assert set(held) == {f"decode-0-{name}" for name in ("http", "nixl", "kv", "internal")}
        for name in ("http", "nixl", "kv"):
            assert engine["ports"][name] == list(held[f"decode-0-{name}"].ports)
        assert engine["ports"]["internal"] == list(held["decode-0-internal"].ports)[:2]
        # vLLM sets SO_REUSEPORT on its API port
        assert is_held(held.pop("decode-0-http"), [])
        assert all(is_held(entry, [socket.SO_REUSEPORT]) for entry in held.values())


def test_four_vllm_engines_have_ports_of_their_own(recipe: Callable[[str], Any]) -> None:
    _, second = blocks("vLLM", "bash")
    with recipe(second) as running:
        engines = running.programs(4)
        used = [port for one in engines for ports in one["ports"].values() for port in ports]
        assert len(used) == len(set(used)) == 8
        assert sorted(used) == sorted(e.first for e in running.held("decode-"))
        os.kill(engines[0]["pid"], signal.SIGKILL)
        again = running.programs(5)[-1]
        assert again["ports"] == engines[0]["ports"]


@pytest.mark.parametrize("number", [0, 1])
def test_sglang_meets_on_a_port_that_is_held(recipe: Callable[[str], Any], number: int) -> None:
    block = blocks("SGLang", "bash")[number]
    with recipe(block) as running:
        (server,) = running.programs(1)
        held = {entry.label: entry for entry in running.held("")}
        for name, ports in server["ports"].items():
            assert ports == list(held[name].ports)[: len(ports)]
        assert set(server["ports"]) == set(held) == {"http", ("nccl", "dist")[number]}


def test_dynamo_workers_share_nothing(recipe: Callable[[str], Any]) -> None:
    (block,) = blocks("Dynamo", "bash")
    with recipe(block) as running:
        programs = running.programs(3)
        used = [port for one in programs for ports in one["ports"].values() for port in ports]
        assert len(used) == len(set(used)) == 7
        held = [entry.first for entry in running.held("worker") + running.held("frontend")]
        assert sorted(used) == sorted(held)


@pytest.mark.parametrize("number", [0, 1])
def test_torchrun_meets_on_a_port_that_is_held(
    environment: dict[str, str], tmp_path: Path, number: int
) -> None:
    run(blocks("torchrun and MASTER_PORT", "bash")[number], environment, tmp_path)


def test_a_launcher_of_ranks_gives_the_port_to_the_first(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (block,) = blocks("torchrun and MASTER_PORT", "python")
    (tmp_path / "launch.py").write_text(block)
    run(f"{sys.executable} -W error launch.py", environment, tmp_path)


def test_ray_gets_all_its_ports_and_a_range_for_its_workers(recipe: Callable[[str], Any]) -> None:
    (block,) = blocks("Ray", "bash")
    with recipe(block) as running:
        (head,) = running.programs(1)
        used = [port for ports in head["ports"].values() for port in ports]
        held = [port for entry in running.held("ray-") for port in entry.ports]
        assert len(set(used)) == 10 and set(used) <= set(held) and len(held) == 72


RAY_DRIVER = """\
import json, psutil, ray
from fastports import entries
ray.init(address="auto", log_to_driver=False)

@ray.remote
def work(number):
    return number * number

assert ray.get([work.remote(number) for number in range(8)])[7] == 49
listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
held = {entry.label: list(entry.ports) for entry in entries()}
print(json.dumps([sorted(listening), held]), flush=True)
"""


@pytest.mark.skipif(
    not os.environ.get("FASTPORTS_REAL_RAY"), reason="half a minute; set FASTPORTS_REAL_RAY"
)
@pytest.mark.skipif(os.geteuid() != 0, reason="Ray gets a network of its own, as root has them")
def test_the_real_ray_runs_tasks_on_the_ports_it_was_given(
    environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    (tmp_path / "driver.py").write_text(RAY_DRIVER)
    (tmp_path / "programs" / "bin" / "ray").unlink()
    (block,) = blocks("Ray", "bash")
    block = block.replace("ray start --head --block", "sh -c 'ray start --head")
    block = block.rstrip() + f" >&2 && {sys.executable} driver.py'"
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # for the names of UNIX sockets
        environment |= {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        listening, held = json.loads(run(block, environment, tmp_path, seconds=240))
    assert len(held["ray-worker"]) == 64 and set(held["ray-worker"]) & set(listening)
    # the dashboard, its agents and the metrics come with ray[default] only
    assert all(held[f"ray-{name}"][0] in listening for name in ("gcs", "node", "objects"))


def test_each_xdist_worker_has_a_server(environment: dict[str, str], tmp_path: Path) -> None:
    (block,) = blocks("pytest-xdist, a server for each worker", "python")
    (tmp_path / "test_api.py").write_text(block)
    command = f"{sys.executable} -m pytest -q -n 2 -p no:cacheprovider test_api.py"
    assert "8 passed" in run(command, environment, tmp_path)


@pytest.mark.parametrize(("number", "output"), [(0, "HTTP/1.0 200 OK\n"), (1, "2 up\n")])
def test_a_bash_launcher_waits_until_it_listens(
    environment: dict[str, str], tmp_path: Path, number: int, output: str
) -> None:
    block = blocks("A launcher in Bash", "bash")[number]
    assert run(block, environment, tmp_path) == output


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_with_jq_it_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    (line,) = re.findall(r"`(port=\$\(jq .*?<&3\))`", PAGE)
    block = blocks("A launcher in Bash", "bash")[0]
    before, _, after = block.partition("while read")
    after = after.partition("port=${BASH_REMATCH[1]}\n")[2]
    assert run(f"{before}{line}\n{after}", environment, tmp_path) == "HTTP/1.0 200 OK\n"


def unit() -> str:
    (text,) = blocks("systemd", "ini")
    return text


def test_the_command_of_the_unit_runs_and_reloads(
    recipe: Callable[[str], Any], tmp_path: Path
) -> None:
    (command,) = re.findall(r"^ExecStart=(.*)$", unit(), re.MULTILINE)
    with recipe(f"RUNTIME_DIRECTORY={tmp_path}; exec {command}") as running:

        def up() -> list[int]:
            report = tmp_path / "ports"
            text = report.read_text() if report.exists() else ""
            changes = map(json.loads, text.splitlines())
            return [change["pid"] for change in changes if change["state"] == "listening"]

        wait_until(lambda: len(up()) == 2, "two servers")
        os.kill(running.process.pid, signal.SIGHUP)
        wait_until(lambda: len(set(up())) == 4, "two others")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "servers.service"
    path.write_text(unit())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True
    )
    assert "servers.service" not in done.stderr, done.stderr


def test_every_recipe_of_the_page_has_a_test() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    tests = Path(__file__).read_text()
    by_documentation = {"systemd", "Docker", "Kubernetes with hostNetwork"}
    for heading in headings:
        assert heading in by_documentation or f'blocks("{heading}"' in tests, heading
