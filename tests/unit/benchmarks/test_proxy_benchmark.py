"""The proxy benchmark end to end without a proxy, and how it counts and judges."""

import asyncio
import json
import time
from dataclasses import replace
from urllib.request import urlopen

import pytest

from benchmarks.contenders.proxies import ProxyCommand, direct, ours
from benchmarks.proxy import cells_of, make_parser, requests_per_stream
from benchmarks.proxy_load import Load, Run, Stream
from benchmarks.proxy_plot import plot_proxies
from benchmarks.proxy_process import START_TIMEOUT_S, RunningProxy, free_ports, stub_workers
from benchmarks.proxy_prompts import FIRST_TOKEN, added, growth, growth_findings, prompt_tables
from benchmarks.proxy_report import Cell, ProxyReport, Sample, row_of, stream_rows
from benchmarks.proxy_text import findings, pages_of, verdict, write_report

CELL = Cell(16, 8, 1000)
STAMP = b"~0000000000000000001~"


def test_every_token_of_the_stub_reaches_the_client():
    with stub_workers(0.002) as stubs:
        proxy = RunningProxy(direct(stubs, 0), log=None)
        seen = proxy.measure(Load(0, 3, 2, reply_tokens=5, prompt_tokens=10_000, timeout_s=20.0))
    assert (seen["complete"], seen["tokens"]) == (6, 30)
    assert (seen["short"], seen["cut"], seen["refused"], seen["late"]) == (0, 0, 0, 0)
    assert seen["client_cpu_s"] > 0
    assert 0 < seen["travel_ns"]["p50"] <= seen["travel_ns"]["p99"] <= seen["travel_ns"]["most"]


def test_the_stub_workers_pass_the_proxys_self_test(tmp_path):
    """Or each request would pay for a pair that is taken to be broken."""
    with stub_workers(0.002) as stubs, (tmp_path / "log").open("w+") as log:
        proxy = RunningProxy(ours(stubs, *free_ports(1)), log)
        try:
            proxy.until_ready()
            end_s = time.monotonic() + START_TIMEOUT_S
            pairs = []
            while not pairs and time.monotonic() < end_s:
                with urlopen(f"http://127.0.0.1:{proxy.port}/status", timeout=10) as status:
                    pairs = json.load(status)["pairs"]
        finally:
            proxy.end()
    assert [(pair["outcome"], pair["reason"]) for pair in pairs] == [("ok", "")]


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
        wall_s=2.0,
        requests_per_s=50.0,
        tokens=800,
        cpu_us_per_token=20.0,
        cpu_ms_per_request=0.16,
        harness_cpu_ms_per_request=0.3,
        travel_p50_ms=1.0,
        travel_p99_ms=2.0,
        first_p50_ms=11.0,
        first_p99_ms=15.0,
        rss_mib=50.0,
        complete=100,
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
    less = {"cpu_us_per_token": 10.0, "travel_p50_ms": 0.5, "travel_p99_ms": 1.0}
    less |= {"first_p50_ms": 10.5, "rss_mib": 25.0}
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
    assert findings(made) == []
    assert "below both routers in every row" in verdict(made)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cpu_us_per_token": 20.0}, "CPU per token is 1.00 (1.00–1.00)"),
        ({"travel_p50_ms": 1.5}, "travel p50 is 1.50 (1.50–1.50)"),
        ({"travel_p99_ms": 3.0}, "travel p99 is 1.50 (1.50–1.50)"),
        ({"first_p50_ms": 22.0}, "first token p50 is 2.00 (2.00–2.00)"),
        ({"rss_mib": 60.0}, "memory is 1.20 (1.20–1.20)"),
        ({"late": 1}, "1 streams were lost, cut, refused or late"),
        ({"short": 2, "cut": 1}, "3 streams"),
    ],
)
def test_where_ours_falls_short_it_is_said(changes, told):
    made = report(below(**changes), sample("vllm-router"))
    assert len(findings(made)) == 1
    assert told in verdict(made)


def test_two_processes_are_judged_beside_one():
    made = report(
        below(),
        replace(below(travel_p50_ms=1.5), proxy="neuron-di x2"),
        sample("vllm-router"),
    )
    words = "two processes, 16 × 8 tokens, prompts of 1,000: travel p50 is 1.50 (1.50–1.50)"
    assert findings(made) == [f"{words} of the better router's"]
    titles = [page.title.split(" / ")[0] for page in pages_of(made)][:2]
    assert titles == ["Ours", "Ours with two processes"]


def test_without_a_router_there_is_no_verdict():
    assert "No verdict" in verdict(report(below()))
    assert "No verdict" in verdict(report(sample("vllm-router")))


