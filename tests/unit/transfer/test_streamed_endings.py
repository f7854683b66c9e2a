"""KV that came layer by layer, and what brings it to its place fails: the request hears of it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from test_layer_streaming import LAYERS, OWN, WIDE, Scene
from transfer_kit import R, until

from neuron_di.errors import ConfigError
from neuron_di.transfer import layer_sender
from neuron_di.transfer.tcp_engine import TcpEngine


@pytest.mark.parametrize("stream_layers", ["on", "off"])
async def test_a_failure_that_is_not_ours_ends_the_receive(cluster, stream_layers, monkeypatch):
    scene = Scene(cluster, TcpEngine, stream_layers=stream_layers)

    def end_fill(block_ids, num_tokens):
        raise MemoryError

    monkeypatch.setattr(scene.decode.pool, "end_fill", end_fill)
    asking = await scene.look_up()
    await scene.compute_all()
    scene.park()
    token = scene.decode.buffer(scene.prefill).pull(await asking, OWN)
    await until(token.is_done)
    assert token.error() is not None
    await until(lambda: scene.decode.connector.landing.num_bytes_asked == 0)


@pytest.mark.parametrize(("pieces_max", "num_sent"), [(3 * LAYERS, 3 * LAYERS), (8, 0)])
async def test_no_layer_comes_in_vain_where_there_are_too_many(
    cluster, monkeypatch, pieces_max, num_sent
):
    monkeypatch.setattr(layer_sender, "PIECES_MAX", pieces_max)
    scene = Scene(cluster, TcpEngine)
    asking = await scene.look_up()
    stream = scene.prefill.buffer.layers._streams[R, 0]
    await scene.compute_all()  # in three chunks
    assert len(stream.pieces) == num_sent
    scene.park()
    token = await scene.pull(asking)
    assert token.form == ("streamed" if num_sent else "direct")


class NoMoreMemory(TcpEngine):
    """As over NIXL, where the system locks no more pages."""

    def register(self, memory):
        super().register(memory)
        raise ConfigError("cannot register it")


async def test_where_landing_memory_cannot_be_registered_no_layer_is_asked_for(cluster):
    scene = Scene(cluster, NoMoreMemory)
    asking = await scene.look_up()
    await scene.compute_all()
    assert not scene.prefill.buffer.layers._streams
    scene.park()
    own = scene.decode.buffer(scene.prefill).pull(await asking, OWN)
    await until(own.is_done)
    assert (own.error(), own.form) == (None, "direct")


@pytest.mark.parametrize("own_layout", [WIDE, replace(WIDE, block_size=8)], ids=str)
async def test_where_no_thread_can_be_started_layers_are_pulled_as_a_whole(
    cluster, monkeypatch, own_layout
):
    """And nothing is written to the request's blocks once there are threads again."""
    scene = Scene(cluster, TcpEngine, own_layout=own_layout)
    asking = await scene.look_up()
    await scene.compute_all()
    scene.park()
    streams = scene.decode.buffer(scene.prefill)._layers._streams
    await asyncio.wait((asking,))
    await until(lambda: streams[R, 0].arrived.all())
    loop = asyncio.get_running_loop()
    threads = ThreadPoolExecutor(1, thread_name_prefix="placing")
    loop.set_default_executor(threads)
    start = threading.Thread.start

    def start_other(thread: threading.Thread) -> None:
        if thread.name.startswith("placing"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_other)
        token = await scene.pull(asking)
    assert token.form in ("direct", "landed")
    assert scene.decode.counters.num_streams_refused == 1
    pool = scene.decode.pool
    pool.tensor(0).fill_(-3.0)  # the blocks are another's
    await loop.run_in_executor(None, int)  # behind all that waits for a thread
    assert (pool.tensor(0) == -3.0).all()
