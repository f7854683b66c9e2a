"""A worker on simulated NeuronCores: how its model is loaded, renewed, and computes legs.

So far this has run on a simulator of libnrt only.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nrt_sim.build import library_path
from worker_kit import collect, is_at_rest, prefill_leg, token_ids, until

from neuron_di.backends.neuron import NeuronBackend
from neuron_di.backends.neuron_compile import compile_artifact
from neuron_di.backends.neuron_plan import manifest_of
from neuron_di.config import EngineOptions, NeuronOptions, WorkerOptions
from neuron_di.errors import BadRequest, ConfigError
from neuron_di.kv import NeuronPool
from neuron_di.models import ModelSpec
from neuron_di.wire import PrefillLeg, PromptOptions
from neuron_di.worker import LoadedModel, Worker, load_model
from neuron_di.worker.model import renewed, why_impossible

STAND_IN = Path(__file__).resolve().parents[2] / "neuron_stand_in"
CONTEXT_TOKENS, SLOTS = 128, 4
PROMPT = list(range(100, 140))


@pytest.fixture
def options(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineOptions]:
    """Of a worker whose model is compiled. Its runtime is ended afterwards."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("NEURON_DI_LIBNRT", str(library_path()))
    monkeypatch.setenv("NRT_SIM_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")
    options = EngineOptions(
        device="neuron",
        dtype="float32",
        tp=2,
        threads=1,
        context_tokens=CONTEXT_TOKENS,
        prefill_batch=2,
        decode_batch=SLOTS,
        chunk_tokens=16,
        block_size=4,
        neuron=NeuronOptions(neuron_artifacts=str(tmp_path / "artifacts")),
    )
    manifest = manifest_of(options, ModelSpec.from_folder(llama_folder), llama_folder)
    compile_artifact(manifest, llama_folder, tmp_path / "artifacts", lambda _: None)
    yield options
    if "stand_in.cores" in sys.modules:
        sys.modules["stand_in.cores"].shut_down()


@pytest.fixture
def model(llama_folder: Path, options: EngineOptions) -> Iterator[LoadedModel]:
    loaded = load_model(str(llama_folder), None, "prefill", options)
    yield loaded
    if isinstance(loaded.backend, NeuronBackend) and loaded.backend._thread._thread.is_alive():
        loaded.backend.close()


def test_slots_are_blocks_whatever_the_role(model: LoadedModel, options: EngineOptions) -> None:
    pool = model.backend.pool
    assert isinstance(pool, NeuronPool)
    assert (pool.num_blocks, pool.layout.block_size) == (SLOTS, CONTEXT_TOKENS)
    assert (pool.layout.num_ranks, pool.layout.dtype) == (1, "float32")
    assert model.context_tokens == CONTEXT_TOKENS
    assert model.pool_plan is not None
    assert {model.pool_plan.num_blocks(role) for role in ("prefill", "decode", "both")} == {SLOTS}
    limits = model.limits(options)
    assert (limits.block_size, limits.chunk_tokens) == (CONTEXT_TOKENS, CONTEXT_TOKENS)
    assert replace(limits, block_size=4, chunk_tokens=16) == options


def test_the_cores_are_this_workers_and_numbered_as_the_hosts(model: LoadedModel) -> None:
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == "4-5"
    assert isinstance(model.backend.pool, NeuronPool)
    assert model.backend.pool.device.lncs == (4, 5)


def test_a_change_of_role_keeps_the_weights_and_the_slots(model: LoadedModel) -> None:
    backend, before = model.backend, model.backend.pool
    assert why_impossible(model, "decode") == ""
    changed = renewed(model, "decode")
    assert changed.backend is backend
    assert backend.pool is not before
    assert backend.pool.num_blocks == SLOTS
    assert backend.pool.incarnation == changed.incarnation != model.incarnation
    assert changed.context_tokens == CONTEXT_TOKENS


