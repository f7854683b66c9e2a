"""KV from device to device: which bytes come, where, and that the runtime's rules are kept."""

import ctypes
from dataclasses import replace

import pytest
from contract.nrt_end import PAD
from nrt_kit import (
    DECODE,
    DRIVERS,
    LAYOUT,
    NUM_BLOCKS,
    PREFILL,
    UNTOUCHED,
    driven_by,
    ended,
    two_ends,
    used,
)

from neuron_di.errors import LocalProtocolError, PeerGone, RemoteProtocolError
from neuron_di.kv import KvIdentity
from neuron_di.transfer import Send
from neuron_di.transfer.nrt_plan import DevicePlan
from neuron_di.types import RequestId, WorkerId

DEGREES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 4), (4, 1)]


# What a driver by torch-neuronx's classes cannot tell apart: test_nrt_drivers.py.
BY_LIBNRT = pytest.mark.parametrize("driver", ["libnrt"], indirect=True)


@pytest.fixture(autouse=True, params=DRIVERS)
def driver(request):
    """What both ends send and receive by."""
    with driven_by(request.param) as name:
        yield name


def num_bytes_sent(end):
    function = end.place.simulator.nrt_sim_bytes_sent
    function.restype = ctypes.c_uint64
    return sum(function(lnc) for lnc in end.pool.device.lncs)


def replicas_of(pool, block_id):
    """The slot of each rank, [layers, keys and values, bytes]: all of a head's are alike."""
    geometry = pool.device.geometry
    slot_bytes = geometry.strides[0].block
    found = []
    for rank in range(len(geometry.heads)):
        parts = []
        for number in geometry.tensors[rank].ravel().tolist():
            data = bytearray(slot_bytes)
            pool.device.tensors[number].read(block_id * slot_bytes, memoryview(data))
            parts.append(bytes(data))
        found.append((geometry.heads[rank], parts))
    return found


@pytest.mark.parametrize("keys", ["HSD", "HDS"])
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), DEGREES)
def test_used_tokens_come_between_any_two_degrees(prefill_ranks, decode_ranks, keys):
    fields = {"keys": keys}
    with two_ends(
        prefill={"num_ranks": prefill_ranks, **fields}, decode={"num_ranks": decode_ranks, **fields}
    ) as two:
        before = num_bytes_sent(two.prefill)  # the proof's
        num_bytes = 0
        for number, num_tokens in enumerate((1, 7, 16)):
            outcome = two.move([number + 1], [number], num_tokens)
            assert outcome.error() is None
            came, sent = two.decode.blocks[number], two.prefill.blocks[number + 1]
            assert (used(came, num_tokens) == used(sent, num_tokens)).all()
            assert (came != sent).any() == (num_tokens < 16)
            num_key_tokens = LAYOUT.block_size + PAD if keys == "HDS" else num_tokens
            half_bytes = LAYOUT.block_bytes // LAYOUT.block_size // 2  # a token's keys, or values
            assert outcome.token.kv_bytes == (num_key_tokens + num_tokens) * half_bytes
            num_bytes += outcome.token.kv_bytes
        assert num_bytes_sent(two.prefill) - before == num_bytes
        assert (two.decode.blocks[3:] == UNTOUCHED).all()


def test_several_blocks_come_and_of_the_last_one_its_tokens_only():
    with two_ends() as two:
        assert two.move([5, 0, 3], [1, 4, 2], 2 * 16 + 3).error() is None
        assert (two.decode.blocks[[1, 4]] == two.prefill.blocks[[5, 0]]).all()
        came, sent = two.decode.blocks[2], two.prefill.blocks[3]
        assert (used(came, 3) == used(sent, 3)).all()
        assert (used(came, 16)[:, 3:] == UNTOUCHED).all()


def test_all_replicas_have_what_was_verified_once_it_is_final():
    with two_ends(decode={"num_ranks": 4}) as two:
        assert two.move([1], [0]).error() is None
        by_heads = {}
        for heads, parts in replicas_of(two.decode.pool, 0):
            by_heads.setdefault(heads, []).append(parts)
        assert [len(ranks) for ranks in by_heads.values()] == [2, 2]
        for ranks in by_heads.values():
            assert ranks[0] == ranks[1]


