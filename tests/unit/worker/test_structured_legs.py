"""Structured output across the hand-over: two workers say what one says, and keep the grammar."""

import asyncio
import json
import re

import msgspec
import pytest
from worker_kit import collect, decode_leg, outcome, prefill_leg, token_ids

from neuron_di.errors import BadRequest
from neuron_di.request import Tokenizer
from neuron_di.wire import CallGrammar, Finished, Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
FIELDS = {
    "grammar": Grammar(kind="json_schema", value=json.dumps(SCHEMA)),
    "max_tokens": 300,
    "temperature": 1.0,
    "seed": 4,
    "bad_words": ("the",),
    "logit_bias": ((400, 5.0),),
}


EITHER = msgspec.structs.replace(
    FIELDS["grammar"],
    calls=CallGrammar(format="hermes", call_schema='{"const": "a call"}', is_parallel=False),
)


def text_of(events):
    return "".join(getattr(event, "text", "") for event in events)


async def test_two_workers_write_the_same_valid_answer(workers, prefill, decode):
    both = workers.start("both")
    whole = await collect(both.combined.run(prefill_leg("r", **FIELDS)))
    first, rest = await asyncio.gather(
        collect(prefill.prefill.run(prefill_leg("r", **FIELDS))),
        collect(decode.decode.run(decode_leg("r", prefill, **FIELDS))),
    )
    assert token_ids(first + rest) == token_ids(whole)
    answer = json.loads(text_of(first + rest))
    assert sorted(answer) == ["n", "name"]
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason == "stop"


async def test_a_later_attempt_goes_on_in_the_grammar(workers, prefill, decode):
    both = workers.start("both")
    whole = await collect(both.combined.run(prefill_leg("r", **FIELDS)))
    ids = token_ids(whole)
    for attempt, num_emitted in enumerate((1, len(ids) // 2, len(ids) - 1)):
        given = {"attempt": attempt, **FIELDS}
        first, rest = await asyncio.gather(
            outcome(
                collect(prefill.prefill.run(prefill_leg("r", emitted=ids[:num_emitted], **given)))
            ),
            outcome(
                collect(
                    decode.decode.run(decode_leg("r", prefill, num_emitted=num_emitted, **given))
                )
            )
            if num_emitted < len(ids) - 1
            else asyncio.sleep(0, []),
        )
        assert token_ids(first + rest) == ids[num_emitted:]


async def refusal_of(worker, role, prefill, grammar):
    """What a worker says of a leg with this grammar."""
    if role == "decode":
        events = worker.decode.run(decode_leg("r", prefill, grammar=grammar))
    else:
        events = (worker.prefill or worker.combined).run(prefill_leg("r", grammar=grammar))
    error = await outcome(collect(events))
    assert isinstance(error, BadRequest)
    return error


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
async def test_what_cannot_be_compiled_is_refused_by_every_role(workers, prefill, role):
    worker = prefill if role == "prefill" else workers.start(role)
    schema = '{"type": "object", "not": {}}'
    grammar = Grammar(kind="json_schema", value=schema, param="tools")
    error = await refusal_of(worker, role, prefill, grammar)
    assert error.param == "tools"
    assert "not supported: not" in error.message


@pytest.mark.parametrize("begin", ["{", "<"])
async def test_two_workers_keep_the_side_that_the_model_chose(
    workers, prefill, decode, llama_folder, begin
):
    both = workers.start("both")
    pieces = Tokenizer.load(llama_folder)
    ids = [i for i in range(pieces.num_vocab) if pieces.token_text(i).startswith(begin)]
    fields = {**FIELDS, "grammar": EITHER, "logit_bias": tuple((i, 50.0) for i in ids)}
    whole = await collect(both.combined.run(prefill_leg("r", **fields)))
    first, rest = await asyncio.gather(
        collect(prefill.prefill.run(prefill_leg("r", **fields))),
        collect(decode.decode.run(decode_leg("r", prefill, **fields))),
    )
    assert token_ids(first + rest) == token_ids(whole)
    text = text_of(first + rest)
    assert rest[-1].reason == "stop"
    if begin == "{":
        assert sorted(json.loads(text)) == ["n", "name"]
    else:
        assert re.fullmatch(r'<tool_call>\s*"a call"\s*</tool_call>\s*', text)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize("param", ["tools", "response_format"])
async def test_of_two_grammars_the_one_at_fault_is_named(workers, prefill, role, param):
    worker = prefill if role == "prefill" else workers.start(role)
    schemas = {"tools": "{}", "response_format": "{}", param: '{"type": "object", "not": {}}'}
    calls = CallGrammar(format="hermes", call_schema=schemas["tools"])
    grammar = Grammar(kind="json_schema", value=schemas["response_format"], calls=calls)
    error = await refusal_of(worker, role, prefill, grammar)
    assert error.param == param
