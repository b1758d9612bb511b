"""``fastports map --svg`` and ``--png``."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from commanding import fastports
from worlds import network, root_only

import fastports as package

COLOURS = {
    "free": (0xF0, 0xF0, 0xF0),
    "held": (0x00, 0x72, 0xB2),
    "busy": (0xD5, 0x5E, 0x00),
    "reserved": (0xF0, 0xE4, 0x42),
    "ephemeral": (0xCF, 0xE3, 0xF2),
}


def colours(path: Path) -> dict[tuple[int, ...], int]:
    """How many pixels of a PNG have which colour."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind) == (8, 6)  # RGBA
    at, packed = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    raw, stride = zlib.decompress(packed), 4 * width
    before = bytearray(stride)
    found: dict[tuple[int, ...], int] = {}
    for y in range(height):
        kind, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1 :][:stride])
        for i in range(stride):
            left = line[i - 4] if i >= 4 else 0
            up, corner = before[i], before[i - 4] if i >= 4 else 0
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda n: abs(guess - n))
            line[i] = (line[i] + (0, left, up, (left + up) // 2, nearest)[kind]) & 255
        for x in range(0, stride, 4):
            pixel = tuple(line[x : x + 3])
            found[pixel] = found.get(pixel, 0) + 1
        before = line
    return found


@root_only
def test_a_picture_shows_each_kind_of_port_in_its_colour(tmp_path: Path) -> None:
    path = tmp_path / "ports.png"
    with network(
        {
            "net.ipv4.ip_local_port_range": "20080 20099",
            "net.ipv4.ip_local_reserved_ports": "20050-20059",
        }
    ):
        import socket

        with package.reserve("20010-20029", label="decode-0"), socket.socket() as other:
            other.bind(("", 20000))
            done = fastports("map", "20000-20099", "--png", str(path))
    assert done.stdout == done.stderr == ""
    seen = colours(path)
    # cells are squares of one size: as many pixels as ports, but for text and frames
    size = seen[COLOURS["reserved"]] / 10
    for name, ports in (("free", 49), ("held", 20), ("busy", 1), ("ephemeral", 20)):
        assert 0.5 * ports * size < seen[COLOURS[name]] < 2.5 * max(ports, 2) * size, name


def test_an_svg_has_its_words_as_text_and_is_the_same_each_time(tmp_path: Path) -> None:
    pictures = []
    with package.allocate(20, label="decode-0") as block:
        for name in ("a.svg", "b.svg"):
            path = tmp_path / name
            fastports("map", f"{block.first}-{block.last}", "--svg", str(path))
            pictures.append(path.read_text())
    assert pictures[0] == pictures[1]
    text = re.findall(r"<text[^>]*>([^<]*)<", pictures[0])
    assert "held through fastports: 20" in text
    assert f"{block.first}-{block.last} (tcp)" in text


@pytest.mark.parametrize("ports", ["20000", "20000-20008", "1-65535"])
def test_every_size_of_range_becomes_a_picture(ports: str, tmp_path: Path) -> None:
    fastports("map", ports, "--svg", str(tmp_path / "p.svg"), "--png", str(tmp_path / "p.png"))
    assert 0 < (tmp_path / "p.svg").stat().st_size < 100_000
    assert 0 < (tmp_path / "p.png").stat().st_size < 100_000


def test_without_matplotlib_the_line_to_type_is_said(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    path = tmp_path / "p.png"
    done = fastports(
        "map", "20000", "--png", str(path), status=1, env={"PYTHONPATH": str(tmp_path)}
    )
    assert "pip install 'fastports[plot]'" in done.stderr
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_said_in_a_line(tmp_path: Path) -> None:
    done = fastports("map", "20000", "--png", str(tmp_path / "no" / "p.png"), status=1)
    assert done.stderr.count("\n") == 1 and "No such file" in done.stderr


def test_the_map_in_letters_does_not_load_matplotlib() -> None:
    code = "import sys; from fastports.cli import main; main(['map', '20000']);"
    code += "print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
