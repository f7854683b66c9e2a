"""Which bytes of this worker's pool a decode worker gets, and through which transfer engine.

Next: neuron_di/transfer/send_buffer.py
"""

from typing import cast

from neuron_di.errors import RemoteProtocolError
from neuron_di.kv import KvLayout
from neuron_di.transfer.geometry import layout_fields, peer_layout
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.kv_plan import block_ids_of, is_direct, kv_runs, transfer_tag
from neuron_di.transfer.lanes import LaneSet
from neuron_di.transfer.send_peers import Peer
from neuron_di.transfer.transfer_engine import Send, TransferToken
from neuron_di.types import BlockId
from neuron_di.wire import KvMap, KvMapInit, Pull, Ready


class KvSender:
    """Prefill's half of every transfer. Borrows the engines."""

    def __init__(self, local: LocalWorker, lanes: LaneSet) -> None:
        self._local = local
        self._lanes = lanes

    def accept(self, peer: Peer, message: KvMapInit) -> tuple[KvLayout, KvMap]:
        """Prepare what this peer may pull with: (its layout, the answer). On any thread.

        May block. PeerError where there is nothing.
        """
        local = self._local
        layout = peer_layout(message.layout, local.layout, converts=local.converts)
        self._lanes.accept(peer.incarnation, message.offers, layout)
        offers = self._lanes.accepted_offers(peer.incarnation)
        return layout, KvMap(layout=layout_fields(local.layout), offers=offers)

    def check(self, peer: Peer, pull: Pull, ready: Ready) -> None:
        """RemoteProtocolError where it is no pull of this KV by this peer."""
        if peer.layout is None:
            raise RemoteProtocolError("a pull before the KV maps were exchanged")
        self._lanes.check_accepted(peer.incarnation, pull.engine)
        if len(pull.block_ids) != peer.layout.num_blocks_for(ready.num_tokens):
            raise RemoteProtocolError("a pull for another number of blocks than hold this KV")
        if block_ids_of(pull.block_ids) is None:
            raise RemoteProtocolError("a pull into what are no blocks")
        if pull.num_held >= len(ready.block_ids):
            raise RemoteProtocolError("a pull of nothing")

    def post(self, peer: Peer, pull: Pull, ready: Ready) -> TransferToken:
        """Let it have the blocks that it has not. Returns at once."""
        assert peer.layout is not None, "it was checked"
        own, held = self._local.layout, pull.num_held
        source_ids = ready.block_ids[held:]
        num_tokens = ready.num_tokens - held * own.block_size
        destination_ids = pull.block_ids[held:] if is_direct(own, peer.layout) else ()
        send = Send(
            tag=transfer_tag(peer.connection, ready.request_id, ready.attempt),
            runs=kv_runs(own, peer.layout, source_ids, destination_ids, num_tokens),
            block_ids=cast("list[BlockId]", source_ids),
            exchange=destination_ids,
            num_tokens=num_tokens,
        )
        return self._lanes.post_send(peer.incarnation, pull.engine, send)
