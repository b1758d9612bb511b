"""The command line's way to etcd: which one, what is said about it, and signals meanwhile."""

from __future__ import annotations

import os

from .options import whole
from .say import Usage, complain, printable, reworded, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    from ..etcd import EtcdRegistry
    from .options import Options

    T = TypeVar("T")
else:
    import _signal  # what signal is made of; the module around it costs 4 ms

__all__ = ["HELP", "NAMES", "Interrupted", "given", "registry", "telling", "undisturbed"]

HELP = """\
The ports of a whole cluster are recorded in etcd by

  fastports run --etcd etcd-0:2379,etcd-1:2379 -- serve --port {port}

and looked at with `ls`, `map`, `doctor` and `gc`, each with --etcd. ENDPOINTS
is host:2379, http(s)://host:2379 or [address]:2379, or several with commas;
--namespace N names a circle of launchers that keep off each other's ports.

  FASTPORTS_ETCD_ENDPOINTS  `run` records there without --etcd, too; for the
                            others the value of --etcd can be left out
  FASTPORTS_ETCD_NAMESPACE  the default of --namespace (else: default)
  FASTPORTS_ETCD_USER, FASTPORTS_ETCD_PASSWORD         login
  FASTPORTS_ETCD_CA, FASTPORTS_ETCD_CERT, FASTPORTS_ETCD_KEY  files of TLS
  FASTPORTS_ETCD_TTL        seconds until a dead owner's record ends (30)
  FASTPORTS_ETCD_ADVERTISE  the address that others reach the ports at
  FASTPORTS_ETCD_HOST_ID    what a port is exclusive to, instead of this boot
                            and network namespace; an address for Dynamo's keys

The ports are held by the kernel all the same: when etcd is away they stay held,
and are recorded again when it is back. Only a start needs it."""

NAMES = {"--etcd": "etcd", "--namespace": "namespace"}


class Interrupted(Exception):
    """A signal came that ends the command; the exit status says which."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def given(options: Options, *, environment: bool = False) -> bool:
    """Whether etcd is asked for; options that need it are wrong without.

    ``environment``: that it names endpoints is enough.
    """
    if "etcd" in options or (environment and from_environment()):
        return True
    for name in ("namespace", "watch"):
        if name in options:
            raise Usage(f"--{name} is for --etcd; add it.")
    return False


def registry(
    options: Options,
    *,
    every: bool = False,
    on_lost: Callable[[Any, Any], object] | None = None,
    on_restored: Callable[[Any], object] | None = None,
) -> EtcdRegistry:
    """The registry that the options and the environment tell of; nothing is connected yet.

    Parameters
    ----------
    every
        ``--namespace '*'`` is right here, and means all; the registry has its default then.
    """
    from ..etcd import EtcdRegistry  # 15 ms; the client and gRPC come with the first call

    if on_lost is None:  # not of `run`, whose program has this environment
        # Failed handshakes are gRPC's to log otherwise, four lines for one of ours.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    namespace = options["namespace"]
    if every and namespace == "*":
        namespace = None
    elif namespace == "*":
        raise Usage("--namespace takes one namespace here, not '*'.")
    return EtcdRegistry(
        options["etcd"] or None,
        namespace=namespace,
        ttl=whole(os.environ.get("FASTPORTS_ETCD_TTL") or "30", "FASTPORTS_ETCD_TTL", 2, 86400),
        on_lost=on_lost,
        on_restored=on_restored,
    )


def telling(*, quiet: bool) -> tuple[Callable[[Any, Any], object], Callable[[Any], object]]:
    """``on_lost`` and ``on_restored`` for ``run``: what becomes of the record, in a line each."""

    def on_lost(block: Any, error: Any) -> None:
        if "contested" in error.reason:  # two owners of a port are nothing to be quiet about
            complain(printable(reworded(str(error))))
        elif not quiet:
            say(printable(reworded(str(error))))

    def on_restored(block: Any) -> None:
        if not quiet:
            ports = f"{block.first}-{block.last}" if len(block) > 1 else f"{block.first}"
            say(f"etcd has the record of {ports} again.")

    return on_lost, on_restored


def undisturbed(work: Callable[[], T], signals: Sequence[int]) -> T:
    """Do work in a thread that takes no signal, as no thread that it starts will.

    gRPC's threads live as long as the process. Had they begun with signals unblocked, a SIGTERM
    that ``run`` is to pass on could reach one of them, and end the launcher instead.

    Parameters
    ----------
    signals
        Blocked from here on, in this thread too, for ``run`` to take with sigwaitinfo(2).

    Raises
    ------
    Interrupted
        At the first signal but SIGCHLD and SIGWINCH. The work is left to itself.
    """
    import threading  # 3 ms; the registry's threads need it anyway

    chld, winch = 17, 28
    found: list[T] = []
    failed: list[BaseException] = []
    main = threading.get_ident()
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, signals)

    def run() -> None:
        try:
            found.append(work())
        except BaseException as exc:
            failed.append(exc)
        finally:
            done.set()
            _signal.pthread_kill(main, chld)

    done = threading.Event()
    thread = threading.Thread(target=run, name="fastports-etcd-run", daemon=True)
    thread.start()
    try:
        while not done.is_set():
            number = _signal.sigwaitinfo(signals).si_signo
            if number not in (chld, winch):
                raise Interrupted(128 + number)
        thread.join()
        if failed:
            raise failed[0]
    except BaseException:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
        raise
    return found[0]


def from_environment() -> bool:
    """Whether the environment names endpoints."""
    return bool(os.environ.get("FASTPORTS_ETCD_ENDPOINTS"))
