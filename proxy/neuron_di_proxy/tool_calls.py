"""The tools of a chat: what a client offers, whether the model may, must or may not call them.

    tool_choice   how the answer comes to have calls
    none          the tools are not shown to the model: it cannot call what it does not know
    auto          the tools are shown, and the model writes calls in the format of its chat
                  template; refused where the template knows none. Where a tool is `strict`, a
                  grammar binds calls: its arguments keep their schema, those of others are any
                  object. Where text must keep a format, all calls keep theirs
    required      a grammar lets the answer be calls only, of any model that is shown tools; a
                  format for text then binds nothing
    named         the same, and one call of that tool

A worker refuses tools, whatever the choice, where its model's chat template has no place for them.

Next: proxy/neuron_di_proxy/call_reader.py
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from neuron_di.errors import BadRequest
from neuron_di.types import RequestId
from neuron_di.wire import CallGrammar, Grammar, ToolFormat
from neuron_di.wire.sampling_rules import check_grammar, check_grammar_chars
from neuron_di_proxy.call_reader import CallReader
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.schema_part import as_part

TOOLS_MAX = 128

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_PARAMETERS = {"type": "object"}

_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]


class _Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class _NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class _NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _NamedFunction


_Choice = Literal["none", "auto", "required"] | _NamedTool

_tools_decoder = msgspec.json.Decoder(
    Annotated[list[_Tool], msgspec.Meta(min_length=1, max_length=TOOLS_MAX)]
)
_choice_decoder = msgspec.json.Decoder(_Choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Which tools an answer may or must call.

    `tools` is the client's own JSON, for the chat template; `parameters` has the JSON Schema of
    each tool's arguments, in the order of `tools`; `strict`, the tools whose calls must keep it in
    whatever answer. `model_format` is how the model writes calls.
    """

    tools: msgspec.Raw
    parameters: dict[str, dict[str, Any]]
    strict: frozenset[str]
    choice: Literal["auto", "required", "named"]
    chosen: str | None  # the tool that must be called; of choice "named" only
    is_parallel: bool
    model_format: ToolFormat | None

    def reader(self) -> CallReader:
        """A reader for the calls of one answer."""
        if self.choice == "auto":
            assert self.model_format is not None  # `read_tools` refuses it
            return CallReader(self.model_format, self.parameters, is_parallel=self.is_parallel)
        return CallReader("array", self._callable(), is_parallel=self.is_parallel)

    def call_id(self, request_id: RequestId, choice_index: int, index: int) -> str:
        """The id of a call: the same whichever proxy process or attempt writes it."""
        name = f"{request_id}/{choice_index}/{index}".encode()
        digest = hashlib.blake2b(name, digest_size=12).hexdigest()
        # Mistral's templates take back nothing but nine letters and digits.
        return digest[:9] if self.model_format == "mistral" else f"call_{digest}"

    def _callable(self) -> tuple[str, ...]:
        return tuple(self.parameters) if self.chosen is None else (self.chosen,)

    def callable_parameters(self) -> dict[str, dict[str, Any]]:
        """The JSON Schemas of these tools' arguments."""
        return {name: self.parameters[name] for name in self._callable()}

    def strict_parameters(self) -> dict[str, dict[str, Any]]:
        """As `parameters`, but of tools that are not strict any object will do."""
        return {
            name: schema if name in self.strict else _ANY_PARAMETERS
            for name, schema in self.parameters.items()
        }

    def calls_schema(self) -> dict[str, Any]:
        """The JSON Schema of an answer that is nothing but calls of these tools."""
        items, definitions = _call_parts("arguments", self.callable_parameters())
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
        if self.chosen is not None or not self.is_parallel:
            schema["maxItems"] = 1
        return schema | definitions

    def call_grammar(self, parameters: dict[str, dict[str, Any]]) -> CallGrammar:
        """What calls with these arguments must be that the model writes where it might write
        text."""
        assert self.model_format is not None  # `read_tools` refuses it
        key = "parameters" if self.model_format == "llama3_json" else "arguments"
        call, definitions = _call_parts(key, parameters)
        return CallGrammar(
            format=self.model_format,
            call_schema=msgspec.json.encode(call | definitions).decode(),
            is_parallel=self.is_parallel,
        )


def check_tools(tools: msgspec.Raw) -> None:
    """Raise BadRequest unless they can be offered."""
    _parameters(_decode(_tools_decoder, tools, "tools"))


