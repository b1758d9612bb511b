"""Several named blocks that one program is started on, in the shape of one."""

from __future__ import annotations

from .say import Usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ..block import PortBlock
    from ..registry import Owner

__all__ = ["Bundle"]

# what stands for something else between braces
_TAKEN = ("port", "ports", "first", "last", "host", "fd")


class Bundle:
    """Blocks by name: what the hand-off asks of a block, and ``{NAME}``, ``{NAME0}``...

    Attributes
    ----------
    ports
        All ports, ascending.
    named
        The ports that :meth:`fill` has put into arguments, or all if there were none.
    """

    def __init__(self, blocks: Mapping[str, PortBlock]) -> None:
        self.blocks: dict[str, PortBlock] = dict(blocks)
        one = next(iter(self.blocks.values()))
        self.protocol: str = one.protocol
        self.host: str | None = one.host
        self.owner: Owner = one.owner
        self.label: str = one.label
        self._ordered = sorted(self.blocks.values(), key=lambda block: block.first)
        self.ports: list[int] = [port for block in self._ordered for port in block.ports]
        self.first: int = self.ports[0]
        self.last: int = self.ports[-1]
        self._used: set[int] = set()
        self._passed = False  # as of a block: whether the program has the sockets too
        self._served: Callable[[], None] | None = None  # how a mode is told of the release

    @staticmethod
    def check_names(names: Iterable[str]) -> None:
        """Names that cannot be told from one another, or from ``{port}``, are wrong usage."""
        names = list(names)
        for name in names:
            plain = name.replace("_", "").replace("-", "")
            if not (plain.isascii() and plain.isalnum() and name[0].isalpha()):
                raise Usage(f"--many: a name has letters, digits, '-' and '_', not {name!r}.")
            if name.rstrip("0123456789") in _TAKEN:
                raise Usage(f"--many: {{{name}}} stands for something else; choose another name.")
            for other in names:
                if name != other and name.startswith(other) and name[len(other) :].isdigit():
                    raise Usage(
                        f"--many: {{{name}}} could mean a port of {other!r}; rename one of them."
                    )

    @property
    def named(self) -> Sequence[int]:
        return sorted(self._used) or self.ports

    def fill(self, words: Sequence[str]) -> list[str]:
        """The arguments with ``{NAME}`` and ``{NAME0}``.. filled in; other braces stay."""
        return [self._filled(word) for word in words]

    def _filled(self, word: str) -> str:
        head, *pieces = word.split("{")
        for piece in pieces:
            name, brace, tail = piece.partition("}")
            value = self._value(name) if brace else None
            head += f"{{{piece}" if value is None else f"{value}{tail}"
        return head

    def _value(self, name: str) -> str | None:
        if name == "ports":
            self._used.update(self.ports)
            return ",".join(map(str, self.ports))
        stem = name.rstrip("0123456789")
        if stem in ("port", "first", "last"):
            raise Usage(
                f"{{{name}}} is of no block: with --many it is"
                f" {', '.join(f'{{{given}}}' for given in self.blocks)}."
            )
        block = self.blocks.get(name)
        if block is not None:
            self._used.add(block.first)
            return str(block.first)
        # a name may end in digits itself: the longest that is known counts
        for at in range(len(name) - 1, len(stem) - 1, -1):
            block = self.blocks.get(name[:at])
            index = name[at:]
            if block is None or index != str(int(index)):
                continue
            if int(index) >= len(block):
                last = "" if len(block) == 1 else f" to {{{name[:at]}{len(block) - 1}}}"
                raise Usage(f"{{{name}}} is not there: {name[:at]!r} has {{{name[:at]}0}}{last}.")
            self._used.add(block.first + int(index))
            return str(block.first + int(index))
        return None

    # --- what the hand-off asks of a block ---

    def __len__(self) -> int:
        return len(self.ports)

    def __contains__(self, port: object) -> bool:
        return port in self.ports

    @property
    def released(self) -> bool:
        return all(block.released for block in self._ordered)

    @property
    def holds_closed(self) -> bool:
        return any(block.holds_closed for block in self._ordered)

    def filenos(self) -> list[int]:
        return [fd for block in self._ordered for fd in block.filenos()]

    def open_door(self) -> None:
        for block in self._ordered:
            block.open_door()

    def close_door(self) -> None:
        for block in self._ordered:
            block.close_door()

    def close_holds(self) -> None:
        for block in self._ordered:
            block.close_holds()

    def release(self) -> None:
        served, self._served = self._served, None
        if served is not None:
            served()
        for block in self._ordered:
            block.release()
