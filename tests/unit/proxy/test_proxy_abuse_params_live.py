"""Abuse inside a body, sent over HTTP: what no worker hears of, and what a stream survives."""

import asyncio
import json

import pytest
from running_proxy import read_events
from scripted_worker import SeenLeg, finished, token

from neuron_di.errors import BadRequest
from neuron_di.request.chat_messages import check_messages
from neuron_di_proxy.completion_request import MAX_TOKENS_DEFAULT

EVIL = '\n\ndata: [DONE]\n\ndata: {"choices": []}\r\n: ping\n\nevent: error\0\u2028'
BODIES = [
    pytest.param(b"[" * 100_000, id="b10-deep"),
    pytest.param(b'{"model": "tiny", "prompt": ' + b'{"a":' * 100_000, id="b10-deep-prompt"),
    pytest.param(b'{"model": "tiny", "prompt": "a", "prompt": "b"}', id="b10-duplicate"),
    pytest.param(b'{"model": "tiny", "prompt": "a", "temperature": NaN}', id="b10-nan"),
    pytest.param(b'{"model": "tiny", "prompt": "a", "seed": 1%b}' % (b"0" * 400), id="b10-huge"),
    pytest.param(b'{"model": "tiny", "prompt": "\xff"}', id="b11-not-utf-8"),
    pytest.param(b'{"model": "tiny", "prompt": "\\ud800"}', id="b11-surrogate"),
    pytest.param(b'{"model": "tiny", "prompt": "\x00"}', id="b11-nul"),
    pytest.param(b'{"model": "tiny", "prompt": "a", "max_tokens": -1}', id="b12-max-tokens"),
    pytest.param(b'{"model": "tiny", "prompt": "a", "n": 16384}', id="b13-n"),
    pytest.param(b'{"model": "tiny", "prompt": []}', id="b14-no-prompt"),
    pytest.param(b'{"model": "tiny", "prompt": [%b1]}' % (b"1," * 5000), id="b14-over-context"),
    pytest.param(b'{"model": "tiny", "prompt": [-5]}', id="b15-negative"),
    pytest.param(
        b'{"model": "tiny", "prompt": "a", "kv_transfer_params": {"remote_host": "10.0.0.1"}}',
        id="b16-kv-transfer",
    ),
    pytest.param(b'{"model": "tiny", "prompt": "a", "cache_salt": "x"}', id="b19-salt"),
    pytest.param(b'{"model": "tiny", "prompt_embeds": "gASV"}', id="b20-embeds"),
]


@pytest.mark.parametrize("body", BODIES)
async def test_b10_to_b20_reach_no_worker(playing, body):
    for path in ("/v1/completions", "/v1/chat/completions"):
        async with playing.proxy.http.post(path, data=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    assert playing.prefill.legs + playing.decode.legs == []
    status, answer = await playing.proxy.post("/v1/completions", model="tiny", prompt="hi")
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5), "the process lives"


async def test_b18_equal_ids_of_two_clients_never_meet(playing):
    async def ask() -> str:
        body = {"model": "tiny", "prompt": "hi"}
        async with playing.proxy.http.post(
            "/v1/completions", json=body, headers={"X-Request-Id": "same"}
        ) as response:
            assert response.headers["X-Request-Id"] == "same"
            return (await response.json())["id"]

    ids = await asyncio.gather(*(ask() for _ in range(4)))
    inside = {leg.message.request_id for leg in playing.prefill.legs}
    assert len(set(ids)) == len(inside) == 4
    assert "same" not in inside


@pytest.mark.parametrize("part", ["image_url", "input_audio", "video_url", "file", "refusal", 5])
def test_b20_parts_that_are_no_text_are_for_the_worker_to_refuse(part):
    message = {"role": "user", "content": [{"type": part, part: {"url": "http://169.254.169.254"}}]}
    with pytest.raises(BadRequest) as error:
        check_messages(
            [message],
            takes_tool_calls=True,
            takes_calls_with_content=True,
            takes_results=True,
            takes_system=True,
            knows_developer=True,
        )
    assert error.value.param == "messages"
    assert "169.254" not in error.value.message


@pytest.mark.parametrize("chat", [True, False])
async def test_b21_text_that_looks_like_a_stream_stays_one_event(cluster, chat):
    async def play(leg: SeenLeg) -> None:
        await leg.send(token(0, EVIL))
        await leg.finish(finished(1))

    cluster.prefill.script = play
    cluster.decode.script = lambda leg: leg.ended.wait()
    body = {"model": "tiny", "stream": True, "user": EVIL, "max_tokens": MAX_TOKENS_DEFAULT}
    body |= {"messages": [{"role": "user", "content": EVIL}]} if chat else {"prompt": EVIL}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with cluster.proxy.http.post(path, json=body) as response:
        *events, done = [event async for event in read_events(response)]
    assert done == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    texts = [each["delta"].get("content", "") if chat else each["text"] for each in choices]
    assert "".join(texts) == EVIL
    assert sum(each["finish_reason"] is not None for each in choices) == 1
