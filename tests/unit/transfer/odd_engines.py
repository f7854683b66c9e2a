"""Transfer engines that do what a test says: hold a copy, spoil its bytes, need a send for each."""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from neuron_di.errors import KvMissing, NeuronDiError
from neuron_di.kv import KvLayout, KvPool, Memory
from neuron_di.transfer import Receive, Send, ShmEngine, TransferToken
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import Region


class HeldEngine(ShmEngine):
    """Real copies. While `is_holding`, none of them ends before `let_go`.

    `spoil` is called with the destination blocks once the bytes are there, `calls` says in which
    order things happened.
    """

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self.is_holding = False
        self.calls: list[str] = []
        self.spoil: Callable[[Sequence[BlockId]], None] = lambda _: None
        self.may_accept = threading.Event()
        self.may_accept.set()
        self.num_accepted = 0
        self._held: list[Callable[[], None]] = []

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        self.may_accept.wait(30.0)
        self.num_accepted += 1
        super().accept(peer, region, layout)

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        token = TransferToken()
        copied = super().post_receive(peer, receive)

        def end(done: TransferToken) -> None:
            self.spoil(receive.block_ids)
            self.calls.append("copied")
            token.kv_bytes, token.transfer_s = done.kv_bytes, done.transfer_s
            token.complete(done.error())

        if self.is_holding:
            self._held.append(lambda: copied.on_done(end))
        else:
            copied.on_done(end)
        return token

    def fence(self, peer: Incarnation) -> None:
        self.calls.append("fence")
        super().fence(peer)

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        self.calls.append("commit")
        return super().commit(peer, receive)

    def disconnect(self, peer: Incarnation) -> None:
        self.calls.append(f"disconnect {peer}")
        super().disconnect(peer)

    def let_go(self) -> None:
        held, self._held = self._held, []
        for end in held:
            end()


class TwoSidedEngine:
    """A send must be posted for each receive, with its tag. What is posted runs on; a receive
    without a send can be cancelled if `can_cancel`.

    `fabric` is shared by all engines that can reach each other. A send ends with its receive, or
    later, by `end_sends`, while `is_holding_sends`.
    """

    name = "two-sided"
    is_one_sided = False

    def __init__(self, pool: KvPool, fabric: "dict[Incarnation, TwoSidedEngine]") -> None:
        self._pool = pool
        self._fabric = fabric
        self._receives: dict[Incarnation, dict[int, tuple[Receive, TransferToken]]]
        self._receives = defaultdict(dict)
        self._sends: dict[Incarnation, dict[int, tuple[Send, TransferToken]]]
        self._sends = defaultdict(dict)
        self._unfinished: list[TransferToken] = []
        self.is_holding_sends = False
        self.can_cancel = True
        self.fails_with: NeuronDiError | Exception | None = None  # the next send, or receive
        self.sent: list[list[int]] = []
        self.calls: list[str] = []
        fabric[pool.incarnation] = self

    def local_region(self, peer: Incarnation) -> Region:
        return self._pool.region()

    def register(self, memory: Memory) -> None:
        pass

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        pass

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        pass

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:
        token = self._new_token()
        if not token.is_done():
            self.sent.append(list(send.block_ids))
            self._sends[peer][send.tag] = (send, token)
            self._fabric[peer]._match(self)
        return token

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        token = self._new_token()
        if not token.is_done():
            self._receives[peer][receive.tag] = (receive, token)
            self._match(self._fabric[peer])
        return token

    def cancel(self, peer: Incarnation, tag: int) -> None:
        self.calls.append("cancel")
        if self.can_cancel and tag in self._receives[peer]:
            self._receives[peer].pop(tag)[1].complete(KvMissing("cancelled"))

    def fence(self, peer: Incarnation) -> None:
        pass

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        return None

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        return None

    def disconnect(self, peer: Incarnation) -> None:
        self.calls.append("disconnect")

    def close(self) -> None:
        pass

    def end_sends(self) -> None:
        unfinished, self._unfinished = self._unfinished, []
        for token in unfinished:
            token.complete()

    def _new_token(self) -> TransferToken:
        token, failure = TransferToken(), self.fails_with
        self.fails_with = None
        if isinstance(failure, NeuronDiError):
            token.complete(failure)
        elif failure is not None:
            raise failure
        return token

    def _match(self, sender: "TwoSidedEngine") -> None:
        receives = self._receives[sender._pool.incarnation]
        sends = sender._sends[self._pool.incarnation]
        for tag in receives.keys() & sends.keys():
            (receive, received), (send, sent) = receives.pop(tag), sends.pop(tag)
            received.kv_bytes = _copy(sender._pool.memory(), send, receive)
            if sender.is_holding_sends:
                sender._unfinished.append(sent)
            else:
                sent.complete()
            received.complete()


def _copy(source: Memory, send: Send, receive: Receive) -> int:
    """The bytes in order, as one end names them, to where the other end wants them."""
    sent = b"".join(
        ctypes.string_at(source.address + int(offset), int(length))
        for offset, length in zip(send.runs.source_offsets, send.runs.lengths, strict=True)
    )
    at = 0
    runs = receive.runs
    for offset, length in zip(runs.destination_offsets, runs.lengths, strict=True):
        part = sent[at : at + int(length)]
        ctypes.memmove(receive.memory.address + int(offset), part, int(length))
        at += int(length)
    return at
