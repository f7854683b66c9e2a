"""Send and receive: rules whose breach breaks the library, kept before it is called."""

import threading

import pytest
from nrt_sides import HERE, D, P, connected, count_of
from nrt_steering import held_up, patched_call, until

from neuron_di_bindings.nrt import (
    NrtMisuse,
    NrtRequestError,
    NrtRetry,
    NrtStatus,
    NrtWorkerError,
    SendReceive,
)


def test_a_posted_request_keeps_its_core_open(sides, memory):
    sending, receiving = connected(sides)
    request = receiving.receive(memory[1], 0, 8)
    with pytest.raises(NrtMisuse, match="0 communicators unconnected, 1 requests posted"):
        sides[1].both.close(D)
    assert sides[1].sim.calls("nrt_async_sendrecv_close") == 0
    count_of(sending.send(memory[0], 0, 8))
    assert count_of(request) == 8


def test_a_core_stays_open_while_a_call_runs(sides):
    inside, may_leave = threading.Event(), threading.Event()
    library = sides[1].runtime.library
    plain = library.call

    def waiting(name, *arguments):
        inside.set()
        assert may_leave.wait(20)
        return plain(name, *arguments)

    library.call = waiting
    thread = threading.Thread(target=sides[1].both.flush, args=(D,))
    thread.start()
    assert inside.wait(20)
    with pytest.raises(NrtMisuse, match="0 requests posted, 1 calls running"):
        sides[1].both.close(D)
    may_leave.set()
    thread.join(20)
    library.call = plain
    assert sides[1].sim.calls("nrt_async_sendrecv_flush") == 1


def test_the_rules_before_a_connection_are_kept_here(sides, memory):
    sending = sides[0].both.connect(HERE, D, P)
    with pytest.raises(NrtMisuse, match="before the communicator was seen to be connected"):
        sending.send(memory[0], 0, 1)
    with pytest.raises(NrtMisuse, match="1 communicators unconnected, 0 requests posted"):
        sides[0].both.close(P)
    receiving = sides[1].both.accept(HERE, P, D)
    until(sending.is_connected)
    until(receiving.is_connected)
    with pytest.raises(NrtMisuse, match="a communicator that is there to send"):
        sending.receive(memory[0], 0, 1)
    with pytest.raises(NrtMisuse, match="a communicator that is there to receive"):
        receiving.send(memory[1], 0, 1)
    for offset, count in ((-1, 4), (4093, 4), (0, 2**63)):
        with pytest.raises(ValueError, match="not within"):
            sending.send(memory[0], offset, count)
    assert sides[0].sim.calls("nrt_async_sendrecv_send_tensor") == 0
    assert sides[1].sim.calls("nrt_async_sendrecv_recv_tensor") == 0


def test_a_request_is_tested_by_one_thread_and_never_after(sides, memory):
    sending, receiving = connected(sides)
    request = receiving.receive(memory[1], 0, 8)
    inside, may_leave = threading.Event(), threading.Event()
    library = sides[1].runtime.library
    plain = library.call

    def waiting(name, *arguments):
        if name == "nrt_async_sendrecv_test_request":
            inside.set()
            assert may_leave.wait(20)
        return plain(name, *arguments)

    library.call = waiting
    thread = threading.Thread(target=request.test)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(NrtMisuse, match="another thread tests the same request"):
        request.test()
    may_leave.set()
    thread.join(20)
    library.call = plain
    count_of(sending.send(memory[0], 0, 8))
    assert count_of(request) == 8
    calls = sides[1].sim.calls("nrt_async_sendrecv_test_request")
    with pytest.raises(NrtMisuse, match="the request was over before"):
        request.test()
    assert sides[1].sim.calls("nrt_async_sendrecv_test_request") == calls


@pytest.mark.parametrize("status", [NrtStatus.TIMEOUT, NrtStatus.COLL_PENDING])
def test_a_request_that_is_to_be_tested_again_is_still_posted(sides, memory, status):
    sending, receiving = connected(sides)
    request = receiving.receive(memory[1], 0, 8)
    sides[1].sim.fault("nrt_async_sendrecv_test_request", status)
    with pytest.raises(NrtRetry):
        request.test()
    assert receiving.num_posted == 1
    count_of(sending.send(memory[0], 0, 8))
    assert count_of(request) == 8


def test_memory_that_was_sent_from_stays_until_the_core_is_closed(sides, memory):
    """The library registers it with the network adapter, and takes that back at the end only."""
    sending, receiving = connected(sides)
    requests = receiving.receive(memory[1], 0, 8), sending.send(memory[0], 0, 8)
    assert [count_of(each) for each in requests] == [8, 8]
    for tensor, side in zip(memory, sides, strict=True):
        tensor.free()
        assert side.sim.calls("nrt_tensor_free") == 0
        with pytest.raises(NrtMisuse):
            tensor.read(0, bytearray(1))
    with pytest.raises(NrtMisuse, match="'kv of P' is used after"):
        sending.send(memory[0], 0, 8)
    sides[0].both.close(P)
    assert [side.sim.calls("nrt_tensor_free") for side in sides] == [1, 0]


