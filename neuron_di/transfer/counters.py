"""What went wrong between workers and was dealt with, counted since this process started."""

from dataclasses import dataclass


@dataclass(slots=True)
class HandOverCounters:
    """One per worker, on its event loop."""

    num_kv_mismatched: int = 0  # received KV that was not what was promised
    num_leases_ended: int = 0
    num_signals_refused: int = 0  # messages that could not be understood or allowed
    num_stale: int = 0  # messages that came too late or twice
    num_lanes_failed: int = 0  # connections to a peer's KV that broke while they were used
    num_fallbacks: int = 0  # those that are not the preferred ones, because these failed
    num_streams_refused: int = 0  # layers that came while the prefill ran, and were not right
    kv_bytes_in_flight: int = 0  # posted to be received, of all peers together
