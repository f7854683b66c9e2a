"""By what a device sends and receives: how that is chosen, and what each of the two does alone.

What both do is in test_nrt_engine.py, test_nrt_endings.py and test_nrt_linking.py.
"""

from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from contract import nrt_end
from contract.transfer_pair import send_of
from nrt_kit import (
    DECODE,
    LAYOUT,
    MIXED,
    NUM_BLOCKS,
    PREFILL,
    UNTOUCHED,
    NrtTimes,
    driven_by,
    ended,
    one_end,
    two_ends,
    until,
    used,
)
from stand_in.closed_classes import CompletionToken, NeuronTransferEngine
from test_nrt_endings import QUICK, check_lost, check_moves

from neuron_di import neuron_cores
from neuron_di.errors import ConfigError, LocalProtocolError, PeerError, PeerGone, PeerRefused
from neuron_di.transfer import nrt_by_torch
from neuron_di.transfer import nrt_cores as cores
from neuron_di.transfer.nrt_connections import PROBE_BYTES
from neuron_di.transfer.nrt_link import ControlLink
from neuron_di_bindings.nrt import NrtLibrary, NrtMisuse

BY_TORCH = "by torch-neuronx's classes"
BY_LIBNRT = "by libnrt's send and receive"
DEGREES = [(1, 2), (2, 2), (4, 2), (2, 4)]
FEW = {"settings": {"NRT_SIM_PENDING_MAX": "3"}}
MESSAGES = LAYOUT.num_layers * 2  # of a slot, from one rank to one: a head's keys or values each


@pytest.fixture
def calls(monkeypatch):
    """How many messages each call of the closed engines had."""
    queue, counts = NeuronTransferEngine.queue_transfer_with_token, []

    def counting(engine, tensors, *rest):
        counts.append(len(tensors))
        queue(engine, tensors, *rest)

    monkeypatch.setattr(NeuronTransferEngine, "queue_transfer_with_token", counting)
    return counts


@contextmanager
def torch_pool(**fields):
    made = nrt_end.make_pool(LAYOUT, NUM_BLOCKS, PREFILL, **({"classes": "1"} | fields))
    with closing(made) as pool:
        yield pool


@contextmanager
def driver_of(pool, device=None, *, has_classes=True, has_handles=False):
    """What is chosen for a pool's device, with the closed classes in torch, and handles, or not."""
    device = device or pool.device
    if has_handles:
        both = [with_handle(tensor) for tensor in device.tensors]
        device = replace(device, tensors=both)
    with ExitStack() as stack:
        stack.enter_context(pool.place.environment())
        if has_classes:
            stack.enter_context(pool.place.closed.installed())
        driver = cores.open_driver(device, PROBE_BYTES)
        stack.callback(driver.close)
        yield driver


def with_handle(tensor):
    names = ("num_bytes", "core", "address", "torch_tensor", "read", "write")
    fields = {name: getattr(tensor, name) for name in names}
    return SimpleNamespace(nrt=tensor.handle, **fields)


def why_none(pool, device=None, **fields):
    with pytest.raises(ConfigError) as refusal, driver_of(pool, device, **fields):
        pass
    return refusal.value.message


# Which one.


def test_the_classes_go_before_handles_and_handles_are_for_want_of_classes(caplog):
    with torch_pool() as pool, caplog.at_level("INFO"):
        with driver_of(pool, has_handles=True, has_classes=False) as driver:
            assert driver.how == BY_LIBNRT
        with driver_of(pool, has_handles=True) as driver:
            assert driver.how == BY_TORCH
    said = [each.event_fields for each in caplog.records if each.message == "nrt_opened"]
    assert [each["how"] for each in said] == [BY_LIBNRT, BY_TORCH]
    assert said[0]["instead_of"] == "torch-neuronx registers no NeuronTransferEngine"
    assert said[1]["instead_of"] == ""


def test_an_engine_says_by_what_it_goes():
    for name, how in (("torch", BY_TORCH), ("libnrt", BY_LIBNRT)):
        with driven_by(name), one_end(PREFILL) as end:
            assert end.engine.how == how


