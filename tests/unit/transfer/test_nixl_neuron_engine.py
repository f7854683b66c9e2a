"""A device's KV read by NIXL: which bytes come, where, and what they are read behind.

Real NIXL, real bytes; the tensors lie in host memory (tests/contract/nixl_end.py).
"""

from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec

import msgspec
import nixl_kit
import numpy as np
import pytest
from contract.nixl_end import PAD, make_engine, make_pool
from nixl_kit import (
    DECODE,
    LAYOUT,
    NUM_BLOCKS,
    PREFILL,
    UNTOUCHED,
    one_end,
    record_reads,
    two_ends,
    used,
)

from neuron_di.errors import ConfigError, KvChanged, PeerGone, PeerRefused, RemoteProtocolError
from neuron_di.kv import KvIdentity, KvPool, head_bytes
from neuron_di.transfer import Send, transfer_domain
from neuron_di.transfer import nixl_neuron_engine as engines
from neuron_di.transfer import nixl_neuron_reader as readers
from neuron_di.types import BlockId, RequestId, WorkerId

pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="the package nixl-cu12 is not installed"
)

DEGREES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 4), (4, 1)]
IDENTITY = KvIdentity(
    worker_id=WorkerId("p"),
    incarnation=PREFILL,
    request_id=RequestId("r"),
    attempt=0,
    layout_digest=LAYOUT.digest(),
)


def of_device(asked):
    """Reads of a peer's tensors: not of its head, nor of own tensors."""
    return [one for one in asked if one.agent == PREFILL and (one.peers[:, 2] > 0).all()]


@pytest.mark.parametrize("keys", ["HSD", "HDS"])
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), DEGREES)
def test_used_tokens_come_between_any_two_degrees(prefill_ranks, decode_ranks, keys, monkeypatch):
    asked = record_reads(monkeypatch)
    with two_ends(
        prefill={"num_ranks": prefill_ranks, "keys": keys},
        decode={"num_ranks": decode_ranks, "keys": keys},
    ) as two:
        for number, num_tokens in enumerate((1, 7, 16)):
            asked.clear()
            outcome = two.move([number + 1], [number], num_tokens)
            assert outcome.error() is None
            came, sent = two.decode.blocks[number], two.prefill.blocks[number + 1]
            assert (used(came, num_tokens) == used(sent, num_tokens)).all()
            assert (came != sent).any() == (num_tokens < 16)
            num_key_tokens = LAYOUT.block_size + PAD if keys == "HDS" else num_tokens
            half_bytes = LAYOUT.block_bytes // LAYOUT.block_size // 2  # a token's keys, or values
            num_bytes = (num_key_tokens + num_tokens) * half_bytes
            assert outcome.token.kv_bytes == num_bytes
            assert sum(one.peers[:, 1].sum() for one in of_device(asked)) == num_bytes
        assert (two.decode.blocks[3:] == UNTOUCHED).all()


