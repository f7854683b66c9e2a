"""The Neuron backend in a test's own process: on the simulator of libnrt and the stand-in packages.

The runtime is started once at a time, as everywhere; `opened` ends it again.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_kit import make_request, random_prompt
from backend_kit import opened as opened_on_cpu
from nrt_sim.build import library_path

from neuron_di.backends import Backend, BackendOptions, open_backend
from neuron_di.backends.neuron import NeuronBackend
from neuron_di.backends.neuron_artifact import Manifest
from neuron_di.backends.neuron_compile import Compiled, compile_artifact
from neuron_di.backends.neuron_plan import NeuronPlan, manifest_of, plan_device
from neuron_di.config import EngineOptions, NeuronOptions
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.engine.sampler import sample
from neuron_di.kv import NeuronPool
from neuron_di.models import ModelSpec
from neuron_di.request import Request
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import SamplingParams

TESTS = Path(__file__).resolve().parents[2]
STAND_IN = TESTS / "neuron_stand_in"
CONTEXT_TOKENS = 256
SLOTS = 4
CHUNK = 1 << 20  # a prompt is one call
NUM_TOKENS = 24


def simulated(root: Path, patch: pytest.MonkeyPatch) -> None:
    """A host with NeuronCores for this process and those that it starts."""
    patch.syspath_prepend(str(STAND_IN))
    patch.setenv("NEURON_DI_LIBNRT", str(library_path()))
    patch.setenv("NRT_SIM_ROOT", str(root))
    patch.setenv("NRT_SIM_INSTANCE", "trn1.32xlarge")
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG"):
        patch.setenv(name, "")  # so that what a backend sets there is taken back
        patch.delenv(name)


def engine_options(artifacts: Path, **fields: Any) -> EngineOptions:
    """`fields` are of EngineOptions, or of NeuronOptions where they are named so."""
    neuron = {
        name: fields.pop(name) for name in [*fields] if name.startswith(("neuron_", "libnrt"))
    }
    values: dict[str, Any] = {
        "device": "neuron",
        "dtype": "float32",
        "context_tokens": CONTEXT_TOKENS,
        "decode_batch": SLOTS,
    }
    return EngineOptions(
        **(values | fields), neuron=NeuronOptions(neuron_artifacts=str(artifacts), **neuron)
    )


def manifest_for(folder: Path, options: EngineOptions) -> Manifest:
    return manifest_of(options, ModelSpec.from_folder(folder), folder)


def compiled(folder: Path, options: EngineOptions) -> Compiled:
    assert options.neuron.neuron_artifacts is not None
    root = Path(options.neuron.neuron_artifacts)
    return compile_artifact(manifest_for(folder, options), folder, root, lambda _: None)


def planned(folder: Path, options: EngineOptions) -> NeuronPlan:
    return plan_device(options, ModelSpec.from_folder(folder), folder)


@contextmanager
def opened(folder: Path, options: EngineOptions) -> Iterator[NeuronBackend]:
    """Compiled, where that was not done before."""
    compiled(folder, options)
    with opened_by(folder, planned(folder, options)) as backend:
        yield backend


@contextmanager
def opened_by(folder: Path, plan: NeuronPlan) -> Iterator[NeuronBackend]:
    from stand_in.cores import shut_down

    spec = ModelSpec.from_folder(folder)
    layout = spec.kv_layout(block_size=plan.block_size, dtype=plan.dtype)
    assert plan.num_slots is not None
    before = dict(os.environ)
    try:
        backend = open_backend(
            "neuron",
            BackendOptions(
                folder=folder,
                spec=spec,
                layout=layout,
                num_blocks=plan.num_slots,
                incarnation=Incarnation("a" * 32),
                num_threads=1,
                plan=plan,
            ),
        )
        assert isinstance(backend, NeuronBackend)
        try:
            yield backend
        finally:
            backend.close()
    finally:
        shut_down()
        os.environ.clear()  # the backend says there which cores are this process's
        os.environ.update(before)


# Requests, and who else computes them.


def request_of(length: int, slot: int, **sampling: Any) -> Request:
    request = make_request(random_prompt(length, length), [slot], max_tokens=NUM_TOKENS)
    request.sampling = SamplingParams(**{"temperature": 0.0, **sampling})
    return request


def choose(request: Request, logits_V: torch.Tensor) -> None:
    (token,) = sample(logits_V[None], (request,), ())
    request.generated.append(token.token_id)


def run(backend: Backend, requests: list[Request]) -> None:
    """To their ends, all of them in each step, in another order than that of their slots."""
    for request in requests:
        chunk = PrefillChunk.next_of(request, CHUNK)
        logits_V = backend.prefill(chunk)
        chunk.mark_computed()
        assert logits_V is not None
        choose(request, logits_V)
    while len(requests[0].generated) < NUM_TOKENS:
        batch = DecodeBatch(tuple(requests[::-1]))
        logits_BV = backend.decode(batch)
        assert logits_BV.dtype == torch.float32
        batch.mark_computed()
        for request, logits_V in zip(batch.requests, logits_BV, strict=True):
            choose(request, logits_V)


def cpu_tokens(folder: Path, length: int, **sampling: Any) -> list[int]:
    request = request_of(length, 0, **sampling)
    request.block_ids = [BlockId(block_id) for block_id in range(20)]
    with opened_on_cpu(folder) as backend:
        run(backend, [request])
    return request.generated


def pool_of(backend: NeuronBackend) -> NeuronPool:
    assert isinstance(backend.pool, NeuronPool)
    return backend.pool
