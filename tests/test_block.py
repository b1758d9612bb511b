"""PortBlock: what it shows, its door, its release, and who may act on it."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest
from worlds import Child, can_bind, in_child, libc, network, root_only, wait_until

import fastports
from fastports import BlockReleased, NotOwner, PortBlock, PortsUnavailable, _core


def test_a_block_is_a_sequence_of_its_ports() -> None:
    with fastports.allocate(5, label="five", metadata={"a": [1]}, host="127.0.0.1") as block:
        assert list(block) == list(block.ports) == list(range(block.first, block.last + 1))
        assert len(block) == 5
        assert block[0] == block.first and block[-1] == block.last == block.first + 4
        assert block[1:3] == range(block.first + 1, block.first + 3)
        assert list(reversed(block)) == list(block)[::-1]
        assert block.first in block and block.last + 1 not in block and "x" not in block
        first, *_, last = block
        assert (first, last) == (block.first, block.last)
        with pytest.raises(IndexError):
            block[5]
        assert (block.host, block.protocol, block.label) == ("127.0.0.1", "tcp", "five")
        assert block.owner.pid == os.getpid()
        assert len(block.owner.token) == 32
        assert block == block and block in {block}
        assert block.state == "held" and not block.released
        assert repr(block) == (
            f"<PortBlock {block.first}-{block.last}/tcp host='127.0.0.1' label='five' held>"
        )


def test_metadata_belongs_to_the_block() -> None:
    given = {"worker": "a", "ranks": [1, 2]}
    with fastports.allocate(metadata=given) as block:
        given["ranks"].append(3)  # type: ignore[attr-defined]
        block.metadata["worker"] = "b"
        assert block.metadata == {"worker": "a", "ranks": [1, 2]}
    with fastports.allocate() as block:
        assert block.metadata == {}


def test_two_blocks_are_never_equal_and_have_tokens_of_their_own() -> None:
    with fastports.allocate() as one, fastports.allocate() as other:
        assert one != other
        assert one.owner != other.owner
        assert one.owner.token != other.owner.token
        port = one.first
        one.release()
        with fastports.reserve(port) as again:
            assert again != one


def test_a_block_with_ports_of_both_protocols_lists_descriptors_in_port_order() -> None:
    with fastports.allocate(3, protocol="both") as block:
        shown = []
        for fd in block.filenos():
            assert not os.get_inheritable(fd)
            with socket.socket(fileno=os.dup(fd)) as sock:
                shown.append((sock.getsockname()[1], sock.type))
        tcp, udp = socket.SOCK_STREAM, socket.SOCK_DGRAM
        assert shown == [(port, kind) for port in block for kind in (tcp, udp)]


@pytest.mark.parametrize(
    "write", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
def test_a_block_cannot_be_copied_and_says_what_to_send(write: Callable[[object], object]) -> None:
    with (
        fastports.allocate() as block,
        pytest.raises(TypeError, match=r"list\(block\).*spawn"),
    ):
        write(block)


def test_a_block_cannot_be_changed_by_accident() -> None:
    with fastports.allocate() as block, pytest.raises((AttributeError, TypeError)):
        block.size = 3  # type: ignore[attr-defined]


# --- release ------------------------------------------------------------------------------------


def acts(block: PortBlock) -> list[Callable[[], object]]:
    return [
        block.filenos,
        block.open_door,
        block.close_door,
        block.close_holds,
        block.__enter__,
        lambda: block.open_door(block.first),
    ]


def test_release_frees_the_ports_at_once_and_may_be_repeated() -> None:
    block = fastports.allocate(4)
    for _ in range(3):
        block.release()
        assert block.released and block.state == "released"
        assert all(can_bind(port) for port in block)
    assert "released" in repr(block)
    assert len(block) == 4  # reading is fine


def test_after_release_every_act_is_refused_and_reading_is_not() -> None:
    block = fastports.allocate(3)
    block.release()
    for act in acts(block):
        with pytest.raises(BlockReleased, match="Allocate a new block") as caught:
            act()
        assert caught.value.range == f"{block.first}-{block.last}"
    assert list(block.ports) == list(block)


def test_with_releases_whatever_happens_in_it() -> None:
    with pytest.raises(KeyError), fastports.allocate() as block:
        raise KeyError
    assert block.released
    with fastports.allocate() as block:
        block.release()
    assert block.released
    assert can_bind(block.first)


def test_the_last_reference_gives_the_ports_back_and_warns() -> None:
    block = fastports.allocate(2)
    port = block.first
    with pytest.warns(ResourceWarning, match=f"unreleased <PortBlock {port}-{port + 1}"):
        del block
        gc.collect()
    assert can_bind(port)


def test_a_warning_that_is_an_error_keeps_no_port() -> None:
    """Whoever is told of the error may keep it, and with its traceback the block."""
    told: list[sys.UnraisableHookArgs] = []
    before = sys.unraisablehook
    sys.unraisablehook = told.append
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            block = fastports.allocate(2)
            first = block.first
            del block
        assert len(told) == 1 and isinstance(told[0].exc_value, ResourceWarning)
        assert can_bind(first) and can_bind(first + 1)
        assert not [entry for entry in fastports.entries() if entry.first == first]
    finally:
        sys.unraisablehook = before


def test_a_released_block_goes_without_a_warning_and_a_cycle_is_collected() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = fastports.allocate()
        gone = weakref.ref(block)
        block.release()
        del block
        gc.collect()
        assert gone() is None

    class Holder:
        pass

    holder = Holder()
    holder.block = fastports.allocate()  # type: ignore[attr-defined]
    holder.me = holder  # type: ignore[attr-defined]
    port = holder.block.first  # type: ignore[attr-defined]
    del holder
    with pytest.warns(ResourceWarning):
        gc.collect()
    assert can_bind(port)


def test_no_bytecode_runs_when_a_released_block_goes() -> None:
    """A signal handler runs between any two bytecodes; what it raises in a destructor is lost."""
    block = fastports.allocate(2)
    block.release()
    called: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(look)
    del block
    sys.setprofile(None)
    assert called == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_a_handler_raises_when_a_held_block_goes_is_heard(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise kind("by the handler")  # as if it ran there

    told: list[sys.UnraisableHookArgs] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(warnings, "warn", interrupted)
    block = fastports.allocate(2)
    first = block.first
    with pytest.raises(kind, match="by the handler"):
        del block
        for _ in range(1000):  # where the interpreter looks for what is pending
            pass
    assert told == []
    assert can_bind(first) and can_bind(first + 1)


def test_ctrl_c_is_heard_at_whatever_point_a_block_goes() -> None:
    """By chance, so many times over: a child that missed it would run until it is killed."""
    code = """