def test_without_either_both_reasons_are_told():
    with torch_pool() as pool:
        message = why_none(pool, has_classes=False)
    assert "torch-neuronx registers no NeuronTransferEngine" in message
    assert "12 of 12 KV tensors have no handle" in message
    assert "--transfer shm,tcp" in message


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        ("classes", "CompletionToken"),
        ("ops", "_nrt_async_init_neuron"),
        ("ops", "_nrt_create_recv_communicator"),
        ("ops", "_nrt_test_communicator"),
    ],
)
def test_a_class_that_is_missing_is_named(namespace, name):
    with torch_pool() as pool:
        delattr(getattr(pool.place.closed, namespace), name)
        assert f"torch-neuronx registers no {name}" in why_none(pool)
        with driver_of(pool, has_handles=True) as driver:
            assert driver.how == BY_LIBNRT


def test_an_engine_that_cannot_be_made_is_none():
    def refuse(*_):
        raise RuntimeError("no such thing\nat all")

    with torch_pool() as pool:
        pool.place.closed.classes.NeuronTransferEngine = refuse
        message = why_none(pool)
    assert "NeuronTransferEngine: RuntimeError: no such thing; 12 of 12" in message


def test_a_runtime_without_a_flush_is_not_driven_by_the_classes(monkeypatch):
    """Nobody would know when what came is there."""
    has, flush = NrtLibrary.has, "nrt_async_sendrecv_flush"
    with torch_pool() as pool:
        monkeypatch.setattr(NrtLibrary, "has", lambda of, name: name != flush and has(of, name))
        assert f"{pool.place.path} lacks it" in why_none(pool)


def misused(_):
    raise NrtMisuse("forked")


def test_a_runtime_that_is_not_there_or_tells_no_limits_is_not_driven_by_the_classes(monkeypatch):
    with torch_pool() as pool:
        pool.place.fault("function=nrt_async_sendrecv_get_max_num_pending_request status=1")
        assert "limits of send and receive are unknown" in why_none(pool)
        with monkeypatch.context() as patch:
            patch.setattr(nrt_by_torch.SendReceive, "limits", misused)
            assert "limits of send and receive are unknown: forked" in why_none(pool)
        monkeypatch.setattr(pool.place, "path", "nowhere.so")
        assert "no libnrt can be loaded" in why_none(pool)


def test_cores_with_gaps_are_not_driven_by_the_classes():
    with torch_pool() as pool:
        first = pool.place.first_lnc
        assert "gaps" in why_none(pool, replace(pool.device, lncs=(first, first + 2)))


def test_a_core_that_does_not_open_is_named_with_its_likely_cause(monkeypatch, tmp_path):
    monkeypatch.setattr(neuron_cores, "LOCK_FOLDER", tmp_path)
    with torch_pool() as pool:
        pool.place.fault("function=nrt_async_sendrecv_init call=2 status=1")
        message = why_none(pool)
        assert f"core {pool.device.lncs[1]}: _nrt_async_init_neuron: " in message
        assert "of the same release" in message
        with driver_of(pool) as driver:  # the first one is open, and is not opened again
            assert driver.how == BY_TORCH


def test_memory_for_proofs_that_is_not_there_is_said():
    with torch_pool() as pool:
        pool.place.fault("function=nrt_tensor_allocate status=4")
        assert "no memory for the device's connections: torch.zeros" in why_none(pool)


# What it does.


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), DEGREES)
def test_one_end_may_have_the_classes_and_the_other_libnrt(mixed, prefill_ranks, decode_ranks):
    ranks = {"prefill": {"num_ranks": prefill_ranks}, "decode": {"num_ranks": decode_ranks}}
    with driven_by(mixed), two_ends(**ranks) as two:
        hows = {two.prefill.engine.how, two.decode.engine.how}
        assert hows == {BY_TORCH, BY_LIBNRT}
        for number, num_tokens in enumerate((1, 7, 16)):
            assert two.move([number + 1], [number], num_tokens).error() is None
            came, sent = (
                used(end.blocks[block], num_tokens)
                for end, block in ((two.decode, number), (two.prefill, number + 1))
            )
            assert (came == sent).all()
        assert (two.decode.blocks[NUM_BLOCKS - 1] == UNTOUCHED).all()


