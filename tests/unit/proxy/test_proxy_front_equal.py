"""The front and Quart on hypercorn answer alike: status line, headers and body, byte for byte."""

import re

import pytest
from key_files import write_key_file
from raw_http import RawClient, post
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import play_decode, play_prefill

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy.key_file import KeyRecord, make_key

COMPLETION = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
GREEN = "/v1/completions"
BLUE = "/v1/chat/completions"

# What may differ between two answers to the same request.
_CHANGING = re.compile(rb"[0-9a-f]{32}|(?<=\"created\":)\d+|(?<=date: )[^\r]+|(?<=_s\":)[0-9.e-]+")

CASES = {
    "whole": post(GREEN, COMPLETION),
    "chat": post(BLUE, CHAT),
    "stream": post(GREEN, COMPLETION | {"stream": True}),
    "chat stream with usage": post(BLUE, CHAT | STREAM),
    "two choices": post(GREEN, COMPLETION | {"n": 2, "seed": 3}),
    "two prompts": post(GREEN, COMPLETION | {"prompt": ["a", "b"]}),
    "given id": post(BLUE, CHAT | STREAM, "X-Request-Id: mine"),
    "connection: close": post(GREEN, COMPLETION | STREAM, "Connection: close"),
    "1.0": post(GREEN, COMPLETION | STREAM, version="1.0"),
    "no JSON": post(GREEN, b"{"),
    "nothing": post(BLUE, b""),
    "wrong field": post(BLUE, CHAT | {"temperature": -1}),
    "wrong id": post(BLUE, CHAT, "X-Request-Id: not good"),
    "unknown model": post(GREEN, COMPLETION | {"model": "other"}),
    "compressed": post(GREEN, COMPLETION, "Content-Encoding: gzip"),
    "a form": post(GREEN, COMPLETION, "Content-Type: application/x-www-form-urlencoded"),
    "text": post(BLUE, CHAT | STREAM, "Content-Type: text/plain;charset=UTF-8"),
    "JSON in UTF-8": post(BLUE, CHAT, "content-type: Application/JSON; charset=utf-8"),
    "too large": post(GREEN, b" " * 5000),
}


def masked(response):
    head = "\r\n".join([response.status_line, *(": ".join(pair) for pair in response.headers)])
    return [_CHANGING.sub(b"*", part) for part in (head.encode("latin-1"), response.framed)]


async def both_ways(stack, records, data, front):
    answers = []
    for takes_hot in (True, False):
        config = ProxyOptions(limits=AT_ONCE, front=front)
        proxy = await stack.enter_async_context(RunningProxy(config, records, takes_hot=takes_hot))
        while records and (await proxy.get("/health"))[0] != 200:
            pass
        async with RawClient(proxy.address) as raw:
            raw.send(data)
            answers.append(await raw.response())
    return answers


@pytest.mark.parametrize("case", CASES)
async def test_both_ways_answer_alike(playing, stack, case):
    records = playing.proxy.directory.records
    front, quart = await both_ways(stack, records, CASES[case], FrontOptions(body_bytes_max=4096))
    assert masked(front) == masked(quart)


async def test_both_ways_refuse_alike_where_nobody_serves(stack):
    front, quart = await both_ways(stack, [], CASES["whole"], FrontOptions())
    assert (front.status, masked(front)) == (quart.status, masked(quart))
    assert front.status in (404, 503)


@pytest.mark.parametrize("given", ["", "Bearer wrong", "right"])
async def test_both_ways_ask_for_the_key_alike(playing, stack, tmp_path, given):
    key_id, text, digest = make_key()
    path = tmp_path / "keys.toml"
    write_key_file(path, {key_id: KeyRecord(tenant="t", sha256=digest)})
    header = f"Authorization: {given.replace('right', f'Bearer {text}')}"
    data = post(GREEN, COMPLETION | STREAM, header)
    records = playing.proxy.directory.records
    front, quart = await both_ways(stack, records, data, FrontOptions(api_keys=str(path)))
    assert front.status == (200 if given == "right" else 401)
    assert masked(front) == masked(quart)


async def test_both_ways_break_a_stream_off_alike(cluster, stack):
    cluster.prefill.script = play_prefill

    async def broken(leg):
        await play_decode(3)(leg) if leg.first_index else await leg.break_off()

    cluster.decode.script = broken
    records = cluster.proxy.directory.records
    front, quart = await both_ways(stack, records, CASES["stream"], FrontOptions())
    assert b'"error"' in front.body
    assert masked(front) == masked(quart)
