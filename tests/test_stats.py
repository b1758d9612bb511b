"""``stats()`` counts what this process did."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
from typing import Any

import pytest
from programs import program

import fastports
from fastports import Stats


class Difference:
    """What was added since it was made."""

    def __init__(self) -> None:
        self._before = fastports.stats()

    def __getattr__(self, name: str) -> Any:
        before, after = getattr(self._before, name), getattr(fastports.stats(), name)
        if hasattr(after, "items"):
            return {key: n - before[key] for key, n in after.items() if n != before[key]}
        return after - before


def test_blocks_ports_and_what_is_held_are_counted() -> None:
    done = Difference()
    blocks = [fastports.allocate(8), *fastports.allocate_many({"a": 1, "b": 2}).values()]
    assert (done.allocations, done.ports, done.held, done.held_ports) == (3, 11, 3, 11)
    for block in blocks:
        block.release()
    assert (done.allocations, done.ports, done.held, done.held_ports) == (3, 11, 0, 0)


def test_each_port_that_is_tried_is_a_probe() -> None:
    done = Difference()
    with fastports.allocate(20) as block:
        assert done.probes >= 20
        so_far = done.probes
        with pytest.raises(fastports.PortsUnavailable) as refused:
            fastports.allocate(1, range=(block.first, block.last))
        assert done.probes - so_far == refused.value.probed == 20
        fastports.probe(block.ports)
        assert done.probes - so_far == 40


def test_refusals_are_counted_by_cause() -> None:
    done = Difference()
    with fastports.allocate(2) as block:
        for attempt in (
            lambda: fastports.allocate(1, range=(block.first, block.last)),
            lambda: fastports.allocate(1, range=(block.first, block.last), timeout=0.01),
            lambda: fastports.allocate(0),
            lambda: fastports.allocate_many({"a": 2}, range=(block.first, block.last)),
        ):
            with pytest.raises(fastports.FastportsError):
                attempt()
    assert done.refusals == {"full": 2, "timeout": 1, "invalid": 1}


def test_no_addition_of_any_thread_is_lost() -> None:
    done = Difference()
    rounds = 300

    def work() -> None:
        for _ in range(rounds):
            fastports.allocate(1).release()
            with pytest.raises(fastports.InvalidRequest):
                fastports.allocate(-1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.allocations == done.ports == 8 * rounds
    assert done.refusals == {"invalid": 8 * rounds}


def test_a_forked_child_counts_from_zero_and_adds_nothing_to_its_parent() -> None:
    with fastports.allocate(3):
        done = Difference()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                with fastports.allocate(2):
                    os.write(writer, pickle.dumps(fastports.stats()))
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            theirs: Stats = pickle.loads(pipe.read())
        os.waitpid(pid, 0)
        assert (theirs.pid, theirs.allocations, theirs.ports) == (pid, 1, 2)
        assert (theirs.held, theirs.held_ports) == (1, 2)
        assert (done.pid, done.allocations) == (0, 0)


def test_children_and_the_time_until_they_listen_are_counted() -> None:
    done = Difference()
    before = fastports.stats().handoff
    with fastports.allocate(1) as block:
        with block.spawn(program("server", "{port}"), handoff="door") as child:
            child.wait_listening()  # once more, and not counted again
            after = fastports.stats().handoff
        with pytest.raises(fastports.HandoffError):
            block.spawn(program("fails", "{port}"), handoff="close", stderr=subprocess.DEVNULL)
    assert done.children == {"door": 1, "close": 1}
    assert (done.listening, done.exited, done.failed, done.steals) == (1, 2, 1, 0)
    assert after.count == before.count + 1 == sum(after.counts)
    assert child.listened_after is not None
    assert after.sum - before.sum == pytest.approx(child.listened_after, abs=1e-5)
    (bucket,) = [i for i, n in enumerate(after.counts) if n != before.counts[i]]
    assert child.listened_after <= [*after.bounds, float("inf")][bucket]
    assert bucket == 0 or child.listened_after > after.bounds[bucket - 1]


def test_a_snapshot_does_not_change() -> None:
    snapshot = fastports.stats()
    copy = pickle.loads(pickle.dumps(snapshot))
    fastports.allocate(1).release()
    assert snapshot == copy != fastports.stats()
    for change in (
        lambda: setattr(snapshot, "allocations", 0),
        lambda: delattr(snapshot, "allocations"),
        lambda: setattr(snapshot.handoff, "count", 0),
    ):
        with pytest.raises(AttributeError, match="does not change"):
            change()  # type: ignore[no-untyped-call]
    refusals: Any = snapshot.refusals
    for name, values in (("update", [{"full": 1}]), ("__setitem__", ["full", 1]), ("clear", [])):
        with pytest.raises(TypeError, match="does not change"):
            getattr(refusals, name)(*values)


def test_a_snapshot_is_ready_for_json() -> None:
    import json

    text = json.dumps(fastports.stats().as_dict())
    assert json.loads(text)["handoff"]["bounds"][-1] == 300.0
