"""What the Neuron backend refuses, whose thread computes, and what a lost device means."""

import ctypes
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backend_kit import decode, prefill
from neuron_backend_kit import (
    CHUNK,
    CONTEXT_TOKENS,
    NUM_TOKENS,
    SLOTS,
    compiled,
    cpu_tokens,
    engine_options,
    opened,
    opened_by,
    planned,
    pool_of,
    request_of,
    run,
    simulated,
)

from neuron_di.backends import neuron_compile, neuron_nxdi
from neuron_di.backends.neuron import NeuronBackend
from neuron_di.core import PrefillChunk
from neuron_di.errors import (
    BackendLost,
    BadRequest,
    ConfigError,
    LocalProtocolError,
)
from neuron_di.types import BlockId, Incarnation
from neuron_di_bindings.nrt import NrtStatus


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "root", monkeypatch)


@pytest.fixture
def backend(llama_folder: Path, artifacts: Path) -> Iterator[NeuronBackend]:
    with opened(llama_folder, engine_options(artifacts)) as backend:
        yield backend


# What is refused.


@pytest.fixture
def without_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as somebody who does not know of apply_seq_ids_mask, and sign it as ours."""
    wanted = neuron_nxdi.neuron_config_of

    def changed(settings: Any) -> dict[str, Any]:
        return wanted(settings) | {"apply_seq_ids_mask": False}

    monkeypatch.setattr(neuron_nxdi, "neuron_config_of", changed)
    monkeypatch.setattr(neuron_compile, "neuron_config_of", changed)


@pytest.mark.usefixtures("without_mask")
def test_an_artifact_without_the_mask_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    options = engine_options(tmp_path)
    compiled(llama_folder, options)
    with pytest.raises(ConfigError) as refused:
        planned(llama_folder, options)
    assert "apply_seq_ids_mask is false, and true is wanted (a decode step would" in str(
        refused.value
    )
    assert f"Mend: compile it: neuron-di compile {llama_folder}" in str(refused.value)


@pytest.fixture
def maskless_plan(llama_folder: Path, tmp_path: Path, without_mask: None) -> Any:
    """Forced past the check that refuses it."""
    options = engine_options(tmp_path)
    folder = compiled(llama_folder, options).folder
    (folder / "neuron_config.json").rename(folder / "kept")
    text = (folder / "kept").read_text()
    (folder / "neuron_config.json").write_text(
        text.replace('"apply_seq_ids_mask": false', '"apply_seq_ids_mask": true')
    )
    plan = planned(llama_folder, options)
    (folder / "neuron_config.json").write_text(text)
    return plan


def test_kv_without_the_pad_is_refused(llama_folder: Path, maskless_plan: Any) -> None:
    with (
        pytest.raises(ConfigError, match=r"KV tensor 0 of rank 0 is \(4, 2, 256, 32\)"),
        opened_by(llama_folder, maskless_plan),
    ):
        pass


def test_without_the_mask_idle_slots_are_written_to(
    llama_folder: Path, maskless_plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the refusals are for: this is how the tests above would show it."""
    monkeypatch.setattr("neuron_di.backends.neuron_tensors.SEQ_IDS_PAD", 0)
    parked, running = request_of(200, 0), request_of(30, 2)
    with opened_by(llama_folder, maskless_plan) as backend:
        prefill(backend, parked, CHUNK)
        prefill(backend, running, CHUNK)
        for _ in range(5):
            decode(backend, running)
        while len(parked.generated) < NUM_TOKENS:
            decode(backend, parked)
    assert parked.generated != cpu_tokens(llama_folder, 200)


def test_logprobs_of_the_prompt_are_refused_by_name(backend: NeuronBackend) -> None:
    chunk = PrefillChunk.next_of(request_of(20, 0), CHUNK)
    with pytest.raises(BadRequest, match="logprobs of the prompt are not available"):
        backend.prefill(chunk, read_logits=lambda _position, _logits: None)


def test_a_prompt_in_pieces_is_a_bug(backend: NeuronBackend) -> None:
    with pytest.raises(LocalProtocolError, match="a prompt is one call"):
        backend.prefill(PrefillChunk.next_of(request_of(20, 0), 16))


def test_what_was_planned_for_another_device_is_refused(
    llama_folder: Path, artifacts: Path
) -> None:
    options = engine_options(artifacts)
    compiled(llama_folder, options)
    plan = planned(llama_folder, options)
    with (
        pytest.raises(ConfigError, match="NxD Inference could not load the compiled model"),
        opened_by(llama_folder, replace(plan, artifact=llama_folder)),
    ):
        pass


# Threads, losses, another pool.


