"""Which workers serve a request: of those that can, the one that a policy prefers.

Pure: it reads a directory, asks who is fit, and keeps the order in which workers were used.
No I/O, no clock.

Next: proxy/neuron_di_proxy/policy.py, proxy/neuron_di_proxy/recovery.py
"""

import random
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import count, filterfalse
from typing import Protocol

import msgspec

from neuron_di.errors import CapacityError
from neuron_di.types import Role
from neuron_di.wire import WorkerRecord
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.known_models import KnownModels
from neuron_di_proxy.policy import LoadOf, Policy, round_robin
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


class Route(msgspec.Struct, frozen=True):
    """Who computes a request: it is handed over, or one worker does it all, and is both."""

    prefill: WorkerRecord
    decode: WorkerRecord

    @property
    def is_pair(self) -> bool:
        return self.prefill is not self.decode


Kind = tuple[str, str, tuple[str, ...]]  # digests of model and layout, what moves KV
_Unfit = Callable[[WorkerRecord], object]  # what it returns is true where the worker will not do


class _Ready:
    """The ready workers of one model, in each list those not used for longest first."""

    def __init__(self) -> None:
        self.prefills: list[WorkerRecord] = []
        self.wholes: list[WorkerRecord] = []
        self._all_decodes: list[WorkerRecord] = []
        # Those that fit prefill workers of one kind, and the same lists by the `id` of the prefill
        # worker's record, which `prefills` keeps: asked for often.
        self._decodes: dict[Kind, list[WorkerRecord]] = {}
        self.decodes_of: dict[int, list[WorkerRecord]] = {}

    def add(self, record: WorkerRecord) -> None:
        if record.role == "prefill":
            self.prefills.append(record)
            kind = kind_of(record)
            if kind not in self._decodes:
                self._decodes[kind] = [each for each in self._all_decodes if fits(record, each)]
            self.decodes_of[id(record)] = self._decodes[kind]
        elif record.role == "decode":
            self._all_decodes.append(record)
            for kind, listed in self._decodes.items():
                if _is_fit(kind, kind_of(record)):
                    listed.append(record)
        else:
            self.wholes.append(record)


