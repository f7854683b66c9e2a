"""Which transfer engine moves KV between this worker and each of its peers, and why that one.

    both say what they have      KvMapInit, KvMap: an offer per engine, the preferred first
    decode tries them in turn    the first whose connection proves itself is the lane
    a lane that fails            its link breaks; for a while it is tried after all others
    after a fallback             a second link tries those that go before it again, and later each
                                 time; once one of them works it takes the place of the first

Every link has one lane. It is chosen by the decode worker, which names it in each Pull.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from neuron_di.clock import Deadline, now_s
from neuron_di.config import HandOverOptions
from neuron_di.errors import (
    LocalProtocolError,
    NeuronDiError,
    PeerError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.kv import KvLayout, Memory
from neuron_di.obs import LimitedLogger
from neuron_di.transfer.transfer_engine import Receive, Send, TransferEngine, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import Offer

SUSPECTED_S = 60.0  # how long a lane that failed is tried after all others
SUSPECTS_MAX = 1024
RETRY_S = 60.0  # from a fallback to the next look at what goes before it; twice as long each time
RETRY_S_MAX = 3600.0  # so that one that proves itself and then stalls does so seldom
THREADS_MAX = 8  # peers that are connected or accepted at once; a dead one may take 10 s
REASON_CHARS_MAX = 600  # of why a lane is what it is
# Measured: where bytes take their time. Over shared memory a whole request is copied faster than
# pieces are announced.
STREAMED_LANES = frozenset({"tcp", "nixl"})
# Nothing moves, or not into landing memory.
UNSTREAMED_LANES = frozenset({"handover", "cuda_ipc", "nixl_neuron", "nrt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A connection of this decode worker to one peer's KV.

    `reason` has a word on each engine, for operators; `verdicts` says the same in codes, for
    anybody.
    """

    peer: Incarnation
    engine: TransferEngine
    reason: str
    verdicts: str = ""
    connect_s: float
    is_fallback: bool = False  # an engine that goes before it failed

    @property
    def name(self) -> str:
        return self.engine.name

    def post_receive(self, receive: Receive) -> TransferToken:
        return self.engine.post_receive(self.peer, receive)

    def cancel(self, tag: int) -> None:
        self.engine.cancel(self.peer, tag)

    def fence(self) -> None:
        self.engine.fence(self.peer)

    def commit(self, receive: Receive) -> NeuronDiError | None:
        return self.engine.commit(self.peer, receive)

    def abandon(self, receive: Receive) -> NeuronDiError | None:
        return self.engine.abandon(self.peer, receive)


