"""Ends of sends and connections over TCP that are easily lost: bugs, and attempts that overlap."""

import contextlib
import threading

import pytest
from tcp_kit import DECODE, LAYOUT, PREFILL, runs_of, tcp_pair

from neuron_di.errors import PeerGone

WAIT_S = 20.0


class FailingDevice:
    """Stands for a DevicePool."""

    def __init__(self, fails_at):
        self._fails_at = fails_at

    def to_host(self, block_ids, num_tokens):
        if self._fails_at == "to_host":
            raise MemoryError
        return [1]

    def drop_mirror(self, block_ids):
        if self._fails_at == "drop_mirror":
            raise MemoryError


@pytest.mark.parametrize("fails_at", ["nowhere", "to_host", "drop_mirror"])
def test_a_send_ends_whatever_its_device_does(fails_at):
    with tcp_pair() as pair:
        sender = pair.prefill._accepted[DECODE].sender
        sender._device = FailingDevice(fails_at)
        receive = pair.receive_of(runs_of([0], [4096], [4096]))
        received, sent = threading.Event(), threading.Event()
        pair.receive(receive).on_done(lambda _: received.set())
        pair.send(receive).on_done(lambda _: sent.set())
        assert received.wait(WAIT_S)
        pair.decode.disconnect(PREFILL)
        pair.prefill.disconnect(DECODE)
        is_ended = sent.wait(WAIT_S)
        sender._outgoing.clear()  # else closing waits for it
        assert is_ended


def test_of_two_connections_the_later_attempt_stays_whichever_is_made_last():
    with tcp_pair(is_connected=False) as pair:
        pair.prefill.accept(DECODE, pair.decode.local_region(PREFILL), LAYOUT)
        region = pair.prefill.local_region(DECODE)
        adopt, dialled, go_on = pair.decode._adopt, threading.Event(), threading.Event()

        def connect():
            with contextlib.suppress(PeerGone):
                pair.decode.connect(PREFILL, region, LAYOUT)

        first = threading.Thread(target=connect)

        def adopt_late(*arguments):
            if threading.current_thread() is first:
                dialled.set()
                assert go_on.wait(WAIT_S)
            return adopt(*arguments)

        pair.decode._adopt = adopt_late
        first.start()
        assert dialled.wait(WAIT_S)
        pair.decode.connect(PREFILL, region, LAYOUT)
        assert pair.moves()
        go_on.set()
        first.join(WAIT_S)
        pair.received[:] = 0xEE
        assert pair.moves()
