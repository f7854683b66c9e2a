"""Which requests run, which wait, and which are told to come back later.

    arrive      the head of a request is here: refused at once, or given a ticket
    take        its body is read: so many answers, of so many tokens
    turn        it waits until it may run
    close       its places go to others

A place is one answer that is being computed. There are a few more places than the decode workers
have slots, so that a slot that becomes free has somebody waiting for it; who waits here and not
at a worker can still be overtaken. Tenants that wait take turns (`fair_queue`), and the one that
fills the queue makes room for the one that does not.
"""

import asyncio
from collections.abc import Callable
from math import ceil
from typing import Literal

from neuron_di.clock import Deadline, now_s
from neuron_di.config import LimitOptions
from neuron_di.errors import CapacityError
from neuron_di_proxy.fair_queue import FairQueue
from neuron_di_proxy.retry_after import WAIT_S_MIN, DrainRate
from neuron_di_proxy.tenant import Tenant
from neuron_di_proxy.tenant_account import TenantAccount

PLACES_PER_SLOT = 1.25
QUEUE_PER_SLOT = 2
QUEUE_MIN = 64
SLOTS_UNKNOWN = 64  # taken where workers do not say, or where there are none yet
LOOK_INTERVAL_S = 0.25  # between two looks at the number of slots, while somebody has no place
REST_INTERVAL_S = 1.0  # while all have one
BODY_LATE_S = 1.0  # a body that takes longer keeps nobody out
ACCOUNTS_KEPT = 4096  # accounts that are looked through for those at rest, when there are more

# pushed out: refused after all, while it waited or its body was being read.
TicketState = Literal["arrived", "waiting", "running", "pushed out", "closed"]


