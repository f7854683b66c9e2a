"""The response for a request that is not answered, and the last event of one that stops midway."""

from typing import NamedTuple

from neuron_di.wire import Failed
from neuron_di_proxy.failure import error_body, failure_of, retry_after_of
from neuron_di_proxy.reply import Headers


class Refusal(NamedTuple):
    """A whole response that says why."""

    status: int
    headers: Headers
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
