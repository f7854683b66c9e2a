"""A backend of several processes: the same answers, and the same end, whatever happens to one."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from backend_kit import BLOCK_SIZE, decode, make_request, opened, prefill, random_prompt
from torch import Tensor

from neuron_di.backends import Backend, BackendOptions, open_backend, tensor_parallel
from neuron_di.backends.cpu_numerics import torch_rounding
from neuron_di.backends.tensor_parallel import TensorParallelBackend
from neuron_di.clock import Deadline, sleep_s
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.errors import BackendLost, CheckpointError, ConfigError
from neuron_di.models import ModelSpec
from neuron_di.request import Request
from neuron_di.testing import write_random_checkpoint
from neuron_di.types import BlockId, Incarnation

BLOCKS, OTHERS = [9, 2, 11, 3, 7, 0], [1, 4, 6, 8, 10, 12]
NUM_TOKENS = 12


@contextmanager
def ranks(folder: Path, num_ranks: int = 2, **options: Any) -> Iterator[TensorParallelBackend]:
    with opened(folder, num_ranks=num_ranks, num_blocks=20, **options) as backend:
        yield cast("TensorParallelBackend", backend)


@pytest.fixture(scope="module")
def two(llama_folder: Path) -> Iterator[TensorParallelBackend]:
    """Two ranks. Each test may write to any block, and leaves them able to go on."""
    with ranks(llama_folder) as backend:
        yield backend


def generate(backend: Backend, request: Request, num_tokens: int = NUM_TOKENS) -> list[Tensor]:
    """Greedy tokens, one request alone. The logits of each decode step."""
    prefill(backend, request, chunk_tokens=32)
    return [decode(backend, request)[0] for _ in range(num_tokens - 1)]


def kv_of(backend: Backend, block_ids: Sequence[int]) -> list[Tensor]:
    """A request's KV at each rank, copied."""
    return [
        backend.pool.tensor(rank)[list(block_ids)].clone()
        for rank in range(backend.layout.num_ranks)
    ]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pids: Sequence[int], timeout_s: float = 30.0) -> None:
    deadline = Deadline.after(timeout_s)
    while not all(is_gone(pid) for pid in pids):
        assert not deadline.has_passed(), f"processes are left of {pids}"
        sleep_s(0.01)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tokens_and_kv_are_those_of_one_process(llama_folder: Path, num_ranks: int) -> None:
    """Two KV heads: with four ranks, two of them hold the same one, each in its own place."""
    prompt_ids = random_prompt(70)
    with opened(llama_folder, num_blocks=20, use_kernels=False) as single:
        one = make_request(prompt_ids, BLOCKS)
        expected = generate(single, one)
        (whole_kv,) = kv_of(single, BLOCKS)
    with ranks(llama_folder, num_ranks) as backend:
        assert backend.numerics == f"cpu float32 {torch_rounding()} threads=1 tp={num_ranks}"
        request = make_request(prompt_ids, BLOCKS)
        logits = generate(backend, request)
        kv = kv_of(backend, BLOCKS)
    assert request.generated == one.generated
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected), atol=2e-4, rtol=0)
    for rank, own in enumerate(kv):
        heads = list(backend.layout.heads_of(rank))
        torch.testing.assert_close(own, whole_kv[:, :, :, heads], atol=1e-4, rtol=0, equal_nan=True)


def test_a_row_does_not_depend_on_who_shares_the_step(two: TensorParallelBackend) -> None:
    alone = make_request(random_prompt(40), BLOCKS)
    expected = generate(two, alone)
    first, second = make_request(random_prompt(40), BLOCKS), make_request(random_prompt(9), OTHERS)
    prefill(two, first, chunk_tokens=32)
    prefill(two, second)
    for row in expected:
        assert torch.equal(decode(two, second, first)[1], row)
    assert first.generated == alone.generated


