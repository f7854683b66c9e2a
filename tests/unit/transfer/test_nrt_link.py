"""A control connection by itself: frames, and what is none."""

import socket
from contextlib import closing

import pytest

from neuron_di.clock import Deadline
from neuron_di.errors import PeerError, PeerGone, PeerTimeout
from neuron_di.transfer.nrt_frames import OFFER, READY, SETUP, Frame, read_frame
from neuron_di.transfer.nrt_link import ControlLink
from neuron_di.transfer.tcp_stream import Stream


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.mark.parametrize(
    "raw",
    [bytes(40), b"NDN1" + bytes(36), Frame(SETUP).pack()[:-1] + b"", b"XXXX" + bytes(36)],
)
def test_what_is_no_frame_ends_the_link(raw):
    ours, theirs = tcp_pair()
    with closing(theirs), closing(ControlLink(Stream(ours, 1.0))) as link:
        theirs.sendall(raw)
        theirs.close()
        with pytest.raises(PeerError):
            link.read(Deadline.after(10.0))


def test_a_frame_is_read_as_it_was_packed():
    frame = Frame(OFFER, 3, 2**64 - 1, 5, 2**63)
    assert read_frame(frame.pack()) == frame


def test_a_link_that_says_nothing_is_read_until_the_deadline():
    ours, theirs = tcp_pair()
    with closing(theirs), closing(ControlLink(Stream(ours, 1.0))) as link:
        with pytest.raises(PeerTimeout):
            link.read(Deadline.after(0.05))
        theirs.sendall(Frame(READY).pack())
        assert link.read(Deadline.after(10.0)) == Frame(READY)
        link.shut()
        link.send(Frame(READY))  # to nobody: it does not fail
        with pytest.raises(PeerGone):
            link.read(Deadline.after(10.0))
