"""Two documents, field by field.

What is never compared, because it may not be equal: ids, times, what names the process that
answered, and how much of a prompt a cache had. What the model wrote is compared as `Rules` say.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose
from typing import Any, Literal

from neuron_di.testing.conformance.finding import ABSENT, Difference

Text = Literal["exact", "greedy", "shape"]

IGNORED = frozenset({"id", "created", "system_fingerprint", "service_tier", "neuron_di", "metrics"})
CACHE_KEYS = frozenset({"cached_tokens", "cache_write_tokens"})
# What follows from what the model wrote: compared by shape only where models may differ.
GENERATED = frozenset(
    {
        "text", "content", "reasoning", "reasoning_content", "arguments", "pieces", "token_ids",
        "logprobs", "prompt_logprobs", "completion_tokens", "total_tokens", "finish_reason",
        "stop_reason", "reasoning_tokens", "prompt_tokens", "prompt_token_ids", "tool_calls",
    }
)  # fmt: skip
LOGPROB_KEYS = frozenset({"logprob", "token_logprobs", "top_logprobs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How equal two documents must be.

    text                exact: greedy and seeded answers are equal; greedy: seeds mean something
                        else to the other side; shape: another model, only types are compared
    logprob_tolerance   of each logprob, absolute
    is_strict           an absent field is not a null one, chunks have the same texts, an error
                        has the same param and code, and caches found the same
    """

    text: Text = "exact"
    logprob_tolerance: float = 1e-4
    is_strict: bool = False

    def compares_text(self, *, is_sampled: bool) -> bool:
        return self.text == "exact" or (self.text == "greedy" and not is_sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How two documents are compared.

    with_text         what the model wrote must be equal, too
    of_one_endpoint   a whole answer and what the stream of the same endpoint adds up to
    """

    rules: Rules
    with_text: bool = True
    of_one_endpoint: bool = False

    def differences(self, left: Any, right: Any) -> Iterator[Difference]:
        """Where they differ, in the order of the documents."""
        yield from self._compare(left, right, "$", "", is_logprob=False)

    def _compare(
        self, left: Any, right: Any, path: str, key: str, *, is_logprob: bool
    ) -> Iterator[Difference]:
        if key in GENERATED and not self.with_text:
            if _kind(left) != _kind(right) and not {_kind(left), _kind(right)} & {"null"}:
                yield Difference(path, left, right)
        elif isinstance(left, dict) and isinstance(right, dict):
            yield from self._compare_members(left, right, path, is_logprob=is_logprob)
        elif isinstance(left, list) and isinstance(right, list):
            for index, pair in enumerate(zip(left, right, strict=False)):
                yield from self._compare(*pair, f"{path}[{index}]", "", is_logprob=is_logprob)
            if len(left) != len(right):
                yield Difference(f"{path}.length", len(left), len(right))
        elif not self._is_same(left, right, key, is_logprob=is_logprob):
            yield Difference(path, left, right)

    def _compare_members(
        self, left: Any, right: Any, path: str, *, is_logprob: bool
    ) -> Iterator[Difference]:
        for key in dict.fromkeys([*left, *right]):
            if self._ignores(key, path):
                continue
            absent: Any = ABSENT if self.rules.is_strict and not self.of_one_endpoint else None
            yield from self._compare(
                left.get(key, absent),
                right.get(key, absent),
                f"{path}.{key}",
                key,
                is_logprob=is_logprob or key in LOGPROB_KEYS,
            )

    def _ignores(self, key: str, path: str) -> bool:
        if key in IGNORED:
            return not is_client_named(path)
        if key in CACHE_KEYS:
            return self.of_one_endpoint or not self.rules.is_strict
        if key == "pieces":  # a whole answer has none
            return self.of_one_endpoint or not self.rules.is_strict
        return key == "prompt_tokens_details" and not self.rules.is_strict

    def _is_same(self, left: Any, right: Any, key: str, *, is_logprob: bool) -> bool:
        if _kind(left) != _kind(right):
            # An answer without text is said either way.
            is_lenient = self.of_one_endpoint or not self.rules.is_strict
            return is_lenient and key == "content" and not (left or right)
        if is_logprob and _kind(left) == "number":
            return isclose(left, right, rel_tol=0, abs_tol=self.rules.logprob_tolerance)
        return bool(left == right)


def is_client_named(path: str) -> bool:
    """Whether the members there are texts of tokens, and so may have any name."""
    return ".top_logprobs[" in path


def _kind(value: Any) -> str:
    """A value's JSON type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return type(value).__name__
