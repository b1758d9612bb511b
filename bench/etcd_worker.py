"""Allocates blocks that etcd records, when told; answers with how long each took and where it is.

They are released when it is told again: until then nobody else may have been given one of them.

etcd_worker.py ENDPOINT NAMESPACE RANGE SIZE
"""

from __future__ import annotations

import json
import sys
import time

import fastports
from fastports.etcd import EtcdRegistry

endpoint, namespace, ports, size = sys.argv[1:]
with EtcdRegistry(endpoint, namespace=namespace, timeout=30.0) as registry:
    allocator = fastports.Allocator(registry=registry, range=ports)
    allocator.allocate(int(size)).release()  # warm
    print("ready", flush=True)
    blocks: list[fastports.PortBlock] = []
    for line in sys.stdin:
        while blocks:
            blocks.pop().release()
        took = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            blocks.append(allocator.allocate(int(size)))
            took.append(time.perf_counter() - begin)
        print(json.dumps([took, [block.first for block in blocks]]), flush=True)
