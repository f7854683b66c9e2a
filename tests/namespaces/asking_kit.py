"""Clients that ask while a test does something to the hosts."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai_kit import Answer, Client, eventually

PROMPT, PARAMS = "def main(", {"max_tokens": 24, "ignore_eos": True}


class Asking:
    """Requests that follow each other. Each must be answered, and as wanted."""

    def __init__(self, client: Client, wanted: str) -> None:
        self._client = client
        self._wanted = wanted
        self._is_over = False
        self.num_right = 0

    async def run(self) -> None:
        for number in itertools.count():
            if self._is_over:
                return
            answer = await self._client.ask(PROMPT, stream=number % 2 == 0, **PARAMS)
            assert answer.text == self._wanted
            self.num_right += 1

    async def more(self, num: int) -> None:
        wanted = self.num_right + num
        await eventually(lambda: true_if(self.num_right >= wanted))

    def end(self) -> None:
        self._is_over = True


@asynccontextmanager
async def asking(client: Client, wanted: str) -> AsyncIterator[Asking]:
    """Four clients at once. What fails one of them fails the block."""
    load = Asking(client, wanted)
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(load.run())
        try:
            yield load
        finally:
            load.end()


async def ask_until(client: Client, is_over: asyncio.Event, **params: Any) -> list[Answer]:
    """Requests that follow each other until then: at any time one of them is open."""
    answers = []
    while not is_over.is_set():
        answers.append(await client.ask(PROMPT, **params))
    return answers


async def true_if(holds: bool) -> bool | None:
    """For `eventually`."""
    return True if holds else None
