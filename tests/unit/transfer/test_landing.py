"""Landing memory: bounded, given out in the order of asking, whole at the end."""

import asyncio
import ctypes
import random
from itertools import pairwise

import pytest
from transfer_kit import until

from neuron_di.errors import CapacityError, ConfigError, LocalProtocolError, PeerGone
from neuron_di.transfer.landing import Landing, Room

PAGE = 4096


class Lanes:
    def __init__(self):
        self.registered = []

    def register(self, memory):
        self.registered.append(memory)


@pytest.fixture
async def landing():
    landing = Landing(Lanes(), 8 * PAGE)
    await landing.open()
    yield landing
    landing.check_integrity()
    assert landing.num_bytes_asked == 0
    landing.close()


def ask(landing, num_pages, timeout_s=30.0):
    """(the asking, the list that its answer goes to)"""
    answers = []
    return landing.ask(num_pages * PAGE, timeout_s, answers.append), answers


def take(landing, num_pages):
    _, (room,) = ask(landing, num_pages)
    assert isinstance(room, Room)
    return room


async def test_it_is_made_once_and_told_to_the_engines():
    lanes = Lanes()
    landing = Landing(lanes, 5000)
    assert lanes.registered == []
    assert landing.num_bytes_open == 0
    await asyncio.gather(*(landing.open() for _ in range(5)))
    (memory,) = lanes.registered
    assert memory.num_bytes == 2 * PAGE
    room = take(landing, 2)
    assert room.whole == memory
    assert landing.num_bytes_open == landing.num_bytes_asked == 2 * PAGE
    assert room.memory == memory
    landing.free(room)
    landing.close()


async def test_it_is_as_large_as_a_prompt_may_need_but_not_larger_than_it_may_be(capsys):
    for wanted, size in ((1, 2), (5, 5), (9, 8)):
        landing = Landing(Lanes(), 2 * PAGE, 8 * PAGE)
        await landing.open(wanted * PAGE)
        assert landing.size_bytes == size * PAGE
        landing.free(take(landing, size))
        landing.check_integrity()
        await landing.open(9 * PAGE)  # of another peer: it stays as it is
        assert landing.size_bytes == size * PAGE
        landing.close()


async def test_it_is_allocated_once_also_where_an_engine_fails_at_first():
    lanes = Lanes()
    landing, register = Landing(lanes, PAGE), lanes.register

    def fail(memory):
        register(memory)
        raise PeerGone("not now")

    lanes.register = fail
    with pytest.raises(PeerGone):
        await landing.open()
    lanes.register = register
    await landing.open()
    first, second = lanes.registered
    assert first == second
    landing.close()


async def test_a_room_keeps_the_memory_when_it_is_closed():
    """Whoever still reads there must not fall."""
    landing = Landing(Lanes(), 64 * PAGE)
    await landing.open()
    room = take(landing, 1)
    landing.close()
    assert ctypes.string_at(room.memory.address, PAGE) == bytes(PAGE)


async def test_memory_that_cannot_be_had_is_said():
    landing = Landing(Lanes(), 1 << 60)
    with pytest.raises(ConfigError, match="--landing-memory"):
        await landing.open()


async def test_rooms_do_not_overlap_and_come_back(landing):
    rooms = [take(landing, n) for n in (1, 3, 4)]
    spans = sorted((room.start, room.start + room.memory.num_bytes) for room in rooms)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    for room in rooms:
        assert room.memory.address == room.whole.address + room.start
        landing.free(room)
    landing.free(take(landing, 8))


async def test_who_asks_first_is_served_first(landing):
    """A large request is not overtaken for ever by small ones."""
    first, second = take(landing, 5), take(landing, 3)
    _, large = ask(landing, 6)
    _, small = ask(landing, 1)
    landing.free(second)
    assert (large, small) == ([], [])
    landing.free(first)
    assert len(large) == len(small) == 1
    landing.free(large[0])
    landing.free(small[0])


async def test_whoever_waits_too_long_is_told(landing):
    room = take(landing, 8)
    _, answers = ask(landing, 1, timeout_s=0.01)
    await until(lambda: answers)
    assert isinstance(answers[0], CapacityError)
    landing.free(room)
    assert len(answers) == 1


async def test_who_gives_up_makes_room_for_the_next(landing):
    room = take(landing, 4)
    large, answers = ask(landing, 8)
    _, small = ask(landing, 2)
    landing.cancel(large)
    assert answers == []
    assert len(small) == 1
    landing.cancel(large)
    landing.free(small[0])
    landing.free(room)


