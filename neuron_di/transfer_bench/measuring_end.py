"""The end of `bench-transfer` that reads and measures: it plays the decode worker."""

import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

import msgspec

from neuron_di.clock import now_s, process_cpu_s
from neuron_di.config import TransferOptions
from neuron_di.errors import (
    KvCorrupt,
    LocalProtocolError,
    NeuronDiError,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.kv import KvPool, as_ids, create_arena, whole_block_runs
from neuron_di.transfer import BlockSource, Lane, LaneSet, Receive, TransferToken
from neuron_di.transfer_bench.control_link import ControlLink
from neuron_di.transfer_bench.make_pool import PoolKind, make_pool
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
    to_measuring_decoder,
)
from neuron_di.transfer_bench.open_lanes import open_lanes
from neuron_di.transfer_bench.places import Choice, Places
from neuron_di.transfer_bench.pool_bytes import clear_blocks, digest_blocks
from neuron_di.transfer_bench.resources import require_room
from neuron_di.transfer_bench.shape import Shape
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import LayoutFields, ShmRegion

EXCHANGES = "handover"  # the engine whose blocks change their owner
ANSWER_TIMEOUT_S = 120.0
TRANSFER_TIMEOUT_S = 60.0
TAG_MAX = 1 << 62

Answer = TypeVar("Answer", bound=ToMeasuring)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """What it took until the first bytes had arrived. Seconds."""

    open_s: float  # both ends' engines, one end after the other: once per worker
    connect_s: float  # the offers, both ends' halves of connecting, and its proof: once per pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One transfer. `transfer_s` is from posting the receive until it is committed."""

    transfer_s: float
    plan_s: float  # from block ids to runs, before that
    post_s: float  # of transfer_s: the call that posts the receive
    cpu_s: float  # of both ends' processes, all of it
    kv_bytes: int  # moved; 0 where blocks changed their owner
    is_verified: bool


