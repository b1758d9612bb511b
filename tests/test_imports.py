"""Who imports whom, what an import costs others, and what it leaves alone."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastports

PACKAGE = Path(fastports.__file__).parent
ROOT = Path(__file__).parent.parent

HEAVY = {
    "asyncio", "concurrent.futures", "dataclasses", "etcd3", "grpc", "inspect", "json", "logging",
    "multiprocessing", "numpy", "pathlib", "random", "re", "selectors", "signal", "socket", "ssl",
    "subprocess", "tempfile", "tenacity", "threading", "typing", "urllib",
}  # fmt: skip


# --- the table of ARCHITECTURE.md -----------------------------------------------------------------


def modules() -> dict[str, Path | None]:
    """Every module of the package by its dotted name; None stands for compiled ones."""
    found: dict[str, Path | None] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for path in PACKAGE.glob("*.pyx"):
        found[f"fastports.{path.stem}"] = None
    return found


MODULES = modules()


def imported(name: str, path: Path) -> Iterator[str]:
    """Modules of the package that one of them imports, at any depth, but not for types alone."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                for other in child.orelse:
                    yield from visit(other)
            elif isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join(parents + ([child.module] if child.module else []))
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    yield full if full in MODULES else base
            else:
                yield from visit(child)

    for target in visit(ast.parse(path.read_text())):
        if target in MODULES and target != name:
            yield target


def rows() -> list[tuple[set[str], set[str]]]:
    """``(rooms, what they may import)`` of each row of the table, from top to bottom."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("| room |") : text.index("## A call")]
    found = []
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        first, _, third = (cell.strip() for cell in line.strip("|").split("|"))
        rooms = set(re.findall(r"`([\w/]+)`", re.sub(r"\(.*?\)", "", first)))
        allowed = set(re.findall(r"[\w/]+", third))
        found.append((rooms, allowed))
    return found


ROWS = rows()

DECLARATIONS = {"_sys", "_linux", "_seccomp"}  # of the C library and the kernel


def room_of(module: str) -> str:
    """The room in which a module stands: itself, or its folder."""
    if module == "fastports":
        return "fastports"
    parts = module.split(".")[1:]
    folder = PACKAGE / parts[0]
    return f"{parts[0]}/" if folder.is_dir() else parts[0]


def test_every_module_has_a_room_in_the_table_and_every_room_a_module() -> None:
    rooms = [room for found, _ in ROWS for room in found]
    assert len(rooms) == len(set(rooms)) > 30
    assert {room_of(module) for module in MODULES} == set(rooms)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_what_its_row_allows(module: str) -> None:
    path = MODULES[module]
    room = room_of(module)
    (own, allowed) = next(row for row in ROWS if room in row[0])
    if path is None:
        text = (PACKAGE / f"{module.rpartition('.')[2]}.pyx").read_text()
        lines = re.findall(r"^\s*((?:from|c?import)\s.*\b(?:fastports|\.).*)$", text, re.MULTILINE)
        for line in lines:
            if re.search(r"\bfastports\b|(?:from|import)\s+\.", line):
                assert set(re.findall(r"\b_[a-z]+\b", line)) <= allowed | DECLARATIONS, line
        return
    names = {each.rstrip("/") for each in own | allowed}
    wrong = [
        target for target in imported(module, path) if room_of(target).rstrip("/") not in names
    ]
    assert wrong == []


def test_the_table_allows_only_rooms_that_stand_above() -> None:
    above: set[str] = set()
    known = {room.rstrip("/") for found, _ in ROWS for room in found}
    upwards = []
    for rooms, allowed in ROWS:
        upwards += [
            (room, name)
            for room in sorted(rooms)
            for name in sorted((allowed & known) - above - {each.rstrip("/") for each in rooms})
        ]
        above |= {room.rstrip("/") for room in rooms}
    assert upwards == [("block", "handoff"), ("block", "passing")]


def test_only_the_etcd_rooms_import_its_client() -> None:
    wrong = []
    for module, path in MODULES.items():
        if path is None or module.startswith("fastports.etcd"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            wrong += [
                (module, name)
                for name in names
                if name.split(".")[0] in ("etcd3", "grpc", "tenacity", "google")
                and module != "fastports.retry"
            ]
    assert wrong == []


# --- what an import does --------------------------------------------------------------------------


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=60
    )


def loaded(program: str) -> set[str]:
    """Modules that ``program`` loads on top of a bare interpreter's."""
    text = (
        "import sys, os, errno, __future__\nbefore = set(sys.modules)\n"
        f"sys.path[:0] = {[str(PACKAGE.parent), *sys.path]!r}\n{program}\n"
        "found = sorted(set(sys.modules) - before)\nimport json\nprint(json.dumps(found))\n"
    )
    done = run(text, "-I", "-S")
    assert done.returncode == 0, done.stderr
    # Cython makes modules for what compiled ones share
    return {name for name in json.loads(done.stdout) if "cython" not in name}


def test_the_import_loads_nothing_heavy() -> None:
    found = loaded("import fastports")
    assert found & HEAVY == set()
    assert all(name.split(".")[0] == "fastports" for name in found), found


def test_allocate_and_release_load_nothing_more() -> None:
    found = loaded(
        "import fastports\n"
        "with fastports.allocate(8, label='x') as block: block.open_door(); block.close_door()\n"
        "fastports.reserve(block.first).release()\n"
    )
    assert found & (HEAVY - {"json"}) == set()
    assert all(name.split(".")[0] == "fastports" for name in found), found


def test_the_import_opens_nothing_and_starts_nothing() -> None:
    done = run(
        "import os, sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "import threading\n"
        "look = lambda: (sorted(os.listdir('/proc/self/fd')), os.listdir('/proc/self/task'),"
        " dict(os.environ), sys.argv, sys.excepthook, os.getcwd())\n"
        "before = look()\n"
        "import fastports\n"
        "assert look() == before\n",
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_core_is_a_loud_import_error_with_the_command_to_type(tmp_path: Path) -> None:
    copy = tmp_path / "fastports"
    copy.mkdir()
    for path in PACKAGE.glob("*.py"):
        (copy / path.name).write_text(path.read_text())
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fastports", "-I", "-S")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and "pip install" in last
    assert "_core" in last


def test_everything_that_is_public_exists_and_is_listed() -> None:
    for name in fastports.__all__:
        assert getattr(fastports, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'alocate'"):
        fastports.alocate  # noqa: B018
