"""The Neuron backend on the simulator and the stand-in, against the CPU backend."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from backend_kit import decode, make_request, prefill
from neuron_backend_kit import (
    CHUNK,
    NUM_TOKENS,
    compiled,
    cpu_tokens,
    engine_options,
    opened,
    pool_of,
    request_of,
    run,
    simulated,
)

from neuron_di.backends.neuron import NeuronBackend
from neuron_di.core import PrefillChunk
from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.testing import write_random_checkpoint
from neuron_di.types import BlockId

LENGTHS = (1, 40, 127, 128, 200)  # either side of a bucket's border
SHAPES = [(1, False), (2, False), (2, True), (4, False), (4, True)]  # 2 KV heads: 4 have replicas


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


@pytest.mark.parametrize(("tp", "transposed"), SHAPES)
def test_tokens_are_those_of_the_cpu(
    llama_folder: Path, artifacts: Path, tp: int, transposed: bool
) -> None:
    options = engine_options(artifacts, tp=tp, neuron_k_transposed=transposed)
    with opened(llama_folder, options) as backend:
        for lengths in (LENGTHS[:3], LENGTHS[3:]):  # in the second an idle slot lies in between
            slots = range(0, 2 * len(lengths), 2) if len(lengths) == 2 else range(len(lengths))
            requests = [request_of(n, slot) for n, slot in zip(lengths, slots, strict=True)]
            run(backend, requests)
            for length, request in zip(lengths, requests, strict=True):
                assert request.generated == cpu_tokens(llama_folder, length)


def test_every_family_runs(family_folder: Path, tmp_path: Path) -> None:
    # Mistral's has a window of 4096, which the stand-in does not know: it is not to hear of it.
    options = engine_options(tmp_path / "artifacts")
    request = request_of(50, 2)
    with opened(family_folder, options) as backend:
        run(backend, [request])
    assert request.generated == cpu_tokens(family_folder, 50)


def test_an_older_nxd_inference_runs_mistral_as_llama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from neuronx_distributed_inference.utils.constants import MODEL_TYPES

    monkeypatch.delitem(MODEL_TYPES, "mistral")
    monkeypatch.delitem(MODEL_TYPES, "qwen3")
    for family in ("mistral", "qwen3"):
        write_random_checkpoint(tmp_path / family, family)
    request, options = request_of(50, 2), engine_options(tmp_path / "artifacts")
    with opened(tmp_path / "mistral", options) as backend:
        run(backend, [request])
    assert request.generated == cpu_tokens(tmp_path / "mistral", 50)
    with pytest.raises(ConfigError, match="NxD Inference has no qwen3: take a newer one"):
        compiled(tmp_path / "qwen3", options)


REASON = 'nrt_load_collectives status=4 message="Allocation Failure"'
OF_TORCHSCRIPT = f"""The following operation failed in the TorchScript interpreter.
Traceback of TorchScript, serialized code (most recent call last):
  File "code/__torch__/trace/spmd.py", line 9, in initialize
      ~~~~~~~~~~~~~ <--- HERE
