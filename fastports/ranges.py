"""Which ports a search looks at: ``PortRange``, the kernel's sysctls and the default range."""

from __future__ import annotations

from ._core import read_file
from .errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    #: Everything that names a range of ports.
    RangeLike: TypeAlias = "PortRange | str | int | tuple[int, int] | range"

__all__ = ["PortRange"]

_SYSCTL = b"/proc/sys/net/ipv4/"
_EPHEMERAL = _SYSCTL + b"ip_local_port_range"
_RESERVED = _SYSCTL + b"ip_local_reserved_ports"
# What the kernel starts with where /proc cannot be read (ip-sysctl.rst).
_DEFAULT_EPHEMERAL = b"32768\t60999\n"
_DEFAULT_UNPRIVILEGED_START = b"1024\n"

#: The default range, and the fewest ports of it that are worth staying for.
DEFAULT_FIRST, DEFAULT_LAST = 20000, 29999
ENOUGH = 1000


def spans(ports: Sequence[int]) -> str:
    """Ascending ports as people write them: ``20417-20424, 20430``."""
    parts: list[str] = []
    first = last = -1
    for port in [*ports, -1]:
        if port == last + 1 and first >= 0:
            last = port
            continue
        if first >= 0:
            parts.append(f"{first}-{last}" if last > first else f"{first}")
        first = last = port
    return ", ".join(parts)


def integer(value: object) -> int | None:
    """``value`` as an int if it is an integer of any kind (numpy's too), but no bool; else None."""
    if type(value) is int:
        return value
    # numpy's booleans are no bool, and before numpy 2.3 they have an __index__
    index = getattr(value, "__index__", None)
    if index is None or type(value).__name__ in ("bool", "bool_"):
        return None
    # through __index__, not isinstance: numpy's integers are no int
    try:
        result = index()
    except TypeError:  # numpy's arrays have the method, too
        return None
    return result if isinstance(result, int) else None


class PortRange:
    """A range of ports, both ends inclusive, as in the kernel's sysctls.

    Parameters
    ----------
    spec
        ``"20000-29999"``, ``"8080"``, ``8080``, ``(20000, 29999)`` (inclusive), a Python
        ``range(20000, 30000)`` (its end is exclusive, as always; the step must be 1), or a
        PortRange.
    last
        With an integer ``spec``: the last port, inclusive.

    Raises
    ------
    InvalidRequest
        For anything else, for ports outside 1-65535 and for reversed ends.

    Examples
    --------
    >>> PortRange("20000-29999")
    PortRange('20000-29999')
    >>> len(PortRange((20000, 29999))), 20000 in PortRange(range(20000, 20010))
    (10000, True)
    """

    __slots__ = ("_first", "_last")

    def __init__(self, spec: RangeLike, last: int | None = None, /) -> None:
        self._first, self._last = _ends(spec, last)

    @property
    def first(self) -> int:
        return self._first

    @property
    def last(self) -> int:
        return self._last

    def __len__(self) -> int:
        return self._last - self._first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._first, self._last + 1))

    def __contains__(self, port: object) -> bool:
        number = integer(port)
        return number is not None and self._first <= number <= self._last

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PortRange):
            return NotImplemented
        return self._first == other._first and self._last == other._last

    def __hash__(self) -> int:
        return hash((self._first, self._last))

    def __str__(self) -> str:
        return f"{self._first}-{self._last}"

    def __repr__(self) -> str:
        return f"PortRange('{self}')"

    def __reduce__(self) -> tuple[object, ...]:
        return PortRange, (self._first, self._last)


def _bad(spec: object, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{spec!r} is no range of ports: {why}. Give '20000-29999', (20000, 29999) or one port,"
        " with 1 <= first <= last <= 65535.",
        argument="range",
        value=spec,
    )


def _ends(spec: object, last: object) -> tuple[int, int]:
    shown: object = spec if last is None else (spec, last)
    low: int | None
    high: int | None
    if isinstance(spec, PortRange) and last is None:
        return spec.first, spec.last
    if isinstance(spec, str) and last is None:
        head, dash, tail = spec.partition("-")
        # isdigit alone would take digits of other scripts, int() spaces and underscores
        if not (head.isascii() and head.isdigit() and len(head) <= 6):
            raise _bad(spec, "it does not read as digits, or digits-digits")
        low = high = int(head)
        if dash:
            if not (tail.isascii() and tail.isdigit() and len(tail) <= 6):
                raise _bad(spec, "it does not read as digits-digits")
            high = int(tail)
    elif isinstance(spec, range) and last is None:
        if spec.step != 1:
            raise _bad(spec, "its step is not 1")
        if not spec:  # len() fails above sys.maxsize
            raise _bad(spec, "it is empty")
        low, high = spec[0], spec[-1]
    elif isinstance(spec, (tuple, list)) and last is None:
        if len(spec) != 2:
            raise _bad(spec, "it does not have two ends")
        low, high = integer(spec[0]), integer(spec[1])
    else:
        low = integer(spec)
        high = low if last is None else integer(last)
    if low is None or high is None:
        raise _bad(shown, "its ends are not integers")
    if low > high:
        raise _bad(shown, "it is reversed")
    if low < 1 or high > 65535:
        raise _bad(shown, "ports go from 1 to 65535")
    return low, high


