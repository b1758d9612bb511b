"""The interface of Dynamo's port allocator over the hold: change the import, keep the program.

>>> from fastports.compat.dynamo import DistributedRuntime, DynamoPortRange
>>> from fastports.compat.dynamo import PortMetadata, allocate_and_reserve_port
>>> async def main(runtime: DistributedRuntime) -> int:
...     metadata = PortMetadata("vllm-backend-dp0", "zmq_kv_event_port")
...     return await allocate_and_reserve_port(
...         runtime, "dynamo", metadata, DynamoPortRange(20000, 29999)
...     )

The names, fields and results are those of ``dynamo.vllm.ports`` and of the method
``DistributedRuntime.allocate_port_block``, as in ai-dynamo 0.5 to 0.7. What differs:

* Ports are found whenever there are any, in one transaction however many, and
  :func:`configure_ports` gets all of its ports or none.
* They are kept until :meth:`DistributedRuntime.release_port_block`,
  :meth:`DistributedRuntime.shutdown` or the end of the process, and are free at once then.
  Whoever cancels a call finds nothing left of it.
* They are free in TCP *and* UDP, IPv4 and IPv6, and no namespace gets another one's.
* etcd is asked only when it is named, and an etcd that fails is told as such, in errors of
  :mod:`fastports.errors`; arguments that cannot be served raise ``InvalidRequest``, a ValueError.

``runtime`` may be a :class:`DistributedRuntime` of this module, or any other object, such as the
runtime of a Dynamo that allocates no ports any more: then one runtime of the process does it, with
its settings from the environment.

The race that remains depends on how ports are kept for programs that are told nothing but the
number; see ``handoff``. The interface came with https://github.com/ai-dynamo/dynamo/pull/3125.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import dataclass

from .. import aio
from ..errors import InvalidRequest, PortsUnavailable
from ..etcd import EtcdRegistry
from ..etcd.keys import check_encodable, check_word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from ..registry import Recordable

__all__ = [
    "DEFAULT_DYNAMO_PORT_MAX",
    "DEFAULT_DYNAMO_PORT_MIN",
    "DEFAULT_DYN_PORT_MAX",
    "DEFAULT_DYN_PORT_MIN",
    "HANDOFFS",
    "KEYS",
    "DistributedRuntime",
    "DynamoPortRange",
    "PortAllocationRequest",
    "PortMetadata",
    "allocate_and_reserve_port",
    "allocate_and_reserve_port_block",
    "check_port_available",
    "configure_ports",
    "get_host_ip",
    "get_key_ip",
]

_log = logging.getLogger("fastports.dynamo")

#: Both inclusive. Called ``DEFAULT_DYNAMO_...`` in the released wheels.
DEFAULT_DYN_PORT_MIN = DEFAULT_DYNAMO_PORT_MIN = 20000
DEFAULT_DYN_PORT_MAX = DEFAULT_DYNAMO_PORT_MAX = 30000

HANDOFFS = ("close", "door", "hold")
KEYS = ("v1", "dyn")
_OPTIONS = (
    "ttl", "timeout", "retry", "user", "password", "ca", "cert", "key", "advertise", "on_lost",
    "on_restored",
)  # fmt: skip
_TRIES = 64  # blocks set aside at most, because somebody squats on a marker
_LABEL = 64  # bytes; longer ones are cut

# What the ancestor's values say beside the pid, which ours have anyway.
_FIELDS: dict[str, tuple[type, ...]] = {
    "worker_id": (str,),
    "reason": (str,),
    "reserved_at": (int, float),
    "block_size": (int,),
}


class _OutOfRange(InvalidRequest, OverflowError):
    """A number that is no port, as the ancestor's binding has it: OverflowError, too."""


# --- the words of a request ---


@dataclass
class DynamoPortRange:
    """Ports to search, both ends inclusive, within 1024-49151 (RFC 6335's registered ports).

    Raises
    ------
    InvalidRequest
        Outside of those, or with ``min >= max``.
    """

    min: int
    max: int

    def __post_init__(self) -> None:
        for name in ("min", "max"):
            _whole(name, getattr(self, name))
        if self.min < 1024 or self.max > 49151:
            raise InvalidRequest(
                f"port range {self.min}-{self.max} leaves the registered ports; stay within"
                " 1024-49151",
                argument="min" if self.min < 1024 else "max",
                value=(self.min, self.max),
            )
        if self.min >= self.max:
            raise InvalidRequest(
                f"port range {self.min}-{self.max}: min must be less than max",
                argument="min",
                value=(self.min, self.max),
            )


