"""A case: one request that both endpoints get, and what is to hold of the answers.

A value of `fields` may be a function of the Probe: what the model writes decides where a stop
string lies, and no list can know that.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from neuron_di.testing.conformance.exchange import Ask, Json
from neuron_di.testing.conformance.finding import Fault

Mode = Literal["whole", "stream"]
Check = Callable[[Json, Json], Iterator[Fault]]  # (the request's body, the answer)

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROMPT = "Once upon a time there was"
MESSAGES = [{"role": "user", "content": "Tell me a tale of a reader."}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was learnt from an endpoint before the cases.

    `token_0` and `text` are what a greedy answer to PROMPT begins with; `token_ids` those of the
    text, empty where the endpoint does not tell them. `context_tokens` is as much as a prompt and
    its answer may have, where the endpoint tells.
    """

    token_0: str
    text: str
    token_ids: tuple[int, ...]
    context_tokens: int | None
    long_prompt_chars: int

    @property
    def ids(self) -> list[int]:
        """Ids that the model has."""
        return list(self.token_ids) or [11, 12, 13, 14]


@dataclass(frozen=True, slots=True, kw_only=True)
class MustRefuse:
    """The request is wrong: one of these statuses, and the error names `param`."""

    statuses: tuple[int, ...] = (400, 422)
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request and its rules. `why` is one line for readers of the report.

    is_sampled    the answer depends on a seed, not on the model alone
    must_refuse   the answer is an error; None: an answer, unless the field is refused by name
    raw           sent instead of a JSON body
    """

    name: str
    why: str
    path: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    modes: tuple[Mode, ...] = ("whole", "stream")
    checks: tuple[Check, ...] = ()
    is_sampled: bool = False
    must_refuse: MustRefuse | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    method: Literal["GET", "POST"] = "POST"

    def body(self, probe: Probe, model: str, mode: Mode) -> Json:
        """The JSON body for one endpoint. A field given as `...` is left out."""
        body: Json = {"model": model}
        for name, value in self.fields.items():
            body[name] = value(probe) if callable(value) else value
        if mode == "stream":
            body = {"stream": True, "stream_options": {"include_usage": True}, **body}
        return {name: value for name, value in body.items() if value is not ...}

    def ask(self, probe: Probe, model: str, mode: Mode) -> Ask:
        """The request itself."""
        body: Json | bytes | None = self.raw
        if body is None and self.method == "POST":
            body = self.body(probe, model, mode)
        return Ask(path=self.path, body=body, method=self.method, headers=self.headers)


def completion(name: str, why: str, /, **fields: Any) -> Case:
    """A greedy completion of PROMPT, 8 tokens, unless `fields` say otherwise."""
    return _case("completions", name, why, {"prompt": PROMPT, "max_tokens": 8}, fields)


def chat(name: str, why: str, /, **fields: Any) -> Case:
    """A greedy answer to MESSAGES, 8 tokens, unless `fields` say otherwise."""
    return _case("chat", name, why, {"messages": MESSAGES, "max_completion_tokens": 8}, fields)


_CASE_FIELDS = ("modes", "checks", "must_refuse", "headers", "raw")


def _case(endpoint: str, name: str, why: str, base: Json, fields: Json) -> Case:
    own = {key: fields.pop(key) for key in _CASE_FIELDS if key in fields}
    fields = {**base, "temperature": 0, **fields}
    if own.get("must_refuse") is not None:
        own.setdefault("modes", ("whole",))
    is_sampled = "seed" in fields and fields["temperature"] not in (0, ...)
    return Case(
        name=name, why=why, path=PATHS[endpoint], fields=fields, is_sampled=is_sampled, **own
    )
