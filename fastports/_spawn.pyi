from typing import final

SHARED: int
OWN_GROUP: int
OWN_SESSION: int
STAGES: tuple[str, ...]

@final
class Process:
    @property
    def pid(self) -> int: ...
    @property
    def pidfd(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def at_gate(self) -> bool: ...
    def go(self) -> None: ...
    def abort(self) -> None: ...
    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> bool: ...
    def ended(self, timeout: float = -1) -> bool: ...

def start(
    programs: list[bytes],
    argv: list[bytes],
    env: list[bytes],
    *,
    cwd: bytes | None = None,
    descriptors: dict[int, int] | None = None,
    group: int = 1,
    death_signal: int = 9,
    leash: int = -1,
    gate: bool = False,
    filter: bytes | None = None,
    filter_flags: int = 0,
    filter_to: int = -1,
) -> Process: ...
