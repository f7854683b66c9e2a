"""Text to token ids and back, for whoever asks over HTTP. One at a time, beside the legs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from neuron_di.errors import BadRequest, CapacityError, NeuronDiError
from neuron_di.obs import get_logger
from neuron_di.wire import (
    Decoder,
    DetokenizedText,
    DetokenizeIds,
    TokenizedPrompt,
    TokenizePrompt,
    detokenize_decoder,
    encode_json,
    tokenize_decoder,
)
from neuron_di.worker.leg_report import crash_of, failed
from neuron_di.worker.prompts import PromptReader

_log = get_logger(__name__)

# One is worked on at a time: legs need the processor and the executor's threads, too.
QUEUED_MAX = 16

AskT = TypeVar("AskT")


def add_tokenize_routes(app: web.Application, prompts: PromptReader) -> None:
    """Let `app` answer POST /tokenize and POST /detokenize. Its size limit bounds bodies."""
    turns = _Turns()

    def tokenize(ask: TokenizePrompt) -> TokenizedPrompt:
        token_ids = prompts.read_prompt(ask.endpoint, ask.prompt, ask.options).token_ids
        pieces = None
        if ask.with_strings:
            pieces = [prompts.tokenizer.token_piece(token) or "" for token in token_ids]
        return TokenizedPrompt(
            count=len(token_ids),
            max_model_len=prompts.context_tokens,
            tokens=token_ids,
            token_strs=pieces,
        )

    def detokenize(ask: DetokenizeIds) -> DetokenizedText:
        if len(ask.tokens) > prompts.context_tokens:
            raise BadRequest(
                f"tokens has more ids than the {prompts.context_tokens} of the context",
                param="tokens",
            )
        token_ids = prompts.checked_ids(ask.tokens, "tokens")
        return DetokenizedText(prompts.tokenizer.decode(token_ids, skip_special_tokens=False))

    app.router.add_post("/tokenize", _handler(turns, tokenize_decoder, tokenize))
    app.router.add_post("/detokenize", _handler(turns, detokenize_decoder, detokenize))


class _Turns:
    """Lets one through at a time, and few wait."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_queued = 0

    async def run(self, work: Callable[[], bytes]) -> bytes:
        """Run `work` on a thread of the loop's executor. CapacityError: too many wait."""
        if self._num_queued > QUEUED_MAX:
            raise CapacityError("too many prompts wait to be tokenised here")
        self._num_queued += 1
        try:
            await self._lock.acquire()
            try:
                working = asyncio.get_running_loop().run_in_executor(None, work)
            except RuntimeError:  # no thread can be started: others may have better luck
                self._lock.release()
                raise
            working.add_done_callback(self._end_turn)
            return await asyncio.shield(working)
        finally:
            self._num_queued -= 1

    def _end_turn(self, _: "asyncio.Future[bytes]") -> None:
        # A thread cannot be interrupted: its turn ends when it does, whoever has left.
        self._lock.release()


def _handler(
    turns: _Turns, decoder: Decoder[AskT], answer: Callable[[AskT], msgspec.Struct]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            raw = await request.read()
            body = await turns.run(lambda: encode_json(answer(decoder.decode(raw))))
        except NeuronDiError as error:
            return _refusal(error)
        except web.HTTPException:
            raise
        except Exception as error:
            _log.exception("tokenize_crashed", path=request.path)
            return _refusal(crash_of(error))
        return web.Response(body=body, content_type="application/json")

    return handle


def _refusal(error: NeuronDiError) -> web.Response:
    return web.Response(
        body=encode_json(failed(error)),
        status=error.http_status,
        content_type="application/json",
    )
