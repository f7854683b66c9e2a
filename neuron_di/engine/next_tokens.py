"""The next token of each row of a step: by the device that has the logits, or on the host."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuron_di.backends import Backend
from neuron_di.engine.sampler import SampledToken, sample
from neuron_di.errors import BackendLost
from neuron_di.obs import get_logger
from neuron_di.request import Request

if TYPE_CHECKING:
    from torch import Tensor

_log = get_logger(__name__)


def next_tokens(
    backend: Backend,
    logits_BV: "Tensor",
    requests: Sequence[Request],
    eos_token_ids: tuple[int, ...],
) -> list[SampledToken | Exception]:
    """One for each request: its token, or why it has none, such as a row without usable logits.

    BackendLost where the device is.
    """
    try:
        drawn = _drawn(backend, logits_BV, requests)
        rows_BV = logits_BV.cpu() if None in drawn else logits_BV
    except BackendLost:
        raise
    except Exception as error:  # one bad step must not end the requests of others
        return [error] * len(requests)
    tokens: list[SampledToken | Exception] = []
    for row, (request, token_id) in enumerate(zip(requests, drawn, strict=True)):
        if token_id is not None:
            tokens.append(SampledToken(token_id))
            continue
        try:
            tokens += sample(rows_BV[row : row + 1], (request,), eos_token_ids)
        except Exception as error:
            tokens.append(error)
    return tokens


def _drawn(backend: Backend, logits_BV: "Tensor", requests: Sequence[Request]) -> list[int | None]:
    """What the device chose. Where it failed, by whichever row, nothing: the host then finds out
    whose row is of no use."""
    try:
        return backend.draw(logits_BV, requests)
    except BackendLost:
        raise
    except Exception:
        _log.exception("draw_failed", num_requests=len(requests))
        return [None] * len(requests)