def test_progress_has_a_beginning_and_an_end(llama_folder: Path, options: EngineOptions) -> None:
    told: list[tuple[int, int]] = []
    loaded = load_model(
        str(llama_folder), None, "decode", options, on_progress=lambda *done: told.append(done)
    )
    loaded.backend.close()
    total = ModelSpec.from_folder(llama_folder).weight_bytes("float32")
    assert told == [(0, total), (total, total)]


def test_what_cannot_work_loads_nothing(
    llama_folder: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was loaded")

    for name in ("open_backend", "Tokenizer"):
        monkeypatch.setattr(f"neuron_di.worker.model.{name}", never)
    with pytest.raises(ConfigError, match="slots is 4, and 3 is wanted"):
        load_model(str(llama_folder), None, "decode", replace(options, decode_batch=3))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "31")
    with pytest.raises(ConfigError, match="need 2 NeuronCores"):
        load_model(str(llama_folder), None, "decode", options)


def test_the_mirror_must_fit_the_hosts_memory(
    llama_folder: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("neuron_di.backends.open_backend")
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"KV pool of 4 blocks .*but 1\.0 MiB are available"):
        load_model(str(llama_folder), None, "decode", options)


# A whole worker that does both. One of each role needs two processes: tests/e2e.


def leg_of(name: str, *, options: PromptOptions | None = None, **fields: Any) -> PrefillLeg:
    leg = prefill_leg(name, **fields)
    return leg if options is None else msgspec.structs.replace(leg, options=options)


async def answers(
    folder: Path, engine: EngineOptions, legs: list[dict[str, object]]
) -> list[list[int]]:
    model = load_model(str(folder), None, "both", engine)
    options = WorkerOptions(
        model=str(folder), role="both", worker_id="both-0", engine=model.limits(engine)
    )
    worker = Worker(options, model)
    try:
        worker.set_state("ready")
        assert worker.combined is not None
        runs = [
            asyncio.create_task(collect(worker.combined.run(leg_of(f"leg-{n}", **leg))))
            for n, leg in enumerate(legs)
        ]
        tokens = [token_ids(await run) for run in runs]
        await until(lambda: is_at_rest(worker))
        return tokens
    finally:
        await worker.close()


LEGS: list[dict[str, object]] = [
    {"prompt": PROMPT},
    {"prompt": PROMPT[:1]},
    {"prompt": PROMPT * 2, "temperature": 0.8, "seed": 5},
    {"prompt": PROMPT[:20], "max_tokens": 100},
    {"prompt": PROMPT[:25], "temperature": 1.2, "seed": 6, "max_tokens": 30},
    {"prompt": PROMPT[7:]},
]


async def test_legs_get_the_tokens_of_a_cpu_worker(
    llama_folder: Path, options: EngineOptions
) -> None:
    """More of them than slots; tokens of chance included."""
    on_cpu = EngineOptions(threads=1, context_tokens=CONTEXT_TOKENS, decode_batch=SLOTS)
    expected = await answers(llama_folder, on_cpu, LEGS)
    assert await answers(llama_folder, options, LEGS) == expected


async def test_an_answer_goes_on_after_a_failure_elsewhere(
    llama_folder: Path, options: EngineOptions
) -> None:
    (whole,) = await answers(llama_folder, options, [{"prompt": PROMPT, "max_tokens": 20}])
    sys.modules["stand_in.cores"].shut_down()
    leg: dict[str, object] = {
        "prompt": PROMPT,
        "max_tokens": 20,
        "emitted": whole[:9],
        "attempt": 1,
    }
    assert await answers(llama_folder, options, [leg]) == [whole[9:]]


async def test_logprobs_of_the_prompt_are_a_clients_error(
    llama_folder: Path, options: EngineOptions
) -> None:
    with pytest.raises(BadRequest, match="logprobs of the prompt are not available"):
        await answers(llama_folder, options, [{"options": PromptOptions(report=True, logprobs=1)}])
