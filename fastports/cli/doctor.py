"""``fastports doctor``: what works here, what does not, and what to type."""

from __future__ import annotations

import os
import sys

from .. import FastportsError, PortState, __version__, allocate, entries, probe
from .._core import descriptor_usage
from ..handoff import modes
from ..listening import facts
from ..ranges import (
    DEFAULT_FIRST,
    DEFAULT_LAST,
    default_plan,
    left_over,
    parse_ephemeral,
    parse_reserved,
    read_ephemeral,
    read_reserved,
    unprivileged_start,
)
from . import cluster
from .options import Options, parse
from .say import Usage, printable, reworded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Finding", "doctor"]

HELP = """\
usage: fastports doctor [--etcd [ENDPOINTS] [--namespace N]]

Tries what fastports needs of this machine, in this container and as this user,
and says in a line each what it found:

  ok     as it should be
  note   works, with a limit that is good to know
  BAD    does not work

A line to type follows where there is one; lines with sysctl or modprobe want
root, and in a container they are for its host. With --etcd the registry of a
cluster is tried as well; see `fastports help etcd`.

  --etcd [ENDPOINTS]  each endpoint, its version and its clock, login, rights,
                      space, and how long the dead stay recorded
  --namespace N       another namespace than the default

examples:
  fastports doctor --etcd etcd-0:2379
  docker run --rm IMAGE fastports doctor

Exit status: 0 without a BAD, 1 with one."""

OK, NOTE, BAD = "ok", "note", "BAD"

_OLDEST = (5, 10)
_SHOWS_BOUND = (6, 8)
_NET_BIND_SERVICE = 10  # linux/capability.h
_FEW_FILES, _MANY_FILES = 1024, 65536


class Finding:
    """One line of the report: how bad, about what, in words, and what to type."""

    def __init__(self, level: str, topic: str, text: str, line: str = "") -> None:
        self.level = level
        self.topic = topic
        self.text = text
        self.line = line


def doctor(words: Sequence[str]) -> int:
    options, rest = parse(words, cluster.NAMES, optional=("etcd",))
    if "help" in options:
        print(HELP)
        return 0
    if rest:
        raise Usage(f"doctor takes no argument {rest[0]!r}.")
    checks = [*CHECKS, _registry(options) if cluster.given(options) else _environment]
    import logging  # 11 ms; what the library would log is said below, as a finding

    logging.getLogger("fastports").setLevel(logging.ERROR)
    implementation = f"{sys.implementation.name} {sys.version.split()[0]}"
    print(f"fastports {__version__}, {implementation}, uid {os.geteuid()}")
    bad = 0
    for check in checks:
        for finding in _careful(check):
            finding.text = reworded(finding.text)
            _show(finding)
            bad += finding.level == BAD
    if bad:
        print(f"{'One thing is' if bad == 1 else f'{bad} things are'} broken.")
        return 1
    print("Everything that fastports needs works here.")
    return 0


