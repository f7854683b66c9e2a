"""The proxy benchmark end to end without a proxy, and how it counts and judges."""

import asyncio
import json
from dataclasses import replace

import pytest

from benchmarks.contenders.proxies import ProxyCommand, direct
from benchmarks.proxy import cells_of, make_parser
from benchmarks.proxy_load import Load, Run
from benchmarks.proxy_process import RunningProxy, stub_workers
from benchmarks.proxy_report import Cell, ProxyReport, Sample, row_of, verdict, write_report

CELL = Cell(16, 8, 1000)
STAMP = b"~0000000000000000001~"


def test_every_token_of_the_stub_reaches_the_client():
    with stub_workers(0.002) as stubs:
        proxy = RunningProxy(direct(stubs, 0), log=None)
        seen = proxy.measure(Load(0, 3, 2, reply_tokens=5, prompt_tokens=10_000, timeout_s=20.0))
    assert (seen["complete"], seen["tokens"]) == (6, 30)
    assert (seen["short"], seen["cut"], seen["refused"], seen["late"]) == (0, 0, 0, 0)
    assert 0 < seen["travel_ns"]["p50"] <= seen["travel_ns"]["p99"] <= seen["travel_ns"]["most"]


def answer(*events, status=b"200 OK", end=b"0\r\n\r\n"):
    body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events)
    return b"HTTP/1.1 %b\r\ntransfer-encoding: chunked\r\n\r\n%b%b" % (status, body, end)


EVENT = b'data: {"text":"' + STAMP + b'"}\n\n'
DONE = b"data: [DONE]\n\n"


async def counts_of(*pieces, hang_up=False):
    """What a client of two tokens counts where a proxy answers with these pieces of bytes."""

    is_served = asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if not hang_up:
            await reader.read()
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        is_served.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        run = Run(Load(port, 1, 1, reply_tokens=2, prompt_tokens=1, timeout_s=10.0))
        seen = await run()
        for each in run.connections:
            each.close()
        async with asyncio.timeout(10):
            await is_served.wait()
    return seen.tokens, seen.complete, seen.short, seen.cut, seen.refused


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_stream_is_complete_however_its_bytes_are_cut(size):
    raw = answer(EVENT, EVENT, DONE)
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert await counts_of(*pieces) == (2, 1, 0, 0, 0)


async def test_a_lost_token_a_doubled_token_a_cut_and_a_refusal_are_told_apart():
    assert await counts_of(answer(EVENT, DONE)) == (1, 0, 1, 0, 0)
    assert await counts_of(answer(EVENT, EVENT, EVENT, DONE)) == (3, 0, 1, 0, 0)
    assert await counts_of(answer(EVENT, EVENT, end=b""), hang_up=True) == (2, 0, 0, 1, 0)
    assert await counts_of(answer(b"{}", status=b"503 No")) == (0, 0, 0, 0, 1)


def sample(name, number=1, **changes):
    usual = Sample(
        proxy=name,
        cell=CELL,
        round=number,
        requests_per_s=50.0,
        tokens=800,
        cpu_us_per_token=20.0,
        travel_p50_ms=1.0,
        travel_p99_ms=2.0,
        first_p50_ms=11.0,
        first_p99_ms=15.0,
        rss_mib=50.0,
        short=0,
        cut=0,
        refused=0,
        late=0,
    )
    return replace(usual, **changes)


def report(*samples):
    names = dict.fromkeys(each.proxy for each in samples)
    return ProxyReport("make", "a machine", "abc", 40.0, 10.0, dict.fromkeys(names, ""), [*samples])


def below(number=1, **changes):
    less = {"cpu_us_per_token": 10.0, "travel_p50_ms": 0.5, "first_p50_ms": 10.5}
    return sample("neuron-di", number, **(less | changes))


def test_ours_is_compared_with_the_better_router_of_the_same_round():
    made = report(
        *(below(number) for number in (1, 2)),
        sample("vllm-router", 1, cpu_us_per_token=20.0),
        sample("sglang-router", 1, cpu_us_per_token=40.0),
        sample("vllm-router", 2, cpu_us_per_token=50.0),
        sample("sglang-router", 2, cpu_us_per_token=25.0),
    )
    ratio = made.ratio(CELL, lambda each: each.cpu_us_per_token)
    assert (ratio.least, ratio.most) == (0.4, 0.5)
    assert made.is_kept()
    assert "below both routers in every row" in verdict(made)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cpu_us_per_token": 20.0}, "CPU per token is 1.00"),
        ({"travel_p50_ms": 1.5}, "travel p50 is 1.50"),
        ({"first_p50_ms": 22.0}, "first token p50 is 2.00"),
        ({"late": 1}, "1 streams were lost, cut, refused or late"),
        ({"short": 2, "cut": 1}, "3 streams"),
    ],
)
def test_where_ours_falls_short_it_is_said(changes, told):
    made = report(below(**changes), sample("vllm-router"))
    assert not made.is_kept()
    assert told in verdict(made)


def test_without_a_router_there_is_no_verdict():
    assert "No verdict" in verdict(report(below()))
    assert "No verdict" in verdict(report(sample("vllm-router")))


def test_the_files_say_what_was_measured(tmp_path):
    made = report(below(), sample("vllm-router"), sample("direct", rss_mib=0.0))
    write_report(made, tmp_path)
    document = json.loads((tmp_path / "proxy.json").read_text())
    assert document["commit"] == "abc"
    assert len(document["samples"]) == 3
    text = (tmp_path / "proxy.md").read_text()
    assert "| 16 | neuron-di | 50.0 | 10.0 | 0.50 | 2.0 | 10.5 | 15.0 | 50 | 0 |" in text
    assert "| 16 | direct | 50.0 |  | 1.00 |" in text
    assert "| 0.50 (0.50 to 0.50) |" in text


def test_a_proxy_that_relayed_nothing_is_bad_and_not_fast():
    seen = {
        "tokens": 0,
        "complete": 0,
        "short": 0,
        "cut": 0,
        "refused": 3,
        "late": 0,
        "wall_s": 1.0,
        "travel_ns": {},
        "first_ns": {},
        "cpu_s": 0.1,
        "rss_bytes": 1 << 20,
    }
    nothing = Sample.of("neuron-di", CELL, 1, seen)
    assert nothing.num_bad() == 3
    assert nothing.cpu_us_per_token == nothing.travel_p50_ms == float("inf")
    assert row_of([nothing])[-1] == "3"


def test_the_cells_are_those_that_are_asked_for_once_each():
    options = make_parser().parse_args(
        ["--streams", "1", "16", "--replies", "8", "128", "--prompts", "1000", "40000"]
    )
    assert cells_of(options) == [
        Cell(1, 8, 1000),
        Cell(16, 8, 1000),
        Cell(1, 128, 1000),
        Cell(16, 128, 1000),
        Cell(16, 8, 40_000),
    ]


def test_a_contender_that_ends_is_noticed():
    with open("/dev/null", "w+") as log:
        proxy = RunningProxy(ProxyCommand("x", 1, ("false",)), log)
        try:
            with pytest.raises(Exception, match="x ended"):
                proxy.until_ready()
        finally:
            proxy.end()
