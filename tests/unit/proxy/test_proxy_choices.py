"""Several choices at once: whose event comes when, and what one end means for the others."""

import asyncio
import json

import pytest
from scripted_worker import finished, token

from neuron_di.errors import CapacityError, PeerGone
from neuron_di.types import RequestId
from neuron_di.wire import Finished
from neuron_di_proxy.answer import Answering
from neuron_di_proxy.choices import Choice, choice_id, events_of
from neuron_di_proxy.metrics import Metrics
from neuron_di_proxy.openai_request import read_completion
from neuron_di_proxy.openai_response import answer_to
from neuron_di_proxy.receipts import ReceiptStore, RequestRecord


class NoGauges:
    def num_running(self):
        return 0

    def retry_budget(self):
        return 0.0

    def health_reports(self):
        return []

    def pair_results(self):
        return []


class Run:
    """Choices whose generations say what the test puts into their queues, in its own order."""

    def __init__(self, num_choices, **fields):
        body = {"model": "tiny", "prompt": "hi", "n": num_choices, "stream": True} | fields
        self.said = [asyncio.Queue() for _ in range(num_choices)]
        self.taken = [0] * num_choices
        self.closed = []  # the choices whose generations ended, in that order
        self.store = ReceiptStore()
        self.metrics = Metrics(NoGauges())
        ids = [choice_id(RequestId("r"), index) for index in range(num_choices)]
        self.records = [RequestRecord(request_id=each, model="tiny") for each in ids]
        self.events = events_of(
            [
                Choice(index, self._generate(index), record, self.store, self.metrics)
                for index, record in enumerate(self.records)
            ]
        )
        answer = answer_to(read_completion(json.dumps(body).encode()), RequestId("r"))
        self.answering = Answering(self.events, answer, self.records)

    async def _generate(self, index):
        try:
            while True:
                said = await self.said[index].get()
                self.taken[index] += 1
                if isinstance(said, Exception):
                    raise said
                if isinstance(said, Finished):
                    self.records[index].finished = said
                else:
                    self.records[index].count_token(said)
                yield said
                if isinstance(said, Finished):
                    return
        finally:
            for _ in range(3):  # as a launch does, which waits for its readers
                await asyncio.sleep(0)
            self.closed.append(index)

    def say(self, index, *events):
        for event in events:
            self.said[index].put_nowait(event)

    def reasons(self):
        receipts = [self.store.get(record.request_id) for record in self.records]
        return [receipt and receipt.finish_reason for receipt in receipts]

    def counted(self, outcome, code=""):
        sample = f'neuron_di_requests_total{{code="{code}",outcome="{outcome}"}} '
        lines = self.metrics.text().decode().splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(sample)), 0)


async def settle():
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def documents(chunks):
    """What the SSE events say; `[DONE]` as it is."""
    parts = b"".join(chunks).decode().split("\n\n")[:-1]
    texts = [part.removeprefix("data: ") for part in parts]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def short(document):
    choice = document["choices"][0]
    return choice["index"], choice["text"], choice["finish_reason"]


def test_choices_have_ids_by_which_their_receipts_are_found():
    assert [choice_id(RequestId("r"), index) for index in range(3)] == ["r", "r-1", "r-2"]


async def test_events_come_in_the_order_of_their_arrival():
    run = Run(3)
    order = [(2, token(0)), (0, token(0)), (2, token(1)), (1, token(0)), (2, finished(2)),
             (0, finished(1)), (1, finished(1))]  # fmt: skip
    for index, event in order:
        waiting = asyncio.create_task(run.events.next())
        await settle()
        run.say(index, event)
        assert await waiting == (index, event)
    assert run.reasons() == ["length"] * 3
    assert run.counted("length") == 3
    await run.answering.close()
    assert run.counted("cancelled") == 0


async def test_events_that_wait_to_be_taken_keep_their_order_and_are_few():
    run = Run(2)
    run.say(0, *(token(index) for index in range(8)))
    assert await run.events.next() == (0, token(0))
    await settle()
    run.say(1, *(token(index) for index in range(8)))
    await settle()
    assert run.taken == [4, 1], "two wait, and each reader holds one; the first was taken"
    got = [await run.events.next() for _ in range(15)]
    for index, first in ((0, 1), (1, 0)):
        mine = [event.index for choice, event in got if choice == index]
        assert mine == list(range(first, 8))
    await run.answering.close()


