"""Rules of what stands around the JSON of tool calls, in the formats that models write them.

hermes       <tool_call>{…}</tool_call>, as often as there are calls
mistral      [TOOL_CALLS][{…}, …]
llama3_json  {…}; {…}, perhaps after <|python_tag|>
"""

import json

from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import CallGrammar, ToolFormat

# In the library's dialect of Lark. `json` is a grammar of its own: that of one call.
_ONE: dict[ToolFormat, str] = {
    "hermes": "start: call SPACE?",
    "mistral": 'start: open SPACE? "[" SPACE? @json SPACE? "]"',
    "llama3_json": "start: (open SPACE?)? @json",
}
_MANY: dict[ToolFormat, str] = {
    # A model may write a line break behind its last call: it would have to call once more.
    "hermes": "start: (call SPACE?)+",
    "mistral": 'start: open SPACE? "[" SPACE? @json (SPACE? "," SPACE? @json)* SPACE? "]"',
    "llama3_json": 'start: (open SPACE?)? @json (SPACE? ";" SPACE? @json)*',
}
_OPEN: dict[ToolFormat, str] = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3_json": "<|python_tag|>",
}
_CLOSE = "</tool_call>"
_SPACE = r"SPACE: /[ \t\r\n]{1,8}/"  # not without end, as in `grammar_source`


def call_rules(calls: CallGrammar, vocabulary: Vocabulary) -> str:
    """They refer to `json`, which is what one call's JSON must be."""
    lines = [
        (_MANY if calls.is_parallel else _ONE)[calls.format],
        f"open: {_tag(_OPEN[calls.format], vocabulary)}",
        _SPACE,
    ]
    if calls.format == "hermes":
        lines.append("call: open SPACE? @json SPACE? close")
        lines.append(f"close: {_tag(_CLOSE, vocabulary)}")
    return "\n".join(lines)


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
