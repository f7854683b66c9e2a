"""KV that came layer by layer, and what brings it to its place fails: the request hears of it."""

import pytest
from test_layer_streaming import LAYERS, OWN, Scene
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
