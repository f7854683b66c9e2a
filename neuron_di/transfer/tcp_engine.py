"""The transfer engine of any two hosts: prefill sends over TCP what decode asks for.

    post_receive  asks on the data connection; the bytes go from socket to memory, no copy between
    post_send     lets the peer have its runs; they go from the pool to the socket

Both must have been called, in any order; the tag says which belong together. A connection that
breaks or stalls ends all transfers on it, and connect() makes a new one.

Next: neuron_di/transfer/tcp_receiver.py
"""

import itertools
import secrets
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

from neuron_di.clock import Deadline
from neuron_di.config import TransferOptions
from neuron_di.errors import NeuronDiError, PeerGone, PeerRefused, PeerTimeout
from neuron_di.kv import KvLayout, KvPool, Memory
from neuron_di.obs import LimitedLogger
from neuron_di.transfer.copy_thread import CopyThread
from neuron_di.transfer.data_address import data_address
from neuron_di.transfer.run_bounds import OwnMemories
from neuron_di.transfer.tcp_claims import ClaimWatch
from neuron_di.transfer.tcp_listener import Arrival, TcpListener, prove, why_not_served
from neuron_di.transfer.tcp_proof import Hello, pair_secret
from neuron_di.transfer.tcp_receiver import TcpReceiver
from neuron_di.transfer.tcp_sender import TcpSender
from neuron_di.transfer.tcp_stream import Stream, dial_stream, stream_of
from neuron_di.transfer.tcp_tls import latest_of, open_tls
from neuron_di.transfer.transfer_engine import MOVING_S_MAX, Receive, Send, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import Region, TcpRegion

_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpTimes:
    """How long an engine waits, in seconds."""

    proof_s: float = 5.0  # for each connection and its proof
    silence_s: float = 5.0  # for the next byte of what is on its way
    unclaimed_s: float = 30.0  # for a posted send to be asked for
    send_s: float = MOVING_S_MAX  # for all of a posted send to be read, whoever reads it
    close_s: float = 5.0  # for what is posted, at close()


@dataclass(frozen=True, slots=True)
class _Accepted:
    secret: bytes
    sender: TcpSender


@dataclass(frozen=True, slots=True)
class _Connected:
    receiver: TcpReceiver
    block_bytes: int  # the peer's
    attempt: int


