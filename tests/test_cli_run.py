"""``fastports run``: real programs, real signals, real terminals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from commanding import COMMAND, fastports, running, shell, terminal
from worlds import can_bind, network, root_only, time_wait, wait_until

from fastports import allocate, entries

# A server that is up within 20 ms: no site, no environment.
PYTHON = (sys.executable, "-ISc")
SERVE = """\
import socket, sys, os
servers = []
for port in sys.argv[1].split(","):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", int(port)))
    server.listen()
    servers.append(server)
print("up", sys.argv[1], os.getpid(), flush=True)
while True:
    connection, _ = servers[0].accept()
    connection.sendall(b"hello")
    connection.close()
"""
LISTENS = re.compile(
    r"fastports: python\S* \(pid (\d+)\) listens on port (\d+) after (\d+\.\d\d) s\."
)


def alive(pid: int) -> bool:
    """Whether a process runs, and is not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def gone(*pids: int) -> None:
    wait_until(lambda: not any(map(alive, pids)), f"the end of {pids}")


def free(port: int) -> None:
    # over connections of the test in TIME_WAIT
    reuse = [socket.SO_REUSEADDR]
    wait_until(lambda: can_bind(port, options=reuse), f"port {port} to be free")


def ask(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        return sock.recv(100)


def children(parent: int) -> list[int]:
    """Those of all threads, zombies included."""
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for text in lists for pid in text.read_text().split()]


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def python(code: str, *words: str, ready: str = "") -> Sequence[str]:
    return ["--", *PYTHON, code, *words]


# --- the main job ---------------------------------------------------------------------------------

REAPED_IN_BETWEEN = """
import os, threading
import fastports.cli.program
from fastports.cli import main
spawn, look = fastports.cli.program.spawn, os.waitid
def remember(*words, **options):
    os.child = spawn(*words, **options)
    return os.child
def look_and_pause(*words):
    info = look(*words)
    # the thread that waits until the child listens has its turn just here
    turn = threading.Thread(target=os.child.poll)
    turn.start()
    turn.join()
    return info
fastports.cli.program.spawn, os.waitid = remember, look_and_pause
print([main(["run", "-q", "--", "sh", "-c", f"exit {n}"]) for n in range(5)])
"""


def test_a_command_that_ends_at_once_is_reaped_once_whichever_thread_sees_it_first() -> None:
    words = [sys.executable, "-c", REAPED_IN_BETWEEN]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[0, 1, 2, 3, 4]\n", "")


def test_a_server_comes_up_on_a_port_that_was_held_before_it_existed() -> None:
    code = f"""\
import _signal, sys
_signal.pthread_sigmask(_signal.SIG_BLOCK, [10])
print("before", sys.argv[1], flush=True)
_signal.sigwait([10])
{SERVE}"""
    with running("run", "--label", "main-job", *python(code, "{port}")) as run:
        port = int(run.line("before").split()[1])
        assert not can_bind(port, options=[socket.SO_REUSEPORT])
        run.signal(signal.SIGUSR1)
        line = run.line("listens", stream="stderr")
        told = LISTENS.fullmatch(line)
        assert told is not None, line
        pid = int(told[1])
        assert int(told[2]) == port
        assert run.line("up").split() == ["up", str(port), str(pid)]
        assert ask(port) == b"hello"
        mine = [entry for entry in entries() if entry.pid == run.pid]
        assert [(entry.first, entry.label) for entry in mine] == [(port, "main-job")]
        assert not can_bind(port, options=[socket.SO_REUSEADDR])
        run.signal(signal.SIGINT)
        assert run.end() == 130
        assert "KeyboardInterrupt" in run.rest("stderr")  # the server's own
    gone(pid)
    free(port)
    assert not [entry for entry in entries() if entry.pid == run.pid]


def test_without_dashes_the_first_word_that_is_no_option_begins_the_command() -> None:
    done = fastports("run", "-q", "-n", "2", "echo", "-n", "--range", "{port1}")
    assert re.fullmatch(r"--range \d+", done.stdout)


def test_what_stands_between_other_braces_goes_through_untouched() -> None:
    words = ['{"a": 1}', "{}", "{", "}", "{portly}", "{x{host}}", "${HOME}", "{port"]
    done = fastports("run", "-q", "--", "printf", "%s\n", *words)
    assert done.stdout.splitlines() == [word.replace("{host}", "0.0.0.0") for word in words]


