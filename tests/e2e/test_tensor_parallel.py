"""Workers of several ranks: greedy tokens are those of one process, at every pair of degrees."""

import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai_kit import Answer, Client, eventually, gather
from process_kit import run, session_of_many

from neuron_di.backends.cpu_numerics import torch_rounding
from neuron_di.config import EngineOptions, LogOptions, ServeOptions, TransferOptions
from neuron_di.llm import LLM, Generation
from neuron_di.serve import Fleet
from neuron_di.wire import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

NUM_TOKENS = 24
# Of the model's KV: layers, keys and values, KV heads, numbers of a head, bytes of a number.
TOKEN_BYTES = 5 * 2 * 2 * 64 * 4
PROMPTS = [
    "Once upon a time",
    "The cat sat on the mat. " * 9,  # several blocks, the last of them full or not
    "Tom had a red ball and",
    "One day, a little fox went to the river. It was a warm day, and the water was blue.",
]


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[tuple[Client, Fleet]]:
    tp, transfer = options.pop("tp", 1), options.pop("transfer", "auto")
    serve = ServeOptions(
        model=str(folder),
        port=0,
        engine=EngineOptions(threads=1, tp=tp),
        log=LogOptions(log_level="warning"),
        kv_transfer=TransferOptions(transfer=(transfer,)),
        **options,
    )
    async with session_of_many() as session, Fleet(serve) as fleet:
        yield Client(session, fleet.url, fleet.model_name), fleet


@pytest.fixture(scope="module")
def expected(tiny_tales: Path) -> list[Generation]:
    """What one process makes of the prompts."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(tiny_tales), threads=1) as llm:
        return llm.generate(PROMPTS, sampling)


async def answers_of(client: Client) -> list[Answer]:
    """All prompts at once, each streamed and whole."""
    params: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    asks = [client.ask(each, stream=s, **params) for each in PROMPTS for s in (False, True)]
    return await gather(*asks)


def check(answers: list[Answer], expected: list[Generation]) -> None:
    for index, generation in enumerate(expected):
        for answer in answers[2 * index : 2 * index + 2]:
            assert answer.text == generation.text
            assert answer.usage["completion_tokens"] == NUM_TOKENS
            assert len(answer.labels) == NUM_TOKENS


def ranks_of(worker_pid: int) -> list[psutil.Process]:
    """The processes of a worker's other ranks."""
    return [
        child
        for child in psutil.Process(worker_pid).children()
        if "neuron_di.backends.rank_main" in child.cmdline()
    ]


async def test_a_combined_worker_of_two_ranks(tiny_tales: Path, expected: list[Generation]) -> None:
    """When one of them dies the worker ends, and is started again."""
    async with running(tiny_tales, combined=True, tp=2) as (client, fleet):
        check(await answers_of(client), expected)
        (status,) = (await client.until_idle()).values()
        assert status["record"]["num_ranks"] == 2
        assert status["record"]["numerics"].startswith(
            f"cpu float32 {torch_rounding()} threads=1 tp=2"
        )
        assert "tp=2" in (await run("status", "--url", client.url)).stdout
        worker = psutil.Process(fleet.pids()["combined-0"])
        (rank,) = ranks_of(worker.pid)
        os.kill(rank.pid, signal.SIGKILL)

        async def is_back() -> Client | None:
            pid = fleet.pids().get("combined-0")
            (status,) = (await client.load()).values() or (None,)
            is_new = status is not None and status["record"]["pid"] != worker.pid
            return client if pid not in (None, worker.pid) and is_new else None

        await eventually(is_back)
        assert not worker.is_running()
        check(await answers_of(client), expected)

        ranks = ranks_of(fleet.pids()["combined-0"])
        assert len(ranks) == 1
        fleet.kill()

        async def all_gone() -> bool | None:
            return None if any(rank.is_running() for rank in ranks) else True

        await eventually(all_gone)


def check_moved(answer: Answer, receipt: dict[str, Any]) -> None:
    """The KV of the prompt's tokens, or of whole blocks where it was streamed; either once."""
    assert receipt["form"] in ("landed", "streamed")
    num_tokens, block_size = answer.usage["prompt_tokens"], EngineOptions().block_size
    if receipt["form"] == "streamed":
        num_tokens = math.ceil(num_tokens / block_size) * block_size
    assert receipt["kv_bytes"] == num_tokens * TOKEN_BYTES


@pytest.mark.parametrize(
    ("transfer", "prefill_tp", "decode_tp"),
    [("auto", 2, 1), ("auto", 1, 2), ("auto", 2, 2), ("tcp", 4, 2), ("nixl", 2, 1)],
)
async def test_one_degree_hands_over_to_another(
    tiny_tales: Path, expected: list[Generation], transfer: str, prefill_tp: int, decode_tp: int
) -> None:
    """The model has two KV heads: of four ranks, two hold the same one, and it moves once."""
    if transfer == "nixl" and find_spec("nixl_cu12") is None:
        pytest.skip("the package nixl-cu12 is not installed")
    options = {"transfer": transfer, "prefill_tp": prefill_tp, "decode_tp": decode_tp}
    async with running(tiny_tales, **options) as (client, fleet):
        answers = await answers_of(client)
        load = await client.until_idle()
        receipts = [await client.receipt(answer.answer_id) for answer in answers]
        ranks = [ranks_of(fleet.pids()[name]) for name in ("prefill-0", "decode-0")]
    assert load["prefill-0"]["record"]["num_ranks"] == prefill_tp
    assert load["decode-0"]["record"]["num_ranks"] == decode_tp
    assert [len(each) for each in ranks] == [prefill_tp - 1, decode_tp - 1]
    assert not any(rank.is_running() for each in ranks for rank in each)
    assert load["decode-0"]["num_kv_mismatched"] == 0
    for answer, receipt in zip(answers, receipts, strict=True):
        assert receipt["prefill_worker"] == "prefill-0"
        assert receipt["decode_worker"] == "decode-0"
        if transfer != "auto":
            assert receipt["link"] == transfer
        if prefill_tp != decode_tp:
            check_moved(answer, receipt)
    check(answers, expected)


async def test_a_degree_that_does_not_fit_is_named(tiny_tales: Path) -> None:
    ended = await run("worker", str(tiny_tales), "--role", "both", "--tp", "3")
    assert ended.code == 2
    assert "--tp 3 does not divide the model's 4 attention heads" in ended.stderr