import signal, sys, time
import fastports
signal.signal(signal.SIGINT, signal.default_int_handler)

def loop():  # in a frame of its own: CPython 3.13 does not guard all of a loop right in the try
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    while time.monotonic() < end:
        fastports.allocate().release()

for _ in range(300):
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    end = time.monotonic() + 5
    try:
        loop()
    except KeyboardInterrupt:
        continue
    sys.exit("not heard")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_ends_silently_with_blocks_in_hand() -> None:
    code = """
import fastports
a = fastports.allocate(3)
class Keeper:
    def __init__(self): self.block = fastports.allocate(); self.me = self
keeper = Keeper()
fastports.keep = fastports.allocate(2)
print(a.first)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0
    assert "Error" not in done.stderr.replace("ResourceWarning", "")
    assert "Exception ignored" not in done.stderr or "ResourceWarning" in done.stderr
    assert can_bind(int(done.stdout))


def test_many_threads_may_release_one_block_and_its_ports_go_once() -> None:
    """A second close would hit a descriptor that is somebody else's by then."""
    with ThreadPoolExecutor(8) as pool:
        for _ in range(60):
            block = fastports.allocate(4)
            start = threading.Barrier(8)

            def release(block: PortBlock = block, start: threading.Barrier = start) -> None:
                start.wait()
                block.release()
                pipes = [os.pipe() for _ in range(3)]  # takes the numbers just closed
                for read, write in pipes:
                    os.write(write, b"x")
                    assert os.read(read, 1) == b"x"
                    os.close(read)
                    os.close(write)

            for future in [pool.submit(release) for _ in range(8)]:
                future.result()
            assert block.released