def test_the_ports_are_in_arguments_and_environment() -> None:
    script = 'echo "$FASTPORTS_PORTS $@"'
    words = ["{port}", "{port1}", "{first}", "{last}", "{ports}"]
    done = fastports("run", "-q", "-n3", "--", "sh", "-c", script, "sh", *words)
    ports, *told = done.stdout.split()
    a, b, c = ports.split(",")
    assert told == [a, b, a, c, ports]
    assert int(c) == int(b) + 1 == int(a) + 2


def test_many_blocks_are_disjoint_and_named_in_the_arguments() -> None:
    words = ["{http}", "{http0}", "{nixl-side}", "{nixl-side7}", "{ports}", "{other}"]
    done = fastports(
        "run", "--many", "http=1,nixl-side=8", "--many", "z_9=2", "--", "echo", *words,
    )  # fmt: skip
    http, http0, first, last, ports, other = done.stdout.split()
    assert http == http0 and int(last) == int(first) + 7 and other == "{other}"
    assert len(set(ports.split(","))) == 11 and {http, first, last} <= set(ports.split(","))


def test_with_many_only_the_ports_that_are_named_have_to_listen() -> None:
    words = ["run", "--many", "http=1,spare=3", *python(SERVE, "{http}")]
    with running(*words) as run:
        told = LISTENS.fullmatch(run.line("listens", stream="stderr"))
        assert told is not None
        port = int(told[2])
        assert ask(port) == b"hello"
        mine = {(e.label, len(e.ports)) for e in entries() if e.pid == run.pid}
        assert mine == {("http", 1), ("spare", 3)}


def test_udp_is_told_as_udp() -> None:
    code = """\
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("", int(sys.argv[1])))
server.recv(1)
"""
    with running("run", "--protocol", "udp", *python(code, "{port}")) as run:
        line = run.line("listens", stream="stderr")
    assert re.search(r"listens on udp port \d+ after", line)


def test_an_exact_port_is_taken_also_over_a_time_wait() -> None:
    """C20"""
    with allocate(1) as block:
        port = block.first
    time_wait(port)
    with running("run", "--range", str(port), *python(SERVE, "{port}")) as run:
        told = LISTENS.fullmatch(run.line("listens", stream="stderr"))
        assert told is not None and int(told[2]) == port


def test_an_address_is_passed_on() -> None:
    done = fastports("run", "-q", "--host", "127.0.0.1", "--", "echo", "{host}:{port}")
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", done.stdout)


@root_only
def test_no_more_ports_is_a_refusal_that_says_what_to_do() -> None:
    with network(), allocate(4, range="20000-20004"):
        done = fastports("run", "-n", "2", "--range", "20000-20004", "true", status=1)
        single = fastports("run", "--range", "20001-20001", "true", status=1)
    assert " busy" in done.stderr and done.stderr.endswith("or widen --range.\n")
    assert "port 20001 (tcp, all addresses) is taken" in single.stderr


@root_only
def test_warnings_of_the_library_are_lines_of_the_command_and_can_be_silenced() -> None:
    words = ["--range", "20000-20009", "--", "true"]
    with network({"net.ipv4.ip_local_port_range": "20000 60999"}):
        done = fastports("run", *words)
        silent = fastports("run", "-q", *words)
    assert done.stderr.startswith("fastports: the range 20000-20009 overlaps the ephemeral range")
    assert silent.stderr == ""


