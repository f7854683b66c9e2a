"""The way out: to the socket while nothing waits, behind what waits, and never after its end."""

import importlib.util
import os
import socket
import sys
from contextlib import suppress

import pytest
from lane_rig import HeldTransport, Rig, chunk_of, chunks_of, event_of, payload_of

from neuron_di_proxy import token_lane
from neuron_di_proxy.token_lane import IS_COMPILED, Outlet, PlainOutlet, relay_told

compiled = pytest.mark.skipif(not IS_COMPILED, reason="the extension was not built: no compiler")


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


@compiled
def test_a_full_socket_gives_to_the_transport_what_it_does_not_take(rig):
    data = b"0123456789" * 100_000
    rig.outlet.write(data)
    (rest,) = rig.transport.written
    assert 0 < len(rest) < len(data)
    assert (rig.received() + rest, rig.transport.num_asked) == (data, 0)
    rig.transport.num_waiting = 1
    rig.outlet.write(b"a")
    assert (rig.transport.written[1:], rig.transport.num_asked) == ([b"a"], 1)
    rig.transport.num_waiting = 0
    rig.outlet.write(b"b")
    rig.outlet.write(b"c")
    assert (rig.received(), rig.transport.num_asked) == (b"bc", 2)
    assert len(rig.transport.written) == 2


@compiled
def test_a_socket_that_takes_nothing_gives_all_to_the_transport(rig):
    rig.socket.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            rig.socket.send(b"x" * 1000)
    rig.outlet.write(b"abc")
    assert rig.transport.written == [b"abc"]
    lane = rig.lane()
    rig.transport.num_waiting = 3
    relay_told(payload_of([(7, 0, 1, "t")]), {7: lane}, 1.0)
    assert rig.events == [event_of("t")]  # not framed: its reply does that
    rig.transport.num_waiting = 0
    relay_told(payload_of([(7, 1, 1, "u")]), {7: lane}, 1.0)
    assert rig.transport.written == [b"abc", chunk_of(event_of("u"))]  # it tried again


@compiled
def test_a_dead_peer_is_left_to_the_transport(rig):
    rig.client.close()
    rig.outlet.write(b"abc")
    assert rig.transport.written == [b"abc"]


@compiled
def test_without_an_fd_all_goes_through_python():
    rig = Rig(has_fd=False)
    relay_told(payload_of([(7, 0, 1, "a"), (7, 1, 1, "b")]), {7: rig.lane()}, 1.0)
    rig.outlet.write(b"c")
    assert rig.events == [event_of("a"), event_of("b")]
    assert (rig.transport.written, rig.received(), rig.outlet.fd) == ([b"c"], b"", -1)
    rig.close()


@pytest.mark.parametrize("make_outlet", [Outlet, PlainOutlet])
def test_an_outlet_says_that_it_has_written(make_outlet):
    rig = Rig()
    outlet = make_outlet(-1, rig.transport)
    assert (outlet.has_written, outlet.fd) == (False, -1)
    for data in (b"", bytearray()):
        outlet.write(data)
        assert (outlet.has_written, rig.transport.written) == (False, [])
    for data in (b"a", bytearray(b"b"), memoryview(b"c")):
        outlet.has_written = False
        outlet.write(data)
        assert outlet.has_written
    assert rig.transport.written == [b"a", b"b", b"c"]
    outlet.has_written = False
    outlet.close()
    outlet.close()
    outlet.write(b"d")
    assert (len(rig.transport.written), outlet.has_written) == (3, False)
    with pytest.raises(AttributeError):
        outlet.fd = 3
    rig.close()


@compiled
def test_after_close_nothing_reaches_who_has_the_number_now(rig):
    fd = rig.outlet.fd
    lanes = {7: rig.lane(), 8: rig.lane()}
    relay_told(payload_of([(7, 0, 1, "mine")]), lanes, 1.0)
    assert rig.received() == chunks_of(["mine"])
    rig.outlet.close()
    rig.socket.close()
    ours, theirs = socket.socketpair()
    if ours.fileno() != fd:
        os.dup2(ours.fileno(), fd)
    theirs.setblocking(False)
    relay_told(payload_of([(7, 1, 1, "x"), (8, 0, 1, "y" * 9999)]), lanes, 1.0)
    rig.outlet.write(b"z")
    rig.outlet.block()
    rig.outlet.write(b"z")
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    assert (rig.transport.written, rig.events, rig.outlet.fd) == ([], [], -1)
    assert lanes[7].take() == 2  # counted all the same
    if ours.fileno() != fd:
        os.close(fd)
    ours.close()
    theirs.close()


