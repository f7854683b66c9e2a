"""Several choices at once: whose token comes when, and what one end means for the others."""

import asyncio
import json

import pytest
from scripted_worker import finished, token

from neuron_di.errors import CapacityError, PeerGone
from neuron_di.types import RequestId
from neuron_di.wire import Finished
from neuron_di_proxy.answer import StreamedAnswer, WholeAnswer
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.choices import Choice, choice_id, run_choices
from neuron_di_proxy.completion_request import read_completion
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.openai_response import answer_to
from neuron_di_proxy.receipts import RequestRecord

HEADERS = [("content-type", "text/event-stream")]


class WrittenReply:
    """A Reply that keeps what is written."""

    def __init__(self):
        self.has_begun = False
        self.length = None
        self.pieces = []
        self.has_ended = False

    def begin(self, status, headers, *, length, first=b""):
        self.has_begun = True
        self.length = length
        self.write(first)

    def write(self, data):
        self.pieces.append(data)

    def end(self, last=b""):
        self.write(last)
        self.has_ended = True

    def documents(self):
        """What the SSE events say; `[DONE]` as it is."""
        parts = b"".join(self.pieces).decode().split("\n\n")[:-1]
        texts = [part.removeprefix("data: ") for part in parts]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


class Run:
    """Choices that say what the test tells them to, in its own order."""

    def __init__(self, num_choices, *, stream=True, **fields):
        body = {"model": "tiny", "prompt": "hi", "n": num_choices, "stream": stream} | fields
        wanted = read_completion(
            json.dumps(body).encode(), choices_max=8, traits_of=lambda _: ModelTraits()
        )
        self.said = [asyncio.Queue() for _ in range(num_choices)]
        self.closed = []  # the choices that ended, in that order
        self.ends = {}  # what was counted, by request id
        self.gaps = Histogram([1.0])
        self.reply = WrittenReply()
        ids = [choice_id(RequestId("r"), index) for index in range(num_choices)]
        self.records = [RequestRecord(request_id=each, model="tiny") for each in ids]
        kind = StreamedAnswer if stream else WholeAnswer
        answer = answer_to(wanted, RequestId("r"), ModelTraits())
        sink = kind(answer, self.records, self.reply, lambda: HEADERS)
        self.choices = [
            Choice(index, wanted.choice(index), record, sink, self._end, self.gaps)
            for index, record in enumerate(self.records)
        ]

    def start(self):
        self.task = asyncio.create_task(run_choices(self.choices, self))
        return self.task

    async def run(self, request, record, emit, make_lane):
        """As the proxy's runner does."""
        assert isinstance(request, ChoiceRequest)
        index = self.records.index(record)
        try:
            while True:
                said = await self.said[index].get()
                if isinstance(said, Exception):
                    raise said
                if isinstance(said, Finished):
                    record.finished = said
                    return said
                record.count_token(said)
                emit(said)
        finally:
            await asyncio.shield(asyncio.sleep(0))
            self.closed.append(index)

    def _end(self, receipt, code):
        assert receipt.request_id not in self.ends, "each is counted once"
        self.ends[receipt.request_id] = (receipt.finish_reason, code)

    def say(self, index, *events):
        for event in events:
            self.said[index].put_nowait(event)

    def reasons(self):
        return [self.ends.get(record.request_id, (None,))[0] for record in self.records]


async def settle():
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def short(document):
    choice = document["choices"][0]
    return choice["index"], choice["text"], choice["finish_reason"]


def test_choices_have_ids_by_which_their_receipts_are_found():
    assert [choice_id(RequestId("r"), index) for index in range(3)] == ["r", "r-1", "r-2"]


