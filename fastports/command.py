"""What a child is started with: its command line and environment, with our ports filled in.

Everything is checked and turned into the bytes that execve(2) takes before anything is touched.
"""

from __future__ import annotations

import os

from .errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from .block import PortBlock

    Text: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

__all__ = ["FIRST_DESCRIPTOR", "Command", "number"]

#: Where the sockets are in a child that gets them: sd_listen_fds(3).
FIRST_DESCRIPTOR = 3


class Command:
    """A command line ready for the kernel.

    Attributes
    ----------
    args
        The arguments with ports filled in, as text, for people and for ``Child.args``.
    argv, env, programs
        What execve takes; ``programs`` are the paths to try in turn.
    cwd
        Directory for the child, or None.
    named
        The ports that arguments and environment name, ascending; all of the block's when they name
        none, or name the block as a whole (``{ports}``, ``{last}``).
    """

    __slots__ = ("args", "argv", "cwd", "env", "named", "programs")

    def __init__(
        self,
        block: PortBlock,
        argv: Sequence[Text],
        env: Mapping[str, str] | Mapping[bytes, bytes] | None,
        cwd: Text | None,
        extra: Mapping[bytes, bytes],
        *,
        descriptors: int = 0,
    ) -> None:
        if isinstance(argv, (str, bytes, os.PathLike)):
            raise InvalidRequest(
                f"argv is {argv!r}: a list of arguments is wanted, no shell reads them. Pass"
                " ['program', 'argument', ...].",
                argument="argv",
                value=argv,
            )
        fill = _Placeholders(block, descriptors)
        self.argv: list[bytes] = [fill(_bytes(item, "argv"), "argv") for item in _items(argv)]
        if not self.argv or not self.argv[0]:
            raise InvalidRequest(
                "argv names no program. Pass ['program', 'argument', ...].",
                argument="argv",
                value=argv,
            )
        self.args: list[str] = [os.fsdecode(item) for item in self.argv]
        self.cwd: bytes | None = None if cwd is None else _bytes(cwd, "cwd")
        if env is None:
            variables = dict(os.environb)
        else:
            variables = {}
            for key, value in _pairs(env):
                name = _bytes(key, "env")
                if not name or b"=" in name:
                    raise InvalidRequest(
                        f"env has a variable named {key!r}. Names are not empty and have no '='.",
                        argument="env",
                        value=key,
                    )
                variables[name] = fill(_bytes(value, "env"), "env")
        self.named: list[int] = fill.named()
        self.programs: list[bytes] = _candidates(self.argv[0], variables.get(b"PATH"))
        variables.update(extra)
        self.env: list[bytes] = [name + b"=" + value for name, value in variables.items()]

    def check_program(self) -> None:
        """Raise what exec would raise for a program that is missing or may not be executed.

        For a hand-off that has to give something up before exec.
        """
        found: OSError | None = None
        for program in self.programs:
            path = program if self.cwd is None else os.path.join(self.cwd, program)
            if os.access(path, os.X_OK, effective_ids=os.access in os.supports_effective_ids):
                if not os.path.isdir(path):
                    return
                found = found or PermissionError(13, "Permission denied", self.args[0])
            elif os.access(path, os.F_OK):
                found = found or PermissionError(13, "Permission denied", self.args[0])
        raise found or FileNotFoundError(2, "No such file or directory", self.args[0])


