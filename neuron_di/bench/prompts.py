"""Makes prompts of a given length, the same in every run with the same seed.

A prompt is a sequence of pieces, which are token ids where the endpoint takes them, and words
otherwise. Which pieces is a function of the seed and of what the part of the prompt is: the prefix
that all share, a block that a trace names by its hash, or what only this request has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from neuron_di.bench.lengths import Tokens

_SHARED, _BLOCK, _OWN, _WARM_UP = range(4)  # whose part it is: first of the key that seeds it

_TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home
water room mother area money story fact month lot right study book eye job word business issue side
kind head house service friend father power hour game line end member law car city community name
president team minute idea body information back parent face level office door health person art
war history party result change morning reason research girl guy moment air teacher force education
foot boy age policy music market sense nation plan garden river window letter table winter summer
paper horse stone field street bird tree road light small large early young old high long little
great good new white black green red blue quiet simple open warm cold bright happy walk run read
write sing play talk think look find give take make come stand turn begin keep hold bring carry
build grow learn follow
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Pieces:
    """What prompts are made of, in JSON. A prompt of n pieces has `tokens_per_piece * n +
    tokens_around` tokens, exactly so where the pieces are ids."""

    texts: Sequence[bytes]
    opening: bytes
    between: bytes
    closing: bytes
    tokens_per_piece: float = 1.0
    tokens_around: float = 0.0

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> "Pieces":
        return cls([b"%d" % each for each in ids], b"[", b",", b"]")

    @classmethod
    def of_words(cls, tokens_per_piece: float, tokens_around: float) -> "Pieces":
        words = [word.encode() for word in WORDS]
        return cls(words, b'"', b" ", b'"', tokens_per_piece, tokens_around)

    def num_for(self, num_tokens: float) -> int:
        """Pieces of a prompt with so many tokens, never none."""
        return max(1, round((num_tokens - self.tokens_around) / self.tokens_per_piece))

    def join(self, numbers: Iterator[int]) -> bytes:
        return self.opening + self.between.join(map(self.texts.__getitem__, numbers)) + self.closing


class PromptMaker:
    """Prompts for one endpoint, as JSON. `block_tokens`: of a hash's block, scaled as the trace."""

    def __init__(
        self, pieces: Pieces, seed: int, *, shared_tokens: int = 0, block_tokens: float = 1.0
    ) -> None:
        self._pieces = pieces
        self._seed = seed
        self._block_pieces = block_tokens / pieces.tokens_per_piece
        num_shared = round(shared_tokens / pieces.tokens_per_piece)
        self._shared = self._draw(_SHARED, 0, num_shared) if num_shared else []

    def prompt(self, index: int, num_tokens: int, hashes: Tokens | None = None) -> bytes:
        """The prompt of request `index`. Requests with equal first `hashes` have equal prefixes."""
        num = self._pieces.num_for(num_tokens)
        numbers = self._shared[:num]
        for place, block in enumerate(() if hashes is None else hashes):
            end = min(num, len(self._shared) + round((place + 1) * self._block_pieces))
            if end > len(numbers):
                numbers = numbers + self._draw(_BLOCK, int(block), end - len(numbers))
        if len(numbers) < num:
            numbers = numbers + self._draw(_OWN, index, num - len(numbers))
        return self._pieces.join(iter(numbers))

    def warm_up(self, index: int, num_tokens: int) -> bytes:
        """A prompt that no counted request has."""
        num = self._pieces.num_for(num_tokens)
        return self._pieces.join(iter(self._draw(_WARM_UP, index, num)))

    def _draw(self, whose: int, key: int, num: int) -> list[int]:
        rng = np.random.default_rng([self._seed, whose, key & 0xFFFF_FFFF_FFFF_FFFF])
        numbers: list[int] = rng.integers(0, len(self._pieces.texts), num).tolist()
        return numbers
