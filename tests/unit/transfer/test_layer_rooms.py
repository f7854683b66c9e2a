"""Landing memory of KV that comes layer by layer: whose it is, and until when."""

import asyncio
import threading
from dataclasses import replace

import pytest
from test_layer_streaming import LAYERS, NUM_TOKENS, OWN, WIDE, Scene
from transfer_kit import WAIT_S, R, end_of, until

from neuron_di.errors import KvMissing
from neuron_di.transfer import ShmEngine, TransferToken, prefill_link
from neuron_di.types import RequestId


@pytest.mark.parametrize("stream_layers", ["on", "off"])
async def test_layers_of_a_request_without_a_slot_do_not_starve_the_one_that_has_it(
    cluster, stream_layers
):
    """Whoever has a slot waits for room, and who has the room would wait for that slot."""
    own_layout = replace(WIDE, block_size=8)
    scene = Scene(
        cluster,
        ShmEngine,
        own_layout=own_layout,
        stream_layers=stream_layers,
        landing_bytes=4 * WIDE.block_bytes,
    )
    first = RequestId("has-the-slot")
    scene.prefill.park(first, (6, 7, 8, 9), num_tokens=NUM_TOKENS)
    ready = await scene.decode.lookup(scene.prefill, first)
    asking = await scene.look_up()
    await scene.compute_all()
    scene.park()
    await asking
    landing = scene.decode.connector.landing
    if stream_layers == "on":
        await until(lambda: landing.num_bytes_asked == landing.size_bytes)
    own = OWN[: own_layout.num_blocks_for(NUM_TOKENS)]
    token = await end_of(scene.decode.buffer(scene.prefill).pull(ready, own))
    assert token.error() is None
    # The other one is pulled as a whole: its layers went.
    token = await end_of(scene.decode.buffer(scene.prefill).pull(await asking, own))
    assert token.error() is None
    landing.check_integrity()
    assert landing.num_bytes_asked == 0


def slow_engine(held):
    """Its receives into landing memory end when the test completes what is held."""

    class Slow(ShmEngine):
        def post_receive(self, peer, receive):
            if len(receive.block_ids):
                return super().post_receive(peer, receive)
            held.append(TransferToken())
            return held[-1]

    return Slow


async def pieces_on_their_way(cluster):
    """What holds their receives, the scene, its lookup and the decode worker's landing memory."""
    held = []
    scene = Scene(cluster, slow_engine(held))
    asking = await scene.look_up()
    list(scene.compute())
    landing = scene.decode.connector.landing
    await until(lambda: held)
    return held, scene, asking, landing


async def test_the_room_of_a_piece_that_is_on_its_way_is_nobody_elses(cluster):
    held, scene, asking, landing = await pieces_on_their_way(cluster)
    taken = landing.num_bytes_asked
    assert taken
    asking.cancel()
    await asyncio.wait([asking])  # the request is over here, its pieces still write
    assert scene.decode.buffer(scene.prefill)._entries == {}
    assert landing.num_bytes_asked == taken
    for token in held:
        token.complete()
    await until(lambda: landing.num_bytes_asked == 0)
    scene.prefill.buffer.drop(R, 0, "over")


async def test_a_piece_that_failed_leaves_no_room_to_layers_that_would_come_in_vain(cluster):
    held, scene, asking, landing = await pieces_on_their_way(cluster)
    held.pop().complete(KvMissing("it was not there"))
    while held:
        held.pop().complete()
    await until(lambda: landing.num_bytes_asked == 0)
    await asyncio.sleep(0)
    assert not held
    scene.park()
    token = await end_of(scene.decode.buffer(scene.prefill).pull(await asking, OWN))
    assert token.error() is None


