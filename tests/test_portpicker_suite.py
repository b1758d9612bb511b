"""portpicker's own tests, fetched with pip and run against our module and our port server.

Nothing of them is kept here. What cannot pass is listed with the reason, and must go on failing:
a test that starts to pass leaves the list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RELEASE = "1.6.0"

#: portpicker_test.py: what fails against us, and why.
FAILING = {
    "PortpickerCommandLineTests.test_command_line_interface_no_portserver_bind_timeout": (
        "looks for the kept port among the listening ones; a port of ours is kept without"
        " listening, so that a client that comes too early is refused, not swallowed"
    ),
}

#: In portserver_test.py all tests but this one are about private names of its portserver.py.
BEHAVIOUR = "PortserverFunctionsTest.test_portserver_binary"

# The module under its old name. _winapi is read by the tests when they are imported.
AS_PORTPICKER = """
import sys
import fastports.compat.portpicker as module
module._winapi = None
sys.modules["portpicker"] = module
if __name__ == "__main__":
    sys.exit(module.main(sys.argv))
"""
AS_PORTSERVER = """
import sys
from fastports.portserver import main
def _configure_logging(verbose=False):
    pass
_get_process_command_line = _should_allocate_port = None
class _PortPool:
    get_port_for_process = None
if __name__ == "__main__":
    sys.exit(main())
"""
# netstat -lnt is called by the tests, and not everywhere
AS_NETSTAT = """
from fastports._diag import LISTENING, sockets
for port, *_ in sockets(1, 65535, "tcp", LISTENING):
    print("tcp", 0, 0, f"*:{port}")
"""
RUNNER = """
import json, sys, unittest
result = unittest.TestResult()
ran = []
result.startTest = lambda test: ran.append(test.id())
unittest.defaultTestLoader.loadTestsFromName(sys.argv[1]).run(result)
wrong = {test.id(): text for test, text in result.failures + result.errors}
wrong.update((test.id(), "skipped: " + why) for test, why in result.skipped)
json.dump({name.split(".", 1)[1]: wrong.get(name) for name in {*ran, *wrong}}, sys.stdout)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tests of the release beside our module and our server under their names."""
    folder = tmp_path_factory.mktemp("portpicker")
    fetched = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"),
            *("--retries", "1", "--timeout", "10", "--dest", str(folder), f"portpicker=={RELEASE}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"portpicker's sources cannot be fetched here: {fetched.stderr[-200:]}")
    source = folder / "src"
    tests = source / "tests"
    tests.mkdir(parents=True)
    with tarfile.open(archives[0]) as archive:
        for name in ("portpicker_test.py", "portserver_test.py"):
            member = archive.extractfile(f"portpicker-{RELEASE}/src/tests/{name}")
            assert member is not None
            (tests / name).write_bytes(member.read())
    (source / "portpicker.py").write_text(AS_PORTPICKER)
    (source / "portserver.py").write_text(f"#!{sys.executable}\n{AS_PORTSERVER}")
    (source / "netstat").write_text(f"#!{sys.executable}\n{AS_NETSTAT}")
    (tests / "run.py").write_text(RUNNER)
    for name in ("portserver.py", "netstat"):
        (source / name).chmod(0o755)
    yield tests


def run(tests: Path, name: str) -> dict[str, str | None]:
    """What was wrong with each test, None for nothing."""
    environment = {key: text for key, text in os.environ.items() if key != "PORTSERVER_ADDRESS"}
    environment["PYTHONPATH"] = str(tests.parent)
    environment["PATH"] = f"{tests.parent}:{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "run.py", name],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tests,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, str | None] = json.loads(done.stdout)
    return results


def test_portpickers_tests_pass_but_for_those_listed(tree: Path) -> None:
    results = run(tree, "portpicker_test")
    assert len(results) >= 20
    wrong = {name: why for name, why in results.items() if why is not None}
    assert wrong.keys() == FAILING.keys(), "\n".join(map(str, wrong.values()))


def test_the_test_of_portpickers_server_passes_with_ours(tree: Path) -> None:
    assert run(tree, f"portserver_test.{BEHAVIOUR}") == {BEHAVIOUR: None}
