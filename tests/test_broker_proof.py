"""Servers as they are, started again and again on a held port that is under attack all the while.

The attacker binds and listens with every combination of SO_REUSEADDR and SO_REUSEPORT on the
wildcard and the loopback of both families, as fast as it can. Where the launcher has CAP_NET_RAW
nothing enters. Without it the door is open for microseconds, an attacker that fast gets in
now and then, and what is tested is that every start comes up all the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokering import until
from real_servers import SERVERS, attack, write_programs

import fastports
from fastports import _broker
from fastports.brokered import shared
from fastports.handoff import DEVNULL

WHY = _broker.probe()["broker"]
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no broker here: {WHY}")
STAYS_SHUT = _broker.stays_shut()
ASKED = os.environ.get("FASTPORTS_PROOF_STARTS")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """The programs, where every user can read them."""
    with tempfile.TemporaryDirectory(prefix="fastports-") as name:
        path = Path(name)
        path.chmod(0o755)
        write_programs(path)
        yield path


@pytest.mark.parametrize("name", SERVERS)
def test_c01_nobody_else_enters_the_port_of_a_server_that_starts_under_attack(
    place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = SERVERS[name]
    if why := server.missing():
        pytest.skip(why)
    starts = int(ASKED or (3 if server.slow else 10))
    server.prepare(place)
    counts: list[int] = []
    answered = 0
    with fastports.allocate(server.size) as block, attack(place, block.first, counts):
        server.configure(place, block.first)
        for _ in range(starts):
            # a server that asks for SO_REUSEPORT lets others of its user in, unless that is taken
            with block.spawn(
                server.command("broker"),
                handoff="broker",
                exclusive=server.shares,
                cwd=place,
                env=server.environment("broker"),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
                timeout=60,
                grace=0,
            ):
                until(lambda: server.answers(block.first), 30)
                answered += 1
            until(lambda: shared().children == 0)
    attacks, bound, entered = counts
    with capsys.disabled():
        print(f"\n{name}: {answered} starts, {attacks} attacks, {bound} bound, {entered} entered")
    assert attacks > starts
    assert answered == starts
    assert entered == 0 or not STAYS_SHUT
