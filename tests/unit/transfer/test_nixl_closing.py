"""An engine that is closed while it connects: the memory may be freed once close() has returned.

Real agents over UCX. A gate stands for what takes its time within NIXL.
"""

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
from contract.transfer_pair import DECODE as HOST_DECODE
from contract.transfer_pair import LAYOUT as HOST_LAYOUT
from contract.transfer_pair import PREFILL as HOST_PREFILL
from contract.transfer_pair import connected_pair
from nixl_kit import LAYOUT, PREFILL, Native, two_ends, use_native

from neuron_di.errors import PeerGone
from neuron_di.transfer import peer_readers
from neuron_di.transfer.nixl_agent import NixlAgent

pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="the package nixl-cu12 is not installed"
)

ENOUGH_S = 30.0
LOOK_S = 0.2  # for a close() that returns too early to do so


@dataclass
class Connecting:
    """A decode worker's engine, about to connect."""

    engine: object
    connect: object
    addresses: set  # of own memory that a reader registers


class Gate:
    """Where connecting stands still, until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self):
        self.reached.set()
        assert self.opened.wait(ENOUGH_S)


@contextmanager
def of_kind(kind):
    with ExitStack() as stack:
        if kind == "nixl":
            pair = stack.enter_context(connected_pair(kind))
            pair.decode.disconnect(HOST_PREFILL)
            region = pair.prefill.local_region(HOST_DECODE)
            yield Connecting(
                pair.decode,
                lambda: pair.decode.connect(HOST_PREFILL, region, HOST_LAYOUT),
                {memory.address for memory in pair.decode._memories.all()},
            )
        else:
            two = stack.enter_context(two_ends())
            two.decode.engine.disconnect(PREFILL)
            region = two.accept()
            yield Connecting(
                two.decode.engine,
                lambda: two.decode.engine.connect(PREFILL, region, LAYOUT),
                {tensor.address for tensor in two.decode.pool.tensors},
            )


@contextmanager
def in_thread(call, events, name):
    """`events` gets the name, or the error."""

    def run():
        try:
            call()
            events.append(name)
        except PeerGone as error:
            events.append(error.message)

    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join(ENOUGH_S)
    assert not thread.is_alive()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


def gate_connections(monkeypatch, gate):
    class Gated(Native):
        def makeConnection(self, agent, backends):
            gate.wait()
            return self._agent.makeConnection(agent, backends)

    use_native(monkeypatch, Gated)


def gate_registering(monkeypatch, gate, addresses, events):
    """Of own memory, which is told of in `events`."""

    def register_rows(agent, rows, kind="DRAM"):
        if not addresses.isdisjoint(rows[:, 0].tolist()):
            gate.wait()
            events.append("registered")
        register(agent, rows, kind)

    register = NixlAgent.register_rows
    monkeypatch.setattr(NixlAgent, "register_rows", register_rows)


@pytest.mark.parametrize("kind", ["nixl_neuron", "nixl"])
def test_what_connects_while_it_is_closed_gets_hold_of_nothing(kind, gate, monkeypatch):
    with of_kind(kind) as connecting:
        events = []
        gate_connections(monkeypatch, gate)
        gate_registering(monkeypatch, gate, connecting.addresses, events)
        with in_thread(connecting.connect, events, "connected"):
            assert gate.reached.wait(ENOUGH_S)
            with in_thread(connecting.engine.close, events, "closed") as closing:
                closing.join(LOOK_S)
                gate.opened.set()
    assert sorted(events) == ["closed", "the transfer engine is closed"]


@pytest.mark.parametrize("kind", ["nixl_neuron", "nixl"])
def test_closing_waits_for_who_has_got_hold_of_memory(kind, gate, monkeypatch):
    with of_kind(kind) as connecting:
        events = []
        gate_registering(monkeypatch, gate, connecting.addresses, events)
        with in_thread(connecting.connect, events, "connected"):
            assert gate.reached.wait(ENOUGH_S)
            with in_thread(connecting.engine.close, events, "closed") as closing:
                closing.join(LOOK_S)
                gate.opened.set()
    assert events.index("registered") < events.index("closed")
    if kind == "nixl_neuron":  # it would be written to next
        assert "the transfer engine is closed" in events


@pytest.mark.parametrize("kind", ["nixl_neuron", "nixl"])
def test_closing_does_not_wait_for_ever(kind, gate, monkeypatch, caplog):
    monkeypatch.setattr(peer_readers, "CONNECTING_S", 0.05)
    with of_kind(kind) as connecting:
        events = []
        gate_connections(monkeypatch, gate)
        gate_registering(monkeypatch, gate, connecting.addresses, events)
        with in_thread(connecting.connect, events, "connected"):
            assert gate.reached.wait(ENOUGH_S)
            connecting.engine.close()
            assert "reader_still_connects" in [one.getMessage() for one in caplog.records]
            gate.opened.set()
    assert events == ["the transfer engine is closed"]


@pytest.mark.parametrize("kind", ["nixl_neuron", "nixl"])
def test_a_closed_engine_connects_nobody(kind):
    with of_kind(kind) as connecting:
        connecting.engine.close()
        with pytest.raises(PeerGone, match="closed"):
            connecting.connect()
