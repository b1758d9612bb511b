"""Find free ports and hold them until the program they are meant for is listening.

>>> import fastports
>>> with fastports.allocate(8) as block:
...     len(block)
8
"""

from __future__ import annotations

try:
    from . import _core
except ImportError as exc:
    raise ImportError(
        "the compiled core of fastports (fastports._core) is missing or was built for another"
        " Python. Build it with: pip install --force-reinstall fastports, or in a checkout:"
        " pip install -e ."
    ) from exc
del _core

from .allocator import Allocator, PortState
from .block import PortBlock
from .errors import (
    AllocationTimeout,
    BindDenied,
    BlockReleased,
    DescriptorLimit,
    FastportsError,
    HandoffError,
    InvalidRequest,
    LeaseLost,
    NotOwner,
    PortsUnavailable,
    PrivilegedPort,
    RegistryDenied,
    RegistryError,
    RegistryTimeout,
    RegistryUnavailable,
)
from .host import entries
from .ranges import PortRange
from .registry import Entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import hooks
    from .activation import adopt
    from .counts import Stats, stats
    from .passing import receive
    from .supervisor import Supervisor

__version__ = "0.1.0"

__all__ = [
    "AllocationTimeout",
    "Allocator",
    "BindDenied",
    "BlockReleased",
    "DescriptorLimit",
    "Entry",
    "FastportsError",
    "HandoffError",
    "InvalidRequest",
    "LeaseLost",
    "NotOwner",
    "PortBlock",
    "PortRange",
    "PortState",
    "PortsUnavailable",
    "PrivilegedPort",
    "RegistryDenied",
    "RegistryError",
    "RegistryTimeout",
    "RegistryUnavailable",
    "Stats",
    "Supervisor",
    "adopt",
    "allocate",
    "allocate_many",
    "entries",
    "hooks",
    "probe",
    "receive",
    "reserve",
    "stats",
]

# The allocator behind the functions below: no setting of its own, one for the process.
_default = Allocator()
allocate = _default.allocate
reserve = _default.reserve
allocate_many = _default.allocate_many
probe = _default.probe


def __getattr__(name: str) -> object:
    # what not every launcher needs
    if name == "adopt":
        from .activation import adopt

        return adopt
    if name == "receive":
        from .passing import receive

        return receive
    if name == "Supervisor":  # threads cost 3 ms
        from .supervisor import Supervisor

        return Supervisor
    if name in ("stats", "Stats"):
        from . import counts

        return getattr(counts, name)
    if name == "hooks":
        import fastports.hooks as module  # `from . import` would ask here again

        return module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