def test_nothing_heavy_is_imported() -> None:
    code = """\
import sys
before = set(sys.modules)
from fastports.cli import main
assert main(["run", "-q", "--", "true"]) == 0
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([*PYTHON[:1], "-Ic", code], capture_output=True, text=True, check=True)
    heavy = {
        "argparse", "asyncio", "ctypes", "dataclasses", "inspect", "json", "logging", "numpy", "re",
        "select", "shutil", "signal", "socket", "subprocess", "threading", "typing",
    }  # fmt: skip
    assert not heavy & set(done.stdout.split())


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 3, 255])
@pytest.mark.parametrize("wait", ["30", "0"])
def test_the_exit_status_is_the_programs(status: int, wait: str) -> None:
    fastports("run", "--wait", wait, "--", "sh", "-c", f"exit {status}", status=status)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_that_ended_it_is_128_and_its_number(number: int) -> None:
    fastports("run", "--", "sh", "-c", f"kill -{number} $$", status=128 + number)


def test_a_program_that_ends_well_before_it_listens_is_no_failure_but_told() -> None:
    done = fastports("run", "--", "true")
    assert re.fullmatch(
        r"fastports: true ended with status 0 after \d\.\d\d s and did not listen on port \d+\.\n",
        done.stderr,
    )
    assert fastports("run", "-q", "--", "true").stderr == ""


def test_a_plain_binder_behind_a_door_is_told_which_mode_to_use() -> None:
    code = "import socket, sys; socket.socket().bind(('', int(sys.argv[1])))"
    done = fastports("run", "--handoff", "door", *python(code, "{port}"), status=1)
    assert "start it with --handoff close" in done.stderr.splitlines()[-1]


def test_a_plain_binder_comes_up_in_close_mode() -> None:
    code = SERVE.replace("server.setsockopt(", "(lambda *words: None)(")
    with running("run", "--handoff", "close", *python(code, "{port}")) as run:
        told = LISTENS.fullmatch(run.line("listens", stream="stderr"))
        assert told is not None
        assert ask(int(told[2])) == b"hello"
        assert any(entry.pid == run.pid for entry in entries())


def test_what_does_not_listen_in_time_is_ended_with_all_it_started() -> None:
    script = "sleep 100 & echo $$ $!; wait"
    done = fastports("run", "--wait", "0.5", "--", "sh", "-c", script, status=1)
    told = r"fastports: sh \(pid \d+\) did not listen on port \d+ within 0\.5 s and was ended\. "
    assert re.match(told, done.stderr) and "--wait" in done.stderr
    gone(*map(int, done.stdout.split()))


def test_wait_0_does_not_look() -> None:
    done = fastports("run", "--wait", "0", "--", "sh", "-c", "sleep 0.1; exit 4", status=4)
    assert re.fullmatch(r"fastports: sh \(pid \d+\) has port \d+\.\n", done.stderr)


def test_a_stranger_who_enters_through_the_door_is_told() -> None:
    words = ["run", "--handoff", "door", "--", "sh", "-c", "echo {port}; sleep 100"]
    with running(*words) as run, socket.socket() as stranger:
        port = int(run.line(""))
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("", port))
        stranger.listen()
        assert run.end() == 1
        line = run.rest("stderr")
    assert f"process {os.getpid()} " in line and f"port {port}" in line and "--wait 0" in line


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("/nonexistent/program", 127, "/nonexistent/program: No such file or directory."),
        ("no-such-program-here", 127, "no-such-program-here: No such file or directory."),
        ("/etc/passwd", 126, "/etc/passwd: Permission denied."),
        ("/etc", 126, "/etc: Permission denied."),
        ("", 2, "COMMAND is empty."),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "door", "close"])
def test_a_program_that_cannot_be_executed_is_told_as_shells_do(
    command: str, status: int, text: str, mode: str
) -> None:
    done = fastports("run", "--handoff", mode, "--", command, status=status)
    assert done.stderr == f"fastports: {text}\n"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--handoff", "magic", "true"], "--handoff 'magic' is no mode"),
        (["--", "echo", "{port3}"], "COMMAND names {port3}, but the block has 1 port"),
        (["--exclusive", "--handoff", "door", "true"], "Use --handoff broker."),
        (["--listen", "--handoff", "door", "true"], "Use --handoff fd."),
        (["--detach", "--handoff", "broker", "true"], "Use --handoff close, or fd for"),
        (["--detach", "--exclusive", "true"], "--detach leaves the program to itself"),
        (["--restart", "no", "--handoff", "magic", "true"], "--handoff 'magic' is no mode"),
        (["--count", "2", "--", "echo", "{port1}"], "COMMAND names {port1}"),
        (["--count", "2", "--many", "a=1", "--", "echo", "{a1}"], "{a1} is not there"),
    ],
)
def test_what_only_the_hand_off_can_refuse_is_wrong_usage_too(words: list[str], part: str) -> None:
    done = fastports("run", *words, status=2)
    assert part in done.stderr and done.stderr.count("\n") == 1
    assert "=True" not in done.stderr and "handoff=" not in done.stderr
    assert done.stdout == ""


REFUSED = """
import signal
from fastports.cli import main
for words in (["run"], ["run", "--count", "2"]):
    assert main([*words, "--", "echo", "{port1}"]) == 2
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_a_refusal_leaves_the_signals_as_they_were() -> None:
    words = [sys.executable, "-c", REFUSED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


# --- signals --------------------------------------------------------------------------------------

COUNT = """\
import os, signal, sys
def tell(number, frame):
    print(f"got {number}", flush=True)  # one write, unbuffered or not
    if number == signal.SIGTERM:
        os._exit(7)
for number in (1, 2, 3, 10, 12, 15, 28):
    signal.signal(number, tell)
print("ready", os.getpid(), flush=True)
while True:
    signal.pause()
"""
PASSED_ON = [
    signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGINT, signal.SIGQUIT,
    signal.SIGTERM,
]  # fmt: skip


@pytest.mark.parametrize("wait", ["30", "0"])
def test_signals_are_passed_on_once_while_it_starts_and_after(wait: str) -> None:
    with running("run", "-q", "--wait", wait, "--", sys.executable, "-Sc", COUNT) as run:
        run.line("ready")
        for number in PASSED_ON:
            run.signal(number)
            assert run.line("") == f"got {int(number)}"
        assert run.end() == 7
        assert run.rest() == "" and run.rest("stderr") == ""


def test_ctrl_c_while_it_starts_ends_it() -> None:
    with running("run", "--", "sh", "-c", "echo $$; sleep 100") as run:
        pid = int(run.line(""))
        # The shell dies of it only if the program does that it waits for; before that program
        # is executed, the shell's own handler would swallow it there.
        wait_until(lambda: [name(child) for child in children(pid)] == ["sleep"], "the sleep")
        run.signal(signal.SIGINT)
        assert run.end() == 130
        assert run.rest("stderr") == ""
    gone(pid)


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    words = ["run", "-q", "--wait", "0", "--", sys.executable, "-Sc", COUNT]
    with running(*words, preexec=ignore) as run:
        run.line("ready")
        run.signal(signal.SIGHUP)
        run.signal(signal.SIGUSR1)
        assert run.line("got") == "got 10"  # and nothing before it
        run.signal(signal.SIGTERM)
        assert run.end() == 7


def test_a_status_is_there_although_the_parent_had_sigchld_ignored() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with running("run", "-q", "--", "sh", "-c", "exit 5", preexec=ignore) as run:
        assert run.end() == 5


def test_signals_that_were_blocked_are_not_blocked_for_the_program() -> None:
    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])

    words = ["run", "-q", "--wait", "0", "--", sys.executable, "-Sc", COUNT]
    with running(*words, preexec=block) as run:
        run.line("ready")
        run.signal(signal.SIGUSR1)
        run.line("got 10")
        run.signal(signal.SIGTERM)
        assert run.end() == 7


