"""One worker process, put together: model, engine, buffers, and the legs it answers."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neuron_di.clock import Deadline, now_s, unix_s
from neuron_di.config import WorkerOptions, available_memory_bytes
from neuron_di.core import (
    BlockPool,
    CombinedScheduler,
    DecodeScheduler,
    PrefillScheduler,
    Scheduler,
)
from neuron_di.engine import Engine, EngineEvent, StartTransfer
from neuron_di.errors import ConfigError
from neuron_di.kv import SETTLE_S, KvPool
from neuron_di.obs import get_logger
from neuron_di.request import template_traits
from neuron_di.transfer import (
    ConnectorOptions,
    HandOverCounters,
    LaneSet,
    LocalWorker,
    NeuronConnector,
    SignalTransport,
    TransferEngine,
    ZmqTransport,
    make_engines,
    make_signal_keys,
    transfer_domain,
)
from neuron_di.types import WorkerId, WorkerState
from neuron_di.wire import LANES_MAX, PROTOCOL_VERSION, LaneStatus, WorkerRecord, WorkerStatus
from neuron_di.worker.combined_worker import CombinedWorker
from neuron_di.worker.decode_worker import DecodeWorker
from neuron_di.worker.leg_report import LegReport
from neuron_di.worker.live_legs import LiveLegs
from neuron_di.worker.model import LoadedModel
from neuron_di.worker.prefill_worker import PrefillWorker
from neuron_di.worker.prompts import PromptReader

_log = get_logger(__name__)

STUCK_PART = 0.2  # of the time after which a process that hangs ends
_LANDING_SHARE_MAX = 4  # of what memory is left, one of so many parts may be landing memory


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker stands on. A simulation puts others in their place.

    `make_transfer` makes its transfer engines, one or several; None: by its options.
    """

    make_transfer: Callable[[KvPool], TransferEngine | Sequence[TransferEngine]] | None = None
    make_transport: Callable[[], SignalTransport] = ZmqTransport
    start_engine: Callable[[Engine], None] = Engine.start
    notify_engine: Callable[[], None] | None = None  # None: its thread waits by itself


