"""A client's messages, checked and made what chat templates were written for.

A template reads plain dictionaries: a content is one string, a call's arguments are an object
(or a text that is no JSON), and another key that was null is not there. That is how
`transformers` and vLLM hand messages over.
"""

from typing import Any

import msgspec

from neuron_di.errors import BadRequest, TooLarge

MESSAGES_MAX = 10_000
KEY_CHARS_MAX = 64  # of an unknown key that an error repeats

# What OpenAI's API and servers of open models know, beside what every message has.
_KEYS_OF_ROLE = {
    "system": (),
    "developer": (),
    "user": (),
    "assistant": ("tool_calls", "reasoning_content", "thinking", "reasoning"),
    "tool": ("tool_call_id",),
}
_KEYS_OF_ALL = ("role", "content", "name")
# Keys of OpenAI's own answers, which clients send back: nothing here reads what they may hold.
_UNREAD_KEYS = ("refusal", "audio", "function_call", "annotations", "provider_specific_fields")
_KNOWN_KEYS = {*_KEYS_OF_ALL, *_UNREAD_KEYS, *sum(_KEYS_OF_ROLE.values(), ())}

# One thing under the names that different templates read.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def check_messages(
    messages: Any,
    *,
    takes_tool_calls: bool,
    takes_calls_with_content: bool,
    takes_results: bool,
    takes_system: bool,
    knows_developer: bool,
) -> list[dict[str, Any]]:
    """The messages as a template reads them; `messages` is the client's JSON.

    `takes_tool_calls`: the template knows calls. `takes_calls_with_content`: also beside a content,
    which others read as text, calls or not; a template that does not knows calls by none.
    `takes_results`: that it shows a tool's messages. For another template these are refused: it
    would pass over them without a word. `takes_system`: the same of a system's message that begins
    a chat. `knows_developer`: that it knows this role. For another a developer is the system:
    templates pass over roles that they do not know, too, or name them to a model that never met
    them. Raises BadRequest or TooLarge, whose param is "messages" or a part of it.
    """
    if not isinstance(messages, list) or not messages:
        raise _bad("messages must be a list with at least one message")
    if len(messages) > MESSAGES_MAX:
        raise TooLarge(
            f"{len(messages)} messages, more than the limit of {MESSAGES_MAX}", param="messages"
        )
    checked = [
        _check_message(f"messages[{index}]", message) for index, message in enumerate(messages)
    ]
    for index, message in enumerate(checked):
        if "tool_calls" in message and not takes_tool_calls:
            raise _not_shown("tool calls", f"messages[{index}].tool_calls")
        if "tool_calls" in message and not takes_calls_with_content:
            if message["content"]:
                raise _not_shown("tool calls beside a content", f"messages[{index}].tool_calls")
            message["content"] = None
        if message["role"] == "tool" and not takes_results:
            raise _not_shown("results of tools", f"messages[{index}].role")
    if not knows_developer:
        for message in checked:
            if message["role"] == "developer":
                message["role"] = "system"
    if checked[0]["role"] == "system" and not takes_system:
        raise _not_shown("system's messages", "messages[0].role")
    return checked


