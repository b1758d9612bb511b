"""The ``fastports`` command.

``fastports run -- true`` should add next to nothing to ``true``: each command lives in a module
of its own that is imported when it is asked for, and argparse (10 ms), signal (4), json (7) and
logging (11) stay out of the way of ``run``.
"""

from __future__ import annotations

import sys

from ..errors import FastportsError
from .say import Failure, Usage, complain, explain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

HELP = """\
usage: fastports COMMAND [OPTION...]

Finds free ports and holds them until the program they are meant for listens.

  run         hold ports, start a program on them, keep them until it ends
  ls          who has which ports on this host
  probe       whether ports are free, and how many are not
  map         a picture of a range of ports
  top         who holds and who listens, as it changes
  doctor      what works here, what does not, and what to type
  gc          clean up what dead owners left in etcd
  portserver  give ports to programs that only ask for a number

examples:
  fastports run -- python3 -m http.server {port}
  fastports run -n 8 --label decode-0 -- serve --port {port} --kv-base {port1}
  fastports ls
  fastports probe 8080 && echo free

`fastports COMMAND --help` tells more; `fastports help supervise` how programs
are restarted, `help etcd` how a cluster's ports are recorded; --version.
Exit status: 0, or what the command's help says; 1 for a refusal, 2 for wrong
usage, 130 for Ctrl-C."""


def _command(name: str) -> Callable[[Sequence[str]], int] | None:
    # a call of its own for each, so that tools that follow imports see them
    if name == "run":
        from .run import run

        return run
    if name == "ls":
        from .ls import ls

        return ls
    if name == "probe":
        from .probe import probe

        return probe
    if name == "map":
        from .map import map_

        return map_
    if name == "top":
        from .top import top

        return top
    if name == "doctor":
        from .doctor import doctor

        return doctor
    if name == "gc":
        from .gc import gc

        return gc
    if name == "portserver":
        from ..portserver import main as portserver

        return portserver
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status.

    Parameters
    ----------
    argv
        Arguments without the program's name; None takes those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(words)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except Usage as exc:
        name = f"fastports {words[0]}" if exc.command else "fastports"
        complain(f"{exc} See `{name} --help`.")
        return 2
    except Failure as exc:
        complain(str(exc))
        return exc.status
    except BrokenPipeError:
        return _no_reader()
    except (FastportsError, OSError) as exc:
        message, status = explain(exc)
        complain(message)
        return status


def _dispatch(words: list[str]) -> int:
    if words == ["help", "etcd"]:
        from .cluster import HELP as etcd

        print(etcd)
        return 0
    if words == ["help", "supervise"]:
        from .supervise import HELP as supervise

        print(supervise)
        return 0
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from .. import __version__

        print(f"fastports {__version__}")
        return 0
    command = _command(words[0])
    if command is None:
        what = "option" if words[0].startswith("-") else "command"
        raise Usage(f"there is no {what} {words[0]!r}.", command=False)
    return command(words[1:])


def _no_reader() -> int:
    """The reader of our output went away, as ``head`` does: end as SIGPIPE would end us."""
    import os

    # what is still buffered would raise again when the interpreter flushes it at exit
    sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(sink, 1)
    os.close(sink)
    return 141
