"""Clients that users have, against the shipped model: what they send and read is there.

OpenAI's own client is run as it is; `vllm bench serve` and guidellm are there as the requests they
send and the way they read.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from bench_readers import (
    Read,
    counts,
    guidellm_body,
    read_as_guidellm,
    read_as_vllm,
    vllm_chat,
    vllm_completion,
)
from openai_kit import DEADLINE_S, Client, gather
from pydantic import BaseModel, ConfigDict, Field

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "Once upon a time there was"
MESSAGES: Any = [{"role": "user", "content": "Tell me a tale of a reader."}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12}


class Animal(BaseModel):
    """An answer's shape, as a user of the client writes it."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=8)
    kind: Literal["fox", "owl"]


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=8)
    unit: Literal["C", "F"]


@pytest.fixture(scope="module")
def served(tool_tales_1p1d: Client) -> Client:
    return tool_tales_1p1d


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def user(served: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
    ) as client:
        yield client


# OpenAI's client.


async def test_models_are_listed_and_found(user: openai.AsyncOpenAI, served: Client) -> None:
    assert [model.id async for model in user.models.list()] == [served.model]
    assert (await user.models.retrieve(served.model)).owned_by == "neuron-di"
    with pytest.raises(openai.NotFoundError):
        await user.models.retrieve("nobody")


