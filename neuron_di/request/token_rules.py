"""What a client forbids or favours, token by token: made once per request, read at every token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuron_di.obs import get_logger
from neuron_di.request.bad_words import BadWords
from neuron_di.request.grammar import GrammarCompiler, GrammarState
from neuron_di.request.tokenizer import Tokenizer
from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import SamplingParams

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """One request's. Only `grammar` has a state, which its owner, the request, advances."""

    allowed_ids: npt.NDArray[np.intp] | None = None  # None: all
    bias: tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]] | None = None  # ids, what is added
    bad_words: BadWords | None = None
    grammar: GrammarState | None = None


class TokenRuleMaker:
    """Makes the rules of one engine's requests. Used by one thread at a time; it may block.

    Next: neuron_di/engine/logit_masks.py
    """

    def __init__(
        self, tokenizer: Tokenizer, *, num_vocab: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._num_vocab = num_vocab
        self._words = Vocabulary(tokenizer, num_vocab=num_vocab, eos_token_ids=eos_token_ids)
        self._grammars = GrammarCompiler(self._words)

    def prepare(self) -> None:
        """Have ready what the first grammar would wait for. Of a large vocabulary that takes a
        second or more, in which no other thread of this process runs: the library has the
        interpreter's lock.
        """
        try:
            self._words.for_grammars  # noqa: B018 - it is kept
        except Exception as error:  # those who ask for a grammar are told
            _log.warning("grammars_not_prepared", error=type(error).__name__)

    def rules_of(self, params: SamplingParams) -> TokenRules | None:
        """Fresh rules of checked parameters, or None. BadRequest names the field at fault."""
        if not has_token_rules(params):
            return None
        grammar, bias, allowed = params.grammar, params.logit_bias, params.allowed_token_ids
        return TokenRules(
            allowed_ids=None if allowed is None else np.array(allowed, dtype=np.intp),
            bias=(
                np.array([token_id for token_id, _ in bias], dtype=np.intp),
                np.array([value for _, value in bias], dtype=np.float32),
            )
            if bias
            else None,
            bad_words=(
                BadWords(params.bad_words, self._tokenizer, self._num_vocab)
                if params.bad_words
                else None
            ),
            grammar=(
                None if grammar is None else self._grammars.state_of(grammar, params.stop_token_ids)
            ),
        )


def has_token_rules(params: SamplingParams) -> bool:
    """Whether there is anything to make."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.grammar is not None
    )