class Router:
    """Picks the workers of each request: of those that fit, the ones that `policy` prefers.

    The workers are sorted once per snapshot of the directory, and not for each request. `load_of`
    and `rng` are for the policy.
    """

    def __init__(
        self,
        directory: Directory,
        fitness: Fitness,
        pairs: PairFitness | None = None,
        *,
        models: KnownModels | None = None,
        policy: Policy = round_robin,
        load_of: LoadOf = lambda _: 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self._directory = directory
        self._fitness = fitness
        self._pairs = pairs
        self._models = models or KnownModels()
        self._policy = policy
        self._load_of = load_of
        self._rng = rng or random.Random()  # noqa: S311 - spreads requests, keeps no secret
        self._turns = count(1)
        self._last_turn: dict[Process, int] = {}
        self._known: tuple[WorkerRecord, ...] = ()
        self._ready: dict[str, _Ready] = {}  # of what is known, by model

    def models(self) -> list[str]:
        """Names of the models that any known worker has, in alphabetical order."""
        return sorted({record.model for record in self._directory.workers()})

    def num_slots(self) -> int:
        """How many requests the workers that get some now can decode together.

        Those that do it all get none while a pair of their model is there.
        """
        usable = [r for r in self._directory.workers() if self._is_usable(r)]
        paired = set.intersection(*({r.model for r in _of_role(usable, h)} for h in _HALVES))
        wholes = (r for r in _of_role(usable, "both") if r.model not in paired)
        return sum(record.slots for record in (*_of_role(usable, "decode"), *wholes))

    def doubt(self, route: Route) -> None:
        """A worker of the route accused its partner. Which of them is right is not known."""
        if self._pairs is not None and route.is_pair:
            self._pairs.doubt(route.prefill, route.decode)

    def refuse(self, route: Route, reason: str) -> None:
        """A worker of the route will not work with its partner."""
        if self._pairs is not None and route.is_pair:
            self._pairs.refuse(route.prefill, route.decode, reason)

    def pick(
        self,
        model: str,
        avoid: AbstractSet[Process] = frozenset(),
        model_digest: str | None = None,
        context_tokens: int = 0,
        request: ChoiceRequest | None = None,
    ) -> Route:
        """Choose the workers of one request and count it as their turn.

        Processes in `avoid`, and pairs that failed their test, are chosen only where there is
        nothing else. With `model_digest` the workers have exactly these weights, and their context
        holds at least `context_tokens`. `request` is for the policy, which may look at its prompt.

        Raises ModelNotFound when workers are known but none has `model`, and CapacityError
        (which says what is missing) when none of them can serve it now.
        """
        known = self._directory.workers()
        if known is not self._known:
            self._sort(known)
        why_not = self._fitness.why_not
        is_unfit: _Unfit = why_not  # as a rule: asked without a function of ours in between
        if model_digest is not None or context_tokens:

            def is_unfit(record: WorkerRecord) -> object:
                if model_digest is not None and record.model_digest != model_digest:
                    return True
                return record.context_tokens < context_tokens or why_not(record)

        ready = self._ready.get(model)
        if ready is not None:
            pair = self._first_pair(ready, is_unfit, avoid, request)
            whole = None
            if ready.wholes and (pair is None or _is_avoided(avoid, pair.prefill, pair.decode)):
                wholes = self._policy(ready.wholes, self._load_of, self._rng, request)
                whole = _first(wholes, is_unfit, avoid)
            if whole is not None and (pair is None or not _is_avoided(avoid, whole)):
                self._note_turn(whole, ready.wholes)
                return Route(whole, whole)
            if pair is None:
                pair = self._first_pair(ready, is_unfit, avoid, request, has_to_work=False)
            if pair is not None:
                self._note_turn(pair.prefill, ready.prefills)
                self._note_turn(pair.decode, ready.decodes_of[id(pair.prefill)])
                return pair
        self._models.require(model, known)
        missing = self._what_is_missing(known, model)
        if not missing:
            missing = f"no worker has the weights, and the context, of model {model!r} any more"
        raise CapacityError(missing)

    def any_worker(self, model: str, avoid: AbstractSet[Process] = frozenset()) -> WorkerRecord:
        """One of the workers of `model`, in turn but not as its turn: to ask, not to compute.

        Raises ModelNotFound, and CapacityError when none is left besides those in `avoid`.
        """
        known = self._directory.workers()
        usable = [r for r in known if r.model == model and self._is_usable(r)]
        usable = [r for r in usable if process_of(r) not in avoid]
        if usable:
            return usable[next(self._turns) % len(usable)]
        self._models.require(model, known)
        raise CapacityError(f"no worker of model {model!r} can be asked now")

    def why_unserved(self) -> str | None:
        """Why no request of any model can be served now; None when some can."""
        known = self._directory.workers()
        models = self.models()
        reasons = [
            self._what_is_missing(known, model) or self._why_apart(known, model) for model in models
        ]
        if not known:
            return "no worker is known"
        return "; ".join(reasons) if all(reasons) else None

    def _why_apart(self, known: Iterable[WorkerRecord], model: str) -> str:
        """Empty, unless it takes two workers, and all that fit have failed their test."""
        usable = [r for r in known if r.model == model and self._is_usable(r)]
        prefills, decodes = _of_role(usable, "prefill"), _of_role(usable, "decode")
        if self._pairs is None or _of_role(usable, "both"):
            return ""
        pairs = ((p, d) for p in prefills for d in decodes if fits(p, d))
        if not all(self._pairs.has_failed(*pair) for pair in pairs):
            return ""
        return f"no prefill worker of model {model!r} can hand over to a decode worker"

    def _is_usable(self, record: WorkerRecord) -> bool:
        return record.state == "ready" and not self._fitness.why_not(record)

    def _sort(self, known: tuple[WorkerRecord, ...]) -> None:
        """Take over a snapshot. Who is gone loses its turn."""
        self._models.look(known)
        turns = {process_of(each): self._last_turn.get(process_of(each), 0) for each in known}
        self._known, self._last_turn, self._ready = known, turns, {}
        for record in sorted(known, key=lambda r: (turns[process_of(r)], r.worker_id)):
            if record.state == "ready":
                self._ready.setdefault(record.model, _Ready()).add(record)

    def _first_pair(
        self,
        ready: _Ready,
        is_unfit: _Unfit,
        avoid: AbstractSet[Process],
        request: ChoiceRequest | None,
        *,
        has_to_work: bool = True,
    ) -> Route | None:
        """The pair to be taken. Unless it `has_to_work`, one that failed its test will do."""
        spare: Route | None = None
        hopeless: tuple[list[WorkerRecord], ...] = ()  # decode workers, none of whom is fit
        policy, load_of, rng = self._policy, self._load_of, self._rng
        for prefill in filterfalse(is_unfit, policy(ready.prefills, load_of, rng, request)):
            listed = ready.decodes_of[id(prefill)]
            if hopeless and any(listed is each for each in hopeless):
                continue
            decodes = policy(listed, load_of, rng, request)
            if has_to_work and self._pairs is not None:
                decodes = filterfalse(partial(self._pairs.has_failed, prefill), decodes)
            decode = _first(decodes, is_unfit, avoid)
            if decode is None:
                if all(map(is_unfit, listed)):  # they are the same for other prefill workers
                    hopeless += (listed,)
                continue
            if not avoid or not _is_avoided(avoid, prefill, decode):
                return Route(prefill, decode)
            spare = spare or Route(prefill, decode)
        return spare

    def what_is_missing(self, model: str) -> str:
        """For a request of `model` to be served. Empty when nothing is."""
        return self._what_is_missing(self._directory.workers(), model)

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
        return (
            f"no prefill and decode worker for model {model!r} agree on weights, KV layout and "
            "transfer engine"
        )

    def _note_turn(self, chosen: WorkerRecord, candidates: list[WorkerRecord]) -> None:
        """It is the last of its list now."""
        self._last_turn[chosen.worker_id, chosen.incarnation] = next(self._turns)
        if candidates[0] is chosen:  # as a rule: it need not be looked for
            del candidates[0]
        else:
            for at, each in enumerate(candidates):  # `remove` compares records field by field
                if each is chosen:
                    del candidates[at]
                    break
        candidates.append(chosen)


_HALVES: tuple[Role, Role] = ("prefill", "decode")


def fits(prefill: WorkerRecord, decode: WorkerRecord) -> bool:
    """True when `decode` can continue on KV that `prefill` computed, by what both say."""
    return _is_fit(kind_of(prefill), kind_of(decode))


def kind_of(record: WorkerRecord) -> Kind:
    return record.model_digest, record.layout_digest, tuple(record.transfer)


def _is_fit(one: Kind, other: Kind) -> bool:
    """Weights and layout are the same, and something that moves KV reaches both."""
    return one[:2] == other[:2] and any(each in other[2] for each in one[2])


def _is_avoided(avoid: AbstractSet[Process], *records: WorkerRecord) -> bool:
    return any(process_of(record) in avoid for record in records)


def _of_role(records: Iterable[WorkerRecord], role: Role) -> list[WorkerRecord]:
    return [record for record in records if record.role == role]


def _first(
    candidates: Iterable[WorkerRecord], is_unfit: _Unfit, avoid: AbstractSet[Process]
) -> WorkerRecord | None:
    """The first that fits and is not to be avoided; the first that fits, where none is left."""
    spare: WorkerRecord | None = None
    for record in filterfalse(is_unfit, candidates):
        if not avoid or process_of(record) not in avoid:
            return record
        spare = spare or record
    return spare
