"""``timeout=``: waiting for ports to come free, and what ends the waiting."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from worlds import ROOMY, Child, can_bind, in_child, network, root_only

import fastports

pytestmark = root_only


@pytest.fixture(autouse=True)
def own_network() -> Iterator[None]:
    with network():
        yield


RANGE = "20000-20003"


def test_without_a_timeout_a_full_range_is_refused_at_once() -> None:
    with fastports.reserve((20000, 20003)), pytest.raises(fastports.PortsUnavailable) as caught:
        fastports.allocate(range=RANGE)
    assert not isinstance(caught.value, fastports.AllocationTimeout)


def test_a_port_that_comes_free_is_given_to_who_waits_for_it() -> None:
    held = fastports.reserve((20000, 20003))
    timer = threading.Timer(0.05, held.release)
    timer.start()
    with fastports.allocate(4, range=RANGE, timeout=30) as block:
        assert block.ports == range(20000, 20004)
    timer.join()


def test_reserve_waits_too() -> None:
    held = fastports.reserve(20001)
    timer = threading.Timer(0.05, held.release)
    timer.start()
    with fastports.reserve(20001, timeout=30) as block:
        assert block.first == 20001
    timer.join()


def test_a_port_of_another_process_that_is_killed_is_given_to_who_waits_for_it() -> None:
    read, write = os.pipe()

    def hold() -> None:
        block = fastports.reserve((20000, 20003))
        os.write(write, b"!")
        signal.pause()
        block.release()

    child = Child(hold)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    timer = threading.Timer(0.05, child.kill)
    timer.start()
    with fastports.allocate(4, range=RANGE, timeout=30):
        pass
    timer.join()


@pytest.mark.parametrize("seconds", [0, 0.0, 0.05])
def test_what_does_not_come_free_in_time_is_a_timeout_with_the_facts(seconds: float) -> None:
    with fastports.reserve((20000, 20003)), pytest.raises(fastports.AllocationTimeout) as caught:
        fastports.allocate(range=RANGE, timeout=seconds)
    late = caught.value
    assert isinstance(late, TimeoutError)
    assert late.timeout == seconds and late.elapsed >= seconds and late.attempts >= 1
    assert (late.busy, late.probed, late.wanted) == (4, 4, 1)
    assert "20000-20003" in str(late) and "4 busy" in str(late)
    assert isinstance(late.__cause__, fastports.PortsUnavailable)


def test_a_wait_looks_again_and_again_and_pauses_in_between() -> None:
    begin = time.process_time()
    with fastports.reserve((20000, 20003)), pytest.raises(fastports.AllocationTimeout) as caught:
        fastports.allocate(range=RANGE, timeout=0.5)
    assert caught.value.attempts >= 3
    assert time.process_time() - begin < 0.4  # it slept


def test_what_no_waiting_mends_ends_it_at_once() -> None:
    def ask() -> str:
        try:
            fastports.reserve(80, timeout=3600)
        except fastports.PrivilegedPort as exc:
            return type(exc).__name__
        return ""

    assert in_child(ask, uid=65534, timeout=30) == "PrivilegedPort"


def test_many_who_wait_for_one_port_get_it_one_after_another() -> None:
    held = fastports.reserve(20000)
    got: list[int] = []

    def wait() -> None:
        with fastports.reserve(20000, timeout=60) as block:
            got.append(block.first)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    held.release()
    for thread in threads:
        thread.join()
    assert got == [20000] * 8


class Interrupted(Exception):
    pass


def test_a_signal_ends_a_wait_and_nothing_is_kept() -> None:
    def stop(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with fastports.reserve((20000, 20003)):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted):
                fastports.allocate(2, range=RANGE, timeout=3600)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(can_bind(port) for port in range(20000, 20004))


def test_a_signal_is_let_in_amid_a_long_look_at_ports() -> None:
    """Else it would be heard at the end only, when every port has its state."""
    from array import array

    from fastports import _core

    def stop(*_: object) -> None:
        raise Interrupted

    ports = array("H", range(1024, 65536))
    states = bytearray(b"\xff" * len(ports))
    search = _core.Search(1024, 65535, 1, _core.TCP)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # the whole of it takes some 200 ms
        with pytest.raises(Interrupted):
            search.probe(ports, memoryview(states).cast("b"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        search.close()
    assert states.count(0xFF) > 0


def test_ctrl_c_ends_a_process_in_the_middle_of_its_searches() -> None:
    read, write = os.pipe()

    def search() -> str:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        before = len(os.listdir("/proc/self/fd"))

        def loop() -> None:
            os.write(write, b"!")
            while True:
                fastports.allocate(600, range=ROOMY).release()

        try:  # noqa: SIM105 - the exception is looked at before it goes
            loop()
        except KeyboardInterrupt:
            pass  # its traceback keeps what the frames have
        return f"{len(os.listdir('/proc/self/fd')) - before} more descriptors"

    for _ in range(50):
        child = Child(search)
        os.read(read, 1)
        os.kill(child.pid, signal.SIGINT)
        assert child.result(30) == "0 more descriptors"
    os.close(read)
    os.close(write)
