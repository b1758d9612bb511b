"""A suite for other sessions to run: each test serves its own nonce and must get it back.

``COUNT`` tests; ``FIXTURE`` names the fixture that gives the port.
"""

from __future__ import annotations

import asyncio
import os
import secrets

import pytest

FIXTURE = os.environ.get("FIXTURE", "port")
WRONG, FAILED = "WRONG ANSWER", "NO ANSWER"


@pytest.mark.parametrize("number", range(int(os.environ.get("COUNT", "80"))))
def test_my_server_answers(number: int, request: pytest.FixtureRequest) -> None:
    port: int = request.getfixturevalue(FIXTURE)
    asyncio.run(serve_and_ask(port))


async def serve_and_ask(port: int) -> None:
    nonce = secrets.token_bytes(16)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(nonce)
        writer.close()

    await asyncio.sleep(0.01)  # what a server does before it binds
    try:
        server = await asyncio.start_server(answer, "127.0.0.1", port, reuse_port=REUSE_PORT)
    except OSError as exc:
        pytest.fail(f"{FAILED}: {exc}")
    async with server:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            got = await reader.read()
            writer.close()
            assert got == nonce, WRONG


# Some servers share their port with whoever asks for it (gRPC's default): the silent way to fail.
REUSE_PORT = os.environ.get("REUSE_PORT") == "1"
