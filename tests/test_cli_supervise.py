"""``fastports run --restart``: replicas, their restarts, and how it all ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commanding import COMMAND, Running, fastports, running, shell, terminal
from programs import program
from test_cli_run import ORPHANS, alive, children, gone, state
from worlds import can_bind, root_only, wait_until

from fastports import entries

SERVER = program("server", "{port}")
#: A row of crashes without a pause.
AT_ONCE = ("--backoff", "0")


def ask(port: int) -> int:
    """The pid of whoever answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        return int(sock.recv(100))


class Replicas:
    """The report on the command's stdout, with the programs' own lines left out."""

    def __init__(self, run: Running) -> None:
        self._run = run
        self._unread: list[dict[str, Any]] = []

    def until(self, state: str, replica: int = 0) -> dict[str, Any]:
        """The next such change; what others do meanwhile is kept for later."""
        for change in self._unread:
            if (change["state"], change["replica"]) == (state, replica):
                self._unread.remove(change)
                return change
        while True:
            found: dict[str, Any] = json.loads(self._run.line('"state"'))
            if (found["state"], found["replica"]) == (state, replica):
                return found
            if found["replica"] != replica:
                self._unread.append(found)


def supervised(*words: str, command: Sequence[str] = SERVER) -> list[str]:
    return ["run", "--report", "-", *words, "--", *command]


def states(text: str, replica: int = 0) -> list[str]:
    lines = [json.loads(line) for line in text.splitlines() if '"state"' in line]
    return [line["state"] for line in lines if line["replica"] == replica]


# --- starting and restarting ----------------------------------------------------------------------


def test_a_killed_replica_comes_back_on_its_port_which_was_held_all_the_while() -> None:
    with running(*supervised("--restart", "on-failure", *AT_ONCE)) as run:
        replica = Replicas(run)
        first = replica.until("listening")
        (port,) = first["ports"]
        assert ask(port) == first["pid"]
        os.kill(first["pid"], signal.SIGKILL)
        assert replica.until("waiting")["returncode"] == -9
        assert not can_bind(port)
        second = replica.until("listening")
        assert second["ports"] == [port] and second["pid"] != first["pid"]
        assert second["restarts"] == 1 and ask(port) == second["pid"]
        run.signal(signal.SIGTERM)
        assert run.end() == 143
    gone(second["pid"])
    wait_until(lambda: can_bind(port, options=[socket.SO_REUSEADDR]), "the port")


def test_each_change_is_one_line_and_quiet_silences_them() -> None:
    with running("run", "--restart", "no", "--", *SERVER) as run:
        line = run.line("listens", stream="stderr")
        assert re.fullmatch(
            r"fastports: python\S* \(pid \d+\) listens on port \d+ after \d+\.\d\d s\.", line
        )
        run.signal(signal.SIGTERM)
        assert run.end() == 143
        rest = run.rest("stderr").splitlines()
    assert [re.sub(r".*\) | after .*|\.$", "", line) for line in rest] == [
        "is being ended", "was ended by signal 15",
    ]  # fmt: skip
    assert fastports("run", "-q", "--count", "2", "--wait", "0", "true").stderr == ""


def test_count_makes_replicas_with_a_block_a_label_and_a_number_each() -> None:
    script = "echo {replica} {port0} {port1}; exec sleep 100"
    words = supervised("--count", "3", "-n2", "--label", "web", "--wait", "0",
                       command=["sh", "-c", script])  # fmt: skip
    with running(*words) as run:
        told: dict[int, list[int]] = {}
        said: dict[int, list[int]] = {}
        while len(told) < 3 or len(said) < 3:
            line = run.line("")
            if line.startswith("{"):
                change = json.loads(line)
                assert change["label"] == f"web-{change['replica']}"
                told[change["replica"]] = change["blocks"]["port"]
            else:
                number, *ports = map(int, line.split())
                said[number] = ports
        assert told == said and len({port for ports in told.values() for port in ports}) == 6
        labels = sorted(entry.label for entry in entries() if entry.pid == run.pid)
        assert labels == ["web-0", "web-1", "web-2"]
        run.signal(signal.SIGINT)
        assert run.end() == 130


