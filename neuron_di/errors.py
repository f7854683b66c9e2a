"""Every error this project raises on purpose.

    NeuronDiError
    |- ConfigError            the start-up configuration cannot work; exit code 2
    |  `- CheckpointError     the model's files are missing, damaged or not supported
    |- ClientError            the client's request is at fault
    |  |- BadRequest          400
    |  |- Unauthorized        401: no valid API key
    |  |- Forbidden           403: a valid key that may not do this
    |  |- TooLarge            413
    |  `- RateLimited         429: more than this client's share; retry later
    |- PeerError              another process of the system is at fault or gone
    |  |- RemoteProtocolError it said something that cannot be understood
    |  |- PeerGone            it cannot be reached, or closed the connection
    |  |- PeerTimeout         it did not answer before the deadline
    |  |- PeerRefused         it answered, and will not work with us (model, layout, version)
    |  |- StaleIncarnation    the process it was is not the process it is
    |  `- StaleAttempt        a later attempt at the same request is known
    |- KvError                KV cannot be used: recompute, never guess
    |  |- KvMissing           the owner does not have it, and never will
    |  |- KvExpired           its lease ended before it was pulled
    |  |- KvChanged           it was overwritten while it was being read
    |  `- KvCorrupt           its bytes or its identity are not what was promised
    |- CapacityError          503: no room now; retry later
    |  `- Preempted           a running request gave way to older ones: it goes on later
    |- DeadlinePassed         504: the time that the request had is over
    |- WorkerFailed           a step of a worker's engine, or all of it, failed: try another
    |  `- BackendLost         what it computes on is gone: no step can succeed any more
    `- LocalProtocolError     a bug of ours: fail the request, count it, keep serving

An error carries who is at fault, whether another attempt may help, and the HTTP status
a client should see. `code` is the stable, machine-readable name.
"""

from typing import ClassVar, Literal

Fault = Literal["client", "peer", "us"]


class NeuronDiError(Exception):
    """The root. Raised never itself."""

    fault: ClassVar[Fault] = "us"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retry_after_s: float | None = None  # when another attempt may succeed, where that is known

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(NeuronDiError):
    """Raised when a process cannot start as configured. Says the cause and the mend."""

    code = "config_error"


class CheckpointError(ConfigError):
    """Raised when a model folder cannot be loaded."""

    code = "checkpoint_error"


class ClientError(NeuronDiError):
    """Raised when the client's request is at fault."""

    fault = "client"
    http_status = 400
    code = "invalid_request"


class BadRequest(ClientError):
    """Raised when a request has a wrong or unsupported field. `param` names the field."""


class ContextExceeded(BadRequest):
    """Raised when a prompt, or it and its answer, are longer than the model's context.

    Its message begins with OpenAI's words: clients that shorten a chat, or ask another model,
    know this error by them.
    """

    code = "context_length_exceeded"

    def __init__(self, context_tokens: int, words: str, *, param: str) -> None:
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens: {words}", param=param
        )


class Unauthorized(ClientError):
    """Raised when a request carries no valid API key."""

    http_status = 401
    code = "invalid_api_key"


class Forbidden(ClientError):
    """Raised when a request's API key is valid, but not for what it asks."""

    http_status = 403
    code = "permission_denied"


class TooLarge(ClientError):
    """Raised when a request is larger than a stated limit."""

    http_status = 413
    code = "request_too_large"


class RateLimited(ClientError):
    """Raised when a client has used up its share. Its own doing: others are still served."""

    retryable = True
    http_status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PeerError(NeuronDiError):
    """Raised when another process of the system is at fault or gone."""

    fault = "peer"
    retryable = True
    http_status = 502
    code = "peer_error"


class RemoteProtocolError(PeerError):
    """Raised when a peer's message cannot be understood."""

    code = "remote_protocol_error"


class PeerGone(PeerError):
    """Raised when a peer cannot be reached or its connection ended."""

    code = "peer_gone"


class PeerTimeout(PeerError):
    """Raised when a peer did not answer before the deadline."""

    http_status = 504
    code = "peer_timeout"


class PeerRefused(PeerError):
    """Raised when a peer will not work with us: other model, KV layout or protocol version."""

    retryable = False
    code = "peer_refused"


class StaleIncarnation(PeerError):
    """Raised when a peer restarted since it was named."""

    code = "stale_incarnation"


class StaleAttempt(PeerError):
    """Raised when a later attempt at the same request has taken over."""

    retryable = False
    code = "stale_attempt"


class KvError(NeuronDiError):
    """Raised when KV cannot be used."""

    fault = "peer"
    retryable = True
    http_status = 502
    code = "kv_error"


class KvMissing(KvError):
    """Raised when the owner does not have the KV and never will."""

    code = "kv_missing"


class KvExpired(KvError):
    """Raised when parked KV was given up before it was pulled."""

    code = "kv_expired"


class KvChanged(KvError):
    """Raised when blocks were reused while they were being read."""

    code = "kv_changed"


class KvCorrupt(KvError):
    """Raised when received KV is not, byte for byte, what the request's prefill computed."""

    code = "kv_corrupt"


class CapacityError(NeuronDiError):
    """Raised when there is no room now. A later attempt may find some."""

    retryable = True
    http_status = 503
    code = "over_capacity"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Preempted(CapacityError):
    """Raised when a worker had no KV blocks left for all that run, and this was the youngest."""

    code = "preempted"


class DeadlinePassed(NeuronDiError):
    """Raised when a request's own deadline passed. There is no time for another attempt."""

    http_status = 504
    code = "deadline_exceeded"


class WorkerFailed(NeuronDiError):
    """Raised when a worker could not compute a request. Another worker may."""

    retryable = True
    code = "worker_failed"


class BackendLost(WorkerFailed):
    """Raised when what a worker computes on is gone, such as a process with a part of the model."""


class LocalProtocolError(NeuronDiError):
    """Raised when this process broke its own rules: a bug."""

    code = "internal_error"
