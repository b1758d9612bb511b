"""Each errno by its real cause, told as what it is; nothing is left open on any way out."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import socket
import sys

import numpy  # loaded before descriptors run out, as an import needs one
import pytest
from worlds import NOBODY, can_bind, in_child, network, root_only, set_sysctl

import fastports
from fastports import _core

AF_INET6 = int(socket.AF_INET6)
AF_UNIX = int(socket.AF_UNIX)


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def refusal_of(function: object, *args: object, **kwargs: object) -> fastports.FastportsError:
    """The error of a call that leaves as many descriptors as it found."""
    before = open_descriptors()
    with pytest.raises(fastports.FastportsError) as caught:
        function(*args, **kwargs)  # type: ignore[operator]
    assert open_descriptors() == before
    return caught.value.with_traceback(None)


# --- a sandbox ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES])
@pytest.mark.parametrize("size", [1, 8])
def test_c40_a_sandbox_that_denies_bind_is_told_after_one_probe(error: int, size: int) -> None:
    """C40"""

    def denied() -> tuple[fastports.FastportsError, int]:
        search = _core.Search(20000, 29999, size, _core.TCP)
        assert search.run() == error
        probed = search.probed
        search.close()
        return refusal_of(fastports.allocate, size), probed

    exc, probed = in_child(denied, denied=[("bind", None, error)])
    assert probed == 1
    assert type(exc) is fastports.BindDenied
    assert isinstance(exc, PermissionError)
    assert exc.errno == error
    assert 20000 <= exc.port <= 29999
    assert "sandbox" in str(exc)


def test_a_sandbox_that_denies_bind_stops_every_verb_and_a_waiting_call_at_once() -> None:
    def denied() -> list[fastports.FastportsError]:
        return [
            refusal_of(fastports.allocate, timeout=60),
            refusal_of(fastports.reserve, 23456),
            refusal_of(fastports.allocate_many, {"a": 1, "b": 3}),
            refusal_of(fastports.allocate_many, {"a": 1, "b": 3}, timeout=60),
        ]

    for exc in in_child(denied, denied=[("bind", None, errno.EPERM)], timeout=20):
        assert type(exc) is fastports.BindDenied


def test_a_sandbox_that_denies_sockets_is_told_as_such() -> None:
    def denied() -> fastports.FastportsError:
        return refusal_of(fastports.allocate)

    exc = in_child(denied, denied=[("socket", None, errno.EPERM)])
    assert type(exc) is fastports.BindDenied
    assert exc.errno == errno.EPERM


def test_probe_says_denied_of_a_port_that_a_sandbox_forbids() -> None:
    def denied() -> list[int]:
        states: list[int] = fastports.probe([80, 20000]).tolist()
        return states

    assert in_child(denied, denied=[("bind", None, errno.EPERM)]) == [2, 2]


def test_without_unix_sockets_ports_are_held_all_the_same() -> None:
    def held() -> tuple[bool, bool, str]:
        with fastports.allocate(4, label="here") as block:
            return can_bind(block[2]), len(block.filenos()) == 4, block.state

    for error in (errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT):
        rule = ("socket", AF_UNIX, error)
        assert in_child(held, denied=[rule]) == (False, True, "held")


def test_without_getrandom_two_searches_do_not_agree() -> None:
    def drawn() -> set[int]:
        found = set()
        for _ in range(20):
            with fastports.allocate() as block:
                found.add(block.first)
        return found

    assert len(in_child(drawn, denied=[("getrandom", None, errno.ENOSYS)])) > 10


# --- addresses and families -------------------------------------------------------------------


def test_without_ipv6_in_the_kernel_the_wildcard_is_that_of_ipv4() -> None:
    def held() -> tuple[list[int], list[int], bool]:
        with fastports.allocate(2, protocol="both") as block:
            families = []
            for fd in block.filenos():
                with socket.socket(fileno=os.dup(fd)) as sock:
                    families.append(int(sock.family))
            states = fastports.probe(block).tolist()
            return families, states, can_bind(block[1])

    families, states, entered = in_child(held, denied=[("socket", AF_INET6, errno.EAFNOSUPPORT)])
    assert families == [socket.AF_INET] * 4
    assert states == [1, 1]
    assert not entered


def test_an_ipv6_address_without_ipv6_in_the_kernel_is_an_invalid_request() -> None:
    def asked() -> fastports.FastportsError:
        return refusal_of(fastports.allocate, host="::1")

    exc = in_child(asked, denied=[("socket", AF_INET6, errno.EAFNOSUPPORT)])
    assert type(exc) is fastports.InvalidRequest


@root_only
def test_with_ipv6_switched_off_in_this_network_the_wildcard_still_holds_ipv4() -> None:
    with network({"net.ipv6.conf.all.disable_ipv6": "1"}):
        with fastports.allocate(3) as block:
            for address in ("0.0.0.0", "127.0.0.1", "127.0.0.9"):
                assert not can_bind(block[1], address)
        exc = refusal_of(fastports.allocate, host="::1")
        assert isinstance(exc, fastports.InvalidRequest)
        assert exc.argument == "host"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "fe80::1"])
def test_an_address_of_another_machine_is_an_invalid_request_that_says_so(host: str) -> None:
    for ask in (
        lambda: fastports.allocate(host=host),
        lambda: fastports.reserve(23457, host=host),
        lambda: fastports.allocate_many({"a": 1}, host=host, timeout=60),
        lambda: fastports.probe([23457], host=host),
    ):
        exc = refusal_of(ask)
        assert isinstance(exc, fastports.InvalidRequest)
        assert exc.argument == "host"
        assert exc.value == host
        assert "address of this machine" in str(exc)


@root_only
def test_c42_allocation_works_without_a_route_an_address_or_a_name() -> None:
    """Not even the loopback interface is up."""
    with network(loopback=False):
        with fastports.allocate(4) as block:
            assert [entry.first for entry in fastports.entries()] == [block.first]
        with fastports.allocate(4, protocol="both", host="0.0.0.0"):
            pass


# --- privileges -------------------------------------------------------------------------------


@root_only
def test_c41_a_privileged_port_is_told_from_a_taken_one() -> None:
    """C41"""

    def reserved() -> list[fastports.FastportsError]:
        return [
            refusal_of(fastports.reserve, 80),
            refusal_of(fastports.allocate, 8, range="1-1023"),
            refusal_of(fastports.allocate, 2, range="1022-1024", timeout=60),
            refusal_of(fastports.allocate_many, {"a": 2, "b": 1}, range="1000-1020"),
        ]

    with network():
        answers = in_child(reserved, uid=NOBODY)
    for exc in answers[:2] + answers[3:]:
        assert type(exc) is fastports.PrivilegedPort
        assert isinstance(exc, PermissionError)
        assert exc.unprivileged_start == 1024
        assert exc.errno == errno.EACCES
        assert exc.busy == 0
    one = answers[0]
    assert isinstance(one, fastports.PortsUnavailable)
    assert (one.range, one.denied) == ("80-80", 1)
    assert "ip_unprivileged_port_start" in str(one)
    assert type(answers[2]) is fastports.PrivilegedPort


@root_only
def test_the_sysctl_decides_what_is_privileged_not_1024() -> None:
    def reserved() -> tuple[int, fastports.FastportsError]:
        with fastports.reserve(80) as block:
            return block.first, refusal_of(fastports.reserve, 79)

    with network({"net.ipv4.ip_unprivileged_port_start": "80"}):
        first, exc = in_child(reserved, uid=NOBODY)
    assert first == 80
    assert isinstance(exc, fastports.PrivilegedPort)
    assert exc.unprivileged_start == 80
    with network({"net.ipv4.ip_unprivileged_port_start": "30000"}):
        exc = in_child(lambda: refusal_of(fastports.reserve, 29999), uid=NOBODY)
    assert isinstance(exc, fastports.PrivilegedPort)
    assert exc.unprivileged_start == 30000


@root_only
def test_a_range_that_starts_privileged_is_searched_from_where_it_is_not() -> None:
    def allocated() -> tuple[list[int], fastports.FastportsError]:
        blocks = [fastports.allocate(5, range="1000-1040") for _ in range(3)]
        exc = refusal_of(fastports.allocate, 5, range="1000-1040")
        for block in blocks:
            block.release()
        return sorted(block.first for block in blocks), exc

    with network():
        firsts, exc = in_child(allocated, uid=NOBODY)
    assert firsts == [1025, 1030, 1035]
    assert type(exc) is fastports.PortsUnavailable
    assert exc.denied == 24
    assert "24 need a privilege" in str(exc)


@root_only
def test_waiting_beside_privileged_ports_ends_as_a_timeout_not_as_a_missing_privilege() -> None:
    def waited() -> fastports.FastportsError:
        with fastports.reserve((1024, 1040)):
            return refusal_of(fastports.allocate, range="1010-1040", timeout=0.2)

    with network():
        exc = in_child(waited, uid=NOBODY)
    assert isinstance(exc, fastports.AllocationTimeout)
    assert exc.attempts > 2
    assert (exc.denied, exc.busy) == (14, 17)


@root_only
def test_several_blocks_fit_tightly_beside_privileged_ports() -> None:
    def placed() -> list[int]:
        with fastports.reserve(1028):
            blocks = fastports.allocate_many({"a": 4, "b": 2, "c": 2}, range="1000-1032")
        answer = sorted(port for block in blocks.values() for port in block)
        for block in blocks.values():
            block.release()
        return answer

    with network():
        assert in_child(placed, uid=NOBODY) == [*range(1024, 1028), *range(1029, 1033)]


@root_only
def test_probe_tells_privileged_and_reserved_ports_from_busy_and_free_ones() -> None:
    def probed(busy: int) -> list[int]:
        answer: list[int] = fastports.probe([80, 1023, 1024, 5000, busy]).tolist()
        return answer

    with network({"net.ipv4.ip_local_reserved_ports": "5000,6000-6010"}), fastports.reserve(6005):
        state = fastports.PortState
        assert in_child(lambda: probed(6005), uid=NOBODY) == [
            state.PRIVILEGED, state.PRIVILEGED, state.FREE, state.RESERVED, state.BUSY,
        ]  # fmt: skip


# --- limits -----------------------------------------------------------------------------------


def test_a_block_beyond_the_descriptor_limit_is_refused_before_the_first_socket() -> None:
    def limited() -> tuple[fastports.FastportsError, int, tuple[int, int]]:
        before = len(open_descriptors()) - 1
        exc = refusal_of(fastports.allocate, 200, label="never")
        return exc, before, resource.getrlimit(resource.RLIMIT_NOFILE)

    exc, before, limit = in_child(limited, descriptors=120)
    assert type(exc) is fastports.DescriptorLimit
    assert isinstance(exc, OSError)
    assert exc.errno == errno.EMFILE
    assert exc.needed == 202
    assert (exc.soft, exc.hard) == (120, 120)
    assert exc.open == before
    assert limit == (120, 120)  # never raised silently
    assert "ulimit -n" in str(exc)


@pytest.mark.parametrize("protocol", ["tcp", "both"])
def test_a_block_that_just_fits_the_descriptor_limit_is_held(protocol: str) -> None:
    each = 2 if protocol == "both" else 1

    def limited() -> tuple[int, fastports.FastportsError]:
        used, soft, _ = _core.descriptor_usage()
        size = (soft - used - 2) // each
        exc = refusal_of(fastports.allocate, size + 1, protocol=protocol)
        with fastports.allocate(size, protocol=protocol) as block:
            return len(block.filenos()) - size * each, exc

    assert in_child(limited, descriptors=100)[0] == 0


def test_a_search_under_a_tight_descriptor_limit_still_finds_the_one_place() -> None:
    def limited() -> bool:
        used, soft, _ = _core.descriptor_usage()
        first = 21000
        # every second port is taken, save in one place
        taken = []
        for port in range(first, first + 200, 2):
            if not first + 120 <= port <= first + 128:
                taken.append(fastports.reserve(port, host="127.0.0.1"))
        size = 11
        used = _core.descriptor_usage()[0]
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + size + 2, soft))
        with fastports.allocate(size, range=(first, first + 199), host="127.0.0.1") as block:
            found = block.first == first + 119
        for block in taken:
            block.release()
        return found

    if os.geteuid() == 0:
        with network():
            assert in_child(limited, descriptors=400)
    else:
        assert in_child(limited, descriptors=400)


def test_several_blocks_need_no_more_descriptors_than_they_have() -> None:
    def limited() -> list[int]:
        used, soft, _ = _core.descriptor_usage()
        size = (soft - used - 6) // 3
        blocks = fastports.allocate_many({"a": size, "b": size, "c": size})
        for block in blocks.values():
            block.release()
        return [len(block) for block in blocks.values()]

    assert sum(in_child(limited, descriptors=120)) > 90


def test_several_blocks_beyond_the_descriptor_limit_are_refused_before_the_first_socket() -> None:
    def limited() -> fastports.FastportsError:
        return refusal_of(fastports.allocate_many, {"a": 60, "b": 60})

    exc = in_child(limited, descriptors=100)
    assert type(exc) is fastports.DescriptorLimit
    assert exc.needed >= 122


@pytest.mark.parametrize("spare", [0, 1])
def test_one_port_without_a_descriptor_left_is_a_descriptor_limit(spare: int) -> None:
    """Not even one to import an explanation through."""

    def limited() -> object:
        for name in ("fastports.refusal", "fastports._diag"):
            sys.modules.pop(name, None)
            vars(fastports).pop(name.rpartition(".")[2], None)
        fillers = []
        try:
            while True:
                fillers.append(os.dup(0))
        except OSError:
            for fd in fillers[:spare]:
                os.close(fd)
        try:
            fastports.allocate()
        except fastports.FastportsError as exc:
            answer: object = exc.with_traceback(None)
        try:
            fastports.probe(numpy.array([20000], dtype="uint16"))
        except fastports.DescriptorLimit:
            return pickle.loads(pickle.dumps(answer))
        raise AssertionError("probe needs descriptors too")

    exc = in_child(limited, descriptors=60)
    assert type(exc) is fastports.DescriptorLimit
    assert exc.errno == errno.EMFILE
    assert exc.soft == 60


# --- a host without ports to spare --------------------------------------------------------------


@root_only
def test_an_ephemeral_range_that_is_used_up_hinders_no_allocation() -> None:
    with network({"net.ipv4.ip_local_port_range": "40000 40003"}):
        taken = [socket.socket() for _ in range(4)]
        for sock in taken:
            sock.bind(("127.0.0.1", 0))
        with fastports.allocate(8) as block:
            assert not set(block) & set(range(40000, 40004))
        exc = refusal_of(fastports.allocate, range="40000-40003")
        assert isinstance(exc, fastports.PortsUnavailable)
        assert exc.busy == 4
        for sock in taken:
            sock.close()


@root_only
def test_c10_reserved_ports_are_never_handed_out_by_default_but_when_named() -> None:
    """C10, C12"""
    with network({"net.ipv4.ip_local_reserved_ports": "43001-43002"}):
        for _ in range(50):
            with fastports.allocate(range="43000-43003") as block:
                assert block.first in (43000, 43003)
        exc = refusal_of(fastports.allocate, range="43001-43002")
        assert isinstance(exc, fastports.InvalidRequest)
        exc = refusal_of(fastports.allocate, 2, range="43000-43003", timeout=60)
        assert isinstance(exc, fastports.InvalidRequest)
        exc = refusal_of(fastports.allocate_many, {"a": 1, "b": 1, "c": 1}, range="43000-43003")
        assert isinstance(exc, fastports.PortsUnavailable)
        assert exc.reserved == 2
        with fastports.reserve((43001, 43002)):
            pass
        allocator = fastports.Allocator(range=(43001, 43002), include_reserved=True)
        with allocator.allocate(2) as block:
            assert list(block) == [43001, 43002]
        set_sysctl("net.ipv4.ip_local_reserved_ports", "43000-43002")
        with fastports.allocate(range="43000-43003") as block:
            assert block.first == 43003  # read anew at each call
