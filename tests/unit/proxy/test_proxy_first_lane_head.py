"""A response's head, made beforehand, that the first token's lane sends with it."""

import time
from email.utils import parsedate_to_datetime

import pytest
from lane_rig import Rig, chunk_of, event_of, payload_of
from laned_run import running
from scripted_worker import finished, token
from streamed_rig import Streamed, tell
from virtual_time import virtual

from neuron_di.errors import LocalProtocolError
from neuron_di_proxy.token_lane import IS_COMPILED, relay_told

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension for tokens was not built")

OLD = b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\n"


@pytest.fixture
def streamed():
    streamed = Streamed()
    yield streamed
    streamed.rig.close()


def dated(response):
    """The response with its date taken out, and that date."""
    start = response.index(b"\r\ndate: ") + 8
    end = response.index(b"\r\n", start)
    return response[:start] + response[end:], response[start:end].decode()


def first_of(streamed):
    return streamed.sink.first_lane(0, streamed.rig.gaps)


def test_what_a_lane_sends_is_what_python_writes(streamed):
    lane = first_of(streamed)
    assert streamed.rig.received() == b""
    assert not streamed.reply.has_begun
    tell(lane, 0)
    assert streamed.reply.has_begun
    assert streamed.reply.is_streaming
    tell(streamed.lane(), 1)
    streamed.sink.finished(0, finished(2))
    other = Streamed()
    for index in range(2):
        given = token(index, f"t{index}")
        other.record.count_token(given)
        other.sink.token(0, given)
    other.sink.finished(0, finished(2))
    ours, python = dated(streamed.rig.received()), dated(other.rig.received())
    assert ours[0] == python[0]
    assert streamed.rig.transport.written == [], "it went directly"
    other.rig.close()


def test_the_date_is_that_of_the_first_token(streamed):
    lane = first_of(streamed)
    head = streamed.rig.outlet.head
    line = head[head.index(b"date: ") : head.index(b"GMT\r\n") + 5]
    streamed.rig.outlet.head = head.replace(line, OLD)
    before_s = int(time.time())
    tell(lane, 0)
    _, date = dated(streamed.rig.received())
    said_s = parsedate_to_datetime(date).timestamp()
    assert before_s <= said_s <= time.time()
    assert time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(said_s)) == date


@pytest.mark.parametrize("head", [b"", b"no date", b"\r\ndate: ", b"\r\ndate: short\r\n\r\n"])
def test_a_head_without_a_whole_date_is_sent_as_it_is(head):
    rig = Rig()
    rig.outlet.head = head
    begun = []
    lane = rig.lane(begun=lambda: begun.append(rig.received()))
    relay_told(payload_of([(7, 0, 100, "t0")]), {7: lane}, 1.0)
    assert begun == [head + chunk_of(event_of("t0"))], "it is told of once it was sent"
    assert rig.outlet.head is None, "it is sent once"
    assert rig.events == []
    rig.close()


def test_behind_what_waits_the_head_is_made_by_python(streamed):
    lane = first_of(streamed)
    streamed.rig.transport.num_waiting = 5
    tell(lane, 0)
    assert streamed.rig.received() == b""
    assert b"".join(streamed.rig.transport.written).count(b"HTTP/1.1 200") == 1
    assert streamed.reply.has_begun
    assert streamed.rig.outlet.head is None


def test_a_connection_that_is_to_close_says_so(streamed):
    lane = first_of(streamed)
    streamed.reply.closes = True
    tell(lane, 0)
    assert b"\r\nConnection: close\r\n" in streamed.rig.received()


def test_a_response_that_began_otherwise_leaves_no_head(streamed):
    first_of(streamed)
    streamed.hear(0)
    assert streamed.rig.outlet.head is None
    assert first_of(streamed) is None
    assert streamed.rig.received().count(b"HTTP/1.1 200") == 1


def test_a_closed_outlet_has_no_head_and_sends_nothing():
    rig = Rig()
    rig.outlet.head = b"head"
    lane = rig.lane(begun=rig.events.append)
    rig.outlet.close()
    assert rig.outlet.head is None
    relay_told(payload_of([(7, 0, 100, "t0")]), {7: lane}, 1.0)
    assert rig.received() == b""
    assert rig.events == []
    rig.close()