def test_acts_that_race_with_a_release_are_done_or_refused() -> None:
    unexpected = []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(80):
            block = fastports.allocate(4)
            start = threading.Barrier(4)

            def act(block: PortBlock = block, start: threading.Barrier = start) -> None:
                start.wait()
                for _ in range(20):
                    try:
                        assert len(block.filenos()) in (0, 4)
                        block.open_door()
                        block.close_door()
                        assert block.state in ("held", "released")
                    except BlockReleased:
                        pass
                    except Exception as exc:
                        unexpected.append(exc)

            def release(block: PortBlock = block, start: threading.Barrier = start) -> None:
                start.wait()
                block.release()

            for future in [pool.submit(act) for _ in range(3)] + [pool.submit(release)]:
                future.result()
            assert all(can_bind(port) for port in block)
    assert unexpected == []


def test_a_held_port_outlives_a_copy_of_its_descriptor_only_until_that_closes() -> None:
    block = fastports.allocate()
    copied = os.dup(block.filenos()[0])
    block.release()
    assert not can_bind(block.first)
    os.close(copied)
    assert can_bind(block.first)


# --- the door -----------------------------------------------------------------------------------


def test_a_door_of_a_port_that_is_not_in_the_block_is_an_error() -> None:
    with fastports.allocate(3) as block:
        for port in (block.first - 1, block.last + 1, 0, -1):
            with pytest.raises(IndexError):
                block.open_door(port)
        assert not can_bind(block.first, options=[socket.SO_REUSEADDR])


def test_two_ports_named_together_are_opened_together() -> None:
    with fastports.allocate(4) as block:
        block.open_door(block[0], block[2])
        entered = [can_bind(port, options=[socket.SO_REUSEADDR]) for port in block]
        assert entered == [True, False, True, False]
        block.close_door()
        assert not any(can_bind(port, options=[socket.SO_REUSEADDR]) for port in block)


# --- markers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "udp", "both"])
def test_closed_holds_keep_fastports_away_and_let_a_plain_binder_in(protocol: str) -> None:
    kinds = {"tcp": [socket.SOCK_STREAM], "udp": [socket.SOCK_DGRAM]}.get(
        protocol, [socket.SOCK_STREAM, socket.SOCK_DGRAM]
    )
    block = fastports.allocate(3, protocol=protocol)
    block.close_holds()
    block.close_holds()
    assert block.state == "closed"
    for kind in kinds:
        assert all(can_bind(port, kind=kind) for port in block)

    def others() -> list[str | None]:
        causes = []
        for port in block:
            with pytest.raises(PortsUnavailable) as caught:
                fastports.reserve(port, protocol=protocol)
            causes.append(caught.value.cause)
        with pytest.raises(PortsUnavailable):
            fastports.reserve((block.first, block.last), protocol=protocol)
        assert fastports.probe(block, protocol=protocol).tolist() == [1, 1, 1]
        return causes

    assert others() == ["marked"] * 3
    assert in_child(others) == ["marked"] * 3
    if protocol == "tcp":
        fastports.reserve(block.first, protocol="udp").release()
    block.release()
    fastports.reserve((block.first, block.last), protocol=protocol).release()


def test_a_port_that_somebody_else_has_marked_stays_held() -> None:
    with fastports.allocate(3) as block:
        stranger = _core.bind_abstract(_core.marker(_core.TCP, block.last))
        with pytest.raises(PortsUnavailable) as caught:
            block.close_holds()
        assert caught.value.cause == "marked"
        assert block.state == "held"
        assert not any(can_bind(port) for port in block)
        os.close(stranger)
        block.close_holds()
        assert block.state == "closed"