def test_after_close_nothing_of_the_core_is_used(sides, memory):
    sending, receiving = connected(sides)
    request = receiving.receive(memory[1], 0, 8)
    count_of(sending.send(memory[0], 0, 8))
    count_of(request)
    sides[0].both.close(P)
    sides[0].both.close(P)
    assert sides[0].sim.calls("nrt_async_sendrecv_close") == 1
    for use in (
        lambda: sending.send(memory[0], 0, 8),
        sending.is_connected,
        lambda: sides[0].both.flush(P),
        lambda: sides[0].both.connect(HERE, D, P),
        lambda: sides[0].both.accept(HERE, D, 1),
    ):
        with pytest.raises(NrtMisuse, match=r"the send and receive of core \d is not open"):
            use()
    sides[0].both.open(P)


def test_a_core_is_opened_once(sides):
    with pytest.raises(NrtMisuse, match="core 0 is open"):
        sides[0].both.open(P)
    assert sides[0].sim.calls("nrt_async_sendrecv_init") == 1


def test_a_core_whose_close_failed_is_lost(sides):
    sides[0].both.open(1)
    sides[0].sim.fault("nrt_async_sendrecv_close", NrtStatus.INVALID)
    with pytest.raises(NrtWorkerError):
        sides[0].both.close(1)
    with pytest.raises(NrtMisuse, match="core 1 is lost since its close failed"):
        sides[0].both.open(1)
    with pytest.raises(NrtWorkerError, match="nrt_async_sendrecv_close: NRT_INVALID"):
        sides[0].both.close(1)
    assert sides[0].sim.calls("nrt_async_sendrecv_close") == 1
    sides[0].both.close(P)
    with pytest.raises(NrtMisuse, match="core 1 is lost since its close failed"):
        sides[0].runtime.close()
    sides[0].runtime.call("nrt_async_sendrecv_close", 1)  # for the simulator it is open
    sides[0].runtime.cores.find(1).end_close()


def test_all_on_one_runtime_share_its_cores(sides):
    another = SendReceive(sides[0].runtime)
    with pytest.raises(NrtMisuse, match="core 0 is open"):
        another.open(P)
    assert sides[0].sim.calls("nrt_async_sendrecv_init") == 1
    another.close(P)
    assert sides[0].sim.calls("nrt_async_sendrecv_close") == 1
    sides[0].both.open(P)


@pytest.mark.parametrize(("call", "state"), [("init", "opened"), ("close", "closed")])
def test_while_a_core_is_opened_or_closed_others_work(sides, call, state):
    """And nobody else opens or closes it meanwhile."""
    both = sides[0].both
    if call == "close":
        both.open(1)
    with held_up(both.runtime.library, f"nrt_async_sendrecv_{call}") as has_come:
        begun = both.open if call == "init" else both.close
        thread = threading.Thread(target=begun, args=(1,))
        thread.start()
        assert has_come.wait(20)
        both.flush(P)
        for use in (both.open, both.close):
            with pytest.raises(NrtMisuse, match=f"core 1 is being {state}"):
                use(1)
        assert thread.is_alive()
    thread.join(20)
    both.close(1)


def test_a_request_is_tested_while_another_is_posted(sides, memory):
    sending, receiving = connected(sides)
    request = receiving.receive(memory[1], 0, 8)
    count_of(sending.send(memory[0], 0, 8))
    more = []
    with held_up(sides[1].runtime.library, "nrt_async_sendrecv_recv_tensor") as has_come:
        thread = threading.Thread(target=lambda: more.append(receiving.receive(memory[1], 8, 8)))
        thread.start()
        assert has_come.wait(20)
        assert count_of(request) == 8
        assert thread.is_alive()
    thread.join(20)
    assert receiving.num_posted == 1
    count_of(sending.send(memory[0], 0, 8))
    assert count_of(more[0]) == 8


def test_what_was_posted_as_ctrl_c_came_counts(sides, memory):
    """The core's close would fail otherwise. Here it never reached the library."""
    sending, _ = connected(sides)

    def interrupted(*_):
        raise KeyboardInterrupt

    with patched_call(sides[0].runtime.library, interrupted), pytest.raises(KeyboardInterrupt):
        sending.send(memory[0], 0, 8)
    with pytest.raises(NrtMisuse, match="1 requests posted"):
        sides[0].both.close(P)
    sending._count(-1)


def test_numbers_are_the_hosts(sides):
    """Core 0 of D's process is core 2 of the host."""
    with pytest.raises(NrtRequestError):
        sides[1].both.open(0)
    sides[1].both.open(2)
    sides[1].both.close(2)


def test_an_open_core_keeps_the_runtime(sides):
    with pytest.raises(NrtMisuse, match="the send and receive of core 0 is open"):
        sides[0].runtime.close()
