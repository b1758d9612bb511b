"""``fastports map``: the occupancy of a range as a picture."""

from __future__ import annotations

import os
import sys

from .. import PortRange, PortState, entries, probe
from ..ranges import default_plan, parse_ephemeral, parse_reserved, read_ephemeral, read_reserved
from . import cluster
from .options import Options, parse
from .probe import held_ports
from .say import Usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["map_"]

HELP = """\
usage: fastports map [RANGE] [OPTION...]

Draws which ports of RANGE are taken at this moment; without RANGE, those of
the range that fastports chooses from here. A letter stands for one port, or in
a large range for several: then a capital means all of them, a small one some.

  .  free                            r  reserved (ip_local_reserved_ports)
  h  held through fastports          ~  free, in the ephemeral range
  x  taken by others                 p  privileged
  e  recorded in etcd, not held      !  denied by a sandbox

  --protocol P   tcp (default), udp or both
  --svg FILE, --png FILE    write the picture into a file, with matplotlib
  --etcd E, --namespace N   what etcd has for this host; `fastports help etcd`

The picture is as wide as the terminal, in colour on a terminal unless NO_COLOR
is set to something.

examples:
  fastports map 1-65535 --protocol udp
  fastports map --png ports.png

Exit status: 0."""

_NAMES = {"--protocol": "protocol", "--svg": "svg", "--png": "png", **cluster.NAMES}

_HELD, _RECORDED, _BUSY, _DENIED, _PRIVILEGED, _RESERVED, _EPHEMERAL, _FREE = "hex!pr~."
_LEGEND = {
    _FREE: "free",
    _HELD: "held through fastports",
    _RECORDED: "recorded, not held",
    _BUSY: "taken by others",
    _RESERVED: "reserved",
    _EPHEMERAL: "ephemeral",
    _PRIVILEGED: "privileged",
    _DENIED: "denied",
}
# ECMA-48 select graphic rendition: the eight colours every terminal has
_COLOURS = {
    _FREE: "32",
    _HELD: "1;36",
    _RECORDED: "1;35",
    _BUSY: "1;31",
    _RESERVED: "33",
    _EPHEMERAL: "34",
    _PRIVILEGED: "35",
    _DENIED: "35",
}
_BY_STATE = {
    PortState.BUSY: _BUSY,
    PortState.DENIED: _DENIED,
    PortState.PRIVILEGED: _PRIVILEGED,
    PortState.RESERVED: _RESERVED,
    PortState.FREE: _FREE,
}


def map_(words: Sequence[str]) -> int:
    options, rest = parse(words, _NAMES, optional=("etcd",))
    if "help" in options:
        print(HELP)
        return 0
    if len(rest) > 1:
        raise Usage("map takes one range, such as 20000-29999.")
    ephemeral = parse_ephemeral(read_ephemeral())
    if rest:
        ports = PortRange(rest[0])
    else:
        plan = default_plan(ephemeral, parse_reserved(read_reserved()))
        ports = PortRange(plan.first, plan.last)
    protocol = options["protocol"] or "tcp"
    recorded = _recorded(options, ports, protocol) if cluster.given(options) else None
    classes = _classes(ports, protocol, ephemeral)
    if recorded:
        classes = "".join(
            _RECORDED if port in recorded and letter != _HELD else letter
            for port, letter in zip(ports, classes, strict=True)
        )
    counts = {letter: classes.count(letter) for letter in _LEGEND}
    for form in ("svg", "png"):
        if (path := options[form]) is not None:
            _write(path, form, ports, protocol, classes, counts)
    if "svg" in options or "png" in options:
        return 0
    width, height, colour = _screen()
    each, across = _scale(len(ports), width, height)
    for label, cells in _rows(ports, classes, each, across):
        groups = [cells[at : at + 10] for at in range(0, len(cells), 10)]
        print(f"{label:>5}  " + " ".join(_painted(group, colour) for group in groups).rstrip())
    print()
    shown = ports if len(ports) > 1 else ports.first
    print(f"{shown} ({protocol})" + (f", {each} ports a letter" if each > 1 else ""))
    legend = [(letter, f"{letter} {name} {counts[letter]}") for letter, name in _LEGEND.items()]
    for line in _wrapped([pair for pair in legend if counts[pair[0]]], width):
        print("   ".join(_painted(text[0], colour) + text[1:] for text in line))
    if recorded is not None:
        number = len(recorded.intersection(ports))
        print(f"recorded in etcd for this host: {number} port{'' if number == 1 else 's'}")
    return 0


