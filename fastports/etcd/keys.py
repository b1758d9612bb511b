"""What stands in etcd: the layout of keys and values.

``v1/{namespace}/ports/{host_id}/{port:05d}`` is one TCP port, ``ports-udp`` its UDP twin. Five
digits, so that the order of keys is the order of ports and one range of keys is one range of ports.
The value is the same for all ports of a block: JSON, described in ``docs/etcd.md``.
"""

from __future__ import annotations

import json
import os
import time

from ..errors import InvalidRequest
from ..registry import Entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from ..registry import Recordable

SCHEMA = 1
#: Longest value written, and longest value looked into, in bytes.
VALUE_LIMIT = 64 * 1024
#: From so many bytes of values on, only the first key of a block carries the whole value: a
#: request may have 1.5 MiB.
BULKY = 768 * 1024

SPACES = {"tcp": ("ports",), "udp": ("ports-udp",), "both": ("ports", "ports-udp")}


def check_word(argument: str, value: object, longest: int = 200) -> str:
    """A word that can be one step of a key."""
    if not isinstance(value, str) or not value or len(value) > longest:
        raise InvalidRequest(
            f"{argument} is a word of 1 to {longest} characters, not {value!r}",
            argument=argument,
            value=value,
        )
    if "/" in value or not value.isprintable() or value != value.strip():
        raise InvalidRequest(
            f"{argument} is part of a key: no '/', no control character and no blank at its ends "
            f"can stand in {value!r}",
            argument=argument,
            value=value,
        )
    return check_encodable(argument, value)


def check_encodable(argument: str, value: str) -> str:
    """Text that UTF-8 can write: lone surrogates, as of undecodable arguments, it cannot."""
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(
            f"{argument} {value!r} cannot be written as UTF-8", argument=argument, value=value
        ) from exc
    return value


def check_seconds(argument: str, value: object) -> float:
    if type(value) in (int, float) and 0 < value < float("inf"):  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise InvalidRequest(
        f"{argument} is a positive number of seconds, not {value!r}", argument=argument, value=value
    )


def root(namespace: str) -> str:
    """Where all keys of a namespace stand."""
    return f"v1/{namespace}"


def prefix(root: str, space: str, host_id: str) -> bytes:
    return f"{root}/{space}/{host_id}/".encode()


def key(start: bytes, port: int) -> bytes:
    return start + b"%05d" % port


def after(start: bytes, port: int) -> bytes:
    """The end of a key range whose last key is that of ``port``."""
    return start + b"%05d\0" % port


def port_of(raw: bytes, length: int) -> int | None:
    """The port at the end of a key whose prefix has ``length`` bytes; None for strangers' keys."""
    tail = raw[length:]
    if len(tail) == 5 and tail.isdigit():
        port = int(tail)
        if 0 < port < 65536:
            return port
    return None


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def network_identity() -> str:
    """What a port is exclusive to: this boot of this machine, and this thread's network namespace.

    Needs no name, no address and no route. See namespaces(7): two processes are in one namespace
    exactly if the inode numbers of these files are equal.
    """
    boot = boot_id()
    try:
        inode = os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        inode = 0
    if not boot or not inode:
        raise InvalidRequest(
            "the network namespace cannot be told from /proc here; give host_id=, a word that "
            "differs for every host and network namespace",
            argument="host_id",
        )
    return f"{boot}-{inode}"


class Identity:
    """What every value of this process says about the process."""

    __slots__ = ("address", "boot", "hostname", "pid_namespace")

    def __init__(self, advertise: str | None) -> None:
        self.hostname: str = os.uname().nodename
        self.address: str | None = advertise
        self.boot: str = boot_id()
        self.pid_namespace: int = pid_namespace()


