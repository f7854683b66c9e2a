"""Tokens that take a lane and tokens that take the long way: a client sees the same bytes."""

import json
from dataclasses import replace

import pytest
from raw_http import RawClient, post
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import (
    WORDS,
    ScriptedWorker,
    finished,
    parked,
    play_decode,
    play_prefill,
    released,
    token,
)
from test_proxy_front_equal import masked

from neuron_di.config import ProxyOptions
from neuron_di_proxy import leg_link, socket_reply
from neuron_di_proxy.answer import StreamedAnswer
from neuron_di_proxy.token_lane import IS_COMPILED, PlainLinkReader, relay_nothing

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension for tokens was not built")

TEXTS = ["a", "", ' "q" \\ /', "\n\t\x00\x7f", "naïve ☃ 𝄞", "", "x" * 5000, "</script>", "end"]
NUM_TOKENS = 40
COUNTS = ("vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count")
STREAM = {"model": "tiny", "stream": True, "max_tokens": NUM_TOKENS}
CASES = {
    "completion": post("/v1/completions", STREAM | {"prompt": "hi"}),
    "chat": post("/v1/chat/completions", STREAM | {"messages": [{"role": "user", "content": "x"}]}),
    "usage": post(
        "/v1/completions",
        STREAM | {"prompt": "hi", "stream_options": {"include_usage": True}},
    ),
    "usage of each token": post(
        "/v1/completions",
        STREAM
        | {
            "prompt": "hi",
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "a prompt of a list": post("/v1/completions", STREAM | {"prompt": ["a"], "echo": False}),
    "connection: close": post("/v1/completions", STREAM | {"prompt": "hi"}, "Connection: close"),
    "1.0": post("/v1/completions", STREAM | {"prompt": "hi"}, version="1.0"),
}
TAKES_LONG_WAY = {"usage of each token", "1.0"}


def text_of(index):
    return TEXTS[index % len(TEXTS)]


async def prefill(leg):
    await leg.send(token(leg.first_index, text_of(leg.first_index)), parked(), released())


async def decode(leg):
    for index in range(leg.first_index + 1, NUM_TOKENS):
        await leg.send(token(index, text_of(index)))
    await leg.send(finished(NUM_TOKENS))


@pytest.fixture
def talking(cluster):
    cluster.prefill.script, cluster.decode.script = prefill, decode
    return cluster


def without_lanes(monkeypatch):
    monkeypatch.setattr(socket_reply, "IS_COMPILED", False)
    monkeypatch.setattr(leg_link, "relay_told", relay_nothing)
    monkeypatch.setattr(leg_link.LegLink, "data_received", PlainLinkReader.data_received)


def count_long_way(monkeypatch):
    """The indices of the tokens that Python writes from now on."""
    indices = []
    write = StreamedAnswer.token

    def counted(self, index, given):
        indices.append(given.index)
        write(self, index, given)

    monkeypatch.setattr(StreamedAnswer, "token", counted)
    return indices


async def answer(cluster, data):
    async with RawClient(cluster.proxy.address) as raw:
        raw.send(data)
        return await raw.response()


@pytest.mark.parametrize("case", CASES)
async def test_both_ways_write_alike(talking, monkeypatch, case):
    long_way = count_long_way(monkeypatch)
    by_lane = await answer(talking, CASES[case])
    num_by_python = len(long_way)
    without_lanes(monkeypatch)
    by_python = await answer(talking, CASES[case])
    assert masked(by_lane) == masked(by_python)
    assert by_lane.status == 200
    assert b"x" * 5000 in by_lane.framed
    if case in TAKES_LONG_WAY:
        assert num_by_python == NUM_TOKENS
    else:  # decode's first token, where it comes before prefill's last word
        assert num_by_python in (0, 1)


async def test_lanes_take_all_but_the_first_token_of_decode(talking, monkeypatch):
    long_way = count_long_way(monkeypatch)
    await answer(talking, CASES["chat"])
    assert long_way in ([], [1])  # itself, too, where it comes after prefill's last word


@pytest.mark.parametrize("case", ["chat", "completion"])
@pytest.mark.parametrize("first", ["a", "", ' "q" \\ /', "naïve ☃", "x" * 5000])
async def test_an_answer_begins_alike(talking, monkeypatch, case, first):
    async def prefill_of(leg):
        await leg.send(token(0, first), parked(), released())

    talking.prefill.script = prefill_of
    long_way = count_long_way(monkeypatch)
    by_lane = await answer(talking, CASES[case])
    assert (0 in long_way) == (first == "")
    without_lanes(monkeypatch)
    by_python = await answer(talking, CASES[case])
    assert masked(by_lane) == masked(by_python)
    if first:
        begin = by_lane.body.partition(b"\n\n")[0]
        assert json.dumps(first, ensure_ascii=False).encode() in begin


async def test_each_choice_has_a_lane_of_its_own(talking, monkeypatch):
    long_way = count_long_way(monkeypatch)
    response = await answer(
        talking, post("/v1/completions", STREAM | {"prompt": "hi", "n": 3, "seed": 1})
    )
    assert [index for index in long_way if index != 1] == [0, 0, 0]
    for choice in range(3):
        assert response.body.count(b'"index":%d,"text":"end"' % choice) == NUM_TOKENS // len(TEXTS)


async def test_requests_one_after_the_other_on_one_connection(talking):
    async with RawClient(talking.proxy.address) as raw:
        answers = []
        for case in ("chat", "completion", "chat"):
            raw.send(CASES[case])
            answers.append(await raw.response())
    assert masked(answers[0]) == masked(answers[2])


async def test_a_continuation_takes_a_lane_again(stack, monkeypatch):
    async def hangs_up(leg):
        await leg.send(token(1))
        await leg.send(token(2))
        await leg.send(token(3))
        leg.hang_up()

    scripts = {"p1": play_prefill, "d1": hangs_up, "d2": play_decode(10)}
    workers = [
        await stack.enter_async_context(
            ScriptedWorker(name, "decode" if name[0] == "d" else "prefill", script)
        )
        for name, script in scripts.items()
    ]
    limits = replace(AT_ONCE, retries_max=2, continuations_max=2, queue_timeout_s=5)
    config, records = ProxyOptions(limits=limits), [worker.record for worker in workers]
    long_way = count_long_way(monkeypatch)
    bodies = []
    for _ in range(2):
        proxy = await stack.enter_async_context(RunningProxy(config, records))
        async with RawClient(proxy.address) as raw:
            raw.send(CASES["completion"])
            bodies.append((await raw.response()).body)
        if not bodies[1:]:
            # Of the second attempt prefill's token; of each, decode's first if prefill goes on.
            assert [index for index in long_way if index not in (1, 5)] == [4]
        without_lanes(monkeypatch)
    for body in bodies:
        events = [json.loads(each[6:]) for each in body.split(b"\n\n")[:-2]]
        assert "".join(each["choices"][0]["text"] for each in events) == "".join(WORDS)
        assert events[-1]["neuron_di"]["continued"] == 1


async def test_tokens_are_counted_alike(talking, monkeypatch):
    async def counted():
        async with talking.proxy.http.get("/metrics") as response:
            text = await response.text()
        counts = [each for each in text.splitlines() if each.startswith(COUNTS)]
        return [float(line.split()[-1]) for line in counts]

    await answer(talking, CASES["completion"])
    assert await counted() == [1, NUM_TOKENS - 1]
    without_lanes(monkeypatch)
    await answer(talking, CASES["completion"])
    assert await counted() == [2, 2 * (NUM_TOKENS - 1)]
