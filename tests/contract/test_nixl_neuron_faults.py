"""A reader of a device over NIXL whose peer stands still, and what it costs the peer that it dies.

The peer is another process, and UCX goes by TCP: over shared memory a process that stands still
can be read.
"""

from dataclasses import replace

import pytest

from neuron_di.clock import Deadline
from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.transfer import nixl_neuron_reader
from neuron_di.types import Incarnation

from .engine_kinds import KINDS
from .peer_process import peer_process
from .test_processes import LARGE, NUM_LARGE, scene_of
from .transfer_pair import PREFILL, UNTOUCHED

KIND = KINDS["nixl_neuron"]
HASTE_S = 0.3  # where the peer stands still; where it does not there is time
EVERY = range(NUM_LARGE)


@pytest.fixture(autouse=True)
def _over_tcp(monkeypatch):
    if KIND.why_not is not None:
        pytest.skip(KIND.why_not)
    monkeypatch.setenv("UCX_TLS", "tcp")


def test_a_peer_that_stands_still_costs_its_receives_and_no_later_byte_comes(monkeypatch):
    with scene_of(KIND, LARGE, NUM_LARGE) as scene:
        assert scene.move([0], [0]).error() is None
        scene.received[:] = UNTOUCHED
        receive = scene.receive_of(EVERY, EVERY)
        late = replace(receive, tag=receive.tag + 2)
        scene.peer.stop()
        with monkeypatch.context() as hasty:
            hasty.setattr(nixl_neuron_reader, "deadline_of", lambda *_: Deadline.after(HASTE_S))
            stuck, queued = scene.post(receive), scene.post(replace(receive, tag=receive.tag + 1))
            assert isinstance(stuck.error(), PeerTimeout)
            assert isinstance(queued.error(), PeerGone)
        scene.received[:] = UNTOUCHED  # the slots are another request's now
        scene.peer.go_on()
        with peer_process(KIND.name, LARGE, NUM_LARGE) as successor:
            assert isinstance(scene.post(late).error(), PeerGone)
            assert (scene.received == UNTOUCHED).all()
            successor.accept(scene.engine.local_region(PREFILL))
            scene.engine.connect(PREFILL, successor.region, LARGE)
            scene.peer = successor
            assert scene.move([1], [1]).error() is None
        assert (scene.received[1] == scene.sent[1]).all()
        assert (scene.received[[0, *range(2, NUM_LARGE)]] == UNTOUCHED).all()


def test_a_peer_that_stands_still_while_it_is_connected_is_no_connection():
    with scene_of(KIND) as scene, scene.other_process(Incarnation("ab" * 16)) as other:
        other.accept(scene.engine.local_region(PREFILL))
        scene.engine._connect_timeout_s = HASTE_S
        other.stop()
        with pytest.raises((PeerGone, PeerTimeout)):
            scene.engine.connect(Incarnation("ab" * 16), other.region, scene.received.pool.layout)
        assert scene.move([1], [1]).error() is None