@pytest.mark.parametrize("name", ["torch", *MIXED])
@pytest.mark.parametrize("limits", [(3, 128), (128, 3), (2, 3), (4, 1)])
def test_ends_that_may_post_differently_much_never_wait_for_each_other(name, limits):
    """The closed engines do one call after the other, and so do these two ends."""
    prefill, decode = ({"settings": {"NRT_SIM_PENDING_MAX": str(each)}} for each in limits)
    with driven_by(name), two_ends(prefill=prefill, decode=decode) as two:
        outcomes = [two.move([n, (n + 1) % NUM_BLOCKS], [n, (n + 3) % NUM_BLOCKS]) for n in (0, 2)]
        outcomes.append(two.move([4], [4], 1))
        assert [outcome.error() for outcome in outcomes] == [None] * 3
        for source, target in ((0, 0), (1, 3), (2, 2), (3, 5)):
            assert (two.decode.blocks[target] == two.prefill.blocks[source]).all()


@pytest.mark.parametrize("limits", [(1, 1), (2, 3), (8, 128)])
def test_what_is_queued_is_no_more_than_may_be_posted(limits):
    """Engines that post all of it at once are never refused."""
    fields = [
        {"classes": "eager", "settings": {"NRT_SIM_PENDING_MAX": str(each)}} for each in limits
    ]
    with two_ends(prefill=fields[0], decode=fields[1]) as two:
        outcomes = [two.move([n], [n]) for n in range(NUM_BLOCKS)]
        assert [outcome.error() for outcome in outcomes] == [None] * NUM_BLOCKS
        assert (two.decode.blocks == two.prefill.blocks).all()


def test_a_transfer_is_one_call_for_all_cores(calls):
    with driven_by("torch"), two_ends() as two:
        assert calls == [2, 2]  # the proofs, at each end
        assert two.move([1], [2]).error() is None
        assert calls[2:] == [2 * MESSAGES] * 2


def test_a_transfer_larger_than_the_limit_is_several_calls(calls):
    with driven_by("torch"), two_ends(prefill=FEW, decode=FEW) as two:
        del calls[:]
        assert two.move([1, 3], [2, 4]).error() is None
        # Of each core one in a call, so that two calls and the limit of 3 leave room.
        assert calls == [2] * 4 * MESSAGES
        assert (two.decode.blocks[[2, 4]] == two.prefill.blocks[[1, 3]]).all()


def test_the_first_form_of_the_classes_does_as_well():
    fields = {"classes": "2.24"}
    with two_ends(prefill=fields, decode=fields) as two:
        assert two.prefill.engine.how == BY_TORCH
        check_moves(two)


def test_a_worker_that_changes_its_role_has_its_cores_still_open():
    """Nothing closes them, and nobody opens them twice."""
    with driven_by("torch"), two_ends() as two, ExitStack() as stack:
        check_moves(two)
        ends = two.prefill, two.decode
        before = [end.num_calls("init") for end in ends]
        for end in ends:
            end.engine.close()
            end.engine = stack.enter_context(closing(nrt_end.make_engine(end.pool)))
        own, its = two.decode.engine, two.prefill.engine  # who sends now, and who receives
        own.accept(PREFILL, its.local_region(DECODE), LAYOUT)
        its.connect(DECODE, own.local_region(PREFILL), LAYOUT)
        receive = replace(two.receive([5], [0]), memory=two.prefill.pool.memory())
        token = its.post_receive(DECODE, receive)
        sent = own.post_send(PREFILL, send_of(receive))
        assert ended(sent) is None
        assert ended(token) is None
        assert (two.prefill.blocks[0] == two.decode.blocks[5]).all()
        assert [end.num_calls("init") for end in ends] == before


# What goes wrong.


def test_what_cannot_be_queued_takes_the_device_along_and_not_the_peers(monkeypatch):
    """Some of it may be queued. But nothing was agreed on yet."""

    def refuse(*_):
        raise RuntimeError("the queue is full")

    with driven_by("torch"), two_ends(QUICK) as two:
        posted = two.prefill.num_calls("send_tensor")
        receive = two.receive([0], [0])
        monkeypatch.setattr(NeuronTransferEngine, "queue_transfer_with_token", refuse)
        outcome, send = two.post(receive), two.send(receive)
        error = outcome.error()
        assert isinstance(error, PeerGone)
        assert "queue_transfer_with_token: RuntimeError: the queue is full" in error.message
        assert ended(send) is not None
        check_lost(two.decode, "posted", "new process")
        assert two.prefill.num_calls("send_tensor") == posted
        assert two.prefill.pool.lost is None


