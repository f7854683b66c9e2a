"""The kit itself: a judge that lets nothing pass, connections that fail as they are told to."""

import asyncio
import copy
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from neuron_di.obs import sync_point

from . import matrix, process
from .client import Manners, Stream, ask
from .cluster import until
from .fault_proxy import FaultProxy
from .faults import FAULTS
from .hold import Hold
from .judge import judge
from .report import CaseReport, table

DEADLINE_S = 30.0
TOKENS = ["a", "b", "c", "d", "e", "f", "g"]


def document(token: str, finish: str | None = None) -> dict:
    logprobs = {"tokens": [token], "token_logprobs": [-1.5]} if token else None
    choice = {"index": 0, "text": token, "logprobs": logprobs, "finish_reason": finish}
    return {"id": "cmpl-1", "choices": [choice]}


def stream_of(tokens: list[str], end: str = "done") -> Stream:
    documents = [document(token) for token in tokens]
    if end == "done":
        documents.append(document("", "length"))
        usage = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
        documents.append({"id": "cmpl-1", "choices": [], "usage": usage})
    stream = Stream(end=end, documents=documents, num_finishes=int(end == "done"))
    if end == "error":
        stream.error_code = "peer_gone"
    return stream


EXPECTED = stream_of(TOKENS)


def test_a_good_answer_and_an_honest_failure():
    verdict = judge(stream_of(TOKENS), EXPECTED)
    assert verdict.is_completed
    assert verdict.is_equal
    assert not verdict.words
    verdict = judge(stream_of(TOKENS[:3], "error"), EXPECTED)
    assert not verdict.words
    assert (verdict.is_completed, verdict.error_code) == (False, "peer_gone")
    assert judge(stream_of([], "stuck"), EXPECTED).is_stuck
    assert judge(stream_of(TOKENS[:2], "left"), EXPECTED).has_left
    assert judge(stream_of(TOKENS[:2], "cut"), EXPECTED).error_code == "connection_cut"


@pytest.mark.parametrize(
    "tokens",
    [["a", "b", "b", *TOKENS[2:]], [*TOKENS[:3], *TOKENS[4:]], TOKENS[:-1], [*TOKENS, "g"]],
    ids=["doubled", "missing", "the last is missing", "the last is doubled"],
)
def test_a_missing_or_doubled_token_is_found(tokens: list[str]):
    verdict = judge(stream_of(tokens), EXPECTED)
    assert verdict.is_misnumbered
    assert not verdict.is_equal
    assert verdict.words


def _another_grade(stream: Stream) -> None:
    stream.documents[-1]["neuron_di"] = {"continued": 1, "grade": "recomputed"}


def _no_finish(stream: Stream) -> None:
    stream.num_finishes = 0


def _two_finishes(stream: Stream) -> None:
    stream.num_finishes = 2


def _silent(stream: Stream) -> None:
    stream.end = "silent"


def _failed_and_finished(stream: Stream) -> None:
    stream.end, stream.error_code = "error", "peer_gone"


def _failed_without_a_code(stream: Stream) -> None:
    stream.end, stream.num_finishes = "error", 0


def _other_logprob(stream: Stream) -> None:
    stream.documents[2]["choices"][0]["logprobs"]["token_logprobs"] = [-1.25]


def _other_token(stream: Stream) -> None:
    stream.documents[2] = document("x")


def _other_text(stream: Stream) -> None:
    stream.documents[-2]["choices"][0]["text"] = "!"


def _other_text_and_cut(stream: Stream) -> None:
    stream.documents[2]["choices"][0]["text"] = "x"
    del stream.documents[3:]
    stream.end, stream.num_finishes = "cut", 0


def _counted_twice(stream: Stream) -> None:
    usage = stream.documents[-1]["usage"]
    usage.update(prompt_tokens=6, total_tokens=13)


def _not_counted(stream: Stream) -> None:
    del stream.documents[-1]


def _other_reason(stream: Stream) -> None:
    stream.documents[-2]["choices"][0]["finish_reason"] = "stop"


