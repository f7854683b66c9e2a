"""What the proxy says to a worker, and what the worker answers: one leg of a request.

A leg is one HTTP POST. Its body is one JSON document; its answer is a stream of JSON
lines (events). Closing the connection cancels the leg.

    POST /legs/prefill   PrefillLeg -> Token(k), then Finished
                                       | Token(k), Parked, later Released
    POST /legs/decode    DecodeLeg  -> Token(k+1), Token(k+2), ..., Finished
    POST /legs/whole     PrefillLeg -> Token(k), Token(k+1), ..., Finished     (role "both")
    any of them                     -> ... Failed as the last event

k is 0, or the number of tokens that earlier attempts sent to the client: those ids are
given in the leg, and are never sampled again. If they are a complete answer by themselves,
Finished comes without a token. `Finished`, `Released` and `Failed` are terminal: exactly one
of them ends every leg. `attempt` fences: a worker that knows a later one refuses an earlier.
"""

from typing import Annotated, Literal

import msgspec

from neuron_di.errors import Fault
from neuron_di.types import FinishReason, Incarnation, WorkerId
from neuron_di.wire.codec import (
    EVENT_BYTES_MAX,
    LEG_BYTES_MAX,
    BoundedAttempt,
    BoundedRequestId,
    Decoder,
)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a request ends. Checked by `request.check_sampling`.

    `seed` is set by whoever starts the request, so that both legs draw the same numbers.
    `max_tokens` None means: as many as the context holds.
    `logprobs` is the number of alternatives to report per token; None reports nothing.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's signal link listens, and which process it must be."""

    worker_id: WorkerId
    incarnation: Incarnation
    signal_host: str
    signal_port: int


class PrefillLeg(msgspec.Struct, frozen=True, kw_only=True):
    """Compute a prompt's KV and the next token. The prompt is the client's own JSON, unread."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    endpoint: Literal["chat", "completions"]
    prompt: msgspec.Raw  # chat: the `messages` array; completions: a string or a list of ids
    sampling: SamplingParams
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]  # then the worker ends the leg
    context_tokens: int | None = None  # the smaller of both workers'; None: this worker's own
    emitted: tuple[int, ...] = ()  # output ids that the client has: forced, not sampled


class DecodeLeg(msgspec.Struct, frozen=True, kw_only=True):
    """Continue a request whose prompt is being prefilled by `prefill`."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    sampling: SamplingParams
    prefill: PeerAddress
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]
    context_tokens: int | None = None  # as in the prefill leg: both must count alike
    num_emitted: int = 0  # as in the prefill leg


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate token: its text, its natural-log probability, its bytes."""

    text: str
    logprob: float
    token_bytes: list[int]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """The chosen token and the most probable alternatives, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class LegReceipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one worker did for a request. Durations are seconds."""

    worker_id: WorkerId
    role: Literal["prefill", "decode", "both"]
    pid: int
    queued_s: float = 0.0  # until its first step (prefill, both) or its transfer (decode)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    verify_s: float = 0.0  # prefill: digests made; decode: digests compared
    num_prompt: int = 0
    num_generated: int = 0  # output ids known at its end, those that were given included
    link: str = ""  # name of the transfer engine; "" when nothing moved
    kv_blocks: int = 0
    kv_bytes: int = 0
    transfer_s: float = 0.0


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="token"):
    """One generated token. `text` may be empty: half a character, or perhaps a stop string."""

    index: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None

    def __repr__(self) -> str:
        return f"Token(index={self.index})"


class Parked(msgspec.Struct, frozen=True, kw_only=True, tag="parked"):
    """The prompt's KV is complete and waits for the decode worker."""

    num_prompt: int


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    """The decode worker has the KV; the prefill worker's blocks are free again. Terminal."""

    receipt: LegReceipt


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="finished"):
    """The request is complete. `text` is what was held back until now. Terminal."""

    reason: FinishReason
    num_prompt: int
    num_generated: int
    receipt: LegReceipt
    text: str = ""
    stop: str | int | None = None  # the stop string or stop token id that ended it


class Failed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="failed"):
    """The leg ended without its result. Terminal.

    `fault` is who the worker blames: "peer" is its partner in the hand-over.
    """

    code: str
    message: str
    http_status: int
    retryable: bool
    fault: Fault = "us"
    param: str | None = None


LegEvent = Token | Parked | Released | Finished | Failed

prefill_leg_decoder: Decoder[PrefillLeg] = Decoder(
    PrefillLeg, bytes_max=LEG_BYTES_MAX, as_json=True
)
decode_leg_decoder: Decoder[DecodeLeg] = Decoder(DecodeLeg, bytes_max=LEG_BYTES_MAX, as_json=True)
leg_event_decoder: Decoder[LegEvent] = Decoder(LegEvent, bytes_max=EVENT_BYTES_MAX, as_json=True)
