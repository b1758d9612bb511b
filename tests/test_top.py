"""``fastports top``: who holds, who listens, as it changes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from commanding import COMMAND, fastports, running, terminal
from programs import program
from worlds import network, root_only

import fastports as package
from fastports.scene import Scene


def looked(label: str) -> Any:
    """What one look says of the blocks with this label."""
    (line,) = fastports("top", "--once", "--json").stdout.splitlines()
    (found,) = [block for block in json.loads(line)["blocks"] if block["label"] == label]
    return found


def test_a_block_is_held_then_partly_up_then_up() -> None:
    label = f"stages-{os.getpid()}"
    with package.allocate(2, label=label) as block:
        seen = looked(label)
        assert (seen["first"], seen["last"], seen["pid"]) == (block.first, block.last, os.getpid())
        assert (seen["state"], seen["listeners"]) == ("held", [])
        with block.spawn(program("several", "{port0}"), handoff="door") as child:
            seen = looked(label)
            assert seen["state"] == "partly"
            (listener,) = seen["listeners"]
            assert (listener["pid"], listener["port"]) == (child.pid, block.first)
            assert (listener["name"], listener["related"]) == ("python", True)
        with block.spawn(program("several", "{port0}", "{port1}"), handoff="door"):
            assert looked(label)["state"] == "up"
        assert looked(label)["state"] == "held"


@pytest.mark.parametrize("protocol", ["udp", "both"])
def test_a_udp_hold_is_no_listener_and_a_server_is(protocol: str) -> None:
    label = f"{protocol}-{os.getpid()}"
    with package.allocate(1, protocol=protocol, label=label) as block:
        assert looked(label)["state"] == "held"
        with block.spawn(program(protocol, "{port}"), handoff="door") as child:
            seen = looked(label)
            assert seen["state"] == "up"
            assert {listener["pid"] for listener in seen["listeners"]} == {child.pid}


def test_a_grandchild_is_no_stranger_and_a_stranger_is_one() -> None:
    label = f"who-{os.getpid()}"
    with (
        package.allocate(1, label=label) as block,
        block.spawn(program("worker", "{port}"), handoff="door") as child,
    ):
        seen = looked(label)
        assert seen["state"] == "up"
        assert child.pid not in {listener["pid"] for listener in seen["listeners"]}
    # a stranger: a process whose parent is not the owner of the entry
    code = f"""
import fastports, sys
block = fastports.allocate(1, label={label!r})
block.open_door()
print(block.first, flush=True)
sys.stdin.read()
block.release()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        with socket.socket() as mine:
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            mine.bind(("", int(owner.stdout.readline())))
            mine.listen()
            seen = looked(label)
            shown = fastports("top", "--once").stdout
        owner.stdin.close()
    assert (seen["state"], seen["listeners"][0]["pid"]) == ("stranger", os.getpid())
    (row,) = [line for line in shown.splitlines() if label in line]
    assert f"({os.getpid()})!" in row


def test_a_table_a_look_until_ctrl_c() -> None:
    with running("top", "--interval", "0.1") as command:
        for _ in range(3):
            command.line("fastports top ")
            assert command.line("PORTS").split()[:2] == ["PORTS", "PROTO"]
        command.signal(signal.SIGINT)
        assert command.end() == 0
        assert "Traceback" not in command.rest("stderr")


def test_json_is_one_object_a_line_a_look() -> None:
    with running("top", "--interval", "0.1", "--json") as command:
        first, second = (json.loads(command.line("{")) for _ in range(2))
        command.signal(signal.SIGINT)
        assert command.end() == 0
    assert second["time"] > first["time"]


@pytest.mark.parametrize("leave", ["q", "\x03"])
def test_on_a_terminal_it_fills_the_screen_and_puts_it_back(leave: str) -> None:
    label = f"screen-{os.getpid()}"
    with package.allocate(3, label=label), terminal(*COMMAND, "top") as term:
        shown = term.expect("q quits")
        assert "\x1b[?1049h" in shown and "PORTS" in shown
        assert not termios.tcgetattr(term.fd)[3] & (termios.ECHO | termios.ICANON)
        term.type(leave)
        assert term.end() == 0
        assert termios.tcgetattr(term.fd)[3] & termios.ECHO
        assert termios.tcgetattr(term.fd)[3] & termios.ICANON
        assert "\x1b[?1049l" in term.shown and "\x1b[?25h" in term.shown


@root_only
def test_the_keys_walk_through_what_does_not_fit() -> None:
    with network():
        blocks = [package.allocate(1, label=f"walk-{i}") for i in range(100)]
        order = sorted(blocks, key=lambda block: block.first)
        with terminal(*COMMAND, "top", "--interval", "60") as term:
            term.expect("0 above, 79 below")  # of 24 lines 21 are blocks
            term.type("j")
            term.expect(f"{order[1].first}")
            term.expect("1 above, 78 below")
            term.type("\x1b[6~")
            term.expect("22 above, 57 below")
            term.type("\x1b[F")
            term.expect(f"{order[-1].first}")
            term.expect("79 above, 0 below")
            term.type("q")
            assert term.end() == 0
        for block in blocks:
            block.release()


def test_without_rich_a_terminal_gets_lines_and_is_told_why(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError('not here')\n")
    with terminal(*COMMAND, "top", env={"PYTHONPATH": str(tmp_path)}) as term:
        term.expect("pip install 'fastports[top]'")
        term.expect("PORTS")
        term.type("\x03")
        assert term.end() == 0


@root_only
def test_thousands_of_entries_are_looked_at_in_one_go() -> None:
    count = 10_000 if os.environ.get("FASTPORTS_SOAK") == "1" else 500
    code = f"""
import fastports, resource, sys
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
blocks = [fastports.allocate(1, range="2000-29999") for _ in range({count})]
print("up", flush=True)
sys.stdin.read()
for block in blocks:
    block.release()
"""
    with (
        network({"net.ipv4.ip_local_port_range": "40000 50000"}),
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner,
    ):
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdout.readline()
        found = Scene().look()
        shown = fastports("top", "--once").stdout
        owner.stdin.close()
    assert len(found) == count
    assert f" {count:,} blocks, {count:,} ports, 1 owner, {count:,} held\n" in shown


@pytest.mark.parametrize(
    "words", [("x",), ("--interval", "0"), ("--interval", "soon"), ("--interval",), ("--x",)]
)
def test_wrong_usage_is_said_in_a_line(words: tuple[str, ...]) -> None:
    assert fastports("top", *words, status=2).stderr.count("\n") == 1