def test_the_files_say_what_was_measured(tmp_path):
    made = report(below(), sample("vllm-router", cut=3), sample("direct", rss_mib=0.0))
    write_report(made, tmp_path)
    document = json.loads((tmp_path / "proxy.json").read_text())
    assert document["commit"] == "abc"
    assert len(document["samples"]) == 3
    text = (tmp_path / "proxy.md").read_text()
    assert "| 16 | neuron-di | 50.0 | 10.0 | 0.50 | 1.0 | 10.5 | 15.0 | 25 | 0 |" in text
    assert "| 16 | direct | 50.0 |  | 1.00 |" in text
    assert "| 16 | 8 | 1,000 | 0.50 (0.50–0.50) |" in text
    assert "| vllm-router | 100 | 0 | 3 | 0 | 0 |" in text


def test_the_fate_of_streams_is_added_up_over_loads():
    made = report(sample("nginx", 1, late=1), sample("nginx", 2, short=2, refused=1))
    assert stream_rows(made) == [("nginx", "200", "2", "0", "1", "1")]


LONG = Cell(16, 8, 100_000)


def with_long_prompts(ours_ms):
    """Two rounds; from 1,000 to 100,000 tokens, `direct` grows by 2 ms and nginx by 3."""
    firsts = {"direct": (10.0, 12.0), "nginx": (11.0, 14.0), "neuron-di": (12.0, ours_ms)}
    return report(
        *(
            sample(name, number, cell=cell, first_p50_ms=each + number)
            for name, both in firsts.items()
            for number in (1, 2)
            for cell, each in zip((CELL, LONG), both, strict=True)
        )
    )


def test_what_a_prompt_adds_is_taken_above_direct_and_within_rounds():
    made = with_long_prompts(15.5)
    assert added(made, "neuron-di", LONG, FIRST_TOKEN) == [3.5, 3.5]
    assert growth(made, "nginx", [CELL, LONG], FIRST_TOKEN).median == 1.0
    assert growth(made, "vllm-router", [CELL, LONG], FIRST_TOKEN) is None
    columns, rows = prompt_tables(made)["Above direct, 16 streams: first token p50 (ms)"]
    assert columns == ["proxy", "1,000 (4 KiB)", "100,000 (391 KiB)", "growth"]
    assert rows[1] == ("neuron-di", "2.00", "3.50", "1.50 (1.50 to 1.50)")


@pytest.mark.parametrize(("ours_ms", "num_too_much"), [(15.5, 0), (16.0, 0), (16.5, 1)])
def test_more_than_the_bytes_for_two_workers_is_too_much(ours_ms, num_too_much):
    made = with_long_prompts(ours_ms)
    flat, too_much = growth_findings(made)
    assert len(too_much) == num_too_much
    assert len(flat) == 2 - num_too_much  # the first token, and CPU
    assert findings(made) == too_much


def test_the_picture_has_room_for_what_is_missing(tmp_path):
    infinite = sample("vllm-router", cpu_us_per_token=float("inf"))
    for made in (with_long_prompts(15.0), report(below(), infinite)):
        plot_proxies(made, tmp_path / "proxy.png")
        assert (tmp_path / "proxy.png").read_bytes().startswith(b"\x89PNG")


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
        "harness_cpu_s": 0.1,
        "rss_bytes": 1 << 20,
    }
    nothing = Sample.of("neuron-di", CELL, 1, seen)
    assert nothing.num_bad() == 3
    assert nothing.cpu_us_per_token == nothing.travel_p50_ms == float("inf")
    assert row_of([nothing])[-1] == "3"


def test_the_cells_are_those_that_are_asked_for_once_each():
    options = make_parser().parse_args(
        [
            "--streams",
            "1",
            "16",
            "--replies",
            "8",
            "128",
            "--prompts",
            "1000",
            "40000",
            "--prompt-streams",
            "16",
        ]
    )
    assert cells_of(options) == [
        Cell(1, 8, 1000),
        Cell(16, 8, 1000),
        Cell(1, 128, 1000),
        Cell(16, 128, 1000),
        Cell(16, 8, 40_000),
    ]


def test_a_load_lasts_or_has_streams_enough():
    options = make_parser().parse_args(["--cell-s", "3", "--cell-requests", "3000"])
    assert requests_per_stream(16, 0.3, options) == 10
    assert requests_per_stream(1000, 0.3, options) == 3
    assert requests_per_stream(1000, 5.0, options) == 1


class FakeTransport:
    def __init__(self):
        self.is_gone = False
        self.num_written = 0

    def is_closing(self):
        return self.is_gone

    def write(self, _):
        self.num_written += 1


async def test_a_stream_asks_once_and_not_on_a_connection_that_is_gone():
    """A server may close idle connections while the client still opens others."""
    stream, gone, fresh = Stream(Run(Load(1, 1, 1, 2, 1, 10.0))), FakeTransport(), FakeTransport()
    gone.is_gone = True
    stream.connection_made(gone)
    stream.ask()
    stream.connection_made(fresh)
    stream.ask()
    stream.ask()
    assert (gone.num_written, fresh.num_written) == (0, 1)


def test_a_contender_that_ends_is_noticed():
    with open("/dev/null", "w+") as log:
        proxy = RunningProxy(ProxyCommand("x", 1, ("false",)), log)
        try:
            with pytest.raises(Exception, match="x ended"):
                proxy.until_ready()
        finally:
            proxy.end()