def _careful(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; that it could not be made is one, too."""
    topic = check.__name__.strip("_").replace("_", " ")
    try:
        yield from check()
    except FastportsError as exc:
        yield Finding(BAD, topic, reworded(str(exc)))
    except OSError as exc:
        yield Finding(BAD, topic, f"cannot be looked at: {exc.strerror or exc}.")


def _show(finding: Finding) -> None:
    from textwrap import fill  # 3 ms

    width = 80
    if sys.stdout is not None and sys.stdout.isatty():
        width = max(os.get_terminal_size(1).columns, 40) or 80
    indent = " " * 19
    head = f"{finding.level:<5}{finding.topic:<14}"
    print(
        fill(
            finding.text,
            width,
            initial_indent=head,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
    )
    if finding.line:
        print(f"{indent}type: {finding.line}")  # never broken: it is there to be copied


# --- checks ---------------------------------------------------------------------------------------


def _kernel() -> Iterator[Finding]:
    name = os.uname()
    version = _version(name.release)
    text = f"{name.sysname} {name.release} {name.machine}"
    if name.sysname != "Linux" or version < _OLDEST:
        yield Finding(BAD, "kernel", f"{text}: fastports needs Linux 5.10 or later.")
    elif version < _SHOWS_BOUND:
        yield Finding(
            NOTE,
            "kernel",
            f"{text}: before 6.8 the kernel does not tell which ports are just bound.",
        )
    else:
        yield Finding(OK, "kernel", text)


def _version(release: str) -> tuple[int, ...]:
    numbers = []
    for part in release.replace("-", ".").split(".")[:2]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)


def _hold() -> Iterator[Finding]:
    with allocate(1, label="doctor") as block:
        if probe([block.first])[0] == PortState.BUSY:
            yield Finding(OK, "hold", "a port that is held is refused to everybody else")
        else:
            yield Finding(
                BAD,
                "hold",
                f"port {block.first} was held, and could be bound all the same: this is no Linux"
                " network stack that fastports knows (gVisor and the like have their own).",
            )


def _hand_off() -> Iterator[Finding]:
    found = modes()
    works = [mode for mode in found.values() if mode.works]
    for mode in found.values():
        if not mode.works:
            last = mode.name == "door"  # what is left hands the port over through a gap
            yield Finding(BAD if last else NOTE, "hand-off", f"not by {mode.name}: {mode.why}.")
    text = f"--handoff auto is {works[0].name} here"
    if len(works) > 1:
        text += f"; {', '.join(mode.name for mode in works[1:])} would work too"
    yield Finding(OK, "hand-off", text)
    if not facts()[1]:
        yield Finding(
            NOTE,
            "sock_diag",
            "the kernel does not answer who listens; it is read from /proc/net, which is slower.",
            "modprobe -a tcp_diag udp_diag",
        )


def _range() -> Iterator[Finding]:
    ephemeral = parse_ephemeral(read_ephemeral())
    reserved = parse_reserved(read_reserved())
    plan = default_plan(ephemeral, reserved)
    count = left_over(plan.first, plan.last, plan.cuts)
    text = f"ports come from {plan.first}-{plan.last}"
    kept = f"{ephemeral[0]}-{ephemeral[1]}"
    if plan.warning is not None:
        yield Finding(
            BAD,
            "range",
            f"{text}, where the kernel also takes ports for outgoing connections: its ephemeral"
            f" range {kept} leaves no others.",
            'sysctl -w net.ipv4.ip_local_port_range="32768 60999"',
        )
    elif (plan.first, plan.last) != (DEFAULT_FIRST, DEFAULT_LAST):
        yield Finding(
            NOTE,
            "range",
            f"{text}, not from {DEFAULT_FIRST}-{DEFAULT_LAST}: the ephemeral range"
            f" {kept} and the reserved ports leave too few there.",
        )
    else:
        yield Finding(
            OK, "range", f"{plan.first}-{plan.last} ({count} ports); the ephemeral range is {kept}"
        )
    inside = left_over(plan.first, plan.last, ()) - left_over(plan.first, plan.last, reserved)
    if inside:
        yield Finding(
            NOTE,
            "reserved",
            f"{inside} ports of it are in net.ipv4.ip_local_reserved_ports and never chosen.",
        )
    start = unprivileged_start()
    text = f"ports below {start} need CAP_NET_BIND_SERVICE"
    if int(_status().get("CapEff", "0"), 16) >> _NET_BIND_SERVICE & 1:
        yield Finding(OK, "privileged", f"{text}, which is there")
    elif start > plan.first:
        yield Finding(
            BAD if start > plan.last else NOTE,
            "privileged",
            f"{text}; the range begins at {plan.first}.",
            "sysctl -w net.ipv4.ip_unprivileged_port_start=1024",
        )
    else:
        yield Finding(OK, "privileged", text)


def _limits() -> Iterator[Finding]:
    used, soft, hard = descriptor_usage()
    room = soft - used
    text = f"{soft} open files at most (hard limit {hard}), one for each port"
    line = f"ulimit -n {min(hard, _MANY_FILES)}"
    if hard < _FEW_FILES:
        line = f"prlimit --pid $$ --nofile={_MANY_FILES}"  # the hard limit is root's to raise
    if room < _FEW_FILES // 16:
        yield Finding(BAD, "limits", f"{text}, and {used} are open already.", line)
    elif soft < _FEW_FILES:
        yield Finding(NOTE, "limits", f"{text}.", line)
    else:
        yield Finding(OK, "limits", text)


def _network() -> Iterator[Finding]:
    text = f"network namespace {_namespace('net')}{_whose('net')}"
    number = len(list(entries()))
    yield Finding(
        OK, "network", f"{text}; {number} block{'s are' if number != 1 else ' is'} held in it"
    )
    if not _loopback():
        yield Finding(
            BAD,
            "loopback",
            "nothing can connect to 127.0.0.1: the loopback interface is down.",
            "ip link set lo up",
        )


def _processes() -> Iterator[Finding]:
    text = f"pid namespace {_namespace('pid')}{_whose('pid')}"
    if os.readlink("/proc/self") != str(os.getpid()):
        yield Finding(
            BAD,
            "processes",
            f"{text}; the /proc mounted here is that of another: processes cannot be told apart.",
            "mount -t proc proc /proc",
        )
    elif os.path.exists("/proc/1/stat"):
        yield Finding(OK, "processes", text)
    else:
        yield Finding(
            NOTE,
            "processes",
            f"{text}; /proc is mounted with hidepid: `fastports ls` cannot show the commands of"
            " other users.",
        )


def _ipv6() -> Iterator[Finding]:
    if not os.path.exists("/proc/net/if_inet6"):
        yield Finding(NOTE, "ipv6", "this kernel has no IPv6: ports are held in IPv4 alone.")
        return
    off = [name for name in ("all", "lo") if _sysctl(f"net/ipv6/conf/{name}/disable_ipv6") == "1"]
    if off:
        yield Finding(
            NOTE,
            "ipv6",
            "one hold covers IPv4 and IPv6, but IPv6 is switched off: there is no ::1.",
            "sysctl -w" + "".join(f" net.ipv6.conf.{name}.disable_ipv6=0" for name in off),
        )
    else:
        yield Finding(OK, "ipv6", "one hold covers IPv4 and IPv6")


def _sandbox() -> Iterator[Finding]:
    status = _status()
    parts = []
    filtered = status.get("Seccomp", "0") != "0"
    parts.append("a seccomp filter is on" if filtered else "no seccomp filter")
    locked = status.get("NoNewPrivs", "0") == "1"
    parts.append("no_new_privs is set" if locked else "no_new_privs is not set")
    scope = _sysctl("kernel/yama/ptrace_scope")
    if scope is None:
        parts.append("no Yama")
    else:
        parts.append(f"Yama's ptrace_scope is {scope}")
    text = ", ".join(parts)
    if scope in ("2", "3"):
        yield Finding(
            NOTE,
            "sandbox",
            f"{text}: sockets of a child cannot be reached without CAP_SYS_PTRACE.",
            "sysctl -w kernel.yama.ptrace_scope=1" if scope == "2" else "",
        )
    elif locked:
        yield Finding(NOTE, "sandbox", f"{text}: set-uid programs run without their privilege.")
    else:
        yield Finding(OK, "sandbox", text)


def _registry(options: Options) -> Callable[[], Iterator[Finding]]:
    registry = cluster.registry(options)  # what is malformed is wrong usage, not a finding

    def etcd() -> Iterator[Finding]:
        with registry:
            for found in registry.diagnose():
                yield Finding(found.level, found.topic, printable(found.text), found.line)

    return etcd


def _environment() -> Iterator[Finding]:
    if cluster.from_environment():
        yield Finding(
            NOTE,
            "etcd",
            "FASTPORTS_ETCD_ENDPOINTS is set: `fastports run` records there. Whether it answers"
            " was not tried.",
            "fastports doctor --etcd",
        )


#: In the order of the report. A check yields findings; what it raises becomes one.
CHECKS: list[Callable[[], Iterator[Finding]]] = [
    _kernel,
    _hold,
    _hand_off,
    _range,
    _limits,
    _network,
    _processes,
    _ipv6,
    _sandbox,
]


def _namespace(kind: str) -> str:
    return os.readlink(f"/proc/self/ns/{kind}").partition("[")[2].rstrip("]")


def _whose(kind: str) -> str:
    try:
        same = os.readlink(f"/proc/1/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}")
    except OSError:  # only root may look, and process 1 of a container is not the host's
        return ""
    return ", that of process 1" if same else ", not that of process 1"


def _status() -> dict[str, str]:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        pairs = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in pairs}


def _sysctl(path: str) -> str | None:
    try:
        with open(f"/proc/sys/{path}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def _loopback() -> bool:
    """Whether packets to 127.0.0.1 have a way; none is sent."""
    import socket  # 7 ms

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("127.0.0.1", 9))
        except OSError:
            return False
    return True
