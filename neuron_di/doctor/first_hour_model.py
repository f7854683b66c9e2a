"""A compiled model's KV, and its decode steps beside a transfer. Started by `first_hour`.

    python -m neuron_di.doctor.first_hour_model FOLDER FIRST_LNC ADDRESS PEER_LNC

Loads the artifact in FOLDER onto the cores that NEURON_RT_VISIBLE_CORES names, of which FIRST_LNC
is the first; PEER_LNC is another core, for a process that receives.
So far this has run against a stand-in for NxD Inference, on a simulator of libnrt, only.
"""

import os
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from neuron_di.backends.neuron_artifact import NEURON_CONFIG, read_manifest
from neuron_di.backends.neuron_nxdi import NxdiModel
from neuron_di.clock import now_s
from neuron_di.doctor.nrt_end import (
    End,
    Peer,
    connect_both,
    open_end,
    second_process,
    wait_for,
)
from neuron_di.doctor.steps import Facts, take
from neuron_di.models import ModelSpec
from neuron_di_bindings.nrt import NrtError, NrtRuntime, load_nrt

NUM_PROMPT, NUM_STEPS = 16, 32
STREAM_BYTES = 1 << 20
_BATCH = 16  # of messages, between two looks at whether it is over
_PAGE_BYTES = 4096
_TOKEN = 1


def examine(folder: Path, first_lnc: int, address: str, peer_lnc: int) -> None:
    """Steps "load", "addresses", "decode" and "decode_beside"."""
    models: list[NxdiModel] = []
    if not take("load", lambda: _load(models, folder)):
        return
    model, runtime = models[0], NrtRuntime(load_nrt())
    take("addresses", lambda: _addresses(model, runtime, first_lnc))
    if not take("decode", lambda: _decode(model)):
        return
    with second_process(peer_lnc, "receive") as peer:
        ends: list[End] = []
        if take("connect", lambda: _connect(ends, runtime, peer, first_lnc, address, peer_lnc)):
            take("decode_beside", lambda: _decode_beside(model, ends[0], peer))


def _load(models: list[NxdiModel], folder: Path) -> Facts:
    settings = read_manifest(folder).settings
    path = folder / NEURON_CONFIG
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    spec = ModelSpec.from_config(
        config, eos_token_id=config.get("eos_token_id"), source=NEURON_CONFIG
    )
    start_s = now_s()
    models.append(NxdiModel.load(folder, settings, spec))
    return {
        "duration_s": round(now_s() - start_s, 3),
        "family": spec.family,
        "layers": spec.num_layers,
        "tp": settings.tp,
        "context_tokens": settings.context_tokens,
        "slots": settings.slots,
        "dtype": settings.dtype,
        "k_transposed": settings.k_transposed,
    }


def _addresses(model: NxdiModel, runtime: NrtRuntime, first_lnc: int) -> Facts:
    """What the runtime makes of the address of each rank's KV: torch says it is one."""
    ranks = []
    for rank, tensors in enumerate(model.state_tensors()):
        tensor = tensors[0]
        found: Facts = {"rank": rank, "core": first_lnc + rank, "num_tensors": len(tensors)}
        found["device"] = str(tensor.device)
        found["shape"] = list(tensor.shape)
        found["has_handle"] = getattr(tensor, "nrt_tensor", None) is not None
        try:
            address = int(tensor.data_ptr())
            found["has_address"] = address != 0
            found["efa"] = runtime.attached_efa(address)
            os.close(runtime.dmabuf_fd(address, _PAGE_BYTES))
            found["dmabuf"] = "ok"
        except (NrtError, RuntimeError, AttributeError, TypeError, OSError) as error:
            found["failed"] = str(error)
        ranks.append(found)
    return {"ranks": ranks, "torch_engine": _has_torch_engine()}


def _has_torch_engine() -> bool:
    """Whether torch-neuronx registers a transfer engine of its own, as some SDKs' does."""
    try:
        return torch.classes.neuron.NeuronTransferEngine is not None
    except (AttributeError, RuntimeError):
        return False


def _decode(model: NxdiModel) -> Facts:
    """Steps of one request, alone: after its prompt."""
    model.prefill(0, [_TOKEN] * NUM_PROMPT)
    return _timed_steps(model)


def _timed_steps(model: NxdiModel) -> Facts:
    durations_ms = []
    for position in range(NUM_PROMPT, NUM_PROMPT + NUM_STEPS):
        start_s = now_s()
        model.decode([0], [_TOKEN], [position])
        durations_ms.append(1000 * (now_s() - start_s))
    return {
        "steps": NUM_STEPS,
        "median_ms": round(statistics.median(durations_ms), 3),
        "longest_ms": round(max(durations_ms), 3),
    }


def _connect(
    ends: list[End], runtime: NrtRuntime, peer: Peer, lnc: int, address: str, peer_lnc: int
) -> Facts:
    peer.answer()
    ends.append(open_end(runtime, lnc))
    return connect_both(ends[0], peer, "send", address, peer_lnc)


def _decode_beside(model: NxdiModel, end: End, peer: Peer) -> Facts:
    """The same steps, while the model's first core sends without a pause."""
    with _sending(end, peer) as sent:
        before, start_s = len(sent), now_s()
        facts = _timed_steps(model)
        duration_s, num_sent = now_s() - start_s, len(sent) - before
    return facts | {"bytes_per_s": round(num_sent * STREAM_BYTES / max(duration_s, 1e-9))}


@contextmanager
def _sending(end: End, peer: Peer) -> Iterator[list[int]]:
    """Yields what grows by one with each message that went. OSError where that ended too soon."""
    is_over, sent = threading.Event(), list[int]()
    failed: list[Exception] = []

    def send() -> None:
        try:
            while not is_over.is_set():
                peer.tell(do="receive", num_bytes=STREAM_BYTES, count=_BATCH)
                sent.extend(wait_for(end.post("send", 0, STREAM_BYTES)) for _ in range(_BATCH))
                peer.answer()
        except (NrtError, OSError) as error:
            failed.append(error)

    thread = threading.Thread(target=send, name="doctor sends")
    thread.start()
    try:
        yield sent
    finally:
        is_over.set()
        thread.join()
    if failed:
        raise OSError(f"the transfer beside it failed: {failed[0]}")


if __name__ == "__main__":
    its_folder, its_lnc, its_address, peers_lnc = sys.argv[1:]
    examine(Path(its_folder), int(its_lnc), its_address, int(peers_lnc))
    os._exit(0)  # neither the library nor PyTorch has to end in order
