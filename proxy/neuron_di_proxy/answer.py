"""Turns a running request into the bytes of its HTTP response."""

from collections.abc import AsyncGenerator

from neuron_di.errors import NeuronDiError
from neuron_di.obs import get_logger
from neuron_di.types import FinishReason
from neuron_di.wire import Finished, Token
from neuron_di_proxy.failure import error_body, failure_of
from neuron_di_proxy.launch import Generation
from neuron_di_proxy.metrics import Metrics
from neuron_di_proxy.openai_response import DONE, Answer
from neuron_di_proxy.receipts import ReceiptStore, RequestRecord

_log = get_logger(__name__)


class Answering:
    """Reads one request's generation and writes its answer, whole or as a stream.

    The receipt is stored before the client can see the end of the answer, so that whoever
    has the answer can ask for its receipt.
    """

    def __init__(
        self,
        generation: Generation,
        answer: Answer,
        record: RequestRecord,
        store: ReceiptStore,
        metrics: Metrics,
    ) -> None:
        self._generation = generation
        self._answer = answer
        self._record = record
        self._store = store
        self._metrics = metrics
        self._last_token_s: float | None = None
        self._is_over = False

    async def whole(self) -> bytes:
        """The answer as one JSON document. Raises what kept the request from its end."""
        tokens: list[Token] = []
        while isinstance(event := await self._next(), Token):
            tokens.append(event)
        return self._answer.whole(tokens, event, self._record.continued())

    async def begin_stream(self) -> AsyncGenerator[bytes, None]:
        """Wait for the first event and return the stream of SSE events that starts with it.

        Raises what kept the request from its first event: the response can still be an error.
        """
        return self._stream(await self._next())

    async def _stream(self, event: Token | Finished) -> AsyncGenerator[bytes, None]:
        try:
            while isinstance(event, Token):
                yield self._answer.chunk(event)
                event = await self._next()
            yield self._answer.last_chunk(event, self._record.continued()) + DONE
        except Exception as error:
            if not isinstance(error, NeuronDiError):
                _log.exception("internal_error", request=self._record.request_id)
            # Neither a finish reason nor DONE: the client can tell that this is not the end.
            yield b"data: %b\n\n" % error_body(failure_of(error))

    async def close(self) -> None:
        """Cancel what still runs. A request that is not over by now was given up by its client."""
        try:
            await self._generation.aclose()
        finally:
            if not self._is_over:
                self._end("cancelled", None)

    async def _next(self) -> Token | Finished:
        try:
            event = await anext(self._generation)
        except Exception as error:
            self._end("error", failure_of(error).code)
            raise
        if isinstance(event, Finished):
            self._end(event.reason, None)
        else:
            now, before = self._record.last_token_s, self._last_token_s
            self._last_token_s = now
            if before is not None:
                self._metrics.count_gap(now - before)
        return event

    def _end(self, reason: FinishReason, code: str | None) -> None:
        self._is_over = True
        receipt = self._record.seal(reason)
        self._store.add(receipt)
        self._metrics.count(receipt, code)
        _log.info(
            "request_end",
            request=self._record.request_id,
            prefill=receipt.prefill_worker,
            decode=receipt.decode_worker,
            attempts=len(receipt.attempts),
            continued=receipt.continued,
            tokens=len(self._record.emitted),
            reason=reason,
            code=code,
        )
