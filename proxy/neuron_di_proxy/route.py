"""Which workers serve a request: round robin over prefill and over decode workers (seed N-26).

Pure: it reads a directory and keeps the order in which workers were used. No I/O, no clock.

Next: proxy/neuron_di_proxy/launch.py
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from neuron_di.errors import CapacityError, ClientError
from neuron_di.types import Role, WorkerId
from neuron_di.wire import WorkerRecord


class Directory(Protocol):
    """The workers that are known at this moment."""

    def workers(self) -> tuple[WorkerRecord, ...]:
        """A snapshot. Returns at once; never raises."""
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

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._turns = itertools.count(1)
        self._last_turn: dict[WorkerId, int] = {}

    def models(self) -> list[str]:
        """Names of the models that any known worker has, in alphabetical order."""
        return sorted({record.model for record in self._directory.workers()})

    def pick(self, model: str) -> Route:
        """Choose the workers of one request and count it as their turn.

        Raises ModelNotFound when workers are known but none has `model`, and CapacityError
        (which says what is missing) when none of them can serve it now.
        """
        known = self._directory.workers()
        prefills, wholes = _serving(known, model)
        if prefills:
            prefill = self._take_turn(prefills)
            fitting = [d for d in _ready(known, model, "decode") if _fits(prefill, d)]
            return Pair(prefill, self._take_turn(fitting))
        if wholes:
            return Whole(self._take_turn(wholes))
        if known and all(record.model != model for record in known):
            raise ModelNotFound(f"the model {model!r} does not exist", param="model")
        raise CapacityError(_what_is_missing(known, model))

    def why_unserved(self) -> str | None:
        """Why no request of any model can be served now; None when some can."""
        known = self._directory.workers()
        if any(any(_serving(known, model)) for model in self.models()):
            return None
        if not known:
            return "no worker is known"
        return "; ".join(_what_is_missing(known, model) for model in self.models())

    def _take_turn(self, candidates: Sequence[WorkerRecord]) -> WorkerRecord:
        chosen = min(candidates, key=lambda r: (self._last_turn.get(r.worker_id, 0), r.worker_id))
        self._last_turn[chosen.worker_id] = next(self._turns)
        self._forget_the_gone()
        return chosen

    def _forget_the_gone(self) -> None:
        known = {record.worker_id for record in self._directory.workers()}
        if len(self._last_turn) > 2 * len(known):
            self._last_turn = {w: turn for w, turn in self._last_turn.items() if w in known}


def _ready(known: Iterable[WorkerRecord], model: str, role: Role) -> list[WorkerRecord]:
    return [r for r in known if r.role == role and r.state == "ready" and r.model == model]


def _fits(prefill: WorkerRecord, decode: WorkerRecord) -> bool:
    """True when `decode` can continue on KV that `prefill` computed."""
    return (prefill.model_digest, prefill.layout_digest) == (
        decode.model_digest,
        decode.layout_digest,
    )


def _serving(
    known: Iterable[WorkerRecord], model: str
) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
    """Prefill workers that have a decode worker to hand over to, and workers of both roles."""
    decodes = _ready(known, model, "decode")
    prefills = [p for p in _ready(known, model, "prefill") if any(_fits(p, d) for d in decodes)]
    return prefills, _ready(known, model, "both")


def _what_is_missing(known: Iterable[WorkerRecord], model: str) -> str:
    missing = [role for role in ("prefill", "decode") if not _ready(known, model, role)]
    if missing:
        return f"no {' and no '.join(missing)} worker is ready for model {model!r}"
    return f"no prefill and decode worker for model {model!r} agree on its weights and KV layout"
