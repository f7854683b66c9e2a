"""Prefill's attention kernel against the plain definition in float64."""

import numpy as np
import pytest
import torch

from neuron_di_bindings.cpu_kernels import (
    CpuDecoder,
    DecoderAddresses,
    DecoderShape,
    LayerAddresses,
    load,
)

BLOCK_SIZE = 16
NUM_BLOCKS = 70
NUM_LAYERS = 2


class Model:
    """The pool and the sizes of a model of which only the attention is used."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, window: int = 0, threads: int = 1, isa=None
    ) -> None:
        generator = torch.Generator().manual_seed(heads * 1000 + head_dim)
        shape = (NUM_BLOCKS, NUM_LAYERS, 2, kv_heads, BLOCK_SIZE, head_dim)
        self.pool_NLCKSD = torch.randn(shape, generator=generator)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window = window
        self.generator = generator
        self.decoder = CpuDecoder(
            load(),
            DecoderShape(
                num_vocab=1,
                hidden=1,
                intermediate=1,
                num_layers=NUM_LAYERS,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                block_size=BLOCK_SIZE,
                num_blocks=NUM_BLOCKS,
                num_positions=1,
                window=window,
            ),
            [LayerAddresses(**dict.fromkeys(LayerAddresses.__annotations__, 0))] * NUM_LAYERS,
            DecoderAddresses(
                embedding=0,
                final_norm=0,
                lm_head=0,
                cosines=0,
                sines=0,
                pool=self.pool_NLCKSD.data_ptr(),
            ),
            dtype="float32",
            rms_eps=1e-6,
            num_threads=threads,
            isa=isa,
        )

    def queries(self, count: int) -> torch.Tensor:
        """Spread out in memory as they are among keys and values."""
        wide = torch.randn(count, self.heads + 3, self.head_dim, generator=self.generator)
        return wide[:, : self.heads] * 2

    def attend(self, query_THD: torch.Tensor, start: int, table: list[int]) -> torch.Tensor:
        out = np.full(query_THD.shape, np.nan, np.float32)
        self.decoder.attend_chunk(
            1, query_THD.numpy(), out, start=start, block_table=np.array(table, np.int32)
        )
        return torch.from_numpy(out)

    def expected(self, query_THD: torch.Tensor, start: int, table: list[int]) -> torch.Tensor:
        end = start + len(query_THD)
        kv_CKXD = self.pool_NLCKSD[table, 1].permute(1, 2, 0, 3, 4).flatten(2, 3).double()
        key_HXD, value_HXD = kv_CKXD[:, :, :end].repeat_interleave(self.heads // self.kv_heads, 1)
        scores_HTX = query_THD.double().transpose(0, 1) @ key_HXD.transpose(1, 2)
        scores_HTX /= self.head_dim**0.5
        position_T, key_X = torch.arange(start, end)[:, None], torch.arange(end)
        is_hidden = key_X > position_T
        if self.window:
            is_hidden |= key_X <= position_T - self.window
        weights_HTX = scores_HTX.masked_fill(is_hidden, -torch.inf).softmax(-1)
        return (weights_HTX @ value_HXD).transpose(0, 1)


def check(model: Model, start: int, count: int, tolerance: float = 2e-5) -> torch.Tensor:
    num_blocks = -(-(start + count) // BLOCK_SIZE)
    table = torch.randperm(NUM_BLOCKS, generator=model.generator)[:num_blocks].tolist()
    query_THD = model.queries(count)
    # What lies behind the chunk in its last block must not matter.
    tail = (start + count) % BLOCK_SIZE
    if tail:
        model.pool_NLCKSD[table[-1], :, :, :, tail:] = torch.nan
    out = model.attend(query_THD, start, table)
    wanted = model.expected(query_THD, start, table).float()
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("isa", load().isas)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 4, 64), (4, 2, 32), (8, 2, 80), (7, 1, 128), (2, 2, 16), (3, 1, 8), (98, 1, 20)],
)
def test_equals_the_definition(heads: int, kv_heads: int, head_dim: int, isa: str) -> None:
    model = Model(heads, kv_heads, head_dim, isa=isa)
    check(model, 0, 75)
    check(model, 33, 50)


@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 1), (0, 2), (0, 16), (0, 47), (0, 49), (1, 1), (15, 1), (500, 100), (511, 2), (0, 1100)],
)
def test_any_chunk(start: int, count: int) -> None:
    check(Model(4, 2, 32), start, count)


@pytest.mark.parametrize("window", [1, 7, 16, 100, 600])
@pytest.mark.parametrize(("start", "count"), [(0, 90), (37, 60), (600, 130), (0, 800)])
def test_window(window: int, start: int, count: int) -> None:
    check(Model(4, 2, 32, window=window), start, count)


def test_threads_change_nothing() -> None:
    one, two = check(Model(4, 2, 64), 100, 300), check(Model(4, 2, 64, threads=2), 100, 300)
    assert torch.equal(one, two)


def test_large_scores_do_not_overflow() -> None:
    model = Model(4, 2, 32)
    model.pool_NLCKSD[:, :, 0] *= 100  # scores of some hundreds, which float32 rounds in 1e-5
    check(model, 0, 200, tolerance=2e-3)


@pytest.mark.parametrize(
    ("count", "start", "table", "words"),
    [
        (20, 0, [0], "too short"),
        (4, 0, [NUM_BLOCKS], "block id"),
        (4, 0, [-1], "block id"),
        (4, -1, [0], "positions"),
    ],
)
def test_refuses_what_lies_outside(count: int, start: int, table: list[int], words: str) -> None:
    model = Model(2, 1, 16)
    with pytest.raises(ValueError, match=words):
        model.attend(model.queries(count), start, table)


def test_refuses_other_shapes() -> None:
    model = Model(2, 1, 16)
    with pytest.raises(ValueError, match="queries of shape"):
        model.attend(model.queries(4).transpose(1, 2).contiguous(), 0, [0])
