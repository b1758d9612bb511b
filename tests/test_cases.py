"""Faults that users of other allocators met: each with its input and the right result."""

from __future__ import annotations

import errno
import itertools
import random
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from programs import program
from worlds import (
    CLONE_NEWNS,
    can_bind,
    in_child,
    libc,
    network,
    root_only,
    time_wait,
    unshare,
)

import fastports
from fastports import _core

README = Path(__file__).parent.parent / "README.md"


def refusal(ask: Callable[[], object]) -> fastports.PortsUnavailable:
    with pytest.raises(fastports.PortsUnavailable) as caught:
        ask()
    return caught.value


# --- the search ---------------------------------------------------------------------------------


@root_only
def test_c06_the_one_free_port_of_90_is_found_in_at_most_90_probes() -> None:
    with network():
        for _ in range(20):
            free = random.randrange(20001, 20089)
            with fastports.reserve((20000, free - 1)), fastports.reserve((free + 1, 20089)):
                search = _core.Search(20000, 20089, 1, _core.TCP)
                assert search.run() == _core.FOUND
                assert search.start == free
                assert search.probed <= 90
                search.close()
                with fastports.allocate(range="20000-20089") as block:
                    assert block.first == free


@root_only
def test_c07_roles_of_one_program_do_not_collide_or_are_refused_together() -> None:
    roles = {"gcs": 1, "metrics": 1, "workers": 257}
    with network():
        plan = fastports.allocate_many(roles, range="20000-20299")
        assert {name: len(block) for name, block in plan.items()} == roles
        assert len({port for block in plan.values() for port in block}) == 259
        for block in plan.values():
            block.release()
        with fastports.reserve(20150):  # 257 fit on neither side of it
            exc = refusal(lambda: fastports.allocate_many(roles, range="20000-20299"))
            assert "gcs=1" in str(exc) and "workers=257" in str(exc)
            assert exc.longest_free == 150
            states = fastports.probe(range(20000, 20300))
            assert states.sum() == 1  # nothing kept


@root_only
@pytest.mark.parametrize("size", [1, 3, 20])
def test_c11_a_full_range_is_refused_after_one_look_at_each_port(size: int) -> None:
    with network(), fastports.reserve((20000, 20019)):
        exc = refusal(lambda: fastports.allocate(size, range="20000-20019"))
    assert (exc.busy, exc.probed) == ((20, 20) if size == 1 else (exc.busy, exc.busy))
    assert exc.probed <= 20 and exc.longest_free < size


def test_c12_contradictory_constraints_are_told_before_any_bind() -> None:
    """No bind is made: where none is allowed, the answer is the same."""

    def asked() -> list[str]:
        told = []
        for ask in (
            lambda: fastports.allocate(3, range="20000-20001"),
            lambda: fastports.allocate(8, range="20000-20100", candidates=[20099, 20098]),
            lambda: fastports.allocate(candidates=numpy.array([], dtype="uint16")),
            lambda: fastports.allocate(range="20000-20100", candidates=[30000], timeout=60),
            lambda: fastports.allocate_many({"a": 60, "b": 60}, range="20000-20100"),
        ):
            with pytest.raises(fastports.InvalidRequest) as caught:
                ask()
            told.append(type(caught.value).__name__)
        with pytest.raises(fastports.BindDenied):
            fastports.allocate()
        return told

    assert in_child(asked, denied=[("bind", None, errno.EPERM)]) == ["InvalidRequest"] * 5


@root_only
def test_c12_a_range_that_is_reserved_throughout_is_told_before_any_bind() -> None:
    def asked() -> str:
        with pytest.raises(fastports.InvalidRequest) as caught:
            fastports.allocate(range="20000-20009", timeout=60)
        return str(caught.value)

    with network({"net.ipv4.ip_local_reserved_ports": "20000-20009"}):
        told = in_child(asked, denied=[("bind", None, errno.EPERM)])
    assert "ip_local_reserved_ports" in told


@root_only
def test_c13_the_one_free_port_of_7000_is_found_100_times_of_100() -> None:
    def found() -> int:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        times = 0
        free = random.randrange(20001, 26999)
        with fastports.reserve((20000, free - 1)), fastports.reserve((free + 1, 26999)):
            for _ in range(100):
                with fastports.allocate(range="20000-26999") as block:
                    times += block.first == free
        return times

    import resource

    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 7100:
        pytest.skip("holds 7,000 ports in one process, which takes ulimit -Hn 7100")
    with network():
        assert in_child(found) == 100


