"""Bytes from core to core: what goes where, limits, and what the library answers.

Two copies of the simulator in one process are like two processes of one host; the last test starts
real ones.
"""

import os
import subprocess
import sys

import pytest
from nrt_sides import HERE, D, P, Side, connected, count_of
from nrt_sim.build import library_path
from nrt_sim.check_trace import check_trace
from nrt_steering import until

from neuron_di_bindings.nrt import (
    ENABLED_VARIABLE,
    PORT_VARIABLE,
    Limits,
    NrtMisuse,
    NrtRequestError,
    NrtRetry,
    NrtRuntime,
    NrtStatus,
    SendReceive,
    missing_variables,
)


def test_bytes_arrive_in_order_and_are_there_after_a_flush(sides, memory):
    sending, receiving = connected(sides)
    sent, received = memory
    waiting = [receiving.receive(received, place, 100) for place in (0, 2000)]
    posted = [sending.send(sent, place, 100) for place in (256 + 7, 256 + 9)]
    assert [count_of(request) for request in (*posted, *waiting)] == [100] * 4
    sides[1].both.flush(D)
    found = bytearray(100)
    received.read(0, found)
    assert found == bytes(range(7, 107))
    received.read(2000, found)
    assert found == bytes(range(9, 109))
    assert sending.num_posted == receiving.num_posted == 0


def test_without_a_flush_nothing_is_there(sides, memory):
    sending, receiving = connected(sides)
    request = receiving.receive(memory[1], 0, 8)
    count_of(sending.send(memory[0], 1, 8))
    count_of(request)
    found = bytearray(8)
    memory[1].read(0, found)
    assert found == bytes(8)
    sides[1].both.flush(D)
    memory[1].read(0, found)
    assert found == bytes(range(1, 9))


def test_limits_are_read_from_the_library(gates, load, monkeypatch):
    monkeypatch.setenv("NRT_SIM_COMMUNICATORS_MAX", "3")
    monkeypatch.setenv("NRT_SIM_PENDING_MAX", "5")
    with NrtRuntime(load(3)).init() as runtime:
        assert SendReceive(runtime).limits() == Limits(communicators_max=3, pending_max=5)


def test_over_a_limit_nothing_happens(gates, load, monkeypatch):
    monkeypatch.setenv("NRT_SIM_COMMUNICATORS_MAX", "1")
    monkeypatch.setenv("NRT_SIM_PENDING_MAX", "2")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0,1")
    side = Side(load(3))
    for lnc in (0, 1):
        side.both.open(lnc)
    sending, receiving = side.both.connect(HERE, 1, 0), side.both.accept(HERE, 0, 1)
    with pytest.raises(NrtRequestError) as caught:
        side.both.connect(HERE, 7, 0)
    assert caught.value.status == NrtStatus.RESOURCE
    until(sending.is_connected)
    until(receiving.is_connected)
    source, target = (side.runtime.allocate(64, core, "kv") for core in (0, 1))
    source.fill(5)
    waiting = [receiving.receive(target, place, 1) for place in range(2)]
    with pytest.raises(NrtRetry) as caught:
        receiving.receive(target, 2, 1)
    assert caught.value.status == NrtStatus.RESOURCE
    assert receiving.num_posted == 2
    for place in range(2):
        count_of(sending.send(source, place, 1))
    assert [count_of(each) for each in waiting] == [1, 1]
    for lnc in (0, 1):
        side.both.close(lnc)
    side.runtime.close()


def test_a_mismatch_of_length_fails_both_requests(sides, memory):
    sending, receiving = connected(sides)
    request = receiving.receive(memory[1], 0, 100)
    other = sending.send(memory[0], 0, 99)
    for each in (request, other):
        with pytest.raises(NrtRequestError) as caught:
            count_of(each)
        assert caught.value.status == NrtStatus.FAILURE
        with pytest.raises(NrtMisuse, match="the request failed before"):
            each.test()
    assert sending.num_posted == receiving.num_posted == 0
    for side in sides:
        assert "of 99" in side.sim.violation()
        side.sim.forget_violations()


