"""A worker that goes on after the last token that was asked for: it would do so for minutes."""

import json

import pytest
from raw_http import RawClient, post
from scripted_worker import finished, play_prefill, token

CONTEXT_TOKENS = 2048  # of a scripted worker
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def play_more(num_tokens):
    async def script(leg):
        for index in range(1, num_tokens):
            await leg.send(token(index, "x"))
        await leg.finish(finished(num_tokens))

    return script


async def answer(cluster, path, body):
    cluster.prefill.script = play_prefill
    async with RawClient(cluster.proxy.address) as raw:
        raw.send(post(path, body))
        return await raw.response()


@pytest.mark.parametrize(
    ("path", "body", "num_wanted"),
    [("/v1/completions", COMPLETION, 3), ("/v1/chat/completions", CHAT, CONTEXT_TOKENS)],
)
async def test_a_stream_has_no_more_than_was_asked_for(cluster, path, body, num_wanted):
    cluster.decode.script = play_more(num_wanted + 2)
    response = await answer(cluster, path, body | {"stream": True})
    *tokens, error = response.body.removesuffix(b"\n\n").split(b"\n\n")
    texts = [each for each in tokens if b'"x"' in each]
    assert len(texts) == num_wanted - 1  # and prefill's one
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "remote_protocol_error"


async def test_a_whole_answer_is_not_gathered_without_end(cluster):
    cluster.decode.script = play_more(5)
    response = await answer(cluster, "/v1/completions", COMPLETION)
    assert (response.status, response.error["code"]) == (502, "remote_protocol_error")


async def test_all_that_was_asked_for_may_come(cluster):
    cluster.decode.script = play_more(3)
    response = await answer(cluster, "/v1/completions", COMPLETION)
    assert json.loads(response.body)["choices"][0]["text"] == "Oncexx"
