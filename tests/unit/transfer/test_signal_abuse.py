"""Hostile peers on the signal link: an error for them alone, counted, and the loop lives on.

The numbers are those of the abuse matrix that these tests follow (B29 to B34). Each test ends
with an honest decode worker's hand-over through the same SendBuffer.
"""

import asyncio
import logging
import random
import socket
import struct
import sys

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lane_kit import FAST
from signal_words import DONE, PULL, WORDS
from transfer_kit import BareDecode, Prefill, R, new_incarnation, until

from neuron_di.errors import PeerRefused
from neuron_di.transfer.send_peers import CONNECTIONS_MAX
from neuron_di.types import RequestId, WorkerId
from neuron_di.wire import (
    SIGNAL_VERSION,
    Abort,
    Handshake,
    LookupAll,
    Malformed,
    Never,
    NotYet,
    Ping,
    Pong,
    Refused,
    Welcome,
    encode_msgpack,
)
from neuron_di.wire.codec import SIGNAL_BYTES_MAX


@pytest.fixture
def prefill(served):
    return served


@pytest.fixture
def peer(peer_of_served):
    return peer_of_served


@pytest.fixture
def other(other_of_served):
    return other_of_served


# B29: what is no message


GARBAGE = [
    (b"",),
    (b"\xc1",),
    (b"GET / HTTP/1.1\r\n\r\n",),
    (encode_msgpack(Ping(sequence=1)), b"more"),
    (b"", encode_msgpack(Ping(sequence=1))),
    (b"",) * 1000,
    (msgspec.msgpack.encode({"type": "unknown", "request_id": "r"}),),
    (msgspec.msgpack.encode({"type": "pull", "request_id": "r", "attempt": 0, "block_ids": 3}),),
    (b"\x93" * 100_000,),
    (bytes(SIGNAL_BYTES_MAX),),
]


@pytest.mark.parametrize("frames", GARBAGE, ids=lambda frames: f"{len(frames)}x{frames[0][:6]!r}")
async def test_b29_garbage_is_answered_malformed_and_harms_nobody(prefill, peer, other, frames):
    prefill.park()
    assert await other.lookup() == prefill.ready()
    peer.send_raw(*frames)
    assert isinstance(await peer.receive(), Malformed)
    assert prefill.counters.num_signals_refused == 1
    assert await other.answers(PULL, DONE) == []
    assert await peer.answers() == []  # its own link lives, too
    assert prefill.ended == [((R, 0), DONE)]


def garbage_of(seed):
    """Random bytes, valid msgpack of no message, messages with one field of a wrong type."""
    rng = random.Random(seed)
    good = [msgspec.to_builtins(word) for word in WORDS.values()]
    for word, encoded in zip(good, WORDS.values(), strict=True):
        word["type"] = type(encoded).__struct_config__.tag
    wrong = [None, -1, 1 << 63, 2.5, "", "x", b"x", [], [[]], {}, {"a": 1}, True]
    while True:
        kind = rng.randrange(3)
        if kind == 0:
            yield b"\xc1" + rng.randbytes(rng.randrange(64))  # 0xC1 begins no msgpack
        elif kind == 1:
            yield msgspec.msgpack.encode([rng.choice(wrong) for _ in range(rng.randrange(4))])
        else:
            word = dict(rng.choice(good))
            name = rng.choice(["type", "request_id", "attempt"])
            bad = ["", 7, None, [], 2.5] if name == "request_id" else wrong
            yield msgspec.msgpack.encode(word | {name: rng.choice(bad)})


async def test_b29_twenty_thousand_pieces_of_garbage(prefill, peer, other, caplog):
    caplog.set_level(logging.WARNING)
    prefill.park()
    assert await other.lookup() == prefill.ready()
    pieces, num_sent, answers = garbage_of(1), 0, []
    piece = next(pieces)
    while len(answers) < 20_000:
        try:
            while num_sent < 20_000:
                peer._socket.send(piece, zmq.NOBLOCK)
                num_sent, piece = num_sent + 1, next(pieces)
        except zmq.Again:
            pass
        while not peer.hears_nothing():
            answers.append(await peer.receive())
        await asyncio.sleep(0)
    assert all(isinstance(answer, Malformed) for answer in answers)
    assert prefill.counters.num_signals_refused == 20_000
    assert prefill.counters.num_stale == 0
    assert await other.answers(PULL, DONE) == []
    assert prefill.ended == [((R, 0), DONE)]
    written = [record.event_fields["event"] for record in caplog.records]
    assert set(written) <= {"signal_refused"}  # none, if an earlier test had the lines
    assert len(written) < 200  # five in ten seconds


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(pieces=st.lists(st.lists(st.binary(max_size=80), min_size=1, max_size=3), max_size=20))
def test_b29_any_bytes_at_all(pieces):
    async def play():
        prefill = Prefill()
        try:
            with BareDecode(prefill) as peer, BareDecode(prefill) as other:
                await peer.connect()
                await other.connect()
                prefill.park()
                assert await other.lookup() == prefill.ready()
                for frames in pieces:
                    peer.send_raw(*frames)
                answers = await peer.answers()
                assert len(answers) == prefill.counters.num_signals_refused
                assert await other.answers(PULL, DONE) == []
                assert prefill.ended == [((R, 0), DONE)]
        finally:
            await prefill.close()

    asyncio.run(play())