def test_a_connection_is_asked_for_until_it_is_there_and_no_more(sides):
    sending, _ = connected(sides)
    calls = sides[0].sim.calls("nrt_async_sendrecv_test_comm")
    assert sending.is_connected()
    assert sides[0].sim.calls("nrt_async_sendrecv_test_comm") == calls
    assert (sending.direction, sending.peer_ip, sending.peer_lnc, sending.lnc) == (
        "send",
        HERE,
        D,
        P,
    )


def test_a_time_out_of_a_connection_is_asked_again(sides):
    sending, receiving = sides[0].both.connect(HERE, D, P), sides[1].both.accept(HERE, P, D)
    sides[0].sim.fault("nrt_async_sendrecv_test_comm", NrtStatus.TIMEOUT)
    with pytest.raises(NrtRetry):
        sending.is_connected()
    until(sending.is_connected)
    until(receiving.is_connected)


def test_a_post_that_fails_leaves_nothing_posted(sides, memory):
    sending, _ = connected(sides)
    sides[0].sim.fault("nrt_async_sendrecv_send_tensor", NrtStatus.FAILURE)
    with pytest.raises(NrtRequestError):
        sending.send(memory[0], 0, 8)
    assert sending.num_posted == 0


@pytest.mark.parametrize("name", [ENABLED_VARIABLE, PORT_VARIABLE])
def test_a_missing_variable_is_named(gates, load, monkeypatch, name):
    monkeypatch.delenv(name)
    with NrtRuntime(load(3)).init() as runtime:
        with pytest.raises(NrtRequestError) as caught:
            SendReceive(runtime).open(0)
        assert caught.value.status == NrtStatus.FAILURE
        assert [note.split("=")[0] for note in caught.value.__notes__] == [
            f"not set in the environment: {name}"
        ]


def test_variables_are_looked_for():
    both = {ENABLED_VARIABLE: "1", PORT_VARIABLE: "45645"}
    assert missing_variables(both) == ()
    assert missing_variables(both | {ENABLED_VARIABLE: "true"}) == (f"{ENABLED_VARIABLE}=1",)
    assert missing_variables({}) == (f"{ENABLED_VARIABLE}=1", f"{PORT_VARIABLE}=45645")


PEER = """
import sys, threading
from neuron_di_bindings.nrt import NrtRuntime, NrtRequestError, SendReceive, load_nrt

def until(look):
    pause = threading.Event()
    for _ in range(20000):
        found = look()
        if found is not None and found is not False:
            return found
        pause.wait(0.001)
    raise SystemExit("it never came")

role, number = sys.argv[1], int(sys.argv[2])
runtime = NrtRuntime(load_nrt()).init()
both = SendReceive(runtime)
both.open(number)
tensor = runtime.allocate(1 << 20, 0, "kv")
if role == "send":
    tensor.write(0, bytes(range(256)) * 4096)
    communicator = both.connect("127.0.0.1", 1, 0)
    until(communicator.is_connected)
    requests = [communicator.send(tensor, place << 16, 1 << 16) for place in range(16)]
    print([until(request.test) for request in requests])
else:
    tensor.fill(0)
    communicator = both.accept("127.0.0.1", 0, 1)
    until(communicator.is_connected)
    requests = [communicator.receive(tensor, place << 16, 1 << 16) for place in range(16)]
    print([until(request.test) for request in requests])
    both.flush(number)
    found = bytearray(1 << 20)
    tensor.read(0, found)
    print(found == bytes(range(256)) * 4096)
both.close(number)
runtime.close()
"""


def test_two_processes(gates, monkeypatch, tmp_path):
    monkeypatch.setenv("NRT_SIM_STRICT", "abort")
    monkeypatch.setenv("NEURON_DI_LIBNRT", str(library_path()))
    trace = tmp_path / "trace.jsonl"
    monkeypatch.setenv("NRT_SIM_TRACE", str(trace))
    running = []
    for number, role in enumerate(("send", "receive")):
        environment = os.environ | {"NEURON_RT_VISIBLE_CORES": str(number)}
        command = [sys.executable, "-c", PEER, role, str(number)]
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        )
    with running[0], running[1]:
        outputs = [each.communicate(timeout=60)[0].splitlines() for each in running]
    assert [each.returncode for each in running] == [0, 0]
    assert outputs == [[str([1 << 16] * 16)], [str([1 << 16] * 16), "True"]]
    check_trace(trace)
