"""How the proxy is set up."""

from dataclasses import dataclass, field

from neuron_di.config import FrontOptions, LimitOptions, RoutingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Everything an operator can choose about the proxy."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    front: FrontOptions = field(default_factory=FrontOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    lease_s: float = 10.0  # of a worker's key in the registry
    routing: RoutingOptions = field(default_factory=RoutingOptions)
