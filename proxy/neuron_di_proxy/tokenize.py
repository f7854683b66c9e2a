"""/tokenize and /detokenize, as vLLM has them: read here, answered by any worker of the model."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

import msgspec

from neuron_di.clock import Deadline
from neuron_di.errors import BadRequest, CapacityError, PeerError, RemoteProtocolError
from neuron_di.wire import (
    JSON_NULL,
    DetokenizeIds,
    Failed,
    PromptOptions,
    TokenizePrompt,
    WorkerRecord,
    leg_event_decoder,
)
from neuron_di_proxy.chat_request import adds_generation_prompt
from neuron_di_proxy.failure import LegFailed
from neuron_di_proxy.field_rules import is_known_null
from neuron_di_proxy.health import Health
from neuron_di_proxy.json_object import explain, read_body
from neuron_di_proxy.request_fields import ReasoningEffort
from neuron_di_proxy.route import Router
from neuron_di_proxy.tool_calls import check_tools
from neuron_di_proxy.worker_client import WorkerClient
from neuron_di_proxy.workers import Process, process_of

TokenizeKind = Literal["tokenize", "detokenize"]
_Answer = tuple[int, bytes]  # status and body

TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 128 << 20  # ids and texts of the tokens of the longest body
_ATTEMPTS_MAX = 3  # workers that are asked


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None


class _TextFields(_Fields, kw_only=True, forbid_unknown_fields=True):
    prompt: msgspec.Raw
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def question(self) -> TokenizePrompt:
        return TokenizePrompt(
            endpoint="completions",
            prompt=self.prompt,
            options=PromptOptions(add_special_tokens=self.add_special_tokens),
            with_strings=self.return_token_strs is True,
        )


class _ChatFields(_Fields, kw_only=True, forbid_unknown_fields=True):
    messages: msgspec.Raw
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    tools: msgspec.Raw = JSON_NULL
    documents: msgspec.Raw = JSON_NULL
    chat_template_kwargs: msgspec.Raw = JSON_NULL
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool | None = None

    def question(self) -> TokenizePrompt:
        if self.tools is not JSON_NULL:
            check_tools(self.tools)
        options = PromptOptions(
            tools=self.tools,
            documents=self.documents,
            template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=adds_generation_prompt(
                self.add_generation_prompt, goes_on=self.continue_final_message
            ),
            continue_final_message=self.continue_final_message is True,
            add_special_tokens=self.add_special_tokens,
        )
        return TokenizePrompt(
            endpoint="chat",
            prompt=self.messages,
            options=options,
            with_strings=self.return_token_strs is True,
        )


class _IdFields(_Fields, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]

    def question(self) -> DetokenizeIds:
        return DetokenizeIds(self.tokens)


async def forward_tokenize(
    kind: TokenizeKind, body: bytes, router: Router, client: WorkerClient, health: Health
) -> bytes:
    """Answer a client's document with the one that a worker makes: JSON, as vLLM's.

    Tries other workers when the first cannot be asked, or is lost before it has answered. Raises
    BadRequest, ModelNotFound, CapacityError, LegFailed with the worker's own words, or what else
    befell the last worker.
    """
    fields = _read(kind, body)
    model, question = _model_of(fields, router), fields.question()
    deadline = Deadline.after(TIMEOUT_S)
    tried: set[Process] = set()
    while True:
        record = router.any_worker(model, tried)
        tried.add(process_of(record))
        _check_count(question, record.context_tokens)
        try:
            asking = client.ask(
                record,
                f"/{kind}",
                question,
                timeout_s=deadline.remaining_s(),
                bytes_max=ANSWER_BYTES_MAX,
            )
            status, answer = await _unless_lost(asking, record, health)
            if status == 200:
                return answer
            raise _refusal(answer)
        except PeerError as error:
            is_final = isinstance(error, LegFailed) and not error.failed.retryable
            if is_final or len(tried) == _ATTEMPTS_MAX or deadline.has_passed():
                raise


async def _unless_lost(
    asking: Coroutine[Any, Any, _Answer], record: WorkerRecord, health: Health
) -> _Answer:
    """What comes of it, or the error that says that the worker is gone or frozen."""
    answer: asyncio.Future[_Answer] = asyncio.ensure_future(asking)
    loss: asyncio.Future[PeerError] = asyncio.get_running_loop().create_future()

    def lose(error: PeerError) -> None:
        if not loss.done():
            loss.set_result(error)

    try:
        with health.watching(record, lose):
            await asyncio.wait((answer, loss), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise loss.result()
    finally:
        answer.cancel()


def _read(kind: TokenizeKind, body: bytes) -> _TextFields | _ChatFields | _IdFields:
    members = read_body(body)
    names = {name for name, raw in members.items() if not is_known_null(name, raw)}
    fields: type[_TextFields | _ChatFields | _IdFields] = _IdFields
    if kind == "tokenize":
        if ("prompt" in names) == ("messages" in names):
            raise BadRequest("either `prompt` or `messages` must be given", param="prompt")
        fields = _TextFields if "prompt" in names else _ChatFields
    try:
        if len(names) < len(members):
            body = msgspec.json.encode({name: members[name] for name in names})
        return msgspec.json.decode(body, type=fields)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None


def _check_count(question: TokenizePrompt | DetokenizeIds, context_tokens: int) -> None:
    """Refuse more ids than any answer has: asking a worker would take its time for nothing."""
    if isinstance(question, DetokenizeIds) and len(question.tokens) > context_tokens > 0:
        raise BadRequest(
            f"`tokens` may have at most {context_tokens} ids, the model's context", param="tokens"
        )


def _model_of(fields: _Fields, router: Router) -> str:
    models = router.models()
    if fields.model is None and len(models) == 1:
        return models[0]
    if fields.model is None and not models:
        raise CapacityError("no worker is known")
    if fields.model is None:
        raise BadRequest("`model` must be given", param="model")
    return fields.model


def _refusal(answer: bytes) -> PeerError:
    event = leg_event_decoder.decode(answer)
    if isinstance(event, Failed):
        return LegFailed(event)
    return RemoteProtocolError("a worker refused to tokenise without saying why")
