"""Starting programs from C: what the child gets, what comes back, who ends when."""

from __future__ import annotations

import array
import errno
import gc
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastports import _spawn

ENV = [name + b"=" + value for name, value in os.environb.items()]


def start(*argv: str | bytes, env: list[bytes] = ENV, **options: Any) -> _spawn.Process:
    arguments = [os.fsencode(argument) for argument in argv]
    return _spawn.start([arguments[0]], arguments, env, **options)


def finish(process: _spawn.Process) -> int:
    assert process.ended(20)
    code = process.poll()
    assert code is not None
    return code


def output(*argv: str | bytes, **options: Any) -> str:
    reader, writer = os.pipe()
    try:
        descriptors = {1: writer, **options.pop("descriptors", {})}
        process = start(*argv, descriptors=descriptors, **options)
    finally:
        os.close(writer)
    with open(reader) as stream:
        text = stream.read()
    assert finish(process) == 0
    return text


def descriptors(process: _spawn.Process) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the state was not reached in time"
        time.sleep(0.002)


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def spawner_threads() -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return names.count("fastports-spawn\n"[:15] + "\n")


def python(code: str, *, check: bool = True, **options: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, **options
    )
    assert not check or done.returncode == 0, done.stderr
    text: str = done.stdout
    return text


def test_a_program_gets_its_arguments_its_environment_and_its_directory(tmp_path: Path) -> None:
    text = output(
        "/bin/sh", "-c", 'echo "$1|$A|$PWD"; pwd', "name", "one two",
        env=[b"A=b=c"], cwd=os.fsencode(tmp_path),
    )  # fmt: skip
    assert text == f"one two|b=c|{tmp_path}\n{tmp_path}\n"


@pytest.mark.parametrize(
    ("programs", "options", "error", "stage"),
    [
        ([b"/nonexistent"], {}, FileNotFoundError, "exec"),
        ([b"/etc/passwd/x", b"/nonexistent"], {}, FileNotFoundError, "exec"),
        ([b"/etc/passwd"], {}, PermissionError, "exec"),
        ([b"/etc/passwd", b"/nonexistent"], {}, PermissionError, "exec"),
        ([b"/bin/true"], {"cwd": b"/nonexistent"}, FileNotFoundError, "directory"),
        ([b"/bin/true"], {"cwd": b"/etc/passwd"}, NotADirectoryError, "directory"),
        ([b"/bin/true"], {"descriptors": {0: 987}}, OSError, "descriptors"),
        ([b"/bin/true"], {"filter": b"\xff" * 8}, OSError, "filter"),
    ],
)
def test_a_failed_start_tells_errno_and_stage_and_leaves_nothing(
    programs: list[bytes], options: dict[str, object], error: type[OSError], stage: str
) -> None:
    with pytest.raises(error) as caught:
        _spawn.start(programs, [b"x"], ENV, **options)  # type: ignore[arg-type]
    assert caught.value.stage == stage  # type: ignore[attr-defined]
    assert spawner_threads() == 0


def test_a_script_without_an_interpreter_line_is_refused_as_by_popen(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo no\n")
    script.chmod(0o755)
    with pytest.raises(OSError) as caught:
        start(str(script))
    assert caught.value.errno == errno.ENOEXEC


def test_the_first_candidate_that_can_be_executed_is() -> None:
    process = _spawn.start([b"/nonexistent/true", b"/bin/true"], [b"true"], ENV)
    assert finish(process) == 0


@pytest.mark.parametrize("where", ["programs", "argv", "env", "cwd"])
def test_a_null_byte_is_refused_before_anything_starts(where: str) -> None:
    arguments = {"programs": [b"/bin/true"], "argv": [b"x"], "env": [], "cwd": b"/"}
    arguments[where] = b"a\0b" if where == "cwd" else [b"a\0b"]
    with pytest.raises(ValueError, match="null"):
        _spawn.start(**arguments)  # type: ignore[arg-type]


def test_a_child_has_default_signal_dispositions_and_an_empty_mask() -> None:
    before = (
        signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        signal.signal(signal.SIGUSR2, lambda *_: None),
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGRTMIN})
    try:
        text = output("/bin/cat", "/proc/self/status")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGUSR2, before[1])
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    assert int(fields["SigBlk"], 16) == int(fields["SigIgn"], 16) == 0