# B30: code in the guise of data


async def test_b30_a_pickle_is_never_loaded(prefill, peer, tmp_path):
    canary = tmp_path / "canary"
    pickled = f"cos\nmkdir\n(V{canary}\ntR.".encode()
    script = f"import pickle; pickle.loads({pickled!r})"
    command = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await command.wait() == 0
    assert canary.is_dir()  # the canary sings
    canary.rmdir()
    text = pickled.decode()
    for message in (
        pickled,
        msgspec.msgpack.encode(pickled),
        msgspec.msgpack.encode(text),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, pickled)),
        msgspec.msgpack.encode({"type": "lookup_all", "request_id": pickled, "attempt": 0}),
        msgspec.msgpack.encode({"type": "kv_map_init", "layout": {}, "offers": pickled}),
    ):
        peer.send_raw(message)
        assert isinstance(await peer.receive(), Malformed)
    await peer.answers(LookupAll(request_id=RequestId(text), attempt=0))
    await peer.shake_hands(worker_id=WorkerId(text[:128]))
    assert not canary.exists()


# B31: sizes


async def test_b31_an_oversized_message_costs_its_sender_the_connection(prefill, peer, other):
    peer.send_raw(bytes(SIGNAL_BYTES_MAX + 1))
    assert await other.answers() == []
    assert prefill.counters.num_signals_refused == 0  # it was never received


