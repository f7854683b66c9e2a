"""The whole model in one process, for scripts: `LLM(folder).generate(["Once upon a time"])`.

The same engine as a worker of role "both", without sockets.
"""

import atexit
import operator
import os
import queue
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Self

import msgspec

from neuron_di.config import EngineOptions, options_of_values
from neuron_di.core import BlockPool, CombinedScheduler
from neuron_di.engine import Broken, Emitted, Ended, Engine, EngineEvent, Key
from neuron_di.errors import BadRequest, LocalProtocolError, NeuronDiError, Preempted
from neuron_di.request import (
    OutputText,
    Request,
    TokenRuleMaker,
    resolve_max_tokens,
)
from neuron_di.types import FinishReason, RequestId
from neuron_di.wire import SamplingParams
from neuron_di.wire.sampling_rules import check_sampling
from neuron_di.worker import load_model


@dataclass(slots=True)
class Generation:
    """One prompt's answer. `token_ids` holds every generated id, also of text that was cut."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        return f"Generation({len(self.token_ids)} tokens, finish_reason={self.finish_reason!r})"


class LLM:
    """Owns the model. Close it, or use it in a `with`, to give the memory back.

    Any thread may call it; calls wait for each other. A process that is forked from one that has
    computed may make one with threads=1 only. `options` are a worker's for computing, by
    their keys: device, dtype, decode_batch, threads, num_blocks, batch_invariant, ...
    """

    def __init__(self, model: str, **options: Any) -> None:
        limits = options_of_values(EngineOptions, options)
        self._model = load_model(model, None, "both", limits)
        limits = self._model.limits(limits)
        self._waiting_max = limits.waiting_max
        pool = BlockPool(self._model.backend.pool.num_blocks)
        scheduler = CombinedScheduler(
            pool,
            block_size=limits.block_size,
            batch_size=limits.decode_batch,
            chunk_tokens=limits.chunk,
            waiting_max=limits.waiting_max,
            reserve_tokens=limits.reserve_tokens,
            prefixes=self._model.prefix_cache(limits, pool),
        )
        self._lock = threading.Lock()  # held while prompts are answered: events are of one call
        self._is_closed = False
        self._pid = os.getpid()
        self._events: queue.SimpleQueue[list[EngineEvent]] = queue.SimpleQueue()
        self._engine = Engine(
            self._model.backend,
            scheduler,
            self._model.tokenizer,
            self._model.eos_token_ids,
            sink=self._events.put,
        )
        self._engine.start()
        atexit.register(self._stop_computing)
        self._num_requests = 0
        self._default_sampling = SamplingParams(**self._model.sampling_defaults.given())
        self._rules = TokenRuleMaker(
            self._model.tokenizer,
            num_vocab=self._model.backend.num_vocab,
            eos_token_ids=self._model.eos_token_ids,
        )

    def generate(
        self,
        prompts: str | Sequence[int] | Iterable[str | Sequence[int]],
        sampling: SamplingParams | None = None,
    ) -> list[Generation]:
        """Answer prompts, given as text or ids, all with the same parameters, in their order.

        One prompt alone is a list of one. Without a seed each draws numbers of its own. Without
        `sampling` they are drawn as the model's generation_config.json says.

        BadRequest when a prompt or a parameter cannot be; nothing is computed then. An
        error that one meets later, such as TooLarge for the KV memory, is raised when all have
        ended, and no answer is returned.
        LocalProtocolError once it is closed, and in a forked process.
        """
        listed = _listed(prompts)
        if self._is_copy():
            raise LocalProtocolError("this LLM is another process's: make one in each")
        with self._lock:
            if self._is_closed:
                raise LocalProtocolError("this LLM is closed")
            return self._generate(listed, self._checked(sampling or self._default_sampling))

    def close(self) -> None:
        """May be called twice. Does nothing in a forked process, which owns none of it."""
        if self._is_copy():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            atexit.unregister(self._stop_computing)
            self._engine.stop()
            self._model.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop_computing(self) -> None:
        """Before the interpreter ends, which breaks off a thread that is in torch with an abort.
        Without the lock: who has it waits for answers that nobody wants any more."""
        if not self._is_copy():
            self._engine.stop()

    def _is_copy(self) -> bool:
        """Whether this is a forked process: there its threads are not, and locks may stay held."""
        return self._pid != os.getpid()

    def _generate(
        self, listed: Sequence[str | Sequence[int]], sampling: SamplingParams
    ) -> list[Generation]:
        requests = [self._request(prompt, sampling) for prompt in listed]
        answers = {request.key: Generation(request.prompt_ids) for request in requests}
        in_order = list(answers.values())
        for start in range(0, len(requests), self._waiting_max):
            self._run(requests[start : start + self._waiting_max], answers)
        return in_order

    def _run(self, requests: list[Request], answers: dict[Key, Generation]) -> None:
        running = {request.key: request for request in requests}
        try:
            broken = self._collect(running, answers)
        except BaseException:  # Ctrl-C: nobody waits for these any more
            for key in running:
                self._engine.cancel(key)
            raise
        if broken is not None:  # raised when all have ended: the next call starts afresh
            raise broken

    def _collect(
        self, running: dict[Key, Request], answers: dict[Key, Generation]
    ) -> NeuronDiError | None:
        """Until all have ended. The error of one that broke."""
        for request in running.values():
            self._engine.submit(request)
        broken: NeuronDiError | None = None
        while running:
            for event in self._events.get():
                if event.key not in running:
                    continue  # of an earlier call that was interrupted
                answer = answers[event.key]
                if isinstance(event, Emitted):
                    answer.text += event.token.text
                    answer.token_ids.append(event.token.token_id)
                    continue
                if isinstance(event, Ended):
                    answer.text += event.text
                    answer.finish_reason = event.reason
                elif isinstance(event, Broken) and isinstance(event.error, Preempted):
                    again = self._continuation(running[event.key], answer)
                    running[again.key], answers[again.key] = again, answer
                    self._engine.submit(again)
                elif isinstance(event, Broken):
                    broken = event.error
                del running[event.key]
        return broken

    def _continuation(self, request: Request, answer: Generation) -> Request:
        """Of one that gave way to others: the same from where its answer stands."""
        given = tuple(answer.token_ids)
        return self._make(request.prompt_ids, request.sampling, given, request.age_order)

    def _checked(self, sampling: SamplingParams) -> SamplingParams:
        """Each field of its type: a text that is taken for a list stops at each of its letters,
        and half a token ends the engine."""
        if not isinstance(sampling, SamplingParams):
            raise BadRequest("sampling is SamplingParams(...)", param="sampling")
        try:
            given = msgspec.to_builtins(sampling, enc_hook=_plain_number)
            sampling = msgspec.convert(given, SamplingParams)
        except (TypeError, ValueError) as error:
            raise BadRequest(f"sampling parameters: {error}", param="sampling") from None
        check_sampling(sampling, self._model.backend.num_vocab)
        if sampling.logprobs is not None:
            raise BadRequest("LLM gives no logprobs: ask a server", param="logprobs")
        return sampling

    def _request(self, prompt: str | Sequence[int], sampling: SamplingParams) -> Request:
        tokenizer = self._model.tokenizer
        num_vocab = self._model.backend.num_vocab
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=random.getrandbits(63))
        prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        if not all(0 <= token_id < num_vocab for token_id in prompt_ids):
            raise BadRequest(f"a token id is outside of 0..{num_vocab - 1}", param="prompt")
        return self._make(prompt_ids, sampling)

    def _make(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        given: tuple[int, ...] = (),
        age_order: float | None = None,
    ) -> Request:
        tokenizer = self._model.tokenizer
        self._num_requests += 1
        return Request(
            RequestId(f"offline-{self._num_requests}"),
            0,
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_tokens=resolve_max_tokens(sampling, len(prompt_ids), self._model.context_tokens),
            output=OutputText(
                tokenizer,
                stop=sampling.stop,
                skip_special_tokens=sampling.skip_special_tokens,
                min_tokens=sampling.min_tokens,
                include_stop=sampling.include_stop_str_in_output,
                prompt_ids=prompt_ids,
            ),
            given=given,
            age_order=self._num_requests if age_order is None else age_order,
            rules=self._rules.rules_of(sampling),
        )


def _listed(prompts: Any) -> list[Any]:
    """Any iterable of prompts, or one alone. One that has no order is none."""
    if isinstance(prompts, str | bytes | bytearray):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | set):
        raise BadRequest("prompts are a list of texts or of lists of token ids", param="prompt")
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _ids(prompt: Sequence[int]) -> list[int]:
    """As Python's own numbers, whatever library's they are: other processes are told of them."""
    try:
        if isinstance(prompt, bytes | bytearray):  # numbers to Python, and text to who wrote them
            raise TypeError
        return [int(operator.index(token_id)) for token_id in prompt]
    except TypeError:
        raise BadRequest("a prompt is text or token ids", param="prompt") from None


def _plain_number(number: Any) -> int | float:
    """Another library's number. TypeError for anything else."""
    return operator.index(number) if isinstance(number, Integral) else float(number)
