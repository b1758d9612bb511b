"""What a caller asks for, checked before anything is touched."""

from __future__ import annotations

from ._core import parse_address
from .block import PROTOCOLS, PortBlock
from .errors import InvalidRequest
from .ranges import PortRange, integer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import numpy

_LABEL_BYTES = 64
_METADATA_BYTES = 4096


class Request:
    """One validated call: plain facts, nothing bound yet."""

    # defaults in the class: most calls set few of them
    size: int
    first: int
    last: int
    cuts: tuple[tuple[int, int], ...] = ()
    exact = False
    protocol: str
    bits: int
    host: str | None
    address: tuple[int, bytes] | None
    label = ""
    metadata: Mapping[str, object] | None = None
    rng: numpy.random.Generator | None = None
    starts: Any = None
    reserved = 0
    denied = 0
    recorded: frozenset[int] = frozenset()

    @property
    def range(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def descriptors(self) -> int:
        return self.size * (2 if self.bits == 3 else 1)


def check_size(value: object, argument: str = "size") -> int:
    size = integer(value)
    if size is None or size < 1 or size > 65535:
        raise InvalidRequest(
            f"{argument} must be a whole number of ports from 1 to 65535, not {value!r}."
            " Give the number of consecutive ports wanted.",
            argument=argument,
            value=value,
        )
    return size


def check_timeout(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)  # NaN is not >= 0
    raise InvalidRequest(
        f"timeout must be seconds, 0 or more, or None, not {value!r}."
        " Leave it out to be refused at once when nothing is free.",
        argument="timeout",
        value=value,
    )


def check_retry(value: Any) -> Any:
    if value is None:
        return None
    for name in ("base", "cap"):
        seconds = getattr(value, name, None)
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
            raise InvalidRequest(
                f"retry must have base and cap in seconds, above 0; its {name} is {seconds!r}."
                " Leave it out to wait 5 ms at first and 250 ms at most.",
                argument="retry",
                value=value,
            )
    return value


def check_label(value: object) -> str:
    if isinstance(value, str) and value.isprintable():
        try:
            if len(value.encode()) <= _LABEL_BYTES:
                return value
        except UnicodeEncodeError:
            pass
    raise InvalidRequest(
        f"label must be printable text of at most {_LABEL_BYTES} bytes in UTF-8, not {value!r}."
        " Put longer descriptions into metadata.",
        argument="label",
        value=value,
    )


def check_metadata(value: object) -> Mapping[str, object] | None:
    if value is None:
        return None
    import json  # 7 ms, only for calls with metadata

    try:
        if not isinstance(value, dict):
            raise TypeError("it is no dict")
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequest(
            f"metadata must be a dict that JSON can write: {exc}."
            " Use strings, numbers, lists and dicts.",
            argument="metadata",
            value=value,
        ) from exc
    if len(text.encode()) > _METADATA_BYTES:
        raise InvalidRequest(
            f"metadata takes {len(text.encode())} bytes of JSON, more than {_METADATA_BYTES}."
            " Keep what identifies the user of the ports, and store the rest elsewhere.",
            argument="metadata",
            value=value,
        )
    copy: dict[str, object] = json.loads(text)
    return copy


def check_protocol(value: object) -> str:
    if isinstance(value, str) and value in PROTOCOLS:
        return value
    raise InvalidRequest(
        f"protocol must be 'tcp', 'udp' or 'both', not {value!r}.",
        argument="protocol",
        value=value,
    )


def check_address(host: object) -> tuple[int, bytes] | None:
    if host is None:
        return None
    parsed = parse_address(host) if isinstance(host, str) else None
    if parsed is None:
        raise InvalidRequest(
            f"host must be a numeric IPv4 or IPv6 address of this machine without a scope, not"
            f" {host!r}: names are not looked up. Give '127.0.0.1', '::1', an interface's address,"
            " or None for all addresses.",
            argument="host",
            value=host,
        )
    return parsed


def as_ports(value: object, argument: str) -> Any:
    """A contiguous buffer of uint16 over an array of ports; a copy only where it must be one."""
    if isinstance(value, (str, PortRange, PortBlock, range, list, tuple)):
        # looked at before it is listed: it may have 10**12 items
        ends = sorted((value[0], value[-1])) if isinstance(value, range) and value else [1]
        if ends[0] < 1 or ends[-1] > 65535:
            raise bad_array(value, argument, "it leaves 1-65535")
        listed: Any = PortRange(value) if isinstance(value, str) else value
        numbers = [integer(item) for item in listed]
    else:
        try:
            view = memoryview(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError) as exc:  # numpy's dates raise ValueError
            raise bad_array(value, argument, f"it gives no buffer ({exc})") from exc
        if view.ndim != 1:
            raise bad_array(value, argument, f"it has {view.ndim} dimensions")
        if view.format == "H" and view.c_contiguous:
            return view
        if view.format not in ("H", "h", "i", "I", "l", "L", "q", "Q"):
            raise bad_array(value, argument, f"its items have the format {view.format!r}")
        numbers = list(view.tolist())  # copies; also from a strided array
    from array import array  # builtin or a small shared object

    try:
        return memoryview(array("H", numbers))  # type: ignore[type-var]
    except (OverflowError, TypeError) as exc:
        raise bad_array(value, argument, "a port is not an integer from 1 to 65535") from exc


def bad_array(value: object, argument: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{argument} must be a one-dimensional array of port numbers (uint16, int32 or int64):"
        f" {why}. Use numpy.array([...], dtype='uint16') or a list of ints.",
        argument=argument,
        value=value,
    )


def check_generator(rng: Any) -> Any:
    if rng is None:
        return None
    bits = getattr(rng, "bit_generator", None)
    if bits is None or not hasattr(bits, "capsule") or not hasattr(bits, "lock"):
        raise InvalidRequest(
            f"rng must be a numpy.random.Generator, not {type(rng).__name__}."
            " Make one with numpy.random.default_rng(seed), or leave it out.",
            argument="rng",
            value=rng,
        )
    return rng
