"""``fastports run``: a program on held ports, looked after as a good pid 1 would."""

from __future__ import annotations

import sys

from .. import Allocator
from ..handoff import DEVNULL
from ..ranges import PortRange
from . import cluster
from .bundle import Bundle
from .options import Options, parse, seconds, whole
from .say import Usage, reworded, say
from .signals import to_take

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeAlias

    from ..block import PortBlock
    from .report import Report

    Held: TypeAlias = PortBlock | Bundle
    Hold: TypeAlias = Callable[[Allocator], list[Held]]
    Work: TypeAlias = Callable[[list[Held], Report | None], int]

__all__ = ["run"]

HELP = """\
usage: fastports run [OPTION...] [--] COMMAND [ARGUMENT...]

Holds ports, starts COMMAND on them, and keeps them until it ends. Signals,
exit status and terminal are COMMAND's. In its arguments {port} is the port,
{port0} {port1}.. are those of a block; {first} {last} {ports} {host} work too.

  -n, --size N       ports in a row (default 1)
  --many NAME=N,...  several blocks; {NAME} {NAME0} {NAME1}.. in the arguments
  --range R, --protocol P   20000-29999, or just one port; tcp, udp or both
  --host H, --label L   the address to hold (default: all); a name for `ls`
  --handoff M        how COMMAND gets in (default auto; see `fastports doctor`)
  --exclusive, --listen   none may join it by SO_REUSEPORT; its sockets listen
  --wait S           seconds it may take to listen (default 30; 0: do not look)
  --detach           leave it running once it listens, and end
  --restart W, --count K, --report F   and more: `fastports help supervise`
  --etcd E, --namespace N   record them in etcd, too: see `fastports help etcd`
  -q, --quiet        tell nothing but why COMMAND could not be started

examples:
  fastports run -n 8 --label decode-0 -- serve --port {port} --kv-base {port1}
  fastports run --many http=1,nixl=8 -- serve --port {http} --side {nixl0}

Exit status: COMMAND's, or 128 + its signal; 1 refused, 2 usage, 127 not found"""

_NAMES = {
    "-n": "size",
    "--size": "size",
    "--many": "many",
    "--range": "range",
    "--protocol": "protocol",
    "--host": "host",
    "--label": "label",
    "--handoff": "handoff",
    "--exclusive": "exclusive",
    "--listen": "listen",
    "--wait": "wait",
    "--detach": "detach",
    "--restart": "restart",
    "--count": "count",
    "--max-restarts": "max-restarts",
    "--backoff": "backoff",
    "--grace": "grace",
    "--report": "report",
    "--report-fd": "report-fd",
    **cluster.NAMES,
    "-q": "quiet",
    "--quiet": "quiet",
}
_FLAGS = ("quiet", "exclusive", "detach", "listen")


def run(words: Sequence[str]) -> int:
    options, command = parse(words, _NAMES, flags=_FLAGS, leading=True)
    if "help" in options:
        print(HELP)
        return 0
    if not command:
        raise Usage("run needs a command to start, such as `python3 -m http.server {port}`.")
    recorded = cluster.given(options, environment=True)
    work = _work(options, command, recorded=recorded)
    hold = _hold(options)
    report = None
    if "report" in options or "report-fd" in options:
        from .report import Report  # 8 ms

        report = Report.asked(options)
    stderr = sys.stderr
    sys.stderr = _Told(quiet="quiet" in options)
    try:
        if recorded:
            return _run_recorded(options, hold, work, report)
        return _run(hold(Allocator()), work, report)
    finally:
        sys.stderr = stderr
        if report is not None:
            report.close()


def _run(held: list[Held], work: Work, report: Report | None) -> int:
    try:
        return work(held, report)
    finally:
        for one in held:
            one.release()


def _run_recorded(options: Options, hold: Hold, work: Work, report: Report | None) -> int:
    on_lost, on_restored = cluster.telling(quiet="quiet" in options)
    registry = cluster.registry(options, on_lost=on_lost, on_restored=on_restored)
    allocator = Allocator(registry=registry)
    try:
        return _run(cluster.undisturbed(lambda: hold(allocator), to_take()), work, report)
    except cluster.Interrupted as exc:
        return exc.status
    finally:
        registry.close()


