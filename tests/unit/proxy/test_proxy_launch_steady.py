"""Once the table says no more than "emit", a token goes from its leg to the client at once."""

import asyncio
from contextlib import contextmanager
from unittest import mock

import msgspec
import pytest
from launch_run import REQUEST
from running_proxy import ListDirectory
from scripted_worker import finished, make_record, parked, released, token
from virtual_time import virtual

from neuron_di.clock import Deadline, now_s
from neuron_di.config import LimitOptions
from neuron_di.errors import PeerTimeout, RemoteProtocolError
from neuron_di.testing.virtual_loop import Process
from neuron_di.types import RequestId
from neuron_di.wire.handoff import LAUNCH, LaunchAction, LaunchEvent, LaunchState, LaunchStep
from neuron_di_proxy import leg_merge
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.health import Health
from neuron_di_proxy.launch import Launcher
from neuron_di_proxy.leg_events import is_steady
from neuron_di_proxy.route import Route

STALL_S = 15.0


@contextmanager
def the_table_says(steps=(), *, but_not=None):
    """The LAUNCH table with other rows, or without one."""
    with mock.patch.dict(LAUNCH, steps):
        LAUNCH.pop(but_not, None)
        is_steady.cache_clear()
        yield
    is_steady.cache_clear()


class SpokenLeg:
    """A leg for which the test speaks: what it says is heard before `say` returns."""

    def __init__(self, record, kind, message):
        self.worker_id, self.kind, self.message = record.worker_id, kind, message
        self.is_closed = False

    def open(self, hear):
        self._hear = hear

    def say(self, *events):
        for event in events:
            self._hear(event)

    def close(self):
        self.is_closed = True


class Spoken:
    """An attempt over such legs. `tokens` are those that were emitted."""

    def __init__(self, route=None, *, emit=None, emitted=(), request=REQUEST):
        self.legs = {}
        self.tokens = []
        route = route or Route(make_record("p1", "prefill"), make_record("d1", "decode"))
        self.attempt = Attempt(
            request_id=RequestId("r1"),
            number=0,
            request=request,
            route=route,
            emitted=emitted,
            accepted_s=now_s(),
            deadline=Deadline.after(1000.0),
        )
        limits = LimitOptions(stall_timeout_s=STALL_S)
        self.health = Health(self, ListDirectory([]), limits)
        launcher = Launcher(self, self.health, limits)
        self.task = asyncio.create_task(launcher.run(self.attempt, emit or self.tokens.append))

    def open_leg(self, record, kind, leg):
        self.legs[kind] = SpokenLeg(record, kind, leg)
        return self.legs[kind]

    @property
    def indices(self):
        return [each.index for each in self.tokens]

    async def steady(self):
        """The decode leg, once its first token was given."""
        await asyncio.sleep(0)
        self.legs["prefill"].say(token(0), parked())
        self.legs["decode"].say(token(1))
        return self.legs["decode"]


def test_one_state_is_steady_and_the_table_says_which():
    assert [state for state in LaunchState if is_steady(state)] == [LaunchState.DECODING]
    row = LaunchState.DECODING, LaunchEvent.DECODE_TOKEN
    more = LaunchStep(LaunchState.DECODING, (LaunchAction.EMIT, LaunchAction.KEEP_RECEIPT))
    for step in (more, LaunchStep(LaunchState.PARKED, (LaunchAction.EMIT,))):
        with the_table_says({row: step}):
            assert not is_steady(LaunchState.DECODING)
    with the_table_says(but_not=row):
        assert not is_steady(LaunchState.DECODING)


def test_once_decode_is_alone_one_more_state_is_steady_if_the_table_makes_no_difference():
    both = [LaunchState.PARKED, LaunchState.DECODING]
    assert [state for state in LaunchState if is_steady(state, is_alone=True)] == both
    for event in LaunchEvent:
        row = LaunchState.PARKED, event
        with the_table_says({row: LaunchStep(LaunchState.OVER, ())}):
            makes_a_difference = event.value.startswith("decode")
            assert is_steady(LaunchState.PARKED, is_alone=True) is not makes_a_difference
            assert not is_steady(LaunchState.PARKED)


