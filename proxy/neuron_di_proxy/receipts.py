"""What became of each request: who did what, how fast, and how much KV moved."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from neuron_di.clock import now_s
from neuron_di.types import FinishReason, RequestId, WorkerId
from neuron_di.wire import Finished, LegReceipt, Token
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.tenant import EVERYBODY

RECEIPTS_MAX = 1000

# How a continued answer compares to an undisturbed one. exact: the same, to the last bit.
# recomputed: valid, but other rounding may have led to other tokens.
Grade = Literal["exact", "recomputed"]


class Continued(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says of itself when it came from several attempts."""

    continued: int
    grade: Grade


class AttemptReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a request."""

    attempt: int
    prefill_worker: WorkerId
    decode_worker: WorkerId
    first_index: int  # of the tokens it gave
    num_tokens: int
    code: str | None  # why it failed; None: it did not
    blamed: WorkerId | None  # who was at fault


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request. Durations are seconds, as the proxy saw them unless a leg says so.

    `queued_s` is the wait for a turn; `ttft_s` and `e2e_s` count from before it, as the client's
    clock does. What is said of workers and KV is said of the last attempt.
    """

    request_id: RequestId
    tenant: str = EVERYBODY.name  # whose it is; nobody else but operators may see it
    attempt: int | None  # the last one's number; None: no worker was ever found
    model: str
    prefill_worker: WorkerId | None
    decode_worker: WorkerId | None  # the same as prefill_worker when one worker did it all
    finish_reason: FinishReason
    num_prompt: int
    num_generated: int
    num_cached: int  # of the prompt's tokens: their KV was found
    queued_s: float
    ttft_s: float | None  # None: no token came
    itl_mean_s: float | None  # None: fewer than two tokens came
    e2e_s: float
    attempts: list[AttemptReceipt]
    continued: int  # attempts that went on after tokens had been sent
    grade: Grade | None  # of a continued answer
    link: str  # what moved the KV; "" when nothing moved
    kv_bytes: int  # moved from prefill to decode
    transfer_s: float
    verify_s: float  # digests made and compared, both ends together
    prefill: LegReceipt | None  # None: that leg said nothing before the request ended
    decode: LegReceipt | None


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What is known of a running request. Written by recovery, sealed once at its end."""

    request_id: RequestId
    model: str
    tenant: str = EVERYBODY.name
    accepted_s: float = field(default_factory=now_s)
    arrived_s: float | None = None  # its head was here; None: it did not wait
    first_token_s: float | None = None
    last_token_s: float = 0.0
    emitted: list[int] = field(default_factory=list)  # ids of all tokens given to the client
    attempts: list[Attempt] = field(default_factory=list)
    finished: Finished | None = None

    def count_token(self, token: Token) -> None:
        self.last_token_s = now_s()
        self.emitted.append(token.token_id)
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    def continued(self) -> Continued | None:
        """What the answer must say of its continuations; None when there was none."""
        num_continued = len([attempt for attempt in self.attempts if attempt.emitted])
        if num_continued == 0:
            return None
        workers = [worker for attempt in self.attempts for worker in attempt.workers()]
        numerics = {worker.numerics for worker in workers}
        is_exact = len(numerics) == 1 and None not in numerics
        return Continued(continued=num_continued, grade="exact" if is_exact else "recomputed")

    def _prompt_counts(self) -> tuple[int, int]:
        """The prompt's tokens, and how many of them were found, as far as workers said so.

        A request that ended early was computed, too, and counts for its client.
        """
        if self.finished is not None:
            return self.finished.num_prompt, self.finished.num_cached
        # What is computed again after token 0 is not what the client asked for.
        said = next((each for each in self.attempts if each.num_prompt), None)
        return (0, 0) if said is None else (said.num_prompt, said.num_cached)

    def seal(self, reason: FinishReason) -> Receipt:
        """The receipt of the request as it stands, ended for `reason`."""
        last = self.attempts[-1] if self.attempts else None
        prefill_worker, decode_worker = last.workers() if last else (None, None)
        prefill, decode = (last.prefill, last.decode) if last else (None, None)
        both = [leg for leg in (prefill, decode) if leg is not None]
        legs = both[:1] if prefill is decode else both
        continued = self.continued()
        num_prompt, num_cached = self._prompt_counts()
        arrived_s = self.accepted_s if self.arrived_s is None else self.arrived_s
        ttft_s = itl_mean_s = None
        if self.first_token_s is not None:
            ttft_s = self.first_token_s - arrived_s
            if len(self.emitted) > 1:
                itl_mean_s = (self.last_token_s - self.first_token_s) / (len(self.emitted) - 1)
        return Receipt(
            request_id=self.request_id,
            tenant=self.tenant,
            attempt=last.number if last else None,
            model=self.model,
            prefill_worker=prefill_worker.worker_id if prefill_worker else None,
            decode_worker=decode_worker.worker_id if decode_worker else None,
            finish_reason=reason,
            num_prompt=num_prompt,
            num_generated=self.finished.num_generated if self.finished else len(self.emitted),
            num_cached=num_cached,
            queued_s=self.accepted_s - arrived_s,
            ttft_s=ttft_s,
            itl_mean_s=itl_mean_s,
            e2e_s=now_s() - arrived_s,
            attempts=[_attempt_receipt(attempt) for attempt in self.attempts],
            continued=continued.continued if continued else 0,
            grade=continued.grade if continued else None,
            # Both ends may report the transfer; it happened once.
            link=max([leg.link for leg in legs], default=""),
            kv_bytes=max([leg.kv_bytes for leg in legs], default=0),
            transfer_s=max([leg.transfer_s for leg in legs], default=0.0),
            verify_s=sum([leg.verify_s for leg in legs]),
            prefill=prefill,
            decode=decode,
        )


def durations_of(receipt: Receipt) -> dict[str, float]:
    """Where a request's time went, in seconds, for a log: its parts that are known."""
    seconds = {"queued_s": receipt.queued_s, "transfer_s": receipt.transfer_s}
    if receipt.ttft_s is not None:
        seconds["ttft_s"] = receipt.ttft_s
    if receipt.prefill is not None:
        seconds["prefill_s"] = receipt.prefill.prefill_s
    if receipt.decode is not None:
        seconds["decode_s"] = receipt.decode.decode_s
    seconds["e2e_s"] = receipt.e2e_s
    return {name: round(value, 6) for name, value in seconds.items()}


def _attempt_receipt(attempt: Attempt) -> AttemptReceipt:
    prefill, decode = attempt.workers()
    return AttemptReceipt(
        attempt=attempt.number,
        prefill_worker=prefill.worker_id,
        decode_worker=decode.worker_id,
        first_index=attempt.first_index,
        num_tokens=attempt.num_tokens,
        code=attempt.code,
        blamed=attempt.blamed.worker_id if attempt.blamed else None,
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
