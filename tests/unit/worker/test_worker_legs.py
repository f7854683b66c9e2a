"""Legs of real workers: what they answer, and that leaving one at any moment frees both sides."""

import asyncio
import threading
from contextlib import aclosing

import msgspec
import pytest
from worker_kit import (
    PROMPT,
    collect,
    decode_leg,
    is_at_rest,
    prefill_leg,
    token_ids,
    until,
)

from neuron_di.errors import (
    BadRequest,
    CapacityError,
    KvChanged,
    KvExpired,
    KvMissing,
    NeuronDiError,
    PeerTimeout,
    RemoteProtocolError,
    TooLarge,
)
from neuron_di.types import BlockId
from neuron_di.wire import Finished, Parked, Released, Token


def first_leg(prefill, name="r", prompt=PROMPT, **sampling):
    return collect(prefill.prefill.run(prefill_leg(name, prompt, **sampling)))


def rest_leg(prefill, decode, name="r", **sampling):
    return collect(decode.decode.run(decode_leg(name, prefill, **sampling)))


def legs(prefill, decode, name="r", prompt=PROMPT, **sampling):
    return (
        first_leg(prefill, name, prompt, **sampling),
        rest_leg(prefill, decode, name, **sampling),
    )


async def test_two_workers_say_what_one_says(workers, prefill, decode):
    both = workers.start("both")
    whole = await collect(both.combined.run(prefill_leg("r")))
    first, rest = await asyncio.gather(*legs(prefill, decode))
    assert [type(event) for event in first] == [Token, Parked, Released]
    assert [type(event) for event in rest] == [Token] * 11 + [Finished]
    assert [event.index for event in first[:1] + rest[:-1]] == list(range(12))
    assert token_ids(first + rest) == token_ids(whole)
    text = "".join(event.text for event in first[:1] + rest)
    assert text == "".join(event.text for event in whole)
    assert first[1].num_prompt == rest[-1].num_prompt == 40
    assert rest[-1].num_generated == 12


async def test_receipts(prefill, decode):
    first, rest = await asyncio.gather(*legs(prefill, decode))
    gave, took = first[-1].receipt, rest[-1].receipt
    assert (gave.worker_id, gave.role, gave.link) == ("prefill-0", "prefill", "shm")
    assert (took.worker_id, took.role, took.link) == ("decode-0", "decode", "shm")
    assert gave.kv_blocks == took.kv_blocks == 10
    assert gave.kv_bytes == took.kv_bytes == decode.status().kv_bytes_received > 0
    assert gave.transfer_s == took.transfer_s
    assert gave.prefill_s > 0
    assert took.decode_s > 0
    assert prefill.record().connections == ["decode-0"]
    assert decode.record().connections == ["prefill-0"]


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 7, "top_k": 50}])
async def test_many_requests_at_once_each_get_their_own(workers, prefill, decode, sampled):
    both = workers.start("both")
    prompts = {f"r{n}": list(range(50 + n, 70 + 5 * n)) for n in range(12)}
    pairs = [
        asyncio.gather(*legs(prefill, decode, name, prompt, **sampled))
        for name, prompt in prompts.items()
    ]
    answers = await asyncio.gather(*pairs)
    for (name, prompt), (first, rest) in zip(prompts.items(), answers, strict=True):
        whole = await collect(both.combined.run(prefill_leg(name, prompt, **sampled)))
        assert token_ids(first + rest) == token_ids(whole)
    assert decode.status().kv_bytes_received > 0
    assert prefill.status().num_steps > 0


async def test_the_decode_leg_may_come_first(prefill, decode):
    first, rest = legs(prefill, decode)
    rest = asyncio.create_task(rest)
    await until(lambda: prefill.prefill._send_buffer.lookup_dict)
    assert [type(event) for event in await first] == [Token, Parked, Released]
    assert len(token_ids(await rest)) == 11


async def test_the_prefill_leg_may_come_first(prefill, decode):
    first, rest = legs(prefill, decode)
    first = asyncio.create_task(first)
    await until(lambda: prefill.status().num_transferring)
    assert len(token_ids(await rest)) == 11
    assert isinstance((await first)[-1], Released)


async def test_the_first_token_may_be_the_last(prefill, decode):
    first, rest = legs(prefill, decode, max_tokens=1)
    rest = asyncio.create_task(rest)
    await until(lambda: prefill.prefill._send_buffer.lookup_dict)
    assert [type(event) for event in await first] == [Token, Finished]
    with pytest.raises(KvMissing, match="first token"):
        await rest


# Leaving


@pytest.mark.parametrize("num_events", range(3))
async def test_leaving_the_prefill_leg_ends_the_decode_leg(prefill, decode, num_events):
    """Before its first event, after token 0, after Parked."""
    rest = asyncio.create_task(rest_leg(prefill, decode))
    await until(lambda: prefill.prefill._send_buffer.lookup_dict)
    async with aclosing(prefill.prefill.run(prefill_leg("r"))) as events:
        await leave_after(events, num_events)
    # Decode heard "never", or pulled what was given up meanwhile, or had the KV already.
    (outcome,) = await asyncio.gather(rest, return_exceptions=True)
    assert isinstance(outcome, KvMissing | KvChanged | list)