def test_signals_of_the_c_library_that_are_ignored_are_not_so_in_the_child() -> None:
    # posix_spawn of a program that has used pthread_cancel leaves signal 32 ignored
    number = {"x86_64": 13, "aarch64": 134}[platform.machine()]
    code = f"""
import ctypes, sys
from fastports import _spawn
ignore = (ctypes.c_ulong * 4)(1, 0, 0, 0)
for name in (32, 33):
    assert ctypes.CDLL(None).syscall({number}, name, ignore, None, 8) == 0
child = _spawn.start([b"/bin/grep"], [b"grep", b"SigIgn", b"/proc/self/status"], [])
child.ended(20)
sys.exit(child.poll())
"""
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert int(told.stdout.split()[1], 16) == 0


def test_a_child_has_no_descriptor_but_the_standard_ones() -> None:
    with socket.socket() as sock:
        os.set_inheritable(sock.fileno(), True)
        process = start("/bin/sleep", "100")
        until(lambda: descriptors(process) == {0, 1, 2})  # the loader opens libraries first
        process.send_signal(signal.SIGKILL)
        finish(process)


def test_descriptors_can_be_mapped_onto_each_other() -> None:
    a, b = os.memfd_create("a"), os.memfd_create("b")
    try:
        os.write(a, b"first")
        os.write(b, b"second")
        swapped = output(
            "/bin/sh", "-c", f"cat /proc/self/fd/{a} /proc/self/fd/{b} /proc/self/fd/17",
            descriptors={a: b, b: a, 17: a},
        )  # fmt: skip
    finally:
        os.close(a)
        os.close(b)
    assert swapped == "secondfirstfirst"


def test_a_launcher_without_standard_descriptors_can_start_programs() -> None:
    code = """
import os, time
from fastports import _spawn
for fd in (0, 1, 2):
    os.close(fd)
reader, writer = os.pipe()       # 0 and 1 now: not to be confused with the child's
other = os.open("/dev/null", os.O_RDWR)
p = _spawn.start([b"/bin/sh"], [b"sh", b"-c", b"echo here; echo there >&2; exec sleep 100"],
                 [], descriptors={1: writer, 2: writer})
os.close(writer)
text = b""
while text != b"here\\nthere\\n":
    text += os.read(reader, 100)
deadline = time.monotonic() + 10   # the shell has descriptors of its own until it is sleep
while sorted(os.listdir(f"/proc/{p.pid}/fd")) != ["1", "2"]:
    assert time.monotonic() < deadline
p.send_signal(9)
assert p.ended(20) and p.poll() == -9
os._exit(42)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=30)
    assert done.returncode == 42


def refusing(call: int, error: int) -> str:
    """Code that makes a system call fail in the process that runs it, and in its children."""
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[platform.machine()]
    return f"""
import ctypes, struct
op = lambda code, yes, no, value: struct.pack("HBBI", code, yes, no, value)
program = b"".join([
    op(0x20, 0, 0, 4), op(0x15, 0, 3, {arch}),
    op(0x20, 0, 0, 0), op(0x15, 0, 1, {call}),
    op(0x06, 0, 0, 0x00050000 | {error}), op(0x06, 0, 0, 0x7FFF0000),
])
buffer = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
assert libc.prctl(22, 2, ctypes.create_string_buffer(fprog), 0, 0) == 0
"""


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_descriptors_are_closed_where_close_range_is_refused(error: int) -> None:
    code = (
        refusing(436, error)
        + """
import os, time
from fastports import _spawn
for _ in range(300):             # more than one read of the directory lists
    os.set_inheritable(os.dup(1), True)
p = _spawn.start([b"/bin/sleep"], [b"sleep", b"100"], [], descriptors={77: 1})
deadline = time.monotonic() + 10   # the loader opens libraries first
while sorted(os.listdir(f"/proc/{p.pid}/fd")) != ["0", "1", "2", "77"]:
    assert time.monotonic() < deadline, os.listdir(f"/proc/{p.pid}/fd")
p.send_signal(9)
assert p.ended(20) and p.poll() == -9
"""
    )
    python(code, stdin=subprocess.DEVNULL)


def test_a_child_is_waited_for_by_polling_where_there_is_no_pidfd() -> None:
    code = (
        refusing(434, errno.ENOSYS)
        + """
