"""Bad input is an InvalidRequest before anything is touched, and it says what to do."""

from __future__ import annotations

import ctypes
import pickle
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fastports
from fastports import InvalidRequest, _core

allocate: Any = fastports.allocate
reserve: Any = fastports.reserve
allocate_many: Any = fastports.allocate_many
probe: Any = fastports.probe
PortRange: Any = fastports.PortRange
Allocator: Any = fastports.Allocator


def shown(value: object) -> str:
    """A test id that is the same in every process."""
    return type(value).__name__ if " at 0x" in repr(value) else ascii(value)[:24]


class Index:
    """An integer that is no int."""

    def __index__(self) -> int:
        raise TypeError("not really")


@pytest.fixture(autouse=True)
def nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No search is begun, and what is refused can be sent to another process."""

    def begin(*args: object, **kwargs: object) -> None:
        raise AssertionError("a search was begun")

    monkeypatch.setattr("fastports.allocator.Search", begin)
    yield


def calls(*asks: Callable[[], object]) -> tuple[Callable[[], object], ...]:
    return asks


def refused(ask: Callable[[], object], argument: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        ask()
    exc = caught.value
    assert exc.argument == argument
    assert isinstance(exc, ValueError)
    assert len(str(exc)) < 600
    assert str(exc).rstrip().endswith(".")
    assert str(pickle.loads(pickle.dumps(exc))) == str(exc)
    return exc


BAD_SIZES = [0, -1, True, False, 1.0, 1.5, "3", None, 65536, 70000, 10**30, [1], b"1", 2 + 0j,
             float("nan"), np.float64(2), np.bool_(True), np.array([1, 2]), np.array(1.0), Index(),
             object, object()]  # fmt: skip


@pytest.mark.parametrize("size", BAD_SIZES, ids=shown)
def test_a_size_that_is_no_number_of_ports(size: object) -> None:
    exc = refused(lambda: allocate(size), "size")
    assert "1 to 65535" in str(exc)
    refused(lambda: allocate_many({"a": 1, "b": size}), "sizes['b']")


def test_a_size_larger_than_its_range() -> None:
    for ask in calls(
        lambda: allocate(11, range=(20000, 20009)),
        lambda: allocate(11, range=(20000, 20009), timeout=60),
        lambda: allocate_many({"a": 6, "b": 5}, range=(20000, 20009)),
        lambda: allocate(65535, range="2-65535"),
    ):
        exc = refused(ask, "size")
        assert "do not fit into" in str(exc)


BAD_RANGES = ["", " ", "x-y", "1-", "-1", "-", "1-2-3", "20000-29999 ", " 20000", "20000 - 29999",
              "0", "0-10", "65536", "1-65536", "29999-20000", "2e4", "1_000", "+80", "0x50",
              "٢٠٠٠٠", "tcp://10.43.1.39:8000", "20000-29999,30001", "20000:29999", "99999999999",
              "20000-\n", "8080\n", "8080\0",
              0, -1, 65536, True, 1.5, 10**30, b"20000-29999", None, {},
              (), (1,), (1, 2, 3), (2, 1), (0, 5), (1, 65536), ("1", "2"), (1.0, 2), (None, 1),
              (True, 5), range(0), range(5, 5), range(5), range(1, 65537), range(10, 5),
              range(1, 10, 2), range(10, 1, -1), range(10**20), {20000, 20001},
              np.array([20000, 20001]), np.array(1.5), Index(), object()]  # fmt: skip


@pytest.mark.parametrize("spec", BAD_RANGES, ids=shown)
def test_a_range_that_is_none(spec: object) -> None:
    refused(lambda: PortRange(spec), "range")
    refused(lambda: reserve(spec), "range")
    if spec is not None:
        refused(lambda: allocate(range=spec), "range")
        refused(lambda: allocate_many({"a": 1}, range=spec), "range")
        refused(lambda: Allocator(range=spec), "range")


@pytest.mark.parametrize(
    ("first", "last"),
    [(1, "2"), ("1", 2), (2, 1), (1, 65536), (1.0, 2), ((1, 2), 3), (range(1, 3), 4)],
)
def test_two_ends_that_are_no_range(first: object, last: object) -> None:
    refused(lambda: PortRange(first, last), "range")


@pytest.mark.parametrize(
    "protocol",
    ["", "TCP", "tcp ", "sctp", "tcp6", 6, b"tcp", ["tcp"], {}, "tcp,udp", object()],
    ids=shown,
)
def test_a_protocol_that_is_unknown(protocol: object) -> None:
    for ask in calls(
        lambda: allocate(protocol=protocol),
        lambda: reserve(8080, protocol=protocol),
        lambda: allocate_many({"a": 1}, protocol=protocol),
        lambda: probe([8080], protocol=protocol),
        lambda: Allocator(protocol=protocol),
    ):
        exc = refused(ask, "protocol")
        assert "'tcp', 'udp' or 'both'" in str(exc)


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "localhost",
        "example.org",
        "127.0.0.1 ",
        "127.1",
        "1",
        "0x7f.0.0.1",
        "127.0.0.01",
        "256.0.0.1",
        "*",
        "[::1]",
        "fe80::1%lo",
        "fe80::1%1",
        "::1%",
        "127.0.0.1:80",
        "127.0.0.0/8",
        "١٢٧.0.0.1",
        "127.0.0.1\0",
        "::1\n",
        0,
        2130706433,
        b"127.0.0.1",
        True,
        ["127.0.0.1"],
        "1" * 10_000,
        object(),
    ],
    ids=shown,
)
def test_a_host_that_is_no_numeric_address(host: object) -> None:
    for ask in calls(
        lambda: allocate(host=host),
        lambda: reserve(8080, host=host),
        lambda: allocate_many({"a": 1}, host=host),
        lambda: probe([8080], host=host),
        lambda: Allocator(host=host),
    ):
        with pytest.raises(InvalidRequest) as caught:
            ask()
        assert caught.value.argument == "host"
        assert "names are not looked up" in str(caught.value)


@pytest.mark.parametrize(
    "label",
    [
        "a\nb",
        "\0",
        "\x1b[31m",
        "\x7f",
        "\u202e",
        "\u2028",
        "a\tb",
        "x" * 65,
        "é" * 33,
        "\ud800",
        None,
        0,
        False,
        1,
        b"x",
        [],
        ["a"],
        object(),
    ],
    ids=shown,
)
def test_a_label_that_is_not_a_short_line_of_text(label: object) -> None:
    for ask in calls(
        lambda: allocate(label=label),
        lambda: reserve(8080, label=label),
        lambda: allocate_many({"a": 1}, label=label),
    ):
        exc = refused(ask, "label")
        assert "64 bytes" in str(exc)


def circular() -> dict[str, object]:
    inner: dict[str, object] = {}
    inner["self"] = inner
    return inner


def deep() -> dict[str, object]:
    outer: dict[str, object] = {}
    for _ in range(100_000):
        outer = {"in": outer}
    return outer


BAD_METADATA = {
    "list": [], "text": "text", "number": 1, "set": {"a": {1, 2}}, "bytes": {"a": b"bytes"},
    "nan": {"a": float("nan")}, "infinity": {"a": float("inf")}, "tuple key": {(1, 2): 3},
    "object": {"a": object()}, "numpy": {"a": np.int64(1)}, "circular": circular(),
    "4090 bytes": {"a": "x" * 4090}, "escaped": {"a": "é" * 700}, "bytes key": {b"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_METADATA)
def test_metadata_that_json_cannot_write_or_is_too_long(name: str) -> None:
    value = BAD_METADATA[name]
    refused(lambda: allocate(metadata=value), "metadata")
    refused(lambda: reserve(8080, metadata=value), "metadata")
    refused(lambda: allocate_many({"a": 1}, metadata=value), "metadata")


def test_metadata_that_is_nested_too_deep() -> None:
    value = deep()
    with pytest.raises(InvalidRequest):
        allocate(metadata=value)
    while value:  # without recursion
        value = value.pop("in")  # type: ignore[assignment]


BAD_CANDIDATES = {
    "empty list": [], "empty array": np.array([], dtype="uint16"), "empty range": range(0),
    "repeated": [20000, 20001, 20000], "zero": [0, 1], "65536": [65536], "negative": [-1],
    "huge": [10**30], "bool": [True], "text": ["20000"], "none": [None], "floats": [1.5],
    "float array": np.array([1.0, 2.0]), "bool array": np.array([True]),
    "uint8": np.array([80], dtype="uint8"), "int8": np.array([80], dtype="int8"),
    "big-endian": np.array([20000], dtype=">u2"), "objects": np.array([20000, None]),
    "complex": np.array([1j]), "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "strings": np.array(["20000"]), "records": np.array([(1,)], dtype=[("port", "u2")]),
    "2-D": np.array([[20000, 20001]], dtype="uint16"), "0-D": np.array(20000, dtype="uint16"),
    "int64 out of range": np.array([20000, 70000]), "negative int32": np.array([-5], dtype="int32"),
    "uint64": np.array([2**63], dtype="uint64"), "zero in uint16": np.array([5, 0], dtype="uint16"),
    "reversed text": "5-1", "no range": "x", "bytes": b"20000", "bytearray": bytearray(4),
    "number": 20000, "float": 1.5, "dict": {20000: 1}, "set": {20000}, "generator": iter([20000]),
    "object": object(), "long range": range(1, 10**12), "far range": range(10**30, 10**30 + 2),
    "ctypes pointer": ctypes.pointer(ctypes.c_uint16(5)), "array of doubles": array("d", [1.0]),
    "nested": [[20000]],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CANDIDATES)
def test_candidates_that_are_no_ports(name: str) -> None:
    value = BAD_CANDIDATES[name]
    # what cannot be pickled is not asked to be: an iterator, a pointer
    with pytest.raises(InvalidRequest) as caught:
        allocate(candidates=value)
    assert caught.value.argument in ("candidates", "range")
    assert len(str(caught.value)) < 600
    if name not in ("repeated", "empty list", "empty array", "empty range"):
        with pytest.raises(InvalidRequest):
            probe(value)


def test_candidates_at_which_no_block_can_start() -> None:
    refused(lambda: allocate(2, candidates=[65535]), "candidates")
    refused(lambda: allocate(2, candidates=[20009], range=(20000, 20009)), "candidates")
    refused(lambda: allocate(candidates=[19999], range=(20000, 20009)), "candidates")
    refused(lambda: allocate(candidates=[20000], rng=np.random.default_rng(1)), "candidates")


@pytest.mark.parametrize(
    "timeout",
    [-1, -0.001, float("nan"), float("-inf"), "5", True, [], b"1", 2j, object()],
    ids=shown,
)
def test_a_timeout_that_is_no_time(timeout: object) -> None:
    refused(lambda: allocate(timeout=timeout), "timeout")
    refused(lambda: reserve(8080, timeout=timeout), "timeout")
    refused(lambda: allocate_many({"a": 1}, timeout=timeout), "timeout")


@pytest.mark.parametrize(
    "rng",
    [0, 42, "seed", [], object(), np.random.RandomState(1), np.random, np.random.PCG64(1)],
    ids=lambda v: type(v).__name__,
)
def test_an_rng_that_is_no_numpy_generator(rng: object) -> None:
    for ask in calls(
        lambda: allocate(rng=rng),
        lambda: allocate_many({"a": 1}, rng=rng),
        lambda: Allocator(rng=rng),
    ):
        with pytest.raises(InvalidRequest) as caught:
            ask()
        assert caught.value.argument == "rng"


@pytest.mark.parametrize("retry", [1, "fast", object()], ids=shown)
def test_a_retry_pace_without_base_and_cap(retry: object) -> None:
    refused(lambda: Allocator(retry=retry), "retry")


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        [],
        None,
        3,
        "http",
        {"": 1},
        {1: 1},
        {None: 1},
        {"a": {}},
        [("a", 1)],
        {"a\n": 1},
        {"x" * 65: 1},
        {b"a": 1},
    ],
    ids=shown,
)
def test_sizes_of_several_blocks_that_are_none(sizes: object) -> None:
    with pytest.raises(InvalidRequest):
        allocate_many(sizes)


def test_everything_after_the_first_argument_is_keyword_only() -> None:
    for ask in calls(
        lambda: allocate(1, "20000-29999"),
        lambda: reserve(8080, "tcp"),
        lambda: allocate_many({"a": 1}, "20000-29999"),
        lambda: probe([80], "tcp"),
        lambda: Allocator("20000-29999"),
    ):
        with pytest.raises(TypeError):
            ask()


def test_an_error_about_a_value_that_cannot_be_pickled_can_be() -> None:
    with pytest.raises(InvalidRequest) as caught:
        allocate(candidates=iter([1]), label="x")
    value = pickle.loads(pickle.dumps(caught.value)).value
    assert "iterator" in str(value)


# --- the core does not trust what another thread may change under it ----------------------------


def test_the_core_takes_no_port_0_and_no_start_outside_its_range() -> None:
    states = memoryview(bytearray(3)).cast("b")
    with pytest.raises(ValueError):
        _core.Search(1, 65535, 1, _core.TCP).probe(array("H", [20000, 0, 20001]), states)
    with pytest.raises(ValueError):
        _core.Search(20000, 20009, 1, _core.TCP).probe(array("H", [20000, 20010, 1]), states)
    for starts in ([19999], [20003, 0], [20008], [65535]):
        with pytest.raises(ValueError):
            _core.Search(20000, 20009, 3, _core.TCP, starts=array("H", starts))
    with pytest.raises(ValueError):
        _core.Search(20000, 20003, 1, _core.TCP, starts=array("H", [20000] * 5)).run()


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 5, 1, 1),
        (5, 4, 1, 1),
        (5, 65536, 1, 1),
        (5, 6, 0, 1),
        (5, 6, 3, 1),
        (5, 6, 1, 0),
        (5, 6, 1, 4),
        (5, 6, -1, 1),
    ],
)
def test_the_core_takes_no_search_that_makes_no_sense(
    arguments: tuple[int, int, int, int],
) -> None:
    with pytest.raises(ValueError):
        _core.Search(*arguments)


def test_the_core_takes_no_buffer_of_another_kind() -> None:
    good = array("H", [20000, 20001])
    states = memoryview(bytearray(2)).cast("b")
    for ports, out in (
        (array("I", [20000, 20001]), states),
        (good, memoryview(bytearray(3)).cast("b")),
        (good, good),
        (good, memoryview(b"ab")),
        (np.array([[20000, 20001]], dtype="uint16"), states),
    ):
        with pytest.raises((ValueError, BufferError)):
            _core.Search(1, 65535, 1, _core.TCP).probe(ports, out)
