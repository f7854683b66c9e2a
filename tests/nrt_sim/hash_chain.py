"""What the program of hash_chain.c must compute, in Python: tests compare the two.

Nothing here reads device memory. The KV of a sequence follows from its tokens alone, so these
bytes and tokens are what a correct prefill, transfer and decode end in, on however many ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["HashChain"]

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


def _mix(number: int) -> int:
    number = (number + _ODD) & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def _fold(digest: int, row: bytes) -> int:
    for first in range(0, len(row), 8):
        word = int.from_bytes(row[first : first + 8], "little")
        digest = (digest ^ word) * _ODD & _MASK
        digest ^= digest >> 29
    return digest


@dataclass(frozen=True, kw_only=True, slots=True)
class HashChain:
    """One rank's share of the chain: heads first_head .. first_head + num_heads - 1 of all."""

    num_layers: int
    num_heads: int
    row_bytes: int  # of one position of one head
    vocabulary: int
    first_head: int = 0

    def kv(self, tokens: Sequence[int]) -> list[list[bytes]]:
        """[state][head] -> rows of all positions; state 2 * layer is K, 2 * layer + 1 is V."""
        return [
            [self._head(state, head, tokens) for head in range(self.num_heads)]
            for state in range(2 * self.num_layers)
        ]

    def partial(self, kv: Sequence[Sequence[bytes]]) -> int:
        """This rank's part of the next token, from the KV of all positions."""
        total = 0
        for state, heads in enumerate(kv):
            for head, rows in enumerate(heads):
                digest = self._seed(state, head)
                for first in range(0, len(rows), self.row_bytes):
                    digest = _fold(digest, rows[first : first + self.row_bytes])
                total += _mix(digest)
        return total & _MASK

    def next_token(self, partials: Iterable[int]) -> int:
        """From the partials of ranks that have each head once."""
        return _mix(sum(partials) & _MASK) % self.vocabulary

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.next_token([self.partial(self.kv(tokens))]))
        return tokens[len(prompt) :]

    def _seed(self, state: int, head: int) -> int:
        return _mix((state << 32) + self.first_head + head + 1)

    def _head(self, state: int, head: int, tokens: Sequence[int]) -> bytes:
        digest, rows = self._seed(state, head), b""
        for position, token in enumerate(tokens):
            seed = _mix(digest ^ _mix((token << 32) + position))
            words = [_mix(seed + i + 1 & _MASK) for i in range(-(-self.row_bytes // 8))]
            row = b"".join(word.to_bytes(8, "little") for word in words)[: self.row_bytes]
            digest = _fold(digest, row)
            rows += row
        return rows