def test_markers_that_race_with_a_release_are_let_go() -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(100):
            block = fastports.allocate(4)
            start = threading.Barrier(2)

            def close(block: PortBlock = block, start: threading.Barrier = start) -> None:
                start.wait()
                with contextlib.suppress(BlockReleased):
                    block.close_holds()

            def release(block: PortBlock = block, start: threading.Barrier = start) -> None:
                start.wait()
                block.release()

            for future in (pool.submit(close), pool.submit(release)):
                future.result()
            assert not any(_core.is_bound(_core.marker(_core.TCP, port)) for port in block)


# --- fork ---------------------------------------------------------------------------------------


def test_a_forked_child_may_read_a_block_but_not_act_on_it() -> None:
    block = fastports.allocate(3, label="mine")

    def read() -> list[str]:
        assert list(block) == list(block.ports)
        assert block.label == "mine"
        assert f"of pid {os.getppid()}" in repr(block)
        refusals = []
        for act in [*acts(block), block.release]:
            with pytest.raises(NotOwner) as caught:
                act()
            assert caught.value.caller == os.getpid()
            refusals.append(str(caught.value))
            assert caught.value.owner == os.getppid()
        return refusals

    assert all("Allocate in the child" in text for text in in_child(read))
    assert block.state == "held"
    assert not can_bind(block.first)
    block.release()


def test_a_forked_child_holds_nothing_of_its_parent() -> None:
    """The port is free the moment its owner says so, though the child lives on."""
    blocks = [
        fastports.allocate(3),
        fastports.allocate(2, protocol="both", label="two"),
        *fastports.allocate_many({"a": 1, "b": 4}).values(),
    ]
    handed = fastports.allocate(2)
    handed.close_holds()
    told, tell = os.pipe()

    def live_on() -> None:
        os.close(tell)
        os.read(told, 1)

    child = Child(live_on)
    try:
        for block in [*blocks, handed]:
            assert all(not can_bind(port) or block is handed for port in block)
            block.release()
            for port in block:
                assert can_bind(port)
                assert can_bind(port, kind=socket.SOCK_DGRAM)
        assert not _core.is_bound(_core.marker(_core.TCP, handed.first))
        assert [e for e in fastports.entries() if e.pid == os.getpid()] == []
    finally:
        os.close(told)
        os.close(tell)
        child.result()


def test_the_end_of_a_forked_child_frees_nothing_of_its_parent() -> None:
    with fastports.allocate(3) as block:

        def collect() -> None:
            gc.collect()

        in_child(collect)
        assert not any(can_bind(port) for port in block)
        assert block.state == "held"


def test_a_child_that_forks_inside_a_with_statement_leaves_it_quietly() -> None:
    read, write = os.pipe()
    with fastports.allocate() as block:
        pid = os.fork()
    if pid == 0:  # out of the statement without NotOwner
        os.write(write, b"quiet" if not can_bind(block.first) else b"free")
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        # by then the parent may have released: what counts is that the child came this far
        assert file.read() in (b"quiet", b"free")


def test_a_child_forked_by_other_means_frees_nothing_either() -> None:
    """fork(2) from C, of which Python is not told: the child must still not give ports back."""
    block = fastports.allocate(2)
    released: list[object] = []

    class Recorder:
        def release(self, blocks: object) -> None:
            released.append(blocks)

        release_later = release

        def state(self, block: object) -> str:
            return "held"

    block._registry = Recorder()
    fork = ctypes.PyDLL(None).fork
    pid = fork()
    if pid == 0:
        status = 9
        try:
            try:
                block.release()
            except NotOwner:
                status = 0
            del block
            gc.collect()
            if released:
                status = 7
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert block.state == "held"
    assert not can_bind(block.first)
    block.release()
    assert len(released) == 1


