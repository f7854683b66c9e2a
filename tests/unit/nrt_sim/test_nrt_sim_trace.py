"""The simulator of libnrt: its trace, and the checker of the contract on traces."""

import json
import os
from ctypes import Array, addressof, byref, create_string_buffer

import pytest
from nrt_sendrecv_peer import Peers, all_ended, exchange
from nrt_sim.build import library_path
from nrt_sim.check_trace import check_trace, problems
from nrt_sim.plain import FAILURE, SUCCESS, Batch, BatchOp

POST = "nrt_async_sendrecv_"


def call(name, status=SUCCESS, t=0, us=0, pid=1, **notes):
    line = {"t": t, "pid": pid, "thread": 1, "call": name, **notes, "status": status, "us": us}
    return json.dumps(line)


def event(name, t=0, pid=1, **members):
    return json.dumps({"t": t, "pid": pid, "thread": 1, "event": name, **members})


def opened(*lines):
    return [call("nrt_init"), *lines, call("nrt_close"), event("exit", is_open=False)]


def communicating(*lines):
    """Lnc 4 with communicator 10, connected; t counts the lines."""
    lines = [
        call(POST + "init", lnc=4),
        call(POST + "accept", communicator=10, lnc=4),
        call(POST + "test_comm", communicator=10, done=0),
        call(POST + "test_comm", communicator=10, done=1),
        *lines,
        call(POST + "close", lnc=4),
    ]
    return [json.dumps({**json.loads(line), "t": t}) for t, line in enumerate(opened(*lines))]


def receive(request=20, tensor=1, offset=0, size=100):
    notes = {"tensor": tensor, "offset": offset, "size": size, "communicator": 10}
    return call(POST + "recv_tensor", request=request, **notes)


def send(request=30, tensor=1, offset=0, size=100):
    notes = {"tensor": tensor, "offset": offset, "size": size, "communicator": 10}
    return call(POST + "send_tensor", request=request, **notes)


def done(request=20, done=1):
    return call(POST + "test_request", request=request, done=done)


def move(name, tensor=1, offset=0, size=1):
    return call(f"nrt_tensor_{name}", tensor=tensor, offset=offset, size=size)


FLUSH = call(POST + "flush", lnc=4)
COPIED = {"source": 1, "source_offset": 0, "destination": 7, "destination_offset": 0, "size": 1}
CLOSED_2 = call("nrt_close", pid=2)
SLICE = call("nrt_tensor_allocate_slice", source=1, offset=50, size=50, tensor=2)
GOOD = {
    "nothing but a life": opened(),
    "two processes": [*opened()[:1], call("nrt_init", pid=2), *opened()[1:], CLOSED_2],
    "read after flush": communicating(receive(), done(done=0), done(), FLUSH, move("read")),
    "read beside": communicating(receive(), done(), move("read", offset=100), FLUSH),
    "read of another tensor": communicating(receive(), done(), move("read", tensor=5), FLUSH),
    "read while sending": communicating(send(), move("read"), done(30)),
    "write after sending": communicating(send(), done(30), move("write")),
    "two sends of one range": communicating(send(), send(31), done(30), done(31)),
    "closed after a death": [call("nrt_init"), event("die")],
    "a slice beside": communicating(SLICE, receive(size=50), done(), move("read", tensor=2), FLUSH),
    "a failed post": communicating(call(POST + "send_tensor", status=4, communicator=11)),
}
BAD = {
    "without nrt_close": ([call("nrt_init")], "nrt_init without nrt_close"),
    "before nrt_init": ([call("nrt_execute", status=13)], "nrt_execute while the runtime is not"),
    "after nrt_close": ([*opened(), call("nrt_load", status=14)], "nrt_load while the runtime"),
    "violation": (opened(event("violation", text="freed twice")), "violation: freed twice"),
    "leak": (opened(event("leak", kind="models", count=2)), "2 models left at nrt_close"),
    "exit while open": (
        [call("nrt_init"), event("exit", is_open=True)],
        "nrt_init without nrt_close",
    ),
    "open lnc": (opened(call(POST + "init", lnc=3)), "nrt_close with lnc 3 open"),
    "not connected": (
        opened(call(POST + "connect", communicator=10, lnc=1), send(), done(30)),
        "a send on a communicator that was not seen connected",
    ),
    "never seen done": (communicating(receive(), FLUSH), "lnc 4 closed before request 20 was seen"),
    "read before flush": (
        communicating(receive(), done(), move("read", offset=99)),
        "received bytes of lnc 4 are read before a flush",
    ),
    "read before arrival": (
        communicating(receive(), move("read"), done()),
        "received bytes of lnc 4 are read before they arrived",
    ),
    "flush before arrival": (
        communicating(receive(), FLUSH, done(), move("read")),
        "received bytes of lnc 4 are read before a flush",
    ),
    "flush began before arrival": (
        communicating(receive(), done(), call(POST + "flush", lnc=4, us=5), move("read")),
        "received bytes of lnc 4 are read before a flush",
    ),
    "flush of another lnc": (
        communicating(receive(), done(), call(POST + "flush", lnc=5), move("read")),
        "received bytes of lnc 4 are read before a flush",
    ),
    "slice read": (
        communicating(SLICE, receive(offset=50), done(), move("read", tensor=2)),
        "received bytes of lnc 4 are read before a flush",
    ),
    "received into a slice": (
        communicating(SLICE, receive(tensor=2, size=10), done(), move("read", offset=59)),
        "received bytes of lnc 4 are read before a flush",
    ),
    "batch read": (
        communicating(receive(), done(), event("batch_read", tensor=1, offset=0, size=8)),
        "received bytes of lnc 4 are read before a flush",
    ),
    "copied": (
        communicating(
            receive(),
            done(),
            call("nrta_tensor_copy", **COPIED),
        ),
        "received bytes of lnc 4 are read before a flush",
    ),
    "write while sending": (
        communicating(send(), move("write", offset=50), done(30)),
        "bytes that a send works on are written",
    ),
    "copied over": (
        communicating(send(tensor=7), call("nrt_tensor_copy", **COPIED), done(30)),
        "bytes that a send works on are written",
    ),
    "memset while receiving": (
        communicating(receive(), move("memset"), done(), FLUSH),
        "bytes that a receive works on are written",
    ),
    "send of what arrives": (
        communicating(receive(), send(), done(), done(30), FLUSH),
        "a send of bytes that a receive works on",
    ),
}


