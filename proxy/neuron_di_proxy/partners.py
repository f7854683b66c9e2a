"""Why a worker has nobody to hand over to, or two workers one name: in words, for operators.

Pure. What is said here follows from records alone; whether a worker answers is `health`'s.
"""

from collections.abc import Iterable, Sequence

from neuron_di.types import Role
from neuron_di.wire import WorkerRecord
from neuron_di_proxy.route import fits
from neuron_di_proxy.workers import Process, place_of, process_of

DIGEST_CHARS = 8  # of a digest that people compare
_PARTNER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


def shown_digest(digest: str) -> str:
    return digest if len(digest) <= DIGEST_CHARS else f"{digest[:DIGEST_CHARS]}…"


def why_alone(records: Sequence[WorkerRecord]) -> dict[Process, str]:
    """The ready workers that are half of a pair and have no other half, each with the reason."""
    ready = [record for record in records if record.state == "ready"]
    reasons: dict[Process, str] = {}
    known: dict[tuple[object, ...], str] = {}  # many workers are alike
    for record in ready:
        role = _PARTNER.get(record.role)
        if role is None:
            continue
        digests = (record.model_digest, record.layout_digest, tuple(record.transfer))
        kind = (record.role, record.model, digests)
        if kind not in known:
            known[kind] = _why_alone(record, [each for each in ready if each.role == role], role)
        if known[kind]:
            reasons[process_of(record)] = known[kind]
    return reasons


def _why_alone(record: WorkerRecord, partners: list[WorkerRecord], role: Role) -> str:
    if not partners:
        return f"no {role} worker is ready"
    same = [each for each in partners if each.model == record.model]
    if any(fits(record, each) for each in same):
        return ""
    if not same:
        return f"no {role} worker has model {record.model!r}"
    other = max(same, key=lambda each: _num_alike(record, each))
    if record.model_digest != other.model_digest:
        shown = shown_digest(record.model_digest)
        return f"weights {shown} differ from {other.worker_id}'s"
    if record.layout_digest != other.layout_digest:
        shown = shown_digest(record.layout_digest)
        return f"KV layout {shown} differs from {other.worker_id}'s"
    own, others = (", ".join(each.transfer) or "nothing" for each in (record, other))
    # An engine of one host has behind an @ whom it reaches there.
    names = [{name.partition("@")[0] for name in each.transfer} for each in (record, other)]
    is_tcp = all("tcp" in each for each in names)
    mend = "a --host that others reach" if is_tcp else "--transfer shm,tcp"
    return f"{own} can move its KV, {others} that of {other.worker_id}: {mend} at both would do"


def _num_alike(one: WorkerRecord, other: WorkerRecord) -> int:
    fields = ("model_digest", "layout_digest", "transfer")
    return sum(getattr(one, field) == getattr(other, field) for field in fields)


def shared_names(records: Iterable[WorkerRecord]) -> list[str]:
    """Names that several of these workers have, a sentence each."""
    places: dict[str, list[str]] = {}
    for record in records:
        host, port = place_of(record)
        places.setdefault(record.worker_id, []).append(f"{host}:{port}")
    return [
        f"{len(at)} workers have the name {name}: at {', '.join(at[:4])}"
        for name, at in sorted(places.items())
        if len(at) > 1
    ]
