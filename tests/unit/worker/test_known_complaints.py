"""What users of other disaggregated servers complained about, and what happens here instead.

Only what the windows (test_windows.py) do not cover already. Each test names its complaints.
"""

import asyncio
import threading

import pytest
from worker_kit import (
    HeldCopies,
    collect,
    decode_leg,
    is_at_rest,
    outcome,
    prefill_leg,
    token_ids,
    until,
)

from neuron_di.errors import (
    CapacityError,
    DeadlinePassed,
    KvCorrupt,
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerTimeout,
)
from neuron_di.transfer import ShmEngine, TransferToken
from neuron_di.wire import Released
from neuron_di.worker import WorkerParts


def start(run, leg):
    return asyncio.create_task(outcome(collect(run(leg))))


def both(prefill, decode, name, prompt=None, **sampling):
    """Both legs of a request, running."""
    prompt = prompt or list(range(100, 140))
    return (
        start(prefill.prefill.run, prefill_leg(name, prompt, **sampling)),
        start(decode.decode.run, decode_leg(name, prefill, **sampling)),
    )


async def answer(prefill, decode, name, prompt=None, **sampling):
    first, rest = both(prefill, decode, name, prompt, **sampling)
    return token_ids(await first) + token_ids(await rest)


async def test_prefill_gives_up_and_decode_does_not_notice(workers, monkeypatch):
    """vllm#21570, aws-do-eks PR 84: P times out, D decodes from what is left."""
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.05)
    prefill = workers.start("prefill", kv_lease_s=0.2, quarantine_s=0.2)
    decode = workers.start("decode")  # whose heartbeat comes too late for such a lease
    held_back = []
    with monkeypatch.context() as patch:
        patch.setattr(decode.decode, "_pull", lambda *pull: held_back.append(pull))
        first, rest = both(prefill, decode, "r")
        await until(lambda: held_back)
        assert (await first).code == "kv_expired"
        denied = await rest
    assert isinstance(denied, KvMissing)  # and not one token
    assert "the lease ended" in denied.message
    decode.decode._pull(*held_back[0])
    await until(lambda: is_at_rest(prefill) and is_at_rest(decode))
    assert decode.status().kv_bytes_received == 0


@pytest.mark.parametrize("where", ["at the door", "at the engine"])
async def test_rejected_by_decode_before_admission(prefill, decode, monkeypatch, where):
    """vllm#41269: the KV was stranded on P for 480 s."""

    def refuse(_):
        raise CapacityError("the queue is full")

    with monkeypatch.context() as patch:
        if where == "at the door":
            patch.setattr(decode.legs, "_legs_max", 0)
        else:
            patch.setattr(decode._scheduler, "add", refuse)
        leg = asyncio.create_task(collect(prefill.prefill.run(prefill_leg("r"))))
        assert isinstance(await start(decode.decode.run, decode_leg("r", prefill)), CapacityError)
    if where == "at the door":
        leg.cancel()  # prefill was never asked: the proxy tells it
    (ended,) = await asyncio.gather(leg, return_exceptions=True)
    assert isinstance(ended, KvMissing | asyncio.CancelledError)
    await until(lambda: is_at_rest(prefill))  # long before a lease would end
    assert prefill.status().num_leases_ended == 0


async def test_aborted_while_its_kv_is_on_the_way(workers, prefill):
    """vllm#46283, #46289: decode's blocks leaked after an abort."""
    decode = workers.start("decode", parts=WorkerParts(make_transfer=HeldCopies))
    decode._lanes.engines[0].is_holding = True
    first = start(prefill.prefill.run, prefill_leg("r"))
    rest = asyncio.create_task(collect(decode.decode.run(decode_leg("r", prefill))))
    await until(lambda: decode._lanes.engines[0].held)
    rest.cancel()
    await asyncio.gather(rest, return_exceptions=True)
    await until(lambda: decode.status().num_blocks_quarantined)
    assert decode.status().num_transferring == 0  # the slot is free at once
    decode._lanes.engines[0].let_go()
    await until(lambda: is_at_rest(decode))
    assert isinstance(await first, KvMissing)


class FailingPosts(ShmEngine):
    def post_receive(self, peer, receive):
        raise OSError("no queue pair")


async def test_a_post_that_fails_is_told_to_both_sides(workers, prefill):
    """vllm#50754, #48633: a failed post was told to nobody."""
    decode = workers.start("decode", parts=WorkerParts(make_transfer=FailingPosts))
    first, rest = both(prefill, decode, "r")
    assert isinstance(await rest, LocalProtocolError)
    assert isinstance(await first, KvMissing)


class LyingEngine(ShmEngine):
    """Says success, and has written nothing."""

    def post_receive(self, peer, receive):
        token = TransferToken()
        token.kv_bytes = 1
        token.complete()
        return token


