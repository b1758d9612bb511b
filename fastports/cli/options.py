"""Options from words: what argparse would do, without its 10 ms."""

from __future__ import annotations

from .say import Usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Options", "parse", "seconds", "whole"]


class Options:
    """The options given: ``options["range"]`` is the last value or None, ``all`` has every one."""

    def __init__(self) -> None:
        self._given: dict[str, list[str]] = {}

    def add(self, name: str, value: str) -> None:
        self._given.setdefault(name, []).append(value)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def __getitem__(self, name: str) -> str | None:
        return self._given[name][-1] if name in self._given else None

    def all(self, name: str) -> list[str]:
        return self._given.get(name, [])


def parse(
    words: Sequence[str],
    names: Mapping[str, str],
    *,
    flags: Sequence[str] = (),
    optional: Sequence[str] = (),
    leading: bool = False,
) -> tuple[Options, list[str]]:
    """Split words into options and the rest.

    Parameters
    ----------
    words
        The words after the command's name.
    names
        What each spelling means, such as ``{"-n": "size", "--size": "size"}``.
    flags
        The meanings that take no value.
    optional
        The meanings whose value may be left out: it is empty then. A word that begins with a dash
        or is made of a range's characters is none.
    leading
        Whether options end at the first other word, which begins somebody else's command line.

    Returns
    -------
    tuple[Options, list[str]]
        ``-h`` and ``--help`` are the flag ``help``; it ends the reading.
    """
    options = Options()
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            rest += queue
            break
        if word in ("-h", "--help"):
            options.add("help", "")
            break
        if word == "-" or not word.startswith("-"):
            rest.append(word)
            if leading:
                rest += queue
                break
            continue
        value: str | None = None
        if word.startswith("--"):
            spelling, equals, text = word.partition("=")
            value = text if equals else None
        else:
            spelling, value = word[:2], word[2:] or None
        name = names.get(spelling)
        if name is None:
            raise Usage(f"there is no option {spelling!r}.")
        if name in flags:
            if value is not None and word.startswith("--"):
                raise Usage(f"{spelling} takes no value.")
            if value is not None:
                queue.insert(0, f"-{value}")  # -qn8
            value = ""
        elif value is None and name in optional:
            following = queue[0] if queue else ""
            value = ""
            if following.strip("0123456789-") and not following.startswith("-"):
                value = queue.pop(0)
        elif value is None:
            if not queue or queue[0] == "--":
                raise Usage(f"{spelling} needs a value.")
            value = queue.pop(0)
        options.add(name, value)
    return options, rest


def whole(text: str, spelling: str, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``."""
    # int() alone would take spaces, signs, underscores and digits of other scripts
    if text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) <= high:
        return int(text)
    raise Usage(f"{spelling} takes a whole number from {low} to {high}, not {text!r}.")


def seconds(text: str, spelling: str) -> float:
    """A number of seconds, 0 or more."""
    if text.isascii() and text.replace(".", "", 1).isdigit() and len(text) <= 16:
        return float(text)
    raise Usage(f"{spelling} takes a number of seconds, 0 or more, not {text!r}.")
