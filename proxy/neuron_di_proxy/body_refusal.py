"""Why a request's body is not taken. Both ways to a client say it in the same words."""

from collections.abc import Mapping

from neuron_di.errors import ClientError, TooLarge


class BadContentCoding(ClientError):
    """Raised when a body is compressed: a small one could become any size."""

    http_status = 415
    code = "unsupported_content_encoding"


class BadExpectation(ClientError):
    """Raised when a client expects what we do not do."""

    http_status = 417
    code = "expectation_failed"


class BodyLate(ClientError):
    """Raised when a client has not sent its whole request in time."""

    http_status = 408
    code = "request_timeout"


def body_too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"the request's body has more than {bytes_max} bytes, the limit")


def body_late(timeout_s: float) -> BodyLate:
    return BodyLate(f"the request's body was not there after {timeout_s:g} s")


def check_body_form(headers: Mapping[str, str]) -> None:
    """Refuse a body in a form we do not take, by its head alone.

    `headers` go by lower-case name. Raises BadContentCoding or BadExpectation.
    """
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise BadContentCoding("bodies are taken as they are, without Content-Encoding")
    if headers.get("expect", "100-continue").strip().lower() != "100-continue":
        raise BadExpectation("of Expect only 100-continue is known")
