"""Every test leaves as many descriptors, children and threads as it found."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator

import pytest

# numpy is loaded by whichever test comes first; its BLAS would start a thread in that test
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


def _children() -> set[str]:
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found.update(file.read().split())
        except FileNotFoundError:
            continue  # that thread ended just now
    return found


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()} | set(os.listdir("/proc/self/task"))


def _surroundings() -> dict[str, object]:
    """What a test may change for itself, and must put back."""
    return {
        "network namespace": os.readlink("/proc/thread-self/ns/net"),
        "descriptor limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "user": os.geteuid(),
        "folder": os.getcwd(),
        "SIGINT handler": signal.getsignal(signal.SIGINT),
        "SIGTERM handler": signal.getsignal(signal.SIGTERM),
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    }


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("leaves_state"):
        yield
        return
    before = _descriptors(), _children(), _threads()
    surroundings = _surroundings()
    yield
    assert _surroundings() == surroundings
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        after = _descriptors(), _children(), _threads()
        left = [sorted(now - then) for now, then in zip(after, before, strict=True)]
        if not any(left):
            return
        if time.monotonic() > deadline:
            pytest.fail(
                f"left behind: descriptors {left[0]}, children {left[1]}, threads {left[2]}"
            )
        time.sleep(0.01)