async def leave_after(events, num_events):
    if num_events == 0:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)  # the prompt is being read
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    for _ in range(num_events):
        await anext(events)


@pytest.mark.parametrize("num_yields", [0, 1, 2, 5, 20, 100])
async def test_cancelling_the_prefill_leg_at_any_moment(prefill, num_yields):
    leg = asyncio.create_task(collect(prefill.prefill.run(prefill_leg("r"))))
    for _ in range(num_yields):
        await asyncio.sleep(0)
    leg.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leg
    await until(lambda: is_at_rest(prefill))
    assert prefill.prefill._send_buffer.lookup_dict == {}


@pytest.mark.parametrize("num_yields", [0, 1, 2, 5, 20, 100])
async def test_cancelling_the_decode_leg_at_any_moment(prefill, decode, num_yields):
    first, rest = legs(prefill, decode)
    first = asyncio.create_task(first)
    rest = asyncio.create_task(rest)
    for _ in range(num_yields):
        await asyncio.sleep(0)
    rest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rest
    await until(lambda: is_at_rest(decode))
    # Prefill's leg ends by itself when decode had asked; else the proxy ends it.
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("num_events", [1, 3, 11])
async def test_leaving_the_decode_leg_while_it_speaks(prefill, decode, num_events):
    first = asyncio.create_task(first_leg(prefill))
    async with aclosing(decode.decode.run(decode_leg("r", prefill))) as events:
        for _ in range(num_events):
            assert isinstance(await anext(events), Token)
    assert isinstance((await first)[-1], Released)
    await until(lambda: is_at_rest(decode))


async def test_decode_that_leaves_before_its_pull_gives_the_kv_back(prefill, decode, monkeypatch):
    """Every slot is taken, so the pull waits; meanwhile the client goes."""
    may_be_fast = threading.Event()
    compute = decode._model.backend.decode

    def compute_slowly(batch):
        may_be_fast.wait(0.05)
        return compute(batch)

    monkeypatch.setattr(decode._model.backend, "decode", compute_slowly)
    running = [
        asyncio.gather(*legs(prefill, decode, f"busy-{n}", max_tokens=150)) for n in range(4)
    ]
    await until(lambda: decode.status().num_running == 4)
    first, rest = (asyncio.create_task(leg) for leg in legs(prefill, decode, "late"))
    await until(lambda: decode.status().num_waiting == 1)
    assert prefill.status().num_transferring == 1  # parked, and not pulled (N-13)
    rest.cancel()
    with pytest.raises(KvMissing, match="gave up"):
        await first
    await until(lambda: prefill.status().num_transferring == 0)
    may_be_fast.set()
    for first, rest in await asyncio.gather(*running):
        assert len(token_ids(first + rest)) == 150


async def test_decode_that_leaves_between_admission_and_pull_gives_its_blocks_back(
    prefill, decode, monkeypatch
):
    held_back = []
    with monkeypatch.context() as patch:
        patch.setattr(decode.decode, "_pull", lambda *pull: held_back.append(pull))
        first, rest = (asyncio.create_task(leg) for leg in legs(prefill, decode))
        await until(lambda: held_back)
        rest.cancel()
        await until(lambda: decode.status().num_transferring == 0)
    assert decode.status().num_blocks_free < decode.status().num_blocks  # quarantined
    decode.decode._pull(*held_back[0])
    await until(lambda: is_at_rest(decode))
    with pytest.raises(KvMissing):
        await first


async def test_a_lease_that_ends_fails_the_leg_and_frees_the_blocks(workers, monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.05)
    prefill, decode = workers.start("prefill", kv_lease_s=0.2), workers.start("decode")
    with pytest.raises(KvExpired):
        await first_leg(prefill)
    await until(lambda: is_at_rest(prefill))
    with pytest.raises(KvMissing, match="lease"):
        await rest_leg(prefill, decode)


# What is refused


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([], {}, BadRequest),
        ([1, -1], {}, BadRequest),
        ([1, 1 << 40], {}, BadRequest),
        ([1, "a"], {}, BadRequest),
        ({"a": 1}, {}, BadRequest),
        (PROMPT, {"temperature": 9.0}, BadRequest),
        (PROMPT, {"max_tokens": 100_000}, BadRequest),
        (PROMPT * 30, {"max_tokens": 1}, (BadRequest, TooLarge)),
    ],
)
async def test_what_prefill_refuses_frees_the_waiting_decode_leg(
    prefill, decode, prompt, sampling, error
):
    first, rest = legs(prefill, decode, "r", prompt, **sampling)
    rest = asyncio.create_task(rest)
    await until(lambda: prefill.prefill._send_buffer.lookup_dict)
    with pytest.raises(error):
        await first
    with pytest.raises(KvMissing):
        await rest


