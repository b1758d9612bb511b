"""The host registry: entries and markers, what strangers make of them, and who sees whom."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import (
    NOBODY,
    Child,
    become,
    can_bind,
    container,
    in_child,
    network,
    root_only,
    wait_until,
)

import fastports
from fastports import _core
from fastports.cli import main
from fastports.host import process_start

TICK = 1 / os.sysconf("SC_CLK_TCK")


def mine() -> list[fastports.Entry]:
    return [entry for entry in fastports.entries() if entry.pid == os.getpid()]


@contextlib.contextmanager
def bound(*names: bytes, kind: int = socket.SOCK_DGRAM) -> Iterator[None]:
    """Abstract names, bound as any program of any user can."""
    with ExitStack() as stack:
        for name in names:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            sock.bind(b"\0" + name)
            if kind == socket.SOCK_STREAM:
                sock.listen()
        yield


def listed(capsys: pytest.CaptureFixture[str]) -> tuple[str, list[dict[str, object]]]:
    """What ``ls`` prints as a table and as JSON; both end well."""
    capsys.readouterr()
    assert main(["ls"]) == 0
    table = capsys.readouterr().out
    assert main(["ls", "--json"]) == 0
    return table, json.loads(capsys.readouterr().out)


# --- what is recorded ---------------------------------------------------------------------------


def test_an_entry_tells_what_its_block_is() -> None:
    with (
        fastports.allocate(8, label="decode 0", protocol="both", host="127.0.0.1") as one,
        fastports.allocate(label="ünï") as other,
    ):
        found = {entry.first: entry for entry in mine()}
        assert set(found) == {one.first, other.first}
        entry = found[one.first]
        assert isinstance(entry, fastports.Entry)
        assert (entry.first, entry.last, entry.ports) == (one.first, one.last, one.ports)
        assert (entry.protocol, entry.host, entry.label) == ("both", "127.0.0.1", "decode 0")
        assert (entry.pid, entry.start) == (os.getpid(), process_start())
        assert entry.alive is True
        assert 0 <= entry.age < 60
        assert (found[other.first].protocol, found[other.first].host) == ("tcp", None)
        assert found[other.first].label == "ünï"
        assert found[other.first] == found[other.first] != entry
        assert json.loads(json.dumps(entry.as_dict())) == entry.as_dict()
    assert mine() == []


@pytest.mark.parametrize("host", [None, "127.0.0.1", "127.0.0.77", "::1", "::", "0.0.0.0"])
@pytest.mark.parametrize("protocol", ["tcp", "udp", "both"])
def test_every_kind_of_block_is_read_back_as_it_was_written(
    host: str | None, protocol: str
) -> None:
    with fastports.allocate(2, host=host, protocol=protocol) as block:
        (entry,) = mine()
        assert (entry.host, entry.protocol, entry.ports) == (host, protocol, block.ports)


def test_the_longest_label_on_the_longest_name_is_cut_between_letters() -> None:
    label = "ü" * 32
    with fastports.reserve((59998, 59999), label=label, host="::1", protocol="both") as block:
        (entry,) = mine()
        assert entry.ports == block.ports and entry.host == "::1"
        assert label.startswith(entry.label) and len(entry.label) >= 8


def test_an_entry_lasts_as_long_as_its_block() -> None:
    blocks = [fastports.allocate(label="first"), fastports.allocate(label="second")]
    assert {entry.label for entry in mine()} == {"first", "second"}
    blocks[0].release()
    assert {entry.label for entry in mine()} == {"second"}
    with blocks[1]:
        blocks[1].close_holds()
        assert {entry.label for entry in mine()} == {"second"}  # handed over, not given back
    assert mine() == []


def test_entries_come_in_port_order() -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(fastports.allocate(3, label="one of twenty"))
        firsts = [entry.first for entry in mine()]
        assert len(firsts) == 20 and firsts == sorted(firsts)


def test_a_block_goes_without_an_entry_where_somebody_has_taken_its_names() -> None:
    """And is held all the same: the entry only tells."""
    port = 0
    with fastports.allocate() as block:
        port = block.first
    start = process_start()
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME))
    names = [
        f"fastports/t/{port}-{port}/{os.getpid():x}/{start:x}/{second:x}/".encode()
        for second in range(now - 60, now + 120)
    ]
    with bound(*names), fastports.reserve(port) as block:
        assert not can_bind(port)
        block.close_holds()
        with pytest.raises(fastports.PortsUnavailable):
            fastports.reserve(port)


# --- hostile names ------------------------------------------------------------------------------

PID, START = f"{os.getpid():x}", f"{process_start():x}"
IGNORED = {
    "nothing": b"",
    "only a prefix": b"t",
    "a field too few": f"t/30000-30001/{PID}/{START}/0".encode(),
    "control characters": f"t/30000-30001/{PID}/{START}/0/\033[2J\a".encode(),
    "a newline among its fields": f"t/30000-30001/{PID}\n/{START}/0/a".encode(),
    "a line separator": f"t/30000-30001/{PID}/{START}/0/a\u2028b".encode(),
    "letters that turn the line around": f"t/30000-30001/{PID}/{START}/0/\u202eabc".encode(),
    "a half letter": f"t/30000-30001/{PID}/{START}/0/".encode() + b"\xc3",
    "not UTF-8": f"t/30000-30001/{PID}/{START}/0/".encode() + b"\xff\xfe",
    "a surrogate": f"t/30000-30001/{PID}/{START}/0/".encode() + b"\xed\xa0\x80",
    "an unknown protocol": f"x/30000-30001/{PID}/{START}/0/".encode(),
    "protocols by name": f"tcp/30000-30001/{PID}/{START}/0/".encode(),
    "no protocol": f"/30000-30001/{PID}/{START}/0/".encode(),
    "ports reversed": f"t/30001-30000/{PID}/{START}/0/".encode(),
    "port 0": f"t/0-1/{PID}/{START}/0/".encode(),
    "port 65536": f"t/65535-65536/{PID}/{START}/0/".encode(),
    "a huge port": f"t/30000-{'9' * 30}/{PID}/{START}/0/".encode(),
    "a negative port": f"t/-30000-30001/{PID}/{START}/0/".encode(),
    "padded ports": f"t/030000-030001/{PID}/{START}/0/".encode(),
    "no last port": f"t/30000/{PID}/{START}/0/".encode(),
    "an empty last port": f"t/30000-/{PID}/{START}/0/".encode(),
    "ports that int() takes": f"t/3_000-30_01/{PID}/{START}/0/".encode(),
    "ports in other digits": f"t/٣٠٠٠٠-٣٠٠٠١/{PID}/{START}/0/".encode(),
    "superscript ports": f"t/3²-30001/{PID}/{START}/0/".encode(),
    "a negative pid": f"t/30000-30001/-1/{START}/0/".encode(),
    "a pid with a sign": f"t/30000-30001/+1/{START}/0/".encode(),
    "a pid that is a path": b"t/30000-30001/../self/1/0",
    "no pid": f"t/30000-30001//{START}/0/".encode(),
    "a huge pid": f"t/30000-30001/{'f' * 40}/{START}/0/".encode(),
    "a pid in capitals": f"t/30000-30001/FF/{START}/0/".encode(),
    "a start with a prefix": f"t/30000-30001/{PID}/0x1/0/".encode(),
    "no time": f"t/30000-30001/{PID}/{START}//".encode(),
    "a time with spaces": f"t/30000-30001/{PID}/{START}/ 1/".encode(),
    "an address that is none": f"t/30000-30001@7f00/{PID}/{START}/0/".encode(),
    "an address too long": f"t/30000-30001@{'7f' * 17}/{PID}/{START}/0/".encode(),
    "an empty address": f"t/30000-30001@/{PID}/{START}/0/".encode(),
    "an address in capitals": f"t/30000-30001@7F000001/{PID}/{START}/0/".encode(),
    "a marker": b"m/t/30000",
    "a beacon": b"s/q",
}


@root_only
@pytest.mark.parametrize("name", IGNORED)
def test_a_malformed_name_is_passed_over(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    good = f"fastports/t/30002-30003/{PID}/{START}/0/good".encode()
    with network(), bound(b"fastports/" + IGNORED[name], good):
        assert [entry.label for entry in fastports.entries()] == ["good"]
        table, found = listed(capsys)
        assert [line.split()[0] for line in table.splitlines()] == ["PORTS", "30002-30003"]
        assert [item["label"] for item in found] == ["good"]


@root_only
@pytest.mark.parametrize(
    "name",
    [
        b"Fastports/t/30000-30001/1/1/0/x",
        b"/fastports/t/30000-30001/1/1/0/x",
        b" fastports/t/30000-30001/1/1/0/x",
        b"@fastports/t/30000-30001/1/1/0/x",
        b"\0fastports/t/30000-30001/1/1/0/x",
        b"fastport/t/30000-30001/1/1/0/x",
        b"x @fastports/t/30000-30001/1/1/0/x",
        b"fastports\0t\x0030000-30001\x001\x001\x000\0x",
    ],
)
def test_a_name_under_another_prefix_is_nobodys_entry(name: bytes) -> None:
    with network(), bound(name):
        assert list(fastports.entries()) == []


@root_only
def test_a_socket_of_another_kind_is_nobodys_entry() -> None:
    name = f"fastports/t/30000-30001/{PID}/{START}/0/x".encode()
    with network():
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            with bound(name, kind=kind):
                assert list(fastports.entries()) == []


@root_only
def test_a_line_that_a_newline_forges_is_no_more_than_the_name_itself_would_be() -> None:
    """The kernel writes names into /proc/net/unix as they are."""
    line = b"0: 2 0 0 0002 01 1 @fastports/t/1-9/1/1/0/forged"
    with network(), bound(b"fastports/t/30000-30001/1/1/0/\n" + line):
        assert {entry.label for entry in fastports.entries()} <= {"", "forged"}
        for entry in fastports.entries():
            assert entry.alive is not True


@root_only
def test_names_that_are_odd_but_possible_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        network(),
        bound(
            b"fastports/u/1-65535/ffffffffffff/ffffffffffff/ffffffffffff/a/b/c",
            b"fastports/b/9-9@00000000000000000000000000000001/0/0/0/",
        ),
    ):
        one, other = fastports.entries()
        assert (one.first, one.last, one.label, one.age) == (1, 65535, "a/b/c", 0.0)
        assert (other.host, other.pid, other.label) == ("::1", 0, "")
        assert one.alive is None and other.alive is None
        table, found = listed(capsys)
        assert len(table.splitlines()) == 3 and len(found) == 2


def well_formed() -> st.SearchStrategy[bytes]:
    """Names near to those of entries."""
    number = st.one_of(
        st.integers(-1, 2**80).map(lambda n: f"{n:x}"), st.sampled_from(["", PID, START, "0", "+1"])
    )
    port = st.integers(-2, 70_000).map(str)
    span = st.one_of(st.tuples(port, port).map("-".join), port, st.text(max_size=12))
    at = st.sampled_from(["", "@7f000001", "@" + 32 * "0", "@", "@zz", "@7f00000"])
    label = st.text(max_size=40)
    return st.tuples(st.sampled_from("tubm"), span, at, number, number, number, label).map(
        lambda f: f"{f[0]}/{f[1]}{f[2]}/{f[3]}/{f[4]}/{f[5]}/{f[6]}".encode("utf-8", "replace")
    )


@root_only
def test_whatever_anybody_binds_the_listing_is_well_formed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(st.binary(max_size=97), well_formed()), max_size=4, unique=True))
    def check(names: list[bytes]) -> None:
        names = list({(b"fastports/" + name)[:107] for name in names})
        with bound(*names):
            found = list(fastports.entries())
            table, shown = listed(capsys)
        assert len(shown) == len(found) <= 2 * len(names)
        for entry in found:
            assert 1 <= entry.first <= entry.last <= 65535
            assert entry.protocol in ("tcp", "udp", "both")
            assert entry.label.isprintable() and entry.age >= 0
        assert len(table.splitlines()) == (len(found) + 1 if found else 0)
        assert table.replace("\n", "").isprintable() or not found

    with network():
        check()


@root_only
def test_no_name_that_a_stranger_binds_makes_a_port_free_or_an_allocation_fail() -> None:
    """Markers keep a port away, which anybody can do by binding it; beacons only inform."""
    beacons = [b"fastports/s/%c" % letter for letter in b"abcdefghijklmnop"]
    marks = [b"fastports/m/t/%d" % port for port in range(20000, 20005)]
    odd = [b"fastports/m/t/", b"fastports/m/x/20006", b"fastports/m/t/020006"]

    def strangers(told: int, tell: int) -> None:
        with bound(*beacons, *marks, *odd):
            os.write(tell, b"!")
            os.read(told, 1)

    with network():
        ours, theirs = os.pipe(), os.pipe()
        stranger = Child(lambda: strangers(theirs[0], ours[1]))
        os.read(ours[0], 1)
        with fastports.allocate(5, range="20000-20009") as block:
            assert block.ports == range(20005, 20010)
            with pytest.raises(fastports.PortsUnavailable) as caught:
                fastports.allocate(range="20000-20009")
            assert caught.value.busy == 10
        os.write(theirs[1], b"!")
        stranger.result()
        for fd in (*ours, *theirs):
            os.close(fd)
        with fastports.allocate(10, range="20000-20009"):
            pass


@root_only
def test_lies_told_to_a_beacon_cost_time_and_change_no_answer() -> None:
    """A stranger tells every search that all ports were given back."""
    stop = threading.Event()
    lie = b"".join(port.to_bytes(2, "little") for port in range(20000, 20064))

    def tell(home: int) -> None:
        with socket.fromfd(home, socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            while not stop.is_set():
                for letter in "abcdefghijklmnop":
                    for data in (lie, b"", b"x", b"\xff" * 2001):
                        with contextlib.suppress(OSError):
                            sock.sendto(data, f"\0fastports/s/{letter}")

    # a socket belongs to the network it was made in, whichever thread uses it
    with network(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        liar = threading.Thread(target=tell, args=(sock.fileno(),))
        liar.start()
        try:
            with fastports.reserve((20000, 20062)):
                for _ in range(100):
                    with fastports.allocate(range="20000-20063") as block:
                        assert block.first == 20063
                        with pytest.raises(fastports.PortsUnavailable) as caught:
                            fastports.allocate(range="20000-20063")
                        assert caught.value.busy == 64
        finally:
            stop.set()
            liar.join()


# --- who sees whom ------------------------------------------------------------------------------


class Turn:
    """Something several processes wait for; copies of it may stay open in others."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def give(self) -> None:
        os.write(self._write, b"!" * 64)

    def wait(self) -> None:
        os.read(self._read, 1)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def next_tick() -> None:
    """Have two processes differ in their start times even when their pids are the same."""
    begin = time.clock_gettime(time.CLOCK_BOOTTIME)
    wait_until(
        lambda: time.clock_gettime(time.CLOCK_BOOTTIME) - begin > 2 * TICK, "a tick of the clock"
    )