def test_what_came_is_on_the_device_and_has_the_digests_of_what_was_sent():
    identity = KvIdentity(
        worker_id=WorkerId("p"),
        incarnation=PREFILL,
        request_id=RequestId("r"),
        attempt=0,
        layout_digest=LAYOUT.digest(),
    )
    with two_ends(prefill={"num_ranks": 1}, decode={"num_ranks": 4}) as two:
        two.decode.pool.retire(range(NUM_BLOCKS))
        assert not two.decode.pool.is_on_device(2)
        assert two.move([1], [2], 9).error() is None
        assert two.decode.pool.is_on_device(2)
        sent = two.prefill.pool.digests([1], identity, 9)
        assert two.decode.pool.digests([2], identity, 9) == sent
        assert two.decode.pool.digests([2], identity, 10) != sent


def test_what_is_in_the_mirror_only_is_brought_to_the_device_before_it_is_sent():
    with two_ends() as two:
        expected = two.prefill.blocks[1]
        two.prefill.blocks[1] = 0  # the device, too
        two.prefill.pool.retire([1])
        two.prefill.pool.view(1)[:] = expected.tobytes()  # as by tcp
        assert two.move([1], [1]).error() is None
        assert (two.decode.blocks[1] == expected).all()


def test_received_bytes_are_flushed_before_anybody_learns_of_them():
    with two_ends() as two:
        for number in range(NUM_BLOCKS):
            num_flushes = two.decode.num_calls("flush")
            assert two.move([number], [number]).error() is None
            # Each of the two cores, and the bytes show that it was in time.
            assert two.decode.num_calls("flush") == num_flushes + 2
            assert (two.decode.blocks[number] == two.prefill.blocks[number]).all()
        assert two.prefill.num_calls("flush") == 0


@pytest.mark.parametrize("pending_max", [1, 3])
def test_no_more_is_posted_than_the_runtime_allows(pending_max):
    settings = {"settings": {"NRT_SIM_PENDING_MAX": str(pending_max)}}
    with two_ends(prefill=settings, decode=settings) as two:
        before = two.prefill.num_calls("send_tensor"), two.decode.num_calls("recv_tensor")
        outcomes = [two.move([n], [n]) for n in range(NUM_BLOCKS)]
        assert [outcome.error() for outcome in outcomes] == [None] * NUM_BLOCKS
        assert (two.decode.blocks == two.prefill.blocks).all()
        # A post that was refused would have been counted on top of the messages.
        count = NUM_BLOCKS * LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads
        assert two.prefill.num_calls("send_tensor") == before[0] + count
        assert two.decode.num_calls("recv_tensor") == before[1] + count


@BY_LIBNRT
def test_a_runtime_that_has_too_many_requests_is_asked_again():
    with two_ends() as two:
        two.prefill.place.fault("function=nrt_async_sendrecv_send_tensor status=4 times=5")
        two.decode.place.fault("function=nrt_async_sendrecv_recv_tensor status=4 call=3 times=2")
        assert two.move([0, 1], [2, 3]).error() is None
        assert (two.decode.blocks[[2, 3]] == two.prefill.blocks[[0, 1]]).all()


def test_a_runtime_that_takes_its_time_to_tell_is_asked_again():
    with two_ends() as two:
        two.decode.place.fault("function=nrt_async_sendrecv_test_request status=5 times=7")
        two.prefill.place.fault("function=nrt_async_sendrecv_test_request status=5 times=7")
        assert two.move([0], [0]).error() is None
        assert (two.decode.blocks[0] == two.prefill.blocks[0]).all()


def test_nobody_asks_the_runtime_anything_while_nothing_is_under_way():
    with two_ends() as two:
        receive = two.receive([0], [0])
        outcome = two.post(receive)
        assert ended(two.send(receive)) is None
        assert outcome.error() is None
        names = ("test_request", "test_comm", "flush", "send_tensor", "recv_tensor")
        before = [end.num_calls(name) for end in (two.prefill, two.decode) for name in names]
        receive = two.receive([1], [1])
        two.post(receive)  # waits for an offer: nothing is asked for it
        two.decode.engine.cancel(PREFILL, receive.tag)
        after = [end.num_calls(name) for end in (two.prefill, two.decode) for name in names]
        assert after == before