def test_replicas_take_exactly_the_ports_of_a_range_in_order() -> None:
    with running(*supervised("--count", "2")) as run:
        replica = Replicas(run)
        last = max(replica.until("starting", number)["ports"][0] for number in range(2))
    first = last - 1 if can_bind(last - 1) else last + 1
    low = min(first, last)
    with running(*supervised("--count", "2", "--range", f"{low}-{low + 1}")) as run:
        replica = Replicas(run)
        assert [replica.until("starting", n)["ports"] for n in range(2)] == [[low], [low + 1]]


def test_several_named_blocks_for_each_replica() -> None:
    words = ["--many", "http=1,side=2", "--count", "2", *AT_ONCE, "--restart", "always"]
    with running(*supervised(*words, command=program("server", "{http}"))) as run:
        replica = Replicas(run)
        up = replica.until("listening")
        blocks = up["blocks"]
        assert up["ports"] == blocks["http"] and len(blocks["side"]) == 2
        assert ask(up["ports"][0]) == up["pid"]
        os.kill(up["pid"], signal.SIGKILL)
        again = replica.until("listening")
        assert again["blocks"] == blocks and again["pid"] != up["pid"]


@pytest.mark.parametrize(
    ("restart", "status", "expected"),
    [
        ("no", 3, ["starting", "running", "ended"]),
        ("on-failure", 0, ["starting", "running", "ended"]),
        ("on-failure", 3, ["starting", "running", "waiting", "starting", "running", "failed"]),
        ("always", 0, ["starting", "running", "waiting", "starting", "running", "failed"]),
    ],
)
def test_when_it_is_started_again(restart: str, status: int, expected: list[str]) -> None:
    words = supervised("--restart", restart, "--max-restarts", "1", *AT_ONCE, "--wait", "0",
                       command=["sh", "-c", f"exit {status}"])  # fmt: skip
    assert states(fastports(*words, status=status).stdout) == expected


def test_a_crash_loop_is_told_and_given_up_also_when_quiet() -> None:
    words = ["run", "-q", "--restart", "always", "--max-restarts", "2", *AT_ONCE]
    done = fastports(*words, "--", "sh", "-c", "exit 7", status=7)
    assert done.stderr.count("\n") == 1
    assert "given up after 2 restarts in a row" in done.stderr and "mend it." in done.stderr


def test_without_a_limit_it_is_started_again_and_again() -> None:
    words = ["--restart", "always", "--max-restarts", "none", *AT_ONCE, "--wait", "0"]
    with running(*supervised(*words, command=["sh", "-c", "exit 1"])) as run:
        replica = Replicas(run)
        while replica.until("waiting")["restarts"] < 20:
            pass
        run.signal(signal.SIGTERM)
        run.rest()
        assert run.end() in (1, 143)  # it paused, or ran


def test_what_does_not_listen_in_time_is_a_failure_with_advice_for_a_shell() -> None:
    words = ["run", "--restart", "no", "--wait", "0.3", "--", "sleep", "100"]
    done = fastports(*words, status=1)
    told = done.stderr.splitlines()[-1]
    assert "does not listen" in told and "--wait" in told and "timeout=" not in told


@pytest.mark.parametrize(
    ("command", "status"), [("/nonexistent/program", 127), ("/etc/passwd", 126)]
)
def test_a_program_that_cannot_be_executed_ends_it_at_once(command: str, status: int) -> None:
    label = f"unstartable-{os.getpid()}"
    words = ["run", "--restart", "always", "--count", "3", "--label", label, command]
    done = fastports(*words, status=status)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"fastports: {command}: ")
    assert not [entry for entry in entries() if entry.label.startswith(label)]


