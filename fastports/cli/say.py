"""What the command says, and how: its own lines, its errors, its words for the library's."""

from __future__ import annotations

import os
import sys

from ..errors import FastportsError, InvalidRequest
from ..ranges import spans

__all__ = ["Failure", "Usage", "complain", "explain", "printable", "reworded", "say", "spans"]


class Failure(Exception):
    """Ends the command with a message and an exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class Usage(Exception):
    """The command line is wrong: message, a hint at ``--help``, exit status 2."""

    def __init__(self, message: str, *, command: bool = True) -> None:
        super().__init__(message)
        self.command = command


def say(text: str) -> None:
    """A line of our own on stderr. Nobody reading it is no reason to fail."""
    data = f"fastports: {text}\n".encode("utf-8", "backslashreplace")
    try:  # noqa: SIM105 - contextlib costs 2 ms at import
        # in one piece, so that it stays whole among the lines of a program on the same terminal
        os.write(2, data)
    except OSError:
        pass


complain = say


def printable(text: str) -> str:
    """Foreign text made safe for a terminal: everything that is not printable becomes ``?``."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# The library's messages end in what to do in Python; here is what to do in a shell.
_WORDS = (
    (
        "(timeout=), or name the ports it does listen on (wait=[...]), or do not wait (wait=None).",
        "with --wait, or name the ports it listens on in its arguments, or use --wait 0.",
    ),
    ("through a daemon, pass wait=None.", "through a daemon, use --wait 0."),
    ("pass handoff='close'", "use --handoff close"),
    ("pass handoff='auto'", "use --handoff auto"),
    ("pass handoff='fd'", "use --handoff fd"),
    ("Pass handoff='broker'.", "Use --handoff broker."),
    ("Pass handoff='fd'.", "Use --handoff fd."),
    ("Pass handoff='close', or 'fd' for", "Use --handoff close, or fd for"),
    ("exclusive=True", "--exclusive"),
    ("listen=True", "--listen"),
    ("detach=True", "--detach"),
    (" Look at its output, mend it, and restart it.", " Look at its output, and mend it."),
    ("give password=, too", "set FASTPORTS_ETCD_PASSWORD, too"),
    ("give user=, too", "set FASTPORTS_ETCD_USER, too"),
    ("give cert=, too", "set FASTPORTS_ETCD_CERT, too"),
    ("give key=, too", "set FASTPORTS_ETCD_KEY, too"),
    ("give ca= the path", "set FASTPORTS_ETCD_CA to the path"),
    ("give cert= the path", "set FASTPORTS_ETCD_CERT to the path"),
    ("give key= the path", "set FASTPORTS_ETCD_KEY to the path"),
    ("give host_id=,", "set FASTPORTS_ETCD_HOST_ID,"),
    ("give ca= the certificate", "set FASTPORTS_ETCD_CA to the path of the certificate"),
    ("write https://, and give ca=", "write https://, and set FASTPORTS_ETCD_CA"),
    ("give user= and password=", "set FASTPORTS_ETCD_USER and FASTPORTS_ETCD_PASSWORD"),
    (
        "give one, or set FASTPORTS_ETCD_ENDPOINTS",
        "give it to --etcd, or set FASTPORTS_ETCD_ENDPOINTS",
    ),
    (", or a function that makes a client", ""),
    ("user= and password=", "FASTPORTS_ETCD_USER and FASTPORTS_ETCD_PASSWORD"),
    ("user=, password=", "FASTPORTS_ETCD_USER, FASTPORTS_ETCD_PASSWORD"),
    (", widen range=, or wait with timeout=.", ", or widen --range."),
    (", let allocate() choose, or wait with timeout=.", ", or leave --range out."),
    (", or wait with timeout=.", "."),
    (" Give '20000-29999', (20000, 29999) or one port,", " Give 20000-29999, or one port,"),
    ("Put longer descriptions into metadata.", "Shorten it."),
    (" or None for all addresses.", " or leave --host out for all addresses."),
    (" shows, or None.", " shows, or leave --host out."),
    (" Pass handoff='auto'.", " Use --handoff auto."),
    (" Allocate more ports, or name one", " Ask for more with -n, or name one"),
    (", or allocate outside the sandbox and pass the sockets in.", "."),
    (" or resource.setrlimit,", ","),
    ("argv names no program. Pass ['program', 'argument', ...].", "COMMAND is empty."),
    ("argv names {", "COMMAND names {"),
    ("widen range=", "widen --range"),
    ("host=", "--host "),
    ("handoff=", "--handoff "),
    ("range=", "--range "),
)


def reworded(text: str) -> str:
    """A message of the library with the command line's names for things."""
    # what follows reserves them for programs that say include_reserved=True, which no option does
    head, found, _ = text.partition("; choose a range outside it, or set: ")
    if found:
        text = f"{head}; choose one outside it."
    for library, shell in _WORDS:
        text = text.replace(library, shell)
    return text


def explain(exc: FastportsError | OSError) -> tuple[str, int]:
    """Message and exit status for an error of the library or the system."""
    if isinstance(exc, FastportsError):
        return reworded(str(exc)), 2 if isinstance(exc, InvalidRequest) else 1
    text = exc.strerror or str(exc)
    if exc.filename is not None:
        text = f"{printable(os.fsdecode(exc.filename))}: {text}"
    return f"{text}.", 1


def tolerant_output() -> None:
    """Have letters that stdout's encoding lacks written as escapes, not raised as errors."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
