"""Which workers serve a request: round robin over prefill and over decode workers (seed N-26).

Pure: it reads a directory, asks who is fit, and keeps the order in which workers were used.
No I/O, no clock.

Next: proxy/neuron_di_proxy/recovery.py
"""

import itertools
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from neuron_di.errors import CapacityError, ClientError
from neuron_di.types import Role, WorkerId
from neuron_di.wire import WorkerRecord
from neuron_di_proxy.workers import Process, process_of


class Directory(Protocol):
    """The workers that are known at this moment."""

    def workers(self) -> tuple[WorkerRecord, ...]:
        """A snapshot. Returns at once; never raises."""
        ...


class Fitness(Protocol):
    """Whether a known worker can be given a request now."""

    def why_not(self, record: WorkerRecord) -> str:
        """Why not, in words; empty when it can."""
        ...


class PairFitness(Protocol):
    """Whether two workers that fit by their records can really hand over."""

    def has_failed(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool: ...

    def doubt(self, prefill: WorkerRecord, decode: WorkerRecord) -> None:
        """One of them accused the other: find out whether they still can."""
        ...

    def refuse(self, prefill: WorkerRecord, decode: WorkerRecord, reason: str) -> None:
        """One of them will not work with the other."""
        ...


class ModelNotFound(ClientError):
    """Raised when no worker has the model that a request names."""

    http_status = 404
    code = "model_not_found"


@dataclass(frozen=True, slots=True)
class Pair:
    """The request is handed over from one worker to another."""

    prefill: WorkerRecord
    decode: WorkerRecord


@dataclass(frozen=True, slots=True)
class Whole:
    """One worker does it all."""

    worker: WorkerRecord


Route = Pair | Whole


class Router:
    """Picks the workers of each request: of those that fit, the ones not used for longest."""

    def __init__(
        self, directory: Directory, fitness: Fitness, pairs: PairFitness | None = None
    ) -> None:
        self._directory = directory
        self._fitness = fitness
        self._pairs = pairs
        self._turns = itertools.count(1)
        self._last_turn: dict[WorkerId, int] = {}

    def models(self) -> list[str]:
        """Names of the models that any known worker has, in alphabetical order."""
        return sorted({record.model for record in self._directory.workers()})

    def num_slots(self) -> int:
        """How many requests the workers that are fit now can decode together."""
        usable = [r for r in self._directory.workers() if self._is_usable(r, None)]
        return sum(record.slots for record in usable if record.role != "prefill")

    def doubt(self, route: Route) -> None:
        """A worker of the route accused its partner. Which of them is right is not known."""
        if self._pairs is not None and isinstance(route, Pair):
            self._pairs.doubt(route.prefill, route.decode)

    def refuse(self, route: Route, reason: str) -> None:
        """A worker of the route will not work with its partner."""
        if self._pairs is not None and isinstance(route, Pair):
            self._pairs.refuse(route.prefill, route.decode, reason)

    def pick(
        self,
        model: str,
        avoid: AbstractSet[Process] = frozenset(),
        model_digest: str | None = None,
        context_tokens: int = 0,
    ) -> Route:
        """Choose the workers of one request and count it as their turn.

        Processes in `avoid`, and pairs that failed their test, are chosen only where there is
        nothing else. With `model_digest` the workers have exactly these weights, and their context
        holds at least `context_tokens`.

        Raises ModelNotFound when workers are known but none has `model`, and CapacityError
        (which says what is missing) when none of them can serve it now.
        """
        known = self._directory.workers()
        usable = [
            r
            for r in known
            if r.model == model
            and r.context_tokens >= context_tokens
            and self._is_usable(r, model_digest)
        ]
        prefills, decodes, wholes = (_of_role(usable, r) for r in ("prefill", "decode", "both"))
        prefills = [p for p in prefills if any(fits(p, d) for d in decodes)]
        working = [p for p in prefills if any(self._works(p, d) for d in decodes)]
        if working or (prefills and not wholes):
            prefill = self._take_turn(_prefer(working or prefills, avoid))
            fitting = [d for d in decodes if fits(prefill, d)]
            fitting = [d for d in fitting if self._works(prefill, d)] or fitting
            return Pair(prefill, self._take_turn(_prefer(fitting, avoid)))
        if wholes:
            return Whole(self._take_turn(_prefer(wholes, avoid)))
        if known and all(record.model != model for record in known):
            raise ModelNotFound(f"the model {model!r} does not exist", param="model")
        missing = self._what_is_missing(known, model)
        if not missing:
            missing = f"no worker has the weights, and the context, of model {model!r} any more"
        raise CapacityError(missing)

    def any_worker(self, model: str, avoid: AbstractSet[Process] = frozenset()) -> WorkerRecord:
        """One of the workers of `model`, in turn but not as its turn: to ask, not to compute.

        Raises ModelNotFound, and CapacityError when none is left besides those in `avoid`.
        """
        known = self._directory.workers()
        usable = [r for r in known if r.model == model and self._is_usable(r, None)]
        usable = [r for r in usable if process_of(r) not in avoid]
        if usable:
            return usable[next(self._turns) % len(usable)]
        if known and all(record.model != model for record in known):
            raise ModelNotFound(f"the model {model!r} does not exist", param="model")
        raise CapacityError(f"no worker of model {model!r} can be asked now")

    def why_unserved(self) -> str | None:
        """Why no request of any model can be served now; None when some can."""
        known = self._directory.workers()
        models = self.models()
        reasons = [self._what_is_missing(known, model) for model in models]
        if not known:
            return "no worker is known"
        return "; ".join(reasons) if all(reasons) else None

    def _is_usable(self, record: WorkerRecord, model_digest: str | None) -> bool:
        if record.state != "ready" or self._fitness.why_not(record):
            return False
        return model_digest is None or record.model_digest == model_digest

    def _works(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        if not fits(prefill, decode):
            return False
        return self._pairs is None or not self._pairs.has_failed(prefill, decode)

    def _what_is_missing(self, known: Iterable[WorkerRecord], model: str) -> str:
        """Empty when nothing is."""
        ready = [r for r in known if r.model == model and r.state == "ready"]
        usable = [record for record in ready if not self._fitness.why_not(record)]
        if _of_role(usable, "both"):
            return ""
        missing = [role for role in _HALVES if not _of_role(usable, role)]
        if missing:
            why = [self._fitness.why_not(r) for role in missing for r in _of_role(ready, role)]
            text = f"no {' and no '.join(missing)} worker is ready for model {model!r}"
            return f"{text}: {'; '.join(why)}" if why else text
        decodes = _of_role(usable, "decode")
        if any(fits(p, d) for p in _of_role(usable, "prefill") for d in decodes):
            return ""
        return f"no prefill and decode worker for model {model!r} agree on weights and KV layout"

    def _take_turn(self, candidates: Sequence[WorkerRecord]) -> WorkerRecord:
        chosen = min(candidates, key=lambda r: (self._last_turn.get(r.worker_id, 0), r.worker_id))
        self._last_turn[chosen.worker_id] = next(self._turns)
        self._forget_the_gone()
        return chosen

    def _forget_the_gone(self) -> None:
        known = {record.worker_id for record in self._directory.workers()}
        if len(self._last_turn) > 2 * len(known):
            self._last_turn = {w: turn for w, turn in self._last_turn.items() if w in known}


_HALVES: tuple[Role, Role] = ("prefill", "decode")


def fits(prefill: WorkerRecord, decode: WorkerRecord) -> bool:
    """True when `decode` can continue on KV that `prefill` computed, by what both say."""
    return (prefill.model_digest, prefill.layout_digest) == (
        decode.model_digest,
        decode.layout_digest,
    )


def _of_role(records: Iterable[WorkerRecord], role: Role) -> list[WorkerRecord]:
    return [record for record in records if record.role == role]


def _prefer(records: list[WorkerRecord], avoid: AbstractSet[Process]) -> list[WorkerRecord]:
    """Those not to avoid; all, where that leaves none."""
    return [record for record in records if process_of(record) not in avoid] or records
