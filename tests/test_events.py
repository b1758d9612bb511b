"""What happens is told once: in the log where there is one, and to hooks."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
from programs import program

import fastports
from fastports import aio, events, hooks
from fastports.hooks import Event


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Every record of the package, the loggers below it included."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[assignment,method-assign]
    logger = logging.getLogger("fastports")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


@pytest.fixture
def told() -> Iterator[list[Event]]:
    found: list[Event] = []
    with hooks.subscribe(found.append):
        yield found


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


def facts(record: logging.LogRecord) -> dict[str, object]:
    plain = {*vars(logging.makeLogRecord({})), "message", "asctime"}  # what formatters add, too
    return {name: value for name, value in vars(record).items() if name not in plain}


def outcome(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="tests"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# --- the log --------------------------------------------------------------------------------------


def test_each_state_of_a_block_is_one_record_with_its_facts(
    records: list[logging.LogRecord],
) -> None:
    with fastports.allocate(8, label="decode-0") as block:
        block.open_door()
        block.close_door(block.first)
    seen = [(r.name, r.levelname, facts(r).pop("event")) for r in records]
    assert seen == [
        ("fastports.ports", "DEBUG", "allocated"),
        ("fastports.ports", "DEBUG", "door_opened"),
        ("fastports.ports", "DEBUG", "door_closed"),
        ("fastports.ports", "DEBUG", "released"),
    ]
    assert facts(records[0]) == {
        "event": "allocated",
        "ports": f"{block.first}-{block.last}",
        "first": block.first,
        "last": block.last,
        "protocol": "tcp",
        "host": None,
        "label": "decode-0",
    }
    assert facts(records[2])["port"] == block.first
    assert records[0].getMessage() == f"{block.first}-{block.last}/tcp held"


def test_a_second_release_is_not_told(records: list[logging.LogRecord]) -> None:
    block = fastports.allocate(1)
    block.release()
    block.release()
    assert [facts(r)["event"] for r in records] == ["allocated", "released"]


def test_each_of_many_blocks_is_told(records: list[logging.LogRecord]) -> None:
    blocks = fastports.allocate_many({"http": 1, "nixl": 8})
    for block in blocks.values():
        block.release()
    assert [(facts(r)["event"], facts(r)["label"]) for r in records] == [
        ("allocated", "http"),
        ("allocated", "nixl"),
        ("released", "http"),
        ("released", "nixl"),
    ]


def test_a_refusal_is_told_with_its_cause_and_numbers(records: list[logging.LogRecord]) -> None:
    with fastports.allocate(4) as block:
        whole = f"{block.first}-{block.last}"
        with pytest.raises(fastports.PortsUnavailable) as refused:
            fastports.allocate(2, range=whole)
        with pytest.raises(fastports.PortsUnavailable):
            fastports.reserve(block.first)
    full, single = [facts(r) for r in records if r.levelname == "INFO"]
    assert (full["event"], full["cause"], full["error"]) == ("refused", "full", "PortsUnavailable")
    assert (full["range"], full["wanted"], full["busy"]) == (whole, 2, refused.value.busy)
    assert full["why"] == str(refused.value)
    assert single["cause"] in ("bound", "busy")  # what the kernel shows of a bound socket differs


def test_waiting_in_vain_is_one_refusal(told: list[Event]) -> None:
    with fastports.allocate(1) as block:
        with pytest.raises(fastports.AllocationTimeout):
            fastports.reserve(block.first, timeout=0.1)

        async def wait() -> None:
            with pytest.raises(fastports.AllocationTimeout):
                await aio.reserve(block.first, timeout=0.1)

        asyncio.run(wait())
    refusals = [event.facts["cause"] for event in told if event.name == "refused"]
    assert refusals == ["timeout", "timeout"]


def test_awaitable_allocators_tell_the_same(told: list[Event]) -> None:
    async def main() -> None:
        async with aio.allocate(2), aio.allocate_many({"a": 1}):
            with pytest.raises(fastports.InvalidRequest):
                await aio.allocate(70000)
            with pytest.raises(fastports.InvalidRequest):
                await aio.allocate_many({})

    asyncio.run(main())
    assert names(told) == [
        "allocated", "allocated", "refused", "refused", "released", "released",
    ]  # fmt: skip


def test_a_child_is_told_from_its_start_to_its_end(records: list[logging.LogRecord]) -> None:
    with fastports.allocate(1, label="web") as block:
        with block.spawn(program("server", "{port}"), handoff="door") as child:
            pass
        code = child.returncode
    by_event = {facts(r)["event"]: r for r in records}
    assert list(by_event) == [
        "allocated", "mode_chosen", "door_opened", "child_started", "door_closed",
        "child_listening", "child_exited", "released",
    ]  # fmt: skip
    for event in ("child_started", "child_listening", "child_exited"):
        record = by_event[event]
        assert (record.name, record.levelname) == ("fastports.handoff", "INFO")
        its = facts(record)
        assert (its["pid"], its["mode"], its["label"]) == (child.pid, "door", "web")
        assert its["program"] == sys.executable
    assert facts(by_event["child_listening"])["seconds"] == child.listened_after
    assert facts(by_event["child_listening"])["waited_for"] == [block.first]
    assert facts(by_event["child_exited"])["returncode"] == code


def test_a_child_that_does_not_come_up_is_told_with_the_error(
    records: list[logging.LogRecord],
) -> None:
    with fastports.allocate(1) as block, pytest.raises(fastports.HandoffError) as failed:
        block.spawn(program("fails", "{port}"), stderr=subprocess.DEVNULL)
    (record,) = [r for r in records if facts(r)["event"] == "handoff_failed"]
    assert (record.name, record.levelname) == ("fastports.handoff", "INFO")
    assert facts(record)["returncode"] == 3
    assert facts(record)["why"] == str(failed.value)


def test_a_stranger_behind_an_open_door_is_a_warning_with_its_socket(told: list[Event]) -> None:
    strangers: list[socket.socket] = []

    def enter(event: Event) -> None:
        stranger = socket.socket()
        strangers.append(stranger)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("", event.facts["first"]))
        stranger.listen()

    with fastports.allocate(1) as block:
        with (
            hooks.subscribe(enter, "door_opened"),
            pytest.raises(fastports.HandoffError),
        ):
            block.spawn(program("never", "{port}"), handoff="door")
        inode = os.fstat(strangers[0].fileno()).st_ino
        strangers[0].close()
    (steal,) = [event for event in told if event.name == "steal_seen"]
    assert steal.level == logging.WARNING
    assert (steal.facts["port"], steal.facts["inode"]) == (block.first, inode)


def test_without_logging_nothing_is_loaded_and_trouble_is_still_said() -> None:
    said = outcome(
        """