# --- signals --------------------------------------------------------------------------------------


def test_a_hang_up_signal_restarts_one_after_another_and_one_is_always_up() -> None:
    with running(*supervised("--count", "2")) as run:
        replica = Replicas(run)
        before = [replica.until("starting", number)["pid"] for number in range(2)]
        assert [replica.until("listening", number)["pid"] for number in range(2)] == before
        run.signal(signal.SIGHUP)
        up = {0, 1}
        pids: dict[int, int] = {}
        while len(pids) < 2:
            change = json.loads(run.line('"state"'))
            if change["state"] == "listening":
                up.add(change["replica"])
                pids[change["replica"]] = change["pid"]
            elif change["state"] != "starting":
                up.discard(change["replica"])
            assert up
        assert not set(pids.values()) & set(before)
        run.signal(signal.SIGTERM)
        assert run.end() == 143


def test_other_signals_go_to_all() -> None:
    code = "trap 'echo usr {replica}' USR1; echo ready; while :; do sleep 0.01; done"
    words = ["run", "-q", "--count", "2", "--wait", "0", "--", "sh", "-c", code]
    with running(*words) as run:
        run.line("ready")
        run.line("ready")
        run.signal(signal.SIGUSR1)
        assert {run.line("usr"), run.line("usr")} == {"usr 0", "usr 1"}


def test_the_status_is_theirs_if_they_end_by_themselves_when_asked_to() -> None:
    with running(*supervised("--count", "2", command=program("graceful", "{port}"))) as run:
        replica = Replicas(run)
        for number in range(2):
            replica.until("listening", number)
        run.signal(signal.SIGTERM)
        assert run.end() == 5


def test_who_ignores_term_is_killed_after_the_grace() -> None:
    words = supervised("--restart", "no", "--grace", "0.2", command=program("stubborn", "{port}"))
    with running(*words) as run:
        pid = Replicas(run).until("listening")["pid"]
        run.signal(signal.SIGTERM)
        assert run.end() == 137
    assert not alive(pid)


STUBBORN = """\
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
signal.signal(signal.SIGUSR1, lambda *_: print("alive", flush=True))
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def pending(pid: int) -> int:
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "ShdPnd" in x)
    return int(line.split()[1], 16)


def test_a_second_ctrl_c_ends_the_grace_and_a_second_term_does_not() -> None:
    words = ["run", "--restart", "no", "--grace", "1000", "--wait", "0", "--"]
    with running(*words, sys.executable, "-Sc", STUBBORN) as run:
        run.line("ready")
        run.signal(signal.SIGTERM)
        run.line("asked")
        run.signal(signal.SIGTERM)  # a service manager may say it twice
        wait_until(lambda: not pending(run.pid), "the second to be heeded")
        run.signal(signal.SIGUSR1)
        run.line("alive")
        run.signal(signal.SIGINT)
        assert run.end() == 137


def test_a_terminal_that_is_gone_ends_it_and_ctrl_c_does_too() -> None:
    words = ["run", "--restart", "always", "--", *SERVER]
    for hang_up in (True, False):
        with terminal(*COMMAND, *words) as term:
            term.expect("(pid ")
            pid = int(term.expect(")")[:-1])
            term.expect("listens")
            if hang_up:
                term.close()
                assert term.end() == 129
            else:
                term.type("\x03")
                assert term.end() == 130
        gone(pid)


def test_a_terminal_that_is_gone_ends_it_behind_a_shell_too() -> None:
    # the shell leads the session: what it passes on looks like anybody's SIGHUP
    command = " ".join(COMMAND)
    with shell() as term:
        term.type(f"{command} run --restart always --wait 0 -- sleep 100 &\n")
        term.expect("(pid ")
        pid = int(term.expect(")")[:-1])
        term.expect("has port")
        (launcher,) = children(term.pid)
        term.close()
        term.end()
        gone(pid, launcher)


def test_ctrl_z_stops_all_and_fg_goes_on_with_all() -> None:
    command = " ".join(COMMAND)
    with shell() as term:
        term.type(f"{command} run --count 2 --wait 0 -- sleep 100\n")
        term.expect("has port")
        term.expect("has port")
        (launcher,) = children(term.pid)
        both = children(launcher)
        assert len(both) == 2
        term.type("\x1a")
        term.expect("Stopped")
        wait_until(lambda: {state(pid) for pid in both} == {"T"}, "both to stop")
        term.expect("$ ")
        term.type("fg\n")
        wait_until(lambda: {state(pid) for pid in both} == {"S"}, "both to go on")
        term.type("\x03")
        term.expect("$ ")
        gone(*both)
        term.type("exit\n")
        term.end()


ENDS_IN_BETWEEN = """
import fastports.fleet
from fastports.cli import main
step = fastports.fleet.Fleet.step
def step_and_wait(fleet):
    pause = step(fleet)
    for replica in fleet.replicas:
        replica.child._process.ended(20)
    return pause
