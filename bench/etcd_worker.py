"""Allocates blocks that etcd records, when told; answers with how long each took and where it is.

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
    for line in sys.stdin:
        blocks = []
        took = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            blocks.append(allocator.allocate(int(size)))
            took.append(time.perf_counter() - begin)
        print(json.dumps([took, [block.first for block in blocks]]), flush=True)
        for block in blocks:
            block.release()
