"""The windows that launching both legs at once opens: each ends, with the truth, and all is free.

A real prefill and a real decode worker. The fixtures require that both are at rest at the end.
"""

import asyncio
from contextlib import aclosing

import msgspec
import pytest
from worker_kit import (
    PROMPT,
    HeldCopies,
    HeldSends,
    collect,
    decode_leg,
    is_at_rest,
    make_worker,
    outcome,
    prefill_leg,
    token_ids,
    until,
)

from neuron_di.errors import (
    KvCorrupt,
    KvExpired,
    KvMissing,
    LocalProtocolError,
    PeerError,
    PeerGone,
    StaleAttempt,
    StaleIncarnation,
)
from neuron_di.kv import KvPool
from neuron_di.types import RequestId
from neuron_di.wire import Finished, Parked, Released, Token
from neuron_di.wire.handoff import SenderState
from neuron_di.worker import WorkerParts

R = RequestId("r")
# Limits for tests that let a deadline pass.
SHORT = {"heartbeat_s": 0.05, "peer_silence_s": 0.5, "quarantine_s": 0.3}


@pytest.fixture(autouse=True)
def sweeps_often(monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.05)


def start(run, leg):
    return asyncio.create_task(outcome(collect(run(leg))))


def table(prefill):
    return prefill.prefill._send_buffer.lookup_dict


def state(prefill, attempt=0):
    entry = table(prefill).get((R, attempt))
    return None if entry is None else entry.state


def cut(decode):
    """The decode worker says nothing any more, not even good-bye."""
    for buffer in decode._connector.connection_dict.values():
        buffer._link._link.close()


async def whole_answer(workers, **fields):
    both = workers.start("both")
    return token_ids(await collect(both.combined.run(prefill_leg("whole", **fields))))


# W1: prefill fails; decode waits for KV that will never come


async def test_w1_a_prefill_that_fails_is_told_to_decode(prefill, decode, monkeypatch):
    def fail(_):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(prefill._model.backend, "prefill", fail)
        rest = start(decode.decode.run, decode_leg("r", prefill))
        await until(lambda: state(prefill))
        first = start(prefill.prefill.run, prefill_leg("r"))
        failure, denied = await first, await rest
    assert failure.fault == "us"
    assert isinstance(denied, KvMissing)
    assert failure.code in denied.message
    await until(lambda: is_at_rest(prefill) and is_at_rest(decode))


async def test_w1_a_prefill_worker_that_is_gone_is_noticed(workers):
    prefill, decode = workers.start("prefill"), workers.start("decode", **SHORT)
    rest = start(decode.decode.run, decode_leg("r", prefill))
    await until(lambda: state(prefill))
    prefill.prefill._send_buffer.close()
    assert isinstance(await rest, PeerGone)


# W2: decode fails; prefill parks KV that nobody pulls


async def test_w2_kv_that_nobody_asks_for_is_given_up_with_its_lease(workers):
    prefill = workers.start("prefill", kv_lease_s=0.2)
    assert isinstance(await start(prefill.prefill.run, prefill_leg("r")), KvExpired)
    await until(lambda: is_at_rest(prefill))
    assert prefill.status().num_leases_ended == 1


async def test_w2_decode_dies_while_its_request_waits_for_a_slot(workers, monkeypatch):
    prefill, decode = workers.start("prefill", **SHORT), workers.start("decode", **SHORT)
    monkeypatch.setattr(decode._scheduler, "_admit_waiting", lambda: None)
    first = start(prefill.prefill.run, prefill_leg("r"))
    rest = start(decode.decode.run, decode_leg("r", prefill))
    await until(lambda: decode.status().num_waiting)
    cut(decode)
    gone, lost = await first, await rest
    assert isinstance(gone, KvMissing)
    assert "silent" in gone.message
    assert isinstance(lost, PeerGone)
    # Decode had been told where the blocks are: they wait for the end of the quarantine.
    await until(lambda: is_at_rest(prefill))


async def test_w2_a_decode_step_that_fails_frees_its_blocks(prefill, decode, monkeypatch):
    def fail(_):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(decode._model.backend, "decode", fail)
        first = start(prefill.prefill.run, prefill_leg("r"))
        rest = start(decode.decode.run, decode_leg("r", prefill))
        assert isinstance((await first)[-1], Released)
        assert (await rest).fault == "us"
    await until(lambda: is_at_rest(decode))


# W3: the client leaves between the end of prefill and decode's lookup


async def test_w3_the_client_leaves_before_decode_asks(prefill, decode):
    async with aclosing(prefill.prefill.run(prefill_leg("r"))) as events:
        assert isinstance(await anext(events), Token)
        assert isinstance(await anext(events), Parked)
        assert prefill.status().num_blocks_parked == 10
    await until(lambda: is_at_rest(prefill))  # at once, not with the lease
    assert prefill.status().num_leases_ended == 0
    late = await start(decode.decode.run, decode_leg("r", prefill))
    assert isinstance(late, KvMissing)
    assert "cancelled" in late.message


# W4: decode's lookup comes before prefill has heard of the request