def number(value: object, argument: str) -> float:
    """A count of seconds, zero or more; anything else is an InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise InvalidRequest(
            f"{argument}={value!r} is no number of seconds. Pass zero or more"
            + (", or None for no limit." if argument == "timeout" else "."),
            argument=argument,
            value=value,
        )
    return float(value)


def _items(argv: Sequence[Text]) -> list[Text]:
    try:
        return list(argv)
    except TypeError:
        raise InvalidRequest(
            f"argv is {argv!r}. Pass a list: ['program', 'argument', ...].",
            argument="argv",
            value=argv,
        ) from None


def _pairs(env: Mapping[str, str] | Mapping[bytes, bytes]) -> list[tuple[Text, Text]]:
    try:
        return list(env.items())
    except AttributeError:
        raise InvalidRequest(
            f"env is {env!r}. Pass a dict of strings, or None to inherit the environment.",
            argument="env",
            value=env,
        ) from None


def _bytes(item: object, argument: str) -> bytes:
    try:
        text = os.fsencode(item)  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):
        raise InvalidRequest(
            f"{argument} contains {item!r}, which is no text. Pass str, bytes or a path.",
            argument=argument,
            value=item,
        ) from None
    if b"\0" in text:
        raise InvalidRequest(
            f"{argument} contains {item!r} with a NUL byte, which no program can be given. Remove"
            " it.",
            argument=argument,
            value=item,
        )
    return text


def _candidates(program: bytes, path: bytes | None) -> list[bytes]:
    if b"/" in program:
        return [program]
    if path is None:
        path = os.fsencode(os.defpath)
    return [os.path.join(directory, program) for directory in path.split(b":")]


def _digits(text: bytes) -> int:
    """The number that ``text`` spells, 0 for anything else; at most four digits are looked at."""
    return int(text) if 0 < len(text) <= 4 and text.isdigit() else 0


class _Placeholders:
    """Fills in ``{port}`` and its kin and remembers which ports were named.

    Only a brace pair around one of these names is a placeholder; every other brace stays as it is,
    because JSON is a common argument.
    """

    def __init__(self, block: PortBlock, descriptors: int) -> None:
        self.block = block
        self.descriptors = descriptors
        self.indices: set[int] = set()
        self.whole = False

    def __call__(self, text: bytes, argument: str) -> bytes:
        if b"{" not in text:
            return text
        head, *rest = text.split(b"{")
        parts = [head]
        for piece in rest:
            name, brace, tail = piece.partition(b"}")
            value = self.value(name, argument) if brace else None
            parts += (b"{", piece) if value is None else (value, tail)
        return b"".join(parts)

    def value(self, name: bytes, argument: str) -> bytes | None:
        block = self.block
        if name == b"port" or name == b"first":
            self.indices.add(0)
            return b"%d" % block.first
        if name == b"last":
            self.whole = True
            return b"%d" % block.last
        if name == b"ports":
            self.whole = True
            return b",".join(b"%d" % port for port in block.ports)
        if name == b"host":
            return os.fsencode(block.host or "0.0.0.0")
        if name == b"fd" or (name[:2] == b"fd" and name[2:] == b"%d" % _digits(name[2:])):
            return b"%d" % self.descriptor(_digits(name[2:]), name.decode(), argument)
        index = name[4:]
        if name[:4] != b"port" or not index.isdigit() or (index[:1] == b"0" and index != b"0"):
            return None
        if len(index) > 5 or int(index) >= len(block):
            raise InvalidRequest(
                f"{argument} names {{{name.decode()}}}, but the block has {len(block)} port"
                f"{'s' if len(block) > 1 else ''}: {{port0}} to {{port{len(block) - 1}}}. Allocate"
                " more ports, or name one of these.",
                argument=argument,
                value=name.decode(),
            )
        self.indices.add(int(index))
        return b"%d" % (block.first + int(index))

    def descriptor(self, index: int, name: str, argument: str) -> int:
        """The child's number for the held socket ``index``."""
        if index < self.descriptors:
            each = 2 if self.block.protocol == "both" else 1
            self.indices.add(index // each)
            return FIRST_DESCRIPTOR + index
        if not self.descriptors:
            why = "but no socket is passed. Pass handoff='fd'."
        else:
            why = (
                f"but the sockets that are passed are {{fd0}} to {{fd{self.descriptors - 1}}}."
                " Allocate more ports, or name one of these."
            )
        raise InvalidRequest(f"{argument} names {{{name}}}, {why}", argument=argument, value=name)

    def named(self) -> list[int]:
        if self.whole or not self.indices:
            return list(self.block.ports)
        return [self.block.first + index for index in sorted(self.indices)]
