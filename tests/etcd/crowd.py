"""One launcher of a crowd, as a program: what it has goes out as JSON, a line for each answer.

``crowd.py allocate ENDPOINT NAMESPACE RANGE SIZE COUNT`` allocates blocks with real sockets and
keeps them; the word ``thin`` on standard input has it release every second one.
``crowd.py operate ENDPOINT NAMESPACE SEED`` claims and releases overlapping blocks from four
threads until it is told ``stop``, without sockets, so that only etcd keeps their owners apart.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from types import SimpleNamespace
from typing import Any

import fastports
from fastports.errors import PortsUnavailable, RegistryError
from fastports.etcd import EtcdRegistry
from fastports.registry import Owner
from fastports.retry import Retry

#: Where ``operate`` claims: few ports, so that the blocks of different owners overlap.
FIRST, LAST = 20000, 20063
THREADS = 4


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def allocate(endpoint: str, namespace: str, ports: str, size: int, count: int) -> None:
    with EtcdRegistry(endpoint, namespace=namespace, timeout=30.0) as registry:
        allocator = fastports.Allocator(registry=registry, range=ports)
        say("ready")
        sys.stdin.readline()
        blocks = []
        refused = 0
        for _ in range(count):
            try:
                blocks.append(allocator.allocate(size))
            except PortsUnavailable:
                refused += 1
        say({"refused": refused, "firsts": [block.first for block in blocks]})
        for line in sys.stdin:
            if line.strip() == "thin":
                for block in blocks[::2]:
                    block.release()
                blocks = blocks[1::2]
            say({"states": sorted({b.state for b in blocks}), "firsts": [b.first for b in blocks]})


def operate(endpoint: str, namespace: str, seed: int) -> None:
    registry = EtcdRegistry(
        endpoint, namespace=namespace, host_id="10.0.0.1", ttl=2, timeout=20.0,
        retry=Retry(1000, base=0.02, cap=0.2),
    )  # fmt: skip
    lock = threading.Lock()
    claimed: list[tuple[str, int, int]] = []
    kept: list[Any] = []
    errors: list[str] = []
    stopped = threading.Event()
    operations = 0

    def work(number: int) -> None:
        nonlocal operations
        draw = random.Random(seed * THREADS + number)
        mine: list[Any] = []
        while not stopped.wait(draw.random() * 0.02):
            with lock:
                operations += 1
            if mine and draw.random() < 0.5:
                registry.release([mine.pop(draw.randrange(len(mine)))])
                continue
            size = draw.randint(1, 8)
            first = draw.randint(FIRST, LAST - size + 1)
            block = SimpleNamespace(
                first=first, last=first + size - 1, protocol="tcp", host=None, label=f"{seed}",
                metadata={}, owner=Owner(os.getpid(), 1),
            )  # fmt: skip
            try:
                refused = registry.claim([block], search=(FIRST, LAST), timeout=None)
            except RegistryError as exc:
                with lock:
                    errors.append(f"{type(exc).__name__} {exc.outcome}")
                continue
            if not refused:
                mine.append(block)
                with lock:
                    claimed.append((block.owner.token, first, size))
        with lock:
            kept.extend(mine)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    say("ready")
    sys.stdin.readline()
    stopped.set()
    for thread in threads:
        thread.join()
    say({"operations": operations, "claimed": claimed, "errors": errors})
    for _ in sys.stdin:
        say([(b.owner.token, b.first, b.last - b.first + 1, registry.state(b)) for b in kept])
    registry.close()


if __name__ == "__main__":
    mode, endpoint, namespace, *rest = sys.argv[1:]
    if mode == "allocate":
        allocate(endpoint, namespace, rest[0], int(rest[1]), int(rest[2]))
    else:
        operate(endpoint, namespace, int(rest[0]))