async def test_w4_not_yet_then_ready(prefill, decode):
    rest = start(decode.decode.run, decode_leg("r", prefill))
    await until(lambda: state(prefill) is SenderState.ASKED)
    first = start(prefill.prefill.run, prefill_leg("r"))
    assert isinstance((await first)[-1], Released)
    assert len(token_ids(await rest)) == 11


async def test_w4_not_yet_becomes_never_and_the_leg_that_comes_too_late_is_refused(workers):
    prefill, decode = workers.start("prefill", kv_lease_s=0.2), workers.start("decode")
    rest = start(decode.decode.run, decode_leg("r", prefill))  # it does not ask again in time
    denied = await rest
    assert isinstance(denied, KvMissing)
    assert "the lease ended" in denied.message
    late = await start(prefill.prefill.run, prefill_leg("r"))
    assert isinstance(late, KvMissing)
    assert late.retryable
    assert prefill.status().num_steps == 0, "nobody would have pulled it"
    retried = start(prefill.prefill.run, prefill_leg("r", attempt=1))
    rest = start(decode.decode.run, decode_leg("r", prefill, attempt=1))
    assert len(token_ids(await retried) + token_ids(await rest)) == 12


# W5: prefill's first token is with the client, then prefill dies


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "drawn"])
async def test_w5_the_first_token_is_forced_not_sampled_again(workers, decode, sampled):
    whole = await whole_answer(workers, **sampled)
    dying = workers.start("prefill")
    async with aclosing(dying.prefill.run(prefill_leg("r", **sampled))) as events:
        first = await anext(events)
    other = workers.start("prefill", worker_id="prefill-1")
    again = start(other.prefill.run, prefill_leg("r", attempt=1, emitted=whole[:1], **sampled))
    rest = start(decode.decode.run, decode_leg("r", other, attempt=1, num_emitted=1, **sampled))
    events = (await again) + (await rest)
    assert [e.index for e in events if isinstance(e, Token)] == list(range(1, 12))
    assert [first.token_id, *token_ids(events)] == whole


async def test_w5_whatever_the_client_has_is_what_is_continued(workers, prefill, decode):
    """Tokens that this model would not have said: the answer goes on from them."""
    emitted = [77, 78, 79]
    expected = await whole_answer(workers, emitted=emitted)
    first = start(prefill.prefill.run, prefill_leg("r", attempt=2, emitted=emitted))
    rest = start(decode.decode.run, decode_leg("r", prefill, attempt=2, num_emitted=3))
    assert token_ids(await first) + token_ids(await rest) == expected
    assert len(expected) == 9


# W6: the legs' sampling differs


async def test_w6_decode_goes_on_from_prefills_token_whatever_it_would_have_drawn(
    workers, prefill, decode
):
    ours = {"temperature": 1.0, "seed": 1}
    theirs = {"temperature": 1.0, "seed": 2}
    first = start(prefill.prefill.run, prefill_leg("r", **ours))
    rest = start(decode.decode.run, decode_leg("r", prefill, **theirs))
    first, rest = token_ids(await first), token_ids(await rest)
    assert rest == await whole_answer(workers, emitted=first, **theirs)


# W7: a retry uses the request's id again


async def test_w7_a_retry_beside_the_attempt_that_it_replaces(workers, prefill, decode):
    whole = await whole_answer(workers)
    old_rest = start(decode.decode.run, decode_leg("r", prefill, attempt=0))
    await until(lambda: state(prefill))
    rest = start(decode.decode.run, decode_leg("r", prefill, attempt=1))
    old_first = start(prefill.prefill.run, prefill_leg("r", [5] * 40, attempt=0))
    first = start(prefill.prefill.run, prefill_leg("r", PROMPT, attempt=1))
    assert isinstance(await old_rest, StaleAttempt)
    assert isinstance(await old_first, StaleAttempt | KvMissing)
    assert token_ids(await first) + token_ids(await rest) == whole
    for late in (
        start(prefill.prefill.run, prefill_leg("r")),
        start(decode.decode.run, decode_leg("r", prefill)),
    ):
        assert isinstance(await late, StaleAttempt)


async def test_w7_a_retry_while_the_first_attempt_is_parked(prefill, decode):
    old = start(prefill.prefill.run, prefill_leg("r", [5] * 40))
    await until(lambda: state(prefill) is SenderState.PARKED)
    first = start(prefill.prefill.run, prefill_leg("r", attempt=1))
    rest = start(decode.decode.run, decode_leg("r", prefill, attempt=1))
    assert isinstance(await old, StaleAttempt)
    assert len(token_ids(await first) + token_ids(await rest)) == 12
    await until(lambda: is_at_rest(prefill))


