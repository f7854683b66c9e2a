"""The choices of one answer. Each is a request of its own, with attempts and a receipt of its own.

    answer <id>:  choice 0 = request <id>, choice 1 = request <id>-1, choice 2 = request <id>-2, ...

So the receipt of the answer's id is choice 0's, and `GET /v1/receipts/<id>-<i>` finds choice i's.

Next: proxy/neuron_di_proxy/answer.py
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from neuron_di.obs import get_logger
from neuron_di.types import FinishReason, RequestId
from neuron_di.wire import Finished, Token
from neuron_di_proxy.failure import failure_of
from neuron_di_proxy.launch import Generation
from neuron_di_proxy.metrics import Metrics
from neuron_di_proxy.receipts import ReceiptStore, RequestRecord

_log = get_logger(__name__)


class Events(Protocol):
    """What comes of all choices: of each its tokens in order, and then its `Finished`."""

    async def next(self) -> tuple[int, Token | Finished]:
        """Wait for the next event, and say of which choice. Not called when all have finished.

        Raises what kept a choice from its end; after that only `close` may follow.
        """
        ...

    async def close(self) -> None:
        """Cancel what still runs. A choice that is not over by now was given up."""
        ...


def choice_id(answer_id: RequestId, index: int) -> RequestId:
    """The request id of choice `index` of an answer."""
    return answer_id if index == 0 else RequestId(f"{answer_id}-{index}")


def events_of(choices: Sequence["Choice"]) -> Events:
    """The events of `choices`, which are numbered 0, 1, 2, ..., in the order they come in.

    One choice costs nothing more: it is read by whoever asks. Several are read by tasks.
    """
    return choices[0] if len(choices) == 1 else _Merged(choices)


class Choice:
    """One choice while it runs. The only place where its end is counted.

    The receipt is stored before anybody can see the end of the choice, so that whoever has
    the answer can ask for its receipt.
    """

    def __init__(
        self,
        index: int,
        generation: Generation,
        record: RequestRecord,
        store: ReceiptStore,
        metrics: Metrics,
    ) -> None:
        self._index = index
        self._generation = generation
        self._record = record
        self._store = store
        self._metrics = metrics
        self._last_token_s: float | None = None
        self._is_over = False

    async def next(self) -> tuple[int, Token | Finished]:
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
        return self._index, event

    async def close(self) -> None:
        try:
            await self._generation.aclose()
        finally:
            if not self._is_over:
                self._end("cancelled", None)

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


class _Merged:
    """Several choices at once, each read by a task of its own from the first `next` on.

    Few events wait to be taken, as many as there are choices: a client that reads slowly slows
    its workers down, as it does with one choice.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = choices
        self._readers: list[asyncio.Task[None]] = []
        self._arrived: asyncio.Queue[tuple[int, Token | Finished] | Exception] = asyncio.Queue()
        self._room = asyncio.Semaphore(len(choices))  # for events; a failure needs none

    async def next(self) -> tuple[int, Token | Finished]:
        if not self._readers:
            self._readers = [asyncio.create_task(self._read(each)) for each in self._choices]
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            await self.close()  # so that every choice has its receipt before the client knows
            raise arrived
        self._room.release()
        return arrived

    async def close(self) -> None:
        self._cancel_readers()
        if self._readers:
            await asyncio.wait(self._readers)
        for choice in self._choices:  # also those whose reader never ran
            await choice.close()

    async def _read(self, choice: Choice) -> None:
        try:
            event: Token | Finished | None = None
            while not isinstance(event, Finished):
                index, event = await choice.next()
                await self._room.acquire()
                self._arrived.put_nowait((index, event))
        except Exception as error:
            self._arrived.put_nowait(error)
            self._cancel_readers()  # now: the client may be slow to take what is there
        finally:
            await choice.close()

    def _cancel_readers(self) -> None:
        for reader in self._readers:
            if reader is not asyncio.current_task() and not reader.cancelling():
                reader.cancel()