Seen = tuple[list[int], list[tuple[str, list[int], "bool | None"]], "int | None"]


def neighbour(
    label: str, enter: Callable[[], None], ready: int, turns: list[Turn]
) -> Callable[[], Seen]:
    """Holds 10 of 20 ports; what it held and saw, and how many ports a refusal counted busy."""

    def live() -> Seen:
        enter()
        with fastports.allocate(10, range="20000-20019", label=label) as block:
            os.write(ready, b"!")
            turns[0].wait()
            seen = [(entry.label, list(entry.ports), entry.alive) for entry in fastports.entries()]
            busy = None
            try:
                fastports.allocate(range="20000-20019")
            except fastports.PortsUnavailable as refusal:
                busy = refusal.busy
            os.write(ready, b"!")
            turns[1].wait()
            return list(block), seen, busy

    return live


def neighbours(*enter: Callable[[], None]) -> list[Seen]:
    """Two processes that hold their ports at the same time, each where ``enter`` leads it."""
    turns = [Turn(), Turn()]
    read, ready = os.pipe()
    children = []
    for label, go in zip("ab", enter, strict=True):
        next_tick()
        children.append(Child(neighbour(label, go, ready, turns)))
    os.close(ready)
    answers: list[Seen] = []
    failure: AssertionError | None = None
    deadline = time.monotonic() + 20
    for turn in turns:
        told = b""
        while (
            len(told) < 2 and select.select([read], [], [], max(deadline - time.monotonic(), 0))[0]
        ):
            told += os.read(read, 1) or b"??"  # a failed one is told by its result
        turn.give()
    for child in children:
        try:
            answers.append(child.result())  # type: ignore[arg-type]
        except AssertionError as exc:
            failure = failure or exc
    for turn in turns:
        turn.close()
    os.close(read)
    if failure is not None:
        raise failure
    return answers


