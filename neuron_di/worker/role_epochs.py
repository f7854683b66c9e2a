"""The life of a worker's process: one worker after another, each in one role.

An *epoch* is a worker of one incarnation, from its assembly to its end. As a rule a process has
one. A change of role ends it as a drain does and begins the next on the same weights: to everybody
else that is another process, so nothing that was meant for the old one can reach the new one.

Next: neuron_di/worker/worker.py
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from neuron_di.errors import LocalProtocolError, NeuronDiError, WorkerFailed
from neuron_di.obs import get_logger
from neuron_di.registry import Announcer
from neuron_di.types import Role
from neuron_di.worker.orders import Orders, RoleChange
from neuron_di.worker.worker import Worker

_log = get_logger(__name__)

WITHDRAW_TIMEOUT_S = 3.0  # where somebody waits to hear that the lease is revoked
END_TIMEOUT_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochParts:
    """What an epoch is made of. A simulation puts others in their place."""

    # A worker of this role and a fresh incarnation. Whatever it raises, nothing is left behind.
    assemble: Callable[[Role], Awaitable[Worker]]
    # Serves a worker at this process' port: legs, status, orders. At the end its links end.
    listening: Callable[[Worker, Orders], AbstractAsyncContextManager[object]]
    # Keeps a worker's record in the registry, and knows its peers from there. None: no registry.
    announced: Callable[[Worker], AbstractAsyncContextManager[Announcer | None]]
    on_ready: Callable[[Worker], None] = lambda _: None


async def run_epochs(role: Role, orders: Orders, parts: EpochParts, stop: asyncio.Event) -> bool:
    """Run until `stop`, an ordered drain, or a failure. True: it was drained by order.

    Raises what keeps the first worker from starting, LocalProtocolError when an engine fails, and
    WorkerFailed when after a change of role neither the new role nor the old one would start.
    """
    worker, why_reverted = await parts.assemble(role), ""
    while True:
        await _run_epoch(worker, orders, parts, stop, why_reverted)
        if orders.change is None:
            return orders.given.is_set()
        if stop.is_set():
            return False
        del worker  # it knows the old pool, whose memory the next one may need
        orders.end()
        worker, why_reverted = await _assemble_changed(orders.change, parts)


async def _run_epoch(
    worker: Worker, orders: Orders, parts: EpochParts, stop: asyncio.Event, why_reverted: str
) -> None:
    orders.begin(worker)
    try:
        async with parts.listening(worker, orders), parts.announced(worker) as announcer:

            def tell() -> None:
                if announcer is not None:
                    announcer.record_changed()

            worker.set_state("ready")
            tell()
            orders.end_change(why_reverted)
            parts.on_ready(worker)
            await _first_of(stop, worker.engine_failed, orders.given)
            drain = orders.start_drain()
            tell()
            async with _hurried(orders, stop):
                is_empty = await drain.run()
            is_withdrawn = await _withdrawn(announcer, is_followed=orders.given.is_set())
            drain.conclude(is_empty=is_empty, is_withdrawn=is_withdrawn)
            if not is_empty:
                _log.warning("drain_incomplete", num_legs=len(worker.legs))
            await drain.told()
    finally:
        await worker.close(keeps_weights=orders.change is not None)
    if worker.engine_failed.is_set():
        raise LocalProtocolError("the engine has failed; the log says why")


@asynccontextmanager
async def _hurried(orders: Orders, stop: asyncio.Event) -> AsyncIterator[None]:
    """Meanwhile a process that is told to end lets no order take longer than that allows."""

    async def hurry() -> None:
        await stop.wait()
        orders.hurry()

    hurrying = asyncio.create_task(hurry())
    try:
        yield
    finally:
        hurrying.cancel()


async def _withdrawn(announcer: Announcer | None, *, is_followed: bool) -> bool:
    """Give the lease back. False when the registry did not confirm it."""
    if announcer is None:
        return True
    # Where nobody waits to hear of it the registry may well have ended before us.
    return await announcer.withdraw(WITHDRAW_TIMEOUT_S if is_followed else END_TIMEOUT_S)


async def _assemble_changed(change: RoleChange, parts: EpochParts) -> tuple[Worker, str]:
    """The worker after a change of role; one of the old role where that fails, and why."""
    try:
        return await parts.assemble(change.role), ""
    except Exception as error:
        reason = _words(error)
        _log.warning("role_not_taken", role=change.role, reason=reason)
    try:
        return await parts.assemble(change.before), reason
    except Exception as error:
        raise WorkerFailed(
            f"could not become a {change.role} worker ({reason}), nor a {change.before} worker "
            f"again ({_words(error)})"
        ) from None


def _words(error: Exception) -> str:
    if isinstance(error, NeuronDiError):
        return error.message
    _log.exception("assembly_crashed")
    return f"{type(error).__name__}"


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
