"""``fastports ls``: who has which ports."""

from __future__ import annotations

import os
import sys

from .. import entries
from .._core import read_file
from . import cluster
from .options import parse
from .say import Usage, printable, say, tolerant_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..registry import Entry

__all__ = ["LABEL", "command_of", "ls", "short_age"]

HELP = """\
usage: fastports ls [--json]
       fastports ls --etcd [ENDPOINTS] [--namespace N] [--watch] [--json]

Lists the ports that are held through fastports in this network namespace, by
whomever: other users and other containers that share the network included.
With --etcd: what the whole cluster has recorded, see `fastports help etcd`.

  --json    a JSON array, one object a line, instead of the table; their names
            are first, last, protocol, host (null: all addresses), pid, alive
            (null where that cannot be seen), label, age (seconds) and others
  --watch   go on with what is recorded and released from now on
  --namespace N   another namespace than the default; '*': all of them

AGE is how long the block has been held. A PID with a question mark is not that
of a process visible here: its owner lives in another pid namespace. What is
shown is what the owners say of themselves.

examples:
  fastports ls
  fastports ls --json | jq '.[] | select(.label == "decode-0") | .first'
  fastports ls --etcd etcd-0:2379 --watch

Exit status: 0, also when there are none; 1 if it cannot be found out."""

_NAMES = {"--json": "json", "--watch": "watch", **cluster.NAMES}
LABEL = 24  # columns on a terminal
_FIELDS = ("first", "last", "protocol", "host", "pid", "start", "alive", "label", "age")


def ls(words: Sequence[str]) -> int:
    options, rest = parse(words, _NAMES, flags=("json", "watch"), optional=("etcd",))
    if "help" in options:
        print(HELP)
        return 0
    if rest:
        raise Usage(f"ls takes no argument {rest[0]!r}.")
    tolerant_output()
    if cluster.given(options):
        from .recorded import ls_etcd

        return ls_etcd(options)
    found = list(entries())
    commands = {
        entry.pid: command_of(entry.pid) for entry in {e.pid: e for e in found if e.alive}.values()
    }
    if "json" in options:
        _write_json(found, commands)
    elif found:
        _write_table(found, commands)
    else:
        say("no ports are held through fastports in this network namespace.")
    return 0


def command_of(pid: int) -> str:
    """The command line of a process, on one line; empty where it cannot be read."""
    text = read_file(b"/proc/%d/cmdline" % pid) or b""
    text = text[:4096]
    return printable(text.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace"))


def brief(command: str) -> str:
    """The same without the folders of program and script, which would fill a terminal's line."""
    program, space, rest = command.partition(" ")
    name = program.rpartition("/")[2] or program
    script, blank, tail = rest.partition(" ")
    if name.startswith(("python", "node", "perl", "ruby", "sh", "bash")) and script[:1] != "-":
        rest = f"{script.rpartition('/')[2] or script}{blank}{tail}"
    return f"{name}{space}{rest}"


def short_age(age: float) -> str:
    """Two digits are enough to tell the old from the new: 42s, 17m, 3h, 12d."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if age < limit:
            return f"{int(age / divisor)}{unit}"
    return f"{int(age / 86400)}d"


def _write_json(found: Iterable[Entry], commands: dict[int, str]) -> None:
    import json  # 7 ms

    lines = []
    for entry in found:
        facts = {name: getattr(entry, name) for name in _FIELDS}
        facts["age"] = round(entry.age, 1)
        facts["command"] = commands.get(entry.pid, "") if entry.alive else ""
        lines.append(json.dumps(facts))
    print("[" + ",\n ".join(lines) + "]")


def _write_table(found: Sequence[Entry], commands: dict[int, str]) -> None:
    width = 0  # not a terminal: whole lines, however long
    if sys.stdout is not None and sys.stdout.isatty():
        width = os.get_terminal_size(1).columns
    rows = [("PORTS", "PROTO", "PID", "AGE", "LABEL", "COMMAND")]
    for entry in found:
        ports = f"{entry.first}-{entry.last}" if entry.last > entry.first else f"{entry.first}"
        if entry.host is not None:
            ports += f" on {entry.host}"
        label = entry.label or "-"
        if width and len(label) > LABEL:
            label = label[: LABEL - 1] + "+"  # as ps and top show that something was cut
        command = (commands.get(entry.pid) if entry.alive else "") or "-"
        rows.append(
            (
                ports,
                entry.protocol,
                f"{entry.pid}" if entry.alive else f"{entry.pid}?",
                short_age(entry.age),
                label,
                brief(command) if width else command,
            )
        )
    a, b, c, d, e = (max(map(len, column)) for column in list(zip(*rows, strict=True))[:5])
    lines = [
        f"{ports:<{a}}  {protocol:<{b}}  {pid:>{c}}  {age:>{d}}  {label:<{e}}  {command}"
        for ports, protocol, pid, age, label, command in rows
    ]
    if width:
        lines = [line[:width] for line in lines]
    print("\n".join(lines))
