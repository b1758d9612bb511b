"""Every example of the README runs, as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commanding import COMMAND

import fastports

README = Path(__file__).parent.parent / "README.md"
PYTHON = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
PYTHON = [source for source in PYTHON if "etcd" not in source]  # tests/etcd/test_docs_etcd.py


def test_the_readme_has_examples() -> None:
    assert len(PYTHON) >= 3


@pytest.mark.parametrize("source", PYTHON, ids=lambda source: source.split("\n")[2][:40])
def test_a_python_example_runs_without_error_or_warning(source: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(source.replace('"python3"', repr(sys.executable)))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


# --- the command line -----------------------------------------------------------------------------

CONSOLE = re.findall(r"^```console\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
LINES = [
    line.removeprefix("$ ").partition(" #")[0].strip()
    for block in CONSOLE
    for line in block.splitlines()
    if line.startswith("$ fastports") and "etcd" not in line and not line.endswith("&")
]

# listens on the ports that stand behind its options, as an engine would
SERVE = """
import socket, sys, time
held = []
for number in map(int, filter(str.isdigit, sys.argv)):
    held.append(socket.create_server(("", number)))
time.sleep(100)
"""


def test_the_readme_shows_the_commands() -> None:
    assert {line.split()[1] for line in LINES} >= {"run", "ls", "probe", "map", "top", "doctor"}


def test_the_two_commands_install_and_run_what_there_is() -> None:
    first, second, *_ = (line for block in CONSOLE for line in block.splitlines() if "pip" in line)
    assert first.endswith("fastports run -- python3 -m http.server {port}")
    assert "'.[test]'" in second and second.endswith("-m pytest -n 2")


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_does_what_it_says(line: str, tmp_path: Path) -> None:
    (tmp_path / "serve").write_text(f"#!{sys.executable} -S\n{SERVE}")
    (tmp_path / "serve").chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": ""}
    words = [*COMMAND, *shlex.split(line)[1:]]
    with fastports.allocate(1, label="seen"), subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True, env=environ, cwd=tmp_path, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        if words[len(COMMAND)] == "top":  # goes on until it is told not to
            assert process.stdout.readline().startswith("fastports top")
            os.killpg(process.pid, signal.SIGINT)
        elif words[len(COMMAND)] == "run":
            told, wanted = "", 2 if "--count" in words else 1
            while told.count("listen") < wanted:
                more = process.stderr.readline()
                assert more, told
                told += more
            os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode in (0, 1, 130, 128 + signal.SIGTERM)
    if words[len(COMMAND)] in ("ls", "probe", "map", "doctor"):
        assert out and process.returncode in (0, 1), err
    if words[len(COMMAND)] == "ls":
        assert "seen" in out