class TcpEngine:
    """Owns a port, once a decode worker was accepted, and the connections to its peers.

    `host` is where it listens unless the options say another address; `announced_host`, an IP
    address, where its peers find it then. `why_refused` says of an address why nobody connects
    there. ConfigError where the options' host is none, or their certificates do not serve.
    """

    name = "tcp"
    is_one_sided = False

    def __init__(
        self,
        pool: KvPool,
        options: TransferOptions | None = None,
        *,
        host: str = "127.0.0.1",
        announced_host: str | None = None,
        why_refused: Callable[[str, int], str] = lambda _host, _port: "",
        times: TcpTimes | None = None,
    ) -> None:
        self._options = options or TransferOptions()
        self._host, self._announced_host = data_address(self._options, host, announced_host)
        self._why_refused = why_refused
        self._times = times or TcpTimes()
        self._tls = open_tls(self._options)
        self._incarnation = pool.incarnation
        self._pool = pool
        self._memory = pool.memory()
        self._own = OwnMemories(self._memory)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._attempts = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._listener: TcpListener | None = None
        self._claims: ClaimWatch | None = None
        self._accepted: dict[Incarnation, _Accepted] = {}
        self._connected: dict[Incarnation, _Connected] = {}
        self._ending: list[TcpReceiver] = []  # their threads may still run
        self._log_lock = threading.Lock()
        self._refusals = LimitedLogger(__name__)
        self._token_thread = CopyThread("kv-tcp-done")

    def local_region(self, peer: Incarnation) -> Region:
        """With a secret for this peer, which is of no use to another."""
        listener = self._listener
        return TcpRegion(
            host=self._announced_host,
            port=listener.port if listener is not None else 0,
            secret=pair_secret(self._secret, peer),
            num_streams=self._options.transfer_streams,
            is_tls=self._tls is not None,
        )

    def register(self, memory: Memory) -> None:
        self._own.add(memory)

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Dial, prove and be proved, on every stream. Replaces an earlier connection."""
        if not isinstance(region, TcpRegion) or not region.port:
            raise PeerRefused("it has no data port")
        if region.is_tls != (self._tls is not None):
            raise PeerRefused("one end of the data connections has TLS, the other has not")
        if reason := self._why_refused(region.host, region.port):
            raise PeerRefused(f"its data port is where nobody connects: {reason}")
        num_streams = min(self._options.transfer_streams, region.num_streams)
        attempt = next(self._attempts)
        streams: list[Stream] = []
        try:
            for index in range(num_streams):
                hello = Hello(
                    attempt=attempt,
                    index=index,
                    num_streams=num_streams,
                    decode=self._incarnation,
                    prefill=peer,
                )
                stream, pool_bytes = self._dial(region, hello)
                streams.append(stream)
            if pool_bytes % layout.block_bytes:
                raise PeerRefused("its pool is not one of blocks of this layout")
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        receiver = TcpReceiver(peer, streams, self._own, pool_bytes, self._token_thread)
        self._adopt(peer, _Connected(receiver, layout.block_bytes, attempt))

    def _dial(self, region: TcpRegion, hello: Hello) -> tuple[Stream, int]:
        try:
            return dial_stream(
                region,
                hello,
                own_secret=pair_secret(self._secret, hello.prefill),
                tls=latest_of(self._tls),
                silence_s=self._times.silence_s,
                # Each has its time: many to a host that is far away take longer, and it is there,
                # as the first one shows.
                deadline=Deadline.after(self._times.proof_s),
            )
        except BaseException as error:
            raise _why_not(error) from None

    def _adopt(self, peer: Incarnation, connected: _Connected) -> None:
        """The latest attempt stays, which is the one that the peer knows, whichever comes last."""
        error: PeerGone | None = None
        with self._lock:
            before = self._connected.get(peer)
            if self._is_closed:
                error = PeerGone("this worker's data connections are closed")
            elif before is not None and before.attempt > connected.attempt:
                error = PeerGone("connected anew")
            else:
                self._connected[peer] = connected
        if error is not None:
            self._end(connected.receiver, error)
            raise error
        if before is not None:
            self._end(before.receiver, PeerGone("connected anew"))

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:  # noqa: ARG002
        """Let it connect with its secret, from any address. The first peer opens the port."""
        if not isinstance(region, TcpRegion):
            raise PeerRefused("it offers no data connection")
        if region.is_tls != (self._tls is not None):
            raise PeerRefused("one end of the data connections has TLS, the other has not")
        with self._lock:
            if self._is_closed:
                raise PeerGone("this worker's data connections are closed")
            if self._listener is None:
                self._listener = TcpListener(self._host, self._options.transfer_port, self._serve)
            known = self._accepted.get(peer)
            if self._claims is None:
                self._claims = ClaimWatch()
            if known is None or known.secret != region.secret:
                sender = TcpSender(self._pool, self._times.unclaimed_s, self._times.send_s)
                self._accepted[peer] = _Accepted(region.secret, sender)
                self._claims.add(sender)
        if known is not None and known.secret != region.secret:
            self._end_sender(known.sender, PeerGone("it has another secret now"))

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:
        """The token ends, at the latest, when nobody asks for the bytes in time."""
        accepted = self._accepted.get(peer)
        if accepted is not None:
            token = accepted.sender.post(send)
            if self._claims is not None:
                self._claims.look()
            return token
        return TransferToken.over(PeerGone("no such decode worker was accepted"))

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        connected = self._connected.get(peer)
        if connected is not None:
            return connected.receiver.post(receive, connected.block_bytes)
        return TransferToken.over(PeerGone("no connection to the prefill worker's pool"))

    def cancel(self, peer: Incarnation, tag: int) -> None:
        """At once where no byte of it is being written."""
        connected = self._connected.get(peer)
        if connected is not None:
            connected.receiver.cancel(tag)

    def fence(self, peer: Incarnation) -> None:
        """Nothing to do: this processor wrote the bytes that it will read."""

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:  # noqa: ARG002
        """The prefill worker keeps a send's blocks until all of them are sent."""
        return None

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:  # noqa: ARG002
        return None

    def disconnect(self, peer: Incarnation) -> None:
        error = PeerGone("the peer was disconnected")
        with self._lock:
            connected = self._connected.pop(peer, None)
            accepted = self._accepted.pop(peer, None)
        if connected is not None:
            self._end(connected.receiver, error)
        if accepted is not None:
            self._end_sender(accepted.sender, error)

    def close(self) -> None:
        deadline = Deadline.after(self._times.close_s)
        with self._lock:
            self._is_closed = True
            receivers = [connected.receiver for connected in self._connected.values()]
            senders = [accepted.sender for accepted in self._accepted.values()]
            peers = {*self._connected, *self._accepted}
        for receiver in receivers:
            receiver.wait_idle(deadline)
        for sender in senders:
            sender.wait_idle(deadline)
        for peer in peers:
            self.disconnect(peer)
        # What is shut ends at once: this is only for a thread that gets no processor.
        deadline = Deadline.after(self._times.close_s)
        for receiver in self._ending:
            receiver.join(deadline)
        if self._listener is not None:
            self._listener.close(deadline)
        self._token_thread.end()
        self._token_thread.join(deadline.remaining_s())
        if self._claims is not None:
            self._claims.end()
            self._claims.join(deadline)

    def _end_sender(self, sender: TcpSender, error: NeuronDiError) -> None:
        if self._claims is not None:
            self._claims.remove(sender)
        sender.fail(error)

    def _end(self, receiver: TcpReceiver, error: NeuronDiError) -> None:
        receiver.fail(error)
        with self._lock:
            self._ending = [each for each in self._ending if each.is_running]
            self._ending.append(receiver)

    def _serve(self, arrival: Arrival) -> None:
        """One connection at the data port, on its own thread."""
        deadline = Deadline.after(self._times.proof_s)
        try:
            hello, welcome = prove(
                arrival,
                self._incarnation,
                self._secrets_of,
                self._memory.num_bytes,
                tls=latest_of(self._tls),
                silence_s=self._times.silence_s,
                deadline=deadline,
            )
            accepted = self._accepted.get(hello.decode)
            if accepted is None:
                raise PeerGone("a worker at the data port was disconnected")
        except (OSError, NeuronDiError) as error:
            with self._log_lock:  # of its own: the event loop waits for the other one
                self._refusals.warning("data_connection_refused", reason=why_not_served(error))
            return
        arrival.proved()
        stream = stream_of(arrival.sock, self._times.silence_s)
        accepted.sender.serve(stream, hello.attempt, hello.num_streams, welcome)

    def _secrets_of(self, peer: Incarnation) -> tuple[bytes, bytes] | None:
        accepted = self._accepted.get(peer)
        if accepted is None:
            return None
        return pair_secret(self._secret, peer), accepted.secret


def _why_not(error: BaseException) -> BaseException:
    match error:
        case NeuronDiError():
            return error
        case TimeoutError():
            return PeerTimeout("its data port does not answer")
        case ssl.SSLError():
            words = error.strerror or error
            return PeerGone(f"TLS with its data port failed ({words}); its log may say more")
        case OSError():
            return PeerGone(f"its data port cannot be reached: {error.strerror or error}")
        case _:
            return error