def test_a_client_that_takes_only_a_part_gets_the_rest_from_its_transport():
    rig = Rig()
    sent = rig.outlet.head = b"\r\ndate: x\r\n" + bytes(8 << 20)
    begun = []
    lane = rig.lane(begun=lambda: begun.append(len(rig.transport.written)))
    relay_told(payload_of([(7, 0, 100, "t0")]), {7: lane}, 1.0)
    assert begun == [1], "whoever hears of it may write behind it"
    received = rig.received()
    assert 0 < len(received) < len(sent)
    assert received + b"".join(rig.transport.written) == sent + chunk_of(event_of("t0"))
    rig.close()


def everything(rig):
    return rig.received() + b"".join(rig.transport.written)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_written_behind_a_begin_follows_all_of_it(fails):
    rig = Rig()
    sent = rig.outlet.head = bytes(8 << 20)

    def begun():
        rig.transport.num_waiting = 1
        if fails:
            raise ZeroDivisionError
        rig.outlet.write(b"next")

    _, _, failures = relay_told(payload_of([(7, 0, 100, "t0")]), {7: rig.lane(begun=begun)}, 1.0)
    assert [(number, type(error)) for number, error in failures] == (
        [(7, ZeroDivisionError)] if fails else []
    )
    if fails:
        rig.outlet.write(b"next")
    assert everything(rig) == sent + chunk_of(event_of("t0")) + b"next"
    rig.close()


def test_a_transport_that_fails_is_the_lanes_failure_and_the_response_has_begun():
    rig = Rig()
    rig.outlet.head = bytes(8 << 20)
    rig.transport.write = lambda _: 1 / 0
    begun = []
    lane = rig.lane(begun=lambda: begun.append(1))
    _, _, failures = relay_told(payload_of([(7, 0, 100, "t0")]), {7: lane}, 1.0)
    assert [type(error) for _, error in failures] == [ZeroDivisionError]
    assert begun == [1]
    rig.close()


def test_a_first_token_among_those_that_are_gathered_has_its_head():
    rig, others = Rig(), [Rig() for _ in range(20)]
    lanes = {100 + index: each.lane() for index, each in enumerate(others)}
    rig.outlet.head = b"head"
    begun = []
    lanes[7] = rig.lane(begun=lambda: begun.append(rig.received()))
    tokens = [(number, 0, 1, "t0") for number in lanes]
    assert relay_told(payload_of(tokens), lanes, 1.0) == ([], None, [])
    assert begun == [b"head" + chunk_of(event_of("t0"))]
    assert all(each.received() == chunk_of(event_of("t0")) for each in others)
    for each in (rig, *others):
        each.close()


@pytest.mark.parametrize("what", ["lane", "head", "transport"])
def test_what_goes_while_the_transport_is_asked_is_not_used(what):
    rig = Rig()
    rig.outlet.head = b"head"
    rig.outlet.block()
    lane = rig.lane(begun=lambda: pytest.fail("it was not begun"))

    def is_closing():
        if what == "lane":
            lane.close()
        elif what == "head":
            rig.outlet.head = None
        else:
            raise ZeroDivisionError
        return False

    rig.transport.is_closing = is_closing
    _, _, failures = relay_told(payload_of([(7, 0, 100, "t0")]), {7: lane}, 1.0)
    assert len(failures) == (what == "transport")
    assert rig.received() == b""
    assert rig.events == ([event_of("t0")] if what == "head" else [])
    rig.close()


@pytest.mark.parametrize("num_waiting", [0, 5])
def test_either_way_the_answer_hears_of_its_first_event(streamed, num_waiting):
    noted = []
    streamed.sink._answer.note_first = noted.append
    lane = first_of(streamed)
    streamed.rig.transport.num_waiting = num_waiting
    streamed.rig.outlet.has_written = False
    tell(lane, 0)
    assert noted == [0]
    assert streamed.rig.outlet.has_written


@pytest.mark.parametrize("head", [1, "text", bytearray(b"x")])
def test_a_head_is_bytes(head):
    rig = Rig()
    with pytest.raises(TypeError):
        rig.outlet.head = head
    with pytest.raises(TypeError):
        del rig.outlet.head
    rig.close()


@virtual
async def test_a_head_that_cannot_be_made_ends_the_attempt():
    def refuse(**_):
        raise LocalProtocolError("a header of the response has a line end in it")

    with running(has_first_lane=True) as run:
        run.rig.lane = refuse
        with pytest.raises(LocalProtocolError, match="line end"):
            await run.task
