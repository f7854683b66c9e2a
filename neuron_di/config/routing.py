"""How the proxy divides requests among workers."""

from dataclasses import dataclass
from typing import Literal

from neuron_di.config.option import option

RoutingPolicy = Literal["round-robin", "least-loaded", "power-of-two", "prefix-affinity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """Routing."""

    routing: RoutingPolicy = option(
        "which of the workers that fit gets a request: the one not used for longest, the least "
        "loaded one for its slots, the less loaded of two drawn at random, or, for the prefill of "
        "a prompt of more than 2 KiB, the one that others of its tenant which begin alike go to, "
        "unless it is loaded far above the average (else as least-loaded)",
        default="round-robin",
    )
