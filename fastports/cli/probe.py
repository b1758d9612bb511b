"""``fastports probe``: whether ports are free."""

from __future__ import annotations

from .. import PortRange, PortState, PortsUnavailable, entries, reserve
from .. import probe as probe_states
from .options import parse
from .say import Usage, reworded, spans

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["held_ports", "probe"]

HELP = """\
usage: fastports probe RANGE [--protocol P] [--host H] [--json]

Tells how many ports of RANGE (8080, or 20000-20100) are free at this moment,
and which are not. It looks by binding and keeps nothing: to be sure of a port,
hold it with `fastports run`.

  --protocol P   tcp (default), udp or both
  --host H       look on this address (default: all, IPv4 and IPv6)
  --json         one JSON object: range, protocol, host, ports, the count of
                 each state, held (those of the busy ones that are held through
                 fastports), longest_free, longest_free_first (null for none)

The states: free; busy; reserved (free, but named in the kernel's
ip_local_reserved_ports); privileged (needs CAP_NET_BIND_SERVICE); denied (a
sandbox forbids bind).

examples:
  fastports probe 8080 && echo free
  fastports probe 20000-29999 --protocol both

Exit status: 0 if every port is free, 1 if not."""

_NAMES = {"--json": "json", "--protocol": "protocol", "--host": "host"}


def probe(words: Sequence[str]) -> int:
    options, rest = parse(words, _NAMES, flags=("json",))
    if "help" in options:
        print(HELP)
        return 0
    if len(rest) != 1:
        raise Usage("probe takes one range, such as 8080 or 20000-20100.")
    ports = PortRange(rest[0])
    protocol = options["protocol"] or "tcp"
    host = options["host"]
    states = probe_states(ports, protocol=protocol, host=host).tobytes()
    counts = {name: states.count(value) for value, name in enumerate(PortState.NAMES)}
    held = held_ports(protocol).intersection(_having(states, ports, PortState.BUSY))
    first, longest = _longest(states, ports)
    if "json" in options:
        import json  # 7 ms

        facts = {
            "range": str(ports),
            "protocol": protocol,
            "host": host,
            "ports": len(ports),
            **counts,
            "held": len(held),
            "longest_free": longest,
            "longest_free_first": first,
        }
        print(json.dumps(facts))
    elif len(ports) == 1:
        print(_one(ports.first, protocol, host, PortState.NAMES[states[0]]))
    else:
        where = "all addresses" if host is None else host
        print(f"{ports} ({protocol}, {where}): {len(ports)} ports")
        for value, name in enumerate(PortState.NAMES):
            if not counts[name] and name != "free":
                continue
            which = "" if name == "free" else _few(_having(states, ports, value))
            print(f"  {name:<10} {counts[name]:>5}  {which}".rstrip())
            if name == "busy" and held:
                print(f"    {len(held)} of them held through fastports, see `fastports ls`")
        if first is not None:
            print(f"  longest free stretch {longest}: {spans(range(first, first + longest))}")
    return 0 if counts["free"] == len(ports) else 1


def held_ports(protocol: str) -> set[int]:
    """The ports that somebody holds through fastports, for this protocol; empty if unknown."""
    held: set[int] = set()
    try:
        for entry in entries():
            if "both" in (protocol, entry.protocol) or protocol == entry.protocol:
                held.update(entry.ports)
    except OSError:  # no /proc
        pass
    return held


def _having(states: bytes, ports: PortRange, value: int) -> list[int]:
    return [port for port, state in zip(ports, states, strict=True) if state == value]


def _few(ports: list[int]) -> str:
    """As many stretches as fit into a line."""
    text = spans(ports)
    return text if len(text) <= 56 else text[:52].rpartition(",")[0] + ", ..."


def _longest(states: bytes, ports: PortRange) -> tuple[int | None, int]:
    """First port and length of the longest free stretch."""
    marks = states.translate(bytes([PortState.FREE]) + b"\1" * 255)
    stretch = max(marks.split(b"\1"), key=len)
    if not stretch:
        return None, 0
    return ports.first + marks.index(stretch), len(stretch)


def _one(port: int, protocol: str, host: str | None, state: str) -> str:
    where = f"port {port} ({protocol}, {'all addresses' if host is None else host})"
    if state == "free":
        return f"{where} is free."
    if state == "reserved":
        return f"{where} is free, but named in net.ipv4.ip_local_reserved_ports."
    try:
        # asks for the port to be told what is on it; where that succeeds, only TIME_WAIT is
        reserve(port, protocol=protocol, host=host).release()
    except (PortsUnavailable, OSError) as exc:
        return reworded(str(exc))
    return f"{where} is busy: only connections in TIME_WAIT are left on it, or were until now."
