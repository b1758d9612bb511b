"""``fastports top``: blocks, owners and listeners, as they come and go."""

from __future__ import annotations

import os
import sys
import time

from ..scene import Scene
from .ls import brief, command_of, short_age
from .options import parse, seconds
from .say import Usage, printable, say, tolerant_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from ..scene import Held

__all__ = ["top"]

HELP = """\
usage: fastports top [--interval S] [--once] [--json]

Shows who holds which ports in this network namespace and who listens on them,
again every second, until q or Ctrl-C. On a terminal with the Python package
`rich` it fills the screen; else it prints a table each time.

  --interval S   seconds between two looks (default 1)
  --once         one table, then end
  --json         one JSON object a line for each look, with everything

STATE: held (nobody listens yet), partly, up (every port is listened on);
stranger: somebody listens who does not come of the owner; unsure: no process
is as the entry says. Keys: q, arrows or j and k, Page Up and Down, Home, End.

examples:
  fastports top
  fastports top --once --json | jq '.blocks[] | select(.state == "stranger")'

Exit status: 0; 1 if it cannot be found out."""

_NAMES = {"--interval": "interval", "--once": "once", "--json": "json"}
_HEAD = ("PORTS", "PROTO", "PID", "AGE", "LABEL", "STATE", "LISTENERS", "COMMAND")
_STYLES = {"held": "cyan", "partly": "yellow", "up": "green", "stranger": "bold red"}
_KEYS = {
    "q": "quit", "k": "up", "j": "down", "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up",
    "\x1bOB": "down", "\x1b[5~": "back", "\x1b[6~": "on", " ": "on", "\x1b[H": "first",
    "\x1b[1~": "first", "\x1b[F": "last", "\x1b[4~": "last",
}  # fmt: skip


def top(words: Sequence[str]) -> int:
    options, rest = parse(words, _NAMES, flags=("once", "json"))
    if "help" in options:
        print(HELP)
        return 0
    if rest:
        raise Usage(f"top takes no argument {rest[0]!r}.")
    interval = seconds(options["interval"] or "1", "--interval")
    if interval < 0.1:
        raise Usage("--interval takes 0.1 seconds or more.")
    tolerant_output()
    scene = Scene()
    try:
        if "json" in options:
            _each(scene, interval, "once" in options, _print_json)
        elif "once" in options or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _each(scene, interval, "once" in options, _print_table)
        else:
            _live(scene, interval)
    except KeyboardInterrupt:
        pass  # how one leaves it
    return 0


def _each(scene: Scene, interval: float, once: bool, show: Any) -> None:
    while True:
        show(scene.look())
        sys.stdout.flush()
        if once:
            return
        time.sleep(interval)


# --- lines ----------------------------------------------------------------------------------------


def _print_json(found: Sequence[Held]) -> None:
    import json  # 7 ms

    blocks = []
    for held in found:
        entry = held.entry
        blocks.append(
            {
                "first": entry.first,
                "last": entry.last,
                "protocol": entry.protocol,
                "host": entry.host,
                "pid": entry.pid,
                "alive": entry.alive,
                "label": entry.label,
                "age": round(entry.age, 1),
                "state": held.state,
                "listeners": [
                    {name: getattr(listener, name) for name in listener.__slots__}
                    for listener in held.listeners
                ],
            }
        )
    print(json.dumps({"time": time.time(), "blocks": blocks}))


def _print_table(found: Sequence[Held]) -> None:
    rows = [_HEAD, *(_row(held, {}) for held in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD) - 1)]
    print(_summary(found))
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())
    print()