import time
from fastports import _spawn
p = _spawn.start([b"/bin/sleep"], [b"sleep", b"0.2"], [])
assert p.pidfd == -1
assert not p.ended(0.01) and p.poll() is None
assert p.ended(20) and p.poll() == 0
p = _spawn.start([b"/bin/sleep"], [b"sleep", b"100"], [])
assert p.send_signal(15) and p.ended() and p.poll() == -15
print("done")
"""
    )
    assert python(code) == "done\n"


@pytest.mark.parametrize(
    ("group", "expected"),
    [(_spawn.SHARED, "neither"), (_spawn.OWN_GROUP, "group"), (_spawn.OWN_SESSION, "session")],
)
def test_the_process_group_is_the_one_asked_for(group: int, expected: str) -> None:
    process = start("/bin/sleep", "100", group=group)
    mine = os.getpgid(process.pid) == process.pid, os.getsid(process.pid) == process.pid
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert (
        mine
        == {"neither": (False, False), "group": (True, False), "session": (True, True)}[expected]
    )


def test_status_and_signal_come_back_and_the_child_is_reaped_once() -> None:
    process = start("/bin/sh", "-c", "exit 7")
    assert (finish(process), process.poll(), process.returncode) == (7, 7, 7)
    process = start("/bin/sleep", "100")
    assert not process.ended(0)
    assert not process.ended(0.01)
    assert process.poll() is None
    assert process.send_signal(signal.SIGUSR1)
    assert finish(process) == -signal.SIGUSR1
    assert not process.send_signal(signal.SIGKILL)


def test_a_status_taken_by_somebody_else_is_told_from_success() -> None:
    process = start("/bin/true")
    os.waitpid(process.pid, 0)
    assert process.poll() == 255
    assert process.ended()


def test_a_gated_child_holds_nothing_of_the_launchers_and_runs_only_when_let() -> None:
    reader, writer = os.pipe()
    with socket.socket() as held, socket.socket() as other:
        held.bind(("127.0.0.1", 0))
        process = start("/bin/echo", "ran", gate=True, descriptors={1: writer})
        os.close(writer)
        assert process.at_gate
        assert runs(process.pid)
        address = held.getsockname()
        held.close()
        other.bind(address)  # the child has no copy
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 10)
        process.go()
        assert finish(process) == 0
        assert os.read(reader, 10) == b"ran\n"
        with pytest.raises(RuntimeError):
            process.go()
    os.close(reader)


def test_a_gated_child_that_cannot_execute_tells_so_when_let() -> None:
    process = start("/nonexistent", gate=True)
    with pytest.raises(FileNotFoundError):
        process.go()
    assert spawner_threads() == 0


@pytest.mark.parametrize("how", ["abort", "drop"])
def test_a_gated_child_that_is_given_up_never_runs(how: str) -> None:
    process = start("/bin/echo", "never", gate=True)
    pid = process.pid
    if how == "abort":
        process.abort()
        process.abort()
        assert process.returncode == -signal.SIGKILL
    del process
    gc.collect()
    assert not os.path.exists(f"/proc/{pid}")
    assert spawner_threads() == 0


def test_a_filter_is_installed_and_its_listener_goes_to_the_launcher_alone() -> None:
    allow = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    with ours, theirs:
        process = start(
            "/bin/sh", "-c", "grep -e NoNew -e Seccomp: /proc/self/status; exec sleep 100",
            filter=allow, filter_flags=8, filter_to=theirs.fileno(), gate=True,
            descriptors={1: writer, 40: writer},
        )  # fmt: skip
        os.close(writer)
        _, ancillary, _, _ = ours.recvmsg(1, 64)
        listener = array.array("i", ancillary[0][2])[0]
        assert "seccomp" in os.readlink(f"/proc/self/fd/{listener}")
        process.go()
        text = ""
        while len(text.splitlines()) < 2:
            text += os.read(reader, 100).decode()
        until(lambda: descriptors(process) == {0, 1, 2, 40})
        os.close(listener)
        os.close(reader)
        process.send_signal(signal.SIGKILL)
        finish(process)
    assert text == "NoNewPrivs:\t1\nSeccomp:\t2\n"


def test_ctrl_c_in_a_start_that_hangs_leaves_no_child() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            theirs.send(b"x" * 4096)
    theirs.setblocking(True)  # the child will wait for room here

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    with ours, theirs:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                start(
                    "/bin/true",
                    filter=struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000),
                    filter_flags=8,
                    filter_to=theirs.fileno(),
                )
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert spawner_threads() == 0


def test_a_child_outlives_the_thread_that_started_it() -> None:
    started: list[_spawn.Process] = []
    thread = threading.Thread(target=lambda: started.append(start("/bin/sleep", "100")))
    thread.start()
    task = f"/proc/self/task/{thread.native_id}"
    thread.join()
    until(lambda: not os.path.exists(task))
    process = started[0]
    assert not process.ended(0.05)
    process.send_signal(signal.SIGKILL)
    finish(process)


def test_the_main_thread_starts_its_children_itself() -> None:
    process = start("/bin/sleep", "100")
    assert spawner_threads() == 0
    process.send_signal(signal.SIGKILL)
    finish(process)


def test_one_thread_starts_the_children_of_all_others_and_ends_with_the_last() -> None:
    started: list[_spawn.Process] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: started.append(start("/bin/sleep", "100")))
        thread.start()
        thread.join()
        assert spawner_threads() == 1
    for process in started:
        assert spawner_threads() == 1
        process.send_signal(signal.SIGKILL)
        finish(process)
    assert spawner_threads() == 0


def test_many_threads_start_many_children() -> None:
    codes: list[int] = []

    def work() -> None:
        for number in range(20):
            codes.append(finish(start("/bin/sh", "-c", f"exit {number}")))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == sorted(list(range(20)) * 8)
    assert spawner_threads() == 0


def test_a_forked_launcher_starts_its_own_children_and_leaves_its_parents_alone() -> None:
    code = """
