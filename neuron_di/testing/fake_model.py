"""A model that notices any mix-up of KV: its next token is a function of the KV bytes it reads.

The KV of a position is a hash of the KV of the position before it, of the token id there, and
of the kernel that computed it (prompt or decode), so it stands for all ids up to there. The
logits are a function of the KV bytes of *all* positions, as they lie in the pool. A stale,
foreign, damaged or missing block changes the text; so does an id computed by the wrong kernel.
It costs microseconds.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from neuron_di.backends.backend import LayerHook, OnLost
from neuron_di.backends.host_logits import HostLogits
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.kv import KvLayout, KvPool, segment_bytes
from neuron_di.models import ReadLogits
from neuron_di.request import ChatExtras, Request, Tokenizer
from neuron_di.testing.faults import Faults
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import ShmRegion

EOS_ID = 0
NUM_VOCAB = 64
PROMPT_KERNEL, DECODE_KERNEL = 1, 2
MISCUT = 3  # the prompt's kernel, in a chunk that begins or ends where none does

_NUM_ROWS = 4096
_ROWS: npt.NDArray[np.float32] = (
    np.random.Generator(np.random.PCG64(7)).standard_normal((_NUM_ROWS, NUM_VOCAB)) * 2
).astype(np.float32)
_ROWS[np.arange(_NUM_ROWS), np.arange(_NUM_ROWS) * 31 % NUM_VOCAB] += 4  # one that is likely
_PIECES = [b"<end>", b" ", b"\n", b"\xc3", b"\xa9", b"ab", b"ba", b"aba", b"stop", b"st", b"op"]
_PIECES += [bytes([ord("a") + index % 26]) for index in range(NUM_VOCAB - len(_PIECES))]


def position_kv(before: int, token_id: int, kernel: int) -> int:
    """The KV of one position, 64 bits, after a position with the KV `before` (0: none)."""
    return xxh3_64_intdigest(b"%d.%d.%d" % (before, token_id, kernel))


def logits_row(kv: npt.NDArray[np.uint64], kernel: int) -> npt.NDArray[np.float32]:
    """The next token's logits [V] after positions with this KV."""
    row: npt.NDArray[np.float32] = _ROWS[xxh3_64_intdigest(kv.data, seed=kernel) % _NUM_ROWS]
    return row


class _FakeLayout(KvLayout):
    """Makes its digest once: workers state it in every record."""

    @cached_property
    def _digest(self) -> str:
        return super().digest()

    def digest(self) -> str:
        return self._digest


@cache
def fake_layout(block_size: int) -> KvLayout:
    """8 bytes per position: one hash, half of it in K, half in V."""
    return _FakeLayout(
        num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32"
    )


class HalvesPool(KvPool):
    """A KvPool that a FakeBackend can use. `halves_N2S` is its blocks: of each position's number
    K has the lower half and V the upper."""

    halves_N2S: npt.NDArray[np.uint32]
    digested_at_once_bytes = 0  # for what may happen meanwhile

    def read(self, block_ids: Sequence[BlockId], num_positions: int) -> npt.NDArray[np.uint64]:
        """The numbers of a request's first positions."""
        halves_2N = self.halves_N2S[block_ids].transpose(1, 0, 2).reshape(2, -1)[:, :num_positions]
        lower, upper = halves_2N.astype(np.uint64)
        kv: npt.NDArray[np.uint64] = lower | upper << np.uint64(32)
        return kv

    def write(self, block_id: BlockId, place: int, kv: int) -> None:
        """The number of one position of a block."""
        self.halves_N2S[block_id, :, place] = kv & 0xFFFFFFFF, kv >> 32


class FakePool(HalvesPool):
    """In private memory. `all_bytes` are those of its blocks."""

    def __init__(self, layout: KvLayout, num_blocks: int, incarnation: Incarnation) -> None:
        memory = mmap(-1, segment_bytes(layout, num_blocks))
        super().__init__(layout, num_blocks, incarnation, -1, memory)
        num_bytes = num_blocks * layout.block_bytes
        self.all_bytes = np.frombuffer(memory, np.uint8, offset=len(memory) - num_bytes)
        self.halves_N2S = self.all_bytes.view(np.uint32).reshape(num_blocks, 2, layout.block_size)

    def region(self) -> ShmRegion:
        """Not reached through the operating system: `fake_transfer` finds it by incarnation."""
        return ShmRegion(pid=1, fd=0, incarnation=self.incarnation, num_blocks=self.num_blocks)

    def close(self) -> None:
        """Its memory goes with the last array that shows it."""
        self._view = None


