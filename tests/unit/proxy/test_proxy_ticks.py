"""Looks that come again and again, on the simulation's clock."""

import asyncio
import logging

import pytest
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di_proxy.ticks import look_every


@virtual
async def test_looks_of_one_interval_come_together():
    looks = []
    stops = []
    for delay_s, interval_s in ((0.1, 1.0), (0.27, 1.0), (0.48, 0.5)):
        await asyncio.sleep(delay_s)
        stops.append(look_every(interval_s, lambda: looks.append(round(now_s(), 6))))
    await asyncio.sleep(10.0)
    assert {at_s for at_s in looks if at_s % 1.0} == {n + 0.5 for n in range(1, 11)}
    assert sorted(at_s for at_s in looks if not at_s % 1.0) == sorted([*range(1, 11)] * 3)
    for stop in stops:
        stop()
        stop()
    looks.clear()
    await asyncio.sleep(5.0)
    assert looks == []


@virtual
async def test_a_tick_that_is_very_near_is_left_out():
    """A timer may ring a little early: the tick that it rang for must not be the next one."""
    looks = []
    await asyncio.sleep(0.9)
    stop = look_every(1.0, lambda: looks.append(now_s()))
    await asyncio.sleep(2.5)
    stop()
    assert looks == pytest.approx([2.0, 3.0])


@virtual
async def test_a_look_that_fails_is_logged_and_ends_neither_itself_nor_others(caplog):
    looks = []

    def fail():
        looks.append("failed")
        raise ValueError("a bug")

    stops = [look_every(1.0, fail), look_every(1.0, lambda: looks.append("ok"))]
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(2.5)
    assert looks == ["failed", "ok"] * 2
    for stop in stops:
        stop()


@virtual
async def test_a_look_may_stop_itself_and_others():
    looks, stops = [], []

    def look():
        looks.append(now_s())
        for stop in stops:
            stop()

    stops += [look_every(1.0, look), look_every(1.0, lambda: looks.append("the other"))]
    await asyncio.sleep(3.0)
    assert looks == pytest.approx([1.0])
