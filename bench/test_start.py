"""What a fresh interpreter pays: import, ``fastports run``, ``fastports ls``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .rivals import Installed
from .table import Rival, Table
from .test_scale import HELD, hold_singly


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("environment"))


@pytest.fixture(autouse=True)
def away_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -c`` puts the working folder first on its path: not the sources, please."""
    monkeypatch.chdir(tmp_path)


def test_import(benchmark: Any, table: Table, installed: Installed) -> None:
    table.compare(
        benchmark,
        "import fastports",
        installed.python("import fastports"),
        [
            Rival("python -c pass", installed.python("pass"), "more", 2e-3),
            Rival("import socket", installed.python("import socket"), "more"),
            Rival("import portpicker", installed.python("import portpicker"), "more"),
        ],
        seconds=20,
    )


def test_run_true(benchmark: Any, table: Table, installed: Installed) -> None:
    if not installed.has_cli:
        pytest.skip("there is no fastports.cli")
    table.compare(
        benchmark,
        "fastports run -q -- true",
        installed.command("run", "-q", "--wait", "0", "--", "true"),
        [Rival("python -c pass", installed.python("pass"), "more", 20e-3)],
        seconds=10,
    )


@pytest.mark.usefixtures("crowd", "descriptors")
def test_ls_with_ten_thousand_entries(
    benchmark: Any, table: Table, helpers: Any, installed: Installed
) -> None:
    holders = [helpers("holder.py") for _ in range(2)]
    assert hold_singly(holders) == HELD
    work, subject = "fastports ls, 10,000 entries", installed.command("ls")
    if not installed.has_cli:
        work = "entries(), 10,000 of them"
        subject = installed.python("import fastports; list(fastports.entries())")
    table.compare(
        benchmark,
        work,
        subject,
        [Rival("python -c pass", installed.python("pass"), "more", 150e-3)],
        seconds=8,
    )