def test_a_forked_child_allocates_for_itself_and_differently() -> None:
    """Own entropy for each call: a fork repeats nothing."""

    def draw() -> list[int]:
        drawn = []
        for _ in range(4):
            with fastports.allocate() as block:
                assert block.owner.pid == os.getpid()
                drawn.append(block.first)
        return drawn

    fastports.allocate().release()
    children = [Child(draw) for _ in range(4)]
    draws = [child.result() for child in children]
    assert len(set(map(str, draws))) == 4


def test_blocks_of_multiprocessing_workers_are_their_own() -> None:
    context = multiprocessing.get_context("fork")
    with fastports.allocate(2) as block:
        queue = context.SimpleQueue()

        def work() -> None:
            with fastports.allocate(2) as mine:
                queue.put((mine.first, mine.owner.pid))

        process = context.Process(target=work)
        process.start()
        first, pid = queue.get()
        process.join()
        assert pid == process.pid
        process.close()
        queue.close()
        assert first not in (block.first, block.last)
        assert block.state == "held"


@root_only
def test_forks_amid_searches_of_other_threads_leave_no_port_behind() -> None:
    """A child that lives on while its parent's threads search holds none of their ports."""
    with network():
        stop = threading.Event()
        failures: list[BaseException] = []

        def search() -> None:
            try:
                with network_of(main):
                    while not stop.is_set():
                        with fastports.allocate(
                            4, range="20000-20063", protocol="both", timeout=30
                        ):
                            pass
                        fastports.probe(range(20000, 20064))
            except BaseException as exc:
                failures.append(exc)

        main = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        told, tell = os.pipe()

        def live_on() -> None:
            os.close(tell)
            os.read(told, 1)

        fastports.probe([20000])
        threads = [threading.Thread(target=search) for _ in range(3)]
        for thread in threads:
            thread.start()
        children = [Child(live_on) for _ in range(40)]
        stop.set()
        for thread in threads:
            thread.join()
        held = fastports.probe(range(20000, 20064), protocol="both").tolist()
        os.close(told)
        os.close(tell)
        for child in children:
            child.result()
        os.close(main)
        assert failures == []
        assert sum(held) == 0


class network_of:
    """The calling thread in the network namespace of a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        assert libc.setns(self._fd, 0x40000000) == 0

    def __exit__(self, *exc: object) -> None:
        pass  # the thread ends with it


# --- a process that dies ------------------------------------------------------------------------


def test_the_ports_of_a_killed_process_are_free_at_once() -> None:
    """SIGKILL of a process that holds 100 ports, in all protocols."""
    read, write = os.pipe()

    def hold() -> None:
        blocks = [fastports.allocate(50, protocol="both"), fastports.allocate(50, label="killed")]
        os.write(write, f"{blocks[0].first} {blocks[1].first}\n".encode())
        signal.pause()

    child = Child(hold)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        firsts = [int(word) for word in file.readline().split()]
    ports = [port for first in firsts for port in range(first, first + 50)]
    assert not any(can_bind(port) for port in ports)
    assert len([entry for entry in fastports.entries() if entry.pid == child.pid]) == 2
    child.kill()  # and waited for: the kernel has closed all by then
    assert all(can_bind(port) for port in ports)
    assert all(can_bind(port, kind=socket.SOCK_DGRAM) for port in ports)
    assert not [entry for entry in fastports.entries() if entry.pid == child.pid]


def test_a_program_started_without_closing_descriptors_keeps_no_port() -> None:
    """C30: every descriptor is close-on-exec."""
    block = fastports.allocate(3, protocol="both", label="mine")
    sleeper = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        wait_until(
            lambda: os.readlink(f"/proc/{sleeper.pid}/exe").endswith(("sleep", "coreutils")),
            "the sleeper is executed",
        )
        block.release()
        for port in block:
            assert can_bind(port)
            assert can_bind(port, kind=socket.SOCK_DGRAM)
        assert not [entry for entry in fastports.entries() if entry.label == "mine"]
    finally:
        sleeper.kill()
        sleeper.wait()