def disjoint(one: Seen, other: Seen) -> None:
    assert sorted(one[0] + other[0]) == list(range(20000, 20020))
    for seen in (one, other):
        assert [(label, ports) for label, ports, _ in seen[1]] == sorted(
            [("a", one[0]), ("b", other[0])], key=lambda pair: pair[1]
        )
        assert seen[2] == 20


@root_only
def test_c32_two_users_allocate_at_once_and_neither_locks_out_the_other() -> None:
    with network():
        one, other = neighbours(lambda: become(NOBODY), lambda: become(NOBODY - 1))
    disjoint(one, other)
    assert {alive for _, _, alive in one[1] + other[1]} == {True}  # /proc shows them


@root_only
def test_c32_a_user_finds_what_root_holds_and_root_what_a_user_holds() -> None:
    with network():
        one, other = neighbours(lambda: None, lambda: become(NOBODY))
    disjoint(one, other)


@root_only
@pytest.mark.parametrize("uid", [None, NOBODY], ids=["root", "rootless"])
def test_c29_containers_that_share_a_network_but_not_tmp_pids_or_users_exclude_each_other(
    uid: int | None,
) -> None:
    with network():
        try:
            one, other = neighbours(container, lambda: container(uid=uid))
        except AssertionError as failure:
            if "Error: unshare" in str(failure) or "Error: /proc" in str(failure):
                pytest.skip("no containers can be made here")
            raise
    disjoint(one, other)
    for own, seen in (("a", one), ("b", other)):
        # both are process 1 of their own pid namespace, where nobody else's pid means anything
        assert {label: alive for label, _, alive in seen[1]} == {
            label: label == own for label in "ab"
        }


