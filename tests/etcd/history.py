"""What etcd itself says happened: every change of a namespace since its first revision.

The clients' own words are not asked. A key has one owner at any time if it is only ever written
when it is absent, or by whoever stands there already.
"""

from __future__ import annotations

import json
from typing import Any

import etcd3
import grpc

from .servers import Etcd


def events(server: Etcd, namespace: str) -> list[Any]:
    """All changes up to now, oldest first."""
    rpc = etcd3.etcdrpc
    begin = f"v1/{namespace}/".encode()
    end = begin[:-1] + b"0"
    seen: list[Any] = []
    with grpc.insecure_channel(server.endpoint) as channel:
        last = rpc.KVStub(channel).Range(rpc.RangeRequest(key=begin, limit=1), timeout=10)
        create = rpc.WatchCreateRequest(
            key=begin, range_end=end, start_revision=1, progress_notify=True
        )
        stream = channel.unary_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=rpc.WatchRequest.SerializeToString,
            response_deserializer=rpc.WatchResponse.FromString,
        )(rpc.WatchRequest(create_request=create), timeout=30)
        # A key of our own marks the end: everything before it has come when it comes.
        mark = begin + b"~end"
        done = rpc.KVStub(channel).Put(rpc.PutRequest(key=mark, value=b""), timeout=10)
        assert done.header.revision > last.header.revision
        for response in stream:
            assert not response.canceled, response.cancel_reason
            for event in response.events:
                if event.kv.key == mark:
                    stream.cancel()
                    rpc.KVStub(channel).DeleteRange(rpc.DeleteRangeRequest(key=mark), timeout=10)
                    return seen
                seen.append(event)
    raise AssertionError("the watch ended early")


def check(seen: list[Any]) -> tuple[set[str], dict[bytes, str]]:
    """Fail where a key changed hands without being free in between, or a block came in parts.

    Returns
    -------
    set of str
        The tokens whose blocks stood whole at one revision.
    dict
        The owner's token by key, as it stands at the end.
    """
    owners: dict[bytes, str] = {}
    whole: set[str] = set()
    known: set[str] = set()
    by_revision: dict[int, list[Any]] = {}
    for event in seen:
        by_revision.setdefault(event.kv.mod_revision, []).append(event)
    assert list(by_revision) == sorted(by_revision)
    for revision, together in by_revision.items():
        written: dict[str, set[int]] = {}
        sizes: dict[str, tuple[int, int]] = {}
        for event in together:
            name = bytes(event.kv.key)
            if event.type == event.DELETE:
                assert name in owners, f"{name!r} was deleted twice, at {revision}"
                del owners[name]
                continue
            fields = json.loads(event.kv.value)
            token = fields["token"]
            before = owners.get(name)
            assert before in (None, token), f"{name!r}: {token} over {before} at {revision}"
            owners[name] = token
            written.setdefault(token, set()).add(int(name[-5:]))
            sizes[token] = fields["first"], fields["size"]
        for token, ports in written.items():
            first, size = sizes[token]
            complete = ports == set(range(first, first + size))
            # Later its keys may be written one by one, around somebody who took one meanwhile.
            assert complete or token in known, f"{token} got {sorted(ports)} of {first}+{size}"
            known.add(token)
            if complete:
                whole.add(token)
    return whole, owners