def test_transposed_keys_come_into_slots_of_another_length():
    with two_ends(prefill={"keys": "HDS"}, decode={"keys": "HDS", "pad": 9}) as two:
        outcome = two.move([1], [0], 5)
        assert outcome.error() is None
        assert (used(two.decode.blocks[0], 5) == used(two.prefill.blocks[1], 5)).all()
        assert outcome.token.kv_bytes == 5 * LAYOUT.block_bytes // LAYOUT.block_size


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
        pool = two.decode.pool
        by_heads = {}
        for rank, heads in enumerate(pool.device.geometry.heads):
            numbers = pool.device.geometry.tensors[rank].ravel().tolist()
            slots = [pool.tensors[n].bytes[: len(pool.tensors[n].bytes) // 7] for n in numbers]
            # Behind the context is what nobody reads.
            size = LAYOUT.block_size * LAYOUT.head_dim * 4
            by_heads.setdefault(heads, []).append([bytes(slot[:size]) for slot in slots])
        assert [len(ranks) for ranks in by_heads.values()] == [2, 2]
        for ranks in by_heads.values():
            assert ranks[0] == ranks[1]
            assert ranks[0][0] != bytes([UNTOUCHED]) * len(ranks[0][0])


def test_what_came_is_on_the_device_and_has_the_digests_of_what_was_sent():
    with two_ends(prefill={"num_ranks": 1}, decode={"num_ranks": 4}) as two:
        two.decode.pool.retire(range(NUM_BLOCKS))
        assert not two.decode.pool.is_on_device(2)
        assert two.move([1], [2], 9).error() is None
        assert two.decode.pool.is_on_device(2)
        sent = two.prefill.pool.digests([1], IDENTITY, 9)
        assert two.decode.pool.digests([2], IDENTITY, 9) == sent
        assert two.decode.pool.digests([2], IDENTITY, 10) != sent


def test_what_lies_in_the_mirror_alone_is_not_read_and_not_believed():
    with two_ends() as two:
        pool = two.prefill.pool
        pool.begin_fill([1])
        pool.view(BlockId(1))[:] = bytes([7]) * LAYOUT.block_bytes
        promised = pool.digests([1], IDENTITY, 16)
        assert two.move([1], [0]).error() is None
        assert two.decode.pool.digests([0], IDENTITY, 16) != promised
        pool.end_fill([1], 16)  # as whoever received it does, before anybody is told of it
        assert two.move([1], [0]).error() is None
        assert two.decode.pool.digests([0], IDENTITY, 16) == promised


def test_blocks_given_up_while_they_are_read_are_not_taken(monkeypatch):
    """The bytes have come, and the generations are read behind them."""
    with two_ends() as two:
        two.decode.pool.retire(range(NUM_BLOCKS))
        read = readers.NixlNeuronReader._read

        def give_up_behind(reader, moves):
            read(reader, moves)
            two.prefill.pool.retire([BlockId(4)])

        monkeypatch.setattr(readers.NixlNeuronReader, "_read", give_up_behind)
        assert isinstance(two.move([3, 4], [0, 1]).error(), KvChanged)
        assert not two.decode.pool.is_on_device(0)
        assert two.move([3, 2], [0, 1]).error() is None
        assert two.decode.pool.is_on_device(0)


@pytest.mark.parametrize("decode_ranks", [1, 4])
def test_behind_the_bytes_each_tensor_is_read_back_and_then_the_generations(
    decode_ranks, monkeypatch
):
    """The fence: through another agent of this worker's, for NIXL's own reads end at once."""
    asked = record_reads(monkeypatch)
    with two_ends(decode={"num_ranks": decode_ranks}) as two:
        asked.clear()
        assert two.move([1, 2], [0, 5], 20).error() is None
        bytes_, fence, head = asked
        assert (bytes_.agent, fence.agent, head.agent) == (PREFILL, DECODE, PREFILL)
        assert (bytes_.reader, fence.reader) == (f"{DECODE}-{PREFILL}-0", f"{DECODE}-fence-0")
        tensors = two.decode.pool.tensors
        written = {tensor_of(tensors, address) for address in bytes_.own[:, 0].tolist()}
        last = [tensor_of(tensors, address) for address in fence.peers[:, 0].tolist()]
        assert sorted(last) == sorted(written)  # of each tensor once
        assert (fence.peers[:, 1] == 4).all()
        ends = set((bytes_.own[:, 0] + bytes_.own[:, 1]).tolist())
        assert {address + 4 for address in fence.peers[:, 0].tolist()} <= ends
        head_address = two.prefill.pool.memory().address - head_bytes(NUM_BLOCKS)
        assert head_address + 4096 <= head.peers[0, 0] < head_address + head_bytes(NUM_BLOCKS)


def tensor_of(tensors, address):
    for number, tensor in enumerate(tensors):
        if tensor.address <= address < tensor.address + tensor.num_bytes:
            return number
    raise ValueError(f"{address} is in no tensor")


def test_many_runs_go_in_several_transfers(monkeypatch):
    monkeypatch.setattr(readers, "RUNS_MAX", 5)
    asked = record_reads(monkeypatch)
    with two_ends() as two:
        asked.clear()
        assert two.move([1, 2, 3], [0, 5, 4]).error() is None
        assert (two.decode.blocks[[0, 5, 4]] == two.prefill.blocks[[1, 2, 3]]).all()
        reads = of_device(asked)
        assert len(reads) > 1
        assert max(len(one.own) for one in reads) == 5


def test_no_transfer_has_more_runs_than_the_adapters_queue(monkeypatch):
    monkeypatch.setattr(nixl_kit, "LAYOUT", replace(LAYOUT, num_layers=60))
    asked = record_reads(monkeypatch)
    with two_ends() as two:
        asked.clear()
        assert two.move([0, 1, 2, 3, 4], [5, 4, 3, 2, 1], 5 * 16 - 1).error() is None
        counts = [len(one.own) for one in of_device(asked)]
        assert sum(counts) == 5 * 60 * 2 * 2
        assert max(counts) <= 1024


@pytest.mark.parametrize("keys", ["HSD", "HDS"])
def test_connecting_tries_each_pair_of_cores_and_touches_no_slots_tokens(keys, monkeypatch):
    asked = record_reads(monkeypatch)
    with two_ends(
        is_connected=False, prefill={"num_ranks": 2, "keys": keys}, decode={"keys": keys}
    ) as two:
        before = [tensor.bytes.copy() for tensor in two.decode.pool.tensors]
        two.connect()
        (tried,) = of_device(asked)
        assert len(tried.own) == 2
        assert (tried.own[:, 1] == 4).all()
        for tensor, old in zip(two.decode.pool.tensors, before, strict=True):
            for place in np.flatnonzero(tensor.bytes != old).tolist():
                number = place // 4
                head_numbers = (LAYOUT.block_size + PAD) * LAYOUT.head_dim
                assert number < head_numbers  # of slot 0
                position = number % (LAYOUT.block_size + PAD)
                if tensor not in two.decode.pool.tensors[:2] or keys == "HSD":
                    position = number // LAYOUT.head_dim
                assert position >= LAYOUT.block_size
        assert (two.decode.blocks == UNTOUCHED).all()


def test_where_nothing_is_behind_a_slot_the_try_goes_to_the_host(monkeypatch):
    asked = record_reads(monkeypatch)
    fields = {"pad": 0}
    with two_ends(is_connected=False, prefill=fields, decode=fields) as two:
        before = [tensor.bytes.copy() for tensor in two.decode.pool.tensors]
        two.connect()
        (tried,) = of_device(asked)
        assert (tried.own[:, 2] == 0).all()
        for tensor, old in zip(two.decode.pool.tensors, before, strict=True):
            assert (tensor.bytes == old).all()
        assert two.move([1], [0]).error() is None
        assert (two.decode.blocks[0] == two.prefill.blocks[1]).all()


def test_a_device_that_cannot_be_read_is_no_connection_and_the_next_engine_may_do(monkeypatch):
    """As where the adapter reaches no device memory: the pool's head can be read all the same."""
    with two_ends() as two:
        region = two.accept()

        def read(agent, own, peers, deadline, **kinds):
            if kinds:
                raise PeerGone("a transfer from the prefill worker failed")
            read_before(agent, own, peers, deadline, **kinds)

        read_before = readers.NixlAgent.read
        monkeypatch.setattr(readers.NixlAgent, "read", read)
        with pytest.raises(PeerGone):
            two.connect(region)


def test_own_memory_that_cannot_be_registered_for_a_peer_is_no_connection(monkeypatch):
    with two_ends(is_connected=False) as two:
        region = two.accept()

        def register_rows(agent, rows, kind="DRAM"):
            raise ConfigError("NIXL cannot register 1 bytes: no more")

        monkeypatch.setattr(readers.NixlAgent, "register_rows", register_rows)
        with pytest.raises(PeerGone, match="no more"):
            two.connect(region)


def test_a_peer_is_told_nothing_before_it_was_accepted_nor_after_it_left():
    with two_ends(is_connected=False) as two:
        strangers = two.prefill.engine.local_region(DECODE)
        assert (strangers.metadata, strangers.addresses, strangers.head_address) == ([], [], 0)
        with pytest.raises(PeerRefused, match="has not accepted"):
            two.connect(strangers)
        assert two.accept().metadata
        two.prefill.engine.disconnect(DECODE)
        assert two.prefill.engine.local_region(DECODE) == strangers
        assert transfer_domain(two.prefill.engine) == "nixl_neuron"


def test_a_peer_is_told_how_to_reach_those_tensors_that_it_reads():
    """Of a head's replicas one is read of each layer: with many ranks they are few of them all."""
    with two_ends(prefill={"num_ranks": 4}) as two, one_end(PREFILL, num_ranks=2) as fewer:
        told = len(b"".join(two.accept().metadata))
        fewer.engine.accept(DECODE, two.decode.engine.local_region(PREFILL), LAYOUT)
        alike = len(b"".join(fewer.engine.local_region(DECODE).metadata))
        assert told == alike  # of 24 tensors as many as of 12


def test_metadata_that_is_too_much_for_the_link_is_refused(monkeypatch):
    monkeypatch.setattr(engines, "NIXL_METADATA_BYTES_MAX", 100)
    with two_ends(is_connected=False) as two, pytest.raises(PeerRefused, match="metadata"):
        two.accept()


def test_a_block_that_is_named_twice_is_refused_and_the_connection_goes_on():
    with two_ends() as two:
        for sources, numbers in (([1, 1], [0, 2]), ([1, 2], [0, 0])):
            outcome = two.move(sources, numbers)
            assert isinstance(outcome.error(), RemoteProtocolError)
            assert outcome.token.kv_bytes == 0
        assert (two.decode.blocks == UNTOUCHED).all()
        assert two.move([1], [0]).error() is None


def test_other_layouts_regions_and_backends_are_refused():
    with two_ends(is_connected=False) as two:
        region = two.accept()
        with pytest.raises(PeerRefused, match="another length"):
            two.decode.engine.connect(PREFILL, region, replace(LAYOUT, block_size=8))
        with pytest.raises(PeerRefused, match="no Neuron device"):
            two.decode.engine.connect(PREFILL, two.prefill.pool.region(), LAYOUT)
        with pytest.raises(PeerRefused, match="another backend"):
            two.connect(msgspec.structs.replace(region, backend="LIBFABRIC"))


def test_devices_that_keep_keys_in_another_order_take_the_next_engine():
    with (
        two_ends(is_connected=False, decode={"keys": "HDS"}) as two,
        pytest.raises(PeerRefused, match="different orders"),
    ):
        two.accept()


def test_a_send_is_over_at_once():
    with two_ends() as two:
        receive = two.receive([1], [0])
        assert two.prefill.engine.post_send(DECODE, Send(tag=1, runs=receive.runs)).is_done()


def test_kv_of_a_host_or_without_addresses_is_refused():
    with (
        closing(KvPool.create(LAYOUT, 1, PREFILL)) as pool,
        pytest.raises(ConfigError, match="--device neuron"),
    ):
        make_engine(pool)
    with closing(make_pool(LAYOUT, 1, PREFILL)) as pool:
        pool.tensors[3].address = None
        with pytest.raises(ConfigError, match="1 of 12 KV tensors have no device address") as found:
            make_engine(pool)
        assert "--transfer shm,tcp" in found.value.message