# --- descendants ----------------------------------------------------------------------------------

ORPHANS = """\
import os, time
for number in range(5):
    if os.fork() == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                pass
            os._exit(0)
        os._exit(0)
    os.wait()
print("made", flush=True)
time.sleep(100)
"""


def test_orphans_are_reaped() -> None:
    with running("run", "--wait", "0", "--", sys.executable, "-Sc", ORPHANS) as run:
        run.line("made")
        wait_until(lambda: len(children(run.pid)) == 1, "all orphans to be reaped")


@root_only
def test_it_is_a_good_pid_1() -> None:
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = ["run", "--wait", "0", "--", sys.executable, "-Sc", ORPHANS]
    with running(*words, prefix=prefix) as run:
        run.line("made")
        (first,) = children(run.pid)
        wait_until(lambda: len(children(first)) == 1, "all orphans to be reaped")
        os.kill(first, signal.SIGTERM)  # pid 1 has no default action: it is passed on
        assert run.end() == 143


def test_what_it_leaves_behind_is_ended_with_it() -> None:
    code = """\
import os, time
if os.fork() == 0:
    os.setsid()
    print("daemon", os.getpid(), flush=True)
    time.sleep(100)
time.sleep(0.1)
"""
    with running("run", "-q", "--wait", "0", "--", sys.executable, "-Sc", code) as run:
        pid = int(run.line("daemon").split()[1])
        assert run.end() == 0
        assert not alive(pid)


def test_a_program_that_goes_into_the_background_is_kept() -> None:
    code = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{SERVE}"
    with running("run", *python(code, "{port}")) as run:
        told = LISTENS.fullmatch(run.line("listens", stream="stderr"))
        assert told is not None
        pid = int(run.line("up").split()[2])
        assert pid != int(told[1]) and not alive(int(told[1]))
        assert ask(int(told[2])) == b"hello" and run.process.poll() is None
        run.signal(signal.SIGTERM)
        assert run.end() == 0
    gone(pid)


