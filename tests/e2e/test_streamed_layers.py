"""KV that leaves layer by layer while the prefill computes: the same answers, less to wait for."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from openai_kit import Answer, Client, eventually, gather
from process_kit import session_of_many

from neuron_di.config import (
    EngineOptions,
    HandOverOptions,
    LogOptions,
    ServeOptions,
    TransferOptions,
)
from neuron_di.serve import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPTS = [f"Once upon a time, {number} friends went to the river. " * 24 for number in range(6)]


@pytest.mark.parametrize(
    ("engine", "tp", "block_size"), [("tcp", 1, 16), ("shm", 2, 8), ("nixl", 1, 16)]
)
async def test_streamed_kv_gives_the_same_answers(
    tiny_tales: Path, tiny_tales_1p1d: Client, engine: str, tp: int, block_size: int
) -> None:
    if engine == "nixl" and find_spec("nixl_cu12") is None:
        pytest.skip("the package nixl-cu12 is not installed")
    options = ServeOptions(
        model=str(tiny_tales),
        port=0,
        engine=EngineOptions(threads=1, chunk_tokens=96, tp=tp, block_size=block_size),
        kv_transfer=TransferOptions(transfer=(engine,)),
        hand_over=HandOverOptions(stream_layers="on"),
        log=LogOptions(log_level="error"),
    )
    async with session_of_many() as session, Fleet(options) as fleet:
        client = Client(session, fleet.url, fleet.model_name)

        async def streamed() -> Answer | None:
            """None where its decode worker asked when the prefill was over, as the first does."""
            answer = await client.ask(PROMPTS[0], max_tokens=24)
            receipt = await client.receipt(answer.answer_id)
            assert receipt["link"] == engine
            assert receipt["kv_bytes"] > 0
            return answer if receipt["form"] == "streamed" else None

        alone = await eventually(streamed)
        found = await gather(*(client.ask(prompt, max_tokens=24) for prompt in PROMPTS))
        await client.until_idle()
    expected = await gather(*(tiny_tales_1p1d.ask(prompt, max_tokens=24) for prompt in PROMPTS))
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    assert alone.text == expected[0].text
