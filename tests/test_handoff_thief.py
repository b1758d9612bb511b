"""Held ports are handed over under attack, and nobody but the program gets in."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from programs import program

import fastports

HERE = Path(__file__).parent
ADDRESSES = [
    (socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"),
    (socket.AF_INET6, "::"), (socket.AF_INET6, "::1"),
]  # fmt: skip


def attempt(port: int, family: int, address: str, *options: int) -> bool:
    """Whether a stranger gets the port and listens."""
    with socket.socket(family) as sock:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            sock.bind((address, port))
            sock.listen()
        except OSError:
            return False
        return True


def attack(ports: list[int], stop: threading.Event) -> Iterator[tuple[int, str, int]]:
    """Every way in that a closed and an open door have in common, until told to stop."""
    while not stop.is_set():
        for port in ports:
            for family, address in ADDRESSES:
                for options in ((), (socket.SO_REUSEPORT,)):
                    if attempt(port, family, address, *options):
                        yield port, address, len(options)
            with socket.socket() as client, contextlib.suppress(OSError):
                client.bind(("127.0.0.1", 0))
                if client.getsockname()[1] in ports:
                    yield port, "bind(0)", 0


def test_c01_c03_children_that_bind_late_get_their_ports_under_attack() -> None:
    code = """
import json, sys
import fastports
from programs import program
blocks = [fastports.allocate(1) for _ in range(5)]
print(json.dumps([block.first for block in blocks]), flush=True)
sys.stdin.readline()
command = program("late", "{port}", "3")
children = [block.spawn(command, wait=None, handoff="door") for block in blocks]
for child in children:
    child.wait_listening(60)
print("up", flush=True)
sys.stdin.readline()
for child in children:
    child.terminate()
for child in children:
    child.stop()
for block in blocks:
    block.release()
"""
    launchers = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(HERE)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(8)
    ]  # fmt: skip
    stop = threading.Event()
    stolen: list[tuple[int, str, int]] = []
    answers: list[str] = []
    with contextlib.ExitStack() as stack:
        for launcher in launchers:
            stack.enter_context(launcher)
        ports: list[int] = []
        for launcher in launchers:
            assert launcher.stdout is not None
            ports += json.loads(launcher.stdout.readline())
        assert len(set(ports)) == 40
        thief = threading.Thread(target=lambda: stolen.extend(attack(ports, stop)))
        thief.start()
        try:
            for launcher in launchers:
                assert launcher.stdin is not None
                launcher.stdin.write("go\n")
                launcher.stdin.flush()
            for launcher in launchers:
                assert launcher.stdout is not None
                answers.append(launcher.stdout.readline())
        finally:
            stop.set()
            thief.join()
        # with every child listening the doors are closed: no option gets in any more
        for port in ports:
            for family, address in ADDRESSES[::2]:
                options = socket.SO_REUSEADDR, socket.SO_REUSEPORT
                if attempt(port, family, address, *options):
                    stolen.append((port, address, 2))
        for launcher in launchers:
            launcher.communicate("end\n", timeout=60)
    assert answers == ["up\n"] * 8
    assert stolen == []


def test_c19_every_connection_is_served_by_the_child() -> None:
    with (
        fastports.allocate(1) as block,
        block.spawn(program("server", "{port}"), wait=None, handoff="door") as child,
    ):
        child.wait_listening()
        block.open_door()  # as in the last instant before it is closed
        served = set()
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", block.first), timeout=10) as client:
                served.add(client.makefile().read())
        assert served == {str(child.pid)}


def test_a_port_is_nobodys_between_two_runs_of_a_server_that_crashes() -> None:
    stolen: list[tuple[int, str, int]] = []
    stop = threading.Event()
    with fastports.allocate(1) as block:
        thief = threading.Thread(target=lambda: stolen.extend(attack([block.first], stop)))
        thief.start()
        try:
            for _ in range(5):
                with block.spawn(program("server", "{port}"), handoff="door") as child:
                    child.kill()
                    child.wait(10)
        finally:
            stop.set()
            thief.join()
    assert stolen == []