@pytest.mark.parametrize("lines", GOOD.values(), ids=GOOD)
def test_what_keeps_the_contract_passes(lines):
    assert problems(lines) == []


@pytest.mark.parametrize(("lines", "expected"), BAD.values(), ids=BAD)
def test_what_breaks_the_contract_is_named(lines, expected):
    found = problems(lines)
    assert len(found) == 1, found
    assert found[0].startswith(f"process 1: {expected}")


def test_a_trace_has_all_calls_with_their_ranges(load, monkeypatch, tmp_path):
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("NRT_SIM_TRACE", str(path))
    nrt = load()
    nrt.open()
    tensor = nrt.allocated(64)
    nrt.write(tensor, 8, b"secret content")
    buffer = create_string_buffer(2)
    operation = BatchOp(16, 2, addressof(buffer))
    ops: Array[BatchOp] = (BatchOp * 1)(operation)
    assert nrt.nrt_tensor_read_batch((Batch * 1)(Batch(tensor, ops, 1)), 1, False) == SUCCESS
    assert nrt.nrt_init(1, b"", b"") == FAILURE
    nrt.nrt_tensor_free(byref(tensor))
    nrt.nrt_close()
    text = path.read_text()
    assert "secret" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["pid"] for line in lines} == {os.getpid()}
    names = [line.get("call") or line["event"] for line in lines]
    assert names == [
        "open",
        "nrt_init",
        "nrt_tensor_allocate",
        "nrt_tensor_write",
        "batch_read",
        "nrt_tensor_read_batch",
        "nrt_init",
        "nrt_tensor_free",
        "nrt_close",
    ]
    number = lines[2]["tensor"]
    assert [lines[3][key] for key in ("tensor", "offset", "size")] == [number, 8, 14]
    assert [lines[4][key] for key in ("tensor", "offset", "size")] == [number, 16, 2]
    assert [line["status"] for line in lines if line.get("call") == "nrt_init"] == [0, 1]
    check_trace(path)


def test_a_leak_and_an_empty_trace_are_found(load, monkeypatch, tmp_path):
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("NRT_SIM_TRACE", str(path))
    nrt = load()
    nrt.open()
    nrt.allocated(64)
    nrt.nrt_close()
    with pytest.raises(AssertionError, match="1 tensors left at nrt_close"):
        check_trace(path)
    path.write_text("")
    with pytest.raises(AssertionError, match="is empty"):
        check_trace(path)


@pytest.mark.parametrize("is_flushed", [True, False])
def test_a_real_exchange_is_followed(tmp_path, is_flushed):
    path = tmp_path / "trace.jsonl"
    with all_ended(Peers(library_path(), tmp_path)) as peers:
        sender, receiver = peers.pair(NRT_SIM_TRACE=str(path))
        exchange(sender, receiver, 100)
        if is_flushed:
            assert receiver.flush(1) == SUCCESS
        receiver.read_bytes("t", 0, 100)
        for peer, lnc in ((sender, 0), (receiver, 1)):
            assert peer.close_lnc(lnc) == SUCCESS
            peer.free("t")
            peer.close()
    if is_flushed:
        check_trace(path)
    else:
        with pytest.raises(AssertionError, match="lnc 1 are read before a flush"):
            check_trace(path)