@dataclass
class PortMetadata:
    """Who wants ports, such as ``vllm-backend-dp0``, and what for: ``nixl_side_channel_port``."""

    worker_id: str
    reason: str


@dataclass
class PortAllocationRequest:
    """So many contiguous ports of a range.

    Raises
    ------
    InvalidRequest
        ``block_size`` is less than 1 or greater than the range.
    """

    metadata: PortMetadata
    port_range: DynamoPortRange
    block_size: int = 1

    def __post_init__(self) -> None:
        size = _whole("block_size", self.block_size)
        ports = self.port_range.max - self.port_range.min + 1
        if not 1 <= size <= ports:
            raise InvalidRequest(
                f"block_size is from 1 to the {ports} ports of"
                f" {self.port_range.min}-{self.port_range.max}, not {size}",
                argument="block_size",
                value=size,
            )


def _whole(argument: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidRequest(
            f"{argument} is a whole number, not {value!r}", argument=argument, value=value
        )
    return int(value.__index__())


def _port(argument: str, value: object) -> int:
    number = _whole(argument, value)
    if not 0 < number < 65536:
        raise _OutOfRange(
            f"{argument} is a port from 1 to 65535, not {number}", argument=argument, value=value
        )
    return number


def _text(argument: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(
            f"{argument} is a string, not {value!r}", argument=argument, value=value
        )
    return check_encodable(argument, value)


# --- the runtime ---


class _Registry(EtcdRegistry):
    """Writes the fields of the ancestor's values beside our own, where ``keys`` says."""

    def __init__(self, etcd: Any, *, namespace: str, keys: str, **options: Any) -> None:
        super().__init__(etcd, namespace=namespace, **options)
        self._keys = keys

    def _root(self) -> str:
        return f"dyn://{self.namespace}" if self._keys == "dyn" else super()._root()

    def _further(self, block: Recordable) -> Mapping[str, object]:
        metadata = dict(block.metadata)
        if "context" in metadata:
            return _ancestors_fields(metadata["context"])
        return {
            **metadata,
            "reason": block.label.rpartition("-")[2],
            "block_size": block.last - block.first + 1,
        }


def _ancestors_fields(context: object) -> dict[str, object]:
    """What a context says in the way of the ancestor; nothing of any other text."""
    try:
        fields = json.loads(context) if isinstance(context, str) else None
    except (ValueError, RecursionError):
        return {}
    if not isinstance(fields, dict):
        return {}
    found = {}
    for name, kind in _FIELDS.items():
        value = fields.get(name)
        if isinstance(value, kind) and not isinstance(value, bool) and _can_be_written(value):
            found[name] = value
    return found


def _can_be_written(value: object) -> bool:
    """Whether it goes into JSON that strict readers read; not NaN, not half a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


class DistributedRuntime:
    """Allocates port blocks and keeps them until they are released or the process ends.

    Any number of event loops and threads may use one. A forked child starts anew: the blocks are
    its parent's.

    Parameters
    ----------
    event_loop, is_static, static_of_0_7
        Taken for the sake of the signatures, ``(event_loop, is_static)`` and, of 0.7,
        ``(event_loop, store, is_static)``; none is used.
    etcd
        Endpoints or a function that makes a client, as for :class:`fastports.etcd.EtcdRegistry`:
        blocks are recorded there. None: ``FASTPORTS_ETCD_ENDPOINTS`` where that is set, else no
        etcd; nobody else on this host (in this network namespace) gets the ports all the same.
    host_id
        As there. The address that Dynamo's own launchers on this host use, :func:`get_key_ip`,
        makes the keys theirs, so that both respect each other. None: ``FASTPORTS_ETCD_HOST_ID``,
        else the identity of the network namespace.
    handoff
        How ports are kept for a program that was told the number alone. None: the environment
        variable ``FASTPORTS_DYNAMO_HANDOFF``, else ``"close"``.

        ``"close"``
            Any program can bind them, in any way. Users of fastports are kept off by markers, and
            those of etcd by the keys; a program that binds *this very number* without asking
            either gets it.
        ``"door"``
            The ports stay held for programs that set SO_REUSEADDR, as ZeroMQ does and with it the
            two ports of :func:`configure_ports`. A plain bind gets EADDRINUSE; until the right
            program listens, a stranger that binds this very number with SO_REUSEADDR gets it.
        ``"hold"``
            Nobody can bind them: start the program with ``spawn`` of the block in :attr:`blocks`.
    keys
        Where the records stand: ``"v1"``, as do those of ai-dynamo 0.6 and 0.7, or ``"dyn"``, for
        ``dyn://...`` as in 0.5. The tools of fastports (``ls --etcd``, ``gc``) look at the first.
    **options
        More for EtcdRegistry: ``ttl``, ``timeout``, ``retry``, ``user``, ``password``, ``ca``,
        ``cert``, ``key``, ``advertise``, ``on_lost``, ``on_restored``.

    Raises
    ------
    InvalidRequest
        For anything malformed, before any connection.
    """

    def __init__(
        self,
        event_loop: object = None,
        is_static: object = False,
        static_of_0_7: object = False,
        *,
        etcd: object = None,
        host_id: str | None = None,
        handoff: str | None = None,
        keys: str = KEYS[0],
        **options: Any,
    ) -> None:
        if handoff is None:
            handoff = os.environ.get("FASTPORTS_DYNAMO_HANDOFF") or HANDOFFS[0]
        if handoff not in HANDOFFS:
            raise InvalidRequest(
                f"handoff={handoff!r} is not a way to keep ports: use 'close' (any program), 'door'"
                " (programs that set SO_REUSEADDR) or 'hold' (nobody, until block.spawn)",
                argument="handoff",
                value=handoff,
            )
        if keys not in KEYS:
            raise InvalidRequest(
                f"keys={keys!r} is no form of keys: use 'v1' or, beside ai-dynamo 0.5, 'dyn'",
                argument="keys",
                value=keys,
            )
        if etcd is None:
            etcd = os.environ.get("FASTPORTS_ETCD_ENDPOINTS") or None
        for name in options:
            if name not in _OPTIONS:
                raise InvalidRequest(
                    f"{name}= is no setting of a runtime; there are etcd, host_id, handoff,"
                    f" {', '.join(_OPTIONS)}",
                    argument=name,
                    value=options[name],
                )
        if etcd is None and (host_id is not None or options):
            name = "host_id" if host_id is not None else sorted(options)[0]
            raise InvalidRequest(
                f"{name}= is for etcd, and none is named; give etcd= or set"
                " FASTPORTS_ETCD_ENDPOINTS",
                argument="etcd",
            )
        self.handoff = handoff
        self._etcd = etcd
        self._options: dict[str, Any] = {**options, "host_id": host_id, "keys": keys}
        self._forget()
        if etcd is not None:
            self._registry("default")  # connects nothing: refuses what is malformed, now

    def __repr__(self) -> str:
        return f"<DistributedRuntime handoff={self.handoff!r} {len(self._mine())} blocks>"

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._blocks: dict[int, aio.PortBlock] = {}
        self._allocators: dict[str, aio.Allocator] = {}

    def _mine(self) -> dict[int, aio.PortBlock]:
        """The blocks by their first port; in a forked child none of the parent's."""
        if self._pid != os.getpid():
            self._forget()
        return self._blocks

    def _registry(self, namespace: str) -> _Registry:
        return _Registry(self._etcd, namespace=namespace, **self._options)

    def _allocator(self, namespace: str) -> aio.Allocator:
        check_word("namespace", namespace)
        self._mine()
        found = self._allocators.get(namespace)
        if found is None:
            registry = None if self._etcd is None else self._registry(namespace)
            # of two threads that made one, both go on with the first
            found = self._allocators.setdefault(
                namespace, aio.Allocator(registry=registry, protocol="both")
            )
        return found

    @property
    def blocks(self) -> tuple[aio.PortBlock, ...]:
        """The blocks that are kept, in the order of their allocation.

        ``state`` of each tells whether it is still recorded, ``spawn`` starts a program on it.
        """
        return tuple(self._mine().values())

    async def allocate_port_block(
        self,
        namespace: str,
        port_min: int,
        port_max: int,
        block_size: int,
        context: str | None = None,
    ) -> list[int]:
        """Find contiguous free ports, keep them, and record them where etcd is used.

        Parameters
        ----------
        namespace
            The circle of launchers whose records exclude each other.
        port_min, port_max
            Both inclusive.
        block_size
            Number of ports.
        context
            Kept with the record as it is, in the block's metadata. JSON as ``dynamo.vllm.ports``
            writes it is in the fields of the record, too.

        Returns
        -------
        list of int
            Ascending.

        Raises
        ------
        InvalidRequest
            A ValueError; an OverflowError, too, for what is no port.
        PortsUnavailable
            Nothing is free, with the counts.
        RegistryError
            etcd does not record them; nothing is kept then.
        """
        first, last = _port("port_min", port_min), _port("port_max", port_max)
        size = _whole("block_size", block_size)
        if size < 1 or last - first + 1 < size:
            raise InvalidRequest(
                f"a block of {size} ports does not fit into {first}-{last}; ask for 1 or more, and"
                " for no more than the range has",
                argument="block_size",
                value=block_size,
            )
        label = ""
        metadata: Mapping[str, object] | None = None
        if context is not None:
            fields = _ancestors_fields(_text("context", context))
            words = [str(fields[name]) for name in ("worker_id", "reason") if name in fields]
            label, metadata = _label(words or [context]), {"context": context}
        found = await self._take(
            self._allocator(namespace), {"": size}, (first, last), label, metadata
        )
        return list(found[""])

    async def _take(
        self,
        allocator: aio.Allocator,
        sizes: Mapping[str, int],
        ports: tuple[int, int],
        label: str,
        metadata: Mapping[str, object] | None,
    ) -> dict[str, aio.PortBlock]:
        """All blocks of ``sizes``, or none, each handed over and in our books."""
        aside: list[aio.PortBlock] = []  # stays held meanwhile, so that it is not found again
        try:
            while True:
                if list(sizes) == [""]:
                    found = {
                        "": await allocator.allocate(
                            sizes[""], range=ports, label=label, metadata=metadata
                        )
                    }
                else:
                    found = await allocator.allocate_many(
                        sizes, range=ports, label=label, metadata=metadata
                    )
                aside += found.values()
                try:
                    for block in found.values():
                        self._hand_over(block)
                except PortsUnavailable:
                    if len(aside) >= _TRIES:
                        raise
                    continue
                for block in found.values():
                    aside.remove(block)
                    self._mine()[block.first] = block
                _live.add(self)
                return found
        except InvalidRequest as exc:
            if exc.argument == "metadata":
                exc.argument = "context"
            raise
        finally:
            for block in aside:
                await block.aclose()

    def _hand_over(self, block: aio.PortBlock) -> None:
        if self.handoff == "close":
            block.close_holds()
        elif self.handoff == "door":
            block.open_door()

    async def release_port_block(self, ports: Iterable[int]) -> None:
        """Give back the blocks that a call returned.

        Parameters
        ----------
        ports
            Whole blocks, such as the list that :meth:`allocate_port_block` returned. What is kept
            no longer, or never was, is passed over.

        Raises
        ------
        InvalidRequest
            A part of a block: it is released as a whole.
        """
        wanted = {_port("ports", port) for port in ports}
        chosen = [block for block in self._mine().values() if wanted.intersection(block)]
        for block in chosen:
            if not wanted.issuperset(block):
                raise InvalidRequest(
                    f"ports {block.first}-{block.last} are one block; name all of them",
                    argument="ports",
                    value=sorted(wanted),
                )
        for block in chosen:
            self._mine().pop(block.first, None)
            await block.aclose()

    def shutdown(self) -> None:
        """Give everything back, the lease in etcd included. Idempotent.

        Blocks for two seconds at most where etcd does not answer; its keys end with the lease then.
        """
        blocks, allocators = self._mine(), self._allocators
        self._forget()
        _live.discard(self)
        for allocator in allocators.values():
            if isinstance(allocator.registry, EtcdRegistry):
                allocator.registry.close()
        for block in blocks.values():
            block.release()


# A runtime with blocks lives to the end of the process: programs keep port numbers, not runtimes.
_live: set[DistributedRuntime] = set()
_shared: list[DistributedRuntime] = []


def _label(words: Iterable[str], longest: int = _LABEL) -> str:
    """What ``fastports ls`` shows: printable, and cut to so many bytes."""
    text = "".join(c if c.isprintable() else "?" for c in "-".join(word for word in words if word))
    return text.encode(errors="replace")[:longest].decode(errors="ignore")


def _runtime(runtime: object) -> DistributedRuntime:
    """The runtime given, or that of this process where it is none of ours."""
    if isinstance(runtime, DistributedRuntime):
        return runtime
    if not _shared:
        _shared.append(DistributedRuntime())
    return _shared[0]


# --- dynamo.vllm.ports ---


async def allocate_and_reserve_port_block(
    runtime: object, namespace: str, request: PortAllocationRequest
) -> list[int]:
    """Contiguous ports, ascending; kept until they are released or the process ends.

    Parameters
    ----------
    runtime
        A :class:`DistributedRuntime`; anything else stands for the one of this process.
    namespace, request
        See :meth:`DistributedRuntime.allocate_port_block`, which has the errors, too.
    """
    metadata = request.metadata
    context = json.dumps(
        {
            "worker_id": _text("worker_id", metadata.worker_id),
            "reason": _text("reason", metadata.reason),
            "reserved_at": time.time(),
            "pid": os.getpid(),
            "block_size": request.block_size,
        }
    )
    ports = request.port_range
    return await _runtime(runtime).allocate_port_block(
        namespace, ports.min, ports.max, request.block_size, context
    )


async def allocate_and_reserve_port(
    runtime: object, namespace: str, metadata: PortMetadata, port_range: DynamoPortRange
) -> int:
    """One port, as :func:`allocate_and_reserve_port_block`."""
    request = PortAllocationRequest(metadata, port_range, 1)
    return (await allocate_and_reserve_port_block(runtime, namespace, request))[0]


async def configure_ports(runtime: object, config: Any, *, stride: int | None = None) -> None:
    """Give a vLLM worker its port for KV events and its NIXL side channel, both or neither.

    Parameters
    ----------
    runtime
        As for :func:`allocate_and_reserve_port_block`.
    config
        Has ``engine_args.data_parallel_rank`` and ``.tensor_parallel_size`` (None: 0 and 1),
        ``port_range``, ``namespace`` and ``component``. Its ``kv_port`` and ``side_channel_port``
        are set; they stay as they were when the call fails.
    stride
        How far apart the engine puts its data-parallel ranks. None: ``tensor_parallel_size``, for
        engines whose ports are ``base + dp_rank * tp_size + tp_rank``. 1 for ``base + dp_rank``, as
        in later vLLM.

    Raises
    ------
    InvalidRequest
        No block of the range lies so high that the base would not be negative; and as for
        :meth:`DistributedRuntime.allocate_port_block`.

    Notes
    -----
    ``side_channel_port`` is the base from which this rank's engine arrives at the block, which is
    the first port of the block for data-parallel rank 0 alone: the block is searched where the base
    stays 0 or above.
    """
    engine = config.engine_args
    rank, tensors = engine.data_parallel_rank, engine.tensor_parallel_size
    rank = 0 if rank is None else _whole("data_parallel_rank", rank)
    tensors = 1 if tensors is None else _whole("tensor_parallel_size", tensors)
    apart = tensors if stride is None else _whole("stride", stride)
    for name, value, least in (
        ("data_parallel_rank", rank, 0),
        ("tensor_parallel_size", tensors, 1),
        ("stride", apart, 0),
    ):
        if value < least:
            raise InvalidRequest(
                f"{name} is {least} or more, not {value}", argument=name, value=value
            )
    offset = rank * apart
    first = _port("port_range", config.port_range.min)
    last = _port("port_range", config.port_range.max)
    if max(first, offset) + tensors > last:  # and the port for events
        raise InvalidRequest(
            f"rank {rank} needs {tensors} ports from {offset} upwards, so that the base of its"
            f" engine is not negative, and one more; {first}-{last} has them not: choose a higher"
            " or larger port range",
            argument="port_range",
            value=(first, last),
        )
    mine = _runtime(runtime)
    worker = f"vllm-{_text('component', config.component)}-dp{rank}"
    found = await mine._take(
        mine._allocator(config.namespace),
        {"zmq_kv_event_port": 1, "nixl_side_channel_port": tensors},
        (max(first, offset), last),
        _label([worker], _LABEL // 2),
        {"worker_id": worker, "reserved_at": time.time()},
    )
    config.kv_port = found["zmq_kv_event_port"].first
    config.side_channel_port = found["nixl_side_channel_port"].first - offset


def check_port_available(port: int) -> bool:
    """Whether a TCP bind of ``port`` on 0.0.0.0, with no option, succeeds at this moment.

    The kernel's word: a port that was allocated with ``handoff="close"`` and is not bound yet
    is available in this sense.
    """
    number = _port("port", port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(("0.0.0.0", number))
        except OSError:
            return False
    return True


def get_host_ip() -> str:
    """The IPv4 address of the host's name if it can be bound, else 127.0.0.1 with a warning."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except (OSError, UnicodeError) as exc:
        _log.warning(
            "the host's name %r has no address that can be bound here (%s): 127.0.0.1 it is",
            name,
            exc,
        )
        return "127.0.0.1"
    return address


def get_key_ip() -> str:
    """The address in the keys of Dynamo's launchers on this host, for ``host_id``.

    Theirs is not :func:`get_host_ip` but the IPv4 address from which the default route sends. The
    kernel is asked for it; nothing is sent. 127.0.0.1 where there is no route (theirs fail there).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))  # RFC 5737: nobody's, so the default route's
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])
