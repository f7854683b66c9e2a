"""Rules of what stands around the JSON of tool calls, in the formats that models write them.

hermes       <tool_call>{…}</tool_call>, as often as there are calls
mistral      [TOOL_CALLS][{…}, …]
llama3_json  {…}; {…}, perhaps after <|python_tag|>
"""

import json

from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import CallGrammar, ToolFormat

# In the library's dialect of Lark, behind a tag: one call or array, and as many as a model likes.
# `json` is a grammar of its own: that of one call.
_BODY: dict[ToolFormat, tuple[str, str]] = {
    "hermes": ("@json SPACE? close", "@json SPACE? close"),
    "mistral": (
        '"[" SPACE? @json SPACE? "]"',
        '"[" SPACE? @json (SPACE? "," SPACE? @json)* SPACE? "]"',
    ),
    "llama3_json": ("@json", '@json (SPACE? ";" SPACE? @json)*'),
}
_ANSWER: dict[ToolFormat, tuple[str, str]] = {
    # A model may write a line break behind its last call: it would have to call once more.
    "hermes": ("call SPACE?", "(call SPACE?)+"),
    "mistral": ("call", "call"),
    "llama3_json": ("(open SPACE?)? body", "(open SPACE?)? body"),
}
OPEN_TAGS: dict[ToolFormat, str] = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3_json": "<|python_tag|>",
}
_CLOSE = "</tool_call>"
_SPACE = r"SPACE: /[ \t\r\n]{1,8}/"  # not without end, as in `grammar_source`


def rules_of_answer(calls: CallGrammar, vocabulary: Vocabulary) -> str:
    """Of an answer that is nothing but calls. `json` is what one call's JSON must be."""
    return "\n".join(
        [
            f"start: {_ANSWER[calls.format][calls.is_parallel]}",
            "call: open SPACE? body",
            f"open: {_tag(OPEN_TAGS[calls.format], vocabulary)}",
            *_body(calls, vocabulary),
        ]
    )


def rules_behind_tag(calls: CallGrammar, vocabulary: Vocabulary) -> str:
    """Of what follows a tag in text, up to where text may go on."""
    return "\n".join(["start: SPACE? body", *_body(calls, vocabulary)])


def _body(calls: CallGrammar, vocabulary: Vocabulary) -> list[str]:
    lines = [f"body: {_BODY[calls.format][calls.is_parallel]}", _SPACE]
    if calls.format == "hermes":
        lines.append(f"close: {_tag(_CLOSE, vocabulary)}")
    return lines


def _tag(text: str, vocabulary: Vocabulary) -> str:
    """A tag as the model may write it: special tokens are not taken for their own spelling."""
    is_special = vocabulary.tokenizer.is_special
    ids = [
        token_id
        for token_id, piece in enumerate(vocabulary.token_bytes)
        if piece == text.encode() and is_special(token_id)
    ]
    ways = [json.dumps(text)]
    ways += [f"<[{each}]>" for each in ids if each not in vocabulary.eos_token_ids]
    return " | ".join(ways)
