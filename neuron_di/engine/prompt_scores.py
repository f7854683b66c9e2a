"""How probable a model finds the prompt it is given, worked out while the prompt is computed."""

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from neuron_di.engine.logit_masks import Floats
from neuron_di.engine.sampler import SampledToken, describe_logprobs, raw_logprobs
from neuron_di.request import PromptWish, Request, Tokenizer
from neuron_di.wire import PromptReport, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


class PromptScores:
    """Collects the report of one request's prompt. Needs the logits of *all* its positions: none
    may come out of a cache.

    The logits at a position say how probable the next token is, so the first token has none.
    """

    def __init__(self, request: Request, wish: PromptWish, tokenizer: Tokenizer) -> None:
        self._token_ids = request.prompt_ids
        self._text = wish.text
        self._num_top = wish.num_top
        self._tokenizer = tokenizer
        self._logprobs: list[TokenLogprobs | None] = [None]

    @property
    def needs_logits(self) -> bool:
        return self._num_top is not None

    def read(self, position: int, logits_TV: "Tensor") -> None:
        """Take the logits of some positions, which come in order."""
        assert self._num_top is not None, "nobody wants logprobs"
        assert position == len(self._logprobs) - 1, "positions come in order, each once"
        followers = self._token_ids[position + 1 : position + 1 + len(logits_TV)]
        for row_V, token_id in zip(logits_TV.numpy(), followers, strict=False):
            raw = raw_logprobs(row_V, token_id, self._num_top)
            logprobs = describe_logprobs(self._tokenizer, SampledToken(token_id, raw))
            assert logprobs is not None, "some were made"
            self._logprobs.append(replace(logprobs, rank=_rank(row_V, token_id)))

    def report(self) -> PromptReport:
        """All of it, once the prompt is computed."""
        report = PromptReport(text=self._text, token_ids=self._token_ids)
        if not self.needs_logits:
            return report
        assert len(self._logprobs) == len(self._token_ids), "every position was read"
        first = self._tokenizer.token_bytes(self._token_ids[0])
        return replace(report, logprobs=self._logprobs, first_bytes=list(first))


def _rank(raw_V: Floats, token_id: int) -> int:
    """From 1 for the most probable; of equals the lower id comes first."""
    own = raw_V[token_id]
    return 1 + int(np.count_nonzero(raw_V > own) + np.count_nonzero(raw_V[:token_id] == own))
