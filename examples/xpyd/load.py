"""Clients that stream answers all the time, and compare each with the first to its prompt."""

import asyncio
import json
from itertools import cycle
from types import TracebackType
from typing import Self

import aiohttp

PROMPTS = (
    "Once upon a time there was a small fox",
    "The lantern stood by the river and",
    "In a village by the sea a girl found",
)
MAX_TOKENS = 48
TIMEOUT_S = 60.0
PAUSE_S = 0.2  # between two answers: a machine with two cores starts workers meanwhile


class Load:
    """`num_clients` streams at once while entered; the last ones may finish.

    Greedy answers to one prompt are the same on every worker, so a lost, doubled or wrong token
    shows, wherever its cause.
    """

    def __init__(self, url: str, num_clients: int = 3) -> None:
        self._url = url
        self._num_clients = num_clients
        self._is_over = False
        self._answers: dict[str, str] = {}
        self.num_done = self.num_failed = self.num_different = 0

    def summary(self) -> str:
        return (
            f"{self.num_done} answers were streamed meanwhile, {self.num_failed} failed, "
            f"{self.num_different} differed from the first one to the same prompt."
        )

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S))
        self._clients = [
            asyncio.create_task(self._client(index)) for index in range(self._num_clients)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        if error is not None:
            for client in self._clients:
                client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=error is not None)
        await self._session.close()

    async def _client(self, index: int) -> None:
        for prompt in cycle(PROMPTS[index:] + PROMPTS[:index]):
            if self._is_over:
                return
            try:
                answer = await self._ask(prompt)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.num_failed += 1
                print(f"  failed: {error!r}")
            else:
                self.num_done += 1
                self.num_different += answer != self._answers.setdefault(prompt, answer)
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, prompt: str) -> str:
        """The text of one answer. ValueError when the stream says an error, or has no end."""
        document = {
            "model": "tiny-tales",
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        text = ""
        async with self._session.post(f"{self._url}/v1/completions", json=document) as response:
            if response.status != 200:
                raise ValueError(f"{response.status} {await response.text()}")
            async for line in response.content:
                event = line.decode().removeprefix("data: ").strip()
                if event == "[DONE]":
                    return text
                if event:
                    chunk = json.loads(event)
                    if "error" in chunk:
                        raise ValueError(chunk["error"])
                    text += chunk["choices"][0]["text"]
        raise ValueError("the stream has no end")
