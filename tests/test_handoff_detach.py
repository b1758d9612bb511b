"""Children that outlive their launcher, and what keeps their ports from others meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokering import enter, until
from programs import program
from test_handoff import asked, runs

import fastports
from fastports.handoff import DEVNULL

LAUNCHER = """
import os, sys
import fastports
block = fastports.allocate(2, label="stays")
argv = sys.argv[3:]
child = block.spawn(argv, handoff=sys.argv[1], detach=True, wait=None, stdout=-3, stderr=-3)
print(child.pid, block.first, child.mode, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


def leave(handoff: str, how: str, argv: list[str]) -> tuple[int, int, str]:
    """Pid, first port and mode of a child whose launcher has ended."""
    words = [sys.executable, "-c", LAUNCHER, handoff, how, *argv]
    done = subprocess.run(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == (0 if how == "ends" else -9)
    pid, port, mode = done.stdout.decode().split()
    return int(pid), int(port), mode


@pytest.fixture
def left() -> Iterator[list[int]]:
    """Pids of children to be ended after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not runs(pid))  # type: ignore[misc]


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_a_detached_child_runs_on_and_its_ports_are_its_own_until_it_ends(
    how: str, left: list[int]
) -> None:
    pid, port, mode = leave("auto", how, program("server", "{port}"))
    left.append(pid)
    assert mode == "close"
    until(lambda: answers(port, pid))
    with pytest.raises(fastports.PortsUnavailable):  # nobody listens on it, only its marker stands
        fastports.reserve(port + 1)
    shown = [entry for entry in fastports.entries() if entry.pid == pid]
    assert [(e.first, e.last, e.label, e.alive) for e in shown] == [(port, port + 1, "stays", True)]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not runs(pid))
    until(lambda: [entry for entry in fastports.entries() if entry.pid == pid] == [])
    fastports.reserve(range(port, port + 2)).release()


def answers(port: int, pid: int) -> bool:
    try:
        return asked(port) == pid
    except OSError:
        return False


def test_before_a_detached_child_binds_its_ports_are_kept_from_every_other_user(
    left: list[int],
) -> None:
    pid, port, _ = leave("auto", "ends", program("never"))
    left.append(pid)
    for taken in (port, port + 1):
        with pytest.raises(fastports.PortsUnavailable) as refused:
            fastports.reserve(taken)
        assert refused.value.cause == "marked"


def test_a_detached_child_with_the_sockets_themselves_holds_them_alone(left: list[int]) -> None:
    pid, port, mode = leave("fd", "killed", program("never"))
    left.append(pid)
    assert mode == "fd"
    for taken in (port, port + 1):
        assert enter("0.0.0.0", taken, reuse_address=True, reuse_port=True) is None
    assert [entry.pid for entry in fastports.entries() if entry.first == port] == [pid]


def test_a_detached_child_has_a_session_of_its_own_and_no_end_of_the_launchers(
    left: list[int],
) -> None:
    pid, _, _ = leave("auto", "ends", program("never"))
    left.append(pid)
    assert os.getsid(pid) == pid
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert [link for link in links if link.startswith("pipe:")] == []
    assert sum(link.startswith("socket:") for link in links) == 3  # two markers and the entry


def test_a_program_that_cannot_be_executed_leaves_the_block_held_and_no_marker() -> None:
    with fastports.allocate(1) as block:
        with pytest.raises(FileNotFoundError):
            block.spawn(["/nonexistent/program"], detach=True)
        with pytest.raises(OSError):
            block.spawn(["/bin/true"], cwd="/nonexistent", detach=True)
        assert block.state == "held"
        with block.spawn(program("server", "{port}"), handoff="door") as child:
            assert asked(block.first) == child.pid
    fastports.reserve(block.first).release()


def test_stop_and_with_end_a_detached_child_too() -> None:
    with fastports.allocate(1) as block:
        with block.spawn(program("server", "{port}"), detach=True) as child:
            assert asked(block.first) == child.pid
        assert child.returncode is not None
        # the markers stand: a plain program can be started again
        with block.spawn(program("server", "{port}"), detach=True) as child:
            assert asked(block.first) == child.pid
    fastports.reserve(block.first).release()


@pytest.mark.parametrize(
    "options",
    [
        {"handoff": "broker"},
        {"handoff": "bind-door"},
        {"handoff": "door"},
        {"exclusive": True},
        {"foreground": True},
    ],
)
def test_what_ends_with_the_launcher_cannot_be_detached(options: dict[str, object]) -> None:
    with fastports.allocate(1) as block:
        with pytest.raises(fastports.InvalidRequest, match="detach=True"):
            block.spawn(program("never"), detach=True, stdin=DEVNULL, **options)
        assert block.state == "held"
