"""From a chat's messages to the text the model was trained on: the model's Jinja template.

The template comes from the model's folder, the messages from a client. So the template runs in
Jinja's sandbox, and the number of messages and the length of the text are limited.
"""

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from neuron_di.clock import unix_s
from neuron_di.errors import BadRequest, TooLarge
from neuron_di.request.chat_messages import check_messages

RENDERED_CHARS_MAX = 16 << 20

_KWARGS = "chat_template_kwargs"
_EFFORT = "reasoning_effort"
_NOW = "strftime_now"  # a function: what it is called with says how the time is written
# What has a field of its own in a request, or means something to a renderer.
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
    }
)
_TOOL_ROLE = re.compile("""["']tool["']""")
_PROBE = "shown-by-the-template"
_ASK = {"role": "user", "content": "a"}
_AS_OBJECT = {_PROBE: 1}  # a call's arguments
_AS_TEXT = json.dumps(_AS_OBJECT)
_NO_PARAMETERS = {"type": "object", "properties": {}}
_END_MARK = "<end-of-final-message> "  # with a space, which shows whether contents are trimmed


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChatExtras:
    """What a template gets beside the messages. The client's JSON, unchecked, where it is Any.

    `add_generation_prompt`: the text ends where the assistant's answer begins.
    `continue_final_message`: it ends where the last message ends, which the answer goes on with.
    `now_unix_s` is the time for a template that says it; None: the present.
    """

    tools: Any = None
    documents: Any = None
    template_kwargs: Any = None
    reasoning_effort: str | None = None
    now_unix_s: float | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """A compiled chat template. Renders as `transformers` does, so that prompts are the same.

    `special_tokens` are the variables templates know them by, such as `bos_token`. Raises
    jinja2.TemplateError when `source` is not a template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self.source = source
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        free = find_undeclared_variables(environment.parse(source))
        self._variables = free - {*environment.globals, _NOW}

    def render(self, messages: Any, extras: ChatExtras | None = None) -> str:
        """The prompt's text. `messages` is the client's JSON.

        Raises BadRequest, whose param is "messages" or names one of the extras, or TooLarge.
        """
        extras = extras or ChatExtras()
        if extras.add_generation_prompt and extras.continue_final_message:
            raise BadRequest(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        checked = check_messages(
            messages,
            takes_tool_calls="tool_calls" in self.source,
            takes_calls_with_content=self._takes_calls_with_content,
            takes_results=self._takes_results,
            takes_system=self._takes_system,
            knows_developer=self._knows_developer,
        )
        broken = _broken_calls(checked)
        calls = [call for message in checked for call in message.get("tool_calls", ())]
        if calls and self._joins_arguments:
            for function in (call["function"] for call in calls):
                if not isinstance(function["arguments"], str):  # else it is a text that broke
                    function["arguments"] = _to_json(function["arguments"])
        continued = _mark_end(checked[-1]) if extras.continue_final_message else None
        variables = {
            "messages": checked,
            "tools": self._completed(self.check_taken("tools", extras.tools)),
            "documents": self.check_taken("documents", extras.documents),
            "add_generation_prompt": extras.add_generation_prompt,
            **self._check_kwargs(extras.template_kwargs, extras.reasoning_effort),
        }
        self._check_system_shown(checked, variables)
        try:
            text = self._generate(extras.now_unix_s, variables)
        except BadRequest as error:
            if not broken:
                raise
            words = f"{error.message}; the arguments in {broken} are no JSON"
            raise BadRequest(words, param="messages") from None
        return text if continued is None else _cut_after(text, continued)

    def _generate(self, now_unix_s: float | None, variables: dict[str, Any]) -> str:
        now_unix_s = unix_s() if now_unix_s is None else now_unix_s
        variables |= {_NOW: partial(_strftime, now_unix_s), **self._special_tokens}
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > RENDERED_CHARS_MAX:
                    raise TooLarge(
                        f"the chat is longer than {RENDERED_CHARS_MAX} characters", param="messages"
                    )
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from None
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            # A template is code that was never tried on these messages.
            raise BadRequest(
                "the model's chat template cannot render these messages", param="messages"
            ) from None
        return "".join(pieces)

    @cached_property
    def _takes_results(self) -> bool:
        """Whether a tool's message is shown: the template names this role, or shows any role's."""
        if _TOOL_ROLE.search(self.source):
            return True
        answer = {"role": "assistant", "content": "b"}
        return self._shows(_ASK, answer, {"role": "tool", "content": _PROBE})

    @cached_property
    def _takes_system(self) -> bool:
        """Whether a system's message that begins a chat is shown. Some pass over it."""
        return self._shows({"role": "system", "content": _PROBE}, _ASK)

    @cached_property
    def _knows_developer(self) -> bool:
        """As of a system's. A template may name a developer for another reason."""
        developer = {"role": "developer", "content": _PROBE}
        return "developer" in self.source and self._shows(developer, _ASK)

    def _check_system_shown(
        self, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> None:
        """Refuse further messages of a system where the template shows only one of them."""
        places = [
            index
            for index, message in enumerate(messages)
            if message["role"] in ("system", "developer")
        ]
        if places in ([], [0]):  # see `_takes_system`
            return
        probed = list(messages)
        for index in places:
            probed[index] = {**messages[index], "content": f"{_PROBE}-{index}-"}
        try:
            text = self._generate(None, {**variables, "messages": probed})
        except BadRequest:  # it says itself what it does not take
            return
        for index in places:
            if f"{_PROBE}-{index}-" not in text:
                raise BadRequest(
                    f"this model's chat template passes over messages[{index}]: "
                    "it takes no system's message at this place of these messages",
                    param=f"messages[{index}].role",
                )

    @cached_property
    def _takes_calls_with_content(self) -> bool:
        """Whether calls are shown beside a content, as without. DeepSeek-R1's are without only."""
        return self._shows(_ASK, _called("b", _AS_OBJECT)) or not any(
            self._shows(_ASK, _called(None, each), or_else=False) for each in (_AS_OBJECT, _AS_TEXT)
        )

    @cached_property
    def _joins_arguments(self) -> bool:
        """Whether a call's arguments must be JSON's text, not an object. DeepSeek-R1's must."""
        content = "" if self._takes_calls_with_content else None
        takes_object, takes_text = (
            self._shows(_ASK, _called(content, each), or_else=False)
            for each in (_AS_OBJECT, _AS_TEXT)
        )
        return takes_text and not takes_object

    def _shows(
        self,
        *messages: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        or_else: bool = True,
    ) -> bool:
        """Whether the probe in these is in the text; `or_else`: where there is no text."""
        variables = {"messages": list(messages)} | ({} if tools is None else {"tools": tools})
        try:
            return _PROBE in self._generate(None, variables)
        except BadRequest:  # as a rule it says itself what it does not take
            return or_else

    def check_taken(self, name: str, value: Any) -> list[dict[str, Any]] | None:
        """The client's JSON of the variable `name`, a list of objects. Raises BadRequest."""
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise BadRequest(f"{name} must be a list of objects", param=name)
        if value and name not in self._variables:
            raise BadRequest(f"this model's chat template takes no {name}", param=name)
        return value

    def _completed(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """The tools as a template reads them: clients may leave out more than some can bear."""
        if not tools:
            return None
        description = {"description": ""} if self._needs_description else {}
        return [_complete(tool, description) for tool in tools]

    @cached_property
    def _needs_description(self) -> bool:
        """Whether a tool without one cannot be shown, and one with an empty one can."""
        tool = {"type": "function", "function": {"name": _PROBE, "parameters": _NO_PARAMETERS}}
        shown = (
            self._shows(_ASK, tools=[_complete(tool, more)], or_else=False)
            for more in ({}, {"description": ""})
        )
        return not next(shown) and next(shown)

    def _check_kwargs(self, kwargs: Any, reasoning_effort: str | None) -> dict[str, Any]:
        """Variables of this template, and none that is ours to set."""
        kwargs = {} if kwargs is None else kwargs
        if not isinstance(kwargs, dict):
            raise BadRequest("chat_template_kwargs must be an object", param=_KWARGS)
        for name in kwargs:
            if name in _RESERVED or name in self._special_tokens:
                raise BadRequest(f"chat_template_kwargs may not set {name!r}", param=_KWARGS)
            if name not in self._variables:
                raise BadRequest(
                    f"this model's chat template takes no {name[:64]!r}", param=_KWARGS
                )
        if reasoning_effort is None:
            return kwargs
        if _EFFORT not in self._variables:
            raise BadRequest(f"this model's chat template takes no {_EFFORT}", param=_EFFORT)
        if _EFFORT in kwargs:
            raise BadRequest(f"{_EFFORT} is in {_KWARGS}, too: send one", param=_EFFORT)
        return {**kwargs, _EFFORT: reasoning_effort}


def _called(content: str | None, arguments: Any) -> dict[str, Any]:
    """An answer with a call, to see whether a template shows it. Some want an id of nine chars."""
    function = {"name": _PROBE, "arguments": arguments}
    call = {"id": "callcall1", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _complete(tool: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A tool with what a client may leave out, by OpenAI's API, and `more` where it has none.

    A function without parameters is one that takes none: templates read their `properties`, and
    models were trained on tools that have some.
    """
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    said = {**more, **{key: value for key, value in function.items() if value is not None}}
    said["parameters"] = said.get("parameters") or _NO_PARAMETERS
    return {**tool, "function": said}


def _broken_calls(messages: list[dict[str, Any]]) -> str:
    """Where the first call is whose arguments stayed a text; nothing where none is."""
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                return f"messages[{index}].tool_calls"
    return ""


def _mark_end(message: dict[str, Any]) -> str:
    """Put the mark behind the message's content, in place; returns the content as it was."""
    if "tool_calls" in message:  # they stand behind the content
        raise BadRequest("a final message with tool calls cannot be continued", param="messages")
    content: str = message["content"]
    message["content"] = content + _END_MARK
    return content


def _cut_after(text: str, content: str) -> str:
    """The text up to the end of the final message, which `_mark_end` has marked."""
    mark = _END_MARK.rstrip()
    place = text.rfind(mark)
    if place < 0 or content.strip() not in text:
        raise BadRequest(
            "the model's chat template does not show the final message as it is, "
            "so it cannot be continued",
            param="continue_final_message",
        )
    # A template that trims contents took the mark's own space, and would take the content's.
    keeps_spaces = text.startswith(_END_MARK, place)
    return text[:place] if keeps_spaces else text[:place].rstrip()


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - the name and form are Jinja's

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime(at_unix_s: float, form: str) -> str:
    return datetime.fromtimestamp(at_unix_s, UTC).astimezone().strftime(form)
