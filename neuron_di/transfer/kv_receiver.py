"""Which bytes come for a request, where they go, and whether they are the right ones.

    layouts equal      blocks come straight into the request's own blocks
    else               the prefill worker's bytes land beside the pool, are verified there, and
                       are placed into the request's blocks

Next: neuron_di/transfer/recv_buffer.py
"""

from dataclasses import replace

from neuron_di.clock import now_s
from neuron_di.errors import (
    KvCorrupt,
    LocalProtocolError,
    NeuronDiError,
    PeerError,
    RemoteProtocolError,
)
from neuron_di.kv import KvIdentity, KvLayout, KvPool, as_ids, block_digests
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.kv_plan import (
    block_ids_of,
    is_direct,
    kv_runs,
    layer_runs,
    resharding,
    transfer_tag,
)
from neuron_di.transfer.landing import Room
from neuron_di.transfer.lanes import Lane
from neuron_di.transfer.prefill_link import PrefillLink
from neuron_di.transfer.recv_entry import Entry
from neuron_di.transfer.transfer_engine import BlockSource, Receive, TransferToken
from neuron_di.wire import LayerReady, Ready


class KvReceiver:
    """Decode's half of every transfer from one peer, whose pool has `layout`.

    `pool` is this worker's; `link` is connected.
    """

    def __init__(self, local: LocalWorker, pool: KvPool, link: PrefillLink) -> None:
        assert link.lane is not None, "it is connected"
        assert link.layout is not None, "it is connected"
        self.lane: Lane = link.lane
        self.layout: KvLayout = link.layout
        self._local = local
        self._pool = pool
        self._memory = pool.memory()
        self._peer = link.peer
        self._connection = link.name

    @property
    def is_direct(self) -> bool:
        """Whether nothing lands beside the pool."""
        return is_direct(self.layout, self._local.layout)

    def landing_bytes(self, ready: Ready, num_held: int) -> int:
        """How much landing memory this takes."""
        num_tokens = self._num_moved(ready, num_held)
        return resharding(self.layout, self._local.layout).landing_bytes(num_tokens)

    def num_kept(self, num_held: int) -> int:
        """How many of our blocks have something of the first `num_held` of the peer's."""
        return self._local.layout.num_blocks_for(num_held * self.layout.block_size)

    def tag(self, ready: Ready) -> int:
        return transfer_tag(self._connection, ready.request_id, ready.attempt)

    def is_ours(self, ready: Ready) -> bool:
        """Whether it comes from the process and the layout that were asked for."""
        return (
            ready.worker_id == self._peer.worker_id
            and ready.incarnation == self._peer.incarnation
            and ready.layout_digest == self.layout.digest()
            and len(ready.block_ids) == len(ready.generations) == len(ready.digests)
        )

    def post(self, entry: Entry) -> TransferToken:
        """Start the transfer. A receive that was never posted must not be waited for."""
        try:
            entry.receive = self.receive(entry)
            entry.num_bytes = entry.receive.runs.num_bytes
            return self.lane.post_receive(entry.receive)
        except Exception as error:
            bug = LocalProtocolError(f"no receive was posted: {type(error).__name__}")
            return TransferToken.over(error if isinstance(error, PeerError) else bug)

    def cancel(self, entry: Entry) -> bool:
        """Its send may never come, and perhaps others wait behind it. False: it needs none."""
        if self.lane.engine.is_one_sided or entry.receive is None:
            return False
        self.lane.cancel(entry.receive.tag)
        return True

    def receive(self, entry: Entry) -> Receive:
        """What to ask of the engine. RemoteProtocolError where Ready does not add up."""
        ready = entry.ready
        assert ready is not None, "only what was promised is pulled"
        num_blocks = self.layout.num_blocks_for(ready.num_tokens)
        offered_ids = block_ids_of(ready.block_ids)
        if offered_ids is None or len(offered_ids) != num_blocks:
            raise RemoteProtocolError("the blocks that were offered cannot hold this KV")
        held = entry.num_held
        source_ids, own_ids = offered_ids[held:], entry.block_ids[held:]
        runs = kv_runs(
            self.layout,
            self._local.layout,
            source_ids,
            own_ids if self.is_direct else (),
            self._num_moved(ready, held),
        )
        memory = self._memory
        if entry.room is not None:
            memory = entry.room.whole
            offsets = runs.destination_offsets + entry.room.start
            runs = replace(runs, destination_offsets=offsets)
        return Receive(
            tag=self.tag(ready),
            runs=runs,
            memory=memory,
            source=BlockSource(source_ids, ready.generations[held:]),
            block_ids=own_ids if self.is_direct else (),
            num_tokens=self._num_moved(ready, held),
        )

    def receive_layer(self, piece: LayerReady, room: Room) -> Receive:
        """The same for one layer of some blocks of a request, into its room."""
        runs = layer_runs(self.layout, piece.layer, piece.block_ids, piece.first_block)
        offsets = runs.destination_offsets + room.start
        return Receive(
            tag=transfer_tag(self._connection, piece.request_id, piece.attempt, piece.piece),
            runs=replace(runs, destination_offsets=offsets),
            memory=room.whole,
            source=BlockSource(as_ids(piece.block_ids), piece.generations),
        )

    def finish(self, entry: Entry, copied: TransferToken) -> NeuronDiError | None:
        """Compare every received byte with what the prefill worker computed, and take it.

        On the thread that ended the copy. Without an error the KV is in the request's blocks.
        """
        start_s = now_s()
        ready, receive, arrived = entry.ready, entry.receive, entry.arrived
        assert ready is not None, "nothing is copied before Ready"
        assert receive is not None, "it was posted"
        try:
            self.lane.fence()
            is_right = self._is_right(entry, ready, copied)
            if is_right and entry.room is not None:
                self._place(entry, ready, entry.room)
                arrived.form = "landed"
        except BaseException:
            self.lane.abandon(receive)  # the engine keeps what was promised until it is told
            raise
        if not is_right:
            changed = self.lane.abandon(receive)
            return changed or KvCorrupt("the received KV is not what was promised")
        error = self.lane.commit(receive) or self._end_fill(entry, ready)
        if error is None and copied.adopted_ids is not None:
            arrived.adopted_ids, arrived.form = copied.adopted_ids, "handed_over"
        arrived.engine, arrived.engine_reason = self.lane.name, self.lane.verdicts
        arrived.kv_bytes, arrived.transfer_s = copied.kv_bytes, copied.transfer_s
        arrived.verify_s = now_s() - start_s
        return error

    def finish_streamed(self, entry: Entry) -> NeuronDiError | None:
        """As finish(), of KV that came layer by layer and lies in the entry's room."""
        start_s = now_s()
        ready, room, arrived = entry.ready, entry.room, entry.arrived
        assert ready is not None, "it was claimed after Ready"
        assert room is not None, "it landed there"
        try:
            if not self._is_right(entry, ready, TransferToken()):
                return KvCorrupt("the layers that came are not what was promised")
            self._place(entry, ready, room)
            if (error := self._end_fill(entry, ready)) is not None:
                return error
        except Exception as bug:
            return LocalProtocolError(f"KV could not be placed: {type(bug).__name__}")
        arrived.engine, arrived.engine_reason = self.lane.name, self.lane.verdicts
        arrived.form = "streamed"
        arrived.verify_s = now_s() - start_s
        return None

    def _place(self, entry: Entry, ready: Ready, room: Room) -> None:
        num_tokens = entry.num_held * self.layout.block_size
        with self._pool.hold():
            num_whole, num_more = divmod(num_tokens, self._local.layout.block_size)
            if num_more:  # they stay, in a block of which the rest has come
                begun = entry.block_ids[num_whole : num_whole + 1]
                self._pool.begin_fill(begun, num_kept=num_more)
            resharding(self.layout, self._local.layout).place(
                room.memory,
                self._memory,
                entry.block_ids,
                self._num_moved(ready, entry.num_held),
                first_token=num_tokens,
            )

    def _end_fill(self, entry: Entry, ready: Ready) -> NeuronDiError | None:
        try:
            self._pool.end_fill(entry.block_ids, ready.num_tokens)
        except NeuronDiError as error:
            return error
        return None

    def _is_right(self, entry: Entry, ready: Ready, copied: TransferToken) -> bool:
        identity = KvIdentity(
            worker_id=self._peer.worker_id,
            incarnation=self._peer.incarnation,
            request_id=ready.request_id,
            attempt=ready.attempt,
            layout_digest=self.layout.digest(),
        )
        held = entry.num_held
        num_tokens = self._num_moved(ready, held)
        with self._pool.hold():
            if entry.room is not None:
                memory, block_ids = entry.room.memory, range(len(ready.block_ids) - held)
                landing = self.layout.without_replicas()
                digests = block_digests(
                    memory, block_ids, identity, landing, num_tokens, first_place=held
                )
            else:
                adopted = copied.adopted_ids
                own_ids = entry.block_ids[held:] if adopted is None else adopted
                digests = self._pool.digests(own_ids, identity, num_tokens, first_place=held)
        return digests == ready.digests[held:]

    def _num_moved(self, ready: Ready, num_held: int) -> int:
        """Token positions whose KV comes from the peer."""
        return ready.num_tokens - num_held * self.layout.block_size