def _check_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _bad(f"{where} must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _KEYS_OF_ROLE:
        # A role that is not OpenAI's may be anything: it is not repeated.
        roles = ", ".join(_KEYS_OF_ROLE)
        raise BadRequest(f"{where}.role must be one of {roles}", param=f"{where}.role")
    if role == "assistant":
        message = _as_answered(message)
    checked = _known(where, message, (*_KEYS_OF_ALL, *_KEYS_OF_ROLE[role]))
    if not isinstance(checked.get("name", ""), str):
        raise _bad(f"{where}.name must be a string")
    if role == "assistant":
        calls = checked.get("tool_calls")
        if calls is not None:
            checked["tool_calls"] = _check_calls(f"{where}.tool_calls", calls)
        # An answer may have none: it calls tools, all was reasoning, or a tag that is not shown.
        checked.setdefault("content", "")
    elif "content" not in checked:
        raise _bad(f"{where}.content must be a string or a list of text parts")
    checked["content"] = content_text(f"{where}.content", checked["content"])
    return _with_reasoning(checked)


def _as_answered(message: dict[str, Any]) -> dict[str, Any]:
    """An answer that a client's library sends back, without what it made of it."""
    answer = {key: value for key, value in message.items() if key != "parsed"}  # OpenAI's: a copy
    apart = answer.get("provider_specific_fields")  # LiteLLM's: keys that are not OpenAI's
    if isinstance(apart, dict):
        del answer["provider_specific_fields"]
        return apart | answer
    return answer


def _known(where: str, message: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """What a message of this role holds. Another key is refused, unless nothing is in it."""
    checked = {}
    for key, value in message.items():
        if key not in _KNOWN_KEYS:
            raise _unknown(where, key)
        if value is None or (value == [] and key != "content"):
            continue
        if key not in keys:
            of_role = "" if key in _UNREAD_KEYS else " in a message of this role"
            raise BadRequest(f"{where}.{key} is not supported{of_role}", param=f"{where}.{key}")
        checked[key] = value
    return checked


def content_text(where: str, content: Any) -> str:
    """The client's JSON of a content as one string. BadRequest, which names `where`."""
    if isinstance(content, list) and content:
        # The parts are separate paragraphs, as vLLM has it.
        parts = enumerate(content)
        content = "\n".join(_part_text(f"{where}[{index}]", part) for index, part in parts)
    if not isinstance(content, str):
        raise _bad(f"{where} must be a string or a list of text parts")
    return content


_OTHER_PARTS = ("image_url", "input_audio", "file", "refusal", "audio_url", "video_url")
# Beside a part's text clients say what another server may keep of the prompt. As with
# prompt_cache_key, no answer depends on it.
_PART_KEYS = ("type", "text", "cache_control", "prompt_cache_breakpoint")


def _part_text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        # A type that is not OpenAI's may be anything, a piece of the prompt too: not repeated.
        shown = repr(kind) if kind in (None, *_OTHER_PARTS) else "unknown"
        raise _bad(f"{where} is a part of type {shown}; only 'text' is supported")
    for key in part:
        if key not in _PART_KEYS:
            raise _unknown(where, key)
    text = part.get("text")
    if not isinstance(text, str):
        raise _bad(f"{where} is a text part without a text")
    return text


def _check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _bad(f"{where} must be a list")
    return [_check_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _check_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad(f"{where} must have a function with a name")
    # OpenAI's library puts arguments first; models were trained on calls that begin with a name.
    function = {"name": function["name"], "arguments": None, **function}
    function.pop("parsed_arguments", None)  # its copy
    arguments = function["arguments"] or None
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        # A call that was cut, or broke: the template is given the model's own text of it.
        except msgspec.DecodeError:
            return {**call, "function": function}
        except (UnicodeEncodeError, RecursionError):
            raise _bad(f"{where}.function.arguments is no text or nested too deeply") from None
    if arguments is None:  # a call without arguments
        arguments = {}
    if not isinstance(arguments, dict):
        raise _bad(f"{where}.function.arguments must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    for name in _REASONING_NAMES:
        if (reasoning := message.get(name)) is not None:
            if not isinstance(reasoning, str):
                raise _bad(f"a message's {name} must be a string")
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _unknown(where: str, key: str) -> BadRequest:
    shown = f"{where}.{key[:KEY_CHARS_MAX]}"
    return BadRequest(f"{shown} is not a known key", param=shown)


def _not_shown(what: str, param: str) -> BadRequest:
    return BadRequest(f"this model's chat template takes no {what}", param=param)


def _bad(message: str) -> BadRequest:
    return BadRequest(message, param="messages")
