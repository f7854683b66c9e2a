"""Failures as clients see them: a whole response, or the last event of one that stops midway."""

import os
import re
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import msgspec

from neuron_di.errors import LocalProtocolError, NeuronDiError, PeerError, PeerGone
from neuron_di.types import WorkerId
from neuron_di.wire import Failed

RETRY_AFTER_S = 1  # where nothing is known of when

# What clients are not to learn from a failure of ours or of a worker: where things are.
_PLACES = re.compile(
    r"""[a-z]+://[^\s'",;)]+                       # tcp://10.0.0.7:9000
      | \[[0-9a-f:.]*:[0-9a-f:.]*(?:%\w+)?\](?::\d+)?      # [fd00::7]:9000
      | \bipv[46]:[^\s'",;)]+                     # ipv6:%5B::1%5D:1
      | (?<![\w:.])(?=[0-9a-f:]*?::|(?:[0-9a-f]{1,4}:){7})  # fd00::7, fd00::7:9000, fe80::1%eth0
        (?:[0-9a-f]{0,4}:){2,8}
        (?:\d{1,3}(?:\.\d{1,3}){3}(?::\d+)? | [0-9a-f]{1,5} | (?<=::))(?:%\w+)?(?!\w)
      | \b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?     # 10.0.0.7:9000
      | \b(?<!_ssl\.)[a-z][\w-]*(?:\.[\w-]+)*:\d{2,5}\b  # worker.internal:9000, not _ssl.c:1006
      | (?<=\bprocess\ )\d+\b                     # a pid
      | (?<![\w.:/])/(?:[\w.@+-]+/)*[\w.@+-]+     # a path
    """,
    re.VERBOSE | re.IGNORECASE,
)


def gone(worker_id: WorkerId, error: Exception) -> PeerGone:
    """A worker that could not be reached, and why: that may be for want of a descriptor here."""
    number = getattr(error, "errno", None) or 0  # below 0 where it was a name that led nowhere
    words = os.strerror(number) if number > 0 else type(error).__name__
    return PeerGone(f"worker {worker_id} is gone ({words})")


class LegFailed(PeerError):
    """Raised when a worker ends a leg with `Failed`. The worker's own words are in `failed`."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message, param=failed.param)
        self.failed = failed


class RequestTimeout(NeuronDiError):
    """Raised when a request is not complete at its deadline."""

    http_status = 504
    code = "request_timeout"


def failure_of(error: Exception) -> Failed:
    """What to tell the client of `error`. An error nobody foresaw says nothing of its cause."""
    if isinstance(error, LegFailed):
        return error.failed
    if not isinstance(error, NeuronDiError):
        error = LocalProtocolError("internal error")
    return Failed(
        code=error.code,
        message=error.message,
        http_status=error.http_status,
        retryable=error.retryable,
        fault=error.fault,
        param=error.param,
    )


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class _ErrorBody(msgspec.Struct):
    error: _Error


def error_body(failed: Failed) -> bytes:
    """OpenAI's error document. All four keys are always there.

    A 5xx says what failed, never where it is: no address and no path.
    """
    message = failed.message
    if failed.http_status >= 500:
        message = without_places(message)
    kind = _type_of(failed.http_status)
    return msgspec.json.encode(_ErrorBody(_Error(message, kind, failed.param, failed.code)))


def without_places(message: str) -> str:
    """The same, for whoever is not to learn where things are."""
    return _PLACES.sub("(hidden)", message)


def retry_after_of(error: Exception | Failed) -> int | None:
    """The Retry-After header in whole seconds; None: coming back would not help."""
    failed = error if isinstance(error, Failed) else failure_of(error)
    if failed.http_status not in (429, 503):
        return None
    wait_s = error.retry_after_s if isinstance(error, NeuronDiError) else None
    return RETRY_AFTER_S if wait_s is None else max(1, ceil(wait_s))


def _type_of(http_status: int) -> str:
    if http_status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if http_status < 500 else "server_error"


class Refusal(NamedTuple):
    """A whole response that says why."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


def refusal_of(error: Exception | Failed, request_id: str) -> Refusal:
    """The response for a request that failed before the first byte of its answer."""
    failed = error if isinstance(error, Failed) else failure_of(error)
    headers = [("content-type", "application/json"), ("x-request-id", request_id)]
    retry_after_s = retry_after_of(error)
    if retry_after_s is not None:
        headers.append(("retry-after", str(retry_after_s)))
    if failed.http_status == 401:
        headers.append(("www-authenticate", "Bearer"))
    return Refusal(failed.http_status, headers, error_body(failed))


def stream_error(error: Exception) -> bytes:
    """The SSE event of a stream that cannot go on."""
    return b"data: %b\n\n" % error_body(failure_of(error))
