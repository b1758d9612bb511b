"""What a fresh interpreter pays: import, ``fastports run``, ``fastports ls``."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from .rivals import Installed
from .table import Rival, Table
from .test_scale import hold_singly, how_many


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("environment"))


@pytest.fixture(autouse=True)
def away_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -c`` puts the working folder first on its path: not the sources, please."""
    monkeypatch.chdir(tmp_path)


def test_import(benchmark: Any, table: Table, installed: Installed) -> None:
    subject, bare = installed.python("import fastports"), installed.python("pass")
    table.compare(
        benchmark,
        "import fastports",
        subject,
        [
            Rival("python -c pass", bare, "more", 2e-3),
            Rival("import socket", installed.python("import socket"), "more"),
            Rival("import portpicker", installed.python("import portpicker"), "more"),
        ],
        seconds=20,
    )
    more = 1e6 * (median(subject.processor) - median(bare.processor))
    table.count("  processor time of it", more, "us", None)


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
    benchmark: Any, table: Table, helpers: Any, installed: Installed, smoke: bool
) -> None:
    holders = [helpers("holder.py") for _ in range(2)]
    count = how_many(smoke)
    assert hold_singly(holders, count) == count
    work, subject = f"fastports ls, {count:,} entries", installed.command("ls")
    if not installed.has_cli:
        work = f"entries(), {count:,} of them"
        subject = installed.python("import fastports; list(fastports.entries())")
    table.compare(
        benchmark,
        work,
        subject,
        [Rival("python -c pass", installed.python("pass"), "more", 150e-3)],
        seconds=8,
    )
