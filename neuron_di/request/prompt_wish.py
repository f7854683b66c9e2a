"""What a client wants to be told of its prompt."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptWish:
    """`text` is the prompt's. `num_top`: logprobs with so many alternatives; None: none at all."""

    text: str
    num_top: int | None = None

    def __repr__(self) -> str:
        return f"PromptWish(num_top={self.num_top})"
