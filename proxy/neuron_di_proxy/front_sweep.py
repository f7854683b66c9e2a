"""How often the front looks at its deadlines: one timer for all connections."""

from neuron_di.config import FrontOptions

NEVER = float("inf")
INTERVAL_S_MAX = 1.0
INTERVAL_S_MIN = 0.02


def sweep_interval_s(options: FrontOptions, send_timeout_s: float) -> float:
    """Seconds between two sweeps: small beside every deadline, and cheap beside the rest."""
    waits = [
        options.header_timeout_s,
        options.body_timeout_s,
        options.keep_alive_s,
        send_timeout_s,
        options.ping_interval_s or NEVER,
    ]
    return max(INTERVAL_S_MIN, min(INTERVAL_S_MAX, min(waits) / 5))