import sys
import fastports
from programs import program
with fastports.allocate(2, range="20000-29999") as block:
    block.open_door()
    try:
        fastports.reserve(block.first)
    except fastports.PortsUnavailable:
        pass
    with block.spawn(program("server", "{port}"), handoff="door", wait=[block.first]):
        pass
    try:
        block.spawn(program("fails", "{port}"), handoff="door", stderr=-3)
    except fastports.HandoffError:
        pass
print("logging" in sys.modules, "typing" in sys.modules, "fastports.hooks" in sys.modules)
from fastports import events
events.emit("range_doubtful", why="trouble")
print("logging" in sys.modules)
"""
    )
    assert said == "False False False\nTrue\ntrouble\n"


def test_level_and_logger_choose_what_is_logged(records: list[logging.LogRecord]) -> None:
    logging.getLogger("fastports.ports").setLevel(logging.INFO)
    try:
        with fastports.allocate(1) as block, block.spawn(program("server", "{port}")):
            pass
    finally:
        logging.getLogger("fastports.ports").setLevel(logging.NOTSET)
    assert {r.name for r in records} == {"fastports.handoff"}


# --- hooks ----------------------------------------------------------------------------------------


def test_a_hook_hears_the_events_it_asked_for_until_it_is_cancelled() -> None:
    heard: list[Event] = []
    subscription = hooks.subscribe(heard.append, "released")
    block = fastports.allocate(3, label="x")
    block.release()
    subscription.cancel()
    subscription.cancel()
    fastports.allocate(1).release()
    (event,) = heard
    assert (event.name, event.level) == ("released", 10)
    assert event.message == f"{block.first}-{block.last}/tcp released"
    assert event.facts["label"] == "x"


def test_what_a_hook_raises_is_logged_and_goes_no_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("the caller's mistake")

    with hooks.subscribe(broken), hooks.subscribe(heard.append):
        fastports.allocate(1).release()
    assert names(heard) == ["allocated", "released"]
    assert [record.name for record in caplog.records] == ["fastports.hooks"] * 2
    assert "the caller's mistake" in caplog.text


def test_a_hook_may_allocate_and_is_not_called_for_that() -> None:
    heard: list[str] = []

    def nested(event: Event) -> None:
        heard.append(event.name)
        fastports.allocate(1).release()

    with hooks.subscribe(nested):
        fastports.allocate(1).release()
    assert heard == ["allocated", "released"]


def test_an_interrupt_in_a_hook_leaves_no_port_held() -> None:
    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    before = fastports.stats().held
    with hooks.subscribe(interrupt, "allocated"), pytest.raises(KeyboardInterrupt):
        fastports.allocate(1)
    with hooks.subscribe(interrupt, "allocated"), pytest.raises(KeyboardInterrupt):
        fastports.allocate_many({"a": 2, "b": 3})
    assert fastports.stats().held == before


def test_what_a_finalizer_gives_back_is_told_with_the_next_event(told: list[Event]) -> None:
    block = fastports.allocate(2)
    lost = block.first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del block
        gc.collect()
    assert names(told) == ["allocated"]
    fastports.allocate(1).release()
    assert names(told) == ["allocated", "released", "allocated", "released"]
    assert told[1].facts["first"] == lost


def test_a_hook_hears_every_thread(told: list[Event]) -> None:
    def work() -> None:
        for _ in range(50):
            fastports.allocate(1).release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (names(told).count("allocated"), names(told).count("released")) == (200, 200)


def test_a_forked_child_inherits_its_hooks_and_can_change_them() -> None:
    reader, writer = os.pipe()
    with hooks.subscribe(lambda event: os.write(writer, event.name.encode() + b"\n")):
        pid = os.fork()
        if pid == 0:
            try:
                fastports.allocate(1).release()
                hooks.subscribe(print, "allocated").cancel()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "allocated\nreleased\n"


@pytest.mark.parametrize("words", [("allocatd",), ("allocated", "")])
def test_an_event_that_does_not_exist_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(fastports.InvalidRequest, match="there is no event"):
        hooks.subscribe(print, *words)
    with pytest.raises(fastports.InvalidRequest, match="cannot be called"):
        hooks.subscribe(None)  # type: ignore[arg-type]


def test_the_page_names_every_event_with_its_logger_and_level() -> None:
    from pathlib import Path

    page = (Path(__file__).parent.parent / "docs" / "seeing.md").read_text()
    rows = [line.split(" | ")[:3] for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        [f"| `{name}`", f"`fastports.{logger}`", logging.getLevelName(level)]
        for name, (logger, level, _) in events.EVENTS.items()
    ]
