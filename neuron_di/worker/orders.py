"""What an operator ordered of a worker's process. Lives as long as the process, over its roles.

    serving --prepare--> prepared --drain---> ended
                              |-----commit--> changing --> serving, in the new role or, where that
                              '--abort, 30 s--> serving                      failed, in the old one

Preparing changes nothing but that the worker's status says so: a `no` costs nobody anything, and
whoever is about to let another worker go sees that this one may not stay. A drain needs no ticket,
if somebody means it. From the drain or the commit on there is no way back by order.

Next: neuron_di/worker/role_epochs.py
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from neuron_di.clock import Deadline
from neuron_di.errors import ClientError, LocalProtocolError, StaleIncarnation
from neuron_di.obs import get_logger
from neuron_di.types import Incarnation, Role
from neuron_di.wire.admin import (
    DrainOrder,
    DrainTicket,
    PrepareDrain,
    PrepareRole,
    RoleOutcome,
    RoleTicket,
)
from neuron_di.worker.drain import Drain
from neuron_di.worker.worker import Worker

_log = get_logger(__name__)

TICKET_S = 30.0


class OrderRefused(ClientError):
    """Raised when a worker will not do what it was ordered. The subclasses say why."""

    http_status = 409
    code = "order_refused"


class OrderInProgress(OrderRefused):
    """Raised when another order is being carried out."""

    code = "order_in_progress"


class SameRole(OrderRefused):
    """Raised when the worker has the role already."""

    code = "same_role"


class RoleImpossible(OrderRefused):
    """Raised when the worker lacks what the role needs."""

    code = "role_impossible"


class TicketExpired(OrderRefused):
    """Raised when a ticket is unknown, was used, or came too late."""

    code = "ticket_expired"


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A change that is under way."""

    ticket: str
    before: Role
    role: Role


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An order that may come. `change` is None where it is a drain."""

    ticket: str
    change: RoleChange | None
    expires: Deadline


class Orders:
    """Takes orders for whichever worker lives here now, and wakes the loop that obeys.

    `can_take` raises RoleImpossible where this process cannot take a role. It changes nothing.
    """

    def __init__(self, can_take: Callable[[Role], None], *, drain_timeout_s: float) -> None:
        self._can_take = can_take
        self._drain_timeout_s = drain_timeout_s
        self._worker: Worker | None = None
        self._prepared: _Prepared | None = None
        self.given = asyncio.Event()  # there is something to obey
        self.drain: Drain | None = None  # of the worker that lives here now
        self.change: RoleChange | None = None  # that was committed, and is not over
        self.outcome: RoleOutcome | None = None  # of the last change

    def begin(self, worker: Worker) -> None:
        """Orders are for this worker from now on: the former one has ended."""
        self._worker = worker
        self._prepared = self.drain = None
        self.given.clear()

    def end(self) -> None:
        """That worker is gone, and nothing here keeps its memory."""
        self._worker = self._prepared = self.drain = None

    def start_drain(self, timeout_s: float | None = None) -> Drain:
        """The drain of this worker, begun if it was not."""
        assert self._worker is not None, "there is a worker from the first epoch on"
        if self.drain is None:
            limit_s = self._drain_timeout_s if timeout_s is None else timeout_s
            self.drain = Drain(self._worker, limit_s)
            self._worker.set_state("draining")
        return self.drain

    def hurry(self) -> None:
        """The process is told to end: no order makes it stay longer than its own limit."""
        if self.drain is not None:
            self.drain.hurry(self._drain_timeout_s)

    def order_drain(self, order: DrainOrder) -> tuple[Drain, bool]:
        """Drain, then end. True: an earlier order does that already.

        Raises StaleIncarnation, OrderInProgress, TicketExpired.
        """
        self._check_meant(order.incarnation)
        self._refuse_while_changing()
        has_joined = self.drain is not None
        if order.ticket is not None and not has_joined:
            self._take(order.ticket)
        self._prepared = None
        drain = self.start_drain(order.timeout_s)
        self.given.set()
        return drain, has_joined

    def prepare_drain(self, order: PrepareDrain) -> DrainTicket:
        """Say that this worker may leave. Raises StaleIncarnation or OrderInProgress.

        Who prepares what was prepared gets the same ticket: the later of two drains joins.
        """
        self._check_meant(order.incarnation)
        self._refuse_while_changing()
        if self.drain is not None:
            return DrainTicket(ticket=None)
        prepared = self._prepared
        if prepared is not None and prepared.change is None and not prepared.expires.has_passed():
            expires_s = prepared.expires.remaining_s()
            return DrainTicket(ticket=prepared.ticket, expires_s=expires_s)
        self._refuse_while_prepared()
        ticket = secrets.token_hex(8)
        self._prepare(ticket, None)
        return DrainTicket(ticket=ticket, expires_s=TICKET_S)

    def prepare(self, order: PrepareRole) -> RoleTicket:
        """Whether the role could be taken now. Raises StaleIncarnation or OrderRefused."""
        before = self._check_meant(order.incarnation)
        self._refuse_while_changing()
        self._refuse_while_draining()
        self._refuse_while_prepared()
        if order.role == before:
            raise SameRole(f"this worker's role is {before} already")
        self._can_take(order.role)
        ticket = secrets.token_hex(8)
        self._prepare(ticket, RoleChange(ticket, before, order.role))
        return RoleTicket(ticket=ticket, before=before, role=order.role, expires_s=TICKET_S)

    def commit(self, ticket: str, timeout_s: float | None) -> Drain:
        """Change the role: the worker drains, and another takes its place.

        Raises TicketExpired, or OrderInProgress where the process was told to end meanwhile.
        """
        change = self._take(ticket).change
        self._refuse_while_draining()
        if change is None:
            raise TicketExpired("this ticket is one for a drain")
        self._prepared, self.change = None, change
        self._note("changing")
        drain = self.start_drain(timeout_s)
        self.given.set()
        return drain

    def abort(self, ticket: str) -> None:
        """Forget a ticket that was not used. Raises TicketExpired where there is no such one."""
        self._take(ticket)
        self._forget_prepared()

    def end_change(self, reason: str = "") -> None:
        """A worker serves again: in the new role or, for this reason, in the old one."""
        if self.change is not None:
            self._note("reverted" if reason else "changed", reason)
            self.change = None

    def _note(self, state: str, reason: str = "") -> None:
        change = self.change
        if change is None:
            raise LocalProtocolError("no role is being changed")
        _log.info("role_change", state=state, before=change.before, role=change.role)
        self.outcome = RoleOutcome(
            ticket=change.ticket,
            before=change.before,
            role=change.role,
            state=state,  # type: ignore[arg-type]
            reason=reason,
        )

    def _prepare(self, ticket: str, change: RoleChange | None) -> None:
        assert self._worker is not None, "there is a worker from the first epoch on"
        self._prepared = _Prepared(ticket, change, Deadline.after(TICKET_S))
        self._worker.leaving = self._prepared.expires

    def _forget_prepared(self) -> None:
        assert self._worker is not None, "there is a worker from the first epoch on"
        self._prepared = self._worker.leaving = None

    def _take(self, ticket: str) -> _Prepared:
        prepared = self._prepared
        if prepared is None or not secrets.compare_digest(
            prepared.ticket.encode(), ticket.encode()
        ):
            raise TicketExpired("this ticket is unknown here: it was used, or another order came")
        if prepared.expires.has_passed():
            self._forget_prepared()
            raise TicketExpired(f"this ticket has expired: it was good for {TICKET_S:g} s")
        return prepared

    def _check_meant(self, incarnation: Incarnation) -> Role:
        """The role of the worker that is meant. Raises StaleIncarnation if it is gone."""
        assert self._worker is not None, "there is a worker from the first epoch on"
        record = self._worker.record()
        if record.incarnation != incarnation:
            raise StaleIncarnation(f"worker {record.worker_id} is another process by now")
        return record.role

    def _refuse_while_prepared(self) -> None:
        prepared = self._prepared
        if prepared is not None and not prepared.expires.has_passed():
            what = "a drain" if prepared.change is None else f"a change to {prepared.change.role}"
            raise OrderInProgress(
                f"{what} is prepared already; its ticket expires in "
                f"{prepared.expires.remaining_s():.0f} s"
            )

    def _refuse_while_draining(self) -> None:
        if self.drain is not None:
            raise OrderInProgress("this worker is draining: it will end")

    def _refuse_while_changing(self) -> None:
        if self.change is not None:
            raise OrderInProgress(f"this worker is changing its role to {self.change.role}")
