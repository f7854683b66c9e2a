"""Transfer engines that do what a test says: hold a copy, spoil its bytes, need a send for each."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from neuron_di.errors import NeuronDiError
from neuron_di.kv import KvPool
from neuron_di.transfer import BlockSource, ShmEngine, TransferToken
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

    def accept(self, peer: Incarnation, region: Region) -> None:
        self.may_accept.wait(30.0)
        self.num_accepted += 1
        super().accept(peer, region)

    def post_receive(
        self, peer: Incarnation, source: BlockSource, block_ids: Sequence[BlockId]
    ) -> TransferToken:
        token = TransferToken()
        copied = super().post_receive(peer, source, block_ids)

        def end(done: TransferToken) -> None:
            self.spoil(block_ids)
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

    def disconnect(self, peer: Incarnation) -> None:
        self.calls.append(f"disconnect {peer}")
        super().disconnect(peer)

    def let_go(self) -> None:
        held, self._held = self._held, []
        for end in held:
            end()


class TwoSidedEngine:
    """A send must be posted for each receive; they match in order, and nothing can be cancelled.

    `fabric` is shared by all engines that can reach each other. A send ends with its receive, or
    later, by `end_sends`, while `is_holding_sends`.
    """

    name = "two-sided"
    is_one_sided = False

    def __init__(self, pool: KvPool, fabric: "dict[Incarnation, TwoSidedEngine]") -> None:
        self._pool = pool
        self._fabric = fabric
        self._receives: dict[Incarnation, deque[tuple[list[BlockId], TransferToken]]]
        self._receives = defaultdict(deque)
        self._sends: dict[Incarnation, deque[tuple[list[BlockId], TransferToken]]]
        self._sends = defaultdict(deque)
        self._unfinished: list[TransferToken] = []
        self.is_holding_sends = False
        self.fails_with: NeuronDiError | Exception | None = None  # the next send, or receive
        self.sent: list[list[BlockId]] = []
        fabric[pool.incarnation] = self

    def local_region(self) -> Region:
        return self._pool.region()

    def connect(self, peer: Incarnation, region: Region) -> None:
        pass

    def accept(self, peer: Incarnation, region: Region) -> None:
        pass

    def post_send(self, peer: Incarnation, block_ids: Sequence[BlockId]) -> TransferToken:
        token = self._new_token()
        if not token.is_done():
            self.sent.append(list(block_ids))
            self._sends[peer].append((list(block_ids), token))
            self._fabric[peer]._match(self)
        return token

    def post_receive(
        self, peer: Incarnation, source: BlockSource, block_ids: Sequence[BlockId]
    ) -> TransferToken:
        token = self._new_token()
        if not token.is_done():
            self._receives[peer].append((list(block_ids), token))
            self._match(self._fabric[peer])
        return token

    def fence(self, peer: Incarnation) -> None:
        pass

    def disconnect(self, peer: Incarnation) -> None:
        pass

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
        while receives and sends:
            block_ids, received = receives.popleft()
            source_ids, sent = sends.popleft()
            self._pool.tensor()[block_ids] = sender._pool.tensor()[source_ids]
            received.kv_bytes = len(block_ids) * self._pool.layout.block_bytes
            if sender.is_holding_sends:
                sender._unfinished.append(sent)
            else:
                sent.complete()
            received.complete()