RuntimeError: {REASON}
"""


@pytest.mark.parametrize(
    ("said", "words", "mend"),
    [
        (OF_TORCHSCRIPT, f"Cores 0: RuntimeError: {REASON}. Mend", "name other cores"),
        ("PytorchStreamReader failed\nat x", "RuntimeError: PytorchStreamReader failed", "delete"),
    ],
)
def test_the_reason_of_a_failed_load_is_told(
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    words: str,
    mend: str,
) -> None:
    from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM

    def load(*_: object) -> None:
        raise RuntimeError(said)

    options = engine_options(tmp_path / "artifacts")
    compiled(llama_folder, options)
    monkeypatch.setattr(NeuronBaseForCausalLM, "load", load)
    with pytest.raises(ConfigError) as refused, opened(llama_folder, options):
        pass
    assert words in refused.value.message
    assert mend in refused.value.message


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_seeded_draws_are_those_of_the_cpu(
    backend: NeuronBackend, llama_folder: Path, temperature: float
) -> None:
    fields = {"temperature": temperature, "seed": 7, "top_p": 0.9}
    requests = [request_of(40, 3, **fields), request_of(77, 0, **fields)]
    run(backend, requests)
    for request in requests:
        assert request.generated == cpu_tokens(llama_folder, request.num_prompt, **fields)


def test_a_row_does_not_depend_on_who_shares_the_step(backend: NeuronBackend) -> None:
    assert backend.numerics is not None
    together = [request_of(n, slot) for slot, n in enumerate((200, 30, 129))]
    run(backend, together)
    alone = request_of(30, 3)
    run(backend, [alone])
    assert alone.generated == together[1].generated


def test_with_several_graphs_for_decode_nothing_is_said_of_rounding(
    llama_folder: Path, artifacts: Path
) -> None:
    options = engine_options(artifacts, neuron_decode_buckets=("64", "128"))
    with opened(llama_folder, options) as backend:
        assert backend.numerics is None
        request = request_of(40, 1)  # crosses from one graph to the next
        run(backend, [request])
    assert request.generated == cpu_tokens(llama_folder, 40)


# Replay, and KV that comes from elsewhere.


def test_a_replay_gives_what_decode_gave_bit_for_bit(backend: NeuronBackend) -> None:
    request = request_of(60, 1)
    run(backend, [request])
    pool = pool_of(backend)
    pool.to_host(BlockId(1), request.num_computed)
    kv = torch.clone(backend.pool.tensor()[1, :, :, :, : request.num_computed])
    again = make_request(request.prompt_ids, [3], given=request.generated[:-1])
    again.generated = request.generated[:-1]
    logits = []
    while again.num_computed < again.num_prefilled:
        chunk = PrefillChunk.next_of(again, 7 if again.num_computed else CHUNK)
        logits.append(backend.prefill(chunk))
        chunk.mark_computed()
    assert [row is None for row in logits] == [True] * (len(logits) - 1) + [False]
    assert int(logits[-1].argmax()) == request.generated[-1]
    pool.to_host(BlockId(3), again.num_computed)
    assert torch.equal(backend.pool.tensor()[3, :, :, :, : again.num_computed], kv)


@pytest.mark.parametrize("has_handles", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_kv_that_came_by_way_of_the_mirror_is_decoded(
    llama_folder: Path,
    artifacts: Path,
    transposed: bool,
    has_handles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a decode worker has it: the mirror was filled by a transfer, the device knows nothing."""
    if not has_handles:  # as on public SDKs: bytes move by the tensors' own methods
        from stand_in.device_tensor import DeviceTensor

        monkeypatch.delattr(DeviceTensor, "nrt_tensor")
    options = engine_options(artifacts, tp=4, neuron_k_transposed=transposed)
    with opened(llama_folder, options) as backend:
        pool, request, other = pool_of(backend), request_of(60, 0), request_of(90, 2)
        assert all((each.nrt is not None) == has_handles for each in pool.device.tensors)
        prefill(backend, request, CHUNK)
        prefill(backend, other, CHUNK)
        for source, target, each in ((0, 3, request), (2, 1, other)):
            pool.to_host(BlockId(source), each.num_computed)
            pool.view(BlockId(target))[:] = pool.view(BlockId(source))
            pool.retire([BlockId(source)])
            each.block_ids = [BlockId(target)]
            assert not pool.is_on_device(BlockId(target))
        while len(request.generated) < NUM_TOKENS:
            decode(backend, request, other)
        assert pool.is_on_device(BlockId(3))
        assert pool.is_on_device(BlockId(1))
    assert request.generated == cpu_tokens(llama_folder, 60)
    assert other.generated == cpu_tokens(llama_folder, 90)


def test_a_slot_is_on_the_device_until_its_request_ends(backend: NeuronBackend) -> None:
    request, pool = request_of(40, 2), pool_of(backend)
    prefill(backend, request, CHUNK)
    assert pool.is_on_device(BlockId(2))
    pool.retire([BlockId(2)])
    assert not pool.is_on_device(BlockId(2))


def test_idle_slots_keep_their_kv(backend: NeuronBackend) -> None:
    """While others are decoded: they may be pulled, or received into, at that time."""
    parked, running = request_of(200, 0), request_of(30, 2)
    prefill(backend, parked, CHUNK)
    prefill(backend, running, CHUNK)
    pool = pool_of(backend)
    pool.to_host(BlockId(0), 200)
    before = bytes(pool.view(BlockId(0)))
    for _ in range(5):
        decode(backend, running)
    pool.view(BlockId(0))[:] = bytes(len(before))
    pool.to_host(BlockId(0), 200)
    assert bytes(pool.view(BlockId(0))) == before


def test_a_block_that_is_a_whole_context_is_not_copied(backend: NeuronBackend) -> None:
    """Nor is the mirror, in which its KV need not be."""
    before = backend.pool.tensor().clone()
    with pytest.raises(LocalProtocolError, match="a whole context"):
        backend.copy_blocks([BlockId(0)], [BlockId(1)])
    assert torch.equal(backend.pool.tensor(), before)
