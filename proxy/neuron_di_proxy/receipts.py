"""What became of each request: who did what, how fast, and how much KV moved."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Literal, Optional

import msgspec

from neuron_di.clock import now_s
from neuron_di.types import FinishReason, RequestId, WorkerId
from neuron_di.wire import Finished, KvForm, LegReceipt, Token
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.tenant import EVERYBODY

if TYPE_CHECKING:
    from neuron_di_proxy.model_metrics import ModelMetrics

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

    `queued_s` is the wait for a turn, and for workers; `ttft_s` and `e2e_s` count from before it,
    as the client's clock does. What is said of workers and KV is said of the last attempt.
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
    link: str  # the transfer engine that brought the KV; "" when none came
    link_reason: str = ""  # why that one, when the decode worker could still say so
    form: KvForm | None = None  # how; None likewise
    kv_bytes: int  # moved from prefill to decode: none where blocks changed their owner
    transfer_s: float
    verify_s: float  # digests made and compared, both ends together
    prefill: LegReceipt | None  # None: that leg said nothing before the request ended
    decode: LegReceipt | None


def num_taken(request: ChoiceRequest, receipt: Receipt) -> float:
    """Tokens, of the prompt too, that count against the rate of its tenant.

    A client may leave before a worker has said how long its prompt is. It was computed all the
    same, so it counts by its bytes; else who leaves early enough would compute for nothing.
    """
    num_prompt: float = receipt.num_prompt
    if not num_prompt and receipt.attempts and receipt.finish_reason == "cancelled":
        num_prompt = request.num_prompt_about
    return num_prompt + receipt.num_generated


class RequestRecord(msgspec.Struct, kw_only=True):
    """What is known of a running request. Written by recovery, sealed once at its end."""

    request_id: RequestId
    model: str
    tenant: str = EVERYBODY.name
    accepted_s: float = msgspec.field(default_factory=now_s)
    arrived_s: float | None = None  # its head was here; None: it did not wait
    unrouted_s: float = 0.0  # waited for a worker, in all
    counts: Optional["ModelMetrics"] = None  # where it counts as running
    first_token_s: float | None = None
    last_token_s: float = 0.0
    emitted: list[int] = msgspec.field(default_factory=list)  # ids of all tokens given on
    attempts: list[Attempt] = msgspec.field(default_factory=list)
    finished: Finished | None = None

    def count_token(self, token: Token) -> None:
        self.last_token_s = now_s()
        self.emitted.append(token.token_id)
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    def continued(self) -> Continued | None:
        """What the answer must say of its continuations; None when there was none."""
        num_continued = 0
        for attempt in self.attempts:
            if attempt.emitted:
                num_continued += 1
        if num_continued == 0:
            return None
        routes = [attempt.route for attempt in self.attempts]
        numerics = {each.numerics for route in routes for each in (route.prefill, route.decode)}
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
        attempts = [_attempt_receipt(attempt) for attempt in self.attempts]
        last, prefill, decode = None, None, None
        if attempts:
            last, prefill, decode = (
                attempts[-1],
                self.attempts[-1].prefill,
                self.attempts[-1].decode,
            )
        link, form, kv_bytes, transfer_s, verify_s = _transfer_of(prefill, decode)
        continued = self.continued()
        num_prompt, num_cached = self._prompt_counts()
        num_emitted = len(self.emitted)
        arrived_s = self.accepted_s if self.arrived_s is None else self.arrived_s
        ttft_s = itl_mean_s = None
        if self.first_token_s is not None:
            ttft_s = self.first_token_s - arrived_s
            if num_emitted > 1:
                itl_mean_s = (self.last_token_s - self.first_token_s) / (num_emitted - 1)
        return Receipt(
            request_id=self.request_id,
            tenant=self.tenant,
            attempt=last.attempt if last else None,
            model=self.model,
            prefill_worker=last.prefill_worker if last else None,
            decode_worker=last.decode_worker if last else None,
            finish_reason=reason,
            num_prompt=num_prompt,
            num_generated=self.finished.num_generated if self.finished else num_emitted,
            num_cached=num_cached,
            queued_s=self.accepted_s - arrived_s + self.unrouted_s,
            ttft_s=ttft_s,
            itl_mean_s=itl_mean_s,
            e2e_s=now_s() - arrived_s,
            attempts=attempts,
            continued=continued.continued if continued else 0,
            grade=continued.grade if continued else None,
            link=link,
            link_reason=decode.link_reason if decode is not None else "",
            form=form,
            kv_bytes=kv_bytes,
            transfer_s=transfer_s,
            verify_s=verify_s,
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


def _transfer_of(
    prefill: LegReceipt | None, decode: LegReceipt | None
) -> tuple[str, KvForm | None, int, float, float]:
    """(link, form, bytes of KV, seconds of the transfer and of digests) of an attempt's legs."""
    if prefill is None or decode is None or prefill is decode:
        leg = prefill if decode is None else decode
        if leg is None:
            return "", None, 0, 0.0, 0.0
        return leg.link, leg.form, leg.kv_bytes, leg.transfer_s, leg.verify_s
    # Both ends may report the transfer; it happened once.
    return (
        decode.link or prefill.link,
        decode.form or prefill.form,
        max(prefill.kv_bytes, decode.kv_bytes),
        max(prefill.transfer_s, decode.transfer_s),
        prefill.verify_s + decode.verify_s,
    )


def _attempt_receipt(attempt: Attempt) -> AttemptReceipt:
    return AttemptReceipt(
        attempt=attempt.number,
        prefill_worker=attempt.route.prefill.worker_id,
        decode_worker=attempt.route.decode.worker_id,
        first_index=len(attempt.emitted),
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
