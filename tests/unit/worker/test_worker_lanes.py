"""Whole workers hand over by whatever engine, between whatever layouts: tokens are the same."""

import asyncio
from dataclasses import fields

import pytest
from worker_kit import collect, decode_leg, is_at_rest, prefill_leg, token_ids, until

from neuron_di.config import TransferOptions


async def hand_over(prefill, decode, name="r"):
    return await asyncio.gather(
        collect(prefill.prefill.run(prefill_leg(name))),
        collect(decode.decode.run(decode_leg(name, prefill))),
    )


@pytest.mark.parametrize("engine", ["shm", "tcp"])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 16), (16, 4), (1, 8)], ids=str)
async def test_a_hand_over(workers, engine, sizes):
    both = workers.start("both")
    whole = await collect(both.combined.run(prefill_leg("r")))
    options = TransferOptions(transfer=(engine,))
    prefill = workers.start("prefill", block_size=sizes[0], kv_transfer=options)
    decode = workers.start("decode", block_size=sizes[1], kv_transfer=options, stream_layers="off")
    for name in ("r", "again"):
        first, rest = await hand_over(prefill, decode, name)
        assert token_ids(first + rest) == token_ids(whole)
    gave, took = first[-1].receipt, rest[-1].receipt
    form = "direct" if sizes[0] == sizes[1] else "landed"
    assert (gave.link, gave.form) == (took.link, took.form) == (engine, form)
    assert gave.kv_bytes == took.kv_bytes > 0
    assert took.kv_blocks == -(-40 // sizes[1])
    (lane,) = decode.status().lanes
    assert (lane.peer, lane.engine, lane.reason) == ("prefill-0", engine, f"{engine}: chosen")
    assert prefill.status().lanes == []
    await until(lambda: is_at_rest(prefill) and is_at_rest(decode))


async def test_the_preferred_engine_goes_first_and_the_record_names_all(workers):
    options = TransferOptions(transfer=("tcp", "shm"))
    prefill = workers.start("prefill")
    decode = workers.start("decode", kv_transfer=options)
    _, rest = await hand_over(prefill, decode)
    assert rest[-1].receipt.link == "shm"
    (lane,) = decode.status().lanes
    assert rest[-1].receipt.link_reason == lane.verdicts == "tcp: not_offered; shm: chosen"
    assert lane.reason == "tcp: not offered by the peer; shm: chosen"
    assert [each.partition("@")[0] for each in decode.record().transfer] == ["tcp", "shm"]
    assert prefill.record().transfer == [decode.record().transfer[1]]


async def test_whatever_a_hand_over_counts_is_in_the_status(workers):
    decode = workers.start("decode")
    counters = decode._connector.counters
    names = [field.name for field in fields(counters) if field.name.startswith("num_")]
    counted = {name: number for number, name in enumerate(names, start=1)}
    for name, number in counted.items():
        setattr(counters, name, number)
    status = decode.status()
    assert {name: getattr(status, name) for name in names} == counted
    assert status.num_streams_refused > 0
