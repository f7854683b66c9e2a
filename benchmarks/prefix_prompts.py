"""Prompts that begin alike, and others that do not: the loads of the prefix cache's benchmark."""

import random
from dataclasses import dataclass
from typing import Literal

from benchmarks.interference_client import random_prompt

Kind = Literal["nothing shared", "shared beginning", "chat"]
FRESH, SHARED, CHAT = KINDS = ("nothing shared", "shared beginning", "chat")
FRESH_TOKENS = 128  # behind what a prompt has of an earlier one
CHAT_FIRST_TOKENS, CHAT_ANSWER_TOKENS = 1000, 872


@dataclass(frozen=True, slots=True)
class Cell:
    """A load. `num_tokens`: of the prompt, of what is shared, or of a chat's last prompt."""

    kind: Kind
    num_tokens: int
    num_at_once: int = 1

    @property
    def load(self) -> str:
        """What tells it from others of its kind."""
        if self.kind == CHAT:
            num_turns = len(range(CHAT_FIRST_TOKENS, self.num_tokens + 1, _CHAT_STEP))
            return f"{num_turns} turns, {CHAT_FIRST_TOKENS:,} to {self.num_tokens:,}"
        words = f"{self.num_tokens:,}"
        return words if self.num_at_once == 1 else f"{words}, {self.num_at_once} at once"

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.load}"


_CHAT_STEP = CHAT_ANSWER_TOKENS + FRESH_TOKENS
# (cell, how often a round asks): short prompts vary more, and cost less.
LOADS = (
    (Cell(FRESH, 512), 8),
    (Cell(FRESH, 2048), 3),
    (Cell(FRESH, 8000), 1),
    (Cell(SHARED, 512), 4),
    (Cell(SHARED, 2048), 2),
    (Cell(SHARED, 8000), 1),
    (Cell(CHAT, CHAT_FIRST_TOKENS + 5 * _CHAT_STEP), 1),
    (Cell(SHARED, 512, 4), 2),
    (Cell(SHARED, 2048, 4), 1),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """`num_known`: how many of its tokens an earlier prompt began with."""

    ids: list[int]
    num_known: int = 0

    def num_to_find(self, piece_tokens: int) -> int:
        """Whole pieces of what is known. The last token is computed in any case."""
        return min(self.num_known, len(self.ids) - 1) // piece_tokens * piece_tokens


@dataclass(frozen=True, slots=True)
class Visit:
    """What one round asks of a cell: steps of prompts that are sent together, in their order.

    `first` is not measured, and goes to those with the cache only: it makes the beginning known.
    """

    first: Prompt | None
    steps: list[list[Prompt]]


def make_visit(cell: Cell, num_steps: int, source: random.Random, num_vocab: int) -> Visit:
    def fresh(num_tokens: int) -> list[int]:
        return random_prompt(source, num_vocab, num_tokens)

    if cell.kind == FRESH:
        return Visit(None, [[Prompt(fresh(cell.num_tokens))] for _ in range(num_steps)])
    if cell.kind == SHARED:
        shared = fresh(cell.num_tokens)
        return Visit(
            Prompt(shared + fresh(FRESH_TOKENS)),
            [
                [
                    Prompt(shared + fresh(FRESH_TOKENS), cell.num_tokens)
                    for _ in range(cell.num_at_once)
                ]
                for _ in range(num_steps)
            ],
        )
    talk = [Prompt(fresh(CHAT_FIRST_TOKENS))]
    while len(talk[-1].ids) < cell.num_tokens:
        so_far = talk[-1].ids
        talk.append(Prompt(so_far + fresh(_CHAT_STEP), len(so_far)))
    return Visit(None, [[prompt] for prompt in talk])


def loads_within(tokens_max: int) -> list[tuple[Cell, int]]:
    return [load for load in LOADS if load[0].num_tokens <= tokens_max]