async def test_tokens_are_written_the_moment_they_come():
    run = Run(3)
    task = run.start()
    order = [(2, token(0)), (0, token(0)), (2, token(1)), (1, token(0)), (2, finished(2)),
             (0, finished(1)), (1, finished(1))]  # fmt: skip
    for number, (index, event) in enumerate(order, 1):
        run.say(index, event)
        await settle()
        assert len(run.reply.pieces) == number
        assert run.reply.documents()[number - 1]["choices"][0]["index"] == index
    await task
    assert run.reasons() == ["length"] * 3
    assert run.reply.has_ended


async def test_a_stream_has_one_end_for_every_choice_and_one_for_all():
    run = Run(2, stream_options={"include_usage": True})
    task = run.start()
    run.say(1, token(0), finished(1))
    await settle()
    run.say(0, token(0), token(1), finished(2))
    await task
    *texts, usage, done = run.reply.documents()
    assert [short(each) for each in texts] == [
        (1, "Once", None),
        (1, "", "length"),
        (0, "Once", None),
        (0, " upon", None),
        (0, "", "length"),
    ]
    assert {each["id"] for each in texts} == {"cmpl-r"}
    assert usage["choices"] == []
    counts = usage["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (5, 3)
    assert counts["total_tokens"] == 8
    assert done == "[DONE]"
    assert run.gaps.count() == 1, "between the two tokens of choice 0"


async def test_a_whole_answer_has_its_choices_by_index():
    run = Run(3, stream=False)
    task = run.start()
    for index, events in (
        (2, [token(0), finished(1)]),
        (1, [token(1), finished(1, reason="stop")]),
        (0, [token(2), finished(1)]),
    ):
        assert not run.reply.has_begun
        run.say(index, *events)
        await settle()
    await task
    body = b"".join(run.reply.pieces)
    assert run.reply.length == len(body)
    answer = json.loads(body)
    assert [short({"choices": [choice]}) for choice in answer["choices"]] == [
        (0, " a", "length"),
        (1, " upon", "stop"),
        (2, "Once", "length"),
    ]
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_raised_when_all_others_have_ended(stream):
    run = Run(3, stream=stream)
    task = run.start()
    await settle()
    run.say(1, CapacityError("full"))
    with pytest.raises(CapacityError):
        await task
    assert not run.reply.has_begun
    assert sorted(run.closed) == [0, 1, 2]
    assert run.reasons() == ["cancelled", "error", "cancelled"]
    assert run.ends["r-1"] == ("error", "over_capacity")


async def test_of_two_failures_one_is_raised_and_both_are_counted():
    run = Run(3)
    task = run.start()
    await settle()
    run.say(1, PeerGone("d1 is gone"))
    run.say(2, PeerGone("d2 is gone"))
    with pytest.raises(PeerGone):
        await task
    assert run.reasons()[0] == "cancelled"
    assert run.reasons()[1:].count("error") >= 1


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_client_that_leaves_cancels_every_choice(num_choices):
    run = Run(num_choices)
    task = run.start()
    run.say(0, token(0))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(run.closed) == list(range(num_choices))
    assert run.reasons() == ["cancelled"] * num_choices
    assert not run.reply.has_ended


async def test_one_choice_is_run_without_any_task():
    run = Run(1)
    run.say(0, token(0), finished(1))
    before = asyncio.all_tasks()
    await run_choices(run.choices, run)
    assert asyncio.all_tasks() == before
    assert run.reply.documents()[-1] == "[DONE]"


async def test_no_task_is_left():
    run = Run(3)
    for index in range(3):
        run.say(index, token(0), finished(1))
    await run.start()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_stream_whose_tokens_say_nothing_yet_has_begun():
    """Its status is known, and clients measure their time to the first byte."""
    run = Run(1)
    task = run.start()
    run.say(0, token(0))
    await settle()
    assert run.reply.has_begun
    run.say(0, finished(1))
    await task


async def test_a_client_that_leaves_before_anything_runs_cancels_every_choice():
    run = Run(3)
    task = run.start()
    await asyncio.sleep(0)  # the choices have tasks, none of which has run
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert run.reasons() == ["cancelled"] * 3
