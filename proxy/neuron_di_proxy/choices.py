"""The choices of one answer. Each is a request of its own, with attempts and a receipt of its own.

    answer <id>:  choice 0 = request <id>, choice 1 = request <id>-1, choice 2 = request <id>-2, ...

So the receipt of the answer's id is choice 0's, and `GET /v1/receipts/<id>-<i>` finds choice i's.

Next: proxy/neuron_di_proxy/answer.py
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from neuron_di.types import FinishReason, RequestId
from neuron_di.wire import Finished, Token
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.failure import failure_of
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.receipts import Receipt, RequestRecord
from neuron_di_proxy.recovery import RequestRunner
from neuron_di_proxy.token_lane import Lane


class ChoiceSink(Protocol):
    """Takes what comes of all choices: of each its tokens in order, then its end. Never waits."""

    def token(self, index: int, token: Token) -> None: ...

    def finished(self, index: int, finished: Finished) -> None: ...

    def lane(self, index: int, gaps: Histogram) -> Lane | None:
        """What takes a choice's tokens from now on, if they are nothing but text to be sent.

        It counts them in the choice's record, and the seconds between them in `gaps`.
        """
        ...

    def first_lane(self, index: int, gaps: Histogram) -> Lane | None:
        """What takes a choice's first token, likewise, and nothing after it."""
        ...


# Takes a choice's receipt, and why it failed. Called once, before anybody sees its end.
EndOfChoice = Callable[[Receipt, str | None], None]


def choice_id(answer_id: RequestId, index: int) -> RequestId:
    """The request id of choice `index` of an answer."""
    return answer_id if index == 0 else RequestId(f"{answer_id}-{index}")


class Choice:
    """One choice while it runs. The only place where its end is counted."""

    def __init__(
        self,
        index: int,
        request: ChoiceRequest,
        record: RequestRecord,
        sink: ChoiceSink,
        on_end: EndOfChoice,
        gaps: Histogram,
    ) -> None:
        self._index = index
        self._request = request
        self._record = record
        self._sink = sink
        self._on_end = on_end
        self._gaps = gaps  # seconds from token to token
        self._before_s = 0.0  # when the last token came; 0: none did
        self._lane: Lane | None = None  # the last one
        self._is_over = False

    async def run(self, runner: RequestRunner) -> None:
        """Run to the end. Raises what kept the choice from it; cancelling gives the choice up."""
        try:
            finished = await runner.run(self._request, self._record, self._emit, self._make_lane)
            self._end(finished.reason, None)
        except Exception as error:
            self._end("error", failure_of(error).code)
            raise
        except BaseException:
            self.close()
            raise
        self._sink.finished(self._index, finished)

    def close(self) -> None:
        """Count a choice that was given up, also before it could run."""
        self._end("cancelled", None)

    def _end(self, reason: FinishReason, code: str | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_end(self._record.seal(reason), code)

    def _emit(self, token: Token) -> None:
        now_s, before_s = self._record.last_token_s, self._before_s
        if self._lane is not None:
            before_s = max(before_s, self._lane.last_s)
        if before_s:
            self._gaps.observe(now_s - before_s)
        self._before_s = now_s
        self._sink.token(self._index, token)

    def _make_lane(self, *, is_first: bool) -> Lane | None:
        if self._lane is not None:
            self._before_s = max(self._before_s, self._lane.last_s)
        make = self._sink.first_lane if is_first else self._sink.lane
        self._lane = make(self._index, self._gaps)
        return self._lane


def run_choices(choices: Sequence[Choice], runner: RequestRunner) -> Coroutine[Any, Any, None]:
    """Run all at once. Raises the first failure, when all others were given up and have ended."""
    return choices[0].run(runner) if len(choices) == 1 else _run_all(choices, runner)


async def _run_all(choices: Sequence[Choice], runner: RequestRunner) -> None:
    tasks = [asyncio.create_task(choice.run(runner)) for choice in choices]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for choice in choices:
            choice.close()
    for task in tasks:
        if task in done and not task.cancelled() and (error := task.exception()) is not None:
            raise error
