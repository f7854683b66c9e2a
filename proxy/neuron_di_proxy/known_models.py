"""Which models exist: those that a worker has, and those that one had until lately.

The last workers of a model may only be starting again. "No such model" is final for clients, so
for a while they hear that nobody can serve them now.
"""

from neuron_di.clock import now_s
from neuron_di.errors import ClientError
from neuron_di.wire import WorkerRecord

MISSED_S = 300.0


class ModelNotFound(ClientError):
    """Raised when no worker has the model that a request names."""

    http_status = 404
    code = "model_not_found"


class KnownModels:
    """Remembers the models of one directory, whose snapshots it is shown."""

    def __init__(self) -> None:
        self._seen: tuple[WorkerRecord, ...] = ()
        self._present: set[str] = set()
        self._missed_s: dict[str, float] = {}  # since when nobody has it

    def names(self, known: tuple[WorkerRecord, ...]) -> list[str]:
        """All of them, in alphabetical order."""
        self.look(known)
        now = now_s()
        lately = {model for model, s in self._missed_s.items() if now < s + MISSED_S}
        return sorted(self._present | lately)

    def require(self, model: str, known: tuple[WorkerRecord, ...]) -> None:
        """Raises ModelNotFound where workers are known, but none that has, or had, this model."""
        self.look(known)
        if not known or model in self._present:
            return
        if now_s() >= self._missed_s.get(model, -MISSED_S) + MISSED_S:
            raise ModelNotFound(f"the model {model!r} does not exist", param="model")

    def look(self, known: tuple[WorkerRecord, ...]) -> None:
        """Nothing happens where it has been shown this snapshot last."""
        if known is self._seen:
            return
        now, present = now_s(), {record.model for record in known}
        missed = dict.fromkeys(self._present, now)
        missed |= {model: s for model, s in self._missed_s.items() if now < s + MISSED_S}
        self._missed_s = {model: s for model, s in missed.items() if model not in present}
        self._seen, self._present = known, present