def _work(options: Options, command: list[str], *, recorded: bool) -> Work:
    """What is done on the ports once they are held."""
    limit = seconds(options["wait"] or "30", "--wait")
    given = options["grace"]
    grace = None if given is None else seconds(given, "--grace")
    spawning: dict[str, Any] = {
        "handoff": options["handoff"] or ("fd" if "listen" in options else "auto"),
        **{name: True for name in ("exclusive", "listen", "detach") if name in options},
    }
    if "detach" in options:
        spawning["stdin"] = DEVNULL
    if any(name in options for name in ("restart", "count", "max-restarts", "backoff")):
        from .supervise import kept  # 3 ms

        return kept(options, command, limit, grace, spawning)
    if "detach" in options and "many" in options:
        raise Usage("--detach leaves one block behind, not several; use -n for --many.")
    if recorded and "detach" in options:
        raise Usage(
            "--detach leaves the ports to the program, and their record in etcd ends with"
            " fastports. Leave out --detach, or --etcd and FASTPORTS_ETCD_ENDPOINTS."
        )

    def work(held: list[Held], report: Report | None) -> int:
        from .program import Program

        return Program(
            held[0],
            command,
            limit=limit,
            grace=grace,
            quiet="quiet" in options,
            report=report,
            spawning=spawning,
        ).status()

    return work


class _Told:
    """Stands in for sys.stderr: what the library logs where logging is not set up comes here."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def write(self, text: str) -> int:
        if not self._quiet and text.strip():
            say(reworded(text.strip()))
        return len(text)

    def flush(self) -> None:
        pass


# --- ports ----------------------------------------------------------------------------------------


def _hold(options: Options) -> Hold:
    """How the ports are held: a list with what each replica has."""
    sizes = _sizes(options) if "many" in options else None
    size = whole(options["size"] or "1", "-n", 1, 65535)
    count = whole(options["count"] or "1", "--count", 1, 65535)
    shared: dict[str, Any] = {
        name: options[name] for name in ("protocol", "host") if name in options
    }
    label = options["label"] or ""
    several = count > 1
    labels = [_numbered(label, number, several) for number in range(count)]

    def hold(allocator: Allocator) -> list[Held]:
        held: list[Held] = []
        try:
            if sizes is not None:
                for one in labels:
                    blocks = allocator.allocate_many(sizes, label=one, **_within(options), **shared)
                    held.append(Bundle(blocks))
                return held
            if "range" in options:
                wanted = PortRange(options["range"] or "")
                if len(wanted) == size * count:
                    # just these ports: also over a TIME_WAIT, and without the warning about where
                    # they lie
                    for number, one in enumerate(labels):
                        first = wanted.first + number * size
                        part = range(first, first + size)
                        held.append(allocator.reserve(part, label=one, **shared))
                    return held
            if not several:
                return [allocator.allocate(size, label=labels[0], **_within(options), **shared)]
            named = dict.fromkeys((one or "replica" for one in labels), size)
            return list(allocator.allocate_many(named, **_within(options), **shared).values())
        except BaseException:
            for block in held:
                block.release()
            raise

    return hold


def _within(options: Options) -> dict[str, Any]:
    return {"range": options["range"]} if "range" in options else {}


def _numbered(label: str, number: int, several: bool) -> str:
    """The label of a replica's block, as :class:`fastports.Supervisor` makes it."""
    if several and "{replica}" not in label:
        label = f"{label or 'replica'}-{{replica}}"
    return label.replace("{replica}", str(number))


def _sizes(options: Options) -> dict[str, int]:
    if "size" in options:
        raise Usage("--many gives the sizes itself; leave -n out.")
    sizes: dict[str, int] = {}
    for text in options.all("many"):
        for part in text.split(","):
            name, equals, number = part.partition("=")
            if not equals:
                raise Usage(f"--many takes NAME=N, such as http=1,nixl=8, not {part!r}.")
            if name in sizes:
                raise Usage(f"--many names {name!r} twice.")
            sizes[name] = whole(number, f"--many {name}=", 1, 65535)
    Bundle.check_names(sizes)
    return sizes
