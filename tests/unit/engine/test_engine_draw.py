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


def test_where_a_draw_fails_the_host_chooses(make_rig):
    rig, undisturbed = make_rig("both"), make_rig("both")
    device = Drawing(rig)
    device.errors.append(RuntimeError("out of memory"))
    for each in (rig, undisturbed):
        each.engine.submit(each.request("first"))
        assert isinstance(each.turn_until_idle()[-1], Ended)
    assert device.errors == []
    assert token_ids(rig.events) == token_ids(undisturbed.events)


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
