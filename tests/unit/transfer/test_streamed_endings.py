"""KV that came layer by layer, and what brings it to its place fails: the request hears of it."""

import pytest
from test_layer_streaming import OWN, Scene
from transfer_kit import until

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
