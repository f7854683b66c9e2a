"""Where all blocks of a pool are at one moment: no block is lost, and none is in two places."""

from dataclasses import dataclass

from neuron_di.errors import LocalProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCount:
    """Numbers of blocks by what holds them. Immutable, so any thread may read it."""

    total: int
    free: int
    running: int = 0  # of requests that are computed
    parked: int = 0  # prefill: complete, kept for the decode worker
    receiving: int = 0  # decode: a transfer fills them, or is about to
    cached: int = 0  # of no request, kept because a later one may need the same KV
    quarantined: int = 0  # of no request, but a transfer may still touch them

    def check(self) -> None:
        """Raise LocalProtocolError unless the places add up to the total."""
        held = (self.running, self.parked, self.receiving, self.cached, self.quarantined)
        if self.free + sum(held) != self.total or min(self.free, *held) < 0:
            raise LocalProtocolError(f"blocks do not add up: {self}")
