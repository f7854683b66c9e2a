"""The pool of a worker that changes its role: never two at a time."""

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from neuron_di.backends.cpu import CpuBackend
from neuron_di.backends.tensor_parallel import TensorParallelBackend
from neuron_di.config import EngineOptions
from neuron_di.errors import ConfigError
from neuron_di.kv import KvLayout, KvPool, PeerPool
from neuron_di.types import Incarnation
from neuron_di.worker import LoadedModel, load_model
from neuron_di.worker.model import renewed, why_impossible
from neuron_di_bindings.block_runs import are_words

ENGINE = EngineOptions(
    block_size=4, threads=1, chunk_tokens=16, prefill_batch=2, decode_batch=4, context_tokens=64
)


def num_pools() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("neuron-di-kv")


def make_pools_by(
    model: LoadedModel, make_pool: Callable[..., KvPool], patch: pytest.MonkeyPatch
) -> None:
    """The model's backend, from now on."""
    backend = model.backend
    assert isinstance(backend, CpuBackend)
    patch.setattr(backend, "_options", replace(backend._options, make_pool=make_pool))


@pytest.fixture
def model(llama_folder: Path) -> LoadedModel:
    gc.collect()
    return load_model(str(llama_folder), None, "decode", ENGINE)


def test_the_old_pool_is_gone_before_the_new_one_is_made(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = num_pools() - 1
    layout, region = model.backend.layout, model.backend.pool.region()
    peer = PeerPool.open(region, layout)
    during: list[int] = []

    def counted(layout: KvLayout, num_blocks: int, incarnation: Incarnation) -> KvPool:
        during.append(num_pools())
        return KvPool.create(layout, num_blocks, incarnation)

    make_pools_by(model, counted, monkeypatch)
    model = renewed(model, "prefill")
    assert during == [others + 1], "the peer's map, which holds no memory"
    assert are_words(peer.words, [0], [1])
    del peer
    assert num_pools() == others + 1
    model.backend.close()
    assert num_pools() == others


def test_ranks_stay_and_map_the_new_pool(llama_folder: Path) -> None:
    model = load_model(str(llama_folder), None, "decode", replace(ENGINE, tp=2))
    backend = model.backend
    assert isinstance(backend, TensorParallelBackend)
    (pid,) = backend.rank_pids
    maps = Path(f"/proc/{pid}/maps")
    inode = os.stat(f"/proc/self/fd/{backend.pool.region().fd}").st_ino
    assert f" {inode} " in maps.read_text(encoding="utf-8")
    with ThreadPoolExecutor(1) as thread:  # as a worker does it, whose loop goes on meanwhile
        model = thread.submit(renewed, model, "prefill").result()
    renewed_inode = os.stat(f"/proc/self/fd/{backend.pool.region().fd}").st_ino
    assert renewed_inode != inode
    mapped = maps.read_text(encoding="utf-8")
    assert f" {renewed_inode} " in mapped
    assert f" {inode} " not in mapped
    assert backend.rank_pids == [pid]
    model.backend.close()


def test_a_new_pool_that_cannot_be_had_leaves_room_for_the_old_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = num_pools() - 1

    def none_left(*_: object) -> KvPool:
        raise ConfigError("no memory")

    with monkeypatch.context() as patch:
        make_pools_by(model, none_left, patch)
        with pytest.raises(ConfigError):
            renewed(model, "prefill")
    assert num_pools() == others
    model = renewed(model, "decode")
    assert num_pools() == others + 1
    model.backend.close()


def test_memory_that_the_old_pool_holds_counts_as_free(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker's pool is twice as large here as a prefill worker's."""
    module = import_module("neuron_di.backends.open_backend")
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 0)
    assert why_impossible(model, "prefill") == why_impossible(model, "decode") == ""
    model = renewed(model, "prefill")
    assert "would be free once this worker has given its own back" in why_impossible(
        model, "decode"
    )
    model.backend.close()


def test_who_serves_alone_cannot_hand_over_what_is_too_long_to_be_told(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_di.worker.model.SIGNAL_BYTES_MAX", 4096)
    model = load_model(str(llama_folder), None, "both", ENGINE)
    for role in ("prefill", "decode"):
        assert "cannot be handed over" in why_impossible(model, role)
        with pytest.raises(ConfigError, match="cannot be handed over"):
            load_model(str(llama_folder), None, role, ENGINE)
    assert why_impossible(model, "both") == ""
    model.backend.close()
