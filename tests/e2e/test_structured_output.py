"""Structured output, whatever happens between its first token and its last."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from chaos.hold import Hold
from openai_kit import DEADLINE_S, Client, Refused, gather
from process_kit import session_of_many

from neuron_di.config import EngineOptions, LogOptions, ServeOptions
from neuron_di.llm import LLM
from neuron_di.obs.sync_point import VARIABLE
from neuron_di.serve import Fleet
from neuron_di.wire import Grammar, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

CHAT = [{"role": "user", "content": "a reader, please"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["file", "socket", None]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
# Long enough that a worker dies in the middle of it.
LIST = {
    "type": "array",
    "items": {"type": "string", "maxLength": 12},
    "minItems": 60,
    "maxItems": 60,
}
STEPS_BEFORE = 20  # of an answer's decode worker, when it is killed


def asking_for(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def assert_fits(text: str) -> None:
    answer = json.loads(text)
    assert sorted(answer) == sorted(SCHEMA["required"])
    assert len(answer["name"]) <= 10
    assert answer["kind"] in ("file", "socket", None)
    assert 1 <= len(answer["sizes"]) <= 3
    assert all(type(size) is int and 0 <= size <= 999 for size in answer["sizes"])


async def test_two_workers_one_worker_and_one_process_write_the_same(
    llama_1p1d: Client, llama_combined: Client, llama_llm: LLM
) -> None:
    cases = [{"temperature": temperature, "seed": seed} for temperature, seed in
             ((0.0, 0), (1.0, 1), (1.0, 2), (1.8, 3))]  # fmt: skip
    fields = {"response_format": asking_for(SCHEMA), "max_tokens": 400, "top": 2}
    pair = await gather(*(llama_1p1d.ask("def main(", **case, **fields) for case in cases))
    whole = await gather(*(llama_combined.ask("def main(", **case, **fields) for case in cases))
    for case, ours, theirs in zip(cases, pair, whole, strict=True):
        assert ours.finish_reason == "stop"
        assert_fits(ours.text)
        assert (ours.text, ours.labels, ours.logprobs) == (
            theirs.text, theirs.labels, theirs.logprobs
        )  # fmt: skip
        grammar = Grammar(kind="json_schema", value=json.dumps(SCHEMA))
        sampling = SamplingParams(max_tokens=400, grammar=grammar, **case)
        assert llama_llm.generate(["def main("], sampling)[0].text == ours.text


async def test_a_chat_answers_in_the_schema_too(llama_1p1d: Client) -> None:
    answer = await llama_1p1d.ask(
        CHAT, response_format=asking_for(SCHEMA), max_tokens=400, temperature=1.0, seed=5
    )
    assert_fits(answer.text)


async def test_the_other_rules_hold_on_both_workers(llama_1p1d: Client, llama_llm: LLM) -> None:
    """The first token and the rest alike."""
    encode = llama_llm._model.tokenizer.encode
    allowed = sorted({i for text in "abcde" for i in encode(text, add_special_tokens=False)})
    only = await llama_1p1d.ask(
        "import", allowed_token_ids=allowed, max_tokens=12, temperature=1.5, seed=1
    )
    assert set(only.text) <= set("abcde")
    (z,) = encode("z", add_special_tokens=False)
    biased = await llama_1p1d.ask("import", logit_bias={str(z): 100}, max_tokens=6)
    assert biased.text == "zzzzzz"
    free = await llama_1p1d.ask("import", logit_bias={str(z): 100}, bad_words=["z"], max_tokens=6)
    assert "z" not in free.text
    stop = await llama_1p1d.ask(
        "import", logit_bias={str(z): 100}, stop=["zzz"], include_stop_str_in_output=True,
        max_tokens=6,
    )  # fmt: skip
    assert (stop.text, stop.finish_reason) == ("zzz", "stop")


async def test_what_a_schema_asks_in_vain_is_refused_by_name(llama_1p1d: Client) -> None:
    with pytest.raises(Refused) as caught:
        await llama_1p1d.ask(
            "import", response_format=asking_for({"type": "object", "not": {"const": "canary"}})
        )
    assert caught.value.status == 400
    assert caught.value.error["param"] == "response_format"
    assert "not supported: not" in caught.value.error["message"]
    assert "canary" not in str(caught.value)


async def stream(fleet: Fleet) -> tuple[str, str, list[Any]]:
    """(text, finish reason, the members that tell of a continuation) of one long answer."""
    body = {
        "model": fleet.model_name,
        "prompt": "def main(",
        "seed": 11,
        "temperature": 1.0,
        "max_tokens": 1500,
        "stream": True,
        "response_format": asking_for(LIST),
    }
    text, finish, continued = "", "", []
    async with (
        session_of_many() as session,
        session.post(f"{fleet.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            assert "error" not in chunk
            (choice,) = chunk["choices"]
            text += choice["text"]
            finish = choice["finish_reason"] or finish
            continued.append(chunk.get("neuron_di"))
    return text, finish, [each for each in continued if each is not None]


async def test_an_answer_whose_worker_is_killed_goes_on_in_its_schema(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))  # who is held there cannot be at its end by now
    options = ServeOptions(
        model=str(llama),
        prefill=1,
        decode=1,
        port=0,
        engine=EngineOptions(threads=1),
        log=LogOptions(log_level="error"),
    )
    async with Fleet(options) as fleet:
        undisturbed, finish, none = await stream(fleet)
        with Hold(tmp_path, "decoding", passing=STEPS_BEFORE) as hold:
            streaming = asyncio.create_task(stream(fleet))
            await hold.come(DEADLINE_S)
            os.kill(fleet.pids()["decode-0"], signal.SIGKILL)
        disturbed, finish_disturbed, continued = await streaming
    answer = json.loads(undisturbed)
    assert len(answer) == 60
    assert all(isinstance(item, str) and len(item) <= 12 for item in answer)
    assert (disturbed, finish_disturbed, finish) == (undisturbed, "stop", "stop")
    assert none == []
    assert continued
    assert all(each == {"continued": 1, "grade": "exact"} for each in continued)
