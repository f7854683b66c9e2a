"""State a rule of this process where it must hold."""

from neuron_di.errors import LocalProtocolError


def require(holds: bool, rule: str) -> None:
    """Raise LocalProtocolError naming the rule unless it holds. Stays on under `python -O`."""
    if not holds:
        raise LocalProtocolError(rule)
