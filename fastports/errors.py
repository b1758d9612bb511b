"""What fastports raises.

Every error carries its facts as attributes, survives pickling, and its message ends in what to do.
This module imports nothing.
"""

from __future__ import annotations

__all__ = [
    "AllocationTimeout",
    "BindDenied",
    "BlockReleased",
    "DescriptorLimit",
    "FastportsError",
    "HandoffError",
    "InvalidRequest",
    "LeaseLost",
    "NotOwner",
    "PortsUnavailable",
    "PrivilegedPort",
    "RegistryDenied",
    "RegistryError",
    "RegistryTimeout",
    "RegistryUnavailable",
]


_SCALARS = (str, int, float, complex, bool, bytes, type(None))


def _portable(value: object) -> object:
    """``value`` where any process can have it, else the text that shows it."""
    items = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    if all(type(item) in _SCALARS for item in items):
        return value
    try:
        return repr(value)
    except RecursionError:
        return f"<{type(value).__name__}>"


def _rebuild(cls: type[FastportsError], message: str, facts: dict[str, object]) -> FastportsError:
    return cls(message, **facts)


class FastportsError(Exception):
    """Base of every error of this package.

    Parameters
    ----------
    message
        One sentence or two; the last one says what to do.
    **facts
        Kept as attributes of the error. Every class names its facts and their defaults.
    """

    #: The facts of the class and the value each has when the raiser does not know it.
    _facts: dict[str, object] = {}

    def __init__(self, message: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        merged: dict[str, object] = {}
        for cls in reversed(type(self).__mro__):
            merged.update(cls.__dict__.get("_facts", {}))
        merged.update(facts)
        for name, value in merged.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        facts = {key: _portable(value) for key, value in self.__dict__.items() if key != "message"}
        if isinstance(self, OSError):
            facts["errno"] = self.errno  # lives in a slot of OSError, not in __dict__
        return _rebuild, (type(self), self.message, facts)


class InvalidRequest(FastportsError, ValueError):
    """A size, range, address, label, namespace or other argument that cannot be served.

    Raised before any port is probed. ``argument`` names the argument, ``value`` is what it was.
    """

    argument: str | None
    value: object
    _facts = {"argument": None, "value": None}


class PortsUnavailable(FastportsError):
    """Nothing fits: the whole range was looked at and no block of the wanted size is free.

    Attributes
    ----------
    range
        The range searched, as text (``"20000-29999"``).
    wanted
        Ports asked for.
    protocol, host
        As asked; ``host`` is None for the wildcard in every family.
    probed
        Distinct ports that were bound, or tried, in this call.
    busy
        Distinct ports found taken (EADDRINUSE, or marked by another fastports user).
    denied
        Ports left out because binding them needs a privilege.
    reserved
        Ports left out because of ``net.ipv4.ip_local_reserved_ports`` or the ephemeral range.
    recorded
        Ports left out because a registry has another owner for them.
    time_wait
        Busy ports on which the kernel shows nothing but connections in TIME_WAIT.
    longest_free
        The longest stretch of free ports seen by this call (ports it need not probe do not count).
    cause
        For a single port: ``"listening"``, ``"connected"``, ``"bound"``, ``"time_wait"``,
        ``"marked"`` or ``"busy"`` where the kernel does not tell; else None.
    """

    range: str
    wanted: int
    protocol: str
    host: str | None
    probed: int
    busy: int
    denied: int
    reserved: int
    recorded: int
    time_wait: int
    longest_free: int
    cause: str | None
    _facts = {
        "range": "",
        "wanted": 0,
        "protocol": "tcp",
        "host": None,
        "probed": 0,
        "busy": 0,
        "denied": 0,
        "reserved": 0,
        "recorded": 0,
        "time_wait": 0,
        "longest_free": 0,
        "cause": None,
    }


class PrivilegedPort(PortsUnavailable, PermissionError):
    """Every fitting port is below ``net.ipv4.ip_unprivileged_port_start`` and needs a privilege."""

    unprivileged_start: int
    _facts = {"unprivileged_start": 1024}


class AllocationTimeout(FastportsError, TimeoutError):
    """The budget ran out before ports came free; carries the facts of the last refusal.

    ``timeout`` and ``elapsed`` are seconds, ``attempts`` counts the searches; the other attributes
    are those of :class:`PortsUnavailable`.
    """

    timeout: float
    elapsed: float
    attempts: int
    range: str
    wanted: int
    protocol: str
    host: str | None
    probed: int
    busy: int
    denied: int
    reserved: int
    recorded: int
    time_wait: int
    longest_free: int
    cause: str | None
    _facts = {"timeout": 0.0, "elapsed": 0.0, "attempts": 0, **PortsUnavailable._facts}


class BindDenied(FastportsError, PermissionError):
    """bind(2) or socket(2) is refused by a sandbox (seccomp, LSM, BPF), not by an occupant.

    ``port`` is the first port refused, ``errno`` what the kernel answered.
    """

    port: int
    _facts = {"port": 0, "errno": None}


class DescriptorLimit(FastportsError, OSError):
    """Not enough file descriptors (or kernel memory for sockets) for the block.

    ``needed`` descriptors would have been opened, ``open`` are in use, ``soft`` and ``hard`` are
    the limits (RLIMIT_NOFILE).
    """

    needed: int
    open: int
    soft: int
    hard: int
    _facts = {"needed": 0, "open": 0, "soft": 0, "hard": 0, "errno": None}


class NotOwner(FastportsError):
    """Another process (after a fork) or another token owns the block.

    ``owner`` is who owns it, ``caller`` who asked.
    """

    owner: object
    caller: object
    _facts = {"owner": None, "caller": None}


class BlockReleased(FastportsError):
    """The block was released; its ports may be anybody's by now. ``range`` tells which."""

    range: str
    _facts = {"range": ""}


class HandoffError(FastportsError):
    """The program did not come up on its ports, or could not be started in this mode.

    Attributes
    ----------
    returncode
        Exit status of the child (negative: minus the signal), None if it never ran or still ran.
    elapsed
        Seconds from the start of the child to the error.
    port
        The port in question, where there is one.
    inode
        Inode of a socket of somebody else who listens on that port, else None.
    stderr
        The last lines the child wrote to its standard error, if it was captured.
    mode
        The hand-off mode in use.
    """

    returncode: int | None
    elapsed: float
    port: int | None
    inode: int | None
    stderr: str
    mode: str | None
    _facts = {
        "returncode": None,
        "elapsed": 0.0,
        "port": None,
        "inode": None,
        "stderr": "",
        "mode": None,
    }


class RegistryError(FastportsError):
    """A registry could not do its work.

    ``retryable`` tells whether the same call may go through later; ``outcome`` is ``"not-applied"``
    when the registry certainly holds nothing of the call, ``"unknown"`` otherwise.
    """

    retryable: bool
    outcome: str
    endpoint: str | None
    _facts = {"retryable": False, "outcome": "not-applied", "endpoint": None}


class RegistryUnavailable(RegistryError, ConnectionError):
    """The registry cannot be reached. ``endpoint`` names it."""

    _facts = {"retryable": True}


class RegistryTimeout(RegistryError, TimeoutError):
    """The registry did not answer within the budget."""

    _facts = {"retryable": True, "outcome": "unknown"}


class RegistryDenied(RegistryError, PermissionError):
    """The registry refused the user, the password or the key range."""


class LeaseLost(RegistryError):
    """The lease under which the ports were recorded is gone; ``reason`` says why."""

    reason: str
    _facts = {"reason": ""}
