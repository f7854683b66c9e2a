"""What happens on a control connection before KV moves: the device's connections, and their proof.

Both ends know each other by then. What is shown is that each of the device's connections leads from
the core that the plan means to the core that it means: a nonce of the decode worker's comes through
all of them.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from neuron_di.clock import Deadline
from neuron_di.errors import NeuronDiError, PeerGone, PeerRefused, PeerTimeout, RemoteProtocolError
from neuron_di.transfer.nrt_channel import Movement
from neuron_di.transfer.nrt_connections import (
    PROBE_BYTES,
    Connections,
    ConnectionSet,
    Pairs,
    Place,
)
from neuron_di.transfer.nrt_exchange import Exchange
from neuron_di.transfer.nrt_frames import CONNECTED, READY, SETUP, Frame
from neuron_di.transfer.nrt_link import ControlLink
from neuron_di.transfer.nrt_poster import Poster
from neuron_di.types import Incarnation
from neuron_di_bindings.nrt import NrtError, NrtMisuse

MakeExchange = Callable[[ControlLink, ConnectionSet], Exchange]

_NONCE_BITS = 64


class Handshake:
    """One end's, for one link. Blocks, until the deadline, and for a proof `proof_s` at least.

    `peer` is at `host`. Whatever fails is a PeerError, and the link is the caller's to close.
    """

    def __init__(
        self,
        link: ControlLink,
        connections: Connections,
        poster: Poster,
        make_exchange: MakeExchange,
        *,
        peer: Incarnation,
        host: str,
        deadline: Deadline,
        proof_s: float,
    ) -> None:
        self._link = link
        self._connections = connections
        self._poster = poster
        self._make_exchange = make_exchange
        self._peer = peer
        self._host = host
        self._deadline = deadline
        self._proof_s = proof_s

    def as_decode(self, pairs: Pairs) -> Exchange:
        """READY is said and heard: what is posted at the other end from now on finds this one."""
        own_epoch = self._connections.epoch_of(self._peer, "receive", self._host, pairs)
        nonce = secrets.randbits(_NONCE_BITS), secrets.randbits(_NONCE_BITS)
        self._link.send(Frame(SETUP, own_epoch, tag=nonce[0], digest=nonce[1]))
        epoch = self._read(SETUP).number
        if not epoch:
            raise RemoteProtocolError("a prefill worker named no connections")
        wanted = self._connections.take(self._peer, "receive", self._host, epoch, pairs)
        self._connections.connect(wanted, self._deadline, self._link.has_ended)
        self._read(CONNECTED)
        exchange = self._make_exchange(self._link, wanted)
        with self._ending_with(exchange):
            self._extend()
            wait = self._post_probes(exchange, wanted)
            self._link.send(Frame(CONNECTED))
            wait()
            for place in wanted.places:
                expected = _probe_bytes(nonce, epoch, place.peer_lnc, place.lnc)
                if self._probe_at(place) != expected:
                    wanted.is_broken = True
                    raise PeerRefused("its device's connections lead to other cores")
            self._link.send(Frame(READY))
            self._read(READY)
        return exchange

    def as_prefill(self, pairs: Pairs) -> Exchange:
        """All but the last READY, which is the caller's to say."""
        asked = self._read(SETUP)
        nonce = asked.tag, asked.digest
        epoch = self._connections.agree(self._peer, "send", self._host, pairs, asked.number)
        wanted = self._connections.take(self._peer, "send", self._host, epoch, pairs)
        self._link.send(Frame(SETUP, epoch))
        self._connections.connect(wanted, self._deadline, self._link.has_ended)
        for place in wanted.places:
            content = _probe_bytes(nonce, epoch, place.lnc, place.peer_lnc)
            self._connections.probe_of(place).write(place.probe_offset, content)
        self._link.send(Frame(CONNECTED))
        self._extend()
        self._read(CONNECTED)  # its receives are posted: the sends must not stay away
        exchange = self._make_exchange(self._link, wanted)
        with self._ending_with(exchange):
            self._post_probes(exchange, wanted)()
            self._read(READY)
        return exchange

    def _extend(self) -> None:
        """From here on giving up costs the devices' connections: there is time for the proof,
        however late it is."""
        self._deadline = Deadline(max(self._deadline.at_s, Deadline.after(self._proof_s).at_s))

    def _read(self, kind: int) -> Frame:
        frame = self._link.read(self._deadline)
        if frame.kind != kind:
            raise RemoteProtocolError("a peer's device says things out of turn")
        return frame

    @contextmanager
    def _ending_with(self, exchange: Exchange) -> Iterator[None]:
        """Where the block fails, the exchange ends, and waits for nothing."""
        try:
            yield
        except BaseException as error:
            known = error if isinstance(error, NeuronDiError) else PeerGone("connecting failed")
            self._poster.call(lambda: exchange.abandon(known))
            raise

    def _post_probes(self, exchange: Exchange, wanted: ConnectionSet) -> Callable[[], None]:
        """Post a message on each of the channels. What is returned waits until all are through."""
        posted, ended = threading.Event(), threading.Event()
        outcome: list[NeuronDiError | None] = []

        def over(movement: Movement) -> None:
            outcome.append(movement.error)
            ended.set()

        def post() -> None:
            exchange.begin_probe(probes, over)
            posted.set()

        def wait() -> None:
            if not ended.wait(self._deadline.remaining_s()):
                raise PeerTimeout("nothing came through its device's connections in time")
            if outcome[0] is not None:
                raise outcome[0]

        probes = [self._connections.probe_of(place).tensor for place in wanted.places]
        if not self._poster.call(post):
            raise PeerGone("this worker's transfer engine is closed")
        if not posted.wait(self._deadline.remaining_s()):
            raise PeerTimeout("this worker's device is busy")
        return wait

    def _probe_at(self, place: Place) -> bytes:
        try:
            return self._connections.probe_of(place).read(place.probe_offset, PROBE_BYTES)
        except (NrtError, NrtMisuse) as error:
            raise PeerGone(f"what came through the device cannot be read: {error}") from None


def _probe_bytes(nonce: tuple[int, int], epoch: int, prefill_lnc: int, decode_lnc: int) -> bytes:
    text = f"neuron-di nrt probe {nonce[0]} {nonce[1]} {epoch} {prefill_lnc} {decode_lnc}"
    return hashlib.sha256(text.encode()).digest()
