"""A decode worker that is proved, and then says what it should not, or nothing."""

from contextlib import closing, contextmanager

import pytest
from nrt_kit import DECODE, DRIVERS, LAYOUT, PREFILL, NrtTimes, driven_by, two_ends

from neuron_di.clock import Deadline
from neuron_di.errors import PeerError, PeerGone
from neuron_di.transfer.nrt_frames import ACCEPT, OFFER, READY, REFUSE, Frame
from neuron_di.transfer.nrt_link import ControlLink
from neuron_di.transfer.tcp_proof import Hello
from neuron_di.transfer.tcp_stream import dial_stream


@pytest.fixture(autouse=True, params=DRIVERS)
def driver(request):
    """What both ends send and receive by."""
    with driven_by(request.param) as name:
        yield name


@pytest.fixture
def two():
    with two_ends(is_linked=False) as two:
        yield two


@contextmanager
def hostile_decode(two):
    """A proved decode worker that then says what it likes."""
    two.prefill.engine.accept(DECODE, two.decode.engine.local_region(PREFILL), LAYOUT)
    region = two.prefill.engine.local_region(DECODE)
    own = two.decode.engine.local_region(PREFILL)
    hello = Hello(attempt=1, index=0, num_streams=1, decode=DECODE, prefill=PREFILL)
    stream, _ = dial_stream(
        region,
        hello,
        own_secret=own.secret,
        tls=None,
        silence_s=5.0,
        deadline=Deadline.after(5.0),
    )
    with closing(ControlLink(stream)) as link:
        yield link


def test_who_sees_that_its_link_was_cut_may_make_another_at_once(two, monkeypatch):
    links, shut, linking = two.prefill.engine._links, ControlLink.shut, []

    def noting(link):
        linking.append(set(links._linking))  # others are refused meanwhile
        shut(link)

    monkeypatch.setattr(ControlLink, "shut", noting)
    with hostile_decode(two) as link:
        link.send(Frame(READY))
        with pytest.raises(PeerError):
            link.read(Deadline.after(10.0))
    assert linking[0] == set()


@pytest.mark.parametrize("kind", [OFFER, ACCEPT, REFUSE, READY])
def test_a_decode_worker_that_speaks_out_of_turn_is_cut_off(two, kind):
    with hostile_decode(two) as link:
        link.send(Frame(kind))
        with pytest.raises(PeerError):
            link.read(Deadline.after(10.0))
    two.prefill.engine.disconnect(DECODE)
    two.link()
    assert two.move([3, 1], [2, 5]).error() is None
    assert (two.decode.blocks[[2, 5]] == two.prefill.blocks[[3, 1]]).all()


def test_a_decode_worker_that_says_nothing_is_cut_off():
    with (
        two_ends(NrtTimes(connect_s=0.3), is_linked=False) as two,
        hostile_decode(two) as link,
        pytest.raises(PeerGone),
    ):
        link.read(Deadline.after(10.0))
