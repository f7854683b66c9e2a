"""A model's tokens as bytes, and as the grammar library wants them."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from neuron_di.request.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Entry b holds eight flags, one per byte of it: which bits of the byte b are set, lowest first.
_FLAGS_OF_BYTE = (
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    .view(np.uint64)
    .reshape(256)
)

# Put before a text whose beginning a tokenizer changes: rare, and no part of a longer token.
_ANCHOR = "\x02"
_ANCHOR_TOKENS_MAX = 3


class Vocabulary:
    """The tokens 0..num_vocab-1 of a model, whose rows of logits have `num_vocab` entries.

    Special and EOS tokens are no text: a grammar never takes them for their own spelling.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, num_vocab: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.num_vocab = num_vocab
        self.eos_token_ids = tuple(i for i in dict.fromkeys(eos_token_ids) if i < num_vocab)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return [self.tokenizer.token_bytes(token_id) for token_id in range(self.num_vocab)]

    @cached_property
    def for_grammars(self) -> "LLTokenizer":
        """Built at its first use: it takes about a second for a large vocabulary."""
        from llguidance import LLTokenizer, TokenizerWrapper

        # A model without EOS gets a token behind its last that no row of logits can offer.
        eos_token_ids = list(self.eos_token_ids) or [self.num_vocab]
        tokens = [*self.token_bytes, b"", b""][: max(self.num_vocab, *eos_token_ids, 1) + 1]
        wrapper = TokenizerWrapper(_Tokens(self, tokens, eos_token_ids))
        return LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=eos_token_ids)


class MaskedRow:
    """Where one row of logits is written with some tokens masked. Reused: one thread's own."""

    def __init__(self, num_vocab: int) -> None:
        self._logits_V: npt.NDArray[np.float32] = np.empty(num_vocab, dtype=np.float32)
        self._flags = np.empty((num_vocab + 7) // 8, dtype=np.uint64)
        self._allowed_V = self._flags.view(np.bool_)[:num_vocab]

    def keep(
        self,
        logits_V: npt.NDArray[Any],
        bitmask: bytes,
        *also: npt.NDArray[np.intp],
    ) -> npt.NDArray[Any]:
        """The logits of the tokens whose bit is set, and of those of `also`; -inf elsewhere."""
        packed = np.frombuffer(bitmask, dtype=np.uint8, count=len(self._flags))
        # Not unpackbits, which has no `out`. With its default mode take would buffer, too.
        np.take(_FLAGS_OF_BYTE, packed, out=self._flags, mode="clip")
        for token_ids in also:
            self._allowed_V[token_ids] = True
        self._logits_V.fill(-np.inf)
        np.copyto(self._logits_V, logits_V, where=self._allowed_V)
        return self._logits_V

    def only(self, logits_V: npt.NDArray[Any], token_ids: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """The logits of these tokens; -inf elsewhere."""
        self._logits_V.fill(-np.inf)
        self._logits_V[token_ids] = logits_V[token_ids]
        return self._logits_V

    def drop(self, logits_V: npt.NDArray[Any], token_ids: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """The logits with -inf for these tokens."""
        np.copyto(self._logits_V, logits_V)
        self._logits_V[token_ids] = -np.inf
        return self._logits_V


class _Tokens:
    """What the library reads of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, vocabulary: Vocabulary, tokens: list[bytes], eos_token_ids: list[int]
    ) -> None:
        self._tokenizer = vocabulary.tokenizer
        self.tokens = tokens
        self.eos_token_id = eos_token_ids[0]
        special = {i for i in range(len(tokens)) if self._tokenizer.is_special(i)}
        self._no_text = special.union(eos_token_ids)
        self.special_token_ids = sorted(self._no_text)
        self._id_of_byte = {
            piece[0]: token_id
            for token_id, piece in enumerate(tokens)
            if len(piece) == 1 and token_id not in special
        }

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are exactly the text's: the library goes by them where text is forced.

        Some tokenizers write a space before a text, or cannot spell it: then byte by byte.
        """
        wanted = text.encode()
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._spell(ids) == wanted:
            return ids
        ids = self._tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
        for start in range(1, min(len(ids), _ANCHOR_TOKENS_MAX + 1)):
            if self._spell(ids[start:]) == wanted:
                return ids[start:]
        return [self._id_of_byte[byte] for byte in wanted if byte in self._id_of_byte]

    def _spell(self, ids: list[int]) -> bytes | None:
        if any(token_id >= len(self.tokens) or token_id in self._no_text for token_id in ids):
            return None
        return b"".join(self.tokens[token_id] for token_id in ids)
