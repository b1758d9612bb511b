"""``fastports run --report``: JSON lines that other programs wait for, and ``--detach``."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commanding import COMMAND, fastports, running
from programs import program
from test_cli_run import gone
from test_cli_supervise import ask
from worlds import can_bind, wait_until

from fastports import entries

SERVER = program("server", "{port}")
KEYS = {
    "replica", "label", "ports", "pid", "state", "returncode", "seconds", "restarts", "reason",
    "blocks",
}  # fmt: skip
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def bash(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "-euc", script, "bash", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    assert done.returncode == 0, done
    return done


def changes(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# --- what it says ---------------------------------------------------------------------------------


def test_each_change_of_one_program_is_a_line(tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.write_text("of another run\n")
    with running("run", "-n2", "--label", "x", "--report", str(report), "--", *SERVER) as run:
        run.line("listens", stream="stderr")
        run.signal(signal.SIGTERM)
        assert run.end() == 143
    told = changes(report.read_text())
    assert [change["state"] for change in told] == ["starting", "listening", "ended"]
    assert [change["returncode"] for change in told] == [None, None, -15]
    for change in told:
        assert set(change) == KEYS
        first, second = change["blocks"]["port"]
        assert change["ports"] == [first] and second == first + 1
        assert (change["label"], change["replica"], change["restarts"]) == ("x", 0, 0)
        assert change["pid"] == told[0]["pid"] and change["seconds"] >= 0


def test_named_blocks_are_told_by_name() -> None:
    done = fastports(
        "run", "-q", "--report", "-", "--wait", "0", "--many", "a=1,b=2", "true", "{b1}"
    )
    told = changes(done.stdout)
    assert [change["state"] for change in told] == ["starting", "running", "ended"]
    assert told[0]["ports"] == [told[0]["blocks"]["b"][1]] and len(told[0]["blocks"]["a"]) == 1


@pytest.mark.parametrize(
    ("words", "status", "state"),
    [
        (["true"], 0, "ended"),
        (["false"], 1, "failed"),
        (["--wait", "0", "false"], 1, "ended"),
        (["--wait", "0.2", "sleep", "100"], 1, "failed"),
        (["/nonexistent/program"], 127, "failed"),
    ],
)
def test_the_last_line_tells_how_it_ended(words: list[str], status: int, state: str) -> None:
    done = fastports("run", "-q", "--report", "-", *words, status=status)
    last = changes(done.stdout)[-1]
    assert last["state"] == state
    assert (last["pid"] is None) == (status == 127)
    assert ("No such file" in last["reason"]) == (status == 127)
    for python in ("timeout=", "wait=", "handoff="):
        assert python not in last["reason"]


# --- who reads it ---------------------------------------------------------------------------------


def test_a_bash_script_waits_for_it_on_a_descriptor() -> None:
    script = """
exec {report}< <(exec fastports run -q --report-fd 3 -- "$@" 3>&1 >/dev/null)
launcher=$!
while read -r line <&"$report"; do
  [[ $line == *'"state": "listening"'* ]] && break
done
[[ $line =~ '"ports": ['([0-9]+)']' ]]
exec 4<>"/dev/tcp/127.0.0.1/${BASH_REMATCH[1]}"
read -r pid <&4 || true
[[ $line == *"\\"pid\\": $pid,"* ]] && echo "same pid"
kill "$launcher"
cat <&"$report"
"""
    same, *rest = bash(script, *SERVER).stdout.splitlines()
    assert same == "same pid"
    assert [change["state"] for change in changes("\n".join(rest))] == ["ended"]


def test_a_bash_script_waits_for_it_on_a_fifo(tmp_path: Path) -> None:
    script = """
mkfifo "$1/report"
fastports run -q --restart on-failure --count 2 --report "$1/report" -- "${@:2}" &
launcher=$!
exec 3<"$1/report"
up=0
while ((up < 2)) && read -r line <&3; do
  [[ $line == *'"state": "listening"'* ]] && up=$((up + 1))
