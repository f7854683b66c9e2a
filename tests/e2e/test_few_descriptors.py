"""Where a process may have few files and sockets open."""

import asyncio
import contextlib
from urllib.parse import urlsplit

import pytest
from openai_kit import DEADLINE_S
from process_kit import command, part, session_of_many

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


def limited_to(num: int) -> tuple[str, ...]:
    return ("sh", "-c", f'ulimit -n {num}; exec "$@"', "sh")


@pytest.mark.parametrize("words", [("proxy", "--port=0"), ("serve", "examples/models/tiny-tales")])
async def test_too_few_are_said_at_once(words: tuple[str, ...]) -> None:
    async with command(*words, within=limited_to(24)) as process, asyncio.timeout(DEADLINE_S):
        _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"24 files and sockets" in stderr
    assert b"Traceback" not in stderr


async def test_a_proxy_takes_no_more_connections_than_it_can() -> None:
    """So that who comes when idle ones have used all up is still served."""
    async with part("proxy", "--port=0", within=limited_to(100)) as proxy:
        address = urlsplit(proxy.url)
        async with contextlib.AsyncExitStack() as stack:
            readers = []
            for _ in range(150):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                stack.callback(writer.close)
                readers.append(reader)
            closed = await asyncio.gather(*(_is_closed(reader) for reader in readers))
            assert sum(closed) == 100, "50 are kept, the other descriptors are for other things"
            async with (
                session_of_many() as session,
                asyncio.timeout(DEADLINE_S),
                session.get(f"{proxy.url}/v1/models") as response,
            ):
                assert response.status == 200


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends within the second in which none is idle for long."""
    try:
        async with asyncio.timeout(1.5):
            return await reader.read() == b""
    except TimeoutError:
        return False
