"""The command line, but for ``run``: what it prints, to whom, and how it ends."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from commanding import COMMAND, fastports, terminal
from worlds import become, in_child, network, root_only, time_wait, wait_until

from fastports import allocate, reserve
from fastports._core import bind_abstract
from fastports.cli import main
from fastports.cli.ls import brief
from fastports.host import process_start

COMMANDS = ["run", "ls", "probe", "map", "top", "doctor", "gc"]


def entry(
    first: int, last: int, *, label: str = "", pid: int | None = None, start: int = 0
) -> bytes:
    """The name of an entry as somebody with another program might bind it."""
    pid = os.getpid() if pid is None else pid
    start = start or process_start() or 0
    made = int(time.clock_gettime(time.CLOCK_BOOTTIME))
    return f"fastports/t/{first}-{last}/{pid:x}/{start:x}/{made:x}/{label}".encode()


def own_command() -> str:
    """This process, be it pytest or a worker of xdist."""
    return Path("/proc/self/cmdline").read_text().rstrip("\0").replace("\0", " ")


@contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


# --- as a whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["etcd", "supervise"])
def test_help_for_more_fits_on_a_screen(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", page]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_on_a_screen_and_has_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80, text
    assert "examples:" in lines and "xit status" in text
    if command:
        assert main(["help", command]) == 0
        assert capsys.readouterr().out == text


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    words = capsys.readouterr().out.split()
    assert set(COMMANDS) <= set(words)


def test_nothing_at_all_shows_the_help_and_is_wrong_usage() -> None:
    assert fastports(status=2).stdout.startswith("usage: fastports")


def test_the_version_is_that_of_the_package() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    version = text.partition('\nversion = "')[2].partition('"')[0]
    assert fastports("--version").stdout == f"fastports {version}\n"


WRONG = [
    "nothing",
    "--nothing",
    "help nothing",
    "run",
    "run --",
    "run -n",
    "run -n --",
    "run -n 0 true",
    "run -n -1 true",
    "run -n 1.5 true",
    "run -n 70000 true",
    "run -n x true",
    "run -n \u0661 true",
    "run -n 6 --range 20000-20004 true",
    "run --bogus true",
    "run -z true",
    "run -qz true",
    "run --quiet=3 true",
    "run --range 5-1 true",
    "run --range tcp://10.43.1.39:8000 true",
    "run --range 1-70000 true",
    "run --range 0 true",
    "run --range= true",
    "run --range 20000-29999x true",
    "run --protocol sctp true",
    "run --host localhost true",
    "run --host fe80::1%lo true",
    "run --host 192.0.2.1 true",
    "run --label \a true",
    "run --label " + 65 * "x" + " true",
    "run --wait x true",
    "run --wait -1 true",
    "run --wait nan true",
    "run --wait 1e3 true",
    "run --many a=1 -n 3 true",
    "run --many a true",
    "run --many = true",
    "run --many a=0 true",
    "run --many a=1,a=2 true",
    "run --many a=1, true",
    "run --many port=1 true",
    "run --many port3=1 true",
    "run --many host=1 true",
    "run --many a=1,a1=1 true",
    "run --many {=1 true",
    "run --many a=1 -- echo {port}",
    "run --many a=1 -- echo {port0}",
    "run --many a=1 -- echo {a1}",
    "run --many a=9 --range 20000-20004 true",
    "run --detach --restart no true",
    "run --detach --many a=1 true",
    "run --detach --etcd 127.0.0.1:1 true",
    "run --restart sometimes true",
    "run --restart= true",
    "run --restart no --max-restarts -1 true",
    "run --restart no --max-restarts x true",
    "run --restart no --backoff x true",
    "run --backoff 1 true",
    "run --max-restarts 1 true",
    "run --count 0 true",
    "run --count x true",
    "run --grace -1 true",
    "run --report-fd x true",
    "run --report-fd 1048575 true",
    "run --report - --report-fd 1 true",
    "ls extra",
    "ls --bogus",
    "probe",
    "probe 1 2",
    "probe x",
    "probe 1-65536",
    "probe -- -5",
    "probe --protocol icmp 3",
    "probe --host foo 3",
    "probe --json=1 3",
    "map 3 4",
    "map 0",
    "map --protocol x",
    "doctor extra",
    "doctor --bogus",
]


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_one_line_on_stderr_and_status_2(
    line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split(" ")) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("fastports: ") and err.count("\n") == 1, err
    # what to do is told in the words of the command line
    for word in (
        "range=",
        "host=",
        "timeout=",
        "label=",
        "=True",
        "None",
        "argv",
        "allocate(",
        "metadata",
    ):
        assert word not in err, err


def test_options_are_read_in_every_common_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    with allocate(1) as block:
        facts = []
        for words in (
            ["--protocol=tcp", "--json", str(block.first)],
            [str(block.first), "--protocol", "tcp", "--json"],
            ["--protocol", "udp", "--protocol", "tcp", "--json", "--", str(block.first)],
        ):
            assert main(["probe", *words]) == 1
            facts.append(json.loads(capsys.readouterr().out))
    assert facts[0]["protocol"] == "tcp" and facts[0] == facts[1] == facts[2]


def test_a_reader_that_goes_away_ends_it_like_any_filter() -> None:
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(allocate(1, label=60 * "x"))
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = subprocess.run(
                [*COMMAND, "ls"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
            )
        finally:
            os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_is_told() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "probe", "1-9"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "fastports: No space left on device.\n"


def test_kubernetes_service_links_in_the_environment_do_no_harm() -> None:
    links = {
        "FASTPORTS_PORT": "tcp://10.43.1.39:8000",
        "FASTPORTS_SERVICE_HOST": "10.43.1.39",
        "FASTPORTS_SERVICE_PORT": "8000",
        "FASTPORTS_PORT_8000_TCP_PROTO": "tcp",
        "FASTPORTS_PORTS_PORT": "tcp://10.43.1.40:1",
    }
    for words in (["ls"], ["probe", "1-9"], ["doctor"], ["run", "-q", "--", "true"]):
        with_links = fastports(*words, env=links)
        assert "10.43" not in with_links.stdout + with_links.stderr


# --- ls -------------------------------------------------------------------------------------------


def test_ls_shows_who_has_what() -> None:
    with (
        allocate(8, label="decode-0") as block,
        allocate(1, protocol="udp", host="127.0.0.1") as other,
    ):
        lines = fastports("ls").stdout.splitlines()
    assert lines[0].split() == ["PORTS", "PROTO", "PID", "AGE", "LABEL", "COMMAND"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    row = rows[f"{block.first}-{block.last}"]
    assert row[1:3] == ["tcp", str(os.getpid())] and row[3].endswith("s")
    assert row[4:] == ["decode-0", *own_command().split()]
    assert rows[str(other.first)][1:5] == ["on", "127.0.0.1", "udp", str(os.getpid())]


def test_ls_json_is_an_array_with_every_field() -> None:
    with allocate(3, label="ünïcode", protocol="both") as block:
        found = json.loads(fastports("ls", "--json").stdout)
    mine = [item for item in found if item["pid"] == os.getpid() and item["first"] == block.first]
    assert len(mine) == 1
    assert mine[0].pop("age") < 60
    assert mine[0] == {
        "command": own_command(),
        "first": block.first,
        "last": block.last,
        "protocol": "both",
        "host": None,
        "pid": os.getpid(),
        "start": process_start(),
        "alive": True,
        "label": "ünïcode",
    }


@root_only
def test_ls_of_nothing_is_empty_and_says_so() -> None:
    with network():
        done = fastports("ls")
        assert json.loads(fastports("ls", "--json").stdout) == []
    assert done.stdout == ""
    assert done.stderr.startswith("fastports: no ports are held")


@root_only
def test_ls_lists_ten_thousand_entries_in_port_order() -> None:
    count = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 200)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 100), hard))
    fds = []
    try:
        with network():
            for port in range(20_000 + count - 1, 19_999, -1):
                fds.append(bind_abstract(entry(port, port, label=f"n{port}")))
            lines = fastports("ls").stdout.splitlines()
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(lines) == count + 1
    assert [line.split()[0] for line in lines[1:]] == [str(20_000 + n) for n in range(count)]


@root_only
def test_ls_is_not_fooled_by_names_that_are_made_to_harm() -> None:
    names = [
        entry(30_000, 30_000, label="\033[2Jred"),  # control characters
        entry(40_000, 30_000),  # reversed
        entry(0, 70_000),
        b"fastports/t/1-2/x/y/z/label",
        b"fastports/t/1-2",
        b"fastports/t/" + 80 * b"9",
        b"fastports/t/1-2/1/1/1/\xff\xfe",
    ]
    with network(), ExitStack() as stack:
        for name in names:
            stack.callback(os.close, bind_abstract(name))
        good = bind_abstract(entry(30_002, 30_003, label="good"))
        stack.callback(os.close, good)
        done = fastports("ls")
    rows = done.stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["30002-30003"]
    assert "\033" not in done.stdout


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("/opt/a/bin/python3.11 /opt/a/bin/serve --to /tmp/x", "python3.11 serve --to /tmp/x"),
        ("/usr/bin/python3 -m http.server /srv", "python3 -m http.server /srv"),
        ("/usr/sbin/nginx /etc/nginx", "nginx /etc/nginx"),
        ("nginx: master process /usr/sbin/nginx", "nginx: master process /usr/sbin/nginx"),
        ("sh", "sh"),
        ("-", "-"),
        ("/", "/"),
    ],
)
def test_a_terminal_has_no_room_for_the_folders_of_a_command(command: str, shown: str) -> None:
    assert brief(command) == shown


def test_ls_leaves_folders_out_on_a_terminal_only() -> None:
    code = "import fastports as f; b = f.allocate(1); print(b.first, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        assert f" {sys.executable} -c " in fastports("ls").stdout
        with terminal(*COMMAND, "ls") as term:
            assert term.end() == 0
        (row,) = (line for line in term.shown.splitlines() if line.startswith(f"{first} "))
        assert f" {Path(sys.executable).name} -c " in row and sys.executable not in term.shown
        process.communicate("\n")


@root_only
def test_ls_makes_a_foreign_command_line_harmless() -> None:
    with network():
        code = "import sys; sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", code, "\033]0;owned\a"], stdin=subprocess.PIPE
        ) as process:
            start = process_start(process.pid)
            assert start is not None
            # until exec is through, its command line is still this one's
            wait_until(
                lambda: b"owned" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "exec"
            )
            fd = bind_abstract(entry(30_000, 30_001, pid=process.pid, start=start))
            try:
                text = fastports("ls").stdout
            finally:
                os.close(fd)
    assert "?]0;owned?" in text and "\033" not in text and "\a" not in text


@root_only
def test_ls_marks_owners_that_it_cannot_see() -> None:
    """C29, C33: a pid of another pid namespace, or a recycled one, is no process of this one."""
    with network(), ExitStack() as stack:
        free = 2**22 - 1  # above any pid in use (PID_MAX_LIMIT)
        for first, pid, start in ((30_000, free, 1), (30_010, os.getpid(), 12345)):
            name = entry(first, first, pid=pid, start=start)
            stack.callback(os.close, bind_abstract(name))
        lines = fastports("ls").stdout.splitlines()[1:]
        found = json.loads(fastports("ls", "--json").stdout)
    assert [line.split()[2] for line in lines] == [f"{free}?", f"{os.getpid()}?"]
    assert [line.split()[-1] for line in lines] == ["-", "-"]
    assert [item["alive"] for item in found] == [None, False]
    assert [item["command"] for item in found] == ["", ""]


def test_ls_cuts_lines_at_the_edge_of_a_terminal() -> None:
    with allocate(1, label=64 * "y"), terminal(*COMMAND, "ls") as term:
        assert term.end() == 0
    assert f" {23 * 'y'}+ " in term.shown
    assert max(map(len, term.shown.splitlines())) == 80


# --- probe ----------------------------------------------------------------------------------------


@root_only
def test_probe_counts_and_finds_the_longest_free_stretch() -> None:
    with network({"net.ipv4.ip_local_reserved_ports": "20051-20052"}):
        assert fastports("probe", "20000-20049").stdout.splitlines() == [
            "20000-20049 (tcp, all addresses): 50 ports",
            "  free          50",
            "  longest free stretch 50: 20000-20049",
        ]
        with reserve("20010-20012"), reserve(20014), reserve(20020, protocol="udp"):
            done = fastports("probe", "20000-20059", status=1)
            facts = json.loads(fastports("probe", "20000-20059", "--json", status=1).stdout)
    assert done.stdout.splitlines() == [
        "20000-20059 (tcp, all addresses): 60 ports",
        "  free          54",
        "  busy           4  20010-20012, 20014",
        "    4 of them held through fastports, see `fastports ls`",
        "  reserved       2  20051-20052",
        "  longest free stretch 36: 20015-20050",
    ]
    assert facts == {
        "range": "20000-20059",
        "protocol": "tcp",
        "host": None,
        "ports": 60,
        "free": 54,
        "busy": 4,
        "denied": 0,
        "privileged": 0,
        "reserved": 2,
        "held": 4,
        "longest_free": 36,
        "longest_free_first": 20015,
    }


def test_probe_of_one_port_says_what_is_on_it() -> None:
    with allocate(1) as block:
        port = block.first
        text = fastports("probe", str(port), status=1).stdout
        assert text.startswith(f"port {port} (tcp, all addresses) is taken")
    assert fastports("probe", str(port)).stdout == f"port {port} (tcp, all addresses) is free.\n"
    with listening() as port:
        text = fastports("probe", str(port), status=1).stdout
    assert "a server listens on it" in text and "See `ss -ltnp`" in text


@root_only
def test_c21_probe_tells_a_time_wait_from_a_server() -> None:
    """C21"""
    with network():
        time_wait(20_005)
        text = fastports("probe", "20005", status=1).stdout
    assert "TIME_WAIT" in text


@root_only
def test_probe_as_an_ordinary_user_tells_a_missing_privilege() -> None:
    def probe() -> tuple[int, str]:
        become(65534)
        with redirect_stdout(StringIO()) as out:
            return main(["probe", "79-80", "--json"]), out.getvalue()

    import numpy  # noqa: F401 - the other user may not be able to read it

    with network():
        status, text = in_child(probe)
    assert status == 1 and json.loads(text)["privileged"] == 2


# --- map ------------------------------------------------------------------------------------------


@root_only
def test_map_draws_a_letter_for_each_port_of_a_small_range() -> None:
    sysctls = {
        "net.ipv4.ip_local_reserved_ports": "20011-20012",
        "net.ipv4.ip_local_port_range": "20015 20017",
    }
    with network(sysctls), reserve("20003-20005"), socket.socket() as sock:
        sock.bind(("127.0.0.1", 20007))
        lines = fastports("map", "20001-20019").stdout.splitlines()
    assert lines == [
        "20000   ..hhh.x.. .rr..~~~..",
        "",
        "20001-20019 (tcp)",
        ". free 10   h held through fastports 3   x taken by others 1   r reserved 2",
        "~ ephemeral 3",
    ]


@root_only
def test_map_uses_capitals_where_all_ports_of_a_letter_are_alike() -> None:
    with network(), reserve("20000-20019", label="all"), reserve(20055):
        lines = fastports("map").stdout.splitlines()
    assert lines[0].startswith("20000  H.h.......") or lines[0].startswith("20000  HHh")
    assert lines[-2:] == [
        "20000-29999 (tcp), 20 ports a letter",
        ". free 9979   h held through fastports 21",
    ]
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


@root_only
@pytest.mark.parametrize("plain", ["NO_COLOR", "TERM", ""])
def test_map_is_coloured_on_a_terminal_that_wants_it(plain: str) -> None:
    env = {"NO_COLOR": "1"} if plain == "NO_COLOR" else {"NO_COLOR": ""}
    if plain == "TERM":
        env["TERM"] = "dumb"
    with network(), reserve("20000-20019"), terminal(*COMMAND, "map", env=env) as term:
        assert term.end() == 0
    assert ("\033[" in term.shown) == (plain == "")
    visible = term.shown.replace("\033[1;36m", "").replace("\033[32m", "").replace("\033[0m", "")
    assert visible.startswith("20000  H.")
    assert len(visible.splitlines()) <= 24
    assert max(map(len, visible.splitlines())) <= 80


# --- doctor ---------------------------------------------------------------------------------------


def findings(text: str) -> dict[str, str]:
    """Level by topic; the header, the verdict and continued lines left out."""
    rows = (line.split(None, 2) for line in text.splitlines()[1:-1] if not line.startswith(" "))
    return {row[1]: row[0] for row in rows}


@root_only
def test_doctor_finds_nothing_broken_in_a_network_that_is_whole() -> None:
    with network():
        done = fastports("doctor")
    lines = done.stdout.splitlines()
    assert "BAD" not in done.stdout and done.stderr == ""
    assert lines[-1] == "Everything that fastports needs works here."
    assert findings(done.stdout).keys() >= {
        "kernel", "hold", "hand-off", "range", "privileged", "limits", "network", "processes",
        "ipv6", "sandbox",
    }  # fmt: skip
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


@root_only
def test_doctor_tells_what_is_broken_and_what_to_type() -> None:
    sysctls = {
        "net.ipv4.ip_local_port_range": "1024 65535",
        "net.ipv6.conf.all.disable_ipv6": "1",
    }
    with network(sysctls, loopback=False):
        done = fastports("doctor", status=1)
    levels = findings(done.stdout)
    assert {topic for topic, level in levels.items() if level == "BAD"} == {
        "range",
        "loopback",
    }
    assert levels["ipv6"] == "note"
    typed = [line.split("type: ")[1] for line in done.stdout.splitlines() if "type: " in line]
    assert 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"' in typed
    assert "ip link set lo up" in typed
    assert done.stdout.splitlines()[-1] == "2 things are broken."
    assert done.stderr == ""


@root_only
def test_doctor_knows_ranges_that_it_cannot_have_as_usual() -> None:
    sysctls = {"net.ipv4.ip_local_port_range": "30000 60999"}
    with network({**sysctls, "net.ipv4.ip_unprivileged_port_start": "21000"}):
        levels = findings(fastports("doctor").stdout)
        assert levels["range"] == "ok" and levels["privileged"] == "ok"  # root may bind them
    with network({"net.ipv4.ip_local_port_range": "9000 65000"}):
        text = fastports("doctor").stdout
    assert findings(text)["range"] == "note" and "ports come from 1024-8999" in text


def test_doctor_asks_for_more_descriptors_where_they_are_few() -> None:
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", *COMMAND, "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert findings(done.stdout)["limits"] == "BAD"
    assert "type: prlimit --pid $$ --nofile=65536" in done.stdout


@root_only
def test_doctor_notices_the_proc_of_another_pid_namespace() -> None:
    done = subprocess.run(
        ["unshare", "--pid", "--fork", *COMMAND, "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert findings(done.stdout)["processes"] == "BAD"
