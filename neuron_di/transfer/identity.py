"""Who this worker is, as peers must know it before they exchange KV."""

from dataclasses import dataclass

from neuron_di.kv import KvLayout
from neuron_di.types import Incarnation, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """`converts` says that KV of another number format is taken and given, too.

    `context_tokens` is as long as a request may become here.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    model_digest: str
    layout: KvLayout
    converts: bool = False
    context_tokens: int = 0

    @property
    def layout_digest(self) -> str:
        """Of exactly this layout: what this worker's KV is stated and verified with."""
        return self.layout.digest()

    @property
    def exchange_digest(self) -> str:
        """Of what a peer's layout must agree in with this one."""
        return self.layout.exchange_digest(converts=self.converts)
