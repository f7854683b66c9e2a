"""Who this worker is, as peers must know it before they exchange KV."""

from dataclasses import dataclass

from neuron_di.types import Incarnation, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    worker_id: WorkerId
    incarnation: Incarnation
    model_digest: str
    layout_digest: str
