"""The Neuron backend: NxD Inference computes, on the NeuronCores of this one process.

A prompt is one call, and so is a decode step of all its requests. A replay runs positions one by
one through the decode graph, as decode steps did. KV lies in slots on the device, of which the
pool has a mirror in the host's memory (kv/neuron_pool.py); a slot whose KV came by way of the
mirror is written to the device before the first step that reads it. Layers are not told of while
a prompt is computed: they are not in the mirror then.

So far this has run on a simulator of libnrt and a stand-in for NxD Inference only.

Next: neuron_di/backends/neuron_nxdi.py
"""

import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from neuron_di.backends.backend import Backend, LayerHook, OnLost
from neuron_di.backends.host_logits import HostLogits
from neuron_di.backends.neuron_faults import lost_by
from neuron_di.backends.neuron_nxdi import NxdiModel
from neuron_di.backends.neuron_plan import NeuronPlan, plan_device
from neuron_di.backends.neuron_preflight import runtime_environment
from neuron_di.backends.neuron_tensors import Turns, check_copies, device_kv
from neuron_di.backends.neuron_thread import DeviceThread
from neuron_di.backends.open_backend import BackendOptions
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.errors import BackendLost, BadRequest, ConfigError, LocalProtocolError
from neuron_di.kv import DeviceKv, KvPool, NeuronPool
from neuron_di.models import ReadLogits
from neuron_di.neuron_cores import LOAD_TIMEOUT_S, VISIBLE_CORES, as_text
from neuron_di.obs import get_logger
from neuron_di.request import Request
from neuron_di.types import BlockId, Incarnation
from neuron_di_bindings.nrt import NrtError, NrtMisuse

__all__ = ["NeuronBackend", "open_backend", "plan_device"]

T = TypeVar("T")

_log = get_logger(__name__)

_STEP_TIMEOUT_S = (
    900.0  # the runtime itself gives a graph up after 30 s, or 600 s for long contexts
)


def open_backend(options: BackendOptions) -> Backend:
    """Load the compiled model that the plan found. ConfigError where NxD Inference cannot."""
    if not isinstance(options.plan, NeuronPlan):
        raise ConfigError("device 'neuron' is not available to options that were planned for cpu")
    return NeuronBackend(options, options.plan)


