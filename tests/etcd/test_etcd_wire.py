"""The bytes of a transaction say what message objects of the client would say."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import etcd3
import pytest

from fastports.etcd import txn, wire
from fastports.etcd.keys import Identity, Record, after, key

from .conftest import block

RPC: Any = etcd3.etcdrpc


def record(first: int, size: int, **fields: Any) -> Record:
    mine = block(first, size, **fields)
    return Record(mine, "v1/n", "10.0.0.1", Identity(None), lambda: mine)


def absent(start: bytes, end: bytes) -> Any:
    return RPC.Compare(
        result=RPC.Compare.EQUAL, target=RPC.Compare.VERSION, key=start, range_end=end, version=0
    )


def written(records: list[Record], lease: int) -> list[Any]:
    return [
        RPC.RequestOp(request_put=RPC.PutRequest(key=name, value=value, lease=lease))
        for each in records
        for name, value in each.items()
    ]


def flat(operations: Any) -> list[Any]:
    """What nested transactions do, and that no level does more than etcd allows."""
    found: list[Any] = []
    assert len(operations) <= txn.MAX_OPERATIONS
    for operation in operations:
        if operation.WhichOneof("request") == "request_txn":
            inner = operation.request_txn
            assert not inner.compare and not inner.failure
            found += flat(inner.success)
        else:
            found.append(operation)
    return found


@pytest.mark.parametrize("lease", [1, 127, 128, 2**63 - 1])
@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 4096])
@pytest.mark.parametrize("protocol", ["tcp", "both"])
def test_a_claim_as_bytes_is_the_message_it_stands_for(
    size: int, protocol: str, lease: int
) -> None:
    mine = record(20000, size, protocol=protocol, label="ä\n", metadata={"x": "y" * 300})
    request = RPC.TxnRequest.FromString(txn.claim([mine], lease, "v1/n", (19000, 29999)))
    spaces = ["ports-udp", "ports"] if protocol == "both" else ["ports"]
    starts = [f"v1/n/{space}/10.0.0.1/".encode() for space in spaces]
    assert list(request.compare) == [
        absent(key(start, 20000), after(start, 20000 + size - 1)) for start in starts
    ]
    assert flat(request.success) == written([mine], lease)
    assert list(request.failure) == [
        RPC.RequestOp(
            request_range=RPC.RangeRequest(
                key=key(start, 19000), range_end=after(start, 29999), keys_only=True
            )
        )
        for start in reversed(starts)
    ]
    assert request.SerializeToString()  # nothing in it is unknown to the client:
    assert RPC.TxnRequest.FromString(request.SerializeToString()) == request


def test_any_records_and_strays_make_the_message_they_stand_for() -> None:
    draw = random.Random(4)
    for _ in range(200):
        firsts = draw.sample(range(20000, 30000, 50), draw.randint(1, 40))
        records = [
            record(first, draw.randint(1, 50), label="x" * draw.choice((0, 1, 90, 200)))
            for first in firsts
        ]
        start = b"v1/n/ports/10.0.0.1/"
        stray = key(start, records[0].first) + b"7"
        lease = draw.randint(1, 2**63 - 1)
        request = RPC.TxnRequest.FromString(
            txn.claim(records, lease, "v1/n", (20000, 29999), [stray])
        )
        assert flat(request.success) == written(records, lease)
        expected = []
        for _, first, last in txn.spans(records):
            begin, end = key(start, first), after(start, last)
            if begin <= stray < end:
                expected.append(absent(begin, stray))
                begin = stray + b"\0"
            expected.append(absent(begin, end))
        assert list(request.compare) == expected
        again = RPC.TxnRequest.FromString(txn.write(records, lease))
        assert flat(again.success) == written(records, lease) and not again.failure


def test_runs_of_ours_and_of_nobodys_make_the_message_they_stand_for() -> None:
    start = b"v1/n/ports/10.0.0.1/"
    chosen = [(start, 20000, 20003, b"mine", False), (start, 20005, 20005, b"mine", True)]
    request = RPC.TxnRequest.FromString(txn.write_runs(chosen, 5))
    ours = RPC.Compare(
        result=RPC.Compare.EQUAL, target=RPC.Compare.VALUE, key=key(start, 20005),
        range_end=after(start, 20005), value=b"mine",
    )  # fmt: skip
    assert list(request.compare) == [absent(key(start, 20000), after(start, 20003)), ours]
    assert [op.request_put.key for op in request.success] == [
        key(start, port) for port in (20000, 20001, 20002, 20003, 20005)
    ]


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**32, 2**63 - 1])
def test_numbers_are_written_as_protocol_buffers_do(number: int) -> None:
    put = RPC.PutRequest.FromString(b"\x18" + wire.varint(number))
    assert put.lease == number


def test_an_answer_tells_ports_and_strays_apart() -> None:
    start = b"v1/n/ports/10.0.0.1/"
    tails = [b"20000", b"20000x", b"2000", b"99999", b"00000", b"2000a", b"65535"]
    kvs = [SimpleNamespace(key=start + tail, lease=n) for n, tail in enumerate(tails)]
    answer = SimpleNamespace(responses=[SimpleNamespace(response_range=SimpleNamespace(kvs=kvs))])
    found, strays = txn.occupied(answer, [start])
    assert {port: kv.lease for port, kv in found[start].items()} == {20000: 0, 65535: 6}
    assert strays == [start + tail for tail in tails[1:6]]
