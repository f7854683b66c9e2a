"""A backend that cannot compute any more is the end of its engine."""

from engine_kit import key

from neuron_di.engine import Broken
from neuron_di.errors import BackendLost, WorkerFailed

LOST = BackendLost("rank 1 was ended by signal 9")


def failures_of(rig):
    """How often the engine said that it has failed."""
    failures = []
    rig.engine._on_failure = lambda: failures.append(True)
    return failures


def test_a_step_that_finds_it_lost_breaks_every_request(make_rig):
    rig = make_rig("both", chunk=100)
    failures = failures_of(rig)
    for name in ("a", "b"):
        rig.engine.submit(rig.request(name))
        rig.engine.turn(block=False)
    rig.backend.failures.append(LOST)
    assert not rig.engine.turn(block=False)
    assert rig.engine.has_failed
    broken = {event.key for event in rig.events if isinstance(event, Broken)}
    assert broken == {key("a"), key("b")}
    rig.engine._lose(LOST)  # as the backend itself says it a moment later
    rig.engine.turn(block=False)
    assert len(failures) == 1


def test_an_idle_engine_fails_when_it_hears_of_it(make_rig):
    rig = make_rig("both")
    failures = failures_of(rig)
    rig.engine.wake()
    rig.engine.turn(block=False)
    assert not failures
    rig.engine._lose(LOST)
    rig.engine.turn(block=False)
    assert rig.engine.has_failed
    assert len(failures) == 1
    rig.engine.submit(rig.request("a"))
    rig.engine.turn(block=False)
    (refused,) = rig.events
    assert isinstance(refused, Broken)
    assert isinstance(refused.error, WorkerFailed)
