"""How the proxy is set up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Everything an operator can choose about the proxy. Durations are seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    requests_max: int = 1024  # running at the same time; more are answered with 503
    body_bytes_max: int = 16 << 20
    body_timeout_s: float = 30.0  # until a client has sent its whole request
    connect_timeout_s: float = 1.0  # to a worker
    idle_timeout_s: float = 60.0  # between two events of one leg
    request_timeout_s: float = 600.0  # from the launch of a request to its end
    drain_timeout_s: float = 60.0  # for running requests, once the proxy was told to stop