@pytest.mark.parametrize("num_bytes", [1 << 30, 1 << 62, (1 << 64) - 1])
async def test_b31_a_frame_that_only_claims_to_be_huge(prefill, num_bytes):
    """ZMTP 3 by hand: greeting, READY, then the header of a frame. Nothing is allocated for it."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    with socket.create_connection(("127.0.0.1", prefill.buffer.port)) as stream:
        stream.setblocking(False)
        stream.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        stream.sendall(b"\x02" + struct.pack(">Q", num_bytes) + b"x" * 100)

        def is_closed():
            try:
                return stream.recv(4096) == b""
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True

        await until(is_closed)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 1000])
async def test_b31_who_does_not_speak_zmq(prefill, words):
    with socket.create_connection(("127.0.0.1", prefill.buffer.port)) as stream:
        stream.sendall(words)


@pytest.mark.parametrize("version", [0, 1, SIGNAL_VERSION + 1, -1, 1 << 62])
async def test_b31_another_version_is_refused_by_name(prefill, version):
    with BareDecode(prefill) as stranger:
        answer = await stranger.shake_hands(version=version)
        assert isinstance(answer, Refused)
        assert f"signal protocol {version}" in answer.reason
        assert prefill.counters.num_signals_refused == 1
        assert isinstance(await stranger.lookup(), Malformed)


# B33: who says that it is somebody else


async def test_b33_a_second_peer_of_the_same_identity_takes_nothing_over(prefill, peer):
    prefill.park()
    assert await peer.lookup() == prefill.ready()
    with BareDecode(prefill, identity=f"{peer.incarnation}.1".encode()) as thief:
        thief.send(
            Handshake(
                version=SIGNAL_VERSION,
                worker_id=WorkerId("thief"),
                incarnation=peer.incarnation,
                expects=prefill.local.incarnation,
                model_digest=prefill.local.model_digest,
                layout_digest=prefill.local.layout_digest,
            )
        )
        thief.send(Abort(request_id=R, attempt=0, reason="stolen"))
        assert await peer.answers(PULL, DONE) == []
        assert prefill.ended == [((R, 0), DONE)]
        assert prefill.buffer.peers == ["bare"]
        assert thief.hears_nothing()


@pytest.mark.parametrize("identity", [b"\xff\xfe\x00id", b"x" * 255, b"."])
async def test_b33_an_identity_that_is_no_incarnation_is_refused(prefill, identity):
    with BareDecode(prefill, identity=identity) as stranger:
        assert "identity" in (await stranger.shake_hands()).reason


async def test_b33_a_forged_incarnation_is_refused(prefill, peer):
    with BareDecode(prefill) as forger:
        assert "identity" in (await forger.shake_hands(incarnation=peer.incarnation)).reason
        assert prefill.counters.num_signals_refused == 1
        assert await forger.lookup() == Malformed(reason="handshake first")


# B34: how many


async def test_b34_connections_are_capped_and_the_others_go_on(cluster):
    prefill = cluster.prefill(peers_max=8)
    decode = cluster.decode()
    await decode.buffer(prefill).connect()
    crowd = [BareDecode(prefill) for _ in range(60)]
    try:
        answers = await asyncio.gather(*(one.shake_hands() for one in crowd))
        kinds = [type(answer) for answer in answers]
        assert kinds.count(Welcome) == 7
        assert kinds.count(Refused) == 53
        assert len(prefill.buffer._peers._peers) == 8
        prefill.park()
        assert (await decode.hand_over(prefill, [0, 1])).error() is None
    finally:
        for one in crowd:
            one.__exit__()


async def test_b34_a_worker_whose_links_break_takes_no_places_of_others(cluster):
    """Each of its requests makes a new link, and nobody says goodbye on the one before."""
    prefill = cluster.prefill(make_transfer=FAST, peers_max=16)
    broken = cluster.decode(worker_id="broken", make_transfer=FAST)
    broken.transfer.fails_with = PeerRefused("its memory cannot be mapped here")
    for n in range(40):
        with pytest.raises(PeerRefused, match="cannot be mapped"):
            await broken.lookup(prefill, RequestId(f"r{n}"))
    assert len(prefill.buffer._peers._peers) == CONNECTIONS_MAX
    healthy = cluster.decode(worker_id="healthy", make_transfer=FAST)
    prefill.park()
    assert (await healthy.hand_over(prefill, [0, 1])).error() is None


async def test_b34_of_a_workers_connections_the_silent_one_goes(cluster):
    prefill = cluster.prefill()
    first = BareDecode(prefill)
    own = first.incarnation
    names = [f"{own}.{number}".encode() for number in range(2, 2 + CONNECTIONS_MAX)]
    others = [BareDecode(prefill, name, incarnation=own) for name in names]
    try:
        for one in (first, *others[:-1]):
            assert isinstance(await one.shake_hands(), Welcome)
        assert isinstance(await first.ask(Ping(sequence=1)), Pong)  # it still speaks
        assert isinstance(await others[-1].shake_hands(), Welcome)
        assert len(prefill.buffer._peers._peers) == CONNECTIONS_MAX
        assert isinstance(await first.ask(Ping(sequence=2)), Pong)
        assert await others[0].ask(Ping(sequence=1)) == Malformed(reason="handshake first")
    finally:
        for one in (first, *others):
            one.__exit__()


async def test_b34_open_requests_are_capped(cluster):
    prefill = cluster.prefill(remembered_max=64)
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        answers = await peer.answers(
            *(LookupAll(request_id=RequestId(str(n)), attempt=0) for n in range(500))
        )
        assert [type(answer).__name__ for answer in answers] == ["NotYet"] * 64 + ["Never"] * 436
        assert len(prefill.buffer.lookup_dict) == 64
        prefill.park()  # the proxy's legs are not refused for it
        assert len(prefill.buffer.lookup_dict) == 65


async def test_b34_who_asks_for_all_requests_takes_no_place_of_others(cluster):
    prefill = cluster.prefill(remembered_max=64)
    with BareDecode(prefill) as peer, BareDecode(prefill) as other:
        await peer.shake_hands()
        await other.shake_hands()
        ids = [RequestId(str(n)) for n in range(64)]
        await peer.answers(*(LookupAll(request_id=name, attempt=0) for name in ids))
        for name in map(RequestId, "ab"):
            assert isinstance(await other.ask(LookupAll(request_id=name, attempt=0)), NotYet)
        assert set(prefill.buffer.lookup_dict) == {(name, 0) for name in [*ids[2:], "a", "b"]}
        assert [answer.request_id for answer in await peer.answers()] == ids[:2]  # it is told
        more = LookupAll(request_id=RequestId("more"), attempt=0)
        assert isinstance(await peer.ask(more), Never)


async def test_who_shakes_hands_again_and_again_or_reads_nothing_does_not_fill_the_log(
    prefill, peer, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    for _ in range(50):
        assert isinstance(await peer.shake_hands(), Welcome)
    monkeypatch.setattr(prefill.buffer._link, "send", lambda _: False)
    for _ in range(50):
        peer.send_raw(b"no message")
    await until(lambda: prefill.counters.num_signals_refused == 50)
    written = [record.event_fields["event"] for record in caplog.records]
    assert written.count("handshake") <= 1
    assert 1 <= written.count("signal_unsent") < 10


async def test_who_connects_anew_again_and_again_does_not_fill_the_log(prefill, caplog):
    caplog.set_level(logging.INFO)
    incarnation = new_incarnation()
    for number in range(CONNECTIONS_MAX + 30):
        name = f"{incarnation}.{number}".encode()
        with BareDecode(prefill, name, incarnation=incarnation) as peer:
            assert isinstance(await peer.shake_hands(), Welcome)
    written = [record.event_fields["event"] for record in caplog.records]
    assert written.count("handshake") < 10
    assert written.count("connection_forgotten") < 10