done
echo "up $up"
exec 3<&-
kill "$launcher"
wait "$launcher" || echo "status $?"
"""
    assert bash(script, str(tmp_path), *SERVER).stdout == "up 2\nstatus 143\n"


def test_a_reader_that_goes_away_is_no_reason_to_end_and_another_may_come(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    words = ["run", "--report", str(fifo), "--restart", "always", "--backoff", "0", "--", *SERVER]
    with running(*words) as run:
        with open(fifo) as reader:
            first = json.loads(reader.readline())
        run.line("listens", stream="stderr")
        os.kill(first["pid"], signal.SIGKILL)
        run.line("listens", stream="stderr")
        with open(fifo) as reader:
            run.signal(signal.SIGTERM)
            states = [json.loads(line)["state"] for line in reader]
        assert states == ["stopping", "ended"]
        assert run.end() == 143


def test_a_reader_that_does_not_read_holds_nothing_up() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    flags = fcntl.fcntl(writer, fcntl.F_GETFL)
    restarts = 50
    words = ["--restart", "always", "--max-restarts", str(restarts), "--backoff", "0"]
    done = subprocess.run(
        [*COMMAND, "run", "-q", "--report-fd", str(writer), *words, "--wait", "0", "true"],
        pass_fds=[writer],
        timeout=60,
        stderr=subprocess.DEVNULL,
    )
    assert done.returncode == 0
    assert fcntl.fcntl(writer, fcntl.F_GETFL) == flags  # it is not ours alone
    os.close(writer)
    with open(reader) as pipe:
        for line in pipe:  # whole lines, up to the size of the pipe
            assert set(json.loads(line)) == KEYS


def test_what_cannot_be_written_is_told_once() -> None:
    done = fastports("run", "--report", "/dev/full", "--wait", "0", "true")
    told = [line for line in done.stderr.splitlines() if "/dev/full" in line]
    assert told == [
        "fastports: --report /dev/full: No space left on device; nothing more is reported."
    ]


def test_the_program_does_not_inherit_the_report() -> None:
    reader, writer = os.pipe()
    words = [
        *COMMAND,
        "run",
        "-q",
        "--wait",
        "0",
        "--report-fd",
        str(writer),
        "ls",
        "/proc/self/fd",
    ]
    done = subprocess.run(words, pass_fds=[writer], capture_output=True, text=True, timeout=60)
    os.close(writer)
    os.close(reader)
    assert str(writer) not in done.stdout.split()


# --- left running ---------------------------------------------------------------------------------


def test_a_detached_program_stays_when_the_command_has_ended(tmp_path: Path) -> None:
    report = tmp_path / "report"
    output = tmp_path / "output"
    words = ["--detach", "--label", "left", "--report", str(report), "--", *SERVER]
    bash('fastports run -q "${@:2}" >"$1" 2>&1', str(output), *words)
    last = changes(report.read_text())[-1]
    assert last["state"] == "listening"
    (port,), pid = last["ports"], last["pid"]
    try:
        assert re.fullmatch(
            rf"python\S* is left running on port {port}; to end it: kill {pid}\n",
            output.read_text(),
        )
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert ask(port) == pid
        assert [entry.pid for entry in entries() if entry.label == "left"] == [pid]
    finally:
        os.kill(pid, signal.SIGTERM)
    gone(pid)
    wait_until(lambda: can_bind(port, options=[socket.SO_REUSEADDR]), "the port")


def test_a_detached_program_that_does_not_come_up_is_a_failure_and_is_ended() -> None:
    words = ["run", "--detach", "--wait", "0.3", "--", "sh", "-c", "echo $$; exec sleep 100"]
    done = fastports(*words, status=1)
    assert "did not listen" in done.stderr
    gone(int(done.stdout))
    assert fastports("run", "-q", "--detach", "--", "sh", "-c", "exit 3", status=3).stdout == ""


def test_a_signal_before_a_detached_program_is_up_ends_it() -> None:
    with running("run", "--detach", "--", "sh", "-c", "echo $$; exec sleep 100") as run:
        pid = int(run.line(""))
        run.signal(signal.SIGTERM)
        assert run.end() == 143
    gone(pid)


# --- other options of spawn -----------------------------------------------------------------------


def test_listen_passes_sockets_that_listen_already() -> None:
    code = "import socket; s = socket.socket(fileno=3); print(s.getsockopt(1, 30))"
    done = fastports("run", "-q", "--listen", "--wait", "0", "--", sys.executable, "-Sc", code)
    assert done.stdout == "1\n"  # SO_ACCEPTCONN


@pytest.mark.parametrize("exclusive", [False, True])
def test_exclusive_takes_the_option_that_lets_others_join(exclusive: bool) -> None:
    code = """\
import socket, sys
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(("", int(sys.argv[1])))
s.listen()
print("reuse", s.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT), flush=True)
s.accept()
"""
    words = ["--exclusive"] * exclusive
    with running("run", "--handoff", "broker", *words, "--", sys.executable, "-Sc", code,
                 "{port}") as run:  # fmt: skip
        assert run.line("reuse") == f"reuse {0 if exclusive else 1}"


def test_with_a_grace_one_program_is_killed_too_if_it_ignores_term() -> None:
    with running("run", "--grace", "0.2", "--", *program("stubborn", "{port}")) as run:
        run.line("listens", stream="stderr")
        run.signal(signal.SIGTERM)
        assert run.end() == 137
