"""Why a request's body is not taken. Both ways to a client say it in the same words."""

from collections.abc import Mapping

from neuron_di.errors import ClientError, TooLarge
from neuron_di_proxy.choice_request import HOT_PATHS

_TOKENIZE_BYTES_MAX = 1 << 20  # it is read on the event loop
_OTHER_BYTES_MAX = 64 << 10  # an order's; most routes have none, and some ask for no key


class BadContentCoding(ClientError):
    """Raised when a body is compressed: a small one could become any size."""

    http_status = 415
    code = "unsupported_content_encoding"


class NotJson(ClientError):
    """Raised when a body is not said to be JSON: a foreign web page can send anything else."""

    http_status = 415
    code = "unsupported_media_type"


class BadExpectation(ClientError):
    """Raised when a client expects what we do not do."""

    http_status = 417
    code = "expectation_failed"


class BodyLate(ClientError):
    """Raised when a client has not sent its whole request in time."""

    http_status = 408
    code = "request_timeout"


class HeadLate(BodyLate):
    """Raised when a client has not sent a request's head in time."""


def body_bytes_max(method: str, path: str, bytes_max: int) -> int:
    """How much of a body a route takes: of those for tokens as much as any, `bytes_max`.

    More than a route has use for would only fill memory until it is all there.
    """
    if method == "POST" and path in HOT_PATHS:
        return bytes_max
    is_text = path in ("/tokenize", "/detokenize")
    return min(bytes_max, _TOKENIZE_BYTES_MAX if is_text else _OTHER_BYTES_MAX)


def body_too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"the request's body has more than {bytes_max} bytes, the limit")


def body_late(timeout_s: float) -> BodyLate:
    return BodyLate(f"the request's body was not there after {timeout_s:g} s")


def head_late(timeout_s: float) -> HeadLate:
    return HeadLate(f"the request's head was not there after {timeout_s:g} s")


def check_json(headers: Mapping[str, str]) -> None:
    """Refuse a body whose head does not say that it is JSON, whatever the body is.

    Any page that a user has open may send forms, text and bodies of no type at all (JavaScript's
    typed arrays) to a server on the user's machine, and that would compute. Before it sends JSON,
    its browser asks the server, which does not allow it. `headers` go by lower-case name.
    """
    given = headers.get("content-type")
    if given == "application/json":  # nearly always
        return
    if given is None or given.partition(";")[0].strip().lower() != "application/json":
        raise NotJson("the body is JSON: send it with the header Content-Type: application/json")


def check_body(
    headers: Mapping[str, str], num_bytes: int | None = None, bytes_max: int = 0, *, is_json: bool
) -> None:
    """Refuse a body in a form we do not take, by its head alone. `is_json`: the route reads it.

    `headers` go by lower-case name. Raises NotJson, BadContentCoding or BadExpectation, and
    TooLarge where the head tells of more bytes than the limit.
    """
    if is_json:
        check_json(headers)
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise BadContentCoding("bodies are taken as they are, without Content-Encoding")
    if headers.get("expect", "100-continue").strip().lower() != "100-continue":
        raise BadExpectation("of Expect only 100-continue is known")
    if num_bytes is not None and num_bytes > bytes_max:
        raise body_too_large(bytes_max)
