"""Bugs to plant, one at a time: each takes away one protection. A simulation must notice.

`MASKED` are those that no simulation can notice, because a second protection does the work of
the one that is missing. They are named so that nobody takes their silence for a proof.
"""

import asyncio
from collections.abc import Callable
from unittest import mock

from msgspec import structs
from planted_prefix_bugs import PREFIX_BUGS, PREFIX_MASKED
from planting import Plant, around, both, instead, nothing, row, without

from neuron_di.core import BlockPool, DecodeScheduler, PrefillChunk
from neuron_di.core.quarantine import Quarantine
from neuron_di.engine import Broken, Engine
from neuron_di.errors import NeuronDiError
from neuron_di.kv import Group, KvPool
from neuron_di.kv.ownership import Ownership
from neuron_di.registry import Announcer
from neuron_di.testing.fake_transfer import FakeTransferEngine
from neuron_di.testing.sim_legs import SimLeg
from neuron_di.testing.sim_worker import SimWorker
from neuron_di.transfer import RecvBuffer, SendBuffer, kv_receiver
from neuron_di.transfer.kv_receiver import KvReceiver
from neuron_di.transfer.lanes import Lane
from neuron_di.transfer.layer_receiver import LayerReceiver
from neuron_di.transfer.recv_entry import Entry
from neuron_di.transfer.send_peers import SendPeers
from neuron_di.types import Incarnation, Role
from neuron_di.wire import Finished, LegReceipt, Token
from neuron_di.wire.handoff import (
    LAUNCH,
    RECEIVER,
    SENDER,
    LaunchAction,
    LaunchEvent,
    LaunchState,
    LaunchStep,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    ReceiverStep,
    SenderAction,
    SenderEvent,
    SenderState,
    SenderStep,
)
from neuron_di.worker import Worker
from neuron_di.worker.drain import Drain
from neuron_di.worker.live_legs import LiveLegs
from neuron_di.worker.prefill_worker import PrefillWorker
from neuron_di_proxy import launch, leg_merge, recovery
from neuron_di_proxy.admission import Ticket
from neuron_di_proxy.health import Health
from neuron_di_proxy.inbox import Inbox
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.recovery import RequestRunner


def _without_parked(self: Drain) -> bool:
    status = self._worker.status()
    return not (status.num_running or status.num_waiting)


def _same_life(real: Callable, self: SimWorker, role: Role, incarnation: Incarnation) -> object:
    return real(self, role, Incarnation(incarnation.rpartition(".")[0]))


async def _keeping_the_key(_real: Callable, self: Announcer, _timeout_s: float) -> bool:
    self._is_withdrawn = True
    self._task.cancel()
    await asyncio.wait([self._task])
    return True


class _EqualToAll(list):
    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = None


def _place_unverified(receiver: KvReceiver, entry: Entry) -> None:
    assert entry.ready is not None
    assert entry.room is not None
    receiver._place(entry, entry.ready, entry.room)
    entry.arrived.engine, entry.arrived.form = receiver.lane.name, "streamed"


def _blind_digests(_memory: object, block_ids: list[int], *_: object, **__: object) -> list[int]:
    return _EqualToAll([0] * len(block_ids))


def _taking_blindly(real: Callable, self: Ownership, group: Group, peer: int) -> object:
    """As if the lead were stored: whatever stands there, it is as promised."""
    if (self.known(group.given_ids) == group.given).all():  # else it takes nothing
        self.arena.words.store(group.source_ids, group.source)
    return real(self, group, peer)


def _place_what_is_freed(real: Callable, self: LayerReceiver, entry: Entry, then: object) -> None:
    assert entry.room is not None
    self._landing.free(entry.room)
    real(self, entry, then)


def _free_at_once(self: Quarantine, block_ids: list[int], held_by: object) -> None:
    self._pool.free(block_ids)


def _join_early(self: DecodeScheduler) -> None:
    for request, token in list(self._transferring.items()):
        if token is not None and token.error() is None:
            del self._transferring[request]
            request.num_computed = request.num_prefilled
            request.status = type(request.status).RUNNING
            self._running.append(request)


def _wrong_order(real: Callable, self: PrefillWorker, event: object):
    async def ready():
        said = await real(self, event)
        return structs.replace(said, block_ids=said.block_ids[::-1])

    return ready()


def _fails_as_success(_error: object) -> Finished:
    receipt = LegReceipt(worker_id="x", role="decode", pid=1)
    return Finished(reason="stop", num_prompt=1, num_generated=1, receipt=receipt)


def _deaf_to_errors(real: Callable, self: LiveLegs, events: list) -> None:
    real(self, [event for event in events if not isinstance(event, Broken)])


def _allocate_twice(real: Callable, self: BlockPool, num_blocks: int) -> list[int]:
    taken = real(self, num_blocks)
    if self.num_free and num_blocks > 1:
        taken[-1] = taken[0]
    return taken


def _count_once(self: RequestRecord, token: object) -> None:
    """Forgets the newest token: a continuation says it again."""
    if self.first_token_s is None:
        self.first_token_s = 0.0
    elif len(self.emitted) < 2:
        self.emitted.append(token.token_id)


async def _silent_end(real: Callable, *args: object):
    try:
        return await real(*args)
    except NeuronDiError:
        return None


async def _never(*_: object) -> bool:
    return False


def _other_seed(real: Callable, **fields: object) -> object:
    sampling = fields["sampling"]
    return real(**fields | {"sampling": structs.replace(sampling, seed=sampling.seed + 1)})