def _write(
    path: str, form: str, ports: PortRange, protocol: str, classes: str, counts: dict[str, int]
) -> None:
    from .picture import draw

    each, across = 1, 100
    if len(ports) <= 1000:
        across = 50 if len(ports) > 100 else 20 if len(ports) > 20 else 10
    elif len(ports) > 10000:
        each, across = _scale(len(ports), 232, 110)
    title = f"{ports if len(ports) > 1 else ports.first} ({protocol})"
    if each > 1:
        title += f", {each} ports a cell"
    blocks = [
        (max(entry.first, ports.first), min(entry.last, ports.last), entry.label)
        for entry in entries()
        if "both" in (protocol, entry.protocol) or protocol == entry.protocol
    ]
    draw(
        path, form, title, list(_rows(ports, classes, each, across)), each, _LEGEND, counts, blocks
    )


def _classes(ports: PortRange, protocol: str, ephemeral: tuple[int, int]) -> str:
    """A letter for each port."""
    states = probe(ports, protocol=protocol)
    letters = [_BY_STATE[state] for state in states.tolist()]
    for port in held_ports(protocol):
        if port in ports:
            letters[port - ports.first] = _HELD
    for port in range(max(ports.first, ephemeral[0]), min(ports.last, ephemeral[1]) + 1):
        if letters[port - ports.first] == _FREE:
            letters[port - ports.first] = _EPHEMERAL
    return "".join(letters)


def _recorded(options: Options, ports: PortRange, protocol: str) -> set[int]:
    """The ports that etcd has for this host."""
    every = options["namespace"] == "*"
    found: set[int] = set()
    with cluster.registry(options, every=every) as registry:
        for entry in registry.entries(
            range=(ports.first, ports.last),
            host=registry.host_id,
            namespace="*" if every else None,
        ):
            if "both" in (protocol, entry.protocol) or protocol == entry.protocol:
                found.update(entry.ports)
    return found


def _screen() -> tuple[int, int, bool]:
    """Columns and lines to use, and whether colour is wanted."""
    if sys.stdout is None or not sys.stdout.isatty():
        return 80, 24, False
    size = os.get_terminal_size(1)
    # no-color.org: present and not empty, whatever its value
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return size.columns or 80, size.lines or 24, not plain


def _scale(count: int, width: int, height: int) -> tuple[int, int]:
    """Ports in a letter and letters in a row, so that rows begin at round numbers."""
    across = 10
    for wider in (20, 50, 100, 200):
        if 7 + wider + wider // 10 - 1 <= width:
            across = wider
    each = 1
    rows = max(height - 5, 5)
    for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        each = step
        if -(-count // (each * across)) + 1 <= rows:  # a range may begin in the middle of a row
            break
    return each, across


def _rows(ports: PortRange, classes: str, each: int, across: int) -> Iterator[tuple[int, str]]:
    span = each * across
    for start in range(ports.first - ports.first % span, ports.last + 1, span):
        cells = []
        for cell in range(start, start + span, each):
            low = max(cell - ports.first, 0)
            cells.append(_letter(classes[low : max(cell + each - ports.first, 0)]))
        yield start, "".join(cells)


def _letter(classes: str) -> str:
    """The letter for a cell: what is rarest and matters most; blank outside the range."""
    if not classes:
        return " "
    for letter in (_HELD, _RECORDED, _BUSY, _DENIED, _PRIVILEGED, _RESERVED, _EPHEMERAL):
        if letter in classes:
            every = len(classes) > 1 and classes.count(letter) == len(classes)
            return letter.upper() if every else letter
    return _FREE


def _painted(text: str, colour: bool) -> str:
    if not colour:
        return text
    parts = []
    before = ""
    for letter in text:
        code = _COLOURS.get(letter.lower(), "")
        if code != before:
            parts.append(f"\033[{code or '0'}m")
            before = code
        parts.append(letter)
    return "".join(parts) + ("\033[0m" if before else "")


def _wrapped(pairs: list[tuple[str, str]], width: int) -> Iterator[list[str]]:
    line: list[str] = []
    used = 0
    for _, text in pairs:
        if line and used + 3 + len(text) > width:
            yield line
            line, used = [], 0
        used += len(text) + (3 if line else 0)
        line.append(text)
    if line:
        yield line