async def test_success_is_no_proof_that_anything_was_written(workers, prefill):
    """TensorRT-LLM PR 19545, wtdcode/vllm-backport#33: HTTP 200 with corrupt tokens."""
    decode = workers.start("decode", parts=WorkerParts(make_transfer=LyingEngine))
    first, rest = both(prefill, decode, "r")
    assert isinstance(await rest, KvCorrupt)  # and not one token
    assert isinstance(await first, KvMissing)
    assert decode.status().num_kv_mismatched == 1


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
async def test_a_prefill_that_is_aborted_gives_no_token_to_decode(
    prefill, decode, monkeypatch, num_chunks
):
    """sglang#30233: an aborted prefill gave garbage; #9726: decode went on without it."""
    compute, is_reached, may_go_on = prefill._model.backend.prefill, [], threading.Event()

    def compute_some(chunk):
        is_reached.append(chunk)
        if len(is_reached) > num_chunks:
            may_go_on.wait(30.0)
        return compute(chunk)

    monkeypatch.setattr(prefill._model.backend, "prefill", compute_some)
    leg = asyncio.create_task(collect(prefill.prefill.run(prefill_leg("r"))))
    rest = start(decode.decode.run, decode_leg("r", prefill))
    await until(lambda: len(is_reached) > num_chunks)
    await until(lambda: any(e.reader for e in prefill.prefill._send_buffer.lookup_dict.values()))
    leg.cancel()
    denied = await rest  # while prefill still computes
    may_go_on.set()
    assert isinstance(denied, KvMissing)
    await asyncio.gather(leg, return_exceptions=True)


async def test_stuck_in_the_queue_of_prefill(prefill, decode, monkeypatch):
    """dynamo#1074: a request sat in the prefill queue for ever."""
    compute, may_go_on = prefill._model.backend.prefill, threading.Event()

    def compute_late(chunk):
        may_go_on.wait(30.0)
        return compute(chunk)

    monkeypatch.setattr(prefill._model.backend, "prefill", compute_late)
    ahead = both(prefill, decode, "ahead")
    await until(lambda: prefill.status().num_legs)
    first = start(prefill.prefill.run, prefill_leg("r", timeout_s=0.2))
    rest = start(decode.decode.run, decode_leg("r", prefill, timeout_s=0.2))
    assert isinstance(await first, DeadlinePassed)
    assert isinstance(await rest, DeadlinePassed | KvMissing)
    may_go_on.set()
    assert isinstance((await ahead[0])[-1], Released)
    assert len(token_ids(await ahead[1])) == 11


async def test_a_transfer_that_wedges_costs_its_own_request_only(workers, prefill):
    """TensorRT-LLM#13796, #13713, #13056: transfer timeouts wedged or crashed executors."""
    decode = workers.start(
        "decode", parts=WorkerParts(make_transfer=HeldCopies), transfer_timeout_s=0.1
    )
    decode._lanes.engines[0].is_holding = True
    first, rest = both(prefill, decode, "stuck")
    assert isinstance(await rest, PeerTimeout)
    decode._lanes.engines[0].is_holding = False
    assert len(await answer(prefill, decode, "next")) == 12
    assert decode.status().num_blocks_quarantined > 0
    decode._lanes.engines[0].let_go()
    assert isinstance(await first, KvMissing)
    await until(lambda: is_at_rest(decode) and is_at_rest(prefill))


async def test_equal_prompts_of_two_decode_workers_are_two_hand_overs(workers, prefill, decode):
    """LMCache-Ascend#250: "already sent" was kept by key, without the request that owns it."""
    other = workers.start("decode", worker_id="decode-1")
    answers = await asyncio.gather(
        *(answer(prefill, worker, f"r{n}") for n, worker in enumerate([decode, other] * 3))
    )
    assert len({tuple(tokens) for tokens in answers}) == 1
    assert len(answers[0]) == 12
    assert decode.status().kv_bytes_received == other.status().kv_bytes_received > 0


async def test_a_storm_of_aborts(prefill, decode):
    """sglang#34572, PR 28651: after an abort storm each decode waited for 300 s."""
    legs = []
    for n in range(60):
        prompt = list(range(100 + n, 130 + n))
        first = collect(prefill.prefill.run(prefill_leg(f"r{n}", prompt)))
        rest = collect(decode.decode.run(decode_leg(f"r{n}", prefill)))
        legs += [asyncio.create_task(first), asyncio.create_task(rest)]
        for _ in range(n % 7):
            await asyncio.sleep(0)
        legs[n].cancel()
    for leg in legs:
        await asyncio.sleep(0)
        leg.cancel()
    ended = await asyncio.gather(*legs, return_exceptions=True)
    assert all(isinstance(end, NeuronDiError | asyncio.CancelledError | list) for end in ended)
    await until(lambda: is_at_rest(prefill) and is_at_rest(decode))
    assert len(await answer(prefill, decode, "after")) == 12


async def test_the_hundredth_answer_is_as_good_as_the_first(workers, prefill, decode):
    """sglang#23020: output turned to gibberish after about 100 requests."""
    combined = workers.start("both")
    prompts = [list(range(100 + n, 110 + 3 * n)) for n in range(5)]
    expected = [
        token_ids(await collect(combined.combined.run(prefill_leg(f"w{n}", prompt))))
        for n, prompt in enumerate(prompts)
    ]
    for turn in range(24):
        answers = await asyncio.gather(
            *(answer(prefill, decode, f"r{turn}-{n}", prompt) for n, prompt in enumerate(prompts))
        )
        assert answers == expected
    assert decode.status().num_kv_mismatched == 0