def _without_text(self: Engine, request: object) -> None:
    request.generated += request.given


def _any_index(self: leg_merge.Running, token: Token) -> None:
    self._due += 1
    self._attempt.num_tokens += 1
    self._emit(token)


def _skipping(self: SendPeers, identity: str, message: object) -> None:
    """Why a handshake is refused: never."""


_S, _SE, _SA = SenderState, SenderEvent, SenderAction
_R, _RE, _RA = ReceiverState, ReceiverEvent, ReceiverAction
_L, _LE, _LA = LaunchState, LaunchEvent, LaunchAction

PLANTED: dict[str, Plant] = {
    # Integrity.
    "digests are not compared": instead(kv_receiver, "block_digests", _blind_digests),
    "layers that came early are believed": instead(
        KvReceiver, "finish_streamed", _place_unverified
    ),
    "no fence before bytes are read": instead(FakeTransferEngine, "fence", nothing),
    "a request runs before its KV is here": instead(DecodeScheduler, "_join_received", _join_early),
    "Ready names blocks in the wrong order": around(PrefillWorker, "_ready", _wrong_order),
    "given ids are computed by the prompt's kernel": lambda: mock.patch.object(
        PrefillChunk, "is_replay", property(lambda _: False)
    ),
    "blocks are reused while they are written": instead(Quarantine, "give_back", _free_at_once),
    "a block is given to two requests": around(BlockPool, "allocate", _allocate_twice),
    "blocks are taken that were given up": around(Ownership, "_take", _taking_blindly),
    "what was verified is never taken": instead(Lane, "commit", nothing),
    "landing memory is free before it is read": around(
        LayerReceiver, "place", _place_what_is_freed
    ),
    **PREFIX_BUGS,
    # Delivery.
    "a failed leg says that it finished": lambda: mock.patch(
        "neuron_di.testing.sim_legs.failed", _fails_as_success
    ),
    "a continuation forgets the newest tokens": instead(RequestRecord, "count_token", _count_once),
    "a continuation starts from nothing": instead(recovery, "_given_before", lambda _: ()),
    "decode's tokens overtake prefill's": both(
        row(LAUNCH, (_L.LAUNCHED, _LE.DECODE_TOKEN), LaunchStep(_L.DECODING, (_LA.EMIT,))),
        instead(leg_merge.Running, "give", _any_index),
    ),
    "errors of the engine are dropped": around(LiveLegs, "dispatch", _deaf_to_errors),
    "a failure ends the stream without a word": around(RequestRunner, "run", _silent_end),
    "both legs draw other numbers": around(launch, "DecodeLeg", _other_seed),
    "text does not go on from what was given": instead(Engine, "_accept_given", _without_text),
    "nothing is tried again": instead(RequestRunner, "_may_go_on", _never),
    # Leaks.
    "a cancelled request keeps its blocks": instead(Engine, "cancel", nothing),
    "a leg that is not wanted is not closed": instead(SimLeg, "close", nothing),
    "a request keeps its place in the proxy": instead(Ticket, "close", nothing),
    "an ended decode leg forgets its hand-over": instead(RecvBuffer, "cancel", nothing),
    "leases do not end": instead(SendBuffer, "_sweep", nothing),
    "prefill's leg forgets its hand-over": instead(SendBuffer, "drop", nothing),
    "quarantined blocks are not let go": without(SENDER, (_S.RECALLED, _SE.ABORT), _SA.LET_GO),
    # Fencing and failover.
    "blocks that are given up look as before": instead(KvPool, "retire", nothing),
    "a lost worker's legs are not told": instead(Inbox, "lose", nothing),
    # Orders.
    "a worker that drains takes new legs": lambda: mock.patch.object(
        Worker, "is_draining", property(lambda _: False)
    ),
    "a drain drops parked KV": instead(Drain, "_is_empty", _without_parked),
    "a worker of another role is the same process": around(SimWorker, "_model", _same_life),
    "a worker that drained keeps its key": around(Announcer, "withdraw", _keeping_the_key),
}

MASKED: dict[str, tuple[Plant, str]] = {
    **PREFIX_MASKED,
    "Done releases nothing": (
        without(SENDER, (_S.PULLING, _SE.DONE), _SA.RELEASE),
        "the proxy closes the prefill leg a second after the end, which frees its blocks",
    ),
    "a failed copy fails nothing": (
        without(RECEIVER, (_R.PULLING, _RE.BROKE), _RA.FAIL),
        "the token that the engine polls is completed with the error in any case",
    ),
    "decode keeps a hand-over that is denied": (
        row(RECEIVER, (_R.ASKING, _RE.NEVER), ReceiverStep(_R.ASKING, (_RA.COUNT_STALE,))),
        "prefill's own leg says why it failed, and the proxy closes both",
    ),
    "a predecessor's KV is asked of its successor": (
        instead(SendPeers, "_why_refused", _skipping),
        "Ready states the incarnation, and digests are seeded by it",
    ),
    "nobody learns who failed": (
        instead(Health, "blame", nothing),
        "an attempt avoids the worker that failed the one before, and probes find it",
    ),
    "a forgotten Abort": (
        without(RECEIVER, (_R.HELD, _RE.CANCEL), _RA.SEND_ABORT),
        "the proxy closes the prefill leg as well, and else the lease ends",
    ),
    "parked KV is given up by nobody": (
        row(SENDER, (_S.PARKED, _SE.LEASE_ENDED), SenderStep(_S.PARKED, ())),
        "the leg has a deadline, at the worker and at the proxy",
    ),
}
