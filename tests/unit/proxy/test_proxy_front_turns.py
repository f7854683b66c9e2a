"""A crowd of requests does not keep the loop from everything else."""

import asyncio
from types import SimpleNamespace

from neuron_di.config import FrontOptions
from neuron_di_proxy.front import STARTS_PER_TURN, Front


class Waiting:
    """A connection with a request. Notes the turn in which it may begin to answer."""

    def __init__(self, turns, then=lambda: None):
        self._turns = turns
        self._then = then

    def begin_answer(self):
        self._turns.begun.append(self._turns.now)
        self._then()


class Turns:
    """Counts turns of the loop."""

    def __init__(self):
        self.now = 0
        self.begun = []

    async def run(self, num):
        for _ in range(num):
            self.now += 1
            await asyncio.sleep(0)


def front():
    service = SimpleNamespace(
        config=SimpleNamespace(front=FrontOptions()),
        limits=SimpleNamespace(send_timeout_s=30.0),
        metrics=SimpleNamespace(connections=SimpleNamespace()),
    )
    return Front(service, None)


async def test_few_requests_begin_at_once():
    turns, owner = Turns(), front()
    for _ in range(STARTS_PER_TURN):
        owner.let_answer(Waiting(turns))
    assert turns.begun == [0] * STARTS_PER_TURN


async def test_of_many_some_begin_in_each_turn_and_in_order():
    turns, owner = Turns(), front()
    num = 3 * STARTS_PER_TURN + 2
    order = []
    for each in range(num):
        owner.let_answer(Waiting(turns, lambda each=each: order.append(each)))
    await turns.run(6)
    assert order == list(range(num))
    assert [turns.begun.count(turn) for turn in sorted(set(turns.begun))] == [
        STARTS_PER_TURN,
        STARTS_PER_TURN,
        STARTS_PER_TURN,
        2,
    ]


async def test_the_next_ones_begin_at_once_when_the_crowd_is_gone():
    turns, owner = Turns(), front()
    for _ in range(2 * STARTS_PER_TURN):
        owner.let_answer(Waiting(turns))
    await turns.run(5)
    owner.let_answer(Waiting(turns))
    assert turns.begun[-1] == 5


async def test_one_that_brings_another_does_not_overtake():
    turns, owner = Turns(), front()
    order = []
    late = Waiting(turns, lambda: order.append("late"))
    for each in range(2 * STARTS_PER_TURN):

        def then(each=each):
            order.append(each)
            if each == STARTS_PER_TURN:
                owner.let_answer(late)

        owner.let_answer(Waiting(turns, then))
    await turns.run(6)
    assert order == [*range(2 * STARTS_PER_TURN), "late"]
