"""Words that an answer may not hold, as sequences of tokens."""

from collections import defaultdict
from collections.abc import Sequence

from neuron_di.errors import BadRequest
from neuron_di.request.tokenizer import Tokenizer


class BadWords:
    """Immutable. A word counts as the tokens that a tokenizer makes of it, with and without a
    space before it. Written in other tokens, as a part of a longer word may be, it is let pass.

    Raises BadRequest (param "bad_words") when the model has no tokens for a word.
    """

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer, num_vocab: int) -> None:
        self._single: list[int] = []
        # By the token before a word's last: all before the last, and the last.
        self._longer: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for ids in {ids for word in words for ids in _sequences(word, tokenizer)}:
            *before, last = ids
            if max(ids) >= num_vocab:
                continue  # the model never writes it
            if before:
                self._longer[before[-1]].append((before, last))
            else:
                self._single.append(last)

    def completed_by(self, generated: Sequence[int]) -> list[int]:
        """The tokens that would complete a word, given the answer's ids so far."""
        if not generated or generated[-1] not in self._longer:
            return self._single
        return self._single + [
            last
            for before, last in self._longer[generated[-1]]
            if list(generated[-len(before) :]) == before
        ]


def _sequences(word: str, tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    plain = word.lstrip(" ") or word
    encoded = {
        tuple(tokenizer.encode(text, add_special_tokens=False, param="bad_words"))
        for text in (plain, " " + plain)
    }
    found = {ids for ids in encoded if ids}
    if not found:
        raise BadRequest("the model has no tokens for a word of bad_words", param="bad_words")
    return found
