"""The clients of the interference measurement: streams that decode, prompts that arrive.

All times are this process's `time.perf_counter()`, taken when a token's event is read.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

_DATA = b"data: "
_DONE = b"data: [DONE]"
_NUM_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(slots=True)
class Stream:
    """One answer as it came in: when each token arrived, and how many there were by then.

    Tokens without a text of their own, such as a character's first bytes, come with the next.
    """

    token_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def gaps(self) -> list[tuple[float, float]]:
        """(end, duration) of every gap between two tokens that came one after the other."""
        times, counts = pairwise(self.token_s), pairwise(self.num_tokens)
        return [
            (after_s, after_s - before_s)
            for (before_s, after_s), (before, after) in zip(times, counts, strict=True)
            if after == before + 1
        ]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A long prompt: sent, first token, last token; and its prefill as the worker timed it."""

    sent_s: float
    first_token_s: float
    done_s: float
    prefill_s: float

    def since(self, start_s: float) -> "Arrival":
        """The same with times that count from `start_s`."""
        return Arrival(
            self.sent_s - start_s,
            self.first_token_s - start_s,
            self.done_s - start_s,
            self.prefill_s,
        )


@dataclass(slots=True)
class Client:
    """Requests to one server, greedy, never ended by the model."""

    session: aiohttp.ClientSession
    url: str
    model: str

    async def run_stream(self, prompt: list[int], max_tokens: int, stream: Stream) -> str:
        """Note every token's time. Returns the answer's id. aiohttp.ClientError if refused."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        last_token = b""
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(_DONE):
                    break
                if line.startswith(_DATA):
                    stream.token_s.append(time.perf_counter())
                    found = _NUM_TOKENS.search(line)
                    assert found is not None, "each event counts the tokens so far"
                    stream.num_tokens.append(int(found[1]))
                    stream.has_begun.set()
                    last_token = line
        # After the last token: why it ended, and the usage.
        del stream.token_s[-2:], stream.num_tokens[-2:]
        answer_id: str = json.loads(last_token.removeprefix(_DATA))["id"]
        return answer_id

    async def send_prompt(self, prompt: list[int], max_tokens: int) -> Arrival:
        """One long prompt to its end."""
        sent_s = time.perf_counter()
        stream = Stream()
        answer_id = await self.run_stream(prompt, max_tokens, stream)
        receipt = await self._receipt(answer_id)
        first_s, done_s = stream.token_s[0], stream.token_s[-1]
        return Arrival(sent_s, first_s, done_s, receipt["prefill"]["prefill_s"])

    async def receipt_of(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """The receipt of one request, sent now and run to its end."""
        return await self._receipt(await self.run_stream(prompt, max_tokens, Stream()))

    async def _receipt(self, answer_id: str) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/v1/receipts/{answer_id}") as response:
            response.raise_for_status()
            receipt: dict[str, Any] = await response.json()
            return receipt


@asynccontextmanager
async def streaming(
    client: Client, prompts: list[list[int]], max_tokens: int
) -> AsyncIterator[list[Stream]]:
    """All prompts' answers, arriving while this is entered; they are broken off at the end.

    RuntimeError when one ended by itself: then not all of them ran all the time.
    """
    streams = [Stream() for _ in prompts]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(client.run_stream(prompt, max_tokens, stream))
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        for stream in streams:
            await stream.has_begun.wait()
        yield streams
        if any(task.done() for task in tasks):
            raise RuntimeError("a stream reached its end during the measurement")
        for task in tasks:
            task.cancel()


def random_prompt(source: random.Random, num_vocab: int, num_tokens: int) -> list[int]:
    return [source.randrange(num_vocab) for _ in range(num_tokens)]