@root_only
def test_c29_a_container_and_its_host_exclude_each_other() -> None:
    with network():
        one, other = neighbours(lambda: None, container)
    disjoint(one, other)


@root_only
def test_c33_a_recycled_pid_with_another_start_time_is_not_trusted() -> None:
    start = process_start()
    assert start is not None
    names = [
        f"fastports/t/30000-30000/{os.getpid():x}/{start:x}/0/now".encode(),
        f"fastports/t/30001-30001/{os.getpid():x}/{start - 1:x}/0/before".encode(),
        f"fastports/t/30002-30002/{os.getpid():x}/{start + 1:x}/0/after".encode(),
    ]
    with network(), bound(*names):
        assert {entry.label: entry.alive for entry in fastports.entries()} == {
            "now": True, "before": False, "after": False,
        }  # fmt: skip


@root_only
def test_c33_an_entry_keeps_no_port_whatever_it_says() -> None:
    """What keeps a port is a socket, which cannot outlive its process."""
    name = f"fastports/t/20000-20001/{os.getpid():x}/{process_start():x}/0/lie".encode()
    with network(), bound(name), fastports.allocate(2, range="20000-20001") as block:
        assert {entry.label for entry in fastports.entries()} == {"lie", ""}
        assert not can_bind(block.first)


