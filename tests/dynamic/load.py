"""A steady load in open loop: requests come at their times, however long the answers take.

Several clients stream greedy answers. Each answer is compared with the one that nobody disturbed,
token by token, and its receipt says who computed it.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
from chaos.client import Stream, ask
from chaos.judge import Verdict, judge

from neuron_di.clock import now_s, unix_s

from .cluster import Cluster

MODEL_NAME = "tiny-tales"
PROMPTS = (
    "Once upon a time there was a small fox",
    "The lantern stood by the river and",
    "In a village by the sea a girl found",
    "def main(",
    "hello",
    "One day " * 30,  # of several chunks
)
LENGTHS = (12, 40, 160)
NUM_CLIENTS = 4


@dataclass(slots=True)
class Asked:
    """One request: where and when, what came of it, and what the proxy says of it."""

    url: str
    sent_s: float  # Unix time
    stream: Stream
    verdict: Verdict
    receipt: dict[str, Any] | None  # None: it had no answer to name


class Wanted:
    """What each request is answered when nobody disturbs it."""

    def __init__(self, answers: dict[tuple[str, int], Stream]) -> None:
        self._answers = answers

    @classmethod
    async def learn(cls, url: str) -> "Wanted":
        """Ask each once. RuntimeError when one has no answer."""
        answers: dict[tuple[str, int], Stream] = {}
        for prompt in PROMPTS:
            for num_tokens in LENGTHS:
                stream = await ask(url, body(prompt, num_tokens))
                if stream.end != "done" or stream.flaws or len(stream.tokens) != num_tokens:
                    raise RuntimeError(f"undisturbed: {stream.end} {stream.error_code}")
                answers[prompt, num_tokens] = stream
        return cls(answers)

    def of(self, prompt: str, num_tokens: int) -> Stream:
        return self._answers[prompt, num_tokens]


def body(prompt: str, num_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 0,
        "stream": True,
    }


class Load:
    """Runs while entered; at the end the last requests get their answers."""

    def __init__(
        self, cluster: Cluster, wanted: Wanted, *, rate_per_s: float, urls: Sequence[str] = ()
    ) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._rate_per_s = rate_per_s
        self._urls = list(urls) or cluster.urls
        self._answers: list[asyncio.Task[None]] = []
        self.asked: list[Asked] = []

    async def __aenter__(self) -> Self:
        self._clients = [asyncio.create_task(self._client(i)) for i in range(NUM_CLIENTS)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.wait(self._clients)
        for client in self._clients:
            if not client.cancelled():
                client.result()
        if error is not None:
            for answer in self._answers:
                answer.cancel()
        await asyncio.gather(*self._answers, return_exceptions=error is not None)

    async def more(self, num: int) -> None:
        """Wait until so many more were answered."""
        wanted = len(self.asked) + num
        while len(self.asked) < wanted:  # noqa: ASYNC110 - it counts
            await asyncio.sleep(0.01)

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        url = self._urls[number % len(self._urls)]
        interval_s = NUM_CLIENTS / self._rate_per_s
        next_s = now_s() + interval_s * number / NUM_CLIENTS
        while True:
            await asyncio.sleep(max(0.0, next_s - now_s()))
            next_s += interval_s * rng.uniform(0.5, 1.5)
            prompt, num_tokens = rng.choice(PROMPTS), rng.choice(LENGTHS)
            self._answers.append(asyncio.create_task(self._ask(url, prompt, num_tokens)))

    async def _ask(self, url: str, prompt: str, num_tokens: int) -> None:
        sent_s = unix_s()
        stream = await ask(url, body(prompt, num_tokens))
        verdict = judge(stream, self._wanted.of(prompt, num_tokens))
        receipt = None
        if stream.answer_id:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # it counts as none
                receipt = await self._cluster.get(f"{url}/v1/receipts/{stream.answer_id}")
        self.asked.append(Asked(url, sent_s, stream, verdict, receipt))
