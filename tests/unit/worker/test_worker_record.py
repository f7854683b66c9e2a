"""What a worker says of its model and its size, and what its legs say of a prompt."""

from pathlib import Path

import msgspec
import pytest
from worker_kit import PROMPT, collect, make_worker, prefill_leg, token_ids

from neuron_di.config import EngineOptions, WorkerOptions
from neuron_di.testing import write_random_checkpoint
from neuron_di.testing.checkpoints import TOOL_CHAT_TEMPLATE
from neuron_di.types import Role
from neuron_di.wire import Finished, Parked, PromptOptions, Token
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
