"""``fastports ls --etcd``: what a cluster has recorded, and what changes."""

from __future__ import annotations

import os
import sys

from . import cluster
from .ls import LABEL, short_age
from .say import printable, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..etcd import EtcdRegistry
    from ..registry import Entry
    from .options import Options

__all__ = ["ls_etcd"]

_FIELDS = ("first", "last", "protocol", "host", "pid", "start", "alive", "label", "age")
_EXTRA = ("namespace", "host_id", "hostname", "address", "metadata", "reserved_at")
_LONGEST = 40  # letters of foreign text in a column


def ls_etcd(options: Options) -> int:
    every = options["namespace"] == "*"
    with cluster.registry(options, every=every) as registry:
        namespace = "*" if every else registry.namespace
        if "watch" in options:
            _follow(registry, namespace, json="json" in options)
            return 0
        listing = registry.entries(namespace=namespace)
        found = list(listing)
        if "json" in options:
            _write_json(found)
        elif found:
            _write_table(found, every=every)
        else:
            where = "any namespace" if every else f"the namespace {printable(namespace)!r}"
            say(f"no ports are recorded in {where}.")
        if listing.skipped:
            one = listing.skipped == 1
            say(
                f"{listing.skipped} {'key is' if one else 'keys are'} not in a form that fastports"
                f" can list; {'its port is' if one else 'their ports are'} taken all the same."
            )
    return 0


def _follow(registry: EtcdRegistry, namespace: str, *, json: bool) -> None:
    # The watch itself would wait for an etcd that is not there as long as it takes.
    next(iter(registry.entries(namespace=namespace)), None)
    if not json and sys.stdout.isatty():
        say("Ctrl-C ends this.")
    with registry.watch(namespace=namespace) as changes:
        for change in changes:
            if json:
                from json import dumps  # 7 ms

                facts = {"kind": change.kind, "revision": change.revision, **_facts(change.entry)}
                print(dumps(facts), flush=True)
                continue
            row = _row(change.entry, every=namespace == "*")
            del row[-2]  # an age tells nothing here
            print(change.kind, *row, sep="  ", flush=True)


def _facts(entry: Entry) -> dict[str, object]:
    facts: dict[str, object] = {name: getattr(entry, name) for name in _FIELDS}
    facts["age"] = round(entry.age, 1)
    facts.update((name, entry.extra.get(name)) for name in _EXTRA)
    if facts["metadata"] is None:  # Dynamo's allocator writes them side by side
        names = ("worker_id", "reason")
        facts["metadata"] = {name: entry.extra[name] for name in names if name in entry.extra}
    return facts


def _write_json(found: Sequence[Entry]) -> None:
    import json  # 7 ms

    print("[" + ",\n ".join(json.dumps(_facts(entry)) for entry in found) + "]")


def _text(value: object) -> str:
    text = printable(value) if isinstance(value, str) else ""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "+"


def _host(entry: Entry) -> str:
    """Name and address of the owner's host, as far as its value tells."""
    name, address = _text(entry.extra.get("hostname")), _text(entry.extra.get("address"))
    if not name:
        return _text(entry.extra.get("host_id"))
    return name if not address or address == name else f"{name} ({address})"


def _row(entry: Entry, *, every: bool) -> list[str]:
    ports = f"{entry.first}-{entry.last}" if entry.last > entry.first else f"{entry.first}"
    pid = f"{entry.pid}" if entry.pid else "-"
    row = [
        ports,
        entry.protocol,
        _host(entry),
        f"{pid} dead" if entry.alive is False else pid,
        short_age(entry.age),
        _text(entry.label) or "-",
    ]
    if every:
        row.insert(0, _text(entry.extra.get("namespace")))
    return row


def _write_table(found: Sequence[Entry], *, every: bool) -> None:
    width = os.get_terminal_size(1).columns if sys.stdout.isatty() else 0
    head = ["PORTS", "PROTO", "HOST", "PID", "AGE", "LABEL"]
    rows = [["NAMESPACE", *head] if every else head]
    for entry in found:
        row = _row(entry, every=every)
        if width and len(row[-1]) > LABEL:
            row[-1] = row[-1][: LABEL - 1] + "+"
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(
            f"{cell:>{w}}" if name in ("PID", "AGE") else f"{cell:<{w}}"
            for cell, w, name in zip(row, widths, rows[0], strict=True)
        ).rstrip()
        print(line[:width] if width else line)