@pytest.mark.parametrize(
    "spoil",
    [
        _no_finish,
        _another_grade,
        _two_finishes,
        _silent,
        _failed_and_finished,
        _failed_without_a_code,
        _other_logprob,
        _other_token,
        _other_text,
        _other_text_and_cut,
        _counted_twice,
        _not_counted,
        _other_reason,
    ],
)
def test_whatever_differs_is_wrong(spoil: Callable[[Stream], None]):
    stream = copy.deepcopy(EXPECTED)
    spoil(stream)
    verdict = judge(stream, EXPECTED)
    assert verdict.is_wrong
    assert not verdict.is_equal


@asynccontextmanager
async def server(*answer: bytes, wait: asyncio.Event | None = None) -> AsyncIterator[FaultProxy]:
    """Says this to everybody once they asked, then hangs up; reached through a FaultProxy."""

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in answer:
            writer.write(piece)
            await writer.drain()
            if wait is not None:
                await wait.wait()
        writer.close()

    listening = await asyncio.start_server(on_client, "127.0.0.1", 0)
    async with listening, FaultProxy(listening.sockets[0].getsockname()[1]) as between:
        yield between


HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def event(payload: dict | str) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return b"data: " + text.encode() + b"\n\n"


async def answer_to(*pieces: bytes) -> Stream:
    async with server(HEAD, *pieces) as between:
        return await ask(f"http://127.0.0.1:{between.port}", {})


async def test_the_client_tells_one_end_from_another():
    tokens = [event(document(token)) for token in TOKENS[:2]]
    last = event(document("", "stop"))
    done = await answer_to(*tokens, b": idle\n\n", last, event("[DONE]"))
    assert (done.end, done.tokens, done.finish_reason) == ("done", TOKENS[:2], "stop")
    assert (done.text, done.flaws) == ("ab", [])
    assert (await answer_to(*tokens)).end == "silent"
    failed = await answer_to(*tokens, event({"error": {"code": "peer_gone"}}))
    assert (failed.end, failed.error_code) == ("error", "peer_gone")
    assert (await answer_to(tokens[0][:9])).flaws == ["the stream ended within an event"]
    assert (await answer_to(event("[DONE]"), tokens[0])).flaws == ["something came after done"]
    after = await answer_to(last, tokens[0], event("[DONE]"))
    assert after.flaws == ["a choice came after the finish reason"]


async def test_an_error_status_needs_its_document():
    refused = b"HTTP/1.1 503 No\r\nConnection: close\r\n\r\n"
    async with server(refused + b'{"error": {"code": "over_capacity"}}') as between:
        stream = await ask(f"http://127.0.0.1:{between.port}", {})
    assert (stream.end, stream.error_code, stream.flaws) == ("error", "over_capacity", [])
    async with server(refused + b"oops") as between:
        stream = await ask(f"http://127.0.0.1:{between.port}", {})
    assert stream.flaws == ["status 503 without an error document"]


async def test_a_client_that_leaves():
    wait = asyncio.Event()
    manners = Manners(leave=asyncio.Event())
    async with server(HEAD, event(document("a")), wait=wait) as between:
        asking = asyncio.create_task(ask(f"http://127.0.0.1:{between.port}", {}, manners))
        await until(between.has_passed)
        manners.leave.set()
        assert (await asyncio.wait_for(asking, DEADLINE_S)).end == "left"
        wait.set()


async def test_a_blocked_direction_keeps_its_bytes():
    async with server(HEAD, event("[DONE]")) as between:
        between.block("down")
        asking = asyncio.create_task(ask(f"http://127.0.0.1:{between.port}", {}))
        await until(between.has_passed)
        num_bytes = between.num_bytes  # the request went up
        await asyncio.sleep(0.05)
        assert (between.num_bytes, asking.done()) == (num_bytes, False)
        between.heal()
        assert (await asyncio.wait_for(asking, DEADLINE_S)).end == "done"


async def test_a_reset_and_a_port_where_nobody_is():
    wait = asyncio.Event()
    async with server(HEAD, event(document("a")), wait=wait) as between:
        asking = asyncio.create_task(ask(f"http://127.0.0.1:{between.port}", {}))
        await until(between.has_passed)
        between.reset()
        assert (await asyncio.wait_for(asking, DEADLINE_S)).end == "cut"
        wait.set()
    async with FaultProxy(between.port) as nobody:  # what it leads to is closed by now
        assert (await ask(f"http://127.0.0.1:{nobody.port}", {})).end == "cut"


