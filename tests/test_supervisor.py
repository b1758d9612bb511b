"""The supervisor: replicas that come back on ports that were held all the while."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from programs import program
from worlds import can_bind, in_child, wait_until

import fastports
from fastports import HandoffError, InvalidRequest, NotOwner, Supervisor, entries
from fastports.child import sweep
from fastports.supervisor import Change

SERVER = program("server", "{port}")
#: For programs that are meant to crash: no time is lost between two starts.
AT_ONCE: dict[str, Any] = {"backoff": 0.0}


class Told:
    """Remembers changes, and waits for one."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def __call__(self, change: Change) -> None:
        self.changes.append(change)

    def states(self, replica: int = 0) -> list[str]:
        return [change.state for change in self.changes if change.replica == replica]

    def until(self, state: str, replica: int = 0, times: int = 1) -> Change:
        def found() -> list[Change]:
            return [c for c in self.changes if (c.replica, c.state) == (replica, state)]

        wait_until(lambda: len(found()) >= times, f"replica {replica} {state} {times} times")
        return found()[times - 1]


@pytest.fixture
def told() -> Told:
    return Told()


def ask(port: int) -> int:
    """The pid of whoever answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        return int(sock.recv(100))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def thief(ports: list[int]) -> Iterator[list[int]]:
    """Binds these ports, with every option but SO_REUSEADDR, until the end of the block."""
    stolen: list[int] = []
    over = threading.Event()

    def steal() -> None:
        while not over.is_set():
            for port in ports:
                if can_bind(port) or can_bind(port, options=[socket.SO_REUSEPORT]):
                    stolen.append(port)

    thread = threading.Thread(target=steal)
    thread.start()
    try:
        yield stolen
    finally:
        over.set()
        thread.join()


def first_port(supervisor: Supervisor) -> int:
    return supervisor.replicas[0].block.first


def test_the_end_of_a_program_that_another_thread_reaped_is_seen(told: Told) -> None:
    with Supervisor(["sleep", "600"], wait=None, restart="always", max_restarts=None,
                    on_change=told, **AT_ONCE):  # fmt: skip
        for round_ in range(1, 11):
            pid = told.until("running", times=round_).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}").exists():
                sweep()  # as each spawn does
        told.until("running", times=11)


def test_a_change_is_a_sentence_that_says_what_comes_next() -> None:
    facts: dict[str, Any] = {
        "label": "", "name": "serve", "ports": [20417], "protocol": "tcp", "pid": 7,
        "returncode": 3, "seconds": 1.5, "restarts": 0,
    }  # fmt: skip
    for reason, why in (("it did not listen.", ": it did not listen."), ("", ".")):
        change = Change(0, "waiting", delay=0.25, reason=reason, **facts)
        assert str(change) == (
            f"serve (pid 7) ended with status 3 after 1.50 s{why} It is started again in 0.25 s."
        )


# --- starting -------------------------------------------------------------------------------------


def test_each_replica_has_a_block_a_label_and_a_number_of_its_own(told: Told) -> None:
    json = '{"a": {"b": "{replica}"}} {} {'
    code = "import os, sys; print(sys.argv[1:], os.environ['RANK'], flush=True)\n"
    listens = "second = serve(int(sys.argv[4].split('-')[1]))\n"
    code += SERVER[4].replace("answer(serve", listens + "answer(serve")
    command = [*SERVER[:4], code, "{port0}", "", json, "{replica}-{port1}"]
    reader, writer = os.pipe()
    with Supervisor(
        command, count=3, size=2, label="web", env={"RANK": "r{replica}"}, stdout=writer,
        on_change=told,
    ) as supervisor:  # fmt: skip
        os.close(writer)
        supervisor.wait_up(20)
        labels = [entry.label for entry in entries() if entry.pid == os.getpid()]
        assert sorted(labels) == ["web-0", "web-1", "web-2"]
        ports = [port for replica in supervisor.replicas for port in replica.block]
        assert len(set(ports)) == 6
        for replica in supervisor.replicas:
            assert ask(replica.block.first) == replica.pid
            assert replica.ports == list(replica.block)
        with open(reader) as output:
            lines = {output.readline() for _ in range(3)}
    for number in range(3):
        a, b = ports[2 * number : 2 * number + 2]
        words = [str(a), "", json.replace("{replica}", str(number)), f"{number}-{b}"]
        assert f"{words} r{number}\n" in lines
        assert told.states(number) == ["starting", "listening", "stopping", "ended"]
    assert not [entry for entry in entries() if entry.pid == os.getpid()]


@pytest.mark.parametrize(
    ("label", "count", "expected"),
    [("", 1, [""]), ("x", 1, ["x"]), ("", 2, ["replica-0", "replica-1"]),
     ("a{replica}b", 2, ["a0b", "a1b"]), ("a{replica}b", 1, ["a0b"])],
)  # fmt: skip
def test_labels_are_what_one_would_expect(label: str, count: int, expected: list[str]) -> None:
    with Supervisor(program("never"), count=count, label=label, wait=None) as supervisor:
        assert [replica.label for replica in supervisor.replicas] == expected


def test_argv_may_be_made_for_each_replica() -> None:
    with Supervisor(
        lambda replica: program("server", str(replica.block[replica.number])), count=2, size=2
    ) as supervisor:
        # no port is named by a placeholder: both would be waited for
        first, second = supervisor.replicas
        wait_until(lambda: not can_bind(first.block[0]), "the hold")
        wait_until(lambda: answers(first.block[0]), "replica 0")
        wait_until(lambda: answers(second.block[1]), "replica 1")


def answers(port: int) -> bool:
    try:
        return ask(port) > 0
    except (ConnectionError, ValueError):  # refused, or it ended in the middle
        return False


def test_given_blocks_stay_the_callers() -> None:
    plan = fastports.allocate_many({"a": 1, "b": 1})
    try:
        with Supervisor(SERVER, blocks=list(plan.values())) as supervisor:
            supervisor.wait_up(20)
            assert [replica.block for replica in supervisor.replicas] == list(plan.values())
        assert [block.state for block in plan.values()] == ["held", "held"]
    finally:
        for block in plan.values():
            block.release()


def test_a_program_that_cannot_be_started_is_an_error_and_leaves_nothing() -> None:
    supervisor = Supervisor(lambda one: SERVER if one.number == 0 else ["/nonexistent"], count=2)
    with pytest.raises(FileNotFoundError):
        supervisor.start()
    assert supervisor.replicas == ()
    assert not [entry for entry in entries() if entry.pid == os.getpid()]


def test_all_blocks_or_none() -> None:
    with fastports.allocate(4) as block:
        with pytest.raises(fastports.PortsUnavailable):
            Supervisor(SERVER, count=3, range=(block.first, block.last)).start()
        assert [entry.first for entry in entries() if entry.pid == os.getpid()] == [block.first]


@pytest.mark.parametrize("handoff", ["broker", "door", "close", "fd"])
def test_it_works_in_every_mode(handoff: str, told: Told) -> None:
    if not fastports.handoff.modes()[handoff].works:
        pytest.skip(fastports.handoff.modes()[handoff].why)
    command = SERVER
    if handoff == "fd":
        code = "import socket, sys\ns = socket.socket(fileno=3)\ns.listen()\n"
        code += "while True: c, _ = s.accept(); c.sendall(b'%d' % __import__('os').getpid())"
        command = [sys.executable, "-ISc", code, "{fd}"]
    with Supervisor(command, handoff=handoff, on_change=told, **AT_ONCE) as supervisor:
        supervisor.wait_up(20)
        before = ask(first_port(supervisor))
        os.kill(before, signal.SIGKILL)
        told.until("listening", times=2)
        assert ask(first_port(supervisor)) not in (0, before)


# --- restarts -------------------------------------------------------------------------------------


def test_it_comes_back_on_the_same_port_that_nobody_could_take(told: Told) -> None:
    with Supervisor(SERVER, count=2, on_change=told, **AT_ONCE) as supervisor:
        supervisor.wait_up(20)
        ports = [replica.block.first for replica in supervisor.replicas]
        with thief(ports) as stolen:
            for times in range(2, 6):
                pid = ask(ports[0])
                os.kill(pid, signal.SIGKILL)
                told.until("listening", times=times)
                assert ask(ports[0]) != pid
        assert stolen == []
        assert told.states(1) == ["starting", "listening"]
        assert supervisor.replicas[0].restarts == 4


@pytest.mark.parametrize(
    ("restart", "status", "again"),
    [("always", 0, True), ("always", 3, True), ("on-failure", 0, False), ("on-failure", 3, True),
     ("no", 0, False), ("no", 3, False)],
)  # fmt: skip
@pytest.mark.parametrize("wait", ["listen", None])
def test_what_ended_is_started_again_as_asked(
    restart: str, status: int, again: bool, wait: str | None, told: Told
) -> None:
    command = [sys.executable, "-ISc", f"import os; os._exit({status})"]
    with Supervisor(
        command, restart=restart, max_restarts=1, wait=wait, on_change=told, **AT_ONCE
    ) as supervisor:
        assert supervisor.wait(20) == status
        assert supervisor.replicas[0].restarts == int(again)
    up = [] if wait else ["running"]
    once = ["starting", *up]
    end = "failed" if again or (status and wait) else "ended"
    assert told.states() == [*once, *(["waiting", *once] if again else []), end]


def test_a_crash_loop_is_given_up_and_told(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "fastports"),
        Supervisor(
            program("fails"), max_restarts=3, on_change=told, stderr=subprocess.DEVNULL, **AT_ONCE
        ) as supervisor,
    ):
        assert supervisor.wait(20) == 3
        with pytest.raises(HandoffError, match="given up after 3 restarts in a row") as caught:
            supervisor.wait_up()
        assert caught.value.returncode == 3
        assert supervisor.replicas[0].state == "failed"
        assert not can_bind(first_port(supervisor))  # held until the supervisor ends
    assert told.states().count("starting") == 4
    (error,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "given up after 3 restarts" in error.getMessage()
    assert error.getMessage().count("\n") == 0


def test_every_change_is_one_line_of_the_log(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "fastports"),
        Supervisor(SERVER, count=2, on_change=told, **AT_ONCE) as supervisor,
    ):
        supervisor.wait_up(20)
        os.kill(ask(first_port(supervisor)), signal.SIGKILL)
        told.until("listening", times=2)
    its = [record for record in caplog.records if record.name == "fastports.supervisor"]
    lines = [record.getMessage() for record in its]
    assert lines == [str(change) for change in told.changes]
    pid = told.changes[0].pid
    assert f"replica 0: python (pid {pid}) was ended by signal 9 after" in "\n".join(lines)


def test_the_pause_doubles_up_to_its_limit_give_or_take_half(told: Told) -> None:
    with Supervisor(
        program("fails"), max_restarts=5, backoff=0.004, max_backoff=0.03, on_change=told,
        stderr=subprocess.DEVNULL,
    ) as supervisor:  # fmt: skip
        supervisor.wait(20)
    delays = [change.delay for change in told.changes if change.state == "waiting"]
    for delay, middle in zip(delays, [0.004, 0.008, 0.016, 0.03, 0.03], strict=True):
        assert delay is not None and 0.5 * middle <= delay <= 1.5 * middle
    assert len({delay / middle for delay, middle in zip(delays, [1, 2, 4, 7.5, 7.5], strict=True)
                if delay}) > 1  # fmt: skip


def test_a_run_that_lasted_begins_a_new_row(told: Told) -> None:
    with Supervisor(
        SERVER, max_restarts=1, stable_after=0.0, on_change=told, **AT_ONCE
    ) as supervisor:
        for times in range(1, 5):
            pid = told.until("listening", times=times).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        told.until("listening", times=5)
        assert supervisor.replicas[0].restarts == 4


def test_what_does_not_listen_in_time_is_ended_and_counts_as_a_failure(told: Told) -> None:
    with Supervisor(
        program("never"), timeout=0.1, max_restarts=1, on_change=told, **AT_ONCE
    ) as supervisor:
        assert supervisor.wait(20) == 1
    first, *_, last = [change for change in told.changes if change.state in ("waiting", "failed")]
    assert "does not listen on port" in first.reason and "does not listen" in last.reason


def test_what_a_crashed_program_leaves_behind_is_ended_before_it_starts_again(told: Told) -> None:
    code = "w = os.fork()\nif w == 0: time.sleep(100)\nos.write(1, b'%d ' % w)\n"
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as output, Supervisor(
        [*SERVER[:4], SERVER[4].replace("answer(serve", code + "answer(serve"), "{port}"],
        stdout=writer, on_change=told, **AT_ONCE,
    ):  # fmt: skip
        pid = told.until("listening").pid
        worker = int(output.read(100))
        assert pid is not None and alive(worker)
        os.kill(pid, signal.SIGKILL)
        told.until("starting", times=2)
        assert not alive(worker)
        told.until("listening", times=2)
    os.close(writer)


def test_a_program_that_is_being_replaced_is_tried_again(told: Told, tmp_path: Path) -> None:
    path = tmp_path / "serve"
    path.write_text(f"#!{sys.executable} -IS\n" + SERVER[4])
    path.chmod(0o755)
    with Supervisor([path, "{port}"], on_change=told, backoff=0.01) as supervisor:
        pid = told.until("listening").pid
        assert pid is not None
        path.rename(tmp_path / "gone")
        os.kill(pid, signal.SIGKILL)
        change = told.until("waiting", times=2)
        assert change.pid is None and "No such file" in change.reason
        assert "serve could not be started" in str(change)
        (tmp_path / "gone").rename(path)
        told.until("listening", times=2)
        assert ask(first_port(supervisor)) > 0


# --- ending ---------------------------------------------------------------------------------------


def test_all_are_told_to_end_in_order_and_killed_after_the_grace(told: Told) -> None:
    with Supervisor(
        program("stubborn", "{port}"), count=3, grace=0.2, on_change=told
    ) as supervisor:
        supervisor.wait_up(20)
    stopping = [change.replica for change in told.changes if change.state == "stopping"]
    assert stopping == [0, 1, 2]
    assert told.changes.index(told.until("stopping", 2)) < told.changes.index(told.until("ended"))
    assert {one.returncode for one in supervisor.replicas} == {-signal.SIGKILL}


def test_who_ends_on_term_keeps_its_status_and_stop_is_idempotent(told: Told) -> None:
    supervisor = Supervisor(
        program("graceful", "{port}"), on_change=told, stdout=subprocess.DEVNULL
    ).start()
    supervisor.wait_up(20)
    supervisor.stop()
    assert supervisor.wait() == supervisor.returncode == 5
    supervisor.stop()
    supervisor.restart()  # nothing is left to restart
    assert told.states() == ["starting", "listening", "stopping", "ended"]


def test_stop_in_the_pause_before_a_restart_does_not_wait_for_it(told: Told) -> None:
    with Supervisor(
        program("fails"), backoff=1000.0, max_backoff=1000.0, on_change=told,
        stderr=subprocess.DEVNULL,
    ):  # fmt: skip
        told.until("waiting")
    assert told.states()[-1] == "ended"


def test_stop_while_it_starts(told: Told) -> None:
    with Supervisor(program("never"), on_change=told):
        told.until("starting")
    assert told.states() == ["starting", "stopping", "ended"]


def test_a_child_of_fork_cannot_act_on_it() -> None:
    with Supervisor(SERVER) as supervisor:
        supervisor.wait_up(20)

        def act() -> list[str]:
            refused = []
            for method in (supervisor.stop, supervisor.restart, supervisor.wait_up):
                try:
                    method()
                except NotOwner as exc:
                    refused.append(type(exc).__name__)
            return refused

        assert in_child(act) == ["NotOwner"] * 3
        assert ask(first_port(supervisor)) == supervisor.replicas[0].pid


def test_it_outlives_the_thread_that_started_it() -> None:
    supervisor = Supervisor(SERVER)
    thread = threading.Thread(target=supervisor.start)
    thread.start()
    thread.join()
    try:
        supervisor.wait_up(20)
        assert ask(first_port(supervisor)) == supervisor.replicas[0].pid
    finally:
        stopper = threading.Thread(target=supervisor.stop)
        stopper.start()
        stopper.join()


def test_waiting_has_a_limit() -> None:
    with Supervisor(program("never")) as supervisor:
        with pytest.raises(TimeoutError, match=r"replicas \[0\] still run after 0.01 s"):
            supervisor.wait(0.01)
        with pytest.raises(TimeoutError, match="are not up"):
            supervisor.wait_up(0.01)


# --- one after another ----------------------------------------------------------------------------


def test_a_restart_of_all_leaves_no_moment_when_all_are_down(told: Told) -> None:
    with Supervisor(SERVER, count=3, on_change=told) as supervisor:
        supervisor.wait_up(20)
        before = [replica.pid for replica in supervisor.replicas]
        ports = [replica.block.first for replica in supervisor.replicas]
        dead: list[int] = []
        over = threading.Event()

        def ask_all() -> None:
            while not over.is_set():
                # the round goes from the first to the last: asked the other way round, the
                # restarts cannot overtake the questions
                if not any(answers(port) for port in reversed(ports)):
                    dead.append(1)

        client = threading.Thread(target=ask_all)
        client.start()
        supervisor.restart()
        supervisor.wait_up(20)
        over.set()
        client.join()
        assert not dead
        after = [replica.pid for replica in supervisor.replicas]
        assert not set(before) & set(after)
        assert [replica.block.first for replica in supervisor.replicas] == ports
    # the next one is ended when the former is up again
    changes = [(change.state, change.replica) for change in told.changes[6:]]
    assert changes[:9] == [
        (state, number) for number in range(3) for state in ("stopping", "starting", "listening")
    ]


def test_a_restart_is_called_off_where_the_new_program_does_not_come_up(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    broken: list[int] = []

    def command(replica: object) -> list[str]:
        return program("fails") if broken else SERVER

    with Supervisor(
        command, count=2, max_restarts=1, on_change=told, stderr=subprocess.DEVNULL, **AT_ONCE
    ) as supervisor:
        supervisor.wait_up(20)
        kept = supervisor.replicas[1].pid
        broken.append(1)
        supervisor.restart()
        with pytest.raises(HandoffError, match="given up after 1 restart in a row"):
            supervisor.wait_up(20)
        assert supervisor.replicas[1].pid == kept and told.states(1) == ["starting", "listening"]
        # the thread tells what it gave up before it looks at what that means for the restart
        wait_until(lambda: "replica 0 did not come up again" in caplog.text, "the word")
        # mended: the one that was given up comes first
        broken.clear()
        supervisor.restart()
        supervisor.wait_up(20)
        assert [replica.is_up for replica in supervisor.replicas] == [True, True]
        assert supervisor.replicas[1].pid != kept


def test_one_replica_alone_is_restarted_too(told: Told) -> None:
    with Supervisor(SERVER, on_change=told) as supervisor:
        before = supervisor.wait_up(20).replicas[0].pid
        supervisor.restart()
        assert supervisor.wait_up(20).replicas[0].pid != before


# --- callbacks ------------------------------------------------------------------------------------


def test_a_callback_that_fails_is_logged_and_takes_nothing_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(change: Change) -> None:
        raise ZeroDivisionError

    with Supervisor(SERVER, on_change=fail) as supervisor:
        supervisor.wait_up(20)
    assert "on_change failed" in caplog.text and "ZeroDivisionError" in caplog.text
    caplog.clear()  # its tracebacks keep the children


def test_a_callback_may_stop_it_but_not_wait() -> None:
    raised: list[BaseException] = []

    def act(change: Change) -> None:
        if change.state == "listening":
            try:
                supervisor.wait()
            except RuntimeError as exc:
                raised.append(exc)
            supervisor.stop()

    supervisor = Supervisor(SERVER, on_change=act)
    supervisor.start()
    assert supervisor.wait(20) == -signal.SIGTERM
    supervisor.stop()
    assert len(raised) == 1


# --- as a program ---------------------------------------------------------------------------------

PROGRAM = """\
import sys
import fastports
supervisor = fastports.Supervisor(
    {argv}, count=2, grace={grace},
    on_change=lambda c: print(c.state, c.replica, c.pid, *c.ports, flush=True),
)
{act}
"""


@contextmanager
def script(act: str, argv: list[str] = SERVER, grace: float = 10.0) -> Iterator[Any]:
    text = PROGRAM.format(argv=argv, grace=grace, act=act)
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: Any, count: int, state: str) -> list[list[str]]:
    found = []
    deadline = threading.Timer(30, process.kill)
    deadline.start()
    try:
        for line in process.stdout:
            words = line.split()
            if words and words[0] == state:
                found.append(words[1:])
                if len(found) == count:
                    return found
        raise AssertionError(process.stderr.read())
    finally:
        deadline.cancel()
        deadline.join()


def test_run_stops_on_term_restarts_on_hangup_and_says_how_it_ended() -> None:
    with script("sys.exit(supervisor.run() % 256)") as process:
        first = lines_until(process, 2, "listening")
        process.send_signal(signal.SIGHUP)
        second = lines_until(process, 2, "listening")
        assert {pid for _, pid, _ in first}.isdisjoint(pid for _, pid, _ in second)
        assert sorted(port for *_, port in first) == sorted(port for *_, port in second)
        process.send_signal(signal.SIGTERM)
        lines_until(process, 2, "ended")
        assert process.wait(20) == -signal.SIGTERM % 256
        assert process.stderr.read() == ""


def test_a_second_ctrl_c_ends_the_grace() -> None:
    stubborn = program("stubborn", "{port}")
    with script("sys.exit(supervisor.run() % 256)", stubborn, grace=1000.0) as process:
        pids = [int(pid) for _, pid, _ in lines_until(process, 2, "listening")]
        process.send_signal(signal.SIGINT)
        lines_until(process, 2, "stopping")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT % 256
        assert not any(map(alive, pids))


def test_a_second_ctrl_c_ends_the_grace_however_late_its_handler_goes_on() -> None:
    """The thread that ends the programs may be at it before the handler is done."""
    slowly = """
