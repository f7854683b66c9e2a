"""The servers of the prefix cache's benchmark, with it and without: 1P1D, asked over HTTP."""

import asyncio
import json
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.interference_client import random_prompt
from benchmarks.prefix_prompts import Prompt
from benchmarks.prefix_report import ON, Answer, Setting
from benchmarks.process_tree import cpu_s
from neuron_di.config import ByteSize, EngineOptions, LogOptions, ServeOptions
from neuron_di.serve import Fleet

NEW_TOKENS = 8
KV_MEMORY = ByteSize(512 << 20)  # 32k tokens of the 25m model: full after a round
CHUNK_TOKENS = EngineOptions().chunk
_DATA = b"data: {"


@dataclass(frozen=True, slots=True)
class Server:
    """Where the prompts go, and the processes that compute."""

    session: aiohttp.ClientSession
    fleet: Fleet
    setting: Setting

    def cpu_s(self) -> float:
        """CPU time of its workers so far."""
        return sum(cpu_s(pid) for name, pid in self.fleet.pids().items() if name != "proxy")

    async def ask_all(self, prompts: list[Prompt]) -> tuple[list[Answer], float]:
        """All at once. The answers, and the workers' CPU seconds for them together."""
        before_s = self.cpu_s()
        answers = await asyncio.gather(*(self._ask(prompt) for prompt in prompts))
        return list(answers), self.cpu_s() - before_s

    async def _ask(self, prompt: Prompt) -> Answer:
        body = {
            "model": self.fleet.model_name,
            "prompt": prompt.ids,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            # With `return_token_ids` token 0 would bring the whole prompt's, which takes its time.
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
        }
        first_s, lines = None, []
        sent_s = time.perf_counter()
        async with self.session.post(f"{self.fleet.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(_DATA):
                    first_s = first_s or time.perf_counter() - sent_s
                    lines.append(line)
        assert first_s is not None, "a stream has events"
        events: list[dict[str, Any]] = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        told = [choice["logprobs"] for event in events for choice in event["choices"]]
        tokens = [
            (int(token.removeprefix("token_id:")), logprob)
            for each in filter(None, told)
            for token, logprob in zip(each["tokens"], each["token_logprobs"], strict=True)
        ]
        if len(tokens) != NEW_TOKENS:
            raise RuntimeError(f"an answer has {len(tokens)} tokens")
        usage = events[-1]["usage"]
        return Answer(
            first_s=first_s,
            num_prompt=usage["prompt_tokens"],
            num_found=usage["prompt_tokens_details"]["cached_tokens"],
            num_to_find=prompt.num_to_find(CHUNK_TOKENS) if self.setting == ON else 0,
            tokens=tokens,
        )


async def serving(model: Path, setting: Setting, num_vocab: int, stack: AsyncExitStack) -> Server:
    """A server, warm, until the end of the stack."""
    options = ServeOptions(
        model=str(model),
        port=0,
        engine=EngineOptions(threads=1, kv_memory=KV_MEMORY, prefix_cache=setting),
        log=LogOptions(log_level="error"),
    )
    fleet = await stack.enter_async_context(Fleet(options))
    timeout = aiohttp.ClientTimeout(total=None)
    session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
    server = Server(session, fleet, setting)
    source = random.Random(1)
    short, long = (random_prompt(source, num_vocab, num_tokens) for num_tokens in (64, 1200))
    for prompt in (short, long, long):
        await server.ask_all([Prompt(prompt)])
    return server
