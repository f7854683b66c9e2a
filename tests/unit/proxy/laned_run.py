"""An attempt whose tokens may take lanes, and whose legs say what a test has them say."""

import asyncio
from contextlib import contextmanager

from lane_rig import Rig, chunks_of, payload_of
from launch_run import REQUEST
from running_proxy import ListDirectory
from scripted_worker import make_record, parked, token

from neuron_di.clock import Deadline, now_s
from neuron_di.config import LimitOptions
from neuron_di.types import RequestId
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.breaker import OPEN_S
from neuron_di_proxy.health import Health
from neuron_di_proxy.launch import Launcher
from neuron_di_proxy.route import Route
from neuron_di_proxy.token_lane import relay_told

STALL_S = 15.0
PAIR = Route(make_record("p1", "prefill"), make_record("d1", "decode"))
BOTH = make_record("b1", "both")
WHOLE = Route(BOTH, BOTH)


class LanedLeg:
    """A leg for which the test speaks, a frame at a time, as its link would deal with it."""

    def __init__(self, record, kind, message):
        self.worker_id, self.kind, self.message = record.worker_id, kind, message
        self.lanes = {}
        self.is_closed = False

    def open(self, hear):
        self._hear = hear

    def relay(self, lane):
        self.lanes[7] = lane

    def tell(self, *indices):
        """A frame of plain tokens. Returns the indices of those that no lane took."""
        tokens = [(7, index, 100 + index, f"t{index}") for index in indices]
        others, _, failures = relay_told(payload_of(tokens), self.lanes, now_s())
        for _, error in failures:
            self._hear(error)
        for _, index, _, text in others:
            if not self.is_closed:
                self._hear(token(index, text))
        return [index for _, index, _, _ in others]

    def say(self, *events):
        for event in events:
            self._hear(event)

    def close(self):
        self.is_closed = True


class Laned:
    """An attempt over such legs, whose client is the other end of a rig's socket."""

    def __init__(self, rig, route=PAIR, *, has_lane=lambda: True, has_first_lane=False):
        self.rig = rig
        self.legs = {}
        self.emitted = []
        self.num_asked = 0
        self._has_lane = has_lane
        self._has_first_lane = has_first_lane
        self.attempt = Attempt(
            request_id=RequestId("r1"),
            number=0,
            request=REQUEST,
            route=route,
            emitted=(),
            accepted_s=now_s(),
            deadline=Deadline.after(1000.0),
        )
        limits = LimitOptions(stall_timeout_s=STALL_S)
        self.health = Health(self, ListDirectory([]), limits)
        launcher = Launcher(self, self.health, limits)
        self.task = asyncio.create_task(launcher.run(self.attempt, self._emit, self._make_lane))

    def open_leg(self, record, kind, leg):
        self.legs[kind] = LanedLeg(record, kind, leg)
        return self.legs[kind]

    def _emit(self, given):
        self.rig.ids.append(given.token_id)
        self.rig.record.last_token_s = now_s()
        self.emitted.append(given.index)

    def _make_lane(self, *, is_first):
        if is_first:
            return self.rig.lane(begun=lambda: None) if self._has_first_lane else None
        self.num_asked += 1
        if not self._has_lane():
            return None
        return self.rig.lane(due=len(self.rig.ids), last_s=now_s())

    async def steady(self):
        """The leg that speaks, once its first token was given."""
        await asyncio.sleep(0)
        if "whole" in self.legs:
            self.legs["whole"].say(token(0), token(1))
            return self.legs["whole"]
        self.legs["prefill"].say(token(0), parked())
        self.legs["decode"].say(token(1))
        return self.legs["decode"]


@contextmanager
def running(*args, **kwargs):
    rig = Rig()
    try:
        yield Laned(rig, *args, **kwargs)
    finally:
        rig.close()


def texts(*indices):
    return chunks_of([f"t{index}" for index in indices])


def half_open(health, record):
    """A breaker that lets a worker have one request, to see whether it is good again."""
    breaker = health._watch_of(record).breaker
    breaker.opened_s = now_s() - 2 * OPEN_S
    assert breaker.state() == "half_open"
    return breaker


class Refuses:
    """A record that cannot be written to."""

    def __setattr__(self, name, value):
        raise ZeroDivisionError