async def test_more_than_there_ever_is_is_refused_at_once(landing):
    _, (answer,) = ask(landing, 9)
    assert isinstance(answer, CapacityError)  # of this worker: another one may have it
    assert "--landing-memory" in answer.message


async def test_room_is_given_back_once(landing):
    room = take(landing, 1)
    landing.free(room)
    with pytest.raises(LocalProtocolError):
        landing.free(room)


async def test_any_order_of_asking_and_giving_back(landing):
    rng, rooms, waiting = random.Random(3), [], []
    for _ in range(3000):
        kind = rng.random()
        if kind < 0.5:
            asked, answers = ask(landing, rng.randint(1, 8))
            waiting.append((asked, answers))
        elif kind < 0.6 and waiting:
            asked, answers = waiting.pop(rng.randrange(len(waiting)))
            if answers:
                rooms.append(answers[0])
            landing.cancel(asked)
        elif rooms:
            landing.free(rooms.pop(rng.randrange(len(rooms))))
        rooms += [answers[0] for _, answers in waiting if answers]
        waiting = [(asked, answers) for asked, answers in waiting if not answers]
        landing.check_integrity()
        spans = sorted((room.start, room.start + room.memory.num_bytes) for room in rooms)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        if not rooms:
            assert not waiting, "there is room, and somebody waits"
    for asked, answers in waiting:
        landing.cancel(asked)  # the next one may be served then
        rooms += answers
    for room in rooms:
        landing.free(room)


def lend(landing, num_pages, recalled, *, at_once=True):
    """Room that was taken ahead of need. `recalled` gets it when somebody waits."""

    def recall():
        recalled.append(room)
        if at_once:
            landing.free(room)

    room = landing.take(num_pages * PAGE, recall)
    return room


async def test_room_that_nobody_needs_yet_is_recalled_the_youngest_first(landing):
    recalled = []
    rooms = [lend(landing, 2, recalled) for _ in range(4)]
    assert lend(landing, 1, recalled) is None
    _, (room,) = ask(landing, 4)
    assert recalled == [rooms[3], rooms[2]]
    assert landing.num_bytes_asked == 8 * PAGE
    for each in (room, rooms[0], rooms[1]):
        landing.free(each)


async def test_what_is_needed_by_now_is_not_recalled(landing):
    recalled = []
    kept, other = lend(landing, 6, recalled), lend(landing, 2, recalled)
    landing.keep(kept)
    _, answers = ask(landing, 3)
    assert recalled == [other]
    assert answers == []
    assert lend(landing, 1, recalled) is None  # there is room, and somebody waits
    landing.free(kept)
    landing.free(answers[0])


async def test_no_more_is_recalled_than_will_do_once_nothing_writes_to_it(landing):
    recalled = []
    rooms = [lend(landing, 2, recalled, at_once=False) for _ in range(4)]
    _, first = ask(landing, 2)
    assert recalled == [rooms[3]]
    assert lend(landing, 1, recalled) is None  # somebody waits
    assert first == []
    landing.free(rooms[3])
    assert len(first) == 1
    _, second = ask(landing, 4)
    assert recalled == [rooms[3], rooms[2], rooms[1]]
    landing.free(rooms[1])
    assert second == []
    landing.free(rooms[2])
    for room in (rooms[0], *first, *second):
        landing.free(room)


async def test_pieces_that_do_not_touch_are_recalled_until_one_is_large_enough(landing):
    recalled = []
    rooms = [lend(landing, 2, recalled) for _ in range(3)]
    landing.keep(rooms[1])
    _, answers = ask(landing, 3)
    assert recalled == [rooms[2]]  # with what was free behind it
    landing.free(rooms[1])
    landing.free(rooms[0])
    landing.free(answers[0])


async def test_any_number_of_rooms_is_recalled_at_once():
    landing, recalled = Landing(Lanes(), 1000 * PAGE), []
    await landing.open()
    for _ in range(1000):
        lend(landing, 1, recalled)
    landing.free(take(landing, 1000))
    assert len(recalled) == 1000
    landing.check_integrity()


async def test_who_is_answered_may_ask_again_and_is_served(landing):
    answers = []

    def ask_again(room):
        landing.free(room)
        landing.ask(3 * PAGE, 30.0, answers.append)
        landing.ask(8 * PAGE, 30.0, answers.append)

    landing.ask(8 * PAGE, 30.0, ask_again)
    (first,) = answers
    landing.free(first)
    landing.free(answers[1])
