"""What a worker says of its model and its size, and what its legs say of a prompt."""

from pathlib import Path

import msgspec
import pytest
from worker_kit import PROMPT, collect, make_worker, prefill_leg, token_ids

from neuron_di.config import EngineOptions, WorkerOptions
from neuron_di.errors import ConfigError
from neuron_di.testing import write_random_checkpoint
from neuron_di.testing.checkpoints import TOOL_CHAT_TEMPLATE
from neuron_di.types import Incarnation, RequestId, Role, WorkerId
from neuron_di.wire import (
    Finished,
    Parked,
    PromptOptions,
    Ready,
    Token,
    encode_msgpack,
    ready_bytes_max,
)
from neuron_di.worker import Worker, load_model


@pytest.mark.parametrize(("role", "slots"), [("prefill", 3), ("decode", 5), ("both", 5)])
async def test_slots_are_those_of_the_role(llama_folder: Path, role: Role, slots: int) -> None:
    engine = EngineOptions(block_size=4, num_blocks=64, threads=1, prefill_batch=3, decode_batch=5)
    options = WorkerOptions(model=str(llama_folder), role=role, worker_id="w", engine=engine)
    worker = Worker(options, load_model(str(llama_folder), None, role, engine))
    record = worker.record()
    await worker.close()
    assert record.slots == slots
    assert record.num_vocab == 2048
    assert (record.tool_format, record.reasoning) == (None, None)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_context_that_could_not_be_handed_over_is_refused_before_the_load(
    tmp_path: Path, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Ready would be larger than a message may be, which ends the link for all requests."""
    write_random_checkpoint(tmp_path, "llama", config={"max_position_embeddings": 2_000_000})
    monkeypatch.setattr("neuron_di.worker.model.open_backend", _never)
    for tokens, block_size, is_refused in [
        (750_000, 4, False),
        (1_000_000, 4, True),
        (1_250_000, 16, False),
        (1_400_000, 16, True),
    ]:
        engine = EngineOptions(
            block_size=block_size, num_blocks=-(-tokens // block_size), context_tokens=tokens
        )
        expected = pytest.raises(ConfigError, match=f"{tokens} tokens in blocks of {block_size} ")
        with expected if is_refused else pytest.raises(_NotRefused):
            load_model(str(tmp_path), None, role, engine)


def test_a_large_ready_takes_no_more_than_is_reckoned(tmp_path: Path) -> None:
    ready = Ready(
        request_id=RequestId("r" * 128),
        attempt=1000,
        worker_id=WorkerId("w" * 255),
        incarnation=Incarnation("i" * 32),
        layout_digest="d" * 64,
        prompt_ids=[(1 << 32) - 1] * 4096,
        generated=[(1 << 32) - 1] * 4096,
        block_ids=[(1 << 32) - 1] * 2048,
        generations=[(1 << 64) - 1] * 2048,
        digests=[(1 << 64) - 1] * 2048,
        num_tokens=8192,
    )
    num_bytes = len(encode_msgpack(ready))
    assert ready_bytes_max(8192, 2048) - 4096 < num_bytes <= ready_bytes_max(8192, 2048)


class _NotRefused(Exception):
    pass


def _never(*_: object) -> None:
    raise _NotRefused


async def test_the_template_tells_of_the_model(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama", chat_template=TOOL_CHAT_TEMPLATE)
    worker = make_worker(tmp_path, "both")
    record = worker.record()
    await worker.close()
    assert record.tool_format == "hermes"
    assert record.reasoning == ("<think>", "</think>")


async def test_token_0_of_a_prefill_leg_carries_the_report(prefill: Worker) -> None:
    leg = msgspec.structs.replace(prefill_leg("r"), options=PromptOptions(report=True, logprobs=2))
    events = prefill.prefill.run(leg)
    token, parked = await anext(events), await anext(events)
    await events.aclose()
    assert isinstance(token, Token)
    assert token.prompt is not None
    assert token.prompt.token_ids == PROMPT
    assert token.prompt.logprobs is not None
    assert len(token.prompt.logprobs) == len(PROMPT)
    assert isinstance(parked, Parked)
    assert parked.num_cached == 0


async def test_both_roles_report_the_same(workers: object) -> None:
    prefill, combined = workers.start("prefill"), workers.start("both")
    leg = msgspec.structs.replace(prefill_leg("r"), options=PromptOptions(report=True, logprobs=2))
    events = prefill.prefill.run(leg)
    token = await anext(events)
    await events.aclose()
    whole = await collect(combined.combined.run(leg))
    assert isinstance(whole[0], Token)
    assert whole[0] == token, "bit for bit"
    assert all(event.prompt is None for event in whole[1:-1])
    assert isinstance(whole[-1], Finished)
    assert whole[-1].num_cached == 0
    assert token_ids(whole)[0] == token.token_id


async def test_a_continued_leg_reports_nothing(workers: object) -> None:
    combined = workers.start("both")
    options = PromptOptions(report=True, logprobs=2)
    first = await collect(
        combined.combined.run(msgspec.structs.replace(prefill_leg("r"), options=options))
    )
    given = token_ids(first)[:3]
    leg = prefill_leg("r", attempt=1, emitted=given)
    again = await collect(combined.combined.run(msgspec.structs.replace(leg, options=options)))
    assert token_ids(again) == token_ids(first)[3:]
    assert all(event.prompt is None for event in again if isinstance(event, Token))