def _summary(found: Sequence[Held]) -> str:
    states = [held.state for held in found]
    parts = [
        _counted(len(found), "block"),
        _counted(sum(len(held.entry.ports) for held in found), "port"),
        _counted(len({held.entry.pid for held in found}), "owner"),
    ]
    for state in ("held", "partly", "up", "stranger", "unsure"):
        if state in states:
            parts.append(f"{states.count(state):,} {state}")
    return f"fastports top  {time.strftime('%H:%M:%S')}  " + ", ".join(parts)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _row(held: Held, commands: dict[int, str]) -> tuple[str, ...]:
    entry = held.entry
    ports = f"{entry.first}-{entry.last}" if entry.last > entry.first else f"{entry.first}"
    if entry.host is not None:
        ports += f" on {entry.host}"
    if entry.alive and entry.pid not in commands:
        commands[entry.pid] = command_of(entry.pid)
    state = held.state
    if state == "partly":
        state = f"partly {held.up}/{len(entry.ports)}"
    return (
        ports,
        entry.protocol,
        f"{entry.pid}" if entry.alive else f"{entry.pid}?",
        short_age(entry.age),
        printable(entry.label) or "-",
        state,
        " ".join(_listeners(held)) or "-",
        brief((commands.get(entry.pid, "") if entry.alive else "") or "-"),
    )


def _listeners(held: Held) -> Iterator[str]:
    """Each process once: ``nginx(4242)``; what cannot be seen by its user."""
    told = set()
    for listener in held.listeners:
        who = f"{listener.name}({listener.pid})" if listener.pid else f"uid({listener.uid})"
        if listener.related is False:
            who += "!"
        if who not in told:
            told.add(who)
            yield who


# --- the screen -----------------------------------------------------------------------------------


def _live(scene: Scene, interval: float) -> None:
    try:
        from rich.console import Console  # 60 ms with what follows
        from rich.live import Live
    except ImportError:
        say("plain lines, because rich is not installed: pip install 'fastports[top]'.")
        _each(scene, interval, False, _print_table)
        return
    console = Console()
    view = _View(console)
    with _Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view.found = scene.look()
            due = time.monotonic() + interval
            while True:
                live.update(view.table(), refresh=True)
                word = keys.read(max(due - time.monotonic(), 0.0))
                if word == "quit":
                    return
                if not word:
                    break
                view.move(word)


class _View:
    def __init__(self, console: Any) -> None:
        self._console = console
        self.found: Sequence[Held] = ()
        self._at = 0

    @property
    def _room(self) -> int:
        return max(int(self._console.size.height) - 3, 1)  # summary, heads, and a last line

    def move(self, word: str) -> None:
        page = self._room
        step = {"up": -1, "down": 1, "back": -page, "on": page}.get(word, 0)
        end = len(self.found)
        self._at = {"first": 0, "last": end}.get(word, self._at + step)

    def table(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        room = self._room
        self._at = max(0, min(self._at, len(self.found) - room))
        shown = self.found[self._at : self._at + room]
        table = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
        for name, ratio in zip(_HEAD, (0, 0, 0, 0, 2, 0, 3, 3), strict=True):
            table.add_column(
                name,
                header_style="reverse",
                justify="right" if name in ("PID", "AGE") else "left",
                no_wrap=True,
                overflow="ellipsis",
                ratio=ratio or None,
            )
        commands: dict[int, str] = {}
        for held in shown:
            cells = [Text(text) for text in _row(held, commands)]
            cells[5].stylize(_STYLES.get(held.state, "magenta"))
            table.add_row(*cells)
        below = len(self.found) - self._at - len(shown)
        last = f"{self._at:,} above, {below:,} below; " if self._at or below else ""
        summary = Text(_summary(self.found), style="bold", no_wrap=True, overflow="ellipsis")
        return Group(summary, table, Text(f"{last}q quits", style="dim"))


class _Keys:
    """Single keys from the terminal, which is put back as it was."""

    def __enter__(self) -> _Keys:
        import termios
        import tty

        self._before = termios.tcgetattr(0)
        tty.setcbreak(0)
        self._text = ""
        return self

    def __exit__(self, *exc: object) -> None:
        import termios

        termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def read(self, wait: float) -> str:
        """What the next key means; empty after ``wait`` seconds without one."""
        import select

        end = time.monotonic() + wait
        while True:
            while self._text:
                for key, word in _KEYS.items():
                    if self._text.startswith(key):
                        self._text = self._text[len(key) :]
                        return word
                self._text = self._text[1:]
            if not select.select([0], [], [], max(end - time.monotonic(), 0.0))[0]:
                return ""
            data = os.read(0, 1024)
            if not data:
                return "quit"  # the terminal is gone
            self._text += data.decode("utf-8", "replace")