class FakeBackend(HostLogits):
    """A Backend for this model. `faults` may make a step, or a copy, raise.

    With `chunk_tokens` a prompt that is cut elsewhere has other KV, as rounding makes it.
    """

    numerics: str | None = "fake"

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        incarnation: Incarnation,
        faults: Faults | None = None,
        make_pool: Callable[[KvLayout, int, Incarnation], HalvesPool] = FakePool,
        chunk_tokens: int | None = None,
    ) -> None:
        self.layout = fake_layout(block_size)
        self.num_vocab = NUM_VOCAB
        self._chunk_tokens = chunk_tokens
        self._make_pool = make_pool
        self._own_pool = make_pool(self.layout, num_blocks, incarnation)
        self.pool: KvPool = self._own_pool
        self._faults = faults or Faults(random.Random(0))

    def prefill(
        self,
        chunk: PrefillChunk,
        after_layer: LayerHook | None = None,
        read_logits: ReadLogits | None = None,
    ) -> Tensor | None:
        if self._faults.strikes("step fails"):
            raise RuntimeError("an injected fault")
        kernel = self._kernel(chunk)
        ids = chunk.request.token_ids(chunk.start, chunk.end)
        self._extend(chunk.request.block_ids, chunk.start, ids, kernel)
        if after_layer is not None:
            after_layer(0, chunk.request.block_ids)
        if read_logits is not None:
            for place in range(chunk.start, chunk.end):
                row = self._logits(chunk.request, place + 1, kernel)
                read_logits(place, torch.from_numpy(row[np.newaxis].copy()))
        if not chunk.is_last:
            return None
        return torch.from_numpy(self._logits(chunk.request, chunk.end, kernel))

    def decode(self, batch: DecodeBatch) -> Tensor:
        if self._faults.strikes("step fails"):
            raise RuntimeError("an injected fault")
        rows = []
        for request in batch.requests:
            place = request.num_computed
            self._extend(request.block_ids, place, request.generated[-1:], DECODE_KERNEL)
            rows.append(self._logits(request, place + 1, DECODE_KERNEL))
        return torch.from_numpy(np.stack(rows))

    def copy_blocks(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        if self._faults.strikes("copy fails"):
            raise RuntimeError("an injected fault")
        super().copy_blocks(sources, targets)

    def watch(self, on_lost: OnLost) -> None:
        """It is never lost."""

    def close_pool(self) -> None:
        self.pool.close()

    def open_pool(self, num_blocks: int, incarnation: Incarnation) -> None:
        self._own_pool = self._make_pool(self.layout, num_blocks, incarnation)
        self.pool = self._own_pool

    def close(self) -> None:
        self.pool.close()

    def _kernel(self, chunk: PrefillChunk) -> int:
        size = self._chunk_tokens
        if chunk.is_replay:
            return DECODE_KERNEL
        if size is None:
            return PROMPT_KERNEL
        end = min(chunk.start + size, chunk.request.num_prompt)
        return MISCUT if chunk.start % size or chunk.end != end else PROMPT_KERNEL

    def _extend(
        self, block_ids: Sequence[BlockId], start: int, ids: Sequence[int], kernel: int
    ) -> None:
        """Write the KV of these ids, from position `start` on."""
        pool, size = self._own_pool, self.layout.block_size
        kv = 0
        if start:
            lower, upper = pool.halves_N2S[block_ids[(start - 1) // size], :, (start - 1) % size]
            kv = int(lower) | int(upper) << 32
        for place, token_id in enumerate(ids, start):
            kv = position_kv(kv, token_id, kernel)
            pool.write(block_ids[place // size], place % size, kv)

    def _logits(self, request: Request, num_positions: int, kernel: int) -> npt.NDArray[np.float32]:
        num_blocks = self.layout.num_blocks_for(num_positions)
        kv = self._own_pool.read(request.block_ids[:num_blocks], num_positions)
        return logits_row(kv, kernel)


class FakeTokenizer(Tokenizer):
    """64 tokens: half characters, pieces that overlap, and id 0, the end, which is special."""

    def __init__(self) -> None:
        self.eos_id = EOS_ID
        self.num_vocab = NUM_VOCAB

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,  # noqa: ARG002
        param: str = "prompt",  # noqa: ARG002
    ) -> list[int]:
        return [1 + byte % (NUM_VOCAB - 1) for byte in text.encode()]

    def render_chat(self, messages: Any, extras: ChatExtras | None = None) -> str:  # noqa: ARG002
        return "".join(str(message["content"]) for message in messages)

    @property
    def chat_template_source(self) -> str | None:
        return None

    def token_piece(self, token_id: int) -> str | None:
        known = 0 <= token_id < NUM_VOCAB
        return _PIECES[token_id].decode("latin-1") if known else None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        pieces = [
            _PIECES[token_id]
            for token_id in ids
            if self.has_text(token_id, skip_special_tokens=skip_special_tokens)
        ]
        return b"".join(pieces).decode("utf-8", "replace")

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        return 0 <= token_id < NUM_VOCAB and not (skip_special_tokens and token_id == EOS_ID)

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS_ID

    def token_bytes(self, token_id: int, *, at_start: bool = False) -> bytes:  # noqa: ARG002
        return _PIECES[token_id]