@virtual
async def test_the_first_token_of_a_decode_that_is_alone_is_relayed_and_praised():
    run = Spoken()
    await asyncio.sleep(0)
    run.legs["prefill"].say(token(0), parked(), released())
    decode, table = run.legs["decode"], []
    with mock.patch.object(leg_merge, "event_of", side_effect=table.append):
        decode.say(token(1))
    assert run.indices == [0, 1]
    assert table == []
    decode.say(token(2), finished(3))
    assert await run.task == finished(3)
    assert run.attempt.num_tokens == 3


@virtual
async def test_a_steady_token_is_given_before_its_leg_goes_on():
    run = Spoken()
    decode = await run.steady()
    assert run.indices == [0, 1]
    for index in range(2, 10):
        decode.say(token(index))
        assert run.indices[-1] == index
    decode.say(finished(10))
    run.legs["prefill"].say(released())
    assert await run.task == finished(10)
    assert run.attempt.num_tokens == 10
    assert run.attempt.prefill == released().receipt


@pytest.mark.parametrize(
    ("step", "indices"),
    [
        (LaunchStep(LaunchState.PARKED, (LaunchAction.EMIT,)), [0, 1, 2]),
        (LaunchStep(LaunchState.DECODING, (LaunchAction.HOLD_BACK,)), [0, 1]),
        (LaunchStep(LaunchState.DECODING, ()), [0, 1]),
    ],
)
@virtual
async def test_what_the_table_says_otherwise_is_done(step, indices):
    run = Spoken()
    with the_table_says({(LaunchState.DECODING, LaunchEvent.DECODE_TOKEN): step}):
        decode = await run.steady()
        decode.say(token(2))
        assert run.indices == indices
        run.task.cancel()
        await asyncio.sleep(0)


@virtual
async def test_a_worker_that_does_it_all_may_take_its_time():
    both = make_record("b1", "both")
    run = Spoken(Route(both, both))
    await asyncio.sleep(0)
    whole = run.legs["whole"]
    for index in range(5):
        whole.say(token(index))
        assert run.indices[-1] == index
    await asyncio.sleep(20 * STALL_S)  # it may compute others' prompts
    whole.say(token(5), finished(6))
    assert (await run.task).num_generated == 6


@virtual
async def test_an_attempt_is_no_task_and_few_timers():
    loop = asyncio.get_running_loop()
    made = []

    def counted(make):
        def count(*args, **kwargs):
            made.append(make.__name__)
            return make(*args, **kwargs)

        return count

    loop.create_task, loop.call_later = counted(loop.create_task), counted(loop.call_later)
    run = Spoken()
    decode = await run.steady()
    for index in range(2, 1000):
        decode.say(token(index, "x"))
    decode.say(finished(1000))
    run.legs["prefill"].say(released())
    await run.task
    assert len(run.tokens) == 1000
    assert made.count("create_task") == 1  # the test's own
    assert made.count("call_later") <= 3  # for the deadline, a stall, the release


@virtual
async def test_a_stall_counts_from_the_last_steady_token():
    run = Spoken()
    decode = await run.steady()
    for index in range(2, 40):
        await asyncio.sleep(0.9 * STALL_S)
        decode.say(token(index, "x"))
    last_s = now_s()
    with pytest.raises(PeerTimeout, match="d1 sent no token"):
        await run.task
    assert now_s() - last_s == pytest.approx(STALL_S, abs=0.01)
    assert run.attempt.blamed.worker_id == "d1"
    assert len(run.tokens) == 40


