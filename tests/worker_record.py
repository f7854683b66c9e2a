"""A worker's record, for tests that need one and care for little of what it says."""

from typing import Any

from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import PROTOCOL_VERSION, WorkerRecord


def make_record(port: int = 4000, **fields: Any) -> WorkerRecord:
    """That of a prefill worker, unless the fields say otherwise."""
    values: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "worker_id": WorkerId(f"prefill-{port}"),
        "incarnation": Incarnation("i"),
        "role": "prefill",
        "state": "ready",
        "pid": 1,
        "model": "tiny",
        "model_digest": "d",
        "layout_digest": "l",
        "context_tokens": 128,
        "host": "127.0.0.1",
        "api_port": port,
        "signal_host": "127.0.0.1",
        "signal_port": port + 1,
        "started_unix_s": 1.0,
    }
    return WorkerRecord(**(values | fields))