def test_a_replay_is_bit_for_bit_what_decode_made(two: TensorParallelBackend) -> None:
    request = make_request(random_prompt(40), BLOCKS)
    logits = generate(two, request)
    kv = kv_of(two, BLOCKS)
    for rank in range(2):
        two.pool.tensor(rank).fill_(float("nan"))
    again = make_request(random_prompt(40), BLOCKS, given=request.generated[:-1])
    again.generated.extend(request.generated[:-1])
    last = None
    layers: list[int] = []
    while again.num_computed < again.num_prefilled:
        chunk = PrefillChunk.next_of(again, 32)
        last = two.prefill(chunk, lambda layer, _: layers.append(layer))
        chunk.mark_computed()
    assert last is not None
    assert torch.equal(last, logits[-1])
    for before, after in zip(kv, kv_of(two, BLOCKS), strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num())
        assert torch.equal(before.isnan(), after.isnan())
    assert layers[-3:] == [0, 1, 2]


def test_after_a_layer_the_kv_of_every_rank_is_there(two: TensorParallelBackend) -> None:
    request = make_request(random_prompt(BLOCK_SIZE), [5])
    for rank in range(2):
        two.pool.tensor(rank).fill_(float("nan"))
    seen: list[tuple[int, list[int]]] = []

    def after_layer(layer: int, blocks: Sequence[BlockId]) -> None:
        for rank in range(2):
            assert not two.pool.tensor(rank)[5, layer].isnan().any()
        seen.append((layer, list(blocks)))

    two.prefill(PrefillChunk.next_of(request, 64), after_layer)
    assert seen == [(layer, [5]) for layer in range(3)]


def test_a_hook_that_fails_stops_its_request_only(two: TensorParallelBackend) -> None:
    request = make_request(random_prompt(70), BLOCKS)

    def fail(*_: object) -> None:
        raise ValueError("a hook's own fault")

    chunk = PrefillChunk.next_of(request, 128)
    with pytest.raises(ValueError, match="own fault"):
        two.prefill(chunk, after_layer=fail)
    with pytest.raises(ValueError, match="own fault"):
        two.prefill(chunk, read_logits=fail)
    rows: list[Tensor] = []
    last = two.prefill(chunk, read_logits=lambda _, logits: rows.append(logits.clone()))
    assert last is not None
    assert torch.cat(rows).shape == (70, two.num_vocab)
    torch.testing.assert_close(rows[-1][-1], last, atol=1e-4, rtol=0)


def test_another_pool_takes_the_place_of_the_first(llama_folder: Path) -> None:
    with ranks(llama_folder) as backend:
        request = make_request(random_prompt(40), BLOCKS)
        generate(backend, request)
        (pid,) = backend.rank_pids
        backend.close_pool()
        assert "neuron-di-kv" not in Path(f"/proc/{pid}/maps").read_text()
        backend.open_pool(5, Incarnation("b" * 32))
        assert backend.pool.num_blocks == 5
        again = make_request(random_prompt(40), [4, 1, 3, 0])
        generate(backend, again)
        assert again.generated == request.generated
        (first, second) = kv_of(backend, [4])
        assert not torch.equal(first, second)