async def test_the_same_leg_twice_is_refused_and_the_first_goes_on(prefill, decode):
    first, rest = legs(prefill, decode)
    rest = asyncio.create_task(rest)
    await asyncio.sleep(0)
    with pytest.raises(BadRequest, match="already"):
        await rest_leg(prefill, decode)
    assert isinstance((await first)[-1], Released)
    assert len(token_ids(await rest)) == 11


async def test_more_legs_than_the_limit_are_refused(prefill, monkeypatch):
    monkeypatch.setattr(prefill.legs, "_legs_max", 0)
    with pytest.raises(CapacityError):
        await first_leg(prefill)


async def test_decode_checks_the_sampling_of_its_leg_itself(prefill, decode):
    first = asyncio.create_task(first_leg(prefill))
    with pytest.raises(BadRequest):
        await rest_leg(prefill, decode, stop_token_ids=(1 << 30,))
    with pytest.raises(KvMissing):
        await first


async def test_a_prefill_worker_that_is_not_there(workers, prefill):
    decode = workers.start("decode", peer_connect_timeout_s=0.2)
    leg = decode_leg("r", prefill)
    address = msgspec.structs.replace(leg.prefill, signal_port=1)
    with pytest.raises(PeerTimeout):
        await collect(decode.decode.run(msgspec.structs.replace(leg, prefill=address)))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": []},
        {"prompt_ids": [1] * 39},
        {"prompt_ids": [-1] * 40},
        {"prompt_ids": [1 << 40] * 40},
        {"generated": []},
        {"generated": [1, 2]},
        {"generated": [-1]},
        {"generated": [2048]},
        {"worker_id": "prefill-1"},
        {"incarnation": "another"},
        {"layout_digest": "another"},
        {"digests": []},
        {"digests": [0] * 10},
        {"num_tokens": 39},
        {"num_tokens": -40},
        {"block_ids": []},
        {"block_ids": [0] * 11},
        {"block_ids": [-1] * 10},
        {"block_ids": [256] * 10},
        {"block_ids": [1 << 62] * 10},
        {"generations": []},
        {"generations": [9] * 10},
        {
            "prompt_ids": [1] * 4000,
            "num_tokens": 4000,
            "block_ids": [0] * 1000,
            "generations": [0] * 1000,
            "digests": [0] * 1000,
        },
    ],
    ids=str,
)
async def test_a_ready_that_does_not_add_up_is_refused(prefill, decode, fields):
    """A real SendBuffer says it, after a real prefill."""
    buffer = prefill.prefill._send_buffer
    park = buffer.park
    buffer.park = lambda ready: park(msgspec.structs.replace(ready, **fields))
    first, rest = (asyncio.create_task(leg) for leg in legs(prefill, decode))
    with pytest.raises(NeuronDiError) as caught:
        await rest
    assert caught.value.fault in ("peer", "client")
    with pytest.raises(KvMissing):
        await first
    buffer.park = park
    first, rest = await asyncio.gather(*legs(prefill, decode, "next"))
    assert len(token_ids(first + rest)) == 12


async def test_a_ready_that_is_a_whole_answer_already_is_refused(prefill, decode):
    buffer = prefill.prefill._send_buffer
    park = buffer.park
    buffer.park = lambda ready: park(msgspec.structs.replace(ready, generated=[7]))
    first = asyncio.create_task(collect(prefill.prefill.run(prefill_leg("r"))))
    rest = collect(decode.decode.run(decode_leg("r", prefill, stop_token_ids=(7,))))
    with pytest.raises(RemoteProtocolError, match="complete already"):
        await rest
    await asyncio.gather(first, return_exceptions=True)


async def test_kv_that_changes_before_it_is_pulled_is_never_used(prefill, decode):
    buffer = prefill.prefill._send_buffer
    park = buffer.park

    def park_and_retire(ready):
        prefill._model.backend.pool.retire([BlockId(ready.block_ids[-1])])
        park(ready)

    buffer.park = park_and_retire
    first, rest = (asyncio.create_task(leg) for leg in legs(prefill, decode))
    with pytest.raises(NeuronDiError) as caught:
        await rest
    assert caught.value.code == "kv_changed"
    with pytest.raises(KvMissing):
        await first


async def test_a_ready_from_a_stranger_is_a_protocol_error_by_name(prefill, decode):
    buffer = prefill.prefill._send_buffer
    park = buffer.park
    buffer.park = lambda ready: park(msgspec.structs.replace(ready, num_tokens=1))
    first, rest = (asyncio.create_task(leg) for leg in legs(prefill, decode))
    with pytest.raises(RemoteProtocolError, match="does not add up"):
        await rest
    await asyncio.gather(first, return_exceptions=True)


# An engine that failed


async def test_a_worker_whose_engine_failed_says_that_it_drains(prefill, monkeypatch):
    def fail():
        raise RuntimeError("a bug")

    assert not prefill.is_draining
    with monkeypatch.context() as patch:
        patch.setattr(prefill._scheduler, "schedule", fail)
        with pytest.raises(NeuronDiError) as caught:
            await first_leg(prefill)
    assert caught.value.fault == "us"
    assert prefill.is_draining
    assert prefill.record().state == "draining"
    prefill._scheduler._waiting._requests.clear()  # what the engine no longer touches