@root_only
def test_c15_a_refusal_says_range_protocol_host_and_counts() -> None:
    asks: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: fastports.allocate(range="20000-20009"),
         ["20000-20009", "tcp", "all addresses", "10 probed", "10 busy"]),
        (lambda: fastports.allocate(4, range="20000-20019", host="127.0.0.1"),
         ["4 contiguous ports", "20000-20019", "tcp", "127.0.0.1", "busy", "stretch seen is 2"]),
        (lambda: fastports.allocate(range="20000-20009", protocol="udp", timeout=0.05),
         ["20000-20009", "udp", "all addresses", "10 probed", "10 busy", "0.05 s"]),
        (lambda: fastports.allocate_many({"a": 2, "b": 3}, range="20000-20019", protocol="both"),
         ["a=2", "b=3", "20000-20019", "both", "all addresses", "2"]),
        (lambda: fastports.reserve(20000), ["20000", "tcp", "all addresses", "bound"]),
        (lambda: fastports.reserve((19999, 20003), host="127.0.0.1"),
         ["19999-20003", "tcp", "127.0.0.1", "taken"]),
    ]  # fmt: skip
    with (
        network(),
        fastports.reserve((20000, 20009), protocol="both"),
        fastports.reserve((20012, 20019), protocol="both"),
    ):
        for ask, parts in asks:
            with pytest.raises((fastports.PortsUnavailable, fastports.AllocationTimeout)) as caught:
                ask()
            for part in parts:
                assert part in str(caught.value), caught.value


# --- what a hold keeps out ----------------------------------------------------------------------

FREEBIND, NO_PORT, IPV6_FREEBIND = 15, 24, 78  # IP_FREEBIND, IP_BIND_ADDRESS_NO_PORT


