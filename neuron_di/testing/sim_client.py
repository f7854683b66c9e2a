"""One client of a simulated cluster: reads its answer, and compares every event as it comes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from neuron_di.errors import NeuronDiError
from neuron_di.testing.sim_failure import Fail
from neuron_di.testing.workload import Wanted
from neuron_di.wire import Failed, Finished, Token
from neuron_di_proxy.emit import Emit
from neuron_di_proxy.failure import failure_of

Outcome = Literal["running", "completed", "cancelled", "failed", "cut off"]  # with its proxy


# Serves a request: tokens are emitted, the end is returned or raised.
Serve = Callable[[Emit], Awaitable[Finished]]


def _nothing(name: str) -> None:
    """Nobody asked to be told of the end."""


@dataclass(slots=True)
class Client:
    """What one client does, and what it saw. `fail` is told what must never happen."""

    name: str
    wanted: Wanted
    arrives_s: float
    cancels_after: int | None  # tokens; None: it stays to the end
    deadline_s: float  # after its arrival
    fail: Fail
    now_s: Callable[[], float]
    may_find_kv: bool = True  # of its prompt's beginning
    num_tokens: int = 0
    outcome: Outcome = "running"
    failed: Failed | None = None
    started_s: float = 0.0
    on_end: Callable[[str], None] = _nothing  # given its name
    task: asyncio.Task[None] | None = None  # that serves it

    async def read(self, serve: Serve) -> None:
        """Read to the end, or leave. Exactly one end is seen, and none in vain."""
        self.started_s = self.now_s()
        self.task = asyncio.current_task()
        try:
            end: object = await serve(self._take)
        except NeuronDiError as error:
            if self._is_still_there("failed"):
                self.failed = failure_of(error)
                self._check_failure(self.failed)
        except asyncio.CancelledError:
            self._is_still_there("cancelled")  # if not, it left by itself
        except Exception as error:
            self._is_still_there("failed")
            self.fail("bug", repr(error), self.name)
        else:
            if not isinstance(end, Finished):
                self.fail("hidden", "its stream ended without an end", self.name)
            elif self._is_still_there("completed"):
                self._check_end(end)

    def _is_still_there(self, outcome: Outcome) -> bool:
        """Note its end, unless it had left when that came."""
        if self.outcome == "cancelled":
            return False
        if self.outcome != "running":
            self.fail("wrong", f"{outcome} after its end", self.name)
        self._end(outcome)
        return True

    def _take(self, token: Token) -> None:
        """A token arrives. What was on its way when the client left is dropped."""
        if self.outcome == "cancelled":
            return
        if self.outcome != "running":
            self.fail("wrong", "a token after its end", self.name)
        self._check_token(token)
        if self.num_tokens == self.cancels_after and self.task is not None:
            self._end("cancelled")
            self.task.cancel()

    def _check_token(self, token: Token) -> None:
        right = self.wanted.answer.tokens
        if token.index != self.num_tokens:
            self._wrong(f"token {token.index} came where {self.num_tokens} was due")
        elif token.index >= len(right):
            self._wrong(f"token {token.index} came after the last")
        elif token != right[token.index]:
            self._wrong(
                f"wrong token {token.index}: {_shown(token)}, right is {_shown(right[token.index])}"
            )
        self.num_tokens += 1

    def _check_end(self, end: Finished) -> None:
        answer = self.wanted.answer
        right = (answer.reason, answer.stop, answer.text, len(answer.tokens))
        seen = (end.reason, end.stop, end.text, self.num_tokens)
        if seen != right or end.num_generated != len(answer.tokens):
            self._wrong(f"ended as {seen}, right is {right}")
        cached_max = len(self.wanted.prompt_ids) - 1 if self.may_find_kv else 0
        if not 0 <= end.num_cached <= cached_max:
            self._wrong(f"{end.num_cached} tokens were found, of {cached_max} at most")

    def _check_failure(self, failed: Failed) -> None:
        if failed.http_status < 429:
            self.fail("hidden", f"was blamed for others' faults: {failed.code}", self.name)

    def cut_off(self) -> None:
        """The proxy died: the client sees its connection end, which is no end of an answer."""
        if self.outcome == "running":
            self._end("cut off")

    def _wrong(self, text: str) -> None:
        self.fail("wrong", text, self.name)

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.on_end(self.name)
        late_s = self.now_s() - self.started_s - self.deadline_s
        if late_s > 0:
            self.fail("stuck", f"ended {late_s:.3f} s after its deadline", self.name)


def _shown(token: Token) -> str:
    """All that must be right; a token's own repr keeps its id to itself."""
    text = f"id {token.token_id} {token.text!r}"
    return text if token.logprobs is None else f"{text} {token.logprobs}"