class LaneSet:
    """A worker's transfer engines, the preferred first. Owns them. Thread-safe.

    `threads` are for connect() and accept(): who waits there for a dead peer is in nobody's way
    but of those that connect, too. `lacking` has those that would be preferred to them, were they
    not missing here, and why.
    """

    def __init__(
        self, engines: Sequence[TransferEngine], lacking: Mapping[str, str] | None = None
    ) -> None:
        assert engines, "a worker with peers moves KV somehow"
        self.engines = tuple(engines)
        self._lacking = dict(lacking or {})
        self._by_name = {engine.name: engine for engine in engines}
        assert len(self._by_name) == len(engines), "two engines have one name"
        self.threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="lanes")
        self._lock = threading.Lock()
        self._log = LimitedLogger(__name__)  # peers come back as often as they like; under the lock
        self._accepted: dict[Incarnation, frozenset[str]] = {}
        self._registered: set[tuple[str, Memory]] = set()
        # Lanes that failed: until when that counts, and why.
        self._suspects: OrderedDict[tuple[Incarnation, str], tuple[Deadline, str]] = OrderedDict()
        # Peers whose lane is a fallback, or was: when to try again, and how long that was put off.
        self._retries: OrderedDict[Incarnation, tuple[Deadline, float]] = OrderedDict()

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def offers(self, peer: Incarnation) -> list[Offer]:
        """Decode side: how this peer reaches this worker's pool, over all engines there are."""
        return [Offer.of(engine.name, engine.local_region(peer)) for engine in self.engines]

    def accepted_offers(self, peer: Incarnation) -> list[Offer]:
        """Prefill side: as offers(), over the engines that this peer may use."""
        names = self._accepted.get(peer, frozenset())
        return [offer for offer in self.offers(peer) if offer.engine in names]

    def register(self, memory: Memory) -> None:
        """Further memory that receives will go to, until close(). May block.

        Where that fails it may be called again: no engine is told twice.
        """
        for engine in self.engines:
            if (engine.name, memory) not in self._registered:
                engine.register(memory)
                self._registered.add((engine.name, memory))

    def connect(self, peer: Incarnation, offers: Sequence[Offer], layout: KvLayout) -> Lane:
        """Decode side: the first engine that both have and that works, tried in order.

        May block. The last engine's error, with a word on each, when none works; PeerRefused when
        they have none in common.
        """
        start_s = now_s()
        offered = {offer.engine: offer for offer in offers}
        words: dict[str, str] = {}
        suspected = [engine for engine in self.engines if self._why_suspected(peer, engine)]
        for engine in suspected:
            words[engine.name] = f"failed: {self._why_suspected(peer, engine)}"
        verdicts = {engine.name: "failed" for engine in suspected}
        failed = set(verdicts)
        words |= {name: reason[: REASON_CHARS_MAX // 4] for name, reason in self._lacking.items()}
        verdicts |= dict.fromkeys(self._lacking, "not_available")
        failure: NeuronDiError | None = None
        for engine in [*(e for e in self.engines if e not in suspected), *suspected]:
            name = engine.name
            if (offer := offered.get(name)) is None:
                words[name], verdicts[name] = "not offered by the peer", "not_offered"
                continue
            try:
                engine.connect(peer, offer.read(), layout)
            except NeuronDiError as error:
                words[name], verdicts[name] = error.message[:REASON_CHARS_MAX], error.code
                failure = error if words[name] == error.message else type(error)(words[name])
                # Refused: these two never had it in common, say because they are on two hosts.
                if not isinstance(error, PeerRefused):
                    failed.add(name)
            except Exception as bug:  # of one engine: the others may do
                with self._lock:
                    self._log.exception("lane_failed", lane=name)
                failed.add(name)
                failure = LocalProtocolError(f"connecting failed: {type(bug).__name__}")
                words[name], verdicts[name] = failure.message, failure.code
            else:
                how = getattr(engine, "how", "")  # of an engine that knows more ways than one
                words[name], verdicts[name] = f"chosen, {how}" if how else "chosen", "chosen"
                lane = Lane(
                    peer=peer,
                    engine=engine,
                    reason=self._reason(words),
                    verdicts=self._reason(verdicts),
                    connect_s=now_s() - start_s,
                    is_fallback=any(each.name in failed for each in self._before(engine)),
                )
                with self._lock:
                    self._log.info("lane_chosen", lane=name, reason=lane.reason)
                    if lane.is_fallback:
                        self._put_off(peer)
                return lane
        if failure is None:
            raise PeerRefused(f"no transfer engine in common: {self._reason(words)}")
        if len(self.engines) > 1:
            failure = type(failure)(self._reason(words))
        raise failure

    def better_than(self, lane: Lane) -> "LaneSet | None":
        """These lanes without `lane` and those behind it, for a link that tries them anew.

        The lane itself stays as it is. None: it is no fallback, or it is not the time yet.
        """
        peer, before = lane.peer, self._before(lane.engine)
        if not lane.is_fallback or any(self._why_suspected(peer, each) for each in before):
            return None
        with self._lock:
            due, _ = self._retries.get(peer, (None, 0.0))
            if due is None or due.has_passed():
                self._put_off(peer)
            if due is None or not due.has_passed():
                return None
        better = copy.copy(self)  # what it learns is known here
        better.engines = before
        return better

    def _put_off(self, peer: Incarnation) -> None:
        """Try no lane before a fallback for a while. Under the lock."""
        _, wait_s = self._retries.get(peer, (None, 0.0))
        wait_s = min(max(RETRY_S, 2 * wait_s), RETRY_S_MAX)
        self._retries[peer] = (Deadline.after(wait_s), wait_s)
        self._retries.move_to_end(peer)
        if len(self._retries) > SUSPECTS_MAX:
            self._retries.popitem(last=False)

    def accept(self, peer: Incarnation, offers: Sequence[Offer], layout: KvLayout) -> None:
        """Prefill side: prepare the engines that both have. May block.

        The last engine's error where none could be prepared; PeerRefused: they have none in common.
        """
        accepted: set[str] = set()
        failure: Exception = PeerRefused("no transfer engine in common")
        for offer in offers:
            engine = self._by_name.get(offer.engine)
            if engine is None or engine.name in accepted:
                continue
            try:
                engine.accept(peer, offer.read(), layout)
            except NeuronDiError as error:
                failure = error
                reason = error.message[:REASON_CHARS_MAX]
                with self._lock:
                    tell = self._log.info if isinstance(error, PeerError) else self._log.warning
                    tell("lane_not_accepted", lane=engine.name, reason=reason)
            except Exception as bug:  # of one engine: the others may do
                failure = bug
                with self._lock:
                    self._log.exception("lane_failed", lane=engine.name)
            else:
                accepted.add(engine.name)
        if not accepted:
            raise failure
        with self._lock:
            self._accepted[peer] = self._accepted.get(peer, frozenset()) | accepted

    def post_send(self, peer: Incarnation, name: str, send: Send) -> TransferToken:
        """Prefill side, on Pull. RemoteProtocolError: not an engine that this peer may name."""
        self.check_accepted(peer, name)
        return self._by_name[name].post_send(peer, send)

    def check_accepted(self, peer: Incarnation, name: str) -> None:
        """RemoteProtocolError where it was not prepared for this peer."""
        if name not in self._accepted.get(peer, frozenset()):
            raise RemoteProtocolError(f"the transfer engine {name!r} was not agreed on")

    def suspect(self, lane: Lane, error: NeuronDiError) -> None:
        """A transfer failed as transfers of a broken lane do: let others go before it."""
        with self._lock:
            reason = error.message[:REASON_CHARS_MAX]
            self._suspects[lane.peer, lane.name] = (Deadline.after(SUSPECTED_S), reason)
            self._suspects.move_to_end((lane.peer, lane.name))
            if len(self._suspects) > SUSPECTS_MAX:
                self._suspects.popitem(last=False)

    def disconnect(self, peer: Incarnation, but: Collection[str] = ()) -> None:
        """Forget a peer, on whichever engine but those of these names. Unknown ones are ignored.

        How long a better lane is put off stays known: its failing is what may have ended the link.
        """
        if not but:
            with self._lock:
                self._accepted.pop(peer, None)
        for engine in self.engines:
            if engine.name not in but:
                engine.disconnect(peer)

    def close(self) -> None:
        """End all engines after the transfers that were posted. Blocks until then."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        with ExitStack() as stack:  # each of them, though another should fail
            for engine in reversed(self.engines):
                stack.callback(engine.close)

    def _before(self, engine: TransferEngine) -> tuple[TransferEngine, ...]:
        return self.engines[: self.engines.index(engine)]

    def _why_suspected(self, peer: Incarnation, engine: TransferEngine) -> str:
        """Empty where it is not."""
        with self._lock:
            until, reason = self._suspects.get((peer, engine.name), (None, ""))
            if until is not None and until.has_passed():
                del self._suspects[peer, engine.name]
                return ""
            return reason

    def _reason(self, words: dict[str, str]) -> str:
        """A word on each engine, in order of preference, behind what is lacking."""
        said = [f"{name}: {words[name]}" for name in self._lacking if name in words]
        said += [f"{e.name}: {words[e.name]}" for e in self.engines if e.name in words]
        return "; ".join(said)[:REASON_CHARS_MAX]


def is_of_lane(error: NeuronDiError | None) -> bool:
    """Whether a transfer that ended so says that its lane is broken, not only this transfer."""
    return isinstance(error, PeerGone | PeerTimeout)


def streams_over(lane: Lane, limits: HandOverOptions) -> bool:
    """Whether layers are asked for where this is what moves them."""
    if limits.stream_layers == "auto":
        return lane.name in STREAMED_LANES
    return limits.stream_layers == "on" and lane.name not in UNSTREAMED_LANES