def test_a_pool_for_which_memory_lacks_at_this_end_leaves_the_ranks_in_step(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were told to open it already, and their answer must not be taken for a later one."""
    with ranks(llama_folder) as backend:
        request = make_request(random_prompt(40), BLOCKS)
        generate(backend, request)
        backend.close_pool()
        with monkeypatch.context() as patch:
            patch.setattr(backend._model, "bind", _out_of_memory)
            with pytest.raises(RuntimeError, match="not enough memory"):
                backend.open_pool(5, Incarnation("b" * 32))
        for incarnation in "cd":
            backend.open_pool(100, Incarnation(incarnation * 32))
            again = make_request(random_prompt(40), BLOCKS)
            generate(backend, again)
            assert again.generated == request.generated
            backend.close_pool()


def _out_of_memory(*_: object) -> None:
    raise RuntimeError("not enough memory")


def test_a_rank_does_not_get_the_keys_of_whoever_started_it(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_NEURON_DI", "an-operators-key")
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL", "WARN")
    with ranks(llama_folder) as backend:
        (pid,) = backend.rank_pids
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"NEURON_RT_LOG_LEVEL=WARN" in environment
    assert not [each for each in environment if each.startswith(b"KEY_")]


def test_nothing_is_left_at_the_end(llama_folder: Path) -> None:
    fds = sorted(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with ranks(llama_folder, 4) as backend:
        pids = backend.rank_pids
        assert len(pids) == 3
        backend.close_pool()  # as before a change of role that does not come
    assert all(is_gone(pid) for pid in pids)
    assert threading.active_count() == threads
    assert sorted(os.listdir("/proc/self/fd")) == fds


def test_the_death_of_a_rank_is_told_at_once_and_ends_the_others(llama_folder: Path) -> None:
    with ranks(llama_folder, 4) as backend:
        told, lost = threading.Event(), []

        def on_lost(error: BackendLost) -> None:
            lost.append(error.message)
            told.set()

        backend.watch(on_lost)
        os.kill(backend.rank_pids[1], signal.SIGKILL)
        assert told.wait(30), "nobody was told"
        assert lost == ["the tensor-parallel ranks are lost: rank 2 was ended by signal 9"]
        wait_gone(backend.rank_pids)
        with pytest.raises(BackendLost, match="rank 2 was ended by signal 9"):
            generate(backend, make_request(random_prompt(40), BLOCKS))
        backend.watch(on_lost)  # whoever asks later is told, too
        assert len(lost) == 2


def test_a_rank_that_dies_in_a_step_fails_the_step(llama_folder: Path) -> None:
    with ranks(llama_folder) as backend:
        (pid,) = backend.rank_pids
        request = make_request(random_prompt(40), BLOCKS)

        def kill(_layer: int, _blocks: Sequence[BlockId]) -> None:
            os.kill(pid, signal.SIGKILL)

        with pytest.raises(BackendLost, match="rank 1 was ended by signal 9"):
            backend.prefill(PrefillChunk.next_of(request, 64), after_layer=kill)
        request.generated.append(1)
        with pytest.raises(BackendLost, match="rank 1 was ended by signal 9"):
            backend.decode(DecodeBatch((request,)))


def test_a_rank_that_hangs_is_given_up_in_time(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "_TENSOR_TIMEOUT_S", 5.0)
    with ranks(llama_folder) as backend:
        os.kill(backend.rank_pids[0], signal.SIGSTOP)
        with pytest.raises(BackendLost, match="a step failed"):
            generate(backend, make_request(random_prompt(40), BLOCKS))
        wait_gone(backend.rank_pids)


def test_an_order_that_cannot_be_carried_out_ends_the_ranks(two: TensorParallelBackend) -> None:
    """What the first rank refuses itself, before or after the others have begun with it."""
    with pytest.raises(BackendLost, match=r"a step failed: \w|rank 1 failed: \w"):
        two.decode(DecodeBatch((make_request_beyond(two),)))
    wait_gone(two.rank_pids)


def make_request_beyond(backend: Backend) -> Request:
    request = make_request(random_prompt(3), [backend.pool.num_blocks + 5])
    request.generated.append(1)
    request.num_computed = 3
    return request


def test_ranks_end_with_the_process_that_started_them(llama_folder: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from backend_kit import opened\n"
        "with opened(Path(sys.argv[1]), num_ranks=2, num_blocks=4) as backend:\n"
        "    print(*backend.rank_pids, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    kit = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(llama_folder), kit],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 1
        assert not is_gone(pids[0])
        parent.kill()
    wait_gone(pids)


def test_ranks_go_on_when_the_thread_that_loaded_them_is_over(llama_folder: Path) -> None:
    """A script may load its model on one thread, and ask it on another."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as loader:
        backend = loader.submit(stack.enter_context, ranks(llama_folder)).result()
        loader.shutdown()
        for _ in range(2):  # an end that was on its way has come by the second
            request = make_request(random_prompt(20), BLOCKS)
            generate(backend, request, 3)
            sleep_s(0.2)
        assert not any(is_gone(pid) for pid in backend.rank_pids)


def test_a_model_that_cannot_be_loaded_leaves_no_process(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama")
    weights = tmp_path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    before = psutil.Process().children()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"), ranks(tmp_path):
        pass
    assert psutil.Process().children() == before


def test_a_model_that_cannot_be_divided_is_refused(llama_folder: Path) -> None:
    spec = ModelSpec.from_folder(llama_folder)
    options = BackendOptions(
        folder=llama_folder,
        spec=spec,
        layout=spec.kv_layout(block_size=16, dtype="float32", num_ranks=8),
        num_blocks=1,
        incarnation=Incarnation("a" * 32),
        num_threads=1,
    )
    with pytest.raises(ConfigError, match="--tp 8 does not divide"):
        open_backend("cpu", options)
