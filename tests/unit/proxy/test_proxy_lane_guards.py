"""When tokens must not take a lane, and what must not forget those that took one."""

import asyncio
import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from lane_rig import Rig
from raw_http import RawClient, post
from scripted_worker import finished, parked, released, token
from streamed_rig import Streamed, tell
from virtual_cluster import (
    REQUEST,
    VirtualCluster,
    VirtualLeg,
    VirtualWorker,
    fail_with,
    failed,
    once,
    silent_after,
)
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.wire import PromptReport, Token
from neuron_di_proxy import token_lane
from neuron_di_proxy.choices import Choice
from neuron_di_proxy.failure import failure_of
from neuron_di_proxy.reply import PING
from neuron_di_proxy.shared_reports import SharedReports
from neuron_di_proxy.token_lane import IS_COMPILED

compiled = pytest.mark.skipif(not IS_COMPILED, reason="the extension for tokens was not built")


def test_an_extension_that_was_built_is_used():
    folder = Path(token_lane.__file__).parent
    is_built = any((folder / f"_token_lane{each}").exists() for each in EXTENSION_SUFFIXES)
    assert is_built == IS_COMPILED


@pytest.fixture
def streamed():
    streamed = Streamed()
    yield streamed
    streamed.rig.close()


@compiled
def test_a_response_begins_behind_what_its_transport_holds(streamed):
    """Its socket has room, but another response's end has still to come before."""
    transport = streamed.rig.transport
    transport.num_waiting = 5
    streamed.hear(0)
    tell(streamed.lane(), 1, 2)
    assert streamed.rig.received() == b""
    written = b"".join(transport.written)
    assert written.startswith(b"HTTP/1.1 200")
    assert written.index(b"t1") < written.index(b"t2")
    transport.num_waiting = 0
    tell(streamed.lane(), 3)
    assert b"t3" in streamed.rig.received()


@compiled
def test_a_stream_whose_tokens_take_a_lane_is_not_pinged(streamed):
    streamed.hear(0)
    lane = streamed.lane()
    for index in range(1, 6):
        tell(lane, index)
        streamed.reply.sweep(1)
    assert PING not in streamed.rig.received()
    streamed.reply.sweep(1)
    assert streamed.rig.received().count(PING) == 1


@pytest.mark.parametrize(
    ("media_type", "is_pinged"), [("text/event-stream", True), ("application/x-ndjson", False)]
)
def test_a_comment_stands_between_events_only(streamed, media_type, is_pinged):
    """The lines of an order are a stream, too: JSON has no comments."""
    reply = streamed.reply
    assert not reply.is_streaming
    reply.begin(200, [("content-type", media_type)], length=None, first=b"1\n")
    assert reply.is_streaming == is_pinged
    reply.end()
    assert not reply.is_streaming


@compiled
def test_there_is_no_lane_before_the_response_has_begun(streamed):
    assert streamed.lane() is None
    streamed.hear(0)
    assert streamed.lane() is not None


@compiled
def test_an_answer_that_waits_for_its_report_has_no_lane():
    lanes = []

    class Sink:
        def token(self, index, token):
            pass

        def lane(self, index, gaps):
            lanes.append(index)
            return object()

    shared = SharedReports(Sink(), 2)
    shared.token(0, token(0))
    assert shared.lane(1, None) is not None
    assert shared.lane(3, None) is None
    shared.token(2, token(0))
    assert shared.lane(3, None) is not None
    assert lanes == [1, 3]


