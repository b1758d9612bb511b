"""A launcher written for Dynamo's port allocator, as a program that is told what to allocate.

``dynamo_launcher.py old`` imports the ancestor, ``dynamo_launcher.py new '{"etcd": ...}'`` imports
``fastports.compat.dynamo`` in its place and gives these options to the runtime; the rest is the
same. Each line of standard input is a request, each line of standard output its answer. At the end
of the input the program ends, without a word to the allocator.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any


def ancestor() -> tuple[Any, ModuleType]:
    """Its binding, and its ports module by itself: the package around that wants vLLM."""
    path = Path(sysconfig.get_path("purelib"), "dynamo", "vllm", "ports.py")
    spec = importlib.util.spec_from_file_location("ancestors_ports", path)
    assert spec is not None and spec.loader is not None
    ports = sys.modules["ancestors_ports"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ports)
    return importlib.import_module("dynamo.runtime").DistributedRuntime, ports


async def main(which: str, options: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    if which == "old":
        make, ports = ancestor()
    else:
        ports = importlib.import_module("fastports.compat.dynamo")
        make = ports.DistributedRuntime
        if "ttl" in options:
            options["on_lost"] = lambda block, error: say({"lost": block.first})
            options["on_restored"] = lambda block: say({"restored": block.first})
    runtime = make(loop, False, **options)
    say("ready")
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            say(await allocate(ports, runtime, **json.loads(line)))
        except Exception as exc:
            say({"error": [cls.__name__ for cls in type(exc).__mro__], "text": str(exc)})


async def allocate(
    ports: Any, runtime: Any, namespace: str, low: int, high: int, size: int = 1, count: int = 1,
    worker_id: str = "worker", reason: str = "test",
) -> list[list[int]]:  # fmt: skip
    request = ports.PortAllocationRequest(
        metadata=ports.PortMetadata(worker_id=worker_id, reason=reason),
        port_range=ports.DynamoPortRange(min=low, max=high),
        block_size=size,
    )
    return [
        await ports.allocate_and_reserve_port_block(runtime, namespace, request)
        for _ in range(count)
    ]


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
