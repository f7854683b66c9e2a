"""What an engine leaves behind in a process, and what the next one there makes of it.

torch-neuronx's classes close nothing, so a worker that changes its role has all that it had.
"""

from contextlib import ExitStack, closing

import pytest
from contract import nrt_end
from nrt_kit import DECODE, LAYOUT, PREFILL, NrtTimes, driven_by, two_ends
from stand_in.closed_classes import ClosedNeuron

from neuron_di.errors import PeerError, PeerGone, PeerRefused
from neuron_di.transfer.nrt_connections import PROBE_BYTES
from neuron_di.types import Incarnation

TIMES = NrtTimes(connect_s=2.0, proof_s=2.0, grace_s=0.5, close_s=1.0)
SUCCESSOR = Incarnation("f1" * 16)


def remake(stack, *ends):
    for end in ends:
        end.engine.close()
        end.engine = stack.enter_context(closing(nrt_end.make_engine(end.pool, TIMES)))


def pairs_of(two):
    """As the decode worker sees them: its ranks, and the prefill worker's cores."""
    return list(enumerate(two.prefill.pool.device.lncs))


def test_a_pair_of_cores_that_was_connected_before_is_refused_with_the_mend():
    with driven_by("torch"), two_ends(TIMES) as two, ExitStack() as stack:
        remake(stack, two.decode)
        before = two.decode.num_calls("accept")
        with pytest.raises(PeerRefused, match=r"changed its role.*restart this worker"):
            two.link()
        assert two.decode.num_calls("accept") == before  # the runtime was not asked


def test_a_pair_of_cores_that_was_begun_before_is_refused_and_not_waited_for():
    with driven_by("torch"), two_ends(TIMES, is_linked=False) as two, ExitStack() as stack:
        two.prefill.place.fault("function=nrt_async_sendrecv_connect status=1")
        with pytest.raises(PeerError):
            two.link()
        remake(stack, two.decode)
        with pytest.raises(PeerRefused, match="restart this worker"):
            two.link()
        two.decode.pool.is_stuck = two.prefill.pool.is_stuck = True


def test_connections_of_before_a_change_of_role_count_where_they_cannot_be_closed():
    few = {"settings": {"NRT_SIM_COMMUNICATORS_MAX": "1"}}
    with driven_by("torch"), two_ends(TIMES, prefill=few) as two, ExitStack() as stack:
        remake(stack, two.prefill)
        connections = two.prefill.engine._connections
        with pytest.raises(PeerRefused, match="1 of 1 were made"):
            connections.take(SUCCESSOR, "receive", "127.0.0.1", 1, [(0, 60)])


def test_what_is_made_once_for_a_process_is_not_made_again(monkeypatch):
    """Engines and memory for proofs stay for good: each change of role would leave more."""
    engines, make = [], ClosedNeuron._engine

    def counting(closed, *arguments):
        engines.append(arguments)
        return make(closed, *arguments)

    monkeypatch.setattr(ClosedNeuron, "_engine", counting)
    with driven_by("torch"), two_ends(TIMES, is_linked=False) as two, ExitStack() as stack:
        tensors = two.decode.place.num_calls("nrt_tensor_allocate")
        probes = [probe.tensor for probe in two.decode.engine._driver.probes]
        del engines[:]
        for _ in range(3):
            remake(stack, two.decode)
        assert engines == []
        assert two.decode.place.num_calls("nrt_tensor_allocate") == tensors
        again = [probe.tensor for probe in two.decode.engine._driver.probes]
        assert [one is other for one, other in zip(probes, again, strict=True)] == [True, True]


@pytest.mark.parametrize("name", ["torch", "libnrt"])
def test_what_a_process_that_is_gone_never_met_its_successor_on_the_same_cores_meets(name):
    """The runtime knows a connection by its cores: it would refuse another one beside it."""
    with driven_by(name), two_ends(TIMES, is_linked=False) as two:
        two.prefill.place.fault("function=nrt_async_sendrecv_connect status=1")
        with pytest.raises(PeerError):
            two.link()
        connections = two.decode.engine._connections
        known = connections._sets[PREFILL, "receive"]
        begun = [place.communicator for place in known.places]
        made = connections.take(SUCCESSOR, "receive", "127.0.0.1", 5, pairs_of(two))
        assert [place.communicator for place in made.places] == begun
        assert None not in begun
        assert made.places[1].probe_offset < 2 * PROBE_BYTES
        with pytest.raises(PeerGone, match="another process has its cores"):
            connections.connect(known, None, lambda: False)
        two.decode.pool.is_stuck = two.prefill.pool.is_stuck = True


def test_a_set_that_somebody_connects_is_not_given_to_another():
    with driven_by("libnrt"), two_ends(TIMES, is_linked=False) as two:
        connections, pairs = two.decode.engine._connections, pairs_of(two)
        first = connections.take(PREFILL, "receive", "127.0.0.1", 5, pairs)
        first.is_connecting = True
        second = connections.take(SUCCESSOR, "receive", "127.0.0.1", 6, pairs)
        assert len(first.places) == len(second.places) == 2
        assert not set(map(id, first.places)) & set(map(id, second.places))
        assert not first.is_broken
        assert connections.take(PREFILL, "receive", "127.0.0.1", 5, pairs) is first


def test_both_roles_of_two_workers_use_what_they_have():
    """The other direction is another pair of connections."""
    with driven_by("torch"), two_ends(TIMES) as two, ExitStack() as stack:
        remake(stack, two.prefill, two.decode)
        own, its = two.decode.engine, two.prefill.engine
        own.accept(PREFILL, its.local_region(DECODE), LAYOUT)
        its.connect(DECODE, own.local_region(PREFILL), LAYOUT)
        assert own._connections._sets[PREFILL, "send"].is_used