import os
from fastports import _spawn
theirs = _spawn.start([b"/bin/sleep"], [b"sleep", b"100"], [])
gated = _spawn.start([b"/bin/sleep"], [b"sleep", b"100"], [], gate=True)
pid = os.fork()
if pid == 0:
    try:
        theirs.poll()
    except ChildProcessError:
        print("not mine", flush=True)
    own = _spawn.start([b"/bin/echo"], [b"echo", b"mine"], [])
    assert own.ended(20) and own.poll() == 0
    del theirs, gated
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert theirs.poll() is None and gated.at_gate
gated.abort()
theirs.send_signal(9)
assert theirs.ended(20) and theirs.poll() == -9
print("done")
"""
    assert python(code) == "not mine\nmine\ndone\n"


@pytest.mark.parametrize("gate", [False, True])
def test_a_child_ends_with_its_launcher_on_sigkill(gate: bool) -> None:
    code = f"""
import time
from fastports import _spawn
p = _spawn.start([b"/bin/sleep"], [b"sleep", b"100"], [], gate={gate})
print(p.pid, flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert runs(pid)
        launcher.kill()
    until(lambda: not runs(pid))


def test_a_whole_group_ends_with_its_launcher_by_the_leash() -> None:
    code = """
import os, time
from fastports import _spawn
reader, writer = os.pipe()
script = b"(sleep 100 & echo $!; wait) & sleep 100 & echo $!; echo $$; wait"
p = _spawn.start([b"/bin/sh"], [b"sh", b"-c", script], [], leash=reader)
os.close(reader)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(3)]
        assert all(map(runs, pids))
        launcher.kill()
    until(lambda: not any(map(runs, pids)))


def test_a_process_limit_is_told_and_leaves_nothing() -> None:
    code = """
import os, resource
from fastports import _spawn
os.setuid(65533)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
for _ in range(2):
    try:
        _spawn.start([b"/bin/true"], [b"true"], [])
    except BlockingIOError as error:
        print(error.stage)
"""
    if os.getuid():
        pytest.skip("the limit is set for another user")
    import fastports

    # the other user may not read this checkout; what is needed is loaded before
    assert fastports
    assert python("from fastports import _spawn\n" + code) == "fork\nfork\n"


def test_a_full_descriptor_table_is_told_and_leaves_nothing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
    try:
        with pytest.raises(OSError):
            while True:
                opened.append(os.dup(0))
        process = start("/bin/true")  # needs no descriptor but the pidfd, and that not dearly
        assert process.pidfd == -1
        assert finish(process) == 0
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
