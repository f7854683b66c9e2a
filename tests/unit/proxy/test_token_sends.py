"""A large frame's tokens, sent by two threads: each to its client, in order, whatever happens."""

import os
import sys
from pathlib import Path

import pytest
from lane_rig import Rig, chunk_of, chunks_of, event_of, payload_of

from neuron_di_proxy.token_lane import IS_COMPILED, relay_told

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension was not built: no compiler")

MANY = 150  # tokens of a frame: shared, and in parts of 64
NOTHING = ([], None, [])


@pytest.fixture
def rigs():
    made = [Rig() for _ in range(MANY)]
    yield made
    for rig in made:
        rig.close()


def lanes_of(rigs, **changed):
    return {number: rig.lane(**changed) for number, rig in enumerate(rigs)}


def frame_of(rigs, index=0):
    return payload_of([(number, index, number, f"{number}") for number in range(len(rigs))])


def fill(rig):
    """As much as its socket takes. How many bytes."""
    rig.socket.setblocking(False)
    total = 0
    while True:
        try:
            total += rig.socket.send(b"-" * 4096)
        except BlockingIOError:
            return total


def acting(rig, act):
    """A lane that cannot send, and does this instead."""
    rig.outlet.block()
    rig.transport.num_waiting = 1
    return rig.lane(write=lambda _: act())


def test_each_client_gets_its_own_token(rigs):
    assert relay_told(frame_of(rigs), lanes_of(rigs), 1.0) == NOTHING
    for number, rig in enumerate(rigs):
        assert rig.received() == chunk_of(event_of(f"{number}"))
        assert (rig.ids, rig.record.last_token_s) == ([number], 1.0)
        assert rig.outlet.has_written
        assert rig.transport.written == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it takes two cores")
def test_a_second_thread_helps(rigs):
    relay_told(frame_of(rigs), lanes_of(rigs), 1.0)
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert names.count("token-sends\n") == 1


def test_frame_after_frame_arrives_in_order(rigs):
    lanes = lanes_of(rigs)
    for index in range(100):
        assert relay_told(frame_of(rigs, index), lanes, 1.0) == NOTHING
    for number, rig in enumerate(rigs):
        assert rig.received() == chunks_of([f"{number}"] * 100)


def test_the_first_ones_are_sent_before_the_last_are_gathered(rigs):
    seen = []

    def look():
        seen.extend(number for number, rig in enumerate(rigs) if rig.received())

    lanes = lanes_of(rigs) | {100: acting(rigs[100], look)}
    assert relay_told(frame_of(rigs), lanes, 1.0) == NOTHING
    assert seen == list(range(64))


def test_several_tokens_of_one_client_keep_their_order(rigs):
    """As the choices of a request have them."""
    rig = rigs[0]
    lanes = {number: rig.lane() for number in range(MANY)}
    assert relay_told(frame_of(rigs), lanes, 1.0) == NOTHING
    assert rig.received() == chunks_of([f"{number}" for number in range(MANY)])


def test_what_a_full_socket_does_not_take_goes_to_its_transport(rigs):
    full = {number: fill(rigs[number]) for number in (0, 7, MANY - 1)}
    assert relay_told(frame_of(rigs), lanes_of(rigs), 1.0) == NOTHING
    for number, rig in enumerate(rigs):
        direct = rig.received()[full.get(number, 0) :]
        assert direct + b"".join(rig.transport.written) == chunk_of(event_of(f"{number}"))
        assert bool(rig.transport.written) == (number in full)


def test_a_transport_that_fails_is_the_failure_of_its_leg(rigs):
    def fail(_):
        raise ValueError("no")

    for number in (3, 30):
        fill(rigs[number])
        rigs[number].transport.write = fail
    lanes = lanes_of(rigs)
    others, rest, failures = relay_told(frame_of(rigs), lanes, 1.0)
    assert (others, rest) == ([], None)
    assert [(number, str(error)) for number, error in failures] == [(3, "no"), (30, "no")]
    for number, rig in enumerate(rigs):
        if number not in (3, 30):
            assert rig.received() == chunk_of(event_of(f"{number}"))
    took, _, _ = relay_told(frame_of(rigs, 1), lanes, 1.0)
    assert [token[0] for token in took] == [3, 30]  # their lanes are closed


@pytest.mark.parametrize("num_tokens", [1, MANY])
def test_who_has_half_of_a_piece_gets_nothing_behind_it(rigs, num_tokens):
    """Memory or the transport fails. What came next would be taken for the other half."""

    def fail(_):
        raise MemoryError

    rig = rigs[0]
    rig.transport.write = fail
    texts = ["-" * 1_000_000, *map(str, range(1, num_tokens))]
    frame = payload_of([(number, 0, number, text) for number, text in enumerate(texts)])
    _, _, failures = relay_told(frame, lanes_of(rigs), 1.0)
    assert [(number, type(error)) for number, error in failures] == [(0, MemoryError)]
    assert 0 < len(rig.received()) < 1_000_000
    assert rig.transport.is_aborted
    rig.outlet.write(b"behind")
    assert rig.received() == b""
    assert rigs[1].received() == (chunk_of(event_of("1")) if num_tokens > 1 else b"")


