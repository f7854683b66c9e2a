"""The pool of a worker that changes its role: never two at a time."""

import gc
from pathlib import Path

import pytest

from neuron_di.config import EngineOptions
from neuron_di.errors import ConfigError
from neuron_di.kv import KvPool, PeerPool
from neuron_di.worker import LoadedModel, load_model
from neuron_di.worker import model as model_module
from neuron_di.worker.model import missing_memory, renewed

ENGINE = EngineOptions(
    block_size=4, threads=1, chunk_tokens=16, prefill_batch=2, decode_batch=4, context_tokens=64
)


def num_pools() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("neuron-di-kv")


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
    create = KvPool.create.__func__  # type: ignore[attr-defined]

    def counted(cls: type[KvPool], *args: object) -> KvPool:
        during.append(num_pools())
        pool: KvPool = create(cls, *args)
        return pool

    monkeypatch.setattr(KvPool, "create", classmethod(counted))
    model = renewed(model, "prefill")
    assert during == [others + 1], "the peer's map, which holds no memory"
    assert peer.generations([0]) == [1]
    del peer
    assert num_pools() == others + 1
    model.backend.close()
    assert num_pools() == others


def test_a_new_pool_that_cannot_be_had_leaves_room_for_the_old_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = num_pools() - 1

    def none_left(*_: object) -> KvPool:
        raise ConfigError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(KvPool, "create", none_left)
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
    monkeypatch.setattr(model_module, "available_memory_bytes", lambda: 0)
    assert missing_memory(model, "prefill") == missing_memory(model, "decode") == ""
    model = renewed(model, "prefill")
    assert "would be free once this worker has given its own back" in missing_memory(
        model, "decode"
    )
    model.backend.close()
