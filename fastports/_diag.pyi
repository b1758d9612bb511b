from typing import final

LISTENING: int
BOUND: int
TIME_WAIT: int
CONNECTED: int

@final
class Diag:
    def __init__(self) -> None: ...
    def close(self) -> None: ...
    def lookup(self, protocol: str, address: bytes, port: int) -> tuple[int, int, int] | None: ...
    def sockets(
        self, first: int, last: int, protocol: str, states: int
    ) -> list[tuple[int, int, int, int, int]]: ...

def sockets(
    first: int, last: int, protocol: str, states: int
) -> list[tuple[int, int, int, int, int]]: ...
def door_facts() -> tuple[str, bool]: ...
