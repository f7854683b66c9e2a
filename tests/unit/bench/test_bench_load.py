"""When requests are sent, and from when their times count: on a virtual clock, so to the digit."""

import asyncio
import logging
from dataclasses import dataclass, field

import numpy as np
import pytest

from neuron_di.bench.load import Load, note_in
from neuron_di.bench.measured import Measured, Outcome
from neuron_di.clock import now_s
from neuron_di.testing.virtual_loop import VirtualLoop


@dataclass
class Server:
    """Each answer takes `answer_s`; `one_at_a_time` makes the others wait."""

    answer_s: float
    one_at_a_time: bool = False
    made: list[int] = field(default_factory=list)
    read_indices: list[int] = field(default_factory=list)
    lock: asyncio.Lock | None = None

    def make(self, index: int) -> bytes:
        self.made.append(index)
        return b"%d" % index

    async def send(self, request: bytes) -> float:
        if self.one_at_a_time:
            self.lock = self.lock or asyncio.Lock()
            async with self.lock:
                await asyncio.sleep(self.answer_s)
        else:
            await asyncio.sleep(self.answer_s)
        return now_s()

    def read(self, index: int, answer: float) -> Outcome:
        self.read_indices.append(index)
        return Outcome(ending="ok", first_s=answer, last_s=answer, end_s=answer, output_tokens=1)


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    loop.close()
    logging.disable(logging.NOTSET)  # which closing turned off
    assert loop.errors == []


def columns_of(loop, server, indices, main, cap=None):
    measured = Measured()
    load = Load(server, indices, note_in(measured, 0, lambda index: index), cap=cap)
    loop.run_until_complete(main(load))
    return measured.columns(), load


def times(values):
    return np.round(values, 6).tolist()


def test_an_open_loop_sends_when_it_is_due_and_not_when_the_last_is_over(loop):
    at_s = np.array([0.0, 0.5, 0.6, 3.0])
    columns, load = columns_of(loop, Server(2.0), range(4), lambda load: load.open_loop(at_s))
    assert times(columns.intended_s) == [0.0, 0.5, 0.6, 3.0]
    assert times(columns.sent_s) == [0.0, 0.5, 0.6, 3.0]
    assert times(columns.ttft_s) == [2.0] * 4
    assert load.most_open == 3
    assert load.end_s == pytest.approx(5.0)


def test_a_slice_begins_with_its_own_first_arrival(loop):
    at_s = np.array([0.0, 1.0, 7.0, 9.0])
    columns, _ = columns_of(loop, Server(0.1), range(2, 4), lambda load: load.open_loop(at_s))
    assert columns.index.tolist() == [2, 3]
    assert times(columns.intended_s) == [0.0, 2.0]


def test_waiting_for_the_cap_counts_as_waiting_and_not_as_the_clients_own_lag(loop):
    at_s = np.array([0.0, 0.1, 0.2, 10.0])
    columns, load = columns_of(
        loop, Server(1.0), range(4), lambda load: load.open_loop(at_s), cap=1
    )
    assert load.most_open == 1
    assert times(columns.intended_s) == [0.0, 0.1, 0.2, 10.0]
    assert times(columns.sent_s) == [0.0, 1.0, 2.0, 10.0]
    assert times(columns.ttft_s) == [1.0, 1.9, 2.8, 1.0]  # nothing of the waiting is omitted
    assert times(columns.first_s - columns.sent_s) == [1.0] * 4
    assert times(columns.lag_s) == [0.0] * 4


def test_a_server_that_stands_still_does_not_stop_the_requests(loop):
    at_s = np.arange(5) * 0.1
    server = Server(1.0, one_at_a_time=True)
    columns, _ = columns_of(loop, server, range(5), lambda load: load.open_loop(at_s))
    assert times(columns.sent_s) == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert times(columns.ttft_s) == [1.0, 1.9, 2.8, 3.7, 4.6]


def test_all_at_once(loop):
    columns, load = columns_of(
        loop, Server(1.0), range(300), lambda load: load.open_loop(np.zeros(300))
    )
    assert load.most_open == 300
    assert sorted(columns.index) == list(range(300))


def test_a_closed_loop_keeps_so_many_open(loop):
    columns, load = columns_of(loop, Server(1.0), range(10), lambda load: load.closed_loop(4, None))
    assert load.most_open == 4
    assert times(columns.sent_s) == [0.0] * 4 + [1.0] * 4 + [2.0] * 2
    assert (columns.intended_s == columns.sent_s).all()
    assert np.isnan(columns.lag_s).all()


def test_a_closed_loop_of_fewer_requests_than_places(loop):
    columns, load = columns_of(loop, Server(1.0), range(2), lambda load: load.closed_loop(8, None))
    assert (len(columns.index), load.most_open) == (2, 2)


def test_after_the_duration_nothing_is_sent_and_what_is_open_is_waited_for(loop):
    server = Server(1.0)
    columns, _ = columns_of(loop, server, range(1 << 20), lambda load: load.closed_loop(2, 2.5))
    assert times(columns.sent_s) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert times(columns.end_s)[-1] == 3.0


def test_requests_are_made_ahead_but_not_all_of_them(loop):
    server = Server(1.0)
    columns_of(loop, server, range(1 << 20), lambda load: load.closed_loop(2, 2.5))
    assert len(server.made) < 100
    assert server.made == list(range(len(server.made)))


def test_each_answer_is_read_once_however_many_end_together(loop):
    server = Server(1.0)
    columns_of(loop, server, range(3000), lambda load: load.open_loop(np.zeros(3000)))
    assert sorted(server.read_indices) == list(range(3000))


def test_what_is_open_at_an_interruption_is_neither_ok_nor_failed(loop):
    server, measured = Server(1.0), Measured()
    load = Load(server, range(100), note_in(measured, 3, lambda _: 7))

    async def interrupted():
        task = asyncio.create_task(load.closed_loop(4, None))
        await asyncio.sleep(2.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop.run_until_complete(interrupted())
    assert measured.counts == {"ok": 8, "interrupted": 4}
    columns = measured.columns()
    assert set(columns.slice_index) == {3}
    assert set(columns.planned_tokens) == {7}