def read_tools(
    tools: msgspec.Raw | None,
    tool_choice: msgspec.Raw | None,
    parallel: bool | None,
    traits: ModelTraits,
) -> ToolUse | None:
    """Read the fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat.

    None: the answer has no calls, and the model is shown no tools. Raises BadRequest.
    """
    choice = None if tool_choice is None else _decode(_choice_decoder, tool_choice, "tool_choice")
    if tools is None:
        if choice not in (None, "none"):
            raise BadRequest("`tool_choice` needs `tools`", param="tool_choice")
        if parallel is not None:
            raise BadRequest("`parallel_tool_calls` needs `tools`", param="parallel_tool_calls")
        return None
    offered = _decode(_tools_decoder, tools, "tools")
    parameters = _parameters(offered)
    chosen = choice.function.name if isinstance(choice, _NamedTool) else None
    if chosen is not None and chosen not in parameters:
        raise BadRequest("`tool_choice` names a tool that is not in `tools`", param="tool_choice")
    if choice == "none":
        return None
    if choice in (None, "auto") and traits.tool_format is None:
        raise BadRequest(
            "this model's chat template has no format for tool calls that is known here: "
            'if it takes tools at all, `tool_choice` must be "required", "none" or name a tool',
            param="tool_choice",
        )
    return ToolUse(
        tools=tools,
        parameters=parameters,
        strict=frozenset(tool.function.name for tool in offered if tool.function.strict),
        choice="named" if chosen else "required" if choice == "required" else "auto",
        chosen=chosen,
        is_parallel=parallel is not False,
        model_format=traits.tool_format,
    )


def tool_grammar(use: ToolUse, text: Grammar | None = None) -> Grammar | None:
    """What an answer must be that may or must call; None: anything. `text`: what it must be where
    it does not call. Raises BadRequest where that is too long, also where it does not matter."""
    if text is not None:
        check_grammar(text)
    if use.choice != "auto":
        parameters = use.callable_parameters()
    elif text is not None:
        parameters = use.parameters
    elif use.strict:
        parameters = use.strict_parameters()
    else:
        return None
    # Before a schema of all of them is made, which may be much longer.
    schemas = [msgspec.json.encode(schema).decode() for schema in parameters.values()]
    check_grammar_chars(sum(map(len, schemas)), "tools")
    if use.choice == "auto":
        calls = use.call_grammar(parameters)
        if text is None:
            return Grammar(kind="text", calls=calls, param="tools")
        return msgspec.structs.replace(text, calls=calls)
    value = msgspec.json.encode(use.calls_schema()).decode()
    return Grammar(kind="json_schema", value=value, param="tools")


def _call_parts(
    key: str, parameters: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON Schema of one call with its arguments as `key`, and what it refers to."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name in parameters
    ]
    parts = {name: as_part(schema, f"#/$defs/{name}") for name, schema in parameters.items()}
    return calls[0] if len(calls) == 1 else {"anyOf": calls}, {"$defs": parts}


def _parameters(tools: list[_Tool]) -> dict[str, dict[str, Any]]:
    """The schema of each tool's arguments. Raises BadRequest unless each is of an object."""
    parameters: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.function
        param = f"tools[{index}].function"
        if function.name in parameters:
            raise BadRequest("two tools have the same name", param=f"{param}.name")
        schema = function.parameters or _NO_PARAMETERS
        if schema.get("type") != "object":
            raise BadRequest(
                '`parameters` must be a JSON Schema of "type": "object"',
                param=f"{param}.parameters",
            )
        parameters[function.name] = schema
    return parameters


def _decode(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw, param: str) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _explain(str(error), param) from None
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(f"`{param}` is not valid", param=param) from None


def _explain(text: str, param: str) -> BadRequest:
    """An error that names the field, and repeats nothing that the client wrote but such names."""
    path = re.search(r"`\$(?P<inner>[^`]*)`$", text)
    field = re.search(r"field `([^`]*)`", text)
    where = param + (path["inner"] if path else "")
    if field is not None:
        where = f"{where}.{field[1]}"
    if text.startswith("Object contains unknown field"):
        return BadRequest(f"`{where}` is unknown or not supported", param=where)
    if text.startswith("Object missing required field"):
        return BadRequest(f"`{where}` is missing", param=where)
    if text.startswith("Invalid enum value"):
        return BadRequest(f"this value of `{where}` is not supported", param=where)
    reason = text.split(" - at ")[0]
    return BadRequest(f"`{where}` is not valid: {reason}", param=where)
