"""Free text that may come before a grammar begins: a model's reasoning, between two tags."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from neuron_di.request.vocabulary import Vocabulary

SPACES = b" \t\r\n"
# Of a prompt, so many tokens are looked at for a marker at its end.
_PROMPT_TOKENS = 64


class StartTag:
    """The bytes with which a model begins free text. Immutable: many requests share one."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._text = wanted = text.encode()
        ends_answers = set(vocabulary.eos_token_ids)
        pieces = [
            (token_id, piece)
            for token_id, piece in enumerate(vocabulary.token_bytes)
            if piece and piece in wanted and token_id not in ends_answers
        ]
        # Entry k: what may follow its first k bytes. No token that leads to where none goes on.
        self._next: list[npt.NDArray[np.intp]] = []
        is_way = [True] * (len(wanted) + 1)
        for k in reversed(range(len(wanted))):
            found = [
                token_id
                for token_id, piece in pieces
                if wanted.startswith(piece, k) and is_way[k + len(piece)]
            ]
            is_way[k] = bool(found)
            self._next.insert(0, np.array(found, dtype=np.intp))

    def ids_behind(self, begun: bytes) -> npt.NDArray[np.intp]:
        """Ids of the tokens that go on with it. `begun` is a part of it, from its start."""
        return self._next[len(begun)]

    def goes_on(self, begun: bytes) -> bool:
        return self._text.startswith(begun)

    def is_whole(self, begun: bytes) -> bool:
        return begun == self._text


class Marker:
    """The bytes that end free text. Immutable: many requests share one.

    A token may complete the marker and bring more bytes, which no grammar has seen. Such tokens
    are forbidden, except when those bytes are white space and `may_trail` allows that. EOS is
    forbidden, too: an answer is not complete before its grammar is.
    """

    def __init__(self, text: str, vocabulary: Vocabulary, *, may_trail: bool) -> None:
        self._text = text.encode()
        self._vocabulary = vocabulary
        self._may_trail = may_trail
        last = self._text[-1:]
        suspects = [
            (token_id, piece)
            for token_id, piece in enumerate(vocabulary.token_bytes)
            if last in piece[:-1]
        ]
        # Entry k: what is forbidden when the text ends with the marker's first k bytes.
        self._forbidden = [self._forbidden_behind(k, suspects) for k in range(len(self._text))]

    @property
    def num_tail(self) -> int:
        """How many bytes of a text can matter for what comes next."""
        return len(self._text) - 1

    def ends(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the marker, white space aside."""
        pieces = self._vocabulary.token_bytes
        text = b"".join(pieces[token_id] for token_id in prompt_ids[-_PROMPT_TOKENS:])
        return text.rstrip(SPACES).endswith(self._text)

    def is_in(self, text: bytes) -> bool:
        return self._text in text

    def forbidden_after(self, tail: bytes) -> npt.NDArray[np.intp]:
        """Ids of the tokens that may not follow; `tail` is the last `num_tail` bytes."""
        return self._forbidden[self.num_matched(tail)]

    def num_matched(self, tail: bytes) -> int:
        """How many of the marker's first bytes a text ends with, which are not all of it."""
        for num_matched in range(min(len(tail), self.num_tail), 0, -1):
            if tail.endswith(self._text[:num_matched]):
                return num_matched
        return 0

    def _forbidden_behind(
        self, num_matched: int, suspects: list[tuple[int, bytes]]
    ) -> npt.NDArray[np.intp]:
        found = list(self._vocabulary.eos_token_ids)
        for token_id, piece in suspects:
            _, marker, rest = (self._text[:num_matched] + piece).partition(self._text)
            if marker and rest and not (self._may_trail and not rest.strip(SPACES)):
                found.append(token_id)
        return np.array(found, dtype=np.intp)
