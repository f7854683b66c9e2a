"""Two workers' pools and transfer engines, connected as a handshake connects them."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from neuron_di.kv import KvLayout, KvPool
from neuron_di.transfer import BlockSource, ShmEngine, TransferEngine, TransferToken
from neuron_di.types import BlockId, Incarnation

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 32
PREFILL, DECODE = Incarnation("f0" * 16), Incarnation("d0" * 16)

# Every kind of transfer engine; each must pass the same tests.
ENGINES: dict[str, Callable[[KvPool], TransferEngine]] = {"shm": ShmEngine}


class HeldList(list[int]):
    """Numbers that nobody reads before the gate opens: a transfer that takes its time."""

    def __init__(self, numbers: Iterable[int], gate: threading.Event) -> None:
        super().__init__(numbers)
        self._gate = gate

    def __iter__(self) -> Iterator[int]:
        is_open = self._gate.wait(30.0)
        assert is_open
        return super().__iter__()


@dataclass
class Pair:
    """`prefill`'s blocks hold random bytes, `decode`'s hold -1."""

    prefill_pool: KvPool
    decode_pool: KvPool
    prefill: TransferEngine
    decode: TransferEngine

    def source(self, block_ids: list[int]) -> BlockSource:
        """These blocks as prefill offers them in Ready."""
        return BlockSource(block_ids, self.prefill_pool.generations(map(BlockId, block_ids)))

    def move(self, source_ids: list[int], block_ids: list[int]) -> TransferToken:
        """Pull: the send is posted, then the receive."""
        self.prefill.post_send(DECODE, [BlockId(n) for n in source_ids])
        return self.receive(self.source(source_ids), block_ids)

    def receive(self, source: BlockSource, block_ids: list[int]) -> TransferToken:
        return self.decode.post_receive(PREFILL, source, [BlockId(n) for n in block_ids])


@contextmanager
def connected_pair(kind: str, num_blocks: int = NUM_BLOCKS) -> Iterator[Pair]:
    prefill_pool = KvPool.create(LAYOUT, num_blocks, PREFILL)
    decode_pool = KvPool.create(LAYOUT, num_blocks, DECODE)
    generator = torch.Generator().manual_seed(1)
    prefill_pool.tensor().normal_(generator=generator)
    decode_pool.tensor().fill_(-1.0)
    pair = Pair(prefill_pool, decode_pool, ENGINES[kind](prefill_pool), ENGINES[kind](decode_pool))
    pair.prefill.accept(DECODE, pair.decode.local_region())
    pair.decode.connect(PREFILL, pair.prefill.local_region())
    try:
        yield pair
    finally:
        pair.decode.close()
        pair.prefill.close()
        prefill_pool.close()
        decode_pool.close()
