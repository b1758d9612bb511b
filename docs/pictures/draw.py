"""Draw the pictures of the pages anew: python docs/pictures/draw.py

Needs the extras `plot` and `top`. The diagrams are drawn by hand, in numbers; `top` and the map are
what the commands show of blocks that this script holds.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from random import Random

import fastports

HERE = Path(__file__).parent
# Okabe and Ito's, as in the map
BLUE, ORANGE, GREEN, YELLOW, GREY = "#0072b2", "#d55e00", "#009e73", "#f0e442", "#e4e4e4"


OWNER = """
import fastports, sys
block = fastports.allocate(1, range="20000-29999", label="metrics")
block.open_door()
print(block.first, flush=True)
sys.stdin.read()
block.release()
"""


class Drawing:
    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="sans-serif" role="img">',
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
            ' markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="#444"/></marker>'
            '<pattern id="gap" width="8" height="8" patternUnits="userSpaceOnUse"'
            f' patternTransform="rotate(45)"><rect width="8" height="8" fill="#fff"/>'
            f'<rect width="4" height="8" fill="{ORANGE}" opacity=".55"/></pattern></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>',
        ]

    def bar(self, x: int, y: int, width: int, text: str, fill: str, ink: str = "#fff") -> None:
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="26" rx="3" fill="{fill}"/>'
        )
        self.text(x + width // 2, y + 18, text, ink, "middle", on_hatching=fill.startswith("url"))

    def text(
        self,
        x: int,
        y: int,
        text: str,
        ink: str = "#222",
        anchor: str = "start",
        size: int = 13,
        on_hatching: bool = False,
    ) -> None:
        # on the hatching letters need a ground of their own
        halo = ' stroke="#fff" stroke-width="4" paint-order="stroke"' if on_hatching else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" fill="{ink}" text-anchor="{anchor}" font-size="{size}"{halo}>'
            f"{text}</text>"
        )

    def line(self, x1: int, y1: int, x2: int, y2: int, tip: bool = False, dash: str = "") -> None:
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#444"'
            + (f' stroke-dasharray="{dash}"' if dash else "")
            + (' marker-end="url(#tip)"' if tip else "")
            + "/>"
        )

    def save(self, name: str) -> None:
        (HERE / name).write_text("\n".join([*self._parts, "</svg>"]) + "\n")


def hold() -> None:
    d = Drawing(720, 268, "Bind, close, hope leaves a gap; a hold leaves none")
    d.text(16, 28, "Bind, close, hope", size=15)
    d.text(16, 62, "launcher")
    d.bar(110, 44, 70, "bind(0)", BLUE)
    d.text(16, 98, "program")
    d.bar(190, 80, 270, "fork, exec, imports, model ...", GREY, "#222")
    d.bar(460, 80, 240, "bind, listen", GREEN)
    d.bar(180, 44, 280, "anybody may take the port", "url(#gap)", "#222")
    d.line(16, 124, 704, 124, dash="2 4")
    d.text(16, 152, "The hold", size=15)
    d.text(16, 186, "launcher")
    d.bar(110, 168, 590, "hold: bound, no option set, not listening; nobody else can bind", BLUE)
    d.text(16, 222, "program")
    d.bar(190, 204, 270, "fork, exec, imports, model ...", GREY, "#222")
    d.bar(460, 204, 240, "listens beside the hold", GREEN)
    d.line(110, 248, 700, 248, tip=True)
    d.text(16, 252, "time", "#444")
    d.save("hold.svg")


def door() -> None:
    d = Drawing(720, 214, "The door of a hold is open until the program listens")
    d.text(16, 44, "hold")
    d.bar(100, 26, 100, "door closed", BLUE)
    d.bar(202, 26, 178, "door open", YELLOW, "#222")
    d.bar(382, 26, 318, "door closed, the hold stays behind", BLUE)
    d.text(16, 90, "program")
    d.bar(212, 72, 108, "starts", GREY, "#222")
    d.bar(320, 72, 180, "binds and listens", GREEN)
    d.text(512, 90, "crash", ORANGE)
    d.bar(560, 72, 140, "listens again", GREEN)
    d.text(16, 136, "strangers")
    d.bar(100, 118, 100, "EADDRINUSE", "#666")
    d.bar(202, 118, 118, "SO_REUSEADDR", "url(#gap)", "#222")
    d.bar(320, 118, 380, "EADDRINUSE", "#666")
    d.text(202, 162, "only who asks for this very port,", "#444", size=11)
    d.text(202, 176, "with SO_REUSEADDR, could enter", "#444", size=11)
    d.line(100, 196, 700, 196, tip=True)
    d.text(16, 200, "time", "#444")
    d.save("door.svg")


def broker() -> None:
    d = Drawing(720, 330, "In broker mode the launcher performs the program's bind call")
    for x, name, fill in (
        (110, "program", GREEN),
        (360, "kernel", "#666"),
        (610, "launcher", BLUE),
    ):
        d.bar(x - 60, 16, 120, name, fill)
        d.line(x, 42, x, 312, dash="2 4")
    steps = (
        (110, 360, 76, "1  bind(socket, port)"),
        (360, 610, 110, "2  the filter tells of the call"),
        (610, 360, 144, "3  fetches the very socket"),
        (610, 360, 212, "4  bind, beside the hold"),
        (610, 360, 246, "5  answers the call"),
        (360, 110, 280, "6  bind returns 0"),
    )
    for start, end, y, text in steps:
        d.text((start + end) // 2, y - 5, text, anchor="middle")
        d.line(start, y, end + (4 if end < start else -4), y, tip=True)
    for y in (160, 186, 200):
        d.bar(604, y, 12, "", YELLOW)
    d.text(622, 188, "door open,", "#444", size=11)
    d.text(622, 202, "microseconds", "#444", size=11)
    d.text(122, 144, "waits", "#444")
    d.text(122, 178, "a program that binds plainly,", "#444", size=11)
    d.text(122, 192, "without SO_REUSEADDR, gets in, too", "#444", size=11)
    d.save("broker.svg")


def seen() -> None:
    """What `map` and `top` show of a node with some work on it."""
    random = Random(4)
    here = fastports.Allocator(range="20000-29999")
    blocks = [
        here.allocate(random.choice((2, 8, 8, 16, 32)), label=f"decode-{i}") for i in range(40)
    ]
    others = []
    for _ in range(200):
        other = socket.socket()
        try:
            other.bind(("", random.randrange(20000, 30000)))
        except OSError:
            other.close()
            continue
        other.listen()
        others.append(other)
    subprocess.run(
        [sys.executable, "-m", "fastports", "map", "20000-29999", "--png", str(HERE / "map.png")],
        check=True,
    )
    for block in blocks[6:]:
        block.release()
    web = [sys.executable, "-m", "http.server", "{port}"]
    for block, count in ((blocks[0], 1), (blocks[1], len(blocks[1]))):
        for port in block.ports[:count]:
            block.spawn([*web[:-1], str(port)], wait=[port], stdout=-3, stderr=-3)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("", int(owner.stdout.readline())))
        stranger.listen()
        top()
    owner.communicate("")
    for block in blocks[:6]:
        block.release()
    for other in others:
        other.close()


def top() -> None:
    from rich.console import Console

    from fastports.cli import top as command
    from fastports.scene import Scene

    command.command_of = lambda pid: "python3 launch.py"  # not this script's own line
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=104, height=10, file=nowhere, force_terminal=True)
        view = command._View(console)
        view.found = Scene().look()
        console.print(view.table())
    text = console.export_svg(title="fastports top")
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.DOTALL)  # nothing from other hosts
    text = text.replace("<!-- Generated with Rich https://www.textualize.io -->", "")
    text = re.sub(r"Fira Code", "DejaVu Sans Mono", text)
    (HERE / "top.svg").write_text(text)


if __name__ == "__main__":
    hold()
    door()
    broker()
    seen()