import time
request = supervisor._request
supervisor._request = lambda what: (request(what), time.sleep(0.2))
sys.exit(supervisor.run() % 256)
"""
    with script(slowly, program("stubborn", "{port}"), grace=1000.0) as process:
        lines_until(process, 2, "listening")
        process.send_signal(signal.SIGINT)
        lines_until(process, 2, "stopping")
        time.sleep(0.3)  # the handler of the first is done
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT % 256


def test_a_forgotten_supervisor_ends_with_the_interpreter() -> None:
    with script("supervisor.start().wait_up(); print('over', flush=True)") as process:
        pids = [int(pid) for _, pid, _ in lines_until(process, 2, "listening")]
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
        assert not any(map(alive, pids))


def test_sigkill_of_its_process_ends_the_programs_and_frees_the_ports() -> None:
    with script("supervisor.run()") as process:
        told = lines_until(process, 2, "listening")
        process.kill()
        wait_until(lambda: not any(alive(int(pid)) for _, pid, _ in told), "the end")
        for _, _, port in told:
            wait_until(lambda port=int(port): can_bind(port), "the port")  # type: ignore[misc]


# --- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"count": 0}, "count"), ({"count": True}, "count"), ({"count": 1.5}, "count"),
        ({"restart": "maybe"}, "restart"), ({"max_restarts": -1}, "max_restarts"),
        ({"max_restarts": True}, "max_restarts"), ({"backoff": -1}, "backoff"),
        ({"backoff": float("nan")}, "backoff"), ({"stable_after": "x"}, "stable_after"),
        ({"max_backoff": None}, "max_backoff"), ({"grace": -1.0}, "grace"),
        ({"timeout": "x"}, "timeout"), ({"wait": "soon"}, "wait"), ({"blocks": []}, "blocks"),
        ({"stdout": subprocess.PIPE}, "stdout"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_touched(
    options: dict[str, Any], argument: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Supervisor(SERVER, **options)
    assert caught.value.argument == argument
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "act", [lambda s: s.wait(), lambda s: s.wait_up(), lambda s: (s.start(), s.start())]
)
def test_wrong_order_is_an_error_that_says_so(act: Callable[[Supervisor], object]) -> None:
    supervisor = Supervisor(SERVER)
    with pytest.raises(RuntimeError, match="start"):
        act(supervisor)
    supervisor.stop()


def test_it_is_imported_when_it_is_used() -> None:
    code = "import fastports, sys; assert 'threading' not in sys.modules; fastports.Supervisor"
    subprocess.run([sys.executable, "-Ic", code], check=True)