async def test_nothing_is_kept_of_a_request_that_is_over_when_its_room_is_recalled(cluster):
    held, given = [], []
    scene = Scene(cluster, slow_engine(held), landing_bytes=4 * WIDE.block_bytes)
    asking = await scene.look_up()
    list(scene.compute())
    landing = scene.decode.connector.landing
    await until(lambda: held)
    asking.cancel()
    await asyncio.wait([asking])
    landing.ask(landing.size_bytes, WAIT_S, given.append)
    for token in held:
        token.complete()
    await until(lambda: given)
    landing.free(given[0])
    assert scene.decode.buffer(scene.prefill)._layers._streams == {}
    scene.prefill.buffer.drop(R, 0, "over")


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_layers_that_do_not_match_are_no_damage_to_the_memory(cluster, is_cancelled):
    """Blocks of a request that was given up may have changed before they were read."""
    scene = Scene(cluster, ShmEngine)
    asking = await scene.look_up()
    await scene.compute_all()
    buffer = scene.decode.buffer(scene.prefill)
    streams = buffer._layers._streams
    await until(lambda: (R, 0) in streams and streams[R, 0].arrived.all())
    scene.prefill.pool.tensor()[11, 1] += 1.0
    scene.park()
    ready = await asking
    is_verifying, may_go_on = threading.Event(), threading.Event()
    finish = buffer._receiver.finish_streamed

    def finish_later(entry):
        is_verifying.set()
        may_go_on.wait(WAIT_S)
        return finish(entry)

    buffer._receiver.finish_streamed = finish_later
    token = buffer.pull(ready, OWN)
    await until(is_verifying.is_set)
    if is_cancelled:
        buffer.cancel(R, 0, "the client left")
    may_go_on.set()
    await end_of(token)
    assert isinstance(token.error(), KvMissing) if is_cancelled else token.error() is None
    counters = scene.decode.counters
    assert (counters.num_streams_refused, counters.num_kv_mismatched) == (1, 0)


async def test_a_piece_that_is_cancelled_and_does_not_end_ends_its_link(cluster, monkeypatch):
    monkeypatch.setattr(prefill_link, "CANCEL_S", 0.0)
    held = []

    class Deaf(slow_engine(held)):
        is_one_sided = False

    scene = Scene(cluster, Deaf, transfer_timeout_s=0.01)
    asking = await scene.look_up()
    list(scene.compute())
    await until(lambda: held)
    buffer, landing = scene.decode.buffer(scene.prefill), scene.decode.connector.landing
    asking.cancel()
    await asyncio.wait([asking])
    await until(lambda: buffer.is_broken)
    assert landing.num_bytes_asked  # it may be written to yet
    for token in held:
        token.complete()
    await until(lambda: landing.num_bytes_asked == 0)
    scene.prefill.buffer.drop(R, 0, "over")


async def test_room_of_a_request_that_has_its_slot_is_not_recalled(cluster):
    held, given = [], []
    scene = Scene(cluster, slow_engine(held), landing_bytes=4 * WIDE.block_bytes)
    asking = await scene.look_up()
    await scene.compute_all()
    scene.park()
    landing, ready = scene.decode.connector.landing, await asking
    await until(lambda: len(held) == LAYERS * 3)  # those of three chunks
    token = scene.decode.buffer(scene.prefill).pull(ready, OWN)
    landing.ask(landing.size_bytes, WAIT_S, given.append)
    for piece in held:
        piece.complete()
    await end_of(token)  # nothing has come in truth: it is pulled as a whole
    assert (token.error(), token.form) == (None, "direct")
    await until(lambda: given)
    landing.free(given[0])
    landing.check_integrity()


async def test_a_piece_whose_fence_fails_is_not_open_for_ever(cluster, caplog):
    class NoFence(ShmEngine):
        def fence(self, peer):
            raise OSError("the device is gone")

    scene = Scene(cluster, NoFence, own_layout=replace(WIDE, block_size=8))
    asking = await scene.look_up()
    await scene.compute_all()
    scene.park()
    await asking
    await until(lambda: "fence_failed" in caplog.text)
    await until(lambda: scene.decode.connector.counters.kv_bytes_in_flight == 0)