async def test_a_stream_is_the_whole_answer(user: openai.AsyncOpenAI, served: Client) -> None:
    whole = await user.completions.create(model=served.model, prompt=PROMPT, **GREEDY)
    chunks = await user.completions.create(model=served.model, prompt=PROMPT, stream=True, **GREEDY)
    assert "".join([chunk.choices[0].text async for chunk in chunks]) == whole.choices[0].text
    until: Any = {"temperature": 0, "max_tokens": 200, "stop": ["."]}
    answer = await user.chat.completions.create(model=served.model, messages=MESSAGES, **until)
    async with user.chat.completions.stream(
        model=served.model, messages=MESSAGES, stream_options={"include_usage": True}, **until
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == answer.choices[0].message.content
    assert final.choices[0].finish_reason == answer.choices[0].finish_reason == "stop"
    assert final.usage == answer.usage
    assert kinds.count("content.done") == 1


async def test_the_client_without_asyncio(served: Client) -> None:
    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(
            base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
        ) as client:
            whole = client.chat.completions.create(model=served.model, messages=MESSAGES, **GREEDY)
            chunks = client.chat.completions.create(
                model=served.model, messages=MESSAGES, stream=True, **GREEDY
            )
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
            return whole.choices[0].message.content, "".join(pieces)

    whole, joined = await asyncio.to_thread(ask)
    assert whole
    assert whole == joined


async def test_an_answer_is_parsed_into_a_class(user: openai.AsyncOpenAI, served: Client) -> None:
    answer = await user.chat.completions.parse(
        model=served.model, messages=MESSAGES, response_format=Animal, temperature=0,
        max_completion_tokens=100,
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Animal)
    async with user.chat.completions.stream(
        model=served.model, messages=MESSAGES, response_format=Animal, temperature=0,
        max_completion_tokens=100,
    ) as stream:  # fmt: skip
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    with pytest.raises(openai.LengthFinishReasonError):
        await user.chat.completions.parse(
            model=served.model, messages=MESSAGES, response_format=Animal, max_completion_tokens=3
        )


async def test_tools_are_called_and_parsed(user: openai.AsyncOpenAI, served: Client) -> None:
    asked: Any = {
        "model": served.model,
        "messages": MESSAGES,
        "tools": [openai.pydantic_function_tool(Weather)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_completion_tokens": 150,
    }
    answer = await user.chat.completions.parse(**asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    async with user.chat.completions.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert kinds.count("tool_calls.function.arguments.done") == 1
    # The call goes back with its result, and the chat goes on.
    turns = [
        *MESSAGES,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]  # fmt: skip
    after = await user.chat.completions.create(model=served.model, messages=turns, **GREEDY)  # type: ignore[arg-type]
    assert after.choices[0].message.content


async def test_the_raw_response_has_our_headers(user: openai.AsyncOpenAI, served: Client) -> None:
    raw = await user.chat.completions.with_raw_response.create(
        model=served.model, messages=MESSAGES, extra_headers={"X-Request-Id": "mine-1"}, **GREEDY
    )
    assert raw.headers["content-type"] == "application/json"
    assert raw.headers["x-request-id"] == "mine-1"
    answer = raw.parse()
    assert answer._request_id == "mine-1"
    async with user.chat.completions.with_streaming_response.create(
        model=served.model, messages=MESSAGES, stream=True, **GREEDY
    ) as streamed:
        assert streamed.headers["content-type"] == "text/event-stream"
        lines = [line async for line in streamed.iter_lines()]
    assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_errors_are_the_clients_own(user: openai.AsyncOpenAI, served: Client) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        await user.completions.create(model=served.model, prompt=PROMPT, top_p=0)
    assert (wrong.value.param, wrong.value.code) == ("top_p", "invalid_request")
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.request_id
    with pytest.raises(openai.NotFoundError):
        await user.completions.create(model="nobody", prompt=PROMPT, stream=True)


# `vllm bench serve`.


async def ask_as_vllm(served: Client, body: dict[str, Any], number: int = 0) -> Read:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {"x-request-id": f"benchmark-serving{number}", "Authorization": "Bearer unused"}
    async with asyncio.timeout(DEADLINE_S), served.session.post(
        served.url + path, json=body, headers=headers
    ) as response:  # fmt: skip
        assert response.status == 200, await response.text()
        return await read_as_vllm(response)


async def test_vllm_bench_finds_the_model_and_the_tokenizer(served: Client) -> None:
    """Without flags it takes both names from the first model, and checks its prompts' length."""
    (model,) = (await served.get("/v1/models"))["data"]
    assert (model["id"], model["root"]) == (served.model, served.model)
    body: dict[str, Any] = {"model": model["id"], "prompt": PROMPT, "add_special_tokens": False}
    async with served.session.post(f"{served.url}/tokenize", json=body) as response:
        tokens = (await response.json())["tokens"]
    body = {"model": model["id"], "tokens": tokens}
    async with served.session.post(f"{served.url}/detokenize", json=body) as response:
        assert (await response.json())["prompt"] == PROMPT


@pytest.mark.parametrize("output_len", [1, 2, 24])
async def test_vllm_bench_counts_every_token(served: Client, output_len: int) -> None:
    whole = await served.ask(PROMPT, max_tokens=output_len, ignore_eos=True)
    body = vllm_completion(served.model, PROMPT, output_len, ignore_eos=True, temperature=0.0)
    read = await ask_as_vllm(served, body)
    assert read.is_done
    assert read.text == whole.text
    assert counts(read.usage) == (whole.usage["prompt_tokens"], output_len)
    assert 1 <= read.num_steps <= output_len + 1


async def test_vllm_bench_of_chats(served: Client) -> None:
    whole = await served.ask(
        [{"role": "user", "content": PROMPT}], max_completion_tokens=24, ignore_eos=True
    )
    body = vllm_chat(served.model, PROMPT, 24, ignore_eos=True, temperature=0.0)
    read = await ask_as_vllm(served, body)
    assert (read.is_done, read.text) == (True, whole.text)
    assert counts(read.usage) == counts(whole.usage)


async def test_vllm_bench_with_all_its_sampling_flags(served: Client) -> None:
    """As many at once as it likes; prompts are texts or, of some data sets, token ids."""
    flags = {
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "temperature": 0.7,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    }
    bodies = [vllm_completion(served.model, PROMPT, 8, **flags, logprobs=1) for _ in range(6)]
    bodies += [vllm_completion(served.model, [11, 12, 13], 8, **flags) for _ in range(6)]
    bodies += [vllm_chat(served.model, PROMPT, 8, **flags) for _ in range(6)]
    reads = await gather(*(ask_as_vllm(served, body, number) for number, body in enumerate(bodies)))
    assert {counts(read.usage)[1] for read in reads} == {8}
    assert all(read.is_done and read.text for read in reads)


# guidellm.


async def ask_as_guidellm(served: Client, body: dict[str, Any]) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with asyncio.timeout(DEADLINE_S), served.session.post(
        served.url + path, json=body
    ) as response:  # fmt: skip
        assert response.status == 200, await response.text()
        return await (read_as_guidellm(response) if "stream" in body else response.json())


async def test_guidellm_finds_the_server_healthy(served: Client) -> None:
    async with served.session.get(f"{served.url}/health") as response:
        assert response.status == 200
    assert [each["id"] for each in (await served.get("/v1/models"))["data"]] == [served.model]


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": PROMPT},
        {"messages": [{"role": "user", "content": PROMPT}]},
        {"messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        ]},
    ],
    ids=["completion", "chat", "parts"],
)  # fmt: skip
async def test_guidellm_counts_what_it_asked_for(served: Client, prompt: dict[str, Any]) -> None:
    body = guidellm_body(served.model, 20, stream=True, temperature=0, **prompt)
    read = await ask_as_guidellm(served, body)
    body = guidellm_body(served.model, 20, stream=False, temperature=0, **prompt)
    whole = await ask_as_guidellm(served, body)
    (choice,) = whole["choices"]
    assert read.is_done
    assert read.text == (choice["text"] if "prompt" in prompt else choice["message"]["content"])
    assert counts(read.usage) == counts(whole["usage"])
    assert counts(read.usage)[1] == 20
    assert read.usage["prompt_tokens_details"].keys() == {"cached_tokens"}
    assert read.answer_id


async def test_guidellm_without_a_length(served: Client) -> None:
    """Then the model's own end is the end."""
    body = guidellm_body(served.model, None, stream=True, prompt=PROMPT)
    read = await ask_as_guidellm(served, body)
    assert read.is_done
    assert counts(read.usage)[1] >= 1


async def test_guidellm_with_tools(served: Client) -> None:
    """It sends `required` and no length, takes calls apart by index, and sends the results."""
    tools: Any = [openai.pydantic_function_tool(Weather)]
    asked = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "temperature": 0}
    read = await ask_as_guidellm(served, guidellm_body(served.model, None, stream=True, **asked))
    (call,) = read.tool_calls.values()
    assert call["name"] == "Weather"
    assert Weather.model_validate_json(call["arguments"])
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
    ]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"sky": "blue"})},
    ]
    body = guidellm_body(served.model, 8, stream=True, messages=turns, tools=tools)
    after = await ask_as_guidellm(served, body | {"tool_choice": "none"})
    assert counts(after.usage)[1] == 8
