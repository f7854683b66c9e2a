"""A response's head, made beforehand, that the first token's lane sends with it."""

import time
from email.utils import parsedate_to_datetime

import pytest
from lane_rig import Rig, chunk_of, event_of, payload_of
from laned_run import running
from scripted_worker import finished, token
from streamed_rig import Streamed, tell
from virtual_cluster import virtual

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
    assert begun == [0], "before more is written"
    received = rig.received()
    assert 0 < len(received) < len(sent)
    assert received + b"".join(rig.transport.written) == sent + chunk_of(event_of("t0"))
    rig.close()


def test_a_failure_of_who_is_told_is_the_lanes():
    rig = Rig()
    rig.outlet.head = b"head"
    lane = rig.lane(begun=lambda: 1 / 0)
    _, _, failures = relay_told(payload_of([(7, 0, 100, "t0")]), {7: lane}, 1.0)
    assert [(number, type(error)) for number, error in failures] == [(7, ZeroDivisionError)]
    rig.close()


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
