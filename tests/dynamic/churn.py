"""A hundred joins and leaves under load leave nothing in the proxy, or in workers that stay."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Self

import pytest
from chaos.client import Stream, ask
from chaos.judge import judge
from etcd.etcd_kit import running_etcd

from neuron_di.config import EtcdOptions
from neuron_di.etcd.open_registry import open_registry
from neuron_di.registry import Directory
from neuron_di.testing import write_random_checkpoint
from neuron_di.types import Role
from neuron_di.worker import peers, process
from neuron_di_proxy.config import ProxyConfig
from neuron_di_proxy.server import bind, serve

from .passers_by import EXACT, census, passing

NUM_WARM, NUM_PASSING = 12, 100
NUM_AT_ONCE = 4
NUM_EACH = 2  # answers while a worker is here
NUM_ASKING = 3
KEEP_S = 1.0  # for a worker whose key vanished
SETTLE_TIMEOUT_S = 60.0
SILENCE_S = 3.0  # longer than a silent peer is kept
NUM_COUNTS = 5
NUM_STAYING = 4
# Of the first a thousand are kept, of the other 16 in each directory, with the worker's record.
BOUNDED = ("neuron_di_proxy.receipts.", "neuron_di.registry.record_reader.RefusedRecord")
ROLES: tuple[Role, ...] = ("prefill", "decode")
BODY = {
    "model": "m",
    "prompt": "def main(",
    "max_tokens": 12,
    "ignore_eos": True,
    "temperature": 0,
    "logprobs": 0,
    "stream": True,
}


class Asking:
    """Clients that ask all the time while entered, each answer compared with the first."""

    def __init__(self, url: str, wanted: Stream) -> None:
        self._url = url
        self._wanted = wanted
        self._is_over = False
        self.num_answers = 0
        self.flaws: list[str] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(NUM_ASKING)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def more(self, num: int) -> None:
        wanted = self.num_answers + num
        while self.num_answers < wanted:  # noqa: ASYNC110 - it counts
            await asyncio.sleep(0.005)

    async def _ask(self) -> None:
        while not self._is_over:
            stream = await ask(self._url, BODY)
            verdict = judge(stream, self._wanted)
            if not verdict.is_equal:
                self.flaws.append(verdict.words or f"{stream.end} {stream.error_code}")
            self.num_answers += 1


@pytest.mark.timeout(300)
async def test_a_hundred_joins_and_leaves_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "UNUSED_S", 0.2)
    monkeypatch.setattr(process, "keep_s_for", lambda _: KEEP_S)
    model = tmp_path / "model"
    write_random_checkpoint(model, "llama")
    async with running_etcd() as etcd, AsyncExitStack() as stack:
        options = EtcdOptions(etcd=tuple(etcd.addresses))
        registry = await stack.enter_async_context(open_registry(None, options))
        assert registry is not None
        directory = await stack.enter_async_context(Directory(registry, keep_s=KEEP_S))
        config = replace(ProxyConfig(), port=0)
        sock, stop = bind(config), asyncio.Event()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        proxy = asyncio.create_task(serve(config, directory, sock, stop))
        stack.push_async_callback(asyncio.wait, [proxy])
        stack.callback(stop.set)
        for role in ROLES:
            for name in ("one", "two"):
                worker = passing(model, f"{role}-{name}", role, registry, options)
                await stack.enter_async_context(worker)
        wanted = await ask(url, BODY)
        assert wanted.end == "done", directory.refused()

        async def pass_by(asking: Asking, num: int) -> None:
            names = iter([f"w{number}" for number in range(num)])
            roles = cycle(ROLES)

            async def one_after_another() -> None:
                for name in names:
                    async with passing(model, name, next(roles), registry, options):
                        await asking.more(NUM_EACH)

            await asyncio.gather(*(one_after_another() for _ in range(NUM_AT_ONCE)))

        async with Asking(url, wanted) as asking:
            await pass_by(asking, NUM_WARM)
        before = await settled_census(directory)
        async with Asking(url, wanted) as asking:
            await pass_by(asking, NUM_PASSING)
        after = await settled_census(directory)
        assert asking.flaws == []
        assert asking.num_answers > NUM_PASSING
        grown = {kind: num - before[kind] for kind, num in after.items() if num > before[kind]}
        assert {
            kind: num
            for kind, num in grown.items()
            if num >= NUM_PASSING // 5 and not kind.startswith(BOUNDED)
        } == {}
        assert {kind: grown[kind] for kind in EXACT if kind in grown} == {}


async def settled_census(directory: Directory) -> Counter[str]:
    """The least of some counts, once all who passed by are gone: heartbeats come and go."""
    async with asyncio.timeout(SETTLE_TIMEOUT_S):
        while len(directory.workers()) > NUM_STAYING:  # noqa: ASYNC110 - its view is dropped late
            await asyncio.sleep(0.1)
    await asyncio.sleep(SILENCE_S)
    least = census()
    for _ in range(NUM_COUNTS - 1):
        await asyncio.sleep(0.2)
        least &= census()
    return least