def test_the_end_of_a_process_is_the_end_of_its_entries_and_markers() -> None:
    read, write = os.pipe()

    def hold() -> None:
        blocks = [fastports.allocate(4, label="killed") for _ in range(3)]
        blocks[0].close_holds()
        os.write(write, b" ".join(b"%d" % block.first for block in blocks) + b"\n")
        signal.pause()

    child = Child(hold)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        firsts = [int(word) for word in file.readline().split()]
    found = {entry.first: entry for entry in fastports.entries() if entry.pid == child.pid}
    assert sorted(found) == sorted(firsts)
    assert all(entry.alive for entry in found.values())
    with pytest.raises(fastports.PortsUnavailable) as caught:
        fastports.reserve(firsts[0])
    assert caught.value.cause == "marked"
    child.kill()
    assert not [entry for entry in fastports.entries() if entry.pid == child.pid]
    for first in firsts:
        fastports.reserve((first, first + 3)).release()


# --- what a release frees -----------------------------------------------------------------------


def test_c27_a_stale_owner_frees_nothing_of_who_has_the_ports_by_now() -> None:
    stale = fastports.allocate(4, label="stale")
    copies = stale.filenos()
    stale.release()
    with fastports.reserve((stale.first, stale.last), label="new") as new:
        # the numbers of its descriptors are in use again, by the other block
        assert set(copies) & set(new.filenos())
        stale.release()
        stale.__exit__(None, None, None)
        stale.__del__()
        with pytest.raises(fastports.BlockReleased):
            stale.close_holds()
        assert new.state == "held"
        assert not any(can_bind(port) for port in new)
        assert [entry.label for entry in mine()] == ["new"]
        del stale
        assert not any(can_bind(port) for port in new)