@pytest.mark.parametrize(
    "fault",
    [
        "function=nrt_async_sendrecv_recv_tensor status=6 sticky",
        "function=nrt_async_sendrecv_test_request status=1203",
    ],
)
def test_a_transfer_that_fails_takes_the_device_along(fault):
    with driven_by("torch"), two_ends(QUICK) as two:
        two.decode.place.fault(fault)
        receive = two.receive([0], [0])
        outcome, send = two.post(receive), two.send(receive)
        error = outcome.error()
        assert isinstance(error, PeerGone)
        assert "is_done: RuntimeError: the transfer failed" in error.message
        assert ended(send) is None or isinstance(ended(send), PeerError)
        check_lost(two.decode, f"{2 * MESSAGES} messages posted", "new process")


def test_a_token_that_is_never_done_takes_both_devices_along(monkeypatch):
    monkeypatch.setattr(CompletionToken, "is_done", lambda _: False)
    with driven_by("torch"), two_ends(QUICK, is_linked=False) as two:
        monkeypatch.undo()
        two.link()
        monkeypatch.setattr(CompletionToken, "is_done", lambda _: False)
        receive = two.receive([0], [0])
        outcome, send = two.post(receive), two.send(receive)
        assert isinstance(outcome.error(), PeerError)
        assert isinstance(ended(send), PeerError)
        for end in (two.prefill, two.decode):
            check_lost(end, "posted", "new process")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("function=nrt_async_sendrecv_accept status=4", "communicator to receive"),
        ("function=nrt_async_sendrecv_test_comm status=1", "_nrt_test_communicator"),
    ],
)
def test_what_cannot_be_connected_is_no_link(fault, words):
    with driven_by("torch"), two_ends(NrtTimes(connect_s=2.0), is_linked=False) as two:
        layout = LAYOUT
        two.prefill.engine.accept(DECODE, two.decode.engine.local_region(PREFILL), layout)
        two.decode.place.fault(fault)
        with pytest.raises(PeerGone, match=words):
            two.decode.engine.connect(PREFILL, two.prefill.engine.local_region(DECODE), layout)
        two.decode.pool.is_stuck = two.prefill.pool.is_stuck = True


@pytest.mark.parametrize("name", ["torch", "libnrt"])
def test_bytes_that_are_not_flushed_prove_nothing(name, monkeypatch):
    """The simulator shows what was received after a flush only, as a device may."""
    with driven_by(name), two_ends(is_linked=False) as two:
        two.decode.engine._poster._flush = lambda _: None
        with pytest.raises(PeerRefused, match="other cores"):
            two.link()


@pytest.mark.parametrize("name", ["torch", "libnrt"])
def test_a_bug_behind_a_post_leaves_the_slots_taken_until_the_device_is_lost(name, monkeypatch):
    """Else another request would have them while the device may still write there."""
    with driven_by(name), two_ends(QUICK) as two:
        two.prefill.place.fault("function=sendrecv.send status=5 sticky")  # nothing ever comes
        receiver, say = two.decode.engine._connected[PREFILL].receiver, ControlLink.send

        def failing(link, frame):
            say(link, frame)
            if link is receiver.exchange.link:
                raise ValueError("a bug")

        receive = two.receive([1], [1])
        send = two.send(receive)
        until(lambda: receiver._offers)
        monkeypatch.setattr(ControlLink, "send", failing)
        outcome = two.post(receive)  # its offer is there: it is posted, and then the bug comes
        lost_by_then = []
        outcome.token.on_done(lambda _: lost_by_then.append(two.decode.pool.lost))
        assert isinstance(outcome.error(), LocalProtocolError)
        assert lost_by_then == [two.decode.pool.lost]
        assert two.decode.pool.lost is not None
        assert ended(send) is not None


def test_a_communicator_is_asked_no_more_once_it_is_connected():
    asked = []
    closed = SimpleNamespace(communicator=lambda *_: 7, test=lambda n: asked.append(n) or True)
    communicator = nrt_by_torch.TorchCommunicator(closed, "send", "127.0.0.1", 3, 5)
    assert not communicator.was_connected
    assert [communicator.is_connected() for _ in range(3)] == [True] * 3
    assert asked == [7]
    assert communicator.was_connected
