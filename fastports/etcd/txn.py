"""Transactions as protocol messages: what is compared, what is written, how much fits."""

from __future__ import annotations

from ..errors import InvalidRequest
from . import wire
from .keys import SPACES, after, key, prefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from .keys import Record

#: etcd's default for --max-txn-ops; counted apart for compares and each branch. A nested
#: transaction has what its parent leaves (etcd's server/etcdserver/api/v3rpc/key.go), which the
#: widths below respect on every level.
MAX_OPERATIONS = 128


def fold(operations: list[bytes], compares: int) -> list[bytes]:
    """Operations such that no level of the transaction has more than etcd allows."""
    if compares > MAX_OPERATIONS:
        raise InvalidRequest(
            f"{compares} separate blocks cannot be recorded in one transaction; ask for at most "
            f"{MAX_OPERATIONS}",
            argument="blocks",
        )
    count = len(operations)
    if count <= MAX_OPERATIONS:
        return operations
    for width in (64, 48, 32, 24, 16, 8):
        if max(compares, -(-count // width)) + width <= MAX_OPERATIONS:
            return _wrap(operations, width)
    for width in (40, 24, 12):
        if max(compares, -(-count // width**2)) + 2 * width <= MAX_OPERATIONS:
            return _wrap(_wrap(operations, width), width)
    raise InvalidRequest(
        f"{count} ports in {compares} blocks are more than one transaction holds; ask for fewer",
        argument="blocks",
    )


def _wrap(operations: list[bytes], width: int) -> list[bytes]:
    return [wire.nested(operations[i : i + width]) for i in range(0, len(operations), width)]


def carries(rpc: Any, start: bytes, end: bytes, value: bytes) -> Any:
    """True when there is a key in [start, end) and every one of them has this value."""
    compare = rpc.Compare
    return compare(
        result=compare.EQUAL, target=compare.VALUE, key=start, range_end=end, value=value
    )


def spans(records: Iterable[Record]) -> list[tuple[bytes, int, int]]:
    """The fewest (prefix, first, last) that cover the records and nothing else."""
    parts = sorted((start, first, last) for r in records for start, first, last, _ in r.parts)
    merged: list[tuple[bytes, int, int]] = []
    for start, first, last in parts:
        if merged and merged[-1][0] == start and merged[-1][2] + 1 == first:
            merged[-1] = (start, merged[-1][1], last)
        else:
            merged.append((start, first, last))
    return merged


def claim(
    records: Sequence[Record],
    lease: int,
    root: str,
    search: tuple[int, int],
    strays: Sequence[bytes] = (),
) -> bytes:
    """Write all records under ``lease`` if no key stands on any of their ports.

    The failure branch answers with the keys of ``search`` (and of the records), one range for each
    protocol. ``strays`` are keys between those of two ports that are no port's key.
    """
    compares = []
    for start, first, last in spans(records):
        begin, end = key(start, first), after(start, last)
        for stray in sorted(stray for stray in strays if begin <= stray < end):
            compares.append(wire.absent(begin, stray))
            begin = stray + b"\0"
        compares.append(wire.absent(begin, end))
    low = min(search[0], *(record.first for record in records))
    high = max(search[1], *(record.last for record in records))
    return wire.transaction(
        compares,
        fold(wire.puts((part for r in records for part in r.parts), lease), len(compares)),
        [
            wire.keys_in(key(start, low), after(start, high))
            for start in read_prefixes(records, root)
        ],
    )


def write(records: Sequence[Record], lease: int) -> bytes:
    """Write all records under ``lease`` if no key stands on any of their ports."""
    compares = [
        wire.absent(key(start, first), after(start, last)) for start, first, last in spans(records)
    ]
    return wire.transaction(
        compares, fold(wire.puts((part for r in records for part in r.parts), lease), len(compares))
    )


def read_prefixes(records: Sequence[Record], root: str) -> list[bytes]:
    """The key prefixes that the failure branch of ``claim`` reads, in its order."""
    spaces = dict.fromkeys(space for r in records for space in SPACES[r.protocol])
    return [prefix(root, space, records[0].host_id) for space in spaces]


def occupied(
    answer: Any, prefixes: Sequence[bytes]
) -> tuple[dict[bytes, dict[int, Any]], list[bytes]]:
    """Who stands where, out of the failure branch of ``claim``.

    Returns
    -------
    dict
        The key-value message (without a value) of each port, by prefix.
    list of bytes
        Keys that are no port's.
    """
    found: dict[bytes, dict[int, Any]] = {}
    strays: list[bytes] = []
    for start, response in zip(prefixes, answer.responses, strict=True):
        length = len(start)
        ports = found[start] = {}
        for kv in response.response_range.kvs:  # ten thousand where a range is full
            tail = kv.key[length:]
            if len(tail) == 5 and tail.isdigit() and 0 < (port := int(tail)) < 65536:
                ports[port] = kv
            else:
                strays.append(kv.key)
    return found, strays


def remove(rpc: Any, records: Sequence[Record]) -> Any:
    """Delete the records if every key that stands there is still theirs; else read them."""
    parts = [part for record in records for part in record.parts]
    return rpc.TxnRequest(
        compare=[
            carries(rpc, key(start, first), after(start, last), value)
            for start, first, last, value in parts
        ],
        success=[
            rpc.RequestOp(
                request_delete_range=rpc.DeleteRangeRequest(
                    key=key(start, first), range_end=after(start, last)
                )
            )
            for start, first, last, _ in parts
        ],
        failure=reads(rpc, records),
    )


def reads(rpc: Any, records: Sequence[Record]) -> list[Any]:
    """One range read for each part of the records."""
    return [
        rpc.RequestOp(
            request_range=rpc.RangeRequest(key=key(start, first), range_end=after(start, last))
        )
        for record in records
        for start, first, last, _ in record.parts
    ]


def values(answer: Any) -> dict[bytes, Any]:
    """All key-value messages of the range reads in an answer, by key."""
    return {
        kv.key: kv
        for response in answer.responses
        if response.WhichOneof("response") == "response_range"
        for kv in response.response_range.kvs
    }


def runs(
    records: Iterable[Record], found: dict[bytes, Any]
) -> tuple[list[tuple[bytes, int, int, bytes, bool]], bytes]:
    """What may be written of the records after ``found`` was read, in as few runs as possible.

    Returns
    -------
    list of (prefix, first, last, value, ours)
        Runs of keys that are absent (``ours`` false) or carry our value (true).
    bytes
        A value found on one of the records' keys that is not ours; empty if there is none.
    """
    made: list[tuple[bytes, int, int, bytes, bool]] = []
    rival = b""
    wanted = {name for record in records for name, _ in record.items()}
    crowded = any(name not in wanted for name in found)  # a stray would spoil a range compare
    for record in records:
        for start, first, last, value in record.parts:
            for port in range(first, last + 1):
                kv = found.get(key(start, port))
                if kv is not None and kv.value != value:
                    rival = kv.value or b"?"
                    continue
                ours = kv is not None
                before = made[-1] if made else None
                if (
                    before is not None
                    and not crowded
                    and before == (start, before[1], port - 1, value, ours)
                ):
                    made[-1] = (start, before[1], port, value, ours)
                else:
                    made.append((start, port, port, value, ours))
    return made, rival


def write_runs(chosen: Sequence[tuple[bytes, int, int, bytes, bool]], lease: int) -> bytes:
    """Write runs under ``lease`` if all of them are still as they were read."""
    compares = [
        wire.carry(key(start, first), after(start, last), value)
        if ours
        else wire.absent(key(start, first), after(start, last))
        for start, first, last, value, ours in chosen
    ]
    operations = wire.puts(
        ((start, first, last, value) for start, first, last, value, _ in chosen), lease
    )
    return wire.transaction(compares, fold(operations, len(compares)))


def delete_runs(rpc: Any, chosen: Sequence[tuple[bytes, int, int, bytes, bool]]) -> Any:
    """Delete runs of ours if all of them are still as they were read."""
    return rpc.TxnRequest(
        compare=[
            carries(rpc, key(start, first), after(start, last), value)
            for start, first, last, value, _ in chosen
        ],
        success=[
            rpc.RequestOp(
                request_delete_range=rpc.DeleteRangeRequest(
                    key=key(start, first), range_end=after(start, last)
                )
            )
            for start, first, last, _, _ in chosen
        ],
    )