@compiled
async def test_no_token_overtakes_those_that_wait_for_a_report(cluster):
    are_said = asyncio.Event()

    async def prefill(leg):
        if leg.message.request_id.endswith("-2"):
            await are_said.wait()
        report = PromptReport(text="ab", token_ids=[1, 2], logprobs=None)
        given = token(0, prompt=report if leg.message.options.report else None)
        await leg.send(given, parked(), released())

    async def decode(leg):
        for index in range(1, 40):
            await leg.send(token(index, f"({index})"))
        if leg.message.request_id.endswith("-3"):
            are_said.set()
        await leg.send(finished(40))

    cluster.prefill.script, cluster.decode.script = prefill, decode
    body = {"model": "tiny", "prompt": ["ab", "ab"], "n": 2, "echo": True, "stream": True}
    body |= {"seed": 1, "max_tokens": 40}
    async with RawClient(cluster.proxy.address) as raw:
        raw.send(post("/v1/completions", body))
        response = await raw.response()
    assert response.status == 200
    texts = ["", "", "", ""]
    for event in response.body.split(b"\n\n")[:-2]:
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["abOnce" + "".join(f"({index})" for index in range(1, 40))] * 4


class LanedLeg(VirtualLeg):
    """A leg whose tokens take the lane that it was given."""

    lane = None

    def open(self, hear):
        def hear_others(said):
            if self.lane is not None and isinstance(said, Token):
                tell(self.lane, said.index)
            else:
                hear(said)

        super().open(hear_others)

    def relay(self, lane):
        self.lane = lane


class LanedCluster(VirtualCluster):
    def open_leg(self, record, kind, leg):
        opened = LanedLeg(self.workers[record.worker_id], leg)
        self.legs.append(opened)
        return opened


@compiled
@virtual
async def test_who_failed_a_step_is_found_out_though_its_client_leaves_before_the_end():
    """Another worker's second token tells, which is none that takes a lane."""
    script = once(fail_with(failed("worker_failed")), silent_after(5))
    workers = [VirtualWorker(name, "both", script) for name in ("b1", "b2")]
    rig = Rig()
    async with LanedCluster(*workers) as cluster:
        blames = []
        blame = cluster.health.blame

        def note(worker, error, *, is_certain=True):
            blames.append((worker.worker_id, failure_of(error).code, is_certain))
            blame(worker, error, is_certain=is_certain)

        cluster.health.blame = note
        asked = cluster.request()
        record = asked.record

        def make_lane(*, is_first):
            ids = record.emitted
            return rig.lane(due=len(ids), record=record, ids=ids, last_s=now_s())

        running = asyncio.create_task(cluster.runner.run(REQUEST, record, asked.take, make_lane))
        await asyncio.sleep(5)  # virtual seconds, of which five tokens take a few
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(record.attempts) == 2
        guilty = cluster.legs[0].worker_id
        assert [each for each in blames if each[2]] == [(guilty, "worker_failed", True)]
        assert asked.indices == [0, 1, 2, 3, 4]
    rig.close()


@compiled
@virtual
async def test_a_gap_is_counted_from_the_lanes_last_token(streamed):
    gaps = streamed.rig.gaps
    given = []

    class Runner:
        async def run(self, request, record, emit, make_lane):
            def hear(index):
                record.count_token(token(index))
                emit(token(index))

            await asyncio.sleep(1)  # at 0 no token was
            hear(0)
            await asyncio.sleep(1)
            hear(1)
            lane = make_lane(is_first=False)
            for index in (2, 3):
                await asyncio.sleep(2)
                tell(lane, index)
            assert gaps.count() == 3
            await asyncio.sleep(0.25)
            hear(4)
            await asyncio.sleep(8)
            hear(5)
            lane.due = 6
            await asyncio.sleep(4)
            tell(lane, 6)
            return finished(7)

    choice = Choice(
        0,
        streamed.wanted.choice(0),
        streamed.record,
        streamed.sink,
        lambda receipt, code: given.append(receipt),
        gaps,
    )
    await choice.run(Runner())
    (receipt,) = given
    assert receipt.num_generated == 7
    # A token that is heard comes after the last one, whoever took that. The lane does not know of
    # those that were heard: its next gap begins at its own last.
    assert gaps.count() == 6
    assert gaps.total == pytest.approx(1 + 2 + 2 + 0.25 + 8 + 12.25)
