"""The end of `bench-transfer` that is read from: it plays the prefill worker."""

import os
import secrets
import threading
from dataclasses import dataclass

import msgspec

from neuron_di.clock import now_s, process_cpu_s
from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError, NeuronDiError, PeerGone, PeerTimeout, RemoteProtocolError
from neuron_di.kv import KvLayout, KvPool, whole_block_runs
from neuron_di.transfer import LaneSet, Send, TransferToken
from neuron_di.transfer_bench.control_link import ControlLink
from neuron_di.transfer_bench.make_pool import make_pool
from neuron_di.transfer_bench.messages import (
    AcceptLane,
    Closed,
    ClosePool,
    Finish,
    Finished,
    LaneAccepted,
    LaneOpened,
    OpenLane,
    OpenPool,
    PoolOpened,
    Post,
    Posted,
    Prepare,
    Prepared,
    Refused,
    ToMeasuring,
    ToServing,
    to_serving_decoder,
)
from neuron_di.transfer_bench.open_lanes import open_lanes
from neuron_di.transfer_bench.pool_bytes import digest_blocks, fill_pool
from neuron_di.transfer_bench.resources import require_room
from neuron_di.types import BlockId, Incarnation

QUESTION_TIMEOUT_S = 600.0  # the other end may be busy with what it measures
SEND_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Transfer:
    """The one that was prepared last."""

    lane: int
    engine: str
    block_ids: list[BlockId]
    send: Send
    cpu_before_s: float
    token: TransferToken | None = None


