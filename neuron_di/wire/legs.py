"""What the proxy says to a worker, and what the worker answers: one leg of a request.

A leg is one document, and the events that answer it. `leg_link.py` says how both travel.

    prefill       PrefillLeg -> Token(k), then Finished
                                | Token(k), Parked, later Released
    decode        DecodeLeg  -> Token(k+1), Token(k+2), ..., Finished
    whole         PrefillLeg -> Token(k), Token(k+1), ..., Finished     (role "both")
    any of them              -> ... Failed as the last event

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
    BoundedCount,
    BoundedRequestId,
    Decoder,
)
from neuron_di.wire.regions import KvForm

LegSeconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
WaitedSeconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
_TookSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
CacheScope = Annotated[str, msgspec.Meta(max_length=64)]


ToolFormat = Literal["hermes", "llama3_json", "mistral"]


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tool calls as a chat template has them, and nothing else. `call_schema`: the JSON Schema of
    one; without `is_parallel` there is one only."""

    format: ToolFormat
    call_schema: str
    is_parallel: bool = True
    param: Literal["tools"] = "tools"  # as in Grammar


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of an answer must be. Its state is a function of the answer's token ids.

    json_object: any JSON object; json_schema: JSON that `value`, a JSON Schema, allows; choice:
    one of the strings in `value`, a JSON array; regex: all of it matches the expression `value`,
    in the syntax of Rust's crate regex, without look-around; text: anything, in which `calls` may
    come where their format has them.
    `reasoning`, a start and an end tag: the model may reason first, which is free text. It does
    where the prompt ends inside of that, or the answer begins with the start tag; the grammar then
    begins behind the end tag. None: with token 0.
    `calls`, with any other kind: what an answer may be instead. The model chooses, by the first
    token that only one of both can take; so it does where it has reasoned.
    `param` is the field of the client's request that asks for it: errors name it.
    """

    kind: Literal["json_object", "json_schema", "choice", "regex", "text"]
    value: str = ""
    reasoning: tuple[str, str] | None = None
    calls: CallGrammar | None = None
    param: Literal["response_format", "structured_outputs", "tools"] = "response_format"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a request ends. Checked by `check_sampling`.

    `seed` is set by whoever starts the request, so that both legs draw the same numbers. A worker
    takes None for 0.
    `max_tokens` None means: as many as the context holds. With `fits_context` more than that is
    cut to it, where it is refused otherwise: nobody asked for so many. `max_tokens_param` is the
    client's field for it, which errors name.
    `logprobs` is the number of alternatives to report per token; None reports nothing.
    `logit_bias` is added to raw logits, `allowed_token_ids` (None: all) are the only ones that
    can be chosen, `bad_words` are never completed.
    """

    max_tokens: int | None = 16
    max_tokens_param: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    fits_context: bool = False
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), each id once
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a worker's signal link listens, which process it must be, and the key it must have."""

    worker_id: WorkerId
    incarnation: Incarnation
    signal_host: str
    signal_port: int
    signal_key: str | None = None  # as in WorkerRecord


JSON_NULL = msgspec.Raw(b"null")  # an unread field that is not there: Raw has no `| None`


class PromptOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a prompt becomes token ids, and what is reported of it. Raw fields are client's JSON.

    `tools`, `documents`, `template_kwargs` and `reasoning_effort` go to the chat template.
    `hides_tools`: it is only asked whether it takes the tools, for the answer may not call them.
    `add_special_tokens` None is the endpoint's default: yes for completions, no for chats, whose
    template writes them.
    `keep_last_tokens`: of a longer prompt only its last tokens are used. `report`: `Token.prompt`
    comes with the first token, with logprobs of `logprobs` alternatives unless that is None;
    `logprobs_param` is the client's field for it, which errors name.
    """

    tools: msgspec.Raw = JSON_NULL
    hides_tools: bool = False
    documents: msgspec.Raw = JSON_NULL
    template_kwargs: msgspec.Raw = JSON_NULL
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    keep_last_tokens: int | None = None
    report: bool = False
    logprobs: int | None = None
    logprobs_param: Literal["logprobs", "prompt_logprobs"] = "prompt_logprobs"


class PrefillLeg(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Compute a prompt's KV and the next token. The prompt is the client's own JSON, unread."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    endpoint: Literal["chat", "completions"]
    prompt: msgspec.Raw  # chat: the `messages` array; completions: a string or a list of ids
    sampling: SamplingParams
    timeout_s: LegSeconds  # then the worker ends the leg
    waited_s: WaitedSeconds = 0.0  # how long ago the request came, before its first attempt
    context_tokens: int | None = None  # the smaller of both workers'; None: this worker's own
    emitted: tuple[int, ...] = ()  # output ids that the client has: forced, not sampled
    options: PromptOptions = PromptOptions()
    cache_scope: CacheScope = ""  # KV is shared among requests of one scope only
    traceparent: str | None = None  # W3C Trace Context of the attempt


class DecodeLeg(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Continue a request whose prompt is being prefilled by `prefill`."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    sampling: SamplingParams
    prefill: PeerAddress
    timeout_s: LegSeconds
    waited_s: WaitedSeconds = 0.0  # as in the prefill leg
    context_tokens: int | None = None  # as in the prefill leg: both must count alike
    num_emitted: int = 0  # as in the prefill leg
    traceparent: str | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate token: its text, its natural-log probability, its bytes, its id."""

    text: str
    logprob: float
    token_bytes: list[int]
    token_id: int


class TokenLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The chosen token and the most probable alternatives, best first.

    `rank` is the chosen one's among all tokens, from 1; only a prompt's report has it. The token
    begins `num_held` characters behind the text that was sent before it.
    """

    chosen: TokenLogprob
    top: list[TokenLogprob]
    rank: int | None = None
    num_held: int = 0


class LegReceipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one worker did for a request. Durations are seconds."""

    worker_id: WorkerId
    role: Literal["prefill", "decode", "both"]
    pid: int
    queued_s: _TookSeconds = 0.0  # until its first step (prefill, both) or its transfer (decode)
    prefill_s: _TookSeconds = 0.0
    decode_s: _TookSeconds = 0.0
    verify_s: _TookSeconds = 0.0  # prefill: digests made; decode: digests compared
    num_prompt: int = 0
    num_generated: int = 0  # output ids known at its end, those that were given included
    link: str = ""  # name of the transfer engine; "" when no KV came or went
    link_reason: str = ""  # decode: a word on each engine that was considered for it
    form: KvForm | None = None  # how it came; None likewise
    kv_blocks: int = 0
    kv_bytes: BoundedCount = 0  # that were moved: none where blocks changed their owner
    transfer_s: _TookSeconds = 0.0


# Logprobs of a request's prompts: their tokens times (1 + alternatives). Each takes memory at the
# worker until token 0, and both sides' time.
REPORTED_LOGPROBS_MAX = 65_536


class PromptReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt as the worker read it. `logprobs` are one per token, None for the first, of which
    `first_bytes` are its bytes."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    first_bytes: list[int] = []

    def __repr__(self) -> str:
        return f"PromptReport({len(self.token_ids)} tokens)"


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="token"):
    """One generated token. `text` may be empty: half a character, or perhaps a stop string.

    `prompt` comes with token 0 of a request that asked for it. `in_reasoning` is said with token
    0: the prompt ends inside the model's reasoning, as its chat template opened the tag.
    """

    index: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None
    prompt: PromptReport | None = None
    in_reasoning: bool = False

    def __repr__(self) -> str:
        return f"Token(index={self.index})"


class Parked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="parked"):
    """The prompt's KV is complete and waits for the decode worker."""

    num_prompt: BoundedCount
    num_cached: BoundedCount = 0  # of these: whose KV this worker found and did not compute


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    """The decode worker has the KV; the prefill worker's blocks are free again. Terminal."""

    receipt: LegReceipt


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="finished"):
    """The request is complete. `text` is what was held back until now. Terminal."""

    reason: FinishReason
    num_prompt: BoundedCount
    num_generated: BoundedCount
    receipt: LegReceipt
    num_cached: BoundedCount = 0  # as in Parked; a decode worker says 0
    text: str = ""
    stop: str | int | None = None  # the stop string or stop token id that ended it


REASON_CHARS_MAX = 16_384  # of what an error says


class Failed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="failed"):
    """The leg ended without its result. Terminal.

    `fault` is who the worker blames: "peer" is its partner in the hand-over.
    """

    code: Annotated[str, msgspec.Meta(max_length=64)]
    message: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]
    http_status: Annotated[int, msgspec.Meta(ge=400, le=599)]  # clients get it
    retryable: bool
    fault: Fault = "us"
    param: str | None = None


LegEvent = Token | Parked | Released | Finished | Failed

prefill_leg_decoder: Decoder[PrefillLeg] = Decoder(
    PrefillLeg, bytes_max=LEG_BYTES_MAX, as_json=True
)
decode_leg_decoder: Decoder[DecodeLeg] = Decoder(DecodeLeg, bytes_max=LEG_BYTES_MAX, as_json=True)
leg_event_decoder: Decoder[LegEvent] = Decoder(LegEvent, bytes_max=EVENT_BYTES_MAX, as_json=True)
