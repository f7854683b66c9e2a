"""Failures as clients see them: the HTTP status and OpenAI's error body."""

import msgspec

from neuron_di.errors import LocalProtocolError, NeuronDiError, PeerError
from neuron_di.wire import Failed

RETRY_AFTER_S = 1


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
    """OpenAI's error document. All four keys are always there."""
    kind = "invalid_request_error" if failed.http_status < 500 else "server_error"
    return msgspec.json.encode(_ErrorBody(_Error(failed.message, kind, failed.param, failed.code)))