def test_c27_a_forked_child_frees_nothing_of_its_parent() -> None:
    with fastports.allocate(4, label="parent") as block:

        def free() -> list[str]:
            told = []
            for act in (block.release, block.close_holds, block.filenos):
                with pytest.raises(fastports.NotOwner) as caught:
                    act()
                told.append(type(caught.value).__name__)
            block.__exit__(None, None, None)
            with pytest.raises(fastports.PortsUnavailable):
                fastports.reserve(block.first)
            return told

        assert in_child(free) == ["NotOwner"] * 3
        assert not any(can_bind(port) for port in block)
        assert [entry.label for entry in mine()] == ["parent"]


def test_a_marker_is_let_go_by_its_own_block_only() -> None:
    one = fastports.allocate(2, label="one")
    one.close_holds()
    one.release()
    with fastports.reserve((one.first, one.last), label="other") as other:
        other.close_holds()
        one.release()
        for port in other:
            assert _core.is_bound(_core.marker(_core.TCP, port))
        with pytest.raises(OSError) as caught:
            os.close(_core.bind_abstract(_core.marker(_core.TCP, other.first)))
        assert caught.value.errno == errno.EADDRINUSE
    assert not _core.is_bound(_core.marker(_core.TCP, other.first))


@pytest.mark.parametrize("protocol", ["tcp", "udp", "both"])
def test_markers_have_the_names_that_every_version_looks_for(protocol: str) -> None:
    """Two versions on one host must see each other's."""
    letters = {"tcp": "t", "udp": "u", "both": "tu"}[protocol]
    with fastports.allocate(2, protocol=protocol) as block:
        names = {f"@fastports/m/{letter}/{port}" for letter in letters for port in block}
        block.close_holds()
        with open("/proc/self/net/unix") as file:
            shown = set(re.findall(r"@fastports/m/\S+", file.read()))
        assert {name for name in shown if int(name.rpartition("/")[2]) in block} == names
