"""What became of each request: who did what, how fast, and how much KV moved."""

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from neuron_di.clock import now_s
from neuron_di.types import FinishReason, RequestId, WorkerId
from neuron_di.wire import Finished, LegReceipt

RECEIPTS_MAX = 1000


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request. Durations are seconds, as the proxy saw them unless a leg says so."""

    request_id: RequestId
    attempt: int
    model: str
    prefill_worker: WorkerId
    decode_worker: WorkerId  # the same as prefill_worker when one worker did it all
    finish_reason: FinishReason
    num_prompt: int
    num_generated: int
    ttft_s: float | None  # None: no token came
    itl_mean_s: float | None  # None: fewer than two tokens came
    e2e_s: float
    kv_bytes: int  # moved from prefill to decode
    transfer_s: float
    prefill: LegReceipt | None  # None: that leg said nothing before the request ended
    decode: LegReceipt | None


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What is known of a running request. Written by its launch, sealed once at its end."""

    request_id: RequestId
    attempt: int
    model: str
    prefill_worker: WorkerId
    decode_worker: WorkerId
    accepted_s: float = field(default_factory=now_s)
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0
    prefill: LegReceipt | None = None
    decode: LegReceipt | None = None
    finished: Finished | None = None

    def count_token(self) -> None:
        self.last_token_s = now_s()
        self.num_tokens += 1
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    def seal(self, reason: FinishReason) -> Receipt:
        """The receipt of the request as it stands, ended for `reason`."""
        legs = [leg for leg in (self.prefill, self.decode) if leg is not None]
        ttft_s = itl_mean_s = None
        if self.first_token_s is not None:
            ttft_s = self.first_token_s - self.accepted_s
            if self.num_tokens > 1:
                itl_mean_s = (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)
        return Receipt(
            request_id=self.request_id,
            attempt=self.attempt,
            model=self.model,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            finish_reason=reason,
            num_prompt=self.finished.num_prompt if self.finished else 0,
            num_generated=self.finished.num_generated if self.finished else self.num_tokens,
            ttft_s=ttft_s,
            itl_mean_s=itl_mean_s,
            e2e_s=now_s() - self.accepted_s,
            # Both ends may report the transfer; it happened once.
            kv_bytes=max((leg.kv_bytes for leg in legs), default=0),
            transfer_s=max((leg.transfer_s for leg in legs), default=0.0),
            prefill=self.prefill,
            decode=self.decode,
        )


class ReceiptStore:
    """Keeps the receipts of the last `receipts_max` requests; older ones are dropped."""

    def __init__(self, receipts_max: int = RECEIPTS_MAX) -> None:
        self._receipts_max = receipts_max
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()

    def add(self, receipt: Receipt) -> None:
        self._receipts[receipt.request_id] = receipt
        if len(self._receipts) > self._receipts_max:
            self._receipts.popitem(last=False)

    def get(self, answer_id: str) -> Receipt | None:
        """Find a receipt by request id or by the `id` of the answer, `cmpl-…` or `chatcmpl-…`."""
        return self._receipts.get(answer_id.removeprefix("chatcmpl-").removeprefix("cmpl-"))