fastports.fleet.Fleet.step = step_and_wait
words = ["run", "-q", "--restart", "no", "--wait", "0", "sh", "-c"]
print([main([*words, f"exit {n}"]) for n in (0, 3)])
"""


def test_a_replica_that_ends_between_two_steps_keeps_its_status() -> None:
    words = [sys.executable, "-c", ENDS_IN_BETWEEN]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[0, 3]\n", "")


# --- descendants ----------------------------------------------------------------------------------


def test_orphans_are_reaped_while_replicas_come_and_go() -> None:
    words = ["run", "-q", "--count", "2", "--wait", "0", "--", sys.executable, "-Sc", ORPHANS]
    with running(*words) as run:
        run.line("made")
        run.line("made")
        wait_until(lambda: len(children(run.pid)) == 2, "all orphans to be reaped")


@root_only
def test_as_pid_1_it_reaps_restarts_and_ends() -> None:
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = supervised("--restart", "always", *AT_ONCE, "--wait", "0",
                       command=[sys.executable, "-Sc", ORPHANS])  # fmt: skip
    with running(*words, prefix=prefix) as run:
        run.line("made")
        (first,) = children(run.pid)
        wait_until(lambda: len(children(first)) == 1, "all orphans to be reaped")
        os.kill(children(first)[0], signal.SIGKILL)
        run.line("made")
        os.kill(first, signal.SIGTERM)
        assert run.end() == 143


def test_what_a_replica_leaves_behind_is_ended_with_it_whatever_it_hides() -> None:
    code = """\
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(3, 256)
        os.execve("/bin/sh", ["sh", "-c", "echo left $$; exec sleep 100"], {})
    os._exit(0)
time.sleep(100)
"""
    words = ["run", "-q", "--count", "2", "--wait", "0", "--", sys.executable, "-Sc", code]
    with running(*words) as run:
        pids = [int(run.line("left").split()[1]) for _ in range(2)]
        run.signal(signal.SIGTERM)
        assert run.end() == 143
        assert not any(map(alive, pids))


def test_sigkill_of_the_launcher_ends_all() -> None:
    with running(*supervised("--count", "2")) as run:
        replica = Replicas(run)
        pids = [replica.until("listening", number)["pid"] for number in (0, 1)]
        run.process.kill()
        gone(*pids)


def test_a_replica_reads_nothing_from_the_terminal() -> None:
    words = ["run", "-q", "--restart", "no", "--wait", "0", "--", "readlink", "/proc/self/fd/0"]
    assert fastports(*words, stdin="text").stdout == "/dev/null\n"


def test_there_is_one_thread() -> None:
    with running(*supervised("--restart", "always", "--handoff", "door")) as run:
        Replicas(run).until("listening")
        assert len(list(Path(f"/proc/{run.pid}/task").iterdir())) == 1