class Worker:
    """Owns everything below it. Made on the running event loop, after the model was loaded.

    Exactly one of `prefill`, `decode` and `combined` is there, by the role.
    """

    def __init__(
        self, options: WorkerOptions, model: LoadedModel, parts: WorkerParts | None = None
    ) -> None:
        self._options = options
        self._parts = parts or WorkerParts()
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._state: WorkerState = "starting"
        self.on_state: Callable[[], None] = lambda: None  # whoever must hear of another state
        self.leaving: Deadline | None = None  # an order is prepared, which is good until then
        self.engine_failed = asyncio.Event()  # by a bug of ours: this process should end
        self._started_unix_s = unix_s()
        self.worker_id = WorkerId(options.worker_id or f"{options.role}-{model.incarnation[:8]}")
        self.api_port = options.port
        self.legs = LiveLegs(
            options.engine.waiting_max + self._slots(), options.hand_over.remembered_max
        )
        self.prefill: PrefillWorker | None = None
        self.decode: DecodeWorker | None = None
        self.combined: CombinedWorker | None = None
        self._connector: NeuronConnector | None = None
        self._lanes: LaneSet | None = None
        self._transfer_domains: list[str] = []
        self._signal_keys = make_signal_keys(options.hand_over.signal_curve)
        self._layout_digest = self._local().exchange_digest
        self._traits = template_traits(model.tokenizer.chat_template_source)
        pool = model.backend.pool
        self._block_pool = BlockPool.of(pool.block_ids(), pool.exchanges)
        self.prompts = PromptReader(
            model.tokenizer,
            num_vocab=model.backend.num_vocab,
            context_tokens=model.context_tokens,
            eos_token_ids=model.eos_token_ids,
        )
        try:
            self._scheduler, self._engine = self._assemble()
            self._parts.start_engine(self._engine)
        except BaseException:  # the process may go on, in another role
            self._close_links()
            self._wait_closed()
            raise

    @property
    def connector(self) -> NeuronConnector | None:
        """What it talks to its peers with; None: its role has none."""
        return self._connector

    @property
    def busy_since_s(self) -> float | None:
        """When what the engine does now began; None: it waits."""
        return self._engine.busy_since_s

    @property
    def is_draining(self) -> bool:
        return self._state_now() == "draining"

    def set_state(self, state: WorkerState) -> None:
        self._state = state
        self.on_state()

    def _state_now(self) -> WorkerState:
        return "draining" if self._engine.has_failed else self._state

    def record(self) -> WorkerRecord:
        """What this worker announces of itself now."""
        options = self._options
        return WorkerRecord(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            incarnation=self._model.incarnation,
            role=options.role,
            state=self._state_now(),
            pid=os.getpid(),
            model=self._model.name,
            model_digest=self._model.digest,
            layout_digest=self._layout_digest,
            context_tokens=self._model.context_tokens,
            host=options.announce_host or options.host,
            api_port=self.api_port,
            signal_host=options.announce_host or options.host,
            signal_port=self.prefill.signal_port if self.prefill is not None else 0,
            signal_key=self._signal_keys.public if self._signal_keys is not None else None,
            started_unix_s=self._started_unix_s,
            numerics=self._numerics(),
            transfer=self._transfer_domains,
            connections=self._connector.connections() if self._connector is not None else [],
            num_legs=len(self.legs),
            slots=self._slots(),
            num_vocab=self._model.backend.num_vocab,
            num_ranks=self._model.backend.layout.num_ranks,
            tool_format=self._traits.tool_format,
            reasoning=self._traits.reasoning,
            sampling_defaults=self._model.sampling_defaults,
        )

    def _slots(self) -> int:
        limits = self._model.limits(self._options.engine)
        return limits.prefill_batch if self._options.role == "prefill" else limits.decode_batch

    def _numerics(self) -> str | None:
        of_backend = self._model.backend.numerics
        limits = self._model.limits(self._options.engine)
        return of_backend and f"{of_backend} chunk={limits.chunk}"

    def status(self) -> WorkerStatus:
        """The record and the load at this moment. Counters only: read without a lock."""
        blocks = self._engine.blocks
        counters = self._connector.counters if self._connector else HandOverCounters()
        landing = self._connector.landing if self._connector else None
        return WorkerStatus(
            record=self.record(),
            num_blocks=blocks.total,
            num_blocks_free=blocks.free,
            num_blocks_running=blocks.running,
            num_blocks_parked=blocks.parked,
            num_blocks_receiving=blocks.receiving,
            num_blocks_cached=blocks.cached,
            num_blocks_quarantined=blocks.quarantined,
            num_legs=len(self.legs),
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_transferring=self._scheduler.num_transferring,
            num_steps=self._engine.num_steps,
            kv_bytes_received=self.decode.kv_bytes_received if self.decode is not None else 0,
            landing_bytes=landing.num_bytes_open if landing is not None else 0,
            landing_bytes_asked=landing.num_bytes_asked if landing is not None else 0,
            num_kv_mismatched=counters.num_kv_mismatched,
            num_leases_ended=counters.num_leases_ended,
            num_signals_refused=counters.num_signals_refused,
            num_stale=counters.num_stale,
            num_lanes_failed=counters.num_lanes_failed,
            num_fallbacks=counters.num_fallbacks,
            num_streams_refused=counters.num_streams_refused,
            lanes=self._lane_statuses(),
            is_leaving=self.leaving is not None and not self.leaving.has_passed(),
            is_stuck=self._is_stuck(),
            has_failed=self._engine.has_failed,
        )

    def _is_stuck(self) -> bool:
        since_s, hang_timeout_s = self.busy_since_s, self._options.hang_timeout_s
        if since_s is None or hang_timeout_s is None:
            return False
        return now_s() - since_s >= hang_timeout_s * STUCK_PART

    def _lane_statuses(self) -> list[LaneStatus]:
        lanes = self._connector.lanes() if self._connector is not None else []
        return [
            LaneStatus(
                peer=peer.worker_id,
                engine=lane.name,
                reason=lane.reason,
                verdicts=lane.verdicts,
                connect_s=lane.connect_s,
            )
            for peer, lane in lanes[:LANES_MAX]
        ]

    def lease_left_s(self) -> float | None:
        """Seconds until parked KV that nobody pulls is given up; None: none is parked."""
        return self._connector.lease_left_s() if self._connector is not None else None

    async def close(self, *, keeps_weights: bool = False) -> None:
        """End everything in the order of dependence: engine, links, transfers, memory.

        Another worker may take over weights that are kept.
        """
        await self._loop.run_in_executor(None, self._engine.stop)
        self._close_links()
        await self._loop.run_in_executor(None, self._wait_closed)
        # Digests and placing may go on behind the transfers. Where a device failed, that may be for
        # ever, and this process ends.
        if not self._engine.has_failed:
            deadline = Deadline.after(SETTLE_S)
            await self._loop.run_in_executor(None, self._model.backend.pool.settle, deadline)
        if keeps_weights:
            self._model.backend.close_pool()
        else:
            self._model.backend.close()

    def _close_links(self) -> None:
        if self._connector is not None:
            self._connector.close()

    def _wait_closed(self) -> None:
        """Wait for what was still said and copied. Blocks."""
        if self._connector is not None:
            self._connector.wait_closed()
        if self._lanes is not None:
            self._lanes.close()
        if self._connector is not None:
            self._connector.landing.close()

    def _assemble(self) -> tuple[Scheduler, Engine]:
        """Build what the role needs, from the scheduler up to the legs."""
        limits, role = self._model.limits(self._options.engine), self._options.role
        report = LegReport(self.worker_id, role)
        prefixes = self._model.prefix_cache(self._options.engine, self._block_pool)
        if role == "both":
            combined = CombinedScheduler(
                self._block_pool,
                block_size=limits.block_size,
                batch_size=limits.decode_batch,
                chunk_tokens=limits.chunk,
                waiting_max=limits.waiting_max,
                reserve_tokens=limits.reserve_tokens,
                prefixes=prefixes,
            )
            engine = self._engine_for(combined)
            self.combined = CombinedWorker(engine, self.prompts, self.legs, report)
            return combined, engine
        lacking: dict[str, str] = {}
        self._lanes = LaneSet(self._make_engines(lacking), lacking)
        self._transfer_domains = [transfer_domain(engine) for engine in self._lanes.engines]
        local = self._local()
        self._connector = self._connect_to_peers(local, self._lanes)
        if role == "prefill":
            prefill = PrefillScheduler(
                self._block_pool,
                block_size=limits.block_size,
                batch_size=limits.prefill_batch,
                chunk_tokens=limits.chunk,
                waiting_max=limits.waiting_max,
                prefixes=prefixes,
            )
            engine = self._engine_for(prefill)
            pool = self._model.backend.pool
            self.prefill = PrefillWorker(
                local, engine, self._connector, pool, self.prompts, self.legs, report
            )
            return prefill, engine
        decode = DecodeScheduler(
            self._block_pool,
            block_size=limits.block_size,
            batch_size=limits.decode_batch,
            waiting_max=limits.waiting_max,
            reserve_tokens=limits.reserve_tokens,
        )
        self.decode = DecodeWorker(
            lambda start_transfer: self._engine_for(decode, start_transfer),
            self._connector,
            self._model.backend.layout,
            self.prompts,
            self.legs,
            report,
        )
        return decode, self.decode.engine

    def _local(self) -> LocalWorker:
        return LocalWorker(
            worker_id=self.worker_id,
            incarnation=self._model.incarnation,
            model_digest=self._model.digest,
            layout=self._model.backend.layout,
            converts=self._options.kv_transfer.kv_convert,
            context_tokens=self._model.context_tokens,
        )

    def _make_engines(self, lacking: dict[str, str]) -> Sequence[TransferEngine]:
        """`lacking` gets what would be offered, and why it cannot be."""
        options, pool = self._options, self._model.backend.pool
        if self._parts.make_transfer is None:
            return make_engines(
                pool,
                options.kv_transfer,
                options.host,
                announced_host=options.announce_host,
                why_refused=options.addresses.why_refused,
                on_lacking=lacking.__setitem__,
            )
        made = self._parts.make_transfer(pool)
        return made if isinstance(made, Sequence) else [made]

    def _connect_to_peers(self, local: LocalWorker, lanes: LaneSet) -> NeuronConnector:
        options, backend = self._options, self._model.backend
        static_port = (options.static_peer or ":0").rpartition(":")[2]
        if options.role == "decode" and not static_port.isdigit():
            raise ConfigError("a decode worker's --static-peer is a signal address, HOST:PORT")
        connector_options = ConnectorOptions(
            signal_host=options.host,
            signal_port=options.signal_port,
            limits=options.hand_over,
            static_peer=options.static_peer,
            static_peer_key=options.static_peer_key,
            has_directory=options.registry is not None or bool(options.etcd.etcd),
            landing_bytes=options.kv_transfer.landing_memory,
            landing_bytes_max=available_memory_bytes() // _LANDING_SHARE_MAX,
            keys=self._signal_keys,
        )
        return NeuronConnector(
            local,
            lanes,
            backend.pool,
            connector_options,
            transport=self._parts.make_transport(),
        )

    def _engine_for(
        self, scheduler: Scheduler, start_transfer: StartTransfer | None = None
    ) -> Engine:
        def sink(events: list[EngineEvent]) -> None:
            self._loop.call_soon_threadsafe(self.legs.dispatch, events)

        def on_failure() -> None:
            self._loop.call_soon_threadsafe(self.engine_failed.set)

        return Engine(
            self._model.backend,
            scheduler,
            self._model.tokenizer,
            self._model.eos_token_ids,
            sink=sink,
            on_failure=on_failure,
            start_transfer=start_transfer,
            notify=self._parts.notify_engine,
        )
