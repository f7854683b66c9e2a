"""What a request's answer must be: the fake model run alone, with nothing to go wrong.

Shares with the workers what defines an answer (sampler, stop rules, output text), and none of
what may break it: no scheduler, no blocks, no transfer, no attempts.
"""

from dataclasses import dataclass

import numpy as np
import torch

from neuron_di.engine.sampler import describe_logprobs, sample
from neuron_di.request import OutputText, Request, accept_token, resolve_max_tokens
from neuron_di.testing.fake_model import (
    DECODE_KERNEL,
    EOS_ID,
    PROMPT_KERNEL,
    FakeTokenizer,
    logits_row,
    position_kv,
)
from neuron_di.types import FinishReason, RequestId
from neuron_di.wire import SamplingParams, Token

_TOKENIZER = FakeTokenizer()


@dataclass(frozen=True, slots=True)
class Answer:
    """Every token in order, and the end. `text` and `stop` are the last event's."""

    tokens: tuple[Token, ...]
    reason: FinishReason
    stop: str | int | None
    text: str


def reference_answer(
    prompt_ids: tuple[int, ...], sampling: SamplingParams, *, context_tokens: int
) -> Answer:
    """A pure function of its arguments."""
    request = Request(
        RequestId("reference"),
        0,
        prompt_ids=list(prompt_ids),
        sampling=sampling,
        max_tokens=resolve_max_tokens(sampling, len(prompt_ids), context_tokens),
        output=OutputText(
            _TOKENIZER,
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            prompt_ids=prompt_ids,
        ),
    )
    kv = [0]
    for token_id in prompt_ids:
        kv.append(position_kv(kv[-1], token_id, PROMPT_KERNEL))
    kernel = PROMPT_KERNEL
    tokens: list[Token] = []
    while True:
        logits_V = logits_row(np.array(kv[1:], np.uint64), kernel)
        (sampled,) = sample(torch.from_numpy(logits_V[np.newaxis]), (request,), (EOS_ID,))
        logprobs = describe_logprobs(_TOKENIZER, sampled, request.output)
        outcome = accept_token(request, sampled.token_id, (EOS_ID,))
        tokens.append(
            Token(
                index=len(tokens),
                token_id=sampled.token_id,
                text=outcome.text,
                logprobs=logprobs,
            )
        )
        if (finish := outcome.finish) is not None:
            return Answer(tuple(tokens), finish.reason, finish.stop, finish.text)
        kernel = DECODE_KERNEL
        kv.append(position_kv(kv[-1], sampled.token_id, kernel))
