"""The cluster registry: blocks recorded in etcd.

Nothing here is loaded by ``import fastports``; the etcd client (and gRPC) not before the first
claim. See ``docs/etcd.md`` for keys, guarantees and operations.
"""

from __future__ import annotations

from .registry import EtcdRegistry
from .upkeep import Finding, Remainder, diagnose, gc
from .watch import Change, Changes, Listing

__all__ = [
    "Change",
    "Changes",
    "EtcdRegistry",
    "Finding",
    "Listing",
    "Remainder",
    "diagnose",
    "gc",
]
