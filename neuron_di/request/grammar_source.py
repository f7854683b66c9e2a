"""What the grammar library compiles: its own spelling of what an answer must be."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from neuron_di.errors import BadRequest
from neuron_di.request.call_rules import rules_behind_tag, rules_of_answer
from neuron_di.request.schema_refusal import (
    check_expression,
    check_schema,
    expression_refusal_of,
    refusal_of,
)
from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import CallGrammar, Grammar

# Between two parts of a document: nothing, a space, or a line break and its indentation. JSON
# allows any number, and a model that falls into writing spaces would never come out of it.
_WHITESPACE = r"\n[\x20\t]{0,32}|\x20"
# Without \\uXXXX, by which a key could be written so that the library takes it for another.
_ESCAPES = 'nrbtf\\"'


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """`refusal_of` tells a client, without its own words, why the library refused it."""

    text: str
    refusal_of: Callable[[str], str] = refusal_of


def source_of(part: Grammar | CallGrammar, vocabulary: Vocabulary) -> GrammarSource:
    """The source of a grammar; its `calls` are one of their own, but of text. Raises BadRequest."""
    from llguidance import LLMatcher

    if isinstance(part, CallGrammar):
        return GrammarSource(_calls_grammar(part, rules_of_answer(part, vocabulary)))
    if part.kind == "text":
        if (calls := part.calls) is None:
            raise BadRequest("any text is no grammar without calls", param=part.param)
        return GrammarSource(_calls_grammar(calls, rules_behind_tag(calls, vocabulary)))
    if part.kind == "choice":
        return GrammarSource(LLMatcher.grammar_from_lark(_choice_rule(part.value, part.param)))
    if part.kind == "regex":
        check_expression(part.value, param=part.param)
        return GrammarSource(LLMatcher.grammar_from_regex(part.value), expression_refusal_of)
    schema = '{"type":"object"}' if part.kind == "json_object" else part.value
    return GrammarSource(_json_grammar(schema, part.param))


def tools_of(part: Grammar | CallGrammar) -> Iterator[tuple[str, Grammar]]:
    """The tools that a grammar is made of, by name: what the arguments of each must be."""
    if isinstance(part, Grammar):
        schema = part.value if part.calls is None else part.calls.call_schema
    else:
        schema = part.call_schema
    members = _decoded(schema or "{}", part.param) if part.param == "tools" else None
    definitions = members.get("$defs") if isinstance(members, dict) else None
    for name, arguments in (definitions or {}).items():
        alone = {"$ref": f"#/$defs/{name}", "$defs": {name: arguments}}
        yield name, Grammar(kind="json_schema", value=json.dumps(alone), param="tools")


def _calls_grammar(calls: CallGrammar, rules: str) -> str:
    """The format's rules around calls, each of which is the schema's JSON."""
    (call,) = json.loads(_json_grammar(calls.call_schema, calls.param))["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": rules}, call | {"name": "json"}]})


def _json_grammar(schema: str, param: str) -> str:
    from llguidance import LLMatcher

    members = _decoded(schema, param)
    if not isinstance(members, dict):
        raise BadRequest("the schema must be a JSON object", param=param)
    # The library reads options of its own there, such as one that drops what it cannot do.
    if "x-guidance" in members:
        raise BadRequest("the schema must not hold 'x-guidance'", param=param)
    check_schema(members, param=param)
    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": _ESCAPES},
        )
    except ValueError as error:  # such as one that is nested too deeply
        raise BadRequest(refusal_of(str(error)), param=param) from None


def _choice_rule(value: str, param: str) -> str:
    choices = _decoded(value, param)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise BadRequest("a choice must be a list of strings that are not empty", param=param)
    return "start: " + " | ".join(map(_quoted, choices))


def _quoted(text: str) -> str:
    """As the library's rules spell a text: like JSON, but with an escape for DEL, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _decoded(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("the schema is not valid JSON", param=param) from None
