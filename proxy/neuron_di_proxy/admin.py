"""Carries out an operator's orders: tells the worker, follows it, and checks that it came true.

Any process of any proxy can: the worker tells all of them by its links what state it is in, and the
registry says who is there. Whoever stops listening changes nothing, once the worker was told.

The last worker of a role is not let go. Several proxies may be told to let one go each, at the
same time: so a worker first says in its status that it may leave, and only then the others are
asked whether they stay. Of two that ask like this at least one sees the other; at worst both see
it, and both are refused.

    drain   prepare → order → requests finish, KV is pulled or expires → key gone → process gone
    role    prepare → commit → the same, but for the process → another incarnation of the same
            name serves → it answers → it hands over with a partner

Next: neuron_di/worker/orders.py
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from neuron_di.clock import Deadline
from neuron_di.errors import BadRequest, PeerError, PeerGone, PeerTimeout
from neuron_di.obs import get_logger
from neuron_di.wire import WorkerRecord
from neuron_di.wire.admin import (
    CommitRole,
    DrainOrder,
    DrainProgress,
    PrepareDrain,
    PrepareRole,
    RoleOutcome,
    RoleTicket,
)
from neuron_di_proxy.admin_link import AdminLink
from neuron_di_proxy.admin_order import AdminLine, DrainRequest, RoleRequest, failed_line
from neuron_di_proxy.admin_rules import (
    check_may_change,
    check_may_leave,
    find_worker,
    usable_others,
)
from neuron_di_proxy.health import Health
from neuron_di_proxy.route import Directory, fits
from neuron_di_proxy.self_test import PairBook
from neuron_di_proxy.workers import Process, Workers, process_of

_log = get_logger(__name__)

LOOK_S = 0.05
SAY_S = 1.0  # a line at least so often: who listens must know that we live
GONE_TIMEOUT_S = 20.0
GONE_LEASES = 2  # at least so many lease times: a key that could not be revoked ends with its lease
SWITCH_TIMEOUT_S = 120.0  # until the worker of the other role is there: its pool is touched first
TEST_TIMEOUT_S = 45.0
REFUSALS_MAX = 2  # in a row, until a process counts as ended

Lines = AsyncGenerator[AdminLine, None]


class Admin:
    """One per proxy process. `workers` is asked whether a process is gone.

    A worker's key in the registry lasts `lease_s` where it cannot be revoked.
    """

    def __init__(
        self,
        directory: Directory,
        workers: Workers,
        health: Health,
        pairs: PairBook,
        *,
        lease_s: float = 10.0,
    ) -> None:
        self._directory = directory
        self._workers = workers
        self._health = health
        self._pairs = pairs
        self._gone_timeout_s = max(GONE_TIMEOUT_S, GONE_LEASES * lease_s)
        self._leaving: set[Process] = set()  # by orders that this process carries out

    async def drain(self, order: DrainRequest) -> Lines:
        """Drain a worker. Refuses with an error before the first line, fails within the last."""
        record = self._find(order.worker)
        check = partial(check_may_leave, record)
        if not order.force and process_of(record) not in self._leaving:
            check(self._others(record))
        with self._is_leaving(record):
            last: DrainProgress | None = None
            incarnation = record.incarnation
            async with AdminLink(record) as link:
                ticket: str | None = None
                if not order.force:
                    said = await link.prepare_drain(PrepareDrain(incarnation=incarnation))
                    ticket = said.ticket
                if ticket is not None:
                    await self._check_again(link, record, ticket, check)
                _log.info("drain_ordered", worker=record.worker_id)
                drain = DrainOrder(
                    incarnation=incarnation, ticket=ticket, timeout_s=order.timeout_s
                )
                try:
                    async for last in link.drain(drain):
                        if last.state == "draining":
                            yield AdminLine(phase="draining", progress=last)
                except PeerError as error:
                    if last is None:
                        raise
                    yield failed_line(error)
                    return
            assert last is not None, "a drain without a line is an error"
            yield AdminLine(phase="drained", progress=last)
            async for line in self._gone(record, is_ending=True):
                yield line
                if line.phase == "failed":
                    return
        yield AdminLine(phase="done", progress=last, is_clean=_is_clean(last))

    async def change_role(self, order: RoleRequest) -> Lines:
        """Change a worker's role. Refuses with an error before the first line."""
        record = self._find(order.worker)
        if record.role == order.role:
            words = f"{record.worker_id} is a {order.role} worker already"
            raise BadRequest(words, param="role")
        check = partial(check_may_change, record, order.role)
        if not order.force:
            check(self._others(record))
        prepare = PrepareRole(incarnation=record.incarnation, role=order.role)
        with self._is_leaving(record):
            async with AdminLink(record) as link:
                ticket = await link.prepare(prepare)
                if not order.force:
                    await self._check_again(link, record, ticket.ticket, check)
                yield AdminLine(
                    phase="prepared",
                    words=f"{record.worker_id} can become a {order.role} worker",
                )
                _log.info("role_ordered", worker=record.worker_id, role=order.role)
                last: DrainProgress | None = None
                try:
                    commit = CommitRole(ticket=ticket.ticket, timeout_s=order.timeout_s)
                    async for last in link.commit(commit):
                        if last.state == "draining":
                            yield AdminLine(phase="draining", progress=last)
                except PeerError as error:
                    yield failed_line(error)
                    return
            yield AdminLine(phase="drained", progress=last)
            async for line in self._gone(record, is_ending=False):
                yield line
                if line.phase == "failed":
                    return
            async for line in self._verified(record, ticket, last):
                yield line

    def _find(self, worker_id: str) -> WorkerRecord:
        return find_worker(self._directory.workers(), worker_id, self._health.is_usable)

    def _others(self, record: WorkerRecord) -> list[WorkerRecord]:
        known = self._directory.workers()
        return usable_others(known, record, self._leaving, self._health.is_usable)

    async def _check_again(
        self,
        link: AdminLink,
        record: WorkerRecord,
        ticket: str,
        check: Callable[[list[WorkerRecord]], None],
    ) -> None:
        """The worker says that it may leave: who of the others stays, by their own word?

        Raises what `check` does. The order is forgotten then, before anything ended.
        """
        try:
            others = self._others(record)
            stay = await asyncio.gather(*(self._stays(other) for other in others))
            check([other for other, does_stay in zip(others, stay, strict=True) if does_stay])
        except BaseException:
            with suppress(PeerError):  # it is the reason that counts
                await link.abort(ticket)
            raise

    async def _stays(self, record: WorkerRecord) -> bool:
        try:
            status = await self._workers.status(record)
        except PeerError:
            return False
        return (
            status.record.incarnation == record.incarnation
            and status.record.state == "ready"
            and not status.is_leaving
        )

    @contextmanager
    def _is_leaving(self, record: WorkerRecord) -> Iterator[None]:
        """Meanwhile nobody else may leave because this one is there."""
        process = process_of(record)
        is_first = process not in self._leaving
        self._leaving.add(process)
        try:
            yield
        finally:
            if is_first:
                self._leaving.discard(process)

    async def _gone(self, record: WorkerRecord, *, is_ending: bool) -> Lines:
        """Wait until this incarnation is in no directory and, if the process ends, answers not.

        A registry that is away cannot tell: a process that stays may say itself that it changed,
        and one that ends answers no more.
        """
        deadline, said = Deadline.after(self._gone_timeout_s), Deadline.after(SAY_S)
        has_left = False
        while not deadline.has_passed():
            is_known = any(
                process_of(each) == process_of(record) for each in self._directory.workers()
            )
            if not is_known and not has_left:
                has_left = True
                yield AdminLine(phase="left", words="it is no longer in the registry")
            if has_left and not is_ending:
                return
            if is_ending and has_left and await self._is_silent(record):
                yield AdminLine(phase="ended", words="its process answers no more")
                return
            if said.has_passed():
                if not has_left and (words := await self._left_unsaid(record, is_ending)):
                    has_left = True
                    yield AdminLine(phase="left", words=words)
                    continue
                said = Deadline.after(SAY_S)
                yield AdminLine(phase="draining", words="waiting until it is gone")
            await asyncio.sleep(LOOK_S)
        what = "still answers" if has_left else "is still in the registry"
        words = f"worker {record.worker_id} {what} after {self._gone_timeout_s:g} s"
        yield failed_line(PeerTimeout(words))

    async def _left_unsaid(self, record: WorkerRecord, is_ending: bool) -> str:
        """How we know that it left, where the registry does not say so; empty: we do not."""
        if not is_ending:
            if await self._has_changed(record):
                return "another incarnation answers; the registry does not say so yet"
            return ""
        directory = self._health.candid_directory()
        if directory is not None and directory.trouble() and await self._is_silent(record):
            return "the registry is not heard: its key there ends with its lease"
        return ""

    async def _is_silent(self, record: WorkerRecord) -> bool:
        """Whether that process is gone from its address, whoever else may be there."""
        try:
            status = await self._workers.status(record)
        except PeerGone:
            return True
        except PeerError:
            return False
        return status.record.incarnation != record.incarnation

    async def _has_changed(self, record: WorkerRecord) -> bool:
        """Whether another incarnation answers at its address."""
        try:
            status = await self._workers.status(record, SAY_S)
        except PeerError:
            return False
        return status.record.incarnation != record.incarnation

    async def _verified(
        self, before: WorkerRecord, ticket: RoleTicket, last: DrainProgress | None
    ) -> Lines:
        """Wait until the worker serves again, and see whether it really does what it should."""
        deadline, said = Deadline.after(SWITCH_TIMEOUT_S), Deadline.after(SAY_S)
        num_refused = 0  # in a row
        while (new := self._successor(before)) is None:
            if deadline.has_passed():
                what = "is not back"
                if await self._has_changed(before):
                    what = "answers, but is not in the registry and up,"
                words = f"worker {before.worker_id} {what} after {SWITCH_TIMEOUT_S:g} s"
                yield failed_line(PeerTimeout(words))
                return
            # Once may be a connection that ended with the worker that was.
            num_refused = 0 if await self._is_process_there(before) else num_refused + 1
            if num_refused >= REFUSALS_MAX:
                words = f"the process of worker {before.worker_id} has ended: its log says why"
                yield failed_line(PeerGone(words))
                return
            if said.has_passed():
                said = Deadline.after(SAY_S)
                yield AdminLine(phase="draining", words=f"it becomes a {ticket.role} worker")
            await asyncio.sleep(LOOK_S)
        while True:
            try:
                async with AdminLink(new) as link:
                    outcome = await link.outcome()
                break
            except PeerError as error:
                if deadline.has_passed() or not await self._is_process_there(new):
                    words = f"it is back as a {new.role} worker, but its outcome is not known"
                    yield failed_line(PeerGone(f"{words}: {error.message}"))
                    return
            yield AdminLine(phase="draining", words="asking it what became of the change")
            await asyncio.sleep(SAY_S)
        if outcome is None or outcome.ticket != ticket.ticket or new.role != ticket.role:
            words = f"it did not switch: it is back as a {new.role} worker"
            yield failed_line(PeerGone(f"{words} ({_why_not(outcome, ticket)})"))
            return
        yield AdminLine(
            phase="serving",
            words=f"it serves as a {new.role} worker, incarnation {new.incarnation}",
        )
        tested = ""
        async for line in self._tested(new):
            yield line
            if line.phase == "failed":
                return
            tested = line.words if line.phase == "tested" else tested
        yield AdminLine(
            phase="done",
            words=f"it did switch: {ticket.before} -> {new.role}, incarnation {new.incarnation}, "
            f"{tested}",
            progress=last,
            is_clean=last is None or _is_clean(last),
        )

    def _successor(self, before: WorkerRecord) -> WorkerRecord | None:
        """The ready worker of that name which is another process, and known to answer."""
        up = {process_of(r.record) for r in self._health.reports() if r.state == "up"}
        for record in self._directory.workers():
            if (
                record.worker_id == before.worker_id
                and record.incarnation != before.incarnation
                and record.state == "ready"
                and process_of(record) in up
            ):
                return record
        return None

    async def _is_process_there(self, record: WorkerRecord) -> bool:
        """Whether somebody listens at its address; during the change nobody answers there."""
        try:
            await self._workers.status(record, LOOK_S)
        except PeerError as error:
            return not isinstance(error, PeerGone)
        return True

    async def _tested(self, new: WorkerRecord) -> Lines:
        """Wait until a hand-over with any partner was tried, and worked."""
        deadline, said = Deadline.after(TEST_TIMEOUT_S), Deadline.after(SAY_S)
        reason = "no pair was tested"
        while not deadline.has_passed():
            partners = self._partners(new)
            if not partners:
                words = "no self-test: it needs no partner"
                if new.role != "both":
                    words = "no self-test: there is no partner"
                yield AdminLine(phase="tested", words=words)
                return
            for partner in partners:
                pair = (new, partner) if new.role == "prefill" else (partner, new)
                result = self._pairs.result_of(*pair)
                if result is not None and result.outcome == "ok":
                    words = f"self-test ok with {partner.worker_id}"
                    yield AdminLine(phase="tested", words=words)
                    return
                if result is not None:
                    reason = f"with {partner.worker_id}: {result.reason}"
            if said.has_passed():
                said = Deadline.after(SAY_S)
                yield AdminLine(phase="draining", words="waiting for a hand-over to be tested")
            await asyncio.sleep(LOOK_S)
        yield failed_line(PeerTimeout(f"it switched, but no hand-over has worked since ({reason})"))

    def _partners(self, new: WorkerRecord) -> list[WorkerRecord]:
        wanted = {"prefill": "decode", "decode": "prefill"}.get(new.role)
        return [
            record
            for record in self._directory.workers()
            if record.role == wanted
            and record.state == "ready"
            and fits(new, record)
            and self._health.is_usable(record)
        ]


def _is_clean(progress: DrainProgress) -> bool:
    return progress.state == "drained" and not progress.failed


def _why_not(outcome: RoleOutcome | None, ticket: RoleTicket) -> str:
    if outcome is None:
        return "its process has restarted since"
    return outcome.reason if outcome.ticket == ticket.ticket else "another order came"
