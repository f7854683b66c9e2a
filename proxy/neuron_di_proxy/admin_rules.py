"""Whom an order is for, and whether the others can do without that worker. Pure.

A worker that is the last of its role is not let go by mistake: an operator who means it forces it.
"""

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from neuron_di.errors import ClientError
from neuron_di.types import Role
from neuron_di.wire import WorkerRecord
from neuron_di_proxy.route import fits
from neuron_di_proxy.workers import Process, process_of

_HALVES: tuple[Role, Role] = ("prefill", "decode")


class WorkerNotFound(ClientError):
    """Raised when no worker, or more than one, has the name that an order gives."""

    http_status = 404
    code = "worker_not_found"


class LastWorker(ClientError):
    """Raised when without a worker its model could not be served any more."""

    http_status = 409
    code = "last_worker"


def find_worker(
    records: Iterable[WorkerRecord], worker_id: str, is_usable: Callable[[WorkerRecord], bool]
) -> WorkerRecord:
    """The worker of this name. Of several processes, such as one that restarted, the usable one."""
    known = list(records)
    found = [record for record in known if record.worker_id == worker_id]
    if len(found) > 1:
        found = [record for record in found if is_usable(record)] or found
    if len(found) > 1:
        urls = ", ".join(record.url() for record in found)
        raise WorkerNotFound(f"more than one worker is called {worker_id}: {urls}", param="worker")
    if not found:
        names = ", ".join(sorted(record.worker_id for record in known)) or "none"
        raise WorkerNotFound(f"no worker is called {worker_id}; there are: {names}", param="worker")
    return found[0]


def usable_others(
    records: Iterable[WorkerRecord],
    record: WorkerRecord,
    leaving: AbstractSet[Process],
    is_usable: Callable[[WorkerRecord], bool],
) -> list[WorkerRecord]:
    """Who can do what `record` does for its model, or a part of it."""
    return [
        other
        for other in records
        if other.model == record.model
        and other.model_digest == record.model_digest
        and other.state == "ready"
        and process_of(other) != process_of(record)
        and process_of(other) not in leaving
        and is_usable(other)
    ]


def check_may_leave(record: WorkerRecord, others: list[WorkerRecord]) -> None:
    """Raise LastWorker where nobody would be left to do what this worker does.

    Nor where those that are left cannot work together, and with this worker some can.
    """
    needed = _HALVES if record.role == "both" else (record.role,)
    missing = [role for role in needed if not _has(others, role)]
    if missing:
        raise LastWorker(
            f"no other {' and no other '.join(missing)} worker would be left for model "
            f"{record.model}: give --force if that is meant",
            param="worker",
        )
    if _can_serve([record, *others]) and not _can_serve(others):
        raise LastWorker(
            f"no prefill and decode worker that fit would be left for model {record.model}: give "
            "--force if that is meant",
            param="worker",
        )


def check_may_change(record: WorkerRecord, role: Role, others: list[WorkerRecord]) -> None:
    """Raise LastWorker where the model could not be served during the change, or after it."""
    check_may_leave(record, others)
    missing = [half for half in _HALVES if role not in (half, "both") and not _has(others, half)]
    if missing:
        raise LastWorker(
            f"no {' and no '.join(missing)} worker would be there for model {record.model} "
            "afterwards: give --force if that is meant",
            param="role",
        )


def _has(others: list[WorkerRecord], role: Role) -> bool:
    return any(other.role in (role, "both") for other in others)


def _can_serve(records: list[WorkerRecord]) -> bool:
    """Whether one of them computes whole requests, or two of them hand over."""
    decodes = [record for record in records if record.role == "decode"]
    return any(
        one.role == "both"
        or (one.role == "prefill" and any(fits(one, decode) for decode in decodes))
        for one in records
    )
