"""Paged attention by our kernels beside torch's own, over the same blocks of a pool.

SDPA and FlexAttention read KV that lies in one piece, so the blocks are gathered first. That is
part of their time, as it would be of a backend's step that used them, and a column of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.device_check.models import SHAPES
from benchmarks.device_check.rates import synchronize, timed_s
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings
from neuron_di.backends.cuda_kernels import attend_decode, attend_prefill, num_decode_splits

_BLOCK_SIZE = 16
_COLUMNS = ["rows × new positions", "keys", "way", "µs", "gather µs", "of ours", "difference"]
_CALLS = 10  # between two looks at the clock


@dataclass(frozen=True, slots=True)
class Case:
    """Of `num_rows` requests each the last `num_new` of `num_keys` positions."""

    num_rows: int
    num_new: int
    num_keys: int


def measure(settings: Settings, record: Record) -> None:
    record.note("Difference: the largest from ours, in bfloat16, of values of about 1.")
    for shape in settings.shapes:
        rows: list[list[str]] = []
        for case in cases(settings):
            paged = Paged.random(shape, case, "cpu" if settings.is_small else "cuda")
            rows += look(paged, settings)
            record.table(f"Attention, {shape} bfloat16", _COLUMNS, rows)


def cases(settings: Settings) -> tuple[Case, ...]:
    if settings.is_small:
        return (Case(1, 16, 48), Case(2, 1, 48))
    prefill = (Case(1, 2048, 2048), Case(1, 2048, 16_384))
    return (*prefill, *(Case(num_rows, 1, 4096) for num_rows in (1, 8, 64)))


@dataclass(frozen=True, slots=True)
class Paged:
    """Random queries [T, H, D] and a pool of one layer whose blocks are in no order."""

    case: Case
    query_THD: Tensor
    pool_NLCKSD: Tensor
    table_RN: Tensor
    length_R: Tensor
    first_row_R1: Tensor

    @classmethod
    def random(cls, shape: str, case: Case, device: str) -> "Paged":
        model = SHAPES[shape]
        num_heads, num_kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
        blocks_each = case.num_keys // _BLOCK_SIZE
        num_blocks = case.num_rows * blocks_each
        options = {"dtype": torch.bfloat16, "device": device}
        order = torch.randperm(num_blocks, device=device).to(torch.int32)
        query = torch.randn(case.num_rows * case.num_new, num_heads, model["head_dim"], **options)
        shape_of_pool = (num_blocks, 1, 2, num_kv_heads, _BLOCK_SIZE, model["head_dim"])
        return cls(
            case,
            query,
            torch.randn(shape_of_pool, **options),
            order.view(case.num_rows, blocks_each),
            torch.full((case.num_rows,), case.num_keys, dtype=torch.int32, device=device),
            torch.arange(case.num_rows + 1, dtype=torch.int32, device=device) * case.num_new,
        )

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values [R, K, X, D], each in one piece."""
        found_RNCKSD = self.pool_NLCKSD[self.table_RN.long(), 0]
        both_CRKNSD = found_RNCKSD.permute(2, 0, 3, 1, 4, 5).contiguous()
        keys, values = both_CRKNSD.flatten(3, 4)
        return keys, values

    def queries_RHTD(self) -> Tensor:
        num_heads, head_dim = self.query_THD.shape[1:]
        query = self.query_THD.view(self.case.num_rows, self.case.num_new, num_heads, head_dim)
        return query.transpose(1, 2)

    def flat(self, out_RHTD: Tensor) -> Tensor:
        return out_RHTD.transpose(1, 2).reshape(self.query_THD.shape)


def look(paged: Paged, settings: Settings) -> list[list[str]]:
    """A row for each way; a way that torch cannot do here says why."""
    case, device = paged.case, paged.query_THD.device
    ours = _ours(paged, settings)
    expected = ours()
    own_us, gather_us = _microseconds(ours, settings), _microseconds(paged.gathered, settings)
    title = [f"{case.num_rows} × {case.num_new:,}", f"{case.num_keys:,}"]
    rows = [[*title, "ours", f"{own_us:,.0f}", "", "1.00", ""]]
    behind = case.num_keys - case.num_new
    flex = flex_attention if settings.is_small else torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(
        lambda _row, _head, query, key: query + behind >= key,
        None,
        None,
        case.num_new,
        case.num_keys,
        device=str(device),
    )
    causal = causal_lower_right(case.num_new, case.num_keys) if case.num_new > 1 else None

    def by_sdpa() -> Tensor:
        keys, values = paged.gathered()
        query = paged.queries_RHTD()
        return paged.flat(
            F.scaled_dot_product_attention(query, keys, values, causal, enable_gqa=True)
        )

    def by_flex() -> Tensor:
        keys, values = paged.gathered()
        out = flex(paged.queries_RHTD(), keys, values, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return paged.flat(out)

    for name, way in (("gathered, SDPA", by_sdpa), ("gathered, FlexAttention", by_flex)):
        try:
            difference = float((way() - expected).abs().max())
            way_us = _microseconds(way, settings)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:80]
            rows.append([*title, name, f"{type(error).__name__}: {reason}", "", "", ""])
            continue
        ratio, gather = f"{way_us / own_us:.2f}", f"{gather_us:,.0f}"
        rows.append([*title, name, f"{way_us:,.0f}", gather, ratio, f"{difference:.3f}"])
    return rows


def _ours(paged: Paged, settings: Settings) -> Callable[[], Tensor]:
    case = paged.case
    if case.num_new > 1:
        return lambda: attend_prefill(
            paged.query_THD,
            paged.pool_NLCKSD,
            0,
            paged.table_RN,
            paged.first_row_R1,
            paged.length_R,
            rows_max=case.num_new,
        )
    multiprocessors = 4
    if not settings.is_small:
        multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    num_kv_heads = paged.pool_NLCKSD.shape[3]
    num_splits = num_decode_splits(case.num_rows, num_kv_heads, multiprocessors)
    return lambda: attend_decode(
        paged.query_THD, paged.pool_NLCKSD, 0, paged.table_RN, paged.length_R, num_splits=num_splits
    )


def _microseconds(call: Callable[[], object], settings: Settings) -> float:
    """Of one call, in a row of them: the launch is hidden where the device is the slower one."""
    num_calls = settings.pick(_CALLS, _CALLS, 1)

    def several() -> None:
        for _ in range(num_calls):
            call()
        synchronize()

    warm_ups, repeats = settings.pick(3, 2, 0), settings.pick(20, 5, 1)
    return median(timed_s(several, warm_ups=warm_ups, repeats=repeats)) / num_calls * 1e6