def test_who_is_written_to_while_another_is_finished_keeps_its_order(rigs):
    """The rest of one client's token is given to its transport, which writes to another client."""
    first, second = rigs[3], rigs[30]
    was_full = fill(second)
    fill(first)
    first.transport.write = lambda _: second.outlet.write(b"behind")
    assert relay_told(frame_of(rigs), lanes_of(rigs), 1.0) == NOTHING
    direct = second.received()[was_full:]
    assert direct + b"".join(second.transport.written) == chunk_of(event_of("30")) + b"behind"


@pytest.mark.parametrize("what", ["write", "block"])
def test_who_uses_an_outlet_in_mid_frame_follows_its_token(rigs, what):
    first = rigs[0]

    def act():
        if what == "write":
            first.outlet.write(b"behind")
        else:
            first.outlet.block()
            first.socket.send(b"behind")

    lanes = lanes_of(rigs) | {40: acting(rigs[40], act)}
    assert relay_told(frame_of(rigs), lanes, 1.0) == NOTHING
    assert first.received() == chunk_of(event_of("0")) + b"behind"
    for number, rig in enumerate(rigs[1:40], 1):
        assert rig.received() == chunk_of(event_of(f"{number}"))


def test_a_socket_that_is_closed_in_mid_frame_is_not_sent_to(rigs):
    """Nor is who has its number now."""
    first, others = rigs[0], []

    def act():
        number = first.outlet.fd
        first.outlet.close()
        first.socket.close()
        others.append(Rig())
        assert others[0].socket.fileno() == number

    lanes = lanes_of(rigs) | {40: acting(rigs[40], act)}
    assert relay_told(frame_of(rigs), lanes, 1.0) == NOTHING
    assert (first.received(), others[0].received()) == (b"", b"")
    others[0].close()


def test_a_frame_in_mid_frame(rigs):
    inner = [Rig() for _ in range(MANY)]
    heard = []

    def act():
        heard.append(relay_told(frame_of(inner), lanes_of(inner), 2.0))

    lanes = lanes_of(rigs) | {40: acting(rigs[40], act)}
    assert relay_told(frame_of(rigs), lanes, 1.0) == NOTHING
    assert heard == [NOTHING]
    for number in range(MANY):
        assert inner[number].received() == chunk_of(event_of(f"{number}"))
        assert (rigs[number].received() == b"") == (number == 40)
        inner[number].close()


def test_an_interrupt_in_mid_frame_loses_no_token_before_it(rigs):
    def act():
        raise KeyboardInterrupt

    lanes = lanes_of(rigs) | {40: acting(rigs[40], act)}
    with pytest.raises(KeyboardInterrupt):
        relay_told(frame_of(rigs), lanes, 1.0)
    for number, rig in enumerate(rigs[:40]):
        assert rig.received() == chunk_of(event_of(f"{number}"))
    assert relay_told(frame_of(rigs), lanes_of(rigs), 1.0) == NOTHING  # as ever
    assert rigs[59].received() == chunk_of(event_of("59"))


def test_nothing_is_kept(rigs):
    lanes = lanes_of(rigs)
    relay_told(frame_of(rigs), lanes, 1.0)
    before = [(sys.getrefcount(rig.outlet), sys.getrefcount(lanes[0])) for rig in rigs]
    for index in range(1, 100):
        relay_told(frame_of(rigs, index), lanes, 1.0)
    assert [(sys.getrefcount(rig.outlet), sys.getrefcount(lanes[0])) for rig in rigs] == before


def test_a_copy_that_is_made_in_mid_frame_leaves_the_sends_to_the_original(rigs):
    other = Rig()

    def copy():
        child = os.fork()
        if child == 0:
            frame = payload_of([(7, 0, 7, "child")])
            is_right = relay_told(frame, {7: other.lane()}, 1.0) == NOTHING
            os._exit(0 if is_right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    lanes = lanes_of(rigs) | {40: acting(rigs[40], copy)}
    assert relay_told(frame_of(rigs), lanes, 1.0) == NOTHING
    for number, rig in enumerate(rigs):
        wanted = b"" if number == 40 else chunk_of(event_of(f"{number}"))
        assert rig.received() == wanted
    assert other.received() == chunk_of(event_of("child"))
    other.close()


def test_in_a_copy_of_the_process(rigs):
    """Which has no second thread before it needs one."""
    relay_told(frame_of(rigs), lanes_of(rigs), 1.0)
    child = os.fork()
    if child == 0:
        is_right = relay_told(frame_of(rigs, 1), lanes_of(rigs, due=1), 1.0) == NOTHING
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for number, rig in enumerate(rigs):
        assert rig.received() == chunks_of([f"{number}"] * 2)