class Closing:
    """A transport that loses its connection in the call which a test names."""

    def __init__(self, name: str, *, error: Exception | None = None) -> None:
        self._name, self._error = name, error
        self.close = lambda: None
        self.written = []

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self._called("write")

    def get_write_buffer_size(self) -> int:
        self._called("get_write_buffer_size")
        return 0

    def is_closing(self) -> bool:
        self._called("is_closing")
        return False

    def _called(self, name: str) -> None:
        if name == self._name:
            self.close()
            if self._error is not None:
                raise self._error


@compiled
@pytest.mark.parametrize("error", [None, OSError("lost")])
@pytest.mark.parametrize("closes_lane", [False, True])
@pytest.mark.parametrize("call", ["write", "get_write_buffer_size", "is_closing", "event"])
def test_a_connection_may_be_lost_in_any_call(rig, call, closes_lane, error):
    transport = Closing(call, error=error)
    outlet = Outlet(-1 if call == "event" else rig.socket.fileno(), transport)

    def write(event: bytes) -> None:
        transport.close()
        if error is not None:
            raise error

    lane = rig.lane(outlet=outlet, write=write)

    def close() -> None:
        outlet.close()
        if closes_lane:
            lane.close()

    transport.close = close
    if call in ("get_write_buffer_size", "is_closing"):
        outlet.block()
    text = "x" * (5 << 20)  # more than the socket takes
    payload = payload_of([(7, 0, 1, text), (7, 1, 2, "y"), (8, 0, 3, "")])
    if error is None:
        others, _, _ = relay_told(payload, {7: lane}, 1.0)
        assert others == ([(7, 1, 2, "y")] if closes_lane else []) + [(8, 0, 3, "")]
    else:
        others, _, ((number, failure),) = relay_told(payload, {7: lane}, 1.0)
        assert (number, str(failure)) == (7, "lost")
        assert others == [(7, 1, 2, "y"), (8, 0, 3, "")]
        assert relay_told(payload_of([(7, 1, 2, "y")]), {7: lane}, 1.0)[0] == [(7, 1, 2, "y")]
    assert outlet.fd == -1
    came = rig.received() + b"".join(transport.written)
    assert came == (chunks_of([text]) if call == "write" else b"")


@compiled
@pytest.mark.parametrize("num_waiting", [0, 1])
def test_a_lane_that_is_closed_while_it_asks_writes_nothing(rig, num_waiting):
    class Asked(HeldTransport):
        def get_write_buffer_size(self) -> int:
            lane.close()
            return num_waiting

    transport = Asked()
    outlet = Outlet(rig.socket.fileno(), transport)
    outlet.block()
    lane = rig.lane(outlet=outlet)
    tokens = [(7, 0, 1, "a"), (7, 1, 2, "b")]
    assert relay_told(payload_of(tokens), {7: lane}, 1.0)[0] == tokens[1:]
    assert (rig.received(), rig.events, transport.written, lane.take()) == (b"", [], [], 1)


@compiled
def test_a_frame_may_be_relayed_while_another_is(rig):
    blocked = Outlet(-1, rig.transport)
    inner = rig.lane()

    def write(event: bytes) -> None:
        relay_told(payload_of([(8, inner.due, 2, "inner")]), {8: inner}, 1.0)
        lanes.clear()
        rig.events.append(event)

    lanes = {7: rig.lane(outlet=blocked, write=write)}
    payload = bytearray(payload_of([(7, 0, 1, "outer"), (7, 1, 1, "left")]))
    assert relay_told(payload, lanes, 1.0)[0] == [(7, 1, 1, "left")]
    assert (rig.received(), rig.events) == (chunks_of(["inner"]), [event_of("outer")])
    payload.clear()  # it is held no more


def test_the_module_works_where_nothing_was_compiled(monkeypatch):
    monkeypatch.setitem(sys.modules, "neuron_di_proxy._token_lane", None)
    spec = importlib.util.spec_from_file_location("uncompiled_token_lane", token_lane.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.IS_COMPILED
    assert module.Outlet is module.PlainOutlet
    assert module.relay_told(memoryview(b"\x92\x90\x90"), {}, 1.0) == ([], b"\x92\x90\x90", [])
    assert module.Lane | None  # as annotations say
    with pytest.raises(RuntimeError):
        module.Lane()
