"""Prefill's half of KV that leaves layer by layer, while the next ones are computed.

    begin()    a prefill was accepted
    ask()      the decode worker that waits for it takes layers as they come
    watch()    before each chunk, on the engine's thread: what to call after each of its layers
    pull()     post a piece's send, for engines that need one
    end()      the request is over here

It is an offer beside the hand-over: nothing waits for it, and no block is kept for it. Whoever
reads a block that was given up meanwhile gets bytes that match no digest.

Next: neuron_di/transfer/layer_receiver.py
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from neuron_di.core import PrefillChunk
from neuron_di.errors import RemoteProtocolError
from neuron_di.kv import KvPool
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.kv_plan import layer_runs, transfer_tag
from neuron_di.transfer.lanes import LaneSet
from neuron_di.transfer.send_peers import Identity, Peer
from neuron_di.transfer.transfer_engine import Send
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import PIECES_MAX, LayerReady, PullLayer

# Measured: a piece costs both ends a millisecond of a processor, in which so much is through.
AUTO_PIECE_BYTES_MIN = 1 << 20
Key = tuple[RequestId, int]
AfterLayer = Callable[[int, Sequence[BlockId]], None]


@dataclass(slots=True, eq=False)
class _Stream:
    """What of a request was computed, and announced."""

    # The engine's thread owns these: tokens of the chunks that were watched, and whether the pieces
    # would be too small, or too many.
    num_tokens: int = 0
    goes_whole: bool = False
    reader: Identity | None = None
    pieces: list[LayerReady] = field(default_factory=list)
    unsent: set[int] = field(default_factory=set)  # pieces that the reader did not pull


class LayerSender:
    """Lives on the event loop."""

    def __init__(
        self,
        local: LocalWorker,
        lanes: LaneSet,
        send: Callable[[Identity, LayerReady], None],
        setting: Literal["auto", "on", "off"],
    ) -> None:
        """With `auto`, KV whose first pieces are small goes as a whole."""
        self._layout = local.layout
        block_bytes = local.layout.block_bytes
        self._token_bytes = block_bytes // (local.layout.block_size * local.layout.num_layers)
        self._lanes = lanes
        self._send = send
        self._is_on = setting != "off"
        self._piece_bytes_min = AUTO_PIECE_BYTES_MIN if setting == "auto" else 0
        self._is_wanted = False  # somebody has asked, once
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Key, _Stream] = {}

    def begin(self, key: Key) -> None:
        """Its reader may ask later than its first layer is computed."""
        if self._is_wanted:
            self._streams.setdefault(key, _Stream())

    def ask(self, key: Key, reader: Identity) -> None:
        """Say from now on what is there, to begin with what is there already."""
        if not self._is_on:
            return
        self._is_wanted = True
        stream = self._streams.setdefault(key, _Stream())
        if stream.reader != reader:
            stream.reader = reader
            stream.unsent = set(range(len(stream.pieces)))
            for piece in stream.pieces:
                self._send(reader, piece)

    def forget_reader(self, key: Key) -> None:
        """It gave up, or is gone: nobody hears of layers until somebody asks again."""
        if (stream := self._streams.get(key)) is not None:
            stream.reader = None

    def end(self, key: Key) -> None:
        self._streams.pop(key, None)

    def watch(self, pool: KvPool, chunk: PrefillChunk) -> AfterLayer | None:
        """What to call after each layer of this chunk. None: nobody wants to know.

        On the engine's thread. A block is announced with the chunk that fills it, or that is the
        request's last.
        """
        request = chunk.request
        key = (request.request_id, request.attempt)
        stream = self._streams.get(key)
        if stream is None or chunk.start != stream.num_tokens or not pool.streams_layers:
            return None
        if not chunk.start and not self._pays(chunk):
            stream.goes_whole = True
        if stream.goes_whole:
            return None
        stream.num_tokens = chunk.end
        size = pool.layout.block_size
        first = chunk.start // size
        end = -(-chunk.end // size) if chunk.is_last else chunk.end // size
        if first == end:
            return None
        block_ids = list(request.block_ids[first:end])
        generations = pool.generations(block_ids)
        num_blocks = pool.layout.num_blocks_for(request.num_prefilled)

        def after_layer(layer: int, _: Sequence[BlockId]) -> None:
            piece = LayerReady(
                request_id=key[0],
                attempt=key[1],
                piece=0,
                layer=layer,
                first_block=first,
                block_ids=list(block_ids),
                generations=generations,
                num_blocks=num_blocks,
            )
            self._loop.call_soon_threadsafe(self._announce, key, stream, piece)

        return after_layer

    def _pays(self, first: PrefillChunk) -> bool:
        """Whether the pieces of a prompt that is cut like this are large enough, and not too many:
        where one may not be announced, all others come in vain."""
        num_tokens, layout = first.request.num_prefilled, self._layout
        num_chunks = -(-num_tokens // first.end)
        num_pieces = layout.num_layers * min(num_chunks, layout.num_blocks_for(num_tokens))
        return first.end * self._token_bytes >= self._piece_bytes_min and num_pieces <= PIECES_MAX

    def pull(self, reader: Identity, peer: Peer, message: PullLayer) -> bool:
        """Let the reader have a piece. False: the request is over, or it was sent already.

        RemoteProtocolError for what was not announced to it.
        """
        key = (message.request_id, message.attempt)
        stream, number = self._streams.get(key), message.piece
        if stream is None:
            return False
        if peer.layout is None or stream.reader != reader or number >= len(stream.pieces):
            raise RemoteProtocolError("a pull of a layer that was not announced")
        if number not in stream.unsent:
            return False
        self._lanes.check_accepted(peer.incarnation, message.engine)
        stream.unsent.remove(number)
        piece = stream.pieces[number]
        send = Send(
            tag=transfer_tag(peer.connection, *key, number),
            runs=layer_runs(self._layout, piece.layer, piece.block_ids, piece.first_block),
            block_ids=[BlockId(block_id) for block_id in piece.block_ids],
        )
        # Should it fail, then the reader's half does, too, or is given up in time.
        self._lanes.post_send(peer.incarnation, message.engine, send)
        return True

    def _announce(self, key: Key, stream: _Stream, piece: LayerReady) -> None:
        number = len(stream.pieces)
        if self._streams.get(key) is not stream or number >= PIECES_MAX:
            return
        piece = msgspec.structs.replace(piece, piece=number)
        stream.pieces.append(piece)
        stream.unsent.add(number)
        if stream.reader is not None:
            self._send(stream.reader, piece)