@root_only
@pytest.mark.parametrize("uid", [None, 65534], ids=["the same user", "another user"])
def test_c16_no_socket_option_takes_one_of_8_held_ports(uid: int | None) -> None:
    with network(), fastports.allocate(8) as block:
        ports = list(block)

        def attack() -> list[tuple[int, str]]:
            options: dict[str, tuple[int, int, int | bytes]] = {
                "reuseaddr": (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
                "reuseport": (socket.SOL_SOCKET, socket.SO_REUSEPORT, 1),
                "freebind": (socket.IPPROTO_IP, FREEBIND, 1),
                "no port": (socket.IPPROTO_IP, NO_PORT, 1),
                "device": (socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo"),
                "v6only": (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1),
            }
            taken = []
            for family, address in (
                (socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"),
                (socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::"), (socket.AF_INET6, "::1"),
            ):  # fmt: skip
                for number in range(len(options) + 1):
                    for names in itertools.combinations(options, number):
                        if "v6only" in names and family == socket.AF_INET:
                            continue
                        for port in ports:
                            with socket.socket(family) as sock:
                                for name in names:
                                    level, option, value = options[name]
                                    sock.setsockopt(level, option, value)
                                try:
                                    sock.bind((address, port))
                                    taken.append((port, f"{address} {names}"))
                                except OSError as exc:
                                    assert exc.errno == errno.EADDRINUSE
            return taken

        assert in_child(attack, uid=uid) == []


def test_c17_a_reuseport_server_of_the_same_user_gets_eaddrinuse() -> None:
    with fastports.allocate() as block, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError) as caught:
            sock.bind(("127.0.0.1", block.first))
        assert caught.value.errno == errno.EADDRINUSE


def test_c18_a_udp_port_of_a_reuseaddr_socket_is_busy_and_a_held_one_admits_none() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert fastports.probe([port], protocol="udp").tolist() == [fastports.PortState.BUSY]
        refusal(lambda: fastports.reserve(port, protocol="udp"))
        refusal(lambda: fastports.reserve(port, protocol="udp", host="127.0.0.1"))
    with fastports.allocate(protocol="udp") as block:
        for options in ([socket.SO_REUSEADDR], [socket.SO_REUSEPORT]):
            assert not can_bind(block.first, kind=socket.SOCK_DGRAM, options=options)


def test_c22_the_wildcard_keeps_every_loopback_address() -> None:
    with fastports.allocate(host=None) as block:
        for address in ("127.0.0.1", "127.0.0.2", "127.1.2.3"):
            with socket.socket() as sock, pytest.raises(OSError) as caught:
                sock.bind((address, block.first))
            assert caught.value.errno == errno.EADDRINUSE


@root_only
def test_c23_a_port_taken_in_udp_is_usable_in_tcp_and_skipped_for_both() -> None:
    with network(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 20000))
        with fastports.reserve(20000, protocol="tcp") as block:
            assert block.first == 20000
        for _ in range(20):
            with fastports.allocate(range="20000-20001", protocol="both") as block:
                assert block.first == 20001
        refusal(lambda: fastports.reserve(20000, protocol="both"))
        assert can_bind(20000)  # nothing of the refused pair was kept


# --- TIME_WAIT ----------------------------------------------------------------------------------


@root_only
def test_c20_a_port_with_only_time_wait_on_it_can_be_reserved_and_others_are_preferred() -> None:
    with network():
        time_wait(20000)
        assert not can_bind(20000)
        with fastports.reserve(20000) as block:
            assert block.first == 20000
            for options in ([], [socket.SO_REUSEADDR], [socket.SO_REUSEPORT]):
                assert not can_bind(20000, options=options)
        for _ in range(20):
            with fastports.allocate(range="20000-20001") as block:
                assert block.first == 20001
        with fastports.allocate(range="20000-20000") as block:  # nothing else is left
            assert block.first == 20000


# --- ranks --------------------------------------------------------------------------------------

RANKS = """
first, dp, tp, pcp = map(int, sys.argv[1:5])
held = {}
for d in range(dp):
    for t in range(tp):
        for p in range(pcp):
            port = first + (d * tp + t) * pcp + p
            assert port not in held
            held[port] = serve(port)
time.sleep(100)
"""


def ranks(*arguments: str) -> list[str]:
    head, _, _ = program("never")[-1].rpartition("time.sleep(100)")
    return [sys.executable, "-I", "-S", "-c", head + RANKS, *arguments]


def test_c38_ranks_of_three_kinds_get_64_distinct_ports_of_one_block() -> None:
    dp, tp, pcp = 4, 8, 2
    with (
        fastports.allocate(dp * tp * pcp) as block,
        block.spawn(ranks("{first}", *map(str, (dp, tp, pcp)), "{last}")) as child,
    ):
        # spawn waited until all 64 listen
        assert len(set(block)) == 64
        for port in block:
            with socket.create_connection(("127.0.0.1", port), timeout=10):
                pass
        child.terminate()


def test_c39_the_recipe_of_the_readme_gives_each_rank_the_ports_its_engine_computes() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (recipe,) = [text for text in blocks if "dp_rank * tp_size" in text]
    recipe, found, _ = recipe.partition("for block in blocks:\n")
    assert found
    names: dict[str, object] = {}
    exec(recipe, names)
    held = names["blocks"]
    assert isinstance(held, list)
    tp_size = len(held[0])
    engine = "\n".join((
        "base, dp_rank, tp_size = map(int, sys.argv[1:])",
        "held = [serve(base + dp_rank * tp_size + tp_rank) for tp_rank in range(tp_size)]",
        "time.sleep(100)",
    ))  # fmt: skip
    head, _, _ = program("never")[-1].rpartition("time.sleep(100)")
    try:
        assert len({port for block in held for port in block}) == len(held) * tp_size > 8
        for dp_rank, block in enumerate(held):
            base = block.first - dp_rank * tp_size
            words = [str(base), str(dp_rank), str(tp_size)]
            argv = [sys.executable, "-I", "-S", "-c", head + engine, *words]
            # what the engine computes is what is held: it is waited for on every port
            with block.spawn(argv) as child:
                child.terminate()
    finally:
        for block in held:
            block.release()


# --- names --------------------------------------------------------------------------------------


@root_only
def test_c42_a_host_name_that_means_127_0_1_1_changes_neither_ports_nor_identity(
    tmp_path: Path,
) -> None:
    from fastports.etcd.keys import network_identity

    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 misnamed\n")
    CLONE_NEWUTS, MS_REC, MS_PRIVATE, MS_BIND = 0x04000000, 0x4000, 0x40000, 0x1000

    def renamed() -> tuple[str, str, bool]:
        unshare(CLONE_NEWUTS | CLONE_NEWNS)
        assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        assert libc.mount(bytes(hosts), b"/etc/hosts", None, MS_BIND, None) == 0
        socket.sethostname("misnamed")
        address = socket.gethostbyname(socket.gethostname())
        with fastports.allocate(4) as block:
            held = not any(can_bind(port) for port in block)
        return address, str(network_identity()), held

    with network():  # no route at all
        before = str(network_identity())
        address, after, held = in_child(renamed)
    assert address == "127.0.1.1"
    assert after == before
    assert held
