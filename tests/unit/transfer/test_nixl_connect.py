"""Connecting through NIXL ends in time, and what does not end is given up a few times only.

Real agents over UCX. Where NIXL would stand still, as its LIBFABRIC does, a gate stands for it.
"""

import threading
import weakref
from contextlib import ExitStack, closing
from importlib.util import find_spec

import numpy as np
import pytest
from contract.nixl_end import open_ucx
from nixl_kit import Native, use_native

from neuron_di.clock import Deadline
from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.kv import Memory
from neuron_di.transfer import nixl_connect
from neuron_di.transfer.nixl_agent import rows_of

pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="the package nixl-cu12 is not installed"
)

ENOUGH_S = 30.0
SHORT_S = 0.05


class Gate:
    """What connecting waits for."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self._come = threading.Semaphore(0)
        self.natives = natives = []
        gate = self

        class Gated(Native):
            def makeConnection(self, agent, backends):
                natives.append(weakref.ref(self))
                gate._come.release()
                assert gate.opened.wait(ENOUGH_S)
                return self._agent.makeConnection(agent, backends)

        use_native(monkeypatch, Gated)

    def come(self, count):
        """Those who wait here, once they are so many: one that was given up may come late."""
        for _ in range(count):
            assert self._come.acquire(timeout=ENOUGH_S)
        return self.natives

    def open(self):
        self.opened.set()
        for thread in threading.enumerate():
            if thread.name == "kv-nixl-connect":
                thread.join(ENOUGH_S)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def server(stack):
    """An agent that serves some bytes."""
    server = stack.enter_context(closing(open_ucx("server", True)))
    server.bytes = np.arange(4096, dtype=np.int64).view(np.uint8)
    server.register(Memory(server.bytes.ctypes.data, len(server.bytes)))
    return server


def reader_of(stack, name="reader"):
    return stack.enter_context(closing(open_ucx(name, False)))


def read(agent, server):
    """The server's first bytes."""
    found = np.zeros(64, np.uint8)
    agent.register(Memory(found.ctypes.data, len(found)))
    start, length = np.zeros(1, np.int64), np.array([len(found)], np.int64)
    agent.read(
        rows_of(found.ctypes.data, start, length),
        rows_of(server.bytes.ctypes.data, start, length),
        Deadline.after(ENOUGH_S),
    )
    return found


def test_who_is_connected_to_is_connected_before_anything_is_read(stack, server, monkeypatch):
    """The first transfer would do it, too, but on its caller's thread and without an end."""
    calls = []

    class Recording(Native):
        def makeConnection(self, agent, backends):
            calls.append(agent)
            return self._agent.makeConnection(agent, backends)

    use_native(monkeypatch, Recording)
    agent = reader_of(stack)
    agent.connect("server", [server.metadata()], ENOUGH_S)
    assert calls == ["server"]
    assert (read(agent, server) == server.bytes[:64]).all()


def test_a_connection_that_stands_still_is_given_up(gate, stack, server, caplog):
    agent = reader_of(stack)
    with pytest.raises(PeerTimeout):
        agent.connect("server", [server.metadata()], SHORT_S)
    assert [(one.getMessage(), one.levelname) for one in caplog.records] == [
        ("nixl_connect_given_up", "ERROR")
    ]
    assert len(gate.come(1)) == 1


def test_after_a_few_that_go_on_no_more_are_tried_until_they_end(gate, stack, server):
    limit = nixl_connect.GIVEN_UP_MAX
    for number in range(limit):
        with pytest.raises(PeerTimeout):
            reader_of(stack, f"r{number}").connect("server", [server.metadata()], SHORT_S)
    for number in range(3):
        with pytest.raises(PeerGone, match="start this worker again"):
            reader_of(stack, f"s{number}").connect("server", [server.metadata()], SHORT_S)
    assert len(gate.come(limit)) == limit
    gate.open()
    agent = reader_of(stack, "t")
    agent.connect("server", [server.metadata()], ENOUGH_S)
    assert (read(agent, server) == server.bytes[:64]).all()


@pytest.mark.parametrize("name", ["server", "another"])
def test_an_error_that_is_kept_keeps_no_agent(name, stack, server, monkeypatch):
    """Only its end makes sure that nothing more is read or written."""
    natives = []

    class Failing(Native):
        def __init__(self, *args):
            super().__init__(*args)
            natives.append(weakref.ref(self))

        def makeConnection(self, agent, backends):
            raise RuntimeError("no way")

    use_native(monkeypatch, Failing)
    agent = reader_of(stack)
    with pytest.raises(PeerGone, match="no way" if name == "server" else "another agent") as kept:
        agent.connect(name, [server.metadata()], ENOUGH_S)
    agent.close()
    assert [native() for native in natives] == [None]
    assert kept.value.__traceback__ is not None


def test_what_was_given_up_keeps_its_agent_no_longer_than_it_takes(gate, stack, server):
    agent = reader_of(stack)
    with pytest.raises(PeerTimeout) as kept:
        agent.connect("server", [server.metadata()], SHORT_S)
    agent.close()
    (native,) = gate.come(1)
    assert native() is not None
    gate.open()
    assert native() is None
    assert kept.value.__traceback__ is not None
