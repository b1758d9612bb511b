"""What is shipped: the sdist, the wheel made from it, and that wheel installed elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from worlds import can_bind

ROOT = Path(__file__).parent.parent
EXTENSIONS = sorted(path.stem for path in (ROOT / "fastports").glob("*.pyx"))

needs_builder = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("Cython", "setuptools", "pip"))),
    reason="needs Cython, setuptools and pip in this environment to build without a network",
)


def command(*words: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env},
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def copy_of_the_sources(folder: Path) -> Path:
    """Without what was built or left there: no object, no C, no environment."""
    ignore = shutil.ignore_patterns(
        ".*", "*.so", "*.c", "__pycache__", "*.egg-info", "build", "dist", "*.html"
    )
    shutil.copytree(ROOT, folder, ignore=ignore)
    for path in (ROOT / "bench").glob("*.c"):
        shutil.copy(path, folder / "bench")
    return folder


def test_setup_py_is_short() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) < 40


def test_numpy_is_declared_and_not_needed_to_build() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^dependencies = \["numpy', text, re.MULTILINE)
    requires = re.search(r"^requires = \[(.*)\]", text, re.MULTILINE)
    assert requires is not None and "numpy" not in requires[1]


@needs_builder
def test_the_wheel_made_from_the_sdist_works_where_it_is_installed(tmp_path: Path) -> None:
    sources = copy_of_the_sources(tmp_path / "sources")
    command(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path / "dist", cwd=sources)
    (sdist,) = (tmp_path / "dist").glob("fastports-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        archive.extractall(tmp_path / "unpacked")
    for extension in EXTENSIONS:
        assert f"fastports/{extension}.pyx" in names and f"fastports/{extension}.pyi" in names
    assert not [name for name in names if re.match(r"fastports/.*\.(c|so|html)$", name)]
    assert {"fastports/_sys.pxd", "fastports/py.typed", "LICENSE", "README.md"} <= set(names)

    (unpacked,) = (tmp_path / "unpacked").iterdir()
    command(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps",
            "--no-index", "-w", tmp_path / "dist", unpacked, cwd=tmp_path,
            FASTPORTS_WERROR="1")  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    suffixes = {name for name in names if name.endswith(".so")}
    assert len(suffixes) == len(EXTENSIONS)
    assert not [name for name in names if name.endswith((".c", ".pyx", ".pxd"))]
    assert {"fastports/py.typed", "fastports/_core.pyi", "pytest_fastports.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "bench", "docs"))]

    home = tmp_path / "elsewhere"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    command(sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps",
            "--no-index", wheel, cwd=home)  # fmt: skip
    where = command(
        python, "-I", "-c",
        "import fastports\n"
        "with fastports.allocate(8) as block: assert len(block) == 8\n"
        "assert block.owner.pid not in [entry.pid for entry in fastports.entries()]\n"
        "print(fastports.__file__)", cwd=home,
    )  # fmt: skip
    assert where.startswith(str(home))
    assert_it_serves_and_leaves_nothing(home / "bin" / "fastports", python)


def assert_it_serves_and_leaves_nothing(fastports: Path, python: Path) -> None:
    """The README's first command, from the last word of it on."""
    words = [str(fastports), "run", "--", str(python), "-m", "http.server", "{port}"]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        cwd=python.parent, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        told = ""
        while "listens" not in told:
            line = process.stderr.readline()
            assert line, told
            told += line
        found = re.search(r"\bport (\d+)", told)
        assert found is not None, told
        port = int(found[1])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
            assert answer.status == 200
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does
        process.stderr.read()
        assert process.wait(30) == 0  # http.server's own status after a Ctrl-C
    # over the connection of this test, which may be in TIME_WAIT
    assert can_bind(port, options=[socket.SO_REUSEADDR])
