"""Reads OpenAI's request documents, and takes apart only what it has not seen before.

Every field either works or is refused by its name; nothing a client asks for is dropped in
silence. Fields that say nothing of the answer (a user's name, a hint for caches) are taken. Prompts
are passed on unread.

A client sends the same fields again and again, with another prompt each time. So what was read of a
body is kept, and found again by the body's bytes without its prompt's. Of a body that differs in
nothing else only the prompt is looked at, as it would be otherwise, too.

Only plain requests are kept: one prompt, which is a text or a chat's messages, and no documents
beside it. What a key holds may be a user's name or a stop text, so there are few, none is long,
and none is ever shown.

Next: proxy/neuron_di_proxy/completion_request.py, proxy/neuron_di_proxy/chat_request.py
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from neuron_di.errors import BadRequest
from neuron_di_proxy.chat_request import read_chat
from neuron_di_proxy.choice_request import Endpoint
from neuron_di_proxy.client_request import ClientRequest
from neuron_di_proxy.completion_request import read_completion
from neuron_di_proxy.field_rules import TraitsOf, draw_seed
from neuron_di_proxy.json_object import Members, members_of
from neuron_di_proxy.model_traits import ModelTraits

KNOWN_MAX = 64  # requests that are kept
KNOWN_BYTES_MAX = 1024  # of one of them, without its prompt


class _Route(NamedTuple):
    """How one endpoint's requests are read. `is_plain` is asked of a prompt, as bytes of JSON."""

    read: Callable[..., ClientRequest]
    prompt: str  # the field's name
    is_plain: Callable[[bytes], object]
    others: frozenset[str]  # fields with which a request is not kept


_ROUTES: dict[Endpoint, _Route] = {
    "completions": _Route(read_completion, "prompt", re.compile(rb'"[^"]').match, frozenset()),
    "chat": _Route(
        read_chat, "messages", re.compile(rb"\[[ \t\r\n]*\{").match, frozenset({"documents"})
    ),
}
_PLAIN_BYTES = 64  # of a prompt's begin, which `is_plain` looks at


_Key = tuple[Endpoint, bytes, bytes]  # what stands before the prompt, and behind it


class _Known(NamedTuple):
    """A request that was read for a model of these traits."""

    request: ClientRequest
    traits: ModelTraits


class RequestReader:
    """Reads the bodies of one service's requests.

    `traits_of` says what is known of a model, and raises what it is refused for.
    """

    def __init__(self, choices_max: int, traits_of: TraitsOf) -> None:
        self._choices_max = choices_max
        self._traits_of = traits_of
        self._known: dict[_Key, _Known] = {}  # oldest first

    def read(self, endpoint: Endpoint, body: bytes) -> ClientRequest:
        """As `read_completion` and `read_chat`, whatever was read before."""
        route = _ROUTES[endpoint]
        members = members_of(body)
        key, prompt = _take_prompt(endpoint, route, body, members)
        if key is not None:
            known = self._known.get(key)
            if known is not None and known.traits is self._traits_of(known.request.model):
                return _with_prompt(known, prompt)
        try:
            request = route.read(
                body, choices_max=self._choices_max, traits_of=self._traits_of, members=members
            )
        except RecursionError:  # each reader of a part of it has a depth of its own
            raise BadRequest("the body is nested too deeply") from None
        if key is not None:
            self._keep(key, _Known(request, self._traits_of(request.model)))
        return request

    def _keep(self, key: _Key, known: _Known) -> None:
        self._known.pop(key, None)  # of other traits
        if len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        without = msgspec.structs.replace(known.request, prompts=())
        self._known[key] = known._replace(request=without)


def _take_prompt(
    endpoint: Endpoint, route: _Route, body: bytes, members: Members
) -> tuple[_Key | None, memoryview]:
    """The body's key, and its prompt. Without a key it is not plain."""
    begin, end, is_other = 0, 0, False
    for name, at, behind in members or ():
        if name == route.prompt:
            begin, end = at, behind
        else:
            is_other = is_other or name in route.others
    prompt = memoryview(body)[begin:end]
    is_short = len(body) - len(prompt) <= KNOWN_BYTES_MAX
    if is_other or not is_short or not route.is_plain(bytes(prompt[:_PLAIN_BYTES])):
        return None, prompt
    return (endpoint, body[:begin], body[end:]), prompt


def _with_prompt(known: _Known, prompt: memoryview) -> ClientRequest:
    sampling = known.request.sampling
    if not known.request.has_seed:  # each request gets another one
        sampling = msgspec.structs.replace(sampling, seed=draw_seed())
    return msgspec.structs.replace(known.request, prompts=(msgspec.Raw(prompt),), sampling=sampling)
