"""What is no record is left out, counted and named; it harms nobody, and there may be plenty."""

import asyncio

import pytest

from neuron_di.config import WorkerAddressOptions
from neuron_di.registry import Directory, Snapshot
from neuron_di.registry.record_reader import REFUSED_MAX, RecordReader
from neuron_di.wire import PROTOCOL_VERSION, encode_json


@pytest.fixture
def reader():
    return RecordReader(WorkerAddressOptions())


@pytest.mark.parametrize(
    "key",
    [
        "/workers/../x",
        "/workers/prefill/../../x/1",
        "/workers/prefill/127.0.0.1",
        "/workers/prefill/127.0.0.1/",
        "/workers/prefill/127.0.0.1/80000000",
        "/workers/king/127.0.0.1/4000",
        "/workers/prefill/127.0.0.1/4000/more",
        "/workers/",
        "/registry/services/x",
        "",
        "x" * 100_000,
    ],
)
def test_a_key_that_is_no_workers(reader, make_record, key):
    assert reader.read(key, encode_json(make_record())) is None
    assert reader.num_refused == {"key": 1}
    [refused] = reader.refused()
    assert len(refused.key) <= 120


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (b"", "value"),
        (b"{", "value"),
        (b"null", "value"),
        (b"[1, 2]", "value"),
        (b"\xff\xfe", "value"),
        (b'{"worker_id": 7}', "value"),
        (b"[" * 60_000, "value"),
        (b"x" * (1 << 20), "size"),
    ],
)
def test_a_value_that_is_no_record(reader, make_record, value, fault):
    assert reader.read(make_record().key(), value) is None
    assert reader.num_refused == {fault: 1}


def test_a_record_with_empty_tags_is_none(reader, make_record):
    # No text can be divided by them: one such record, of a worker that nobody asked, made each chat
    # with its model an internal error.
    record = make_record(reasoning=("", ""))
    assert reader.read(record.key(), encode_json(record)) is None
    assert reader.num_refused == {"value": 1}


@pytest.mark.parametrize("name", ["slots", "num_legs", "context_tokens", "num_vocab", "pid"])
@pytest.mark.parametrize("sign", ["", "-"])
def test_counts_that_no_load_can_be_computed_of_are_none(reader, make_record, name, sign):
    record = make_record(**{name: 1234567})
    value = encode_json(record).replace(b"1234567", (sign + "9" * 400).encode())
    assert reader.read(record.key(), value) is None
    assert reader.num_refused == {"value": 1}


def test_another_version_is_refused_by_name_though_nothing_else_of_it_can_be_read(reader):
    key = "/workers/decode/127.0.0.1/4000"
    value = b'{"protocol_version": 99, "worker_id": "decode-7", "addresses": [["tcp", 1]]}'
    assert reader.read(key, value) is None
    assert reader.num_refused == {"version": 1}
    [refused] = reader.refused()
    assert refused.worker_id == "decode-7"
    assert refused.reason == f"it speaks protocol version 99, not {PROTOCOL_VERSION}"
    evil = b'{"protocol_version": 99, "worker_id": "\\u001b[2J"}'
    assert reader.read(key, evil) is None
    assert reader.refused()[0].worker_id == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "169.254.169.254"}, "not the address of one machine"),
        ({"host": "example.org"}, "is no IP address"),
        ({"host": "0.0.0.0"}, "not the address of one machine"),
        ({"api_port": 22}, "port 22 is not among"),
        ({"signal_host": "169.254.169.254"}, "not the address of one machine"),
        ({"signal_port": 80}, "port 80 is not among"),
    ],
)
def test_an_address_where_no_worker_may_be_is_refused_by_name(reader, make_record, changes, words):
    record = make_record(**({"api_port": 4000} | changes))
    assert reader.read(record.key(), encode_json(record)) is None
    assert reader.num_refused == {"address": 1}
    [refused] = reader.refused()
    assert refused.worker_id == "prefill-4000"
    assert words in refused.reason


def test_a_decode_worker_needs_no_signal_port(reader, make_record):
    record = make_record(role="decode", signal_port=0)
    assert reader.read(record.key(), encode_json(record)) == record


def test_few_are_remembered_and_those_that_are_mended_are_forgotten(reader, make_record):
    for number in range(1000):
        reader.read(f"/workers/{number}", b"")
    assert len(reader.refused()) == REFUSED_MAX
    assert reader.refused()[-1].key == "/workers/999"
    assert reader.num_refused == {"key": 1000}
    record = make_record()
    reader.read(record.key(), b"")
    assert reader.refused()[-1].key == record.key()
    reader.read(record.key(), encode_json(record))
    assert record.key() not in {each.key for each in reader.refused()}


def test_a_key_with_one_value_is_counted_once_however_often_it_is_read(reader, make_record):
    values = {f"/workers/{number}": b"junk" for number in range(100)}
    for _ in range(3):  # as it is listed again
        reader.forget_all()
        for key, value in values.items():
            reader.read(key, value)
        reader.all_read()
    assert reader.num_refused == {"key": 100}
    key = make_record().key()
    for value in (b"a", b"a", b"b"):
        reader.read(key, value)
    assert reader.num_refused == {"key": 100, "value": 2}
    reader.forget(key)
    reader.read(key, b"b")  # it was gone, and came again
    assert reader.num_refused == {"key": 100, "value": 3}
    for _ in range(2):
        reader.forget_all()
        reader.all_read()
    assert (reader._counted, reader._counted_before) == ({}, {})


def test_what_was_counted_is_remembered_within_a_bound(reader, monkeypatch):
    monkeypatch.setattr("neuron_di.registry.record_reader.COUNTED_MAX", 10)
    for number in range(1000):
        reader.read(f"/workers/{number}", b"")
    assert len(reader._counted) == 10
    assert reader.num_refused == {"key": 1000}


async def test_100_000_keys_hold_up_nobody_else(make_record, wait_workers, caplog):
    """Garbage among which one worker is: it is found, other callbacks run on, the log is short."""
    record = make_record()
    values = {f"/workers/decode/10.0.0.1/{port}": b"junk" for port in range(60_000)}
    values |= {f"/workers/{number}/../x": b"junk" for number in range(40_000)}
    values[record.key()] = encode_json(record)

    class Flooded:
        num_dropped = 0

        async def watch(self, prefix):
            yield Snapshot(values)
            await asyncio.Event().wait()

        def trouble(self):
            return ""

    num_turns = 0

    async def count_turns():
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count_turns())
    async with Directory(Flooded()) as directory:
        assert await wait_workers(directory, lambda workers: workers) == (record,)
        assert directory.ignored == {"value": 60_000, "key": 40_000}
        assert len(directory.refused()) == REFUSED_MAX
    counting.cancel()
    assert num_turns >= 300
    assert len(caplog.records) < 20