class MeasuringEnd:
    """Lives on one thread. Owns the link, a pool, and the engines on it."""

    def __init__(
        self,
        link: ControlLink,
        *,
        has_arena: bool = False,
        options: TransferOptions = TransferOptions(),  # noqa: B008 - nothing changes it
    ) -> None:
        """`has_arena`: the other end is a child of this process, so that one memory will do."""
        self._link = link
        self.has_arena = has_arena
        self._options = options
        self.lost: NeuronDiError | None = None  # what the link ended with
        self._is_open = False  # the other end's pool, perhaps
        self._arena_fd: int | None = None
        self._incarnation = Incarnation("")
        self._peer = Incarnation("")
        self._pool: KvPool | None = None
        self._lane_sets: dict[int, LaneSet] = {}
        self._lanes: dict[int, Lane] = {}
        self.places = Places((), ())  # of the pools that are open

    def open_pools(
        self, shape: Shape, pool_bytes_min: int, kind: PoolKind | None = None
    ) -> ShmRegion:
        """One at each end, large enough for the shape. The serving end's, as its host sees it.

        Where no kind is named: in an arena if this end has one.
        """
        self.close_pools()
        kind = kind or ("arena" if self.has_arena else "host")
        layout = shape.layout()
        num_blocks = shape.pool_blocks(pool_bytes_min)
        host_bytes = 0 if kind == "device" else num_blocks * layout.block_bytes
        require_room(host_bytes)
        fields = msgspec.convert(asdict(layout), LayoutFields)
        # In an arena, as workers of one host have them: then no other process needs to agree.
        self._arena_fd = create_arena() if kind == "arena" else None
        self._is_open = True
        opened = self._ask(
            OpenPool(
                layout=fields,
                num_blocks=num_blocks,
                arena_fd=self._arena_fd,
                is_on_device=kind == "device",
            ),
            PoolOpened,
        )
        require_room(host_bytes)  # beside the other end's, where it is here
        self._peer, self._incarnation = opened.incarnation, Incarnation(secrets.token_hex(16))
        self._pool = make_pool(
            layout,
            num_blocks,
            self._incarnation,
            "measuring",
            arena_fd=self._arena_fd,
            is_on_device=kind == "device",
        )
        self.places = Places(opened.block_ids, self._pool.block_ids())
        return opened.region

    def connect(self, number: int, engine: str) -> SetUp:
        """Open this engine at both ends, under a number, and connect. Raises what went wrong."""
        start_s = now_s()
        lanes = open_lanes(engine, self.pool, self._link.local_host, self._options)
        open_s = now_s() - start_s
        self._lane_sets[number] = lanes
        opened = self._ask(OpenLane(lane=number, engine=engine), LaneOpened)
        start_s = now_s()
        offers = lanes.offers(self._peer)
        accepted = self._ask(
            AcceptLane(lane=number, incarnation=self._incarnation, offers=offers), LaneAccepted
        )
        layout = self.pool.layout
        self._lanes[number] = lanes.connect(self._peer, accepted.offers, layout)
        return SetUp(open_s=open_s + opened.open_s, connect_s=now_s() - start_s)

    def lane(self, number: int) -> Lane:
        return self._lanes[number]

    @property
    def pool(self) -> KvPool:
        """This end's. It must be open."""
        assert self._pool is not None, "the pools are not open"
        return self._pool

    def move(
        self,
        number: int,
        num_blocks: int,
        *,
        verify: bool,
        is_contiguous: bool = False,
        just_before: Callable[[], object] = lambda: None,
    ) -> Moved:
        """So many blocks from random places of the other pool to random places of this one.

        Contiguous ones lie side by side at either end. `just_before` is called when all is
        prepared, before the clock starts.
        Raises what the transfer ended with; KvCorrupt where other bytes arrived.
        """
        pool, lane = self.pool, self._lanes[number]
        choice = self._choose(lane, num_blocks, is_contiguous=is_contiguous)
        source_ids, block_ids = choice.source_ids, choice.block_ids
        if verify and lane.name != EXCHANGES:
            clear_blocks(pool, block_ids)
        tag = secrets.randbelow(TAG_MAX)
        prepared = self._prepare(number, tag, choice, with_digest=verify)
        just_before()
        before_s = process_cpu_s()
        start_s = now_s()
        offered_ids = as_ids(source_ids)  # as a worker reads what it was promised
        runs = whole_block_runs(pool.layout, offered_ids, block_ids)
        plan_s = now_s() - start_s
        receive = Receive(
            tag=tag,
            runs=runs,
            memory=pool.memory(),
            source=BlockSource(offered_ids, prepared.generations),
            block_ids=[BlockId(block_id) for block_id in block_ids],
        )
        arrival = _Arrival(lane, receive)
        token, post_s, transfer_s = self._receive(lane, receive, arrival)
        own_cpu_s = process_cpu_s() - before_s
        cpu_s = self._ask(Finish(), Finished).cpu_s + own_cpu_s
        if token.adopted_ids is not None:
            self.places.exchange(choice)
            pool.exchanges()  # of which no scheduler needs to hear
        received_ids = block_ids if token.adopted_ids is None else token.adopted_ids
        if verify and digest_blocks(pool, received_ids) != prepared.digest:
            raise KvCorrupt(f"{lane.name} brought other bytes than were sent")
        return Moved(
            transfer_s=transfer_s,
            plan_s=plan_s,
            post_s=post_s,
            cpu_s=cpu_s,
            kv_bytes=token.kv_bytes,
            is_verified=verify,
        )

    def close_pools(self) -> None:
        """Both ends', with the engines on them."""
        self._close_own()
        if self._is_open:
            self._is_open = False
            self._ask(ClosePool(), Closed)

    def close(self) -> None:
        """End at once. The serving end notices by itself."""
        self._close_own()
        self._link.close()

    def _prepare(self, number: int, tag: int, choice: Choice, *, with_digest: bool) -> Prepared:
        """Have the other end ready. What it takes to tell it is the signalling's, not measured."""
        lane = self._lanes[number]
        question = Prepare(
            lane=number,
            engine=lane.name,
            tag=tag,
            source_ids=choice.source_ids,
            block_ids=choice.block_ids,
            with_digest=with_digest,
        )
        prepared = self._ask(question, Prepared)
        if len(prepared.generations) != len(choice.source_ids):
            raise RemoteProtocolError("the other end prepared another number of blocks")
        if not lane.engine.is_one_sided:
            self._ask(Post(), Posted)
        return prepared

    def _receive(
        self, lane: Lane, receive: Receive, arrival: "_Arrival"
    ) -> tuple[TransferToken, float, float]:
        """The token, and seconds: of the call that posts, and until all is committed."""
        start_s = now_s()
        token = lane.post_receive(receive)
        post_s = now_s() - start_s
        token.on_done(arrival.note)
        if not arrival.is_over.wait(TRANSFER_TIMEOUT_S):
            raise PeerTimeout(f"{lane.name}: a transfer took over {TRANSFER_TIMEOUT_S:.0f} s")
        if arrival.error is not None:
            raise arrival.error
        return token, post_s, arrival.at_s - start_s

    def _choose(self, lane: Lane, num_blocks: int, *, is_contiguous: bool) -> Choice:
        if lane.name == EXCHANGES:
            return self.places.choose_to_exchange(num_blocks)
        return self.places.choose(num_blocks, is_contiguous=is_contiguous)

    def _close_own(self) -> None:
        self._lanes.clear()
        for lanes in self._lane_sets.values():
            lanes.close()
        self._lane_sets.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._arena_fd is not None:
            os.close(self._arena_fd)
            self._arena_fd = None

    def _ask(self, question: msgspec.Struct, kind: type[Answer]) -> Answer:
        try:
            self._link.send(question)
            answer = self._link.receive(to_measuring_decoder, ANSWER_TIMEOUT_S)
            if not isinstance(answer, Refused | kind):
                raise RemoteProtocolError(f"another answer than expected: {type(answer).__name__}")
        except NeuronDiError as error:
            self.lost = error
            raise
        if isinstance(answer, Refused):
            raise PeerRefused(f"the other end: {answer.code}: {answer.message}")
        return answer


class _Arrival:
    """Fences and commits on the thread that completes the receive, as a worker does."""

    def __init__(self, lane: Lane, receive: Receive) -> None:
        self._lane = lane
        self._receive = receive
        self.is_over = threading.Event()
        self.error: NeuronDiError | None = None
        self.at_s = 0.0

    def note(self, token: TransferToken) -> None:
        try:
            self.error = token.error()
            if self.error is None:
                self._lane.fence()
                self.error = self._lane.commit(self._receive)
        except NeuronDiError as error:
            self.error = error
        except Exception as bug:  # a figure must not hide it
            self.error = LocalProtocolError(f"the end of a receive failed: {bug!r}")
        finally:
            self.at_s = now_s()
            self.is_over.set()
