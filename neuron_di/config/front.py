"""How clients reach the proxy, and what it takes from them.

`LimitOptions` bounds requests once they are read; this bounds connections, headers and bodies.
"""

from dataclasses import dataclass
from typing import Any

from neuron_di.config.option import ByteSize, option

_BODY_BYTES_MAX: Any = 16 << 20
_HEADER_BYTES_MAX: Any = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """The proxy's front."""

    processes: int = option(
        "proxy processes that share the port; each has its own connections to every worker",
        default=1,
        at_least=1,
        at_most=64,
    )
    api_keys: str | None = option(
        "file of API keys, as `neuron-di key` writes it",
        default=None,
        default_text="no keys: anyone who can connect is served",
        form="FILE",
    )
    insecure: bool = option(
        "listen on addresses other machines can reach although no API keys are set", default=False
    )
    tls_cert: str | None = option(
        "certificate chain for TLS, PEM", default=None, default_text="plain HTTP", form="FILE"
    )
    tls_key: str | None = option("private key of the certificate, PEM", default=None, form="FILE")
    connections_max: int = option(
        "connections of clients at once, if so many files may be open; one more takes the place of "
        "one that has long been idle",
        default=4096,
        at_least=1,
    )
    header_bytes_max: ByteSize = option(
        "size of a request's head", default=_HEADER_BYTES_MAX, at_least=1024, at_most=1 << 20
    )
    header_timeout_s: float = option(
        "seconds a client has to send a request's head", default=5.0, at_least=0.1, at_most=3600
    )
    body_bytes_max: ByteSize = option(
        "size of the body of a request for tokens; of others 1 MiB (tokenize) and 64 KiB",
        default=_BODY_BYTES_MAX,
        at_least=1024,
        at_most=16 << 20,
    )
    body_timeout_s: float = option(
        "seconds a client has to send a request's body", default=30.0, at_least=0.1, at_most=3600
    )
    keep_alive_s: float = option(
        "seconds a connection may idle between two requests", default=75.0, at_least=1, at_most=3600
    )
    ping_interval_s: float = option(
        "seconds of silence in a stream until a comment says that it lives; 0: none",
        default=10.0,
        at_least=0,
        at_most=3600,
    )
    otlp_endpoint: str | None = option(
        "where an OpenTelemetry collector takes traces of requests, such as "
        "http://127.0.0.1:4318/v1/traces",
        default=None,
        default_text="no traces",
        form="URL",
    )
