"""Every example of the README runs, as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
