"""A cluster of parts under load: what `neuron-di drain` and `neuron-di role` are tried on."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openai_kit import Answer, Client, Refused

PROMPTS = ["Once upon a time", "def main(", "The answer is", "hello", "1 2 3 4 5 6 7 8 9 10 11"]
NUM_AT_ONCE = 8
PARAMS = {"max_tokens": 48, "ignore_eos": True}


class Load:
    """Requests that follow each other while entered. Each answer is compared with the wanted."""

    def __init__(self, client: Client, wanted: dict[str, Answer]) -> None:
        self._client = client
        self._wanted = wanted
        self._is_over = False
        self.num_right = 0
        self.wrong: list[str] = []
        self.routes: set[tuple[str, str]] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_AT_ONCE):
                group.create_task(self._ask(number))

    def end(self) -> None:
        self._is_over = True

    async def more(self, num: int) -> None:
        """Wait until so many more were answered."""
        wanted = self.num_right + num
        while self.num_right < wanted and not self.wrong:  # noqa: ASYNC110 - it counts
            await asyncio.sleep(0.01)

    async def _ask(self, first: int) -> None:
        for number in itertools.count(first):
            if self._is_over:
                return
            prompt = PROMPTS[number % len(PROMPTS)]
            try:
                answer = await self._client.ask(prompt, stream=number % 2 == 0, **PARAMS)
            except Refused as refused:
                self.wrong.append(str(refused))
                return
            want = self._wanted[prompt]
            if (answer.text, answer.labels) != (want.text, want.labels):
                self.wrong.append(f"another answer: {answer.text!r}, not {want.text!r}")
            self.num_right += 1


@asynccontextmanager
async def under_load(client: Client) -> AsyncIterator[Load]:
    """A load whose every answer must be as without it."""
    wanted = {prompt: await client.ask(prompt, **PARAMS) for prompt in PROMPTS}
    load = Load(client, wanted)
    running = asyncio.create_task(load.run())
    try:
        await load.more(NUM_AT_ONCE)
        yield load
        await load.more(NUM_AT_ONCE)
    finally:
        load.end()
        await running
    assert load.wrong == []