@virtual
async def test_what_came_while_this_process_stood_still_is_read_before_it_counts_as_a_stall():
    proxy = Process(asyncio.get_running_loop(), "proxy")
    run = proxy.context.run(Spoken)
    decode = await run.steady()
    await asyncio.sleep(0.5 * STALL_S)
    proxy.freeze()
    await asyncio.sleep(2 * STALL_S)
    proxy.thaw()
    await asyncio.sleep(0.1)
    assert not run.task.done()
    decode.say(token(2))
    assert run.indices == [0, 1, 2]
    last_s = now_s()
    with pytest.raises(PeerTimeout, match="d1 sent no token"):
        await run.task
    assert now_s() - last_s == pytest.approx(STALL_S, abs=0.01)


@pytest.mark.parametrize("index", [1, 3])
@virtual
async def test_a_steady_token_that_is_not_due_ends_the_attempt(index):
    run = Spoken()
    decode = await run.steady()
    decode.say(token(index), token(2))
    assert run.indices == [0, 1]
    with pytest.raises(RemoteProtocolError, match="2 was due"):
        await run.task
    assert run.attempt.blamed.worker_id == "d1"
    assert all(leg.is_closed for leg in run.legs.values())


@pytest.mark.parametrize("num_good", [0, 1, 5])
@virtual
async def test_a_bug_in_emit_is_told_and_is_no_workers_fault(num_good):
    def emit(given):
        if given.index >= num_good:
            raise ZeroDivisionError

    run = Spoken(emit=emit)
    decode = await run.steady()
    if not decode.is_closed:
        decode.say(*(token(index) for index in range(2, 10)))
    with pytest.raises(ZeroDivisionError):
        await run.task
    assert run.attempt.blamed is None
    assert all(leg.is_closed for leg in run.legs.values())
    assert not any(watch.legs for watch in run.health._watches.values())


@pytest.mark.parametrize("at", [0, 1, 2, 5])
@virtual
async def test_emit_may_cancel_the_attempt(at):
    def emit(given):
        given_indices.append(given.index)
        if given.index == at:
            run.task.cancel()

    given_indices = []
    run = Spoken(emit=emit)
    decode = await run.steady()
    decode.say(token(2), token(3), token(4), token(5))
    await asyncio.sleep(0)
    assert run.task.cancelled()
    assert given_indices == list(range(len(given_indices)))
    assert all(leg.is_closed for leg in run.legs.values())
    decode.say(token(len(given_indices)))
    assert at in given_indices
    assert len(given_indices) <= 6


@virtual
async def test_what_prefill_says_meanwhile_changes_nothing():
    run = Spoken()
    decode = await run.steady()
    decode.say(token(2))
    run.legs["prefill"].say(PeerTimeout("p1 is silent"))
    decode.say(token(3), token(4))  # in the same turn
    await asyncio.sleep(0)
    decode.say(token(5))
    assert run.indices == [0, 1, 2, 3, 4, 5]
    decode.say(finished(6))
    assert await run.task == finished(6)


@virtual
async def test_a_leg_of_a_worker_that_is_lost_already_is_not_sent():
    run = Spoken()
    run.health._watch_of(run.attempt.route.prefill).loss = PeerTimeout("p1 is frozen")
    with pytest.raises(PeerTimeout, match="frozen"):
        await run.task
    assert not any(hasattr(leg, "_hear") for leg in run.legs.values())
    assert run.attempt.blamed.worker_id == "p1"


@virtual
async def test_the_prompts_options_and_the_trace_reach_the_workers():
    options = msgspec.structs.replace(REQUEST.options, report=True, logprobs=2, keep_last_tokens=7)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    request = ChoiceRequest(
        endpoint="chat",
        model="tiny",
        prompt=REQUEST.prompt,
        sampling=REQUEST.sampling,
        options=options,
        traceparent=trace,
    )
    first = Spoken(request=request)
    later = Spoken(request=request, emitted=(100, 101))
    await asyncio.sleep(0)
    assert first.legs["prefill"].message.options == options
    # The client has the report, which is work for the worker.
    assert later.legs["prefill"].message.options == msgspec.structs.replace(
        options, report=False, logprobs=None
    )
    for run in (first, later):
        assert {leg.message.traceparent for leg in run.legs.values()} == {trace}
        run.task.cancel()
    await asyncio.sleep(0)
