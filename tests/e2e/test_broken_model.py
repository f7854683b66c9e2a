"""A model that computes NaN for one token: the requests that meet it fail, and no others."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai_kit import Client, Refused, gather
from oracle_kit import Oracle
from process_kit import running_fleet
from safetensors.torch import load_file, save_file

from neuron_di.errors import WorkerFailed
from neuron_di.llm import LLM
from neuron_di.testing import write_random_checkpoint
from neuron_di.wire import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

SOUND = [list(range(start, start + 20)) for start in range(100, 700, 100)]
LEADS_TO_POISON = list(range(900, 920))
PARAMS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class BrokenModel:
    folder: Path
    poison: int  # the token


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> BrokenModel:
    """The poison is token 3 of the answer to LEADS_TO_POISON, and in no other prompt or answer."""
    folder = tmp_path_factory.mktemp("checkpoints") / "broken"
    write_random_checkpoint(folder, "llama")
    oracle = Oracle(folder)
    poison = oracle.greedy(LEADS_TO_POISON, 4).ids[3]
    sound = [prompt + oracle.greedy(prompt, 16).ids for prompt in SOUND]
    assert not any(poison in ids for ids in [*sound, oracle.greedy(LEADS_TO_POISON, 3).ids])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][poison] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return BrokenModel(folder, poison)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def broken_1p1d(broken_model: BrokenModel) -> AsyncIterator[Client]:
    async with running_fleet(broken_model.folder) as client:
        yield client


async def test_one_process_goes_on(broken_model: BrokenModel) -> None:
    sampling = SamplingParams(temperature=0.0, **PARAMS)
    with LLM(str(broken_model.folder), threads=1, num_blocks=64) as llm:
        before = [answer.token_ids for answer in llm.generate(SOUND, sampling)]
        for prompt in ([broken_model.poison] * 40, LEADS_TO_POISON):
            with pytest.raises(WorkerFailed):
                llm.generate([SOUND[0], prompt, *SOUND[1:]], sampling)
            # Also on the blocks that hold NaN from before.
            for _ in range(3):
                assert [answer.token_ids for answer in llm.generate(SOUND, sampling)] == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_fleet_goes_on(
    broken_1p1d: Client, broken_model: BrokenModel, where: str, stream: bool
) -> None:
    before = await gather(*(broken_1p1d.ask(prompt, **PARAMS) for prompt in SOUND))
    prompt = [broken_model.poison] * 40 if where == "prefill" else LEADS_TO_POISON
    refusal = _refusal(broken_1p1d, prompt, stream)
    asks = [broken_1p1d.ask(sound, stream=stream, **PARAMS) for sound in SOUND]
    refused, answers = await asyncio.gather(refusal, gather(*asks))
    assert [answer.labels for answer in answers] == [answer.labels for answer in before]
    # Tokens were sent before decode failed, so the failure comes at the end of the stream.
    assert refused.status == (200 if stream and where == "decode" else 500)
    assert refused.error["type"] == "server_error"
    await broken_1p1d.until_idle()


async def _refusal(client: Client, prompt: list[int], stream: bool) -> Refused:
    with pytest.raises(Refused) as refused:
        await client.ask(prompt, stream=stream, **PARAMS)
    return refused.value
