"""How the proxy is set up."""

from dataclasses import dataclass, field

from neuron_di.config import LimitOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Everything an operator can choose about the proxy. Durations are seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    body_bytes_max: int = 16 << 20
    body_timeout_s: float = 30.0  # until a client has sent its whole request
    limits: LimitOptions = field(default_factory=LimitOptions)
