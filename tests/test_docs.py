"""Every program in these pages runs, prints what the page says, and leaves nothing behind.

After a change of what is printed, `python docs/fill.py` writes it into the pages anew.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
ENVIRONMENT.pop("PORTSERVER_ADDRESS", None)
PAGES = ("tutorial", "migration", "explanation", "faq", "portserver", "seeing")
BLOCK = re.compile(
    r"^```python\n(?P<source>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> list[object]:
    found: list[object] = []
    for page in PAGES:
        text = (DOCS / f"{page}.md").read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(match["source"], match["output"], id=f"{page}-line-{line}"))
    return found


def normal(text: str) -> str:
    """What stays the same from run to run: every number of five digits is a port."""
    return re.sub(r"\b\d{5}\b", "#####", text).strip()


@pytest.mark.parametrize(("source", "output"), examples())
def test_a_program_prints_what_its_page_says(
    source: str, output: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "example.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert normal(done.stdout) == normal(output or "")


SESSIONS = [
    session
    for page in ("tutorial", "cli")
    for session in CONSOLE.findall((DOCS / f"{page}.md").read_text())
]


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.split("\n")[0][2:40])
def test_a_shell_session_prints_what_its_page_says(session: str, tmp_path: Path) -> None:
    lines = session.splitlines()
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(line[2:] for line in lines if line.startswith("$ "))],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = "\n".join(line for line in lines if not line.startswith("$ "))
    assert normal(done.stdout) == normal(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fastports po", {"portserver"}),
        ("fastports probe --j", {"--json"}),
        ("fastports run --handoff bind", {"bind-door"}),
        ("fastports run --rep", {"--report", "--report-fd"}),
        ("fastports run --ma", {"--many", "--max-restarts"}),
        ("fastports run --restart on", {"on-failure"}),
        ("fastports portserver --st", {"--status"}),
        ("fastports run -- serve --h", set()),
    ],
)
def test_bash_completes_from_the_help(line: str, expected: set[str]) -> None:
    script = f"""
source {DOCS}/completion/fastports.bash
COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_fastports
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=ENVIRONMENT
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected


ZSH = """\
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1="> "; fpath=($DOCS/completion $fpath); autoload -U compinit; compinit -u -D
  zstyle ":completion:*" menu no; LISTMAX=1000; setopt nobeep; print READY'
zpty -r -m shell text '*READY*READY*'
zpty -w -n shell "$1"$'\\t'
zpty -r -m shell text "*$2*" && print found
zpty -d shell
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fastports por", "portserver"),
        ("fastports probe --js", "--json"),
        ("fastports run --report-", "--report-fd"),
        ("fastports run --max", "--max-restarts"),
        ("fastports run --handoff bi", "bind-door"),
        ("fastports run -q -- dirna", "dirname"),
    ],
)
def test_zsh_completes_from_the_help(line: str, expected: str) -> None:
    rest = expected.removeprefix(line.split()[-1])
    environment = {**ENVIRONMENT, "DOCS": str(DOCS)}
    done = subprocess.run(
        ["zsh", "-fc", ZSH, "zsh", line, rest],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.stdout == "found\n", done


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fastports por", {"portserver"}),
        ("fastports probe --js", {"--json"}),
        ("fastports run --report", {"--report", "--report-fd"}),
        ("fastports run --handoff bind", {"bind-door"}),
        ("fastports run --restart on", {"on-failure"}),
    ],
)
def test_fish_completes_from_the_help(line: str, expected: set[str], tmp_path: Path) -> None:
    done = subprocess.run(
        ["fish", "-c", f"source {DOCS}/completion/fastports.fish; complete -C {line!r}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**ENVIRONMENT, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)},
    )
    assert done.stderr == ""
    assert {offer.split("\t")[0] for offer in done.stdout.splitlines()} == expected


def test_the_tests_behind_each_promise_are_there() -> None:
    page = (DOCS / "handoff.md").read_text()
    names = set(re.findall(r"`(test_\w+)`", page))
    assert len(names) > 15
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert {name for name in names if f"def {name}(" not in source} == set()
    files = re.findall(r"`(tests/\w+\.py)`", page)
    assert all((DOCS.parent / name).exists() for name in files) and files