async def test_a_stream_has_one_end_for_every_choice_and_one_for_all():
    run = Run(2, stream_options={"include_usage": True})
    run.say(1, token(0), finished(1))
    chunks = []

    async def read():
        chunks.extend([chunk async for chunk in await run.answering.begin_stream()])

    reading = asyncio.create_task(read())
    await settle()
    run.say(0, token(0), token(1), finished(2))
    await reading
    *texts, usage, done = documents(chunks)
    assert [short(each) for each in texts] == [
        (1, "Once", None),
        (1, "", "length"),
        (0, "Once", None),
        (0, " upon", None),
        (0, "", "length"),
    ]
    assert {each["id"] for each in texts} == {"cmpl-r"}
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert done == "[DONE]"


async def test_a_whole_answer_has_its_choices_by_index():
    run = Run(3, stream=False)
    run.say(2, token(0), finished(1))
    asking = asyncio.create_task(run.answering.whole())
    await settle()
    run.say(1, token(1), finished(1, reason="stop"))
    await settle()
    run.say(0, token(2), finished(1))
    answer = json.loads(await asking)
    assert [short({"choices": [choice]}) for choice in answer["choices"]] == [
        (0, " a", "length"),
        (1, " upon", "stop"),
        (2, "Once", "length"),
    ]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


@pytest.mark.parametrize("is_whole", [False, True])
async def test_a_failure_before_the_first_byte_is_raised_when_all_are_cancelled(is_whole):
    run = Run(3)
    answering = run.answering
    asking = asyncio.create_task(answering.whole() if is_whole else answering.begin_stream())
    await settle()
    run.say(1, CapacityError("full"))
    with pytest.raises(CapacityError):
        await asking
    assert sorted(run.closed) == [0, 1, 2]
    assert run.reasons() == ["cancelled", "error", "cancelled"]
    assert run.counted("error", "over_capacity") == 1
    assert run.counted("cancelled") == 2


async def test_a_failure_later_is_one_event_and_no_end():
    run = Run(3)
    run.say(0, token(0), finished(1))
    stream = await run.answering.begin_stream()
    chunks = [await anext(stream), await anext(stream)]
    run.say(1, token(0))
    chunks.append(await anext(stream))
    run.say(1, PeerGone("d1 is gone"))
    run.say(2, PeerGone("d2 is gone"))
    chunks += [chunk async for chunk in stream]
    *texts, last = documents(chunks)
    assert [short(each) for each in texts] == [
        (0, "Once", None),
        (0, "", "length"),
        (1, "Once", None),
    ]
    assert last["error"]["code"] == "peer_gone"
    assert last["error"]["message"] == "d1 is gone"
    assert run.reasons() == ["length", "error", "cancelled"]
    await run.answering.close()
    assert run.counted("error", "peer_gone") == 1


async def test_a_failure_cancels_the_others_although_the_client_reads_nothing():
    run = Run(3)
    run.say(0, *(token(index) for index in range(8)))
    stream = await run.answering.begin_stream()
    await settle()
    run.say(1, PeerGone("d1 is gone"))
    await settle()
    assert sorted(run.closed) == [0, 1, 2]
    assert run.reasons() == ["cancelled", "error", "cancelled"]
    texts = documents([chunk async for chunk in stream])
    # What came before the failure is still told.
    assert [short(each)[1] for each in texts[:-1]] == ["Once", " upon", " a", " time"]
    assert "error" in texts[-1]


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_client_that_leaves_cancels_every_choice(num_choices):
    run = Run(num_choices)
    run.say(0, token(0))
    stream = await run.answering.begin_stream()
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await run.answering.close()
    assert sorted(run.closed) == list(range(num_choices))
    assert run.reasons() == ["cancelled"] * num_choices
    await run.answering.close()
    assert run.counted("cancelled") == num_choices, "each is counted once"


async def test_a_client_that_leaves_before_anything_runs_cancels_every_choice():
    run = Run(3)
    await run.answering.close()
    assert run.reasons() == ["cancelled"] * 3


async def test_a_client_that_leaves_before_a_reader_runs_cancels_every_choice():
    run = Run(3)
    asking = asyncio.create_task(run.events.next())
    await asyncio.sleep(0)  # the readers exist, none has run
    asking.cancel()
    await run.answering.close()
    assert run.reasons() == ["cancelled"] * 3


async def test_one_choice_is_read_without_any_task():
    run = Run(1)
    run.say(0, token(0), finished(1))
    before = asyncio.all_tasks()
    stream = await run.answering.begin_stream()
    assert asyncio.all_tasks() == before
    assert documents([chunk async for chunk in stream])[-1] == "[DONE]"


async def test_no_task_is_left():
    run = Run(3)
    for index in range(3):
        run.say(index, token(0), finished(1))
    [chunk async for chunk in await run.answering.begin_stream()]
    await run.answering.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
