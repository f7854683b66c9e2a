"""Data connections to a host that is far away: each takes its time, and there may be many."""

import asyncio

import msgspec
import pytest
from tcp_kit import DECODE, LAYOUT, PREFILL, tcp_pair
from tcp_relay import TcpRelay

from neuron_di.transfer.tcp_engine import TcpTimes

STREAMS = 8
PROOF_S = 4.0


class FarAway(TcpRelay):
    """Nothing comes at once."""

    async def _copy(self, source, target):
        await asyncio.sleep(PROOF_S / STREAMS * 1.2)
        await super()._copy(source, target)


@pytest.mark.parametrize("streams", [1, STREAMS])
async def test_each_stream_has_its_time(streams):
    with tcp_pair(times=TcpTimes(proof_s=PROOF_S), transfer_streams=streams) as pair:
        region = pair.prefill.local_region(DECODE)
        async with FarAway(region.port) as relay:
            away = msgspec.structs.replace(region, port=relay.port)
            await asyncio.to_thread(pair.decode.connect, PREFILL, away, LAYOUT)
            assert relay.num_connections == streams
            pair.decode.disconnect(PREFILL)