async def test_w7_a_retry_while_the_first_attempts_digests_are_made(prefill, decode, monkeypatch):
    loop = asyncio.get_running_loop()
    run, may_end, began = loop.run_in_executor, asyncio.Event(), asyncio.Event()

    async def run_slowly(executor, call, *arguments):
        if call.__name__ == "_digests":
            began.set()
            await may_end.wait()
        return await run(executor, call, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(KvPool, "digested_at_once_bytes", 0)
        patch.setattr(loop, "run_in_executor", run_slowly)
        old = start(prefill.prefill.run, prefill_leg("r"))
        await began.wait()
        first = start(prefill.prefill.run, prefill_leg("r", attempt=1))
        await until(lambda: state(prefill, 1))
        may_end.set()
        assert isinstance(await old, StaleAttempt)
        rest = start(decode.decode.run, decode_leg("r", prefill, attempt=1))
        assert len(token_ids(await first) + token_ids(await rest)) == 12


# W8: decode admits the request and dies before its Done


async def test_w8_decode_dies_between_admission_and_done(workers):
    prefill = workers.start("prefill", **SHORT)
    decode = workers.start("decode", parts=WorkerParts(make_transfer=HeldCopies), **SHORT)
    decode._lanes.engines[0].is_holding = True
    first = start(prefill.prefill.run, prefill_leg("r"))
    rest = start(decode.decode.run, decode_leg("r", prefill))
    await until(lambda: state(prefill) is SenderState.PULLING)
    cut(decode)
    gone, lost = await first, await rest
    assert isinstance(gone, KvMissing)
    assert "silent" in gone.message
    assert isinstance(lost, PeerGone)
    # Its own blocks may still be written to; prefill's wait for a reader that is gone.
    await until(lambda: decode.status().num_blocks_quarantined)
    await until(lambda: is_at_rest(prefill))
    status = decode.status()
    assert status.num_blocks_free + status.num_blocks_quarantined == status.num_blocks
    decode._lanes.engines[0].let_go()
    await until(lambda: is_at_rest(decode))


async def test_w8_a_send_that_still_runs_when_done_comes_keeps_its_blocks(workers, decode):
    """The leg is over; its blocks are not free before the engine has let go of them."""
    prefill = workers.start("prefill", parts=WorkerParts(make_transfer=HeldSends))
    prefill._lanes.engines[0].is_holding = True
    first = start(prefill.prefill.run, prefill_leg("r"))
    rest = start(decode.decode.run, decode_leg("r", prefill))
    assert isinstance((await first)[-1], Released)
    assert isinstance((await rest)[-1], Finished)
    await until(lambda: prefill.status().num_transferring == 0)
    assert prefill.status().num_blocks_quarantined == 10
    status = prefill.status()
    assert status.num_blocks_free + status.num_blocks_cached == status.num_blocks - 10
    prefill._lanes.engines[0].held.complete()
    await until(lambda: is_at_rest(prefill))


async def test_w8_a_leg_that_is_left_while_decode_reads_its_kv_keeps_the_blocks(workers, prefill):
    """Freed at once, they would be another request's while they are read."""
    decode = workers.start("decode", parts=WorkerParts(make_transfer=HeldCopies))
    decode._lanes.engines[0].is_holding = True
    first = start(prefill.prefill.run, prefill_leg("r"))
    rest = start(decode.decode.run, decode_leg("r", prefill))
    await until(lambda: decode._lanes.engines[0].held)
    first.cancel()
    await until(lambda: prefill.status().num_transferring == 0)
    assert prefill.status().num_blocks_quarantined == 10
    decode._lanes.engines[0].let_go()
    assert isinstance(await rest, KvMissing)
    await until(lambda: is_at_rest(prefill))


# W9: prefill restarts at the same address


async def test_w9_prefill_restarts_while_decode_waits_for_it(workers, llama_folder):
    decode = workers.start("decode", **SHORT)
    old = make_worker(llama_folder, "prefill")
    leg = decode_leg("r", old)
    waiting = start(decode.decode.run, leg)
    await until(lambda: state(old))
    await old.close()
    port = leg.prefill.signal_port
    new = workers.start("prefill", signal_port=port)
    assert isinstance(await waiting, PeerError)
    # Whoever was told of the old process is not served by the new one.
    stale = await start(decode.decode.run, decode_leg("s", old))
    assert isinstance(stale, StaleIncarnation | PeerGone)
    first = start(new.prefill.run, prefill_leg("r", attempt=1))
    rest = start(decode.decode.run, decode_leg("r", new, attempt=1))
    assert len(token_ids(await first) + token_ids(await rest)) == 12
    assert decode.status().num_kv_mismatched == 0
    assert table(new) == {}


async def test_w9_kv_of_the_process_before_is_never_taken(prefill, decode, monkeypatch):
    """Even if a confused prefill worker offers it: the identity is checked before a byte moves."""
    park = prefill.prefill._send_buffer.park

    def park_as_predecessor(ready):
        park(msgspec.structs.replace(ready, incarnation="0" * 32))

    with monkeypatch.context() as patch:
        patch.setattr(prefill.prefill._send_buffer, "park", park_as_predecessor)
        first = start(prefill.prefill.run, prefill_leg("r"))
        rest = start(decode.decode.run, decode_leg("r", prefill))
        assert isinstance(await rest, KvCorrupt)
        assert isinstance(await first, KvMissing)
    assert decode.status().num_kv_mismatched == 1
    assert not isinstance(await first, LocalProtocolError)
