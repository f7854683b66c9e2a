"""Tokens that a device chooses by itself, and those that it leaves to the host."""

import pytest
from engine_kit import Rig, token_ids

from neuron_di.engine import Broken, Ended
from neuron_di.errors import BackendLost

DRAWN = 7


class Drawing:
    """A device that chooses DRAWN for the requests that are named."""

    def __init__(self, rig: Rig, *names: str) -> None:
        self.names = names
        self.errors: list[Exception] = []
        rig.backend.draw = self.draw

    def draw(self, logits_BV, requests):
        assert logits_BV.shape[0] == len(requests)
        if self.errors:
            raise self.errors.pop()
        return [DRAWN if each.request_id in self.names else None for each in requests]


def of(events, name):
    return [event for event in events if event.key[0] == name]


def test_rows_that_the_device_leaves_are_sampled_on_the_host(make_rig):
    alone = make_rig("both")
    alone.engine.submit(alone.request("other"))
    expected = token_ids(alone.turn_until_idle())

    rig = make_rig("both")
    Drawing(rig, "drawn")
    rig.engine.submit(rig.request("drawn"))
    rig.engine.submit(rig.request("other"))
    events = rig.turn_until_idle()
    assert token_ids(of(events, "drawn")) == [DRAWN] * 4
    assert token_ids(of(events, "other")) == expected
    assert expected != [DRAWN] * 4


def test_a_draw_that_fails_ends_the_requests_of_its_step_only(make_rig):
    rig = make_rig("both")
    device = Drawing(rig)
    rig.engine.submit(rig.request("first"))
    device.errors.append(RuntimeError("out of memory"))
    (broken,) = rig.turn_until_idle()
    assert isinstance(broken, Broken)
    rig.engine.submit(rig.request("second"))
    events = rig.turn_until_idle()
    assert isinstance(events[-1], Ended)
    assert len(token_ids(events)) == 4


def test_a_device_that_is_lost_while_it_draws_ends_the_engine(make_rig):
    rig = make_rig("both")
    Drawing(rig).errors.append(BackendLost("the device failed"))
    rig.engine.submit(rig.request("first"))
    (broken,) = rig.turn(3)
    assert isinstance(broken, Broken)
    assert rig.engine.has_failed


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_role_takes_what_the_device_chose(make_rig, role):
    rig = make_rig(role)
    Drawing(rig, "drawn")
    rig.engine.submit(rig.request("drawn") if role == "prefill" else rig.received("drawn"))
    rig.turn()
    if role == "decode":
        rig.complete("drawn")
    rig.turn(2)
    assert set(token_ids(rig.events)) == {DRAWN}
