"""A request's token rules, put on one row of logits."""

from typing import Any

import numpy as np
import numpy.typing as npt

from neuron_di.errors import BadRequest
from neuron_di.request import Request, TokenRules

Floats = npt.NDArray[np.floating[Any]]


def restricted(raw_V: Floats, rules: TokenRules, request: Request) -> Floats:
    """The logits with -inf for all that grammar, allowed ids and bad words forbid.

    `raw_V` is not changed. Raises BadRequest when that leaves no token to choose.
    """
    logits_V = raw_V
    if rules.grammar is not None:
        logits_V = rules.grammar.masked(logits_V)
    if rules.allowed_ids is not None:
        kept_V = np.full_like(logits_V, -np.inf)
        kept_V[rules.allowed_ids] = logits_V[rules.allowed_ids]
        if rules.grammar is not None:  # what it has completed must be able to end
            end_ids = rules.grammar.end_ids()
            kept_V[end_ids] = logits_V[end_ids]
        logits_V = kept_V
    if rules.bad_words is not None:
        forbidden = rules.bad_words.completed_by(request.generated)
        if forbidden:
            logits_V = logits_V.copy()
            logits_V[forbidden] = -np.inf
    if np.isneginf(logits_V.max()) and np.isfinite(raw_V.max()):
        raise BadRequest("what is allowed leaves no token to go on with", param=_param(rules))
    return logits_V


def biased(logits_V: Floats, rules: TokenRules) -> Floats:
    """The logits with the request's bias added. What is masked stays masked."""
    if rules.bias is None:
        return logits_V
    token_ids, biases = rules.bias
    logits_V = logits_V.copy()
    logits_V[token_ids] += biases
    return logits_V


def _param(rules: TokenRules) -> str:
    if rules.allowed_ids is not None:
        return "allowed_token_ids"
    if rules.bad_words is not None:
        return "bad_words"
    assert rules.grammar is not None, "something forbids"
    return rules.grammar.param
