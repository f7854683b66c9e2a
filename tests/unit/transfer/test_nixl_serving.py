"""An agent is connected to so many times in its life: then a fresh one serves.

That is LIBFABRIC's limit. Here UCX has it, and a smaller one.
"""

from collections import Counter
from contextlib import ExitStack, closing
from importlib.util import find_spec

import pytest
from contract.nixl_end import open_ucx
from contract.transfer_pair import DECODE as HOST_DECODE
from contract.transfer_pair import PREFILL as HOST_PREFILL
from contract.transfer_pair import connected_pair
from nixl_kit import DECODE, LAYOUT, PREFILL, Native, two_ends, use_native

from neuron_di.errors import ConfigError, PeerGone
from neuron_di.transfer import nixl_serving
from neuron_di.transfer.nixl_serving import ServingAgents
from neuron_di.types import Incarnation

pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="the package nixl-cu12 is not installed"
)

LIMIT = 3
OTHER = Incarnation("ab" * 16)


@pytest.fixture(autouse=True)
def _limited(monkeypatch):
    monkeypatch.setitem(nixl_serving.CONNECTIONS_MAX, "UCX", LIMIT)


@pytest.fixture
def connections(monkeypatch):
    """How often each agent was connected to."""
    counts = Counter()

    class Counting(Native):
        def makeConnection(self, agent, backends):
            counts[agent] += 1
            return self._agent.makeConnection(agent, backends)

    use_native(monkeypatch, Counting)
    return counts


@pytest.fixture
def serving():
    with closing(ServingAgents("w", lambda name: open_ucx(name, True))) as serving:
        yield serving


def is_closed(agent):
    return agent._agent is None


def test_libfabric_is_left_before_its_numbers_are_used_up():
    assert nixl_serving.CONNECTIONS_MAX["LIBFABRIC"] < 255


def test_near_the_limit_a_fresh_agent_serves_and_the_old_one_until_its_last_peer_left(serving):
    first = serving.take("a")
    assert [serving.take(client) is first for client in "bc"] == [True, True]
    second = serving.take("d")
    assert (first.name, second.name) == ("w", "w-1")
    assert serving.present is second
    for client in "ab":
        serving.drop(client)
    assert not is_closed(first)
    serving.drop("c")
    assert is_closed(first)
    serving.drop("d")
    serving.drop("nobody")
    assert not is_closed(second)


def test_who_comes_back_leaves_the_old_agent(serving):
    first = serving.take("a")
    assert serving.take("a") is first
    assert serving.take("a") is first
    second = serving.take("a")
    assert is_closed(first)
    assert not is_closed(second)


def test_all_agents_are_closed_in_the_end_and_none_is_opened_then(serving):
    agents = {serving.take(str(number)) for number in range(2 * LIMIT + 1)}
    assert len(agents) == 3
    serving.close()
    assert all(map(is_closed, agents))
    with pytest.raises(ConfigError):
        serving.take("late")


def test_a_device_is_read_by_any_number_of_connections(connections):
    """And of them all the worker's own agent has one: its fence's."""
    with two_ends(is_connected=False) as two:
        names = set()
        for number in range(2 * LIMIT + 1):
            region = two.accept()
            names.add(region.agent)
            two.connect(region)
            assert two.move([number % 6], [0]).error() is None
            assert (two.decode.blocks[0] == two.prefill.blocks[number % 6]).all()
            two.decode.engine.disconnect(PREFILL)
            two.prefill.engine.disconnect(DECODE)
        assert names == {PREFILL, f"{PREFILL}-1", f"{PREFILL}-2"}
        assert {name: connections[name] for name in names} == {
            PREFILL: LIMIT,
            f"{PREFILL}-1": LIMIT,
            f"{PREFILL}-2": 1,
        }
        assert connections[DECODE] == 1


def test_a_peer_of_the_old_agent_reads_on_until_it_leaves():
    with two_ends() as two:
        for number in range(LIMIT):
            peer = Incarnation(f"{number:032x}")
            region = two.decode.engine.local_region(PREFILL)
            two.prefill.engine.accept(peer, region, LAYOUT)
        assert two.prefill.engine.local_region(DECODE).agent == PREFILL
        assert two.prefill.engine.local_region(peer).agent == f"{PREFILL}-1"
        assert two.move([1], [0]).error() is None
        assert (two.decode.blocks[0] == two.prefill.blocks[1]).all()


def test_a_pool_is_read_by_any_number_of_connections(connections):
    with connected_pair("nixl") as pair:
        names = {pair.prefill.local_region(HOST_DECODE).agent}
        for _ in range(2 * LIMIT):
            pair.decode.disconnect(HOST_PREFILL)
            pair.prefill.disconnect(HOST_DECODE)
            pair.connect()
            names.add(pair.prefill.local_region(HOST_DECODE).agent)
            assert pair.move([1], [3]).error() is None
        assert names == {HOST_PREFILL, f"{HOST_PREFILL}-1", f"{HOST_PREFILL}-2"}
        assert {connections[name] for name in names} == {LIMIT, 1}


@pytest.mark.parametrize("kind", ["nixl_neuron", "nixl"])
def test_where_no_fresh_agent_can_be_opened_the_next_engine_is_taken(kind, monkeypatch):
    with ExitStack() as stack:
        if kind == "nixl":
            pair = stack.enter_context(connected_pair(kind))
            engine, region, layout = pair.prefill, pair.decode.local_region(HOST_PREFILL), None
        else:
            two = stack.enter_context(two_ends())
            engine, layout = two.prefill.engine, LAYOUT
            region = two.decode.engine.local_region(PREFILL)

        class Refused(Native):
            def __init__(self, name, config):
                raise RuntimeError("no more descriptors")

        use_native(monkeypatch, Refused)
        engine.accept(OTHER, region, layout)
        engine.accept(OTHER, region, layout)
        with pytest.raises(PeerGone, match="no more descriptors"):
            engine.accept(OTHER, region, layout)