class NeuronBackend(HostLogits):
    """Serves one model on this process's NeuronCores. See `Backend` for the contract.

    A call has made all its writes when its logits are here: artifacts with async_mode, of which
    that is not true, are refused.
    """

    def __init__(self, options: BackendOptions, plan: NeuronPlan) -> None:
        torch.set_num_threads(options.num_threads)  # of what is computed on the host: sampling
        self.layout = options.layout
        self.num_vocab = options.spec.num_vocab
        self.numerics: str | None = _numerics(plan)
        self._slots: NeuronPool | None = None
        self._turns = Turns()  # of forward calls, and of copies of slots
        self._thread = DeviceThread()
        # Before the packages are imported: they, and the runtime, read it once.
        os.environ.update(runtime_environment(plan.cores, plan.library_path))
        try:
            self._model, self._device = self._load(options, plan)
            self.open_pool(options.num_blocks, options.incarnation)
        except BaseException:
            self._thread.close()
            raise

    def prefill(
        self,
        chunk: PrefillChunk,
        after_layer: LayerHook | None = None,  # noqa: ARG002 - nothing is in the mirror yet
        read_logits: ReadLogits | None = None,
    ) -> Tensor | None:
        request, slot = chunk.request, _slot_of(chunk.request)
        if read_logits is not None:
            raise BadRequest(
                "this server's device computes the logits of a prompt's last token only: "
                "logprobs of the prompt are not available"
            )
        if chunk.is_replay:
            logits_V = self._replay(chunk)
        else:
            if (chunk.start, chunk.end) != (0, request.num_prompt):
                raise LocalProtocolError("a prompt is one call on this device")
            ids = request.prompt_ids
            logits_V = self._run(lambda: self._model.prefill(slot, ids))
            self._device_pool.mark_on_device([slot])
        return logits_V if chunk.is_last else None

    def decode(self, batch: DecodeBatch) -> Tensor:
        requests = sorted(batch.requests, key=_slot_of)
        for request in requests:
            self._bring_to_device(request)
        slots = [_slot_of(request) for request in requests]
        ids = [request.generated[-1] for request in requests]
        positions = [request.num_computed for request in requests]
        logits_BV = self._run(lambda: self._model.decode(slots, ids, positions))
        rows = {slot: row for row, slot in enumerate(slots)}
        return logits_BV[[rows[_slot_of(request)] for request in batch.requests]]

    def copy_blocks(self, sources: object, targets: object) -> None:  # noqa: ARG002
        raise LocalProtocolError("a block of this device is a whole context: none is kept")

    def watch(self, on_lost: OnLost) -> None:
        self._device_pool.watch_loss(on_lost)

    def close_pool(self) -> None:
        """The slots stay allocated on the device, as the compiled model has them."""
        self._device_pool.close()

    def open_pool(self, num_blocks: int, incarnation: Incarnation) -> None:
        if self._slots is not None and self._slots.lost is not None:
            raise ConfigError(f"{self._slots.lost.message}: only a new process can use it")
        self._slots = NeuronPool.create(self.layout, num_blocks, incarnation, self._device)
        self.pool: KvPool = self._slots

    def close(self) -> None:
        self.close_pool()
        self._thread.close()
        del self._model, self._device

    def _load(self, options: BackendOptions, plan: NeuronPlan) -> tuple[NxdiModel, DeviceKv]:
        settings, num_bytes = plan.manifest.settings, options.spec.weight_bytes(self.layout.dtype)

        def load() -> tuple[NxdiModel, DeviceKv]:
            model = NxdiModel.load(plan.artifact, settings, options.spec)
            ranks = model.state_tensors()
            device = device_kv(ranks, settings, options.spec, plan.cores, self._turns)
            check_copies(device)
            return model, device

        if options.on_progress is not None:
            options.on_progress(0, num_bytes)  # NxD Inference says nothing of it meanwhile
        try:
            model, device = self._thread.run(load, LOAD_TIMEOUT_S)
        # RuntimeError is PyTorch's word for what the runtime answered.
        except (TimeoutError, BackendLost, NrtError, NrtMisuse, RuntimeError) as error:
            raise ConfigError(
                f"the model could not be loaded onto NeuronCores {as_text(plan.cores)}: {error}. "
                "Mend: the kernel's log and neuron-top say what the devices lack; name other cores "
                f"with {VISIBLE_CORES}, or restart the instance"
            ) from error
        if options.on_progress is not None:
            options.on_progress(num_bytes, num_bytes)
        has_handles = all(tensor.nrt is not None for tensor in device.tensors)
        _log.info("neuron_loaded", artifact=plan.manifest.key, has_handles=has_handles)
        return model, device

    def _replay(self, chunk: PrefillChunk) -> Tensor:
        """Compute positions as decode steps did: each in a step of its own."""
        request, slot = chunk.request, _slot_of(chunk.request)
        self._bring_to_device(request)
        logits_BV = None
        ids = request.token_ids(chunk.start, chunk.end)
        for position, token_id in enumerate(ids, chunk.start):
            logits_BV = self._run(partial(self._model.decode, [slot], [token_id], [position]))
        assert logits_BV is not None, "a chunk has positions"
        return logits_BV[0]

    @property
    def _device_pool(self) -> NeuronPool:
        assert self._slots is not None, "it is made with the backend"
        return self._slots

    def _bring_to_device(self, request: Request) -> None:
        """KV that came from another worker by way of the mirror."""
        slot, pool = _slot_of(request), self._device_pool
        if not pool.is_on_device(slot):
            pool.to_device(slot, request.num_computed)

    def _run(self, call: Callable[[], T]) -> T:
        """Make a forward call, on the one thread, while nobody copies slots by way of PyTorch.

        BackendLost when the device cannot be used any more: whoever watches is told, too.
        """
        pool = self._device_pool
        pool.require_not_lost()

        def in_turn() -> T:
            with self._turns.taken():
                return call()

        try:
            return self._thread.run(in_turn, _STEP_TIMEOUT_S)
        except Exception as error:
            lost = lost_by(error)
            if lost is None:
                raise
            pool.lose(lost)
            raise lost from error


def _slot_of(request: Request) -> BlockId:
    """A request has one block: its slot, which NxD Inference calls seq_id."""
    (slot,) = request.block_ids
    return slot


def _numerics(plan: NeuronPlan) -> str | None:
    """A row of a graph depends on its own inputs only, and a prompt's graph on its length only. So
    where each step runs in the same graph, equal artifacts compute alike. With several graphs for
    decode the longest request of a step chooses, and rounding depends on who that is.
    """
    settings = plan.manifest.settings
    if len(settings.decode_buckets) > 1:
        return None
    return f"neuron {settings.runner} {plan.manifest.key}"
