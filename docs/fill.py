"""Run the programs and the shell sessions of the pages, and write what they print into them.

python docs/fill.py [PAGE...]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^```console\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
SESSIONS = ("tutorial", "cli")  # elsewhere they are for reading: daemons, root, other machines


def run(*argv: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        argv, stdout=subprocess.PIPE, text=True, check=True, timeout=60, env=environment
    ).stdout


def program(match: re.Match[str]) -> str:
    output = run(sys.executable, "-W", "error", "-c", match[1])
    return f"```python\n{match[1]}```\n" + (f"\n```text\n{output}```\n" if output else "")


def session(match: re.Match[str]) -> str:
    # each command's output under it: a line that nobody prints marks where it begins
    commands = [line for line in match[1].splitlines() if line.startswith("$ ")]
    script = "\n".join(f"echo @@@@\n{command[2:]}" for command in commands)
    outputs = run("bash", "-e", "-c", script).split("@@@@\n")[1:]
    return (
        "```console\n"
        + "".join(f"{a}\n{b}" for a, b in zip(commands, outputs, strict=True))
        + "```\n"
    )


def main() -> None:
    folder = Path(__file__).parent
    names = sys.argv[1:] or [
        "tutorial",
        "cli",
        "migration",
        "explanation",
        "faq",
        "portserver",
        "seeing",
    ]
    for name in names:
        page = folder / f"{name}.md"
        text = PROGRAM.sub(program, page.read_text())
        page.write_text(SESSION.sub(session, text) if name in SESSIONS else text)


if __name__ == "__main__":
    main()
