"""KV that leaves layer by layer while the prefill computes: right, or pulled whole as always."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
import torch
from test_resharded_hand_over import fill, tokens_of
from transfer_kit import LAYOUT, BareDecode, R, end_of, until

from neuron_di.core import PrefillChunk
from neuron_di.errors import RemoteProtocolError
from neuron_di.request import OutputText, Request
from neuron_di.testing.fake_model import FakeTokenizer
from neuron_di.transfer import ShmEngine, layer_sender
from neuron_di.transfer.tcp_engine import TcpEngine
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import Done, LayerReady, LookupAll, Malformed, PullLayer, SamplingParams

LAYERS = 3
WIDE = replace(LAYOUT, num_layers=LAYERS, num_kv_heads=4)
ENGINES = {"shm": ShmEngine, "tcp": TcpEngine}
BLOCKS = (5, 1, 11, 2)
NUM_TOKENS = 14
OWN = [BlockId(n) for n in (3, 9, 12, 7)]


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


class Scene:
    """A prefill worker whose pool is filled chunk by chunk, layer by layer, by the test."""

    def __init__(self, cluster, engine, layout=WIDE, own_layout=WIDE, stream_layers="on", **own):
        options = {"make_transfer": engine, "stream_layers": stream_layers}
        self.prefill = cluster.prefill(layout=layout, **options)
        self.decode = cluster.decode(layout=own_layout, **options, **own)
        fill(self.prefill)
        pool = self.prefill.pool
        self.kv = [pool.tensor(rank).clone() for rank in range(layout.num_ranks)]
        for rank in range(layout.num_ranks):
            pool.tensor(rank).fill_(-7.0)
        output = OutputText(FakeTokenizer(), stop=(), skip_special_tokens=True, min_tokens=0)
        self.request = Request(
            R,
            0,
            prompt_ids=[5] * NUM_TOKENS,
            sampling=SamplingParams(),
            max_tokens=4,
            output=output,
        )
        self.request.block_ids = [BlockId(n) for n in BLOCKS[: layout.num_blocks_for(NUM_TOKENS)]]

    async def look_up(self):
        """Ask, and come back when the prefill worker knows."""
        await self.decode.buffer(self.prefill).connect()
        self.prefill.buffer.expect(R, 0)
        asking = asyncio.create_task(self.decode.lookup(self.prefill))
        await until(lambda: R in {key[0] for key in self.prefill.buffer.lookup_dict})
        entry = self.prefill.buffer.lookup_dict[R, 0]
        await until(lambda: entry.reader is not None)
        return asking

    def compute(self, tokens_max=6):
        """The next chunk: each layer, then what it calls."""
        chunk = PrefillChunk.next_of(self.request, tokens_max)
        pool = self.prefill.pool
        after_layer = self.prefill.buffer.layers.watch(pool, chunk)
        for layer in range(LAYERS):
            for position in range(chunk.start, chunk.end):
                index, place = divmod(position, pool.layout.block_size)
                block = self.request.block_ids[index]
                for rank, kv in enumerate(self.kv):
                    pool.tensor(rank)[block, layer, :, :, place] = kv[block, layer, :, :, place]
            if after_layer is not None:
                after_layer(layer, self.request.block_ids)
            yield layer
        chunk.mark_computed()

    async def compute_all(self):
        while self.request.num_computed < NUM_TOKENS:
            list(self.compute())
        await asyncio.sleep(0)  # what the engine's thread told the loop comes before its end

    def park(self):
        ready = self.prefill.ready(block_ids=tuple(self.request.block_ids), num_tokens=NUM_TOKENS)
        self.prefill.buffer.park(ready)

    async def pull(self, asking):
        own = OWN[: self.decode.pool.layout.num_blocks_for(NUM_TOKENS)]
        token = self.decode.buffer(self.prefill).pull(await asking, own)
        await end_of(token)
        assert token.error() is None
        ids = [int(n) for n in own]
        found = tokens_of(self.decode.pool, ids, NUM_TOKENS)
        source = [int(n) for n in self.request.block_ids]
        assert torch.equal(found, tokens_of(self.prefill.pool, source, NUM_TOKENS))
        await self.is_clean()
        await until(lambda: self.prefill.ended)
        assert isinstance(self.prefill.ended[0][1], Done)
        assert self.prefill.ended[0][1].form == token.form
        return token

    async def is_clean(self):
        """Nothing is kept at either end."""
        landing = self.decode.connector.landing
        await until(lambda: landing.num_bytes_asked == 0)
        landing.check_integrity()
        assert self.decode.counters.kv_bytes_in_flight == 0
        assert not self.decode.buffer(self.prefill)._layers._streams
        await until(lambda: not self.prefill.buffer.lookup_dict)
        assert not self.prefill.buffer.layers._streams


@pytest.mark.parametrize(
    "fields", [{}, {"block_size": 8}, {"num_ranks": 2}, {"num_ranks": 8}], ids=str
)
async def test_what_came_layer_by_layer_is_the_request_s_kv(cluster, engine, fields):
    scene = Scene(cluster, engine, own_layout=replace(WIDE, **fields))
    asking = await scene.look_up()
    await scene.compute_all()
    scene.park()
    token = await scene.pull(asking)
    assert (token.engine, token.form) == (engine.name, "streamed")
    assert token.kv_bytes == len(BLOCKS) * WIDE.block_bytes


async def test_replicated_heads_come_once(cluster, engine):
    layout = replace(WIDE, num_kv_heads=2, num_ranks=4)
    scene = Scene(cluster, engine, layout=layout, own_layout=layout)
    asking = await scene.look_up()
    await scene.compute_all()
    scene.park()
    token = await scene.pull(asking)
    assert (token.form, token.kv_bytes) == ("streamed", len(BLOCKS) * layout.block_bytes // 2)


async def test_a_layer_is_there_before_the_next_is_computed(cluster, engine):
    scene = Scene(cluster, engine)
    asking = await scene.look_up()
    streams = scene.decode.buffer(scene.prefill)._layers._streams
    num_blocks = 0
    while scene.request.num_computed < NUM_TOKENS:
        num_full = min(scene.request.num_computed + 6, NUM_TOKENS)
        for layer in scene.compute():
            expected = -(-num_full // 4) if num_full == NUM_TOKENS else num_full // 4
            await until(lambda e=expected, n=layer: streams and streams[R, 0].arrived[n].sum() == e)
            if layer + 1 < LAYERS:
                assert streams[R, 0].arrived[layer + 1].sum() == num_blocks
        num_blocks = expected
    assert not asking.done(), "Ready was not said yet"
    scene.park()
    token = await scene.pull(asking)
    assert token.form == "streamed"


async def test_what_changed_after_it_was_sent_is_pulled_again(cluster, engine):
    scene = Scene(cluster, engine)
    asking = await scene.look_up()
    await scene.compute_all()
    buffer = scene.decode.buffer(scene.prefill)
    await until(lambda: (s := buffer._layers._streams.get((R, 0))) and s.arrived.all())
    scene.prefill.pool.tensor()[11, 1] += 1.0
    scene.park()
    token = await scene.pull(asking)
    assert token.form == "direct"
    assert scene.decode.counters.num_streams_refused == 1
    assert scene.decode.counters.num_kv_mismatched == 0


async def test_a_prompt_without_its_first_layers_is_pulled_whole(cluster, engine):
    scene = Scene(cluster, engine)
    scene.prefill.buffer.expect(R, 0)
    list(scene.compute())
    await scene.decode.buffer(scene.prefill).connect()
    asking = asyncio.create_task(scene.decode.lookup(scene.prefill))
    entry = scene.prefill.buffer.lookup_dict[R, 0]
    await until(lambda: entry.reader is not None)
    await scene.compute_all()
    scene.park()
    assert (await scene.pull(asking)).form == "direct"


@pytest.mark.parametrize("how", ["cancel", "drop", "link"])
async def test_who_gives_up_in_mid_prefill_leaves_nothing_behind(cluster, engine, how):
    scene = Scene(cluster, engine)
    asking = await scene.look_up()
    list(scene.compute())
    buffer = scene.decode.buffer(scene.prefill)
    landing = scene.decode.connector.landing
    await until(lambda: landing.num_bytes_asked)
    if how == "cancel":
        buffer.cancel(R, 0, "the client left")
        asking.cancel()
    elif how == "drop":
        scene.prefill.buffer.drop(R, 0, "cancelled")
    else:
        buffer.close()
    scene.prefill.buffer.drop(R, 0, "over")
    await asyncio.wait([asking])
    await until(lambda: landing.num_bytes_asked == 0)
    landing.check_integrity()
    assert scene.decode.counters.kv_bytes_in_flight == 0
    assert not scene.prefill.buffer.layers._streams


@pytest.mark.parametrize("how", ["cancel", "link"])
async def test_a_reader_that_gave_up_hears_no_more_of_layers(cluster, engine, how, monkeypatch):
    scene = Scene(cluster, engine)
    asking = await scene.look_up()
    list(scene.compute())
    buffer, sender = scene.decode.buffer(scene.prefill), scene.prefill.buffer
    announced = []
    monkeypatch.setattr(sender.layers, "_send", lambda *args: announced.append(args))
    if how == "cancel":
        buffer.cancel(R, 0, "the client left")
        asking.cancel()
    else:
        buffer.close()
    await asyncio.wait([asking])
    await until(lambda: sender.lookup_dict[R, 0].reader is None)
    announced.clear()
    await scene.compute_all()
    assert announced == []
    stream = sender.layers._streams[R, 0]
    assert len(stream.pieces) > LAYERS  # they are there for whoever asks next
    sender.layers.ask((R, 0), b"another")
    assert [piece for _, piece in announced] == stream.pieces
    sender.drop(R, 0, "over")


async def test_without_room_the_whole_is_pulled(cluster, engine):
    scene = Scene(cluster, engine)
    await scene.decode.buffer(scene.prefill).connect()
    landing = scene.decode.connector.landing
    room = landing.take(landing.size_bytes, recall=lambda: None)
    landing.keep(room)
    asking = await scene.look_up()
    await scene.compute_all()
    scene.park()
    ready = await asking
    token = await end_of(scene.decode.buffer(scene.prefill).pull(ready, OWN))
    assert (token.error(), token.form) == (None, "direct")
    landing.free(room)
    await scene.is_clean()


@pytest.mark.parametrize("least", [0, 1], ids=["of a chunk's size", "of one byte more"])
@pytest.mark.parametrize("stream_layers", ["on", "off", "auto"])
async def test_layers_are_streamed_where_that_was_asked_for(
    cluster, engine, stream_layers, least, monkeypatch
):
    """And, by `auto`, where a layer of the first chunk is not too small."""
    first_bytes = 6 * WIDE.block_bytes // (WIDE.block_size * LAYERS)
    monkeypatch.setattr(layer_sender, "AUTO_PIECE_BYTES_MIN", first_bytes + least)
    scene = Scene(cluster, engine, stream_layers=stream_layers)
    asking = await scene.look_up()
    await scene.compute_all()
    scene.park()
    own = OWN
    token = await end_of(scene.decode.buffer(scene.prefill).pull(await asking, own))
    assert token.error() is None
    is_auto = (engine.name, stream_layers, least) == ("tcp", "auto", 0)
    is_streamed = is_auto or stream_layers == "on"
    assert token.form == ("streamed" if is_streamed else "direct")


async def test_layers_that_were_not_announced_cannot_be_pulled(cluster):
    prefill = cluster.prefill(layout=WIDE, make_transfer=TcpEngine)
    prefill.park(R, (8, 9))
    pull = PullLayer(request_id=R, attempt=0, piece=0, engine="tcp")
    with BareDecode(prefill) as peer:
        await peer.connect()
        await peer.lookup()
        assert await peer.answers(pull) == []
        assert prefill.counters.num_stale == 1
        other = RequestId("other")
        prefill.buffer.expect(other, 0)
        asked = LookupAll(request_id=other, attempt=0, streams=True)
        await peer.answers(asked)
        (answer,) = await peer.answers(msgspec.structs.replace(pull, request_id=other))
        assert isinstance(answer, Malformed)
        assert prefill.counters.num_signals_refused == 1
        assert (await peer.answers(asked))[0].request_id == other


async def test_layers_that_were_announced_to_another_cannot_be_pulled(cluster):
    scene = Scene(cluster, ShmEngine)
    asking = await scene.look_up()
    await scene.compute_all()
    with BareDecode(scene.prefill) as peer:
        await peer.connect()
        pull = PullLayer(request_id=R, attempt=0, piece=0, engine="shm")
        (answer,) = await peer.answers(pull)
    assert isinstance(answer, Malformed)
    assert scene.prefill.buffer.layers._streams[R, 0].unsent
    scene.park()
    assert (await scene.pull(asking)).form == "streamed"


FIRST = LayerReady(
    request_id=R,
    attempt=0,
    piece=0,
    layer=0,
    first_block=0,
    block_ids=[3],
    generations=[0],
    num_blocks=4,
)


@pytest.mark.parametrize(
    "second",
    [
        {"layer": LAYERS},
        {"first_block": 4},
        {"first_block": 3, "block_ids": [1, 2], "generations": [0, 0]},
        {"num_blocks": 5},
        {"block_ids": [], "generations": []},
        {"generations": []},
        {"block_ids": [-1]},
        {"block_ids": [1 << 62]},
        {"layer": 0},
    ],
    ids=str,
)
async def test_layers_that_do_not_add_up_break_the_link(cluster, second):
    scene = Scene(cluster, ShmEngine)
    asking = await scene.look_up()
    reader = scene.prefill.buffer.lookup_dict[R, 0].reader
    scene.prefill.buffer._send(reader, FIRST)
    fields = {"piece": 1, "layer": 1, **second}
    scene.prefill.buffer._send(reader, msgspec.structs.replace(FIRST, **fields))
    with pytest.raises(RemoteProtocolError):
        await asking
    landing = scene.decode.connector.landing
    await until(lambda: landing.num_bytes_asked == 0)
    landing.check_integrity()
    assert scene.decode.counters.kv_bytes_in_flight == 0


async def test_a_last_piece_that_was_lost_costs_the_stream_only(cluster, engine):
    scene = Scene(cluster, engine)
    asking = await scene.look_up()
    layers, said = scene.prefill.buffer.layers, []
    send, layers._send = layers._send, lambda *words: said.append(words)
    await scene.compute_all()
    for words in said[:-1]:
        send(*words)
    scene.park()
    assert (await scene.pull(asking)).form == "direct"


@pytest.mark.parametrize("piece", [0, 9])
async def test_a_piece_that_was_lost_or_came_twice_costs_the_stream_only(cluster, engine, piece):
    scene = Scene(cluster, engine)
    asking = await scene.look_up()
    reader = scene.prefill.buffer.lookup_dict[R, 0].reader
    list(scene.compute())
    await asyncio.sleep(0)
    first = scene.prefill.buffer.layers._streams[R, 0].pieces[0]
    scene.prefill.buffer._send(reader, msgspec.structs.replace(first, piece=piece))
    await scene.compute_all()
    scene.park()
    assert (await scene.pull(asking)).form == "direct"


@pytest.mark.parametrize("num_blocks", [1 << 40, 1 << 62])
async def test_more_than_fits_is_not_streamed(cluster, num_blocks):
    scene = Scene(cluster, ShmEngine)
    asking = await scene.look_up()
    reader = scene.prefill.buffer.lookup_dict[R, 0].reader
    scene.prefill.buffer._send(reader, msgspec.structs.replace(FIRST, num_blocks=num_blocks))
    scene.request.num_computed = NUM_TOKENS
    scene.park()
    assert (await scene.pull(asking)).form == "direct"