def test_whoever_asks_one_thread_computes(backend: NeuronBackend) -> None:
    """The stand-in refuses a second one."""
    requests = [request_of(20 + slot, slot) for slot in range(SLOTS)]
    with ThreadPoolExecutor(SLOTS) as threads:
        list(threads.map(lambda request: prefill(backend, request, CHUNK), requests))
        list(threads.map(lambda request: decode(backend, request), requests))
    assert all(len(request.generated) == 2 for request in requests)


def test_a_device_that_fails_beneath_pytorch_is_lost(backend: NeuronBackend) -> None:
    request = request_of(20, 0)
    prefill(backend, request, CHUNK)
    simulator = ctypes.CDLL(os.environ["NEURON_DI_LIBNRT"])
    for name in (b"nrt_tensor_read", b"nrt_tensor_read_batch"):  # with either KV is read
        assert simulator.nrt_sim_fault(name, NrtStatus.DMA_ABORT, 1) == 0
    try:
        with pytest.raises(BackendLost, match="DMA_ABORT"):
            decode(backend, request)
        assert pool_of(backend).lost is not None
    finally:
        simulator.nrt_sim_clear_faults()


def failing(backend: NeuronBackend, error: Exception) -> None:
    def forward(*_: object, **__: object) -> None:
        raise error

    backend._model._model.forward = forward


@pytest.mark.parametrize(
    "text",
    [
        "nrt_execute status=1203 (NRT_EXEC_HW_ERR_DMA_ABORT)",
        "Failed to execute: NRT_EXEC_UNIT_UNRECOVERABLE",
        "forward failed, status_code=1200",
        "nrt_execute: NRT_UNINITIALIZED",
        "nrt_execute status=14 (NRT_CLOSED)",
    ],
)
def test_a_device_that_is_lost_ends_all_steps(backend: NeuronBackend, text: str) -> None:
    request, told = request_of(20, 0), []
    prefill(backend, request, CHUNK)
    backend.watch(told.append)
    failing(backend, RuntimeError(text))
    with pytest.raises(BackendLost, match="the Neuron device failed"):
        decode(backend, request)
    assert [type(loss) for loss in told] == [BackendLost]
    with pytest.raises(BackendLost):
        prefill(backend, request_of(30, 1), CHUNK)
    late: list[BackendLost] = []
    backend.watch(late.append)
    assert late == told
    backend.close_pool()
    with pytest.raises(ConfigError, match="only a new process"):
        backend.open_pool(SLOTS, Incarnation("b" * 32))


def test_a_call_that_fails_for_itself_ends_its_step_only(backend: NeuronBackend) -> None:
    request, told = request_of(20, 0), []
    prefill(backend, request, CHUNK)
    backend.watch(told.append)
    failing(backend, RuntimeError("nrt_execute status=1002 (NRT_EXEC_BAD_INPUT)"))
    with pytest.raises(RuntimeError, match="BAD_INPUT"):
        decode(backend, request)
    del backend._model._model.forward
    decode(backend, request)
    assert told == []


def test_what_a_transfer_loses_the_engine_hears(backend: NeuronBackend) -> None:
    told: list[BackendLost] = []
    backend.watch(told.append)
    lost = BackendLost("a peer is gone with posted requests")
    pool_of(backend).lose(lost)
    assert told == [lost]
    with pytest.raises(BackendLost, match="a peer is gone"):
        prefill(backend, request_of(30, 1), CHUNK)


def test_another_pool_after_a_change_of_role(backend: NeuronBackend, llama_folder: Path) -> None:
    run(backend, [request_of(40, 0)])
    first = backend.pool
    backend.close_pool()
    backend.open_pool(SLOTS, Incarnation("b" * 32))
    assert backend.pool is not first
    assert backend.pool.incarnation == "b" * 32
    assert not pool_of(backend).is_on_device(BlockId(0))
    request = request_of(60, 0)
    run(backend, [request])
    assert request.generated == cpu_tokens(llama_folder, 60)


def test_it_ends_its_thread_and_can_be_closed_without_a_pool(
    llama_folder: Path, artifacts: Path
) -> None:
    before = threading.active_count()
    with opened(llama_folder, engine_options(artifacts)) as backend:
        assert threading.active_count() == before + 1
        backend.close_pool()
    assert threading.active_count() == before


def test_slots_are_as_long_as_the_context(backend: NeuronBackend) -> None:
    assert backend.layout.block_size == CONTEXT_TOKENS
    assert backend.layout.num_ranks == 1
    assert backend.pool.num_blocks == SLOTS
    request = request_of(CONTEXT_TOKENS - 1, 3)  # one token may follow
    prefill(backend, request, CHUNK)
    decode(backend, request)
    assert request.num_computed == CONTEXT_TOKENS