async def test_a_hold_stops_the_first_and_lets_the_rest_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_point, "_folder", str(tmp_path))
    loop = asyncio.get_running_loop()
    with Hold(tmp_path, "parked") as hold:
        reaching = loop.run_in_executor(None, sync_point.reach, "parked")
        await hold.come(DEADLINE_S)
        assert not reaching.done()
        hold.let_go()
        await asyncio.wait_for(reaching, DEADLINE_S)
    sync_point.reach("parked")  # blocks for ever if it is still armed
    assert list(tmp_path.iterdir()) == []
    with Hold(tmp_path, "parked") as hold, pytest.raises(TimeoutError):
        await hold.come(0.01)


async def test_a_hold_lets_so_many_pass_first(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_point, "_folder", str(tmp_path))
    loop = asyncio.get_running_loop()
    with Hold(tmp_path, "parked", passing=2) as hold:
        for _ in range(2):
            reaching = loop.run_in_executor(None, sync_point.reach, "parked")
            await asyncio.wait_for(reaching, DEADLINE_S)
        assert not hold.has_come
        reaching = loop.run_in_executor(None, sync_point.reach, "parked")
        await hold.come(DEADLINE_S)
        assert (reaching.done(), hold.pids) == (False, [os.getpid()] * 3)
    await asyncio.wait_for(reaching, DEADLINE_S)


@pytest.mark.parametrize("way", ["by itself", "badly", "well", "killed"])
async def test_an_end_that_nobody_asked_for_is_a_complaint(way):
    tested = process.TestedProcess("proxy", "--port=0", "--prefill-urls=http://127.0.0.1:9")
    await tested.start()
    await tested.ready()
    match way:
        case "by itself":
            os.kill(tested.pid, signal.SIGKILL)
        case "badly":
            tested.terminate()
            os.kill(tested.pid, signal.SIGKILL)
        case "well":
            tested.terminate()
        case "killed":
            await tested.kill()
    await tested.gone()
    complaints = tested.new_complaints()
    assert bool(complaints) == (way in ("by itself", "badly"))
    assert all("ended by itself with" in words for words in complaints)
    assert tested.new_complaints() == []


def test_the_report_says_what_is_wrong():
    good = CaseReport(
        fault=FAULTS["F05"].name, title=FAULTS["F05"].title, phase="q", outcome="R", num_requests=4
    )
    good.num_due = good.num_due_equal = 4
    good.num_equal, good.detect_s, good.gap_s = 4, 0.0125, 1.5
    bad = CaseReport(
        fault=FAULTS["F14"].name, title=FAULTS["F14"].title, phase="d", outcome="C", num_requests=4
    )
    bad.num_due, bad.num_due_equal = 4, 3
    bad.num_equal, bad.num_wrong, bad.failures = 3, 1, ["a flaw"]
    bad.errors["peer_gone"] = 1
    gone = CaseReport(
        fault=FAULTS["F63"].name, title=FAULTS["F63"].title, phase="d", outcome="A", num_requests=4
    )
    reports = [good, bad, gone]
    sent = json.dumps([report.to_plain() for report in reports])
    assert [CaseReport.from_plain(plain) for plain in json.loads(sent)] == reports
    lines = table(reports)
    assert lines[0].split()[:4] == ["fault", "phase", "due", "req"]
    assert " ".join(lines[1].split()) == "F05 queued R 4 0 4 0 0 0 0 0 0 12 1500 -"
    assert lines[2].split()[-1] == "peer_gone:1"
    text = "\n".join(lines)
    assert "3 runs, 2 as they should be; 12 requests: 1 wrong" in text
    assert "of 8 requests that a fault must not end, 7 were completed" in text
    assert lines[-1] == "FAILED F14 d: a flaw"


def test_a_matrix_without_a_case_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["matrix", "--repeats", "0"])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert ended.value.code == 2
    assert "nothing would be tried" in capsys.readouterr().err
