"""What a chat template tells of its model: how it writes tool calls, and where it reasons.

Read off the template's source by marks that belong to one format only. A template that has none
of them, or marks of a format that merely looks alike, says nothing.
"""

from dataclasses import dataclass

from neuron_di.wire import ToolFormat

_CALL_TAGS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]",),
    "llama3_json": (),  # a call is known by what it says
}
_REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """As in a worker's record."""

    tool_format: ToolFormat | None = None
    reasoning: tuple[str, str] | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """What marks parts of an answer, and is no text itself."""
        calls = () if self.tool_format is None else _CALL_TAGS[self.tool_format]
        return calls + (self.reasoning or ())


def template_traits(source: str | None) -> TemplateTraits:
    """Look for the marks. None: a model without a chat template."""
    if source is None:
        return TemplateTraits()
    # Quotes are escaped or not, by the string of the template they lie in.
    plain = source.replace("\\", "")
    return TemplateTraits(_tool_format(plain), _reasoning(plain))


def is_in_reasoning(text: str, tags: tuple[str, str] | None, continued: str = "") -> bool:
    """Whether a prompt ends inside of reasoning: its template, or `continued`, opened it.

    `continued` is the content of the message that the answer goes on with. Tags elsewhere are
    what somebody wrote about.
    """
    if tags is None:
        return False
    start, end = tags
    if continued.rfind(start) > continued.rfind(end):
        return True
    return text.rstrip().endswith(start)


def _tool_format(source: str) -> ToolFormat | None:
    def has(*marks: str) -> bool:
        return all(mark in source for mark in marks)

    # Others put <function=…> or <arg_key> between the same tags.
    if has("<tool_call>", "</tool_call>", '"name"', '"arguments"'):
        return None if has("<function=") or has("<arg_key>") else "hermes"
    if has("[TOOL_CALLS]"):  # later ones write a call as NAME[ARGS]{…}
        return None if has("[ARGS]") else "mistral"
    if has('"name"', '"parameters"', "ipython", "<|start_header_id|>"):
        return "llama3_json"
    return None


def _reasoning(source: str) -> tuple[str, str] | None:
    # Templates that cut reasoning out of earlier answers need to name its end only.
    return next((tags for tags in _REASONING_TAGS if tags[1] in source), None)