class ServingEnd:
    """Answers one authenticated measuring end, until it goes. Owns a pool and its engines."""

    def __init__(
        self,
        link: ControlLink,
        parent_pid: int | None,
        options: TransferOptions = TransferOptions(),  # noqa: B008 - nothing changes it
    ) -> None:
        self._link = link
        self._parent_pid = parent_pid
        self._options = options
        self._incarnation = Incarnation("")
        self._pool: KvPool | None = None
        self._lanes: dict[int, LaneSet] = {}
        self._peers: dict[int, Incarnation] = {}
        self._transfer: _Transfer | None = None

    def serve(self) -> None:
        """Until the other end closes the connection. Blocks."""
        try:
            while True:
                try:
                    question = self._link.receive(to_serving_decoder, QUESTION_TIMEOUT_S)
                except PeerGone:
                    return
                try:
                    answer = self._answer(question)
                except NeuronDiError as error:
                    answer = Refused(code=error.code, message=error.message[:2000])
                self._link.send(answer)
        finally:
            self.close()

    def close(self) -> None:
        self._close_pool()
        self._link.close()

    def _answer(self, question: ToServing) -> ToMeasuring:
        match question:
            case OpenPool():
                return self._open_pool(question)
            case OpenLane():
                return self._open_lane(question)
            case AcceptLane():
                return self._accept_lane(question)
            case Prepare():
                return self._prepare(question)
            case Post():
                return self._post()
            case Finish():
                return self._finish()
            case ClosePool():
                self._close_pool()
                return Closed()

    def _open_pool(self, question: OpenPool) -> PoolOpened:
        self._close_pool()
        layout = KvLayout(**msgspec.structs.asdict(question.layout))
        if not question.is_on_device:
            require_room(question.num_blocks * layout.block_bytes)
        self._incarnation = Incarnation(secrets.token_hex(16))
        pool = self._pool = self._make_pool(layout, question)
        fill_pool(pool)
        return PoolOpened(
            incarnation=self._incarnation, region=pool.region(), block_ids=list(pool.block_ids())
        )

    def _make_pool(self, layout: KvLayout, question: OpenPool) -> KvPool:
        num_blocks, arena_fd = question.num_blocks, question.arena_fd
        if arena_fd is None:
            return make_pool(
                layout,
                num_blocks,
                self._incarnation,
                "serving",
                is_on_device=question.is_on_device,
            )
        if self._parent_pid is None:
            raise RemoteProtocolError("an arena of a process that did not start this one")
        try:
            own_fd = os.open(f"/proc/{self._parent_pid}/fd/{arena_fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot open the arena: {error}") from None
        try:
            return make_pool(layout, num_blocks, self._incarnation, "serving", arena_fd=own_fd)
        finally:
            os.close(own_fd)

    def _open_lane(self, question: OpenLane) -> LaneOpened:
        pool = self._require_pool()
        self._close_lane(question.lane)
        start_s = now_s()
        lanes = open_lanes(question.engine, pool, self._link.local_host, self._options)
        self._lanes[question.lane] = lanes
        return LaneOpened(open_s=now_s() - start_s)

    def _accept_lane(self, question: AcceptLane) -> LaneAccepted:
        pool, lanes = self._require_pool(), self._lanes_of(question.lane)
        self._peers[question.lane] = question.incarnation
        lanes.accept(question.incarnation, question.offers, pool.layout)
        return LaneAccepted(offers=lanes.accepted_offers(question.incarnation))

    def _prepare(self, question: Prepare) -> Prepared:
        pool, lanes = self._require_pool(), self._lanes_of(question.lane)
        lanes.check_accepted(self._peer_of(question.lane), question.engine)
        ids = [BlockId(block_id) for block_id in question.source_ids]
        if max(ids) >= pool.num_ids or len(set(ids)) != len(ids):
            raise RemoteProtocolError("blocks outside of the pool, or one of them twice")
        if len(question.block_ids) != len(ids):
            raise RemoteProtocolError(f"{len(ids)} blocks into {len(question.block_ids)}")
        runs = whole_block_runs(pool.layout, ids, question.block_ids)
        prepared = Prepared(
            generations=pool.generations(ids),
            digest=digest_blocks(pool, ids) if question.with_digest else b"",
        )
        send = Send(tag=question.tag, runs=runs)
        self._transfer = _Transfer(question.lane, question.engine, ids, send, process_cpu_s())
        return prepared

    def _post(self) -> Posted:
        transfer = self._require_transfer()
        lanes, peer = self._lanes_of(transfer.lane), self._peer_of(transfer.lane)
        transfer.token = lanes.post_send(peer, transfer.engine, transfer.send)
        return Posted()

    def _finish(self) -> Finished:
        transfer = self._require_transfer()
        self._transfer = None
        if transfer.token is not None:
            _wait(transfer.token)
        cpu_s = process_cpu_s() - transfer.cpu_before_s
        pool = self._require_pool()
        pool.retire(transfer.block_ids)  # this end finds here what it got for them
        pool.exchanges()
        return Finished(cpu_s=cpu_s)

    def _close_lane(self, number: int) -> None:
        self._peers.pop(number, None)
        lanes = self._lanes.pop(number, None)
        if lanes is not None:
            lanes.close()

    def _close_pool(self) -> None:
        self._transfer = None
        for number in list(self._lanes):
            self._close_lane(number)
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _require_pool(self) -> KvPool:
        if self._pool is None:
            raise RemoteProtocolError("no pool was opened")
        return self._pool

    def _require_transfer(self) -> _Transfer:
        if self._transfer is None:
            raise RemoteProtocolError("no transfer was prepared")
        return self._transfer

    def _lanes_of(self, number: int) -> LaneSet:
        if number not in self._lanes:
            raise RemoteProtocolError(f"lane {number} was not opened")
        return self._lanes[number]

    def _peer_of(self, number: int) -> Incarnation:
        if number not in self._peers:
            raise RemoteProtocolError(f"lane {number} was not accepted")
        return self._peers[number]


def _wait(token: TransferToken) -> None:
    """Until the bytes may be overwritten. Raises what it ended with."""
    is_over = threading.Event()
    token.on_done(lambda _: is_over.set())
    if not is_over.wait(SEND_TIMEOUT_S):
        raise PeerTimeout(f"a transfer was not over after {SEND_TIMEOUT_S:.0f} s")
    error = token.error()
    if error is not None:
        raise error
