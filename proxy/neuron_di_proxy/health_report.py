"""What the proxy knows of one worker at this moment."""

from typing import Literal, NamedTuple

from neuron_di.wire import WorkerRecord, WorkerStatus
from neuron_di_proxy.watch import Watch, WorkerHealth

# broken: its breaker is not closed; vanished: its key is gone, and nothing else speaks against it
ShownHealth = WorkerHealth | Literal["draining", "broken", "vanished"]


class HealthReport(NamedTuple):
    """What is known of one worker. `reason` is empty while it may get requests."""

    record: WorkerRecord
    state: ShownHealth
    reason: str
    status: WorkerStatus | None = None  # its last good answer
    vanished_s: float | None = None  # how long its key has been gone
    num_open: int = 0  # legs that this proxy process has there


def report_of(record: WorkerRecord, watch: Watch, vanished_s: float | None) -> HealthReport:
    """`vanished_s` is None where its key is there."""
    state: ShownHealth = watch.state
    if state in ("new", "up"):
        if watch.is_draining:
            state = "draining"
        elif watch.breaker.state() != "closed":
            state = "broken"
        elif vanished_s is not None:
            state = "vanished"
    reason = watch.why_not()
    return HealthReport(record, state, reason, watch.status, vanished_s, len(watch.legs))