def test_two_open_transfers_of_one_tag_are_refused():
    with two_ends() as two:
        receive = two.receive([0], [0])
        outcome = two.post(receive)
        assert isinstance(two.post(receive).error(), LocalProtocolError)
        other = two.receive([1], [1])
        sends = [two.send(other), two.send(other)]
        assert isinstance(ended(sends[1]), LocalProtocolError)
        assert two.send(receive) is not None
        assert outcome.error() is None
        assert two.post(other).error() is None
        assert ended(sends[0]) is None


def test_a_send_that_cannot_be_is_refused_and_others_go_on():
    with two_ends() as two:
        receive = two.receive([1], [1])
        for changed in (
            {"exchange": ()},
            {"exchange": [NUM_BLOCKS]},
            {"exchange": [1, 2]},
            {"block_ids": [NUM_BLOCKS]},
            {"block_ids": [1, 1], "exchange": [2, 3]},
            {"num_tokens": 17},
            {"num_tokens": 0},
        ):
            assert isinstance(ended(two.send(receive, **changed)), RemoteProtocolError), changed
        assert isinstance(ended(two.send(receive, tag=-1)), LocalProtocolError)
        assert two.move([1], [1]).error() is None


def test_a_bug_ends_the_transfer_that_finds_it(monkeypatch):
    def fail(*_):
        raise ValueError("a bug")

    with two_ends() as two:
        monkeypatch.setattr(DevicePlan, "moves", fail)
        receive = two.receive([1], [1])
        assert isinstance(two.post(receive).error(), LocalProtocolError)
        assert isinstance(ended(two.send(receive)), LocalProtocolError)
        monkeypatch.undo()
        assert two.move([1], [1]).error() is None


@pytest.mark.parametrize("num_tokens", [0, 17, -1])
def test_a_receive_of_other_tokens_than_its_blocks_hold_is_refused(num_tokens):
    with two_ends() as two:
        outcome = two.post(two.receive([1], [1], num_tokens))
        assert isinstance(outcome.error(), RemoteProtocolError)
        outcome = two.post(two.receive([1], [NUM_BLOCKS], 16))
        assert isinstance(outcome.error(), LocalProtocolError)
        assert two.move([1], [1]).error() is None


def test_ends_that_reckon_different_bytes_find_out_before_anything_is_posted():
    with two_ends() as two:
        num_posted = two.decode.num_calls("recv_tensor")
        receive = two.receive([1], [1], 9)
        outcome = two.post(receive)
        send = two.send(receive, num_tokens=8)
        assert isinstance(outcome.error(), RemoteProtocolError)
        assert ended(send) is not None
        assert two.decode.num_calls("recv_tensor") == num_posted
        assert two.move([2], [2]).error() is None


def test_nothing_is_posted_to_engines_that_are_closed():
    with two_ends() as two:
        late = two.receive([0], [0])
        for end in (two.decode, two.prefill):
            end.engine.close()
            end.engine.close()
        assert ended(two.send(late)) is not None
        assert two.post(late).error() is not None
        with pytest.raises(PeerGone):
            two.link()


def test_the_same_in_both_directions_at_once():
    """A worker may be both, and its device's connections are of one direction each."""
    with two_ends() as two:
        layout = LAYOUT
        two.decode.engine.accept(PREFILL, two.prefill.engine.local_region(DECODE), layout)
        region = two.decode.engine.local_region(PREFILL)
        two.prefill.engine.connect(DECODE, region, layout)
        there = two.move([1], [1])
        back = two.receive([2], [2])
        back = replace(back, memory=two.prefill.pool.memory())
        token = two.prefill.engine.post_receive(DECODE, back)
        send = Send(tag=back.tag, runs=back.runs, block_ids=[2], exchange=[2])
        assert ended(two.decode.engine.post_send(PREFILL, send)) is None
        assert ended(token) is None
        assert there.error() is None
        assert (two.prefill.blocks[2] == UNTOUCHED).all()
        assert (two.decode.blocks[1] == two.prefill.blocks[1]).all()
