"""From a chat's messages to the text the model was trained on: the model's Jinja template.

The template comes from the model's folder, the messages from a client. So the template runs in
Jinja's sandbox, and the number of messages and the length of the text are limited.
"""

import json
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from neuron_di.clock import unix_s
from neuron_di.errors import BadRequest, TooLarge

MESSAGES_MAX = 10_000
RENDERED_CHARS_MAX = 16 << 20


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
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    def render(self, messages: Any) -> str:
        """The prompt up to where the assistant's answer begins.

        `messages` is the client's JSON. Raises BadRequest (param "messages") or TooLarge.
        """
        checked = _check_messages(messages)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=checked,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            ):
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


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with each content as one string and without the keys that are null."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    if len(messages) > MESSAGES_MAX:
        raise TooLarge(
            f"{len(messages)} messages, more than the limit of {MESSAGES_MAX}", param="messages"
        )
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object", param="messages")
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"{where}.role must be a string", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        # The parts are separate paragraphs, as vLLM has it.
        content = "\n".join(_part_text(f"{where}.content", part) for part in content)
    if not isinstance(content, str):
        raise BadRequest(
            f"{where}.content must be a string or a list of text parts", param="messages"
        )
    given = {key: value for key, value in message.items() if value is not None}
    return {**given, "content": content}


def _part_text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise BadRequest(
            f"{where} has a part of type {kind!r}; only 'text' is supported", param="messages"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"{where} has a text part without a text", param="messages")
    return text


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


def _strftime_now(form: str) -> str:
    return datetime.fromtimestamp(unix_s(), UTC).astimezone().strftime(form)
