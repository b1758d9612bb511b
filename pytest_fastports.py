"""The pytest plugin ``fastports``: fixtures for tests that need ports.

A module beside the package, because pytest loads plugins into every suite, and rewrites the
assertions of what it loads: a suite without these fixtures pays for this file and no more. What
they do is in :mod:`fastports.pytest_plugin`.
"""

from __future__ import annotations

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    import fastports
    from fastports.pytest_plugin import Ports, Servers

    Scope = Literal["function", "module", "session"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastports", "ports for tests")
    text = "range of the ports that fixtures hand out, such as 30000-30999"
    group.addoption("--fastports-range", metavar="FIRST-LAST", help=text)
    parser.addini("fastports_range", text, default="")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fastports-range") or config.getini("fastports_range"):
        from fastports.pytest_plugin import allocator

        allocator(config)  # a bad range is told before the first test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None:
        import sys

        plugin = sys.modules.get("fastports.pytest_plugin")
        if plugin is not None:
            plugin.show_outputs(item, call.when)


def _fixtures(scope: Scope, prefix: str) -> dict[str, object]:
    @pytest.fixture(scope=scope, name=prefix + "port")
    def port(request: pytest.FixtureRequest) -> Iterator[int]:
        """A TCP port, held; a server that sets SO_REUSEADDR, as nearly all do, binds it."""
        from fastports.pytest_plugin import allocator

        with allocator(request.config).allocate(1) as block:
            block.open_door()
            # a plain int: getaddrinfo(3) in Python 3.11 takes no other
            yield block.first

    @pytest.fixture(scope=scope, name=prefix + "udp_port")
    def udp_port(request: pytest.FixtureRequest) -> Iterator[int]:
        """A UDP port, marked as taken; any server binds it."""
        from fastports.pytest_plugin import allocator

        with allocator(request.config).allocate(1, protocol="udp") as block:
            block.close_holds()  # hardly a UDP server sets SO_REUSEADDR
            yield block.first

    @pytest.fixture(scope=scope, name=prefix + "ports")
    def ports(request: pytest.FixtureRequest) -> Iterator[Ports]:
        """A factory: ``ports(8)`` is a block of 8 contiguous ports, held for servers."""
        from fastports.pytest_plugin import Ports, allocator

        with Ports(allocator(request.config)) as factory:
            yield factory

    @pytest.fixture(scope=scope, name=prefix + "port_block")
    def port_block(request: pytest.FixtureRequest) -> Iterator[fastports.PortBlock]:
        """8 ports, or ``parametrize("port_block", [32], indirect=True)``; their door is closed."""
        from fastports.pytest_plugin import allocator

        with allocator(request.config).allocate(getattr(request, "param", 8)) as block:
            yield block

    @pytest.fixture(scope=scope, name=prefix + "server")
    def server(request: pytest.FixtureRequest) -> Iterator[Servers]:
        """Starts programs: ``server(["python3", "-m", "http.server", "{port}"])``."""
        from fastports.pytest_plugin import Servers, allocator

        with Servers(allocator(request.config), request.node, prefix + "server") as servers:
            yield servers

    return {
        "_" + prefix + "port": port,
        "_" + prefix + "udp_port": udp_port,
        "_" + prefix + "ports": ports,
        "_" + prefix + "port_block": port_block,
        "_" + prefix + "server": server,
    }


# pytest finds fixtures among the names of a plugin
globals().update(_fixtures("function", ""))
globals().update(_fixtures("module", "module_"))
globals().update(_fixtures("session", "session_"))
