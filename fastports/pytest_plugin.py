"""What the fixtures of the pytest plugin hand out. The plugin itself is ``pytest_fastports``.

Ports come from a hold, not from a look: no other test, worker, session or program can get them
between the fixture and the server's bind. See ``docs/pytest.md``.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from tempfile import TemporaryFile

import pytest

from . import Allocator, HandoffError, InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import IO, Any

    from . import PortBlock
    from .handoff import Child

__all__ = ["Ports", "Servers", "allocator", "show_outputs"]

_TAIL = 16384  # bytes of a server's output that a failure shows

_allocator_key = pytest.StashKey[Allocator]()
_servers_key = pytest.StashKey["list[Servers]"]()


def allocator(config: pytest.Config) -> Allocator:
    """The allocator of this session, made at its first use."""
    found = config.stash.get(_allocator_key, None)
    if found is None:
        text = config.getoption("--fastports-range") or config.getini("fastports_range")
        try:
            found = Allocator(range=text or None)
        except InvalidRequest as exc:
            raise pytest.UsageError(f"--fastports-range: {exc}") from exc
        config.stash[_allocator_key] = found
    return found


class Ports:
    """What the fixture ``ports`` is: call it for a block."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._stack = ExitStack()

    def __call__(self, size: int = 1, **options: Any) -> PortBlock:
        """Hold ``size`` contiguous ports, doors open, until the fixture ends.

        Servers that set SO_REUSEADDR (asyncio, http.server, uvicorn and nearly all others) bind
        them. ``close_holds()`` of the block lets in those that do not. ``options`` are those of
        ``fastports.allocate``.
        """
        block = self._stack.enter_context(self._allocator.allocate(size, **options))
        block.open_door()
        return block

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


class Servers:
    """What the fixture ``server`` is: call it to start one."""

    def __init__(self, allocator: Allocator, node: pytest.Item, name: str) -> None:
        self.name = name
        self._allocator = allocator
        self._stack = ExitStack()
        self._logs: list[tuple[str, IO[bytes]]] = []
        self._others = node.stash.setdefault(_servers_key, [])
        self._others.append(self)

    def __call__(
        self,
        argv: Sequence[str],
        *,
        size: int | None = None,
        protocol: str = "tcp",
        host: str | None = None,
        block: PortBlock | None = None,
        **options: Any,
    ) -> Child:
        """Start a program on ports of its own and wait until it listens on them.

        Parameters
        ----------
        argv
            Program and arguments, with ``{port}``, or ``{port0}``, ``{port1}``, ... and all that
            :func:`fastports.handoff.spawn` fills in.
        size
            Number of ports; None for as many as ``argv`` and ``env`` name.
        protocol, host
            As for ``fastports.allocate``.
        block
            Ports to use instead of new ones.
        **options
            For :func:`fastports.handoff.spawn`: ``env``, ``cwd``, ``wait``, ``timeout``, ...

        Returns
        -------
        fastports.handoff.Child
            It runs until the fixture ends. ``child.ports`` are its ports. What it prints is shown
            with a test that fails, unless ``stdout`` or ``stderr`` are given.

        Raises
        ------
        HandoffError
            It ended, or did not listen in time. Nothing of it is left.
        """
        __tracebackhide__ = True
        label = str(argv[0]).rpartition("/")[2][:32] if argv else ""
        if block is None:
            if size is None:
                size = _named(argv, options.get("env"))
            block = self._stack.enter_context(
                self._allocator.allocate(size, protocol=protocol, host=host, label=label)
            )
        if "stdout" not in options and "stderr" not in options:
            log = self._stack.enter_context(TemporaryFile())  # noqa: SIM115 - it is one
            options.update(stdout=log, stderr=log)
            self._logs.append((f"{label} on {block.first}", log))
        try:
            return self._stack.enter_context(block.spawn(argv, **options))
        except HandoffError as exc:  # what was called in there says nothing to the test's author
            raise exc.with_traceback(None) from None

    def outputs(self) -> Iterator[tuple[str, str]]:
        """Name and last output of each server that printed something."""
        for name, log in self._logs:
            size = os.fstat(log.fileno()).st_size
            text = os.pread(log.fileno(), _TAIL, max(size - _TAIL, 0)).decode("utf-8", "replace")
            if text:
                yield name, text

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._others.remove(self)
        self._stack.close()  # the last one first


def _named(argv: Sequence[str], env: Mapping[str, str] | None) -> int:
    """How many ports the command line and the environment name."""
    texts = [os.fsdecode(item) for item in (*argv, *(env or {}).values())]
    indices = [int(index) for text in texts for index in re.findall(r"\{port(\d{1,5})\}", text)]
    return max(indices, default=0) + 1


def show_outputs(item: pytest.Item, when: str) -> None:
    """Add what the servers that a test uses have printed to its report."""
    names: Sequence[str] = getattr(item, "fixturenames", ())
    for node in item.listchain():
        for servers in node.stash.get(_servers_key, ()):
            if servers.name in names:
                for server, text in servers.outputs():
                    item.add_report_section(when, f"output of {server}", text)