class Ticket:
    """One request's. Made by `Admission.arrive`; whoever has it closes it.

    `state` and what follows it are the admission's.
    """

    __slots__ = (
        "_admission",
        "account",
        "arrived_s",
        "called",
        "cost",
        "num_places",
        "refusal",
        "state",
    )

    def __init__(self, admission: "Admission", account: TenantAccount) -> None:
        self._admission = admission
        self.state: TicketState = "arrived"
        self.account = account
        self.arrived_s = now_s()
        self.num_places = 1
        self.cost = 1.0
        self.called: asyncio.Future[None] | None = None  # while somebody waits for its turn
        self.refusal: CapacityError | None = None  # why it was pushed out

    def take(self, num_places: int, cost: float) -> None:
        """Say how many answers the request is for, before its turn.

        `cost` is what tenants share fairly: tokens. Raises CapacityError when the request has
        been pushed out.
        """
        if self.refusal is not None:
            raise self.refusal
        assert self.state == "arrived", "a request says before its turn what it is for"
        self.num_places = num_places
        self.cost = max(1.0, cost)

    async def turn(self, deadline: Deadline) -> None:
        """Return when the request may run. CapacityError at `deadline`, or when it is pushed out.

        However this ends but by returning, the ticket is closed.
        """
        try:
            if not self._admission.start(self):
                await self._wait(deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back what the request has. At once; may be called twice."""
        if self.state != "closed":
            self._admission.end(self)

    def is_reading(self, since_s: float) -> bool:
        """Whether its body is not there yet, though its head was then."""
        return self.state == "arrived" and self.arrived_s <= since_s

    async def _wait(self, deadline: Deadline) -> None:
        self.called = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self.called
        except TimeoutError:
            raise CapacityError(
                "the request waited too long for its turn",
                retry_after_s=self._admission.wait_s(),
            ) from None
        finally:
            self.called = None


class Admission:
    """All tickets of one proxy process. Owned by one event loop; nothing here takes long.

    `num_slots` says how many answers the workers can compute together; 0: they do not say.
    """

    def __init__(self, limits: LimitOptions, num_slots: Callable[[], int]) -> None:
        self._limits = limits
        self._num_slots = num_slots
        self._looked_s = float("-inf")
        self._places_max = 1
        self._queue_max = 0
        self._queue: FairQueue[Ticket] = FairQueue()
        self._accounts: dict[str, TenantAccount] = {}
        self._crowd: dict[str, TenantAccount] = {}  # those with tickets that do not run yet
        self._timer: asyncio.TimerHandle | None = None
        self._all_closed: asyncio.Event | None = None  # while that is waited for
        self._num_open = 0
        self._drain_rate = DrainRate()
        self.num_running = 0
        self.num_waiting = 0  # those whose body is being read included
        self.num_places = 0  # that are taken
        self.num_admitted = 0  # that ran, since the start
        self.is_draining = False

    def arrive(self, tenant: Tenant) -> Ticket:
        """Let a request in, if only to wait. Decided at once.

        Raises RateLimited when the tenant has its share already, CapacityError when there is no
        room for anybody.
        """
        if self.is_draining:
            raise CapacityError("the server is shutting down", retry_after_s=WAIT_S_MIN)
        account = self._account(tenant)
        account.check(self._drain_rate)
        self._look(REST_INTERVAL_S)
        if self._is_crowded():
            self._look(LOOK_INTERVAL_S)
            if self._is_crowded():
                self._make_room(account)
        account.count_request()
        ticket = Ticket(self, account)
        account.num_open += 1
        account.pending[ticket] = None
        self._crowd[tenant.name] = account
        self._num_open += 1
        self.num_waiting += 1
        return ticket

    def spend(self, tenant: Tenant, num_tokens: float) -> None:
        """Count what an answer of the tenant's took, prompt and all, against its rate."""
        # By the limits that are in force now: it may have begun before the keys were read again.
        account = self._accounts.get(tenant.name) or self._account(tenant)
        account.count_tokens(num_tokens)

    def drain(self) -> None:
        """Take no new request from now on. Those that have a ticket go on."""
        self.is_draining = True

    def abandon_waiting(self) -> None:
        """Refuse whatever does not run yet."""
        error = CapacityError("the server is shutting down", retry_after_s=WAIT_S_MIN)
        for account in list(self._crowd.values()):
            for ticket in list(account.pending):
                self._push_out(ticket, error)

    async def wait_idle(self) -> None:
        """Return once every ticket is closed."""
        while self._num_open:
            self._all_closed = self._all_closed or asyncio.Event()
            await self._all_closed.wait()

    def wait_s(self) -> float:
        """Seconds after which a new request may find room: a guess."""
        return self._drain_rate.wait_s(self.num_waiting + 1)

    # What tickets ask for.

    def start_at_once(self, ticket: Ticket) -> bool:
        """Whether the ticket runs now, as nobody waits and there is room. False: ask its `turn`."""
        if ticket.refusal is not None:
            return False
        assert ticket.state == "arrived", "a request has one turn"
        self._look(REST_INTERVAL_S)
        if self._queue.num_items or not self._has_room(ticket):
            return False
        tenant = ticket.account.tenant
        self._queue.pass_by(tenant.name, ticket.cost, tenant.weight)
        self._run(ticket)
        return True

    def start(self, ticket: Ticket) -> bool:
        """Whether the ticket runs now; else it waits. CapacityError if it was pushed out."""
        if ticket.refusal is not None:
            raise ticket.refusal
        if self.start_at_once(ticket):
            return True
        tenant = ticket.account.tenant
        ticket.state = "waiting"
        self._queue.put(tenant.name, ticket, ticket.cost, tenant.weight)
        self._look(LOOK_INTERVAL_S)
        self._start_waiting()
        return ticket not in ticket.account.pending

    def end(self, ticket: Ticket) -> None:
        """Take back what the ticket has, and start who waited for it."""
        if ticket.state == "running":
            self.num_running -= 1
            self.num_places -= ticket.num_places
            self._drain_rate.count()
            if not self.num_running:
                self._drain_rate.rest()
        elif ticket.state != "pushed out":
            self._leave_crowd(ticket)
        ticket.state = "closed"
        ticket.refusal = None  # whose traceback has all of the request
        ticket.account.num_open -= 1
        self._num_open -= 1
        if self._queue.num_items:
            self._look(LOOK_INTERVAL_S)
            self._start_waiting()
        if self._all_closed is not None and not self._num_open:
            self._all_closed.set()
            self._all_closed = None

    # Coming in.

    def _account(self, tenant: Tenant) -> TenantAccount:
        account = self._accounts.get(tenant.name)
        if account is None:
            if len(self._accounts) >= ACCOUNTS_KEPT:  # tenants come and go, as their keys do
                kept = {name: each for name, each in self._accounts.items() if not each.is_at_rest}
                self._accounts = kept
            account = self._accounts[tenant.name] = TenantAccount(tenant)
        elif account.tenant is not tenant:
            account.adopt(tenant)  # the keys were read again
        return account

    def _is_crowded(self) -> bool:
        num_free = max(0, self._places_max - self.num_places)
        return self.num_waiting >= self._queue_max + num_free

    def _make_room(self, account: TenantAccount) -> None:
        """Push out the youngest request of the tenant that crowds the queue, or refuse.

        A tenant's own request makes room, too, if its body is late: heads alone, which cost a
        client nothing, fill no queue.
        """
        most = max(self._crowd.values(), key=TenantAccount.crowding, default=account)
        if most.crowding() > account.crowding(1):
            self._push_out(next(reversed(most.pending)), self._is_full())
        else:
            late = now_s() - BODY_LATE_S
            slow = (each for each in account.pending if each.is_reading(since_s=late))
            ticket = next(slow, None)
            if ticket is None:
                raise self._is_full()
            self._push_out(ticket, self._is_full())
        self._start_waiting()  # it may have been first, and too large

    def _is_full(self) -> CapacityError:
        return CapacityError(
            f"{self.num_waiting} requests are waiting, which is the limit",
            retry_after_s=self.wait_s(),
        )

    def _push_out(self, ticket: Ticket, error: CapacityError) -> None:
        """Refuse a request that does not run yet after all. Its owner closes the ticket."""
        self._leave_crowd(ticket)
        ticket.state = "pushed out"
        ticket.refusal = error
        if ticket.called is not None and not ticket.called.done():
            ticket.called.set_exception(error)

    def _leave_crowd(self, ticket: Ticket) -> None:
        """It waits no longer, for whatever reason but its turn."""
        if ticket.state == "waiting":
            self._queue.remove(ticket.account.tenant.name, ticket)
        self._count_pending_out(ticket)

    def _count_pending_out(self, ticket: Ticket) -> None:
        account = ticket.account
        del account.pending[ticket]
        if not account.pending:
            del self._crowd[account.tenant.name]
        self.num_waiting -= 1

    # Having a turn.

    def _has_room(self, ticket: Ticket) -> bool:
        # One that asks for more places than there are runs alone.
        return not self.num_places or self.num_places + ticket.num_places <= self._places_max

    def _start_waiting(self) -> None:
        """Start whom there is room for, in their order. The first of them is never overtaken."""
        while (ticket := self._queue.first()) is not None and self._has_room(ticket):
            self._queue.take_first()
            self._run(ticket)
            if ticket.called is not None and not ticket.called.done():
                ticket.called.set_result(None)
        if self._queue.num_items and self._timer is None:
            # Workers may come while nobody does: then nothing else would look at the queue.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LOOK_INTERVAL_S, self._look_again)

    def _run(self, ticket: Ticket) -> None:
        self._count_pending_out(ticket)
        ticket.state = "running"
        if not self.num_running:
            self._drain_rate.begin()
        self.num_running += 1
        self.num_admitted += 1
        self.num_places += ticket.num_places

    def _look_again(self) -> None:
        self._timer = None
        self._look(LOOK_INTERVAL_S)
        self._start_waiting()

    def _look(self, interval_s: float) -> None:
        """See how many places there are, unless that was seen so lately."""
        now = now_s()
        if now - self._looked_s < interval_s:
            return
        self._looked_s = now
        slots = self._num_slots() or SLOTS_UNKNOWN
        limits = self._limits
        self._places_max = limits.requests_max or ceil(slots * PLACES_PER_SLOT)
        self._queue_max = (
            max(QUEUE_MIN, slots * QUEUE_PER_SLOT) if limits.queue_max is None else limits.queue_max
        )
        self._start_waiting()
