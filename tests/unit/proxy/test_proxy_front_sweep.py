"""One timer for all connections: how often it rings, and that it does not without any."""

import asyncio

import pytest
from raw_http import RawClient, get
from running_proxy import RunningProxy

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy import server
from neuron_di_proxy.front import SWEEP_S_MAX, SWEEP_S_MIN, Front, sweep_interval_s

SEND_TIMEOUT_S = 30.0


def test_with_the_defaults_it_rings_with_what_looks_around_each_second():
    assert sweep_interval_s(FrontOptions(), SEND_TIMEOUT_S) == SWEEP_S_MAX == 1.0


@pytest.mark.parametrize(
    "name", ["header_timeout_s", "body_timeout_s", "keep_alive_s", "ping_interval_s"]
)
def test_no_deadline_is_seen_late_by_more_than_a_fifth_of_it(name):
    options = FrontOptions(**{name: 2.0})
    assert sweep_interval_s(options, SEND_TIMEOUT_S) == pytest.approx(0.4)
    assert sweep_interval_s(FrontOptions(), 2.0) == pytest.approx(0.4)


def test_short_deadlines_and_no_pings_do_not_make_it_ring_all_the_time():
    options = FrontOptions(header_timeout_s=0.1, body_timeout_s=0.1, ping_interval_s=0)
    assert sweep_interval_s(options, 0.1) == pytest.approx(SWEEP_S_MIN)


async def test_nothing_rings_once_the_last_connection_is_gone(monkeypatch):
    fronts = []

    class WatchedFront(Front):
        def __init__(self, *of_front, **options):
            super().__init__(*of_front, **options)
            fronts.append(self)

    monkeypatch.setattr(server, "Front", WatchedFront)
    config = ProxyOptions(front=FrontOptions(header_timeout_s=0.2))
    async with RunningProxy(config, []) as proxy:
        for _ in range(2):  # and it rings again with the next one
            async with RawClient(proxy.address) as client:
                client.send(get("/health"))
                await client.response()
                (front,) = fronts
                assert front._stop_sweeping is not None
            async with asyncio.timeout(10.0):
                while front._stop_sweeping is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert front.num_connections == 0