def read_ephemeral() -> bytes:
    """``net.ipv4.ip_local_port_range`` of the calling thread's network namespace, as text."""
    return read_file(_EPHEMERAL) or _DEFAULT_EPHEMERAL


def read_reserved() -> bytes:
    """``net.ipv4.ip_local_reserved_ports`` of the calling thread's network namespace, as text."""
    return read_file(_RESERVED) or b"\n"


def read_both() -> tuple[tuple[bytes, bytes | None], tuple[bytes, bytes | None]]:
    """The ephemeral range and the reserved ports, each after its path; None for what is unread."""
    return (_EPHEMERAL, read_file(_EPHEMERAL)), (_RESERVED, read_file(_RESERVED))


def parse_ephemeral(text: bytes | None) -> tuple[int, int]:
    low, high = (text or _DEFAULT_EPHEMERAL).split()
    return int(low), int(high)


def parse_reserved(text: bytes | None) -> tuple[tuple[int, int], ...]:
    """``b"8080,9148-9150"`` as inclusive pairs."""
    pairs = []
    for part in (text or b"").strip().split(b","):
        if part:
            low, _, high = part.partition(b"-")
            pairs.append((int(low), int(high or low)))
    return tuple(pairs)


def unprivileged_start() -> int:
    """First port that needs no privilege (``net.ipv4.ip_unprivileged_port_start``, ip(7))."""
    text = read_file(_SYSCTL + b"ip_unprivileged_port_start")
    return int(text or _DEFAULT_UNPRIVILEGED_START)


def left_over(first: int, last: int, cuts: tuple[tuple[int, int], ...]) -> int:
    """How many ports of first..last no cut covers."""
    count = 0
    at = first
    for low, high in sorted(cuts):
        if low > last:
            break
        count += max(low - at, 0)
        at = max(at, high + 1)
    return count + max(last - at + 1, 0)


class Plan:
    """A range to search and what to leave out of it.

    Attributes
    ----------
    first, last
        Ends, inclusive.
    cuts
        Inclusive pairs to leave out; those of the ephemeral range and the reserved ports.
    warning
        What to tell the operator once, or None.
    """

    __slots__ = ("cuts", "first", "last", "warning")

    def __init__(
        self,
        first: int,
        last: int,
        cuts: tuple[tuple[int, int], ...],
        warning: str | None = None,
    ) -> None:
        self.first: int = first
        self.last: int = last
        self.cuts: tuple[tuple[int, int], ...] = tuple(
            (a, b) for a, b in cuts if a <= last and b >= first
        )
        self.warning: str | None = warning


def default_plan(ephemeral: tuple[int, int], reserved: tuple[tuple[int, int], ...]) -> Plan:
    """The default range under these sysctls.

    20000-29999 less the ephemeral range and the reserved ports; where fewer than 1000 ports are
    left, the largest unprivileged stretch outside the ephemeral range (well-known ports, below
    1024, are never taken by default); where there is none, 20000-29999 with a warning.
    """
    if left_over(DEFAULT_FIRST, DEFAULT_LAST, (ephemeral, *reserved)) >= ENOUGH:
        return Plan(DEFAULT_FIRST, DEFAULT_LAST, (ephemeral, *reserved))
    low, high = ephemeral
    stretches = ((max(unprivileged_start(), 1024), low - 1), (high + 1, 65535))
    first, last = max(stretches, key=lambda ends: left_over(ends[0], ends[1], reserved))
    if first <= last and left_over(first, last, reserved) > 0:
        return Plan(first, last, reserved)
    return Plan(
        DEFAULT_FIRST,
        DEFAULT_LAST,
        reserved,
        f"the ephemeral range {low}-{high} leaves no unprivileged port outside it, so ports of"
        f" {DEFAULT_FIRST}-{DEFAULT_LAST} are used, which the kernel also gives to outgoing"
        ' connections; set: sysctl -w net.ipv4.ip_local_port_range="32768 60999"',
    )


def explicit_plan(
    first: int, last: int, ephemeral: tuple[int, int], reserved: tuple[tuple[int, int], ...]
) -> Plan:
    """A range the caller named: honoured, with a warning where it overlaps the ephemeral range."""
    low, high = ephemeral
    warning = None
    if first <= high and last >= low:
        warning = (
            f"the range {first}-{last} overlaps the ephemeral range {low}-{high}: the kernel may"
            " give its ports to outgoing connections before they are asked for; choose a range"
            f" outside it, or set: sysctl -w net.ipv4.ip_local_reserved_ports={first}-{last} and"
            " pass include_reserved=True"
        )
    return Plan(first, last, reserved, warning)