class Record:
    """One block as this process keeps it recorded.

    Attributes
    ----------
    parts
        Runs of keys that carry the same value: (prefix, first port, last port, value).
    state
        ``"claiming"``, ``"held"``, ``"degraded"`` or ``"contested"``.
    lease
        The lease under which the keys were written last; 0: none.
    rival
        The value found in place of ours, while contested.
    """

    __slots__ = (
        "block", "first", "host_id", "last", "lease", "parts", "protocol", "rival", "state", "token"
    )  # fmt: skip

    def __init__(
        self, block: Recordable, root: str, host_id: str, identity: Identity,
        reference: Callable[[], Any], further: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.block = reference
        self.token: str = block.owner.token
        self.first: int = block.first
        self.last: int = block.last
        self.protocol: str = block.protocol
        self.host_id: str = host_id
        self.state: str = "claiming"
        self.lease: int = 0
        self.rival: bytes = b""
        whole, short = encode(block, identity, further or {})
        spaces = SPACES[block.protocol]
        size = block.last - block.first + 1
        self.parts: list[tuple[bytes, int, int, bytes]] = []
        for space in spaces:
            start = prefix(root, space, host_id)
            if size == 1 or len(whole) * size * len(spaces) <= BULKY:
                self.parts.append((start, block.first, block.last, whole))
            else:
                self.parts.append((start, block.first, block.first, whole))
                self.parts.append((start, block.first + 1, block.last, short))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key with the value that belongs there."""
        for start, first, last, value in self.parts:
            for port in range(first, last + 1):
                yield start + b"%05d" % port, value


def encode(
    block: Recordable, identity: Identity, further: Mapping[str, object]
) -> tuple[bytes, bytes]:
    """The value of a block, and the short form for further keys of a very large one.

    ``further`` fields take no place of ours but that of ``reserved_at``.
    """
    now = time.time()
    moment = time.gmtime(now)
    short: dict[str, object] = {
        "v": SCHEMA,
        "token": block.owner.token,
        "first": block.first,
        "size": block.last - block.first + 1,
        "protocol": block.protocol,
    }
    whole = {
        **further,
        **short,
        "host": block.host,
        "pid": block.owner.pid,
        "start": block.owner.start,
        "hostname": identity.hostname,
        "address": identity.address or block.host or identity.hostname,
        "label": block.label,
        "metadata": dict(block.metadata),
        "reserved_at": further.get("reserved_at")
        or time.strftime("%Y-%m-%dT%H:%M:%S", moment) + f".{int(now % 1 * 1e6):06d}+00:00",
        "boot_id": identity.boot,
        "pid_namespace": identity.pid_namespace,
    }
    try:
        # Never a value that strict readers of JSON refuse (NaN).
        value = json.dumps(whole, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        raw = value.encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequest(
            f"the metadata cannot be written as JSON ({exc}); use strings, finite numbers, "
            "booleans, None, lists and dicts of them",
            argument="metadata",
            value=block.metadata,
        ) from exc
    if len(raw) > VALUE_LIMIT:
        raise InvalidRequest(
            f"label and metadata make a record of {len(raw)} bytes; at most {VALUE_LIMIT} are "
            "possible: keep large data elsewhere and record where",
            argument="metadata",
            value=len(raw),
        )
    return raw, json.dumps(short, separators=(",", ":")).encode()


_parse = json.JSONDecoder().raw_decode


def decode(raw: bytes) -> dict[str, Any] | None:
    """The fields of a value; None for what is no JSON object of reasonable size."""
    if len(raw) > VALUE_LIMIT:
        return None
    try:
        text = raw.decode()
        fields, end = _parse(text)  # in half of the time that json.loads() takes
        if end != len(text):
            fields = json.loads(raw)
    except (ValueError, RecursionError):
        try:
            fields = json.loads(raw)  # which knows of other encodings, and of blanks around it
        except (ValueError, RecursionError):
            return None
    return fields if isinstance(fields, dict) else None


class EntryReader:
    """Makes entries out of what other programs wrote, none of which is trusted.

    ``alive`` is only told for processes of this boot and this pid namespace.
    """

    def __init__(self) -> None:
        self._boot = boot_id()
        self._pids = pid_namespace()
        self._alive: dict[tuple[int, int], bool | None] = {}
        self._now = time.time()
        from datetime import datetime, timezone  # 2 ms

        self._moment, self._utc = datetime.fromisoformat, timezone.utc

    def alive(self, fields: Mapping[str, Any]) -> bool | None:
        if fields.get("boot_id") != self._boot or fields.get("pid_namespace") != self._pids:
            return None
        pid, start = fields.get("pid"), fields.get("start")
        if not self._boot or not isinstance(pid, int) or not isinstance(start, int):
            return None
        known = self._alive.get((pid, start), ...)
        if known is ...:
            known = self._alive[pid, start] = _runs(pid, start)
        return known

    def entry(
        self, fields: dict[str, Any], port: int, space: str, host_id: str, namespace: str
    ) -> Entry | None:
        """The block that a key and its fields tell of; None where they contradict each other.

        Its ``extra`` is ``fields``, with where it was found.
        """
        get = fields.get
        first = get("first", port)
        size = get("size", 1)
        protocol = get("protocol", "tcp" if space == "ports" else "udp")
        if (
            type(first) is not int
            or type(size) is not int
            or not 0 < first <= port < first + size <= 65536
            or not isinstance(protocol, str)
            or space not in SPACES.get(protocol, ())
        ):
            return None
        pid, start, label, host = get("pid"), get("start"), get("label"), get("host")
        if not isinstance(label, str):
            label = get("worker_id")
        age, alive = self._age(get("reserved_at")), self.alive(fields)
        fields["host_id"] = host_id
        fields["namespace"] = namespace
        return Entry(
            first,
            first + size - 1,
            protocol=protocol,
            host=host if isinstance(host, str) else None,
            pid=pid if type(pid) is int and 0 < pid < 1 << 22 else 0,  # PID_MAX_LIMIT
            start=start if type(start) is int else 0,
            label=label if isinstance(label, str) else "",
            age=age,
            alive=alive,
            extra=fields,
        )

    def _age(self, moment: object) -> float:
        try:
            if isinstance(moment, str):
                when = self._moment(moment)
                if when.tzinfo is None:
                    when = when.replace(tzinfo=self._utc)
                return max(0.0, self._now - when.timestamp())
            if isinstance(moment, (int, float)):
                return max(0.0, self._now - moment)
        except (ValueError, OverflowError):
            pass
        return 0.0


def _runs(pid: int, start: int) -> bool | None:
    """Whether a process with this pid and start time runs; None where that cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError):
        return None
    try:
        fields = text[text.rindex(b")") + 2 :].split()
        return int(fields[19]) == start and fields[0] not in (b"Z", b"X")
    except (ValueError, IndexError):
        return None
