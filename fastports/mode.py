"""What a hand-off mode is: one way to let a child in beside the hold of its ports."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from typing import Any, Protocol

    from ._spawn import Process
    from .block import PortBlock
    from .command import Command

    class Launch(Protocol):
        """Starts the child once, with what the mode adds."""

        @property
        def command(self) -> Command: ...
        @property
        def exclusive(self) -> bool: ...
        @property
        def listen(self) -> bool: ...
        @property
        def detach(self) -> bool: ...
        def entry(self) -> socket | None: ...
        def __call__(self, **added: Any) -> Process: ...
        def explain(self, exc: OSError) -> OSError: ...


__all__ = ["Handover", "Mode"]


class Mode:
    """One way to let a child in; subclasses say how.

    Attributes
    ----------
    name
        What ``handoff=`` calls it.
    hint
        For a child that died of EADDRINUSE: what to do, as a sentence.
    in_auto
        Whether ``handoff="auto"`` may take it: it asks nothing of the program.
    """

    name = ""
    hint = ""
    in_auto = True

    def why_not(self) -> str:
        """What keeps this mode from working here, in words; empty if it works."""
        raise NotImplementedError

    def why_not_for(self, command: Command) -> str:
        """The same for one program, where the mode works."""
        return ""

    def start(self, block: PortBlock, launch: Launch) -> tuple[Process, Handover]:
        """Start the child so that it can bind. After an error nothing is left, the block held."""
        raise NotImplementedError


class Handover:
    """What a mode does for one child after its start; nothing, unless a mode says otherwise."""

    def listening(self) -> None:
        """The child was seen listening on all its ports. At most once, before :meth:`over`."""

    def is_open(self) -> bool:
        """Whether others may get in still, after :meth:`listening`; for milliseconds only."""
        return False

    def left(self) -> bool:
        """Whether certainly neither the child nor any descendant runs any more."""
        return False

    def over(self) -> None:
        """The child ended or was given up. Once."""
