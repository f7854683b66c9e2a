"""What a piece of a model's text adds to an assistant's message, and how tags are looked for."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallPart:
    """A piece of one tool call. `name` comes with its first piece only, which is one for sure."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class MessageParts:
    """What was found in one piece of text. Of every call there is one part at most."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def add_call(self, index: int, name: str | None, arguments: str) -> None:
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += arguments
        else:
            self.calls.append(CallPart(index, name, arguments))


def num_held(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`, which is not in it.

    They must wait: what follows says whether they are text or tag.
    """
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