def test_sigkill_of_the_launcher_ends_the_program_and_what_it_started() -> None:
    script = f"{' '.join(PYTHON[:1])} -ISc 'import time; time.sleep(100)' & echo $$ $!; wait"
    with running("run", "--wait", "0", "--", "sh", "-c", f"echo {{port}}; {script}") as run:
        port = int(run.line(""))
        pids = [int(pid) for pid in run.line("").split()]
        run.process.kill()
        gone(*pids)
    free(port)


# --- streams and terminals ------------------------------------------------------------------------


def test_stdin_and_stdout_belong_to_the_program() -> None:
    text = "".join(f"line {number}\n" for number in range(10_000))
    assert fastports("run", "--wait", "0", "--", "cat", stdin=text).stdout == text


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_survived(closed: str) -> None:
    words = ["run", "--", "sh", "-c", "exit 3"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr


def test_nobody_reading_its_lines_does_not_end_it() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, "run", "--", "sh", "-c", "exit 3"], stderr=writer, timeout=60
        )
    finally:
        os.close(writer)
    assert done.returncode == 3


def test_the_terminal_is_the_programs() -> None:
    code = "import os; print(os.getpgrp() == os.tcgetpgrp(0), os.ttyname(0), input('? '))"
    with terminal(*COMMAND, "run", "-q", "--wait", "0", *python(code)) as term:
        term.expect("? ")
        term.type("typed\n")
        assert term.end() == 0
    assert re.search(r"True /dev/pts/\d+ typed", term.shown)


def test_ctrl_c_on_a_terminal_reaches_the_program_once() -> None:
    words = ["run", "-q", "--wait", "0", "--", sys.executable, "-Sc", COUNT]
    with terminal(*COMMAND, *words) as term:
        term.expect("ready")
        term.type("\x03")
        term.expect("got 2")
        term.type("\x1c")  # Ctrl-\
        assert "got" not in term.expect("got 3").removesuffix("got 3")
        pid = term.pid
        os.kill(pid, signal.SIGTERM)  # not from the terminal: to the launcher alone
        assert term.end() == 7
    assert term.shown.count("got") == 1


def test_ctrl_z_stops_it_and_fg_goes_on() -> None:
    command = " ".join(COMMAND)
    with shell() as term:
        term.type(f"{command} run --wait 0 -- cat; echo status=$?\n")
        term.expect("has port")
        term.type("one\n")
        term.expect("one\r\none\r\n")
        term.type("\x1a")
        term.expect("Stopped")
        term.expect("$ ")
        term.type("fg\n")
        term.expect("-- cat")
        term.type("two\n")
        term.expect("two\r\ntwo\r\n")
        term.type("\x04")
        term.expect("$ ")
        term.type("exit\n")
        term.end()


def test_ctrl_z_leaves_a_program_that_ignores_it_in_the_foreground(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""\
import signal
signal.signal(signal.SIGTSTP, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's would wait for a read that began just now
print("ready")
while True:
    print("read", input())
""")
    command = " ".join([*COMMAND, "run", "-q", "--wait", "0", "--", *PYTHON[:1], str(program)])
    with shell() as term:
        term.type(f"{command}\n")
        term.expect("ready\r\n")
        (launcher,) = children(term.pid)
        term.type("\x1a")
        term.type("one\n")
        term.expect("read one")
        assert state(launcher) != "T"
        term.type("\x03")
        term.expect("$ ")
        term.type("exit\n")
        term.end()


def test_a_stopped_program_is_ended_all_the_same() -> None:
    with running("run", "-q", "--wait", "0", "--", "sh", "-c", "echo $$; kill -STOP $$") as run:
        pid = int(run.line(""))
        wait_until(lambda: state(pid) == "T", "the stop")
        run.signal(signal.SIGTERM)
        assert run.end() == 143


def test_a_hang_up_ends_it_and_nohup_keeps_it() -> None:
    script = "echo pid $$; sleep 100"
    words = ["run", "-q", "--wait", "0", "--", "sh", "-c", script]
    with terminal(*COMMAND, *words) as term:
        term.expect("pid ")
        pid = int(term.expect("\r\n"))
        term.close()
        assert term.end() == 128 + signal.SIGHUP
        gone(pid)
    nohup = "trap '' HUP; exec \"$@\""
    with terminal("/bin/sh", "-c", nohup, "sh", *COMMAND, *words) as term:
        term.expect("pid ")
        pid = int(term.expect("\r\n"))
        term.close()
        os.kill(term.pid, signal.SIGHUP)
        assert alive(pid)
        os.kill(term.pid, signal.SIGTERM)
        assert term.end() == 128 + signal.SIGTERM
        gone(pid)
