"""The offline API: who may call it, and when."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from neuron_di import LLM, SamplingParams
from neuron_di.errors import BadRequest, ConfigError, LocalProtocolError

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [[1, 2, 3], [7] * 30, [5, 9], [11, 4, 6, 8]]


@pytest.fixture
def llm(llama_folder: Path) -> Iterator[LLM]:
    with LLM(str(llama_folder), threads=1, num_blocks=64, decode_batch=4) as llm:
        yield llm


def test_threads_get_their_own_answers(llm: LLM) -> None:
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
    together: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        together[index] = llm.generate(PROMPTS[index], GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together.get(index) for index in range(4)] == alone


def test_ids_may_be_another_librarys(llama_folder: Path) -> None:
    with LLM(str(llama_folder), threads=2, tp=2, num_blocks=64) as llm:  # told to another process
        (expected,) = llm.generate([[1, 2, 3]], GREEDY)
        alike = (np.array([1, 2, 3]), np.array([[1, 2, 3]]), [np.int64(1), 2, 3], iter([[1, 2, 3]]))
        for prompts in alike:
            (answer,) = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
            assert (answer.prompt_ids, answer.token_ids) == ([1, 2, 3], expected.token_ids)
            assert {type(token_id) for token_id in answer.prompt_ids} == {int}


@pytest.mark.parametrize("of_config", [None, 7, 2])
def test_what_the_tokenizer_names_as_the_end_ends_an_answer_too(
    llama_folder: Path, tmp_path: Path, of_config: int | None
) -> None:
    """As a model's that was tuned, and whose configuration is that of the one it was made of."""
    folder = tmp_path / "tuned"
    shutil.copytree(llama_folder, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": of_config}))
    with LLM(str(folder), threads=1, num_blocks=64) as llm:
        for eos_id in {of_config, 2} - {None}:
            bias = ((eos_id, 100.0),)
            (answer,) = llm.generate([1, 5], SamplingParams(max_tokens=9, logit_bias=bias))
            assert (answer.token_ids, answer.finish_reason) == ([eos_id], "stop")


@pytest.mark.parametrize("prompts", [
    [[1.5]], [["a"]], [None], [5, "a"], b"abc", [b"abc"], None, 5, {"a": "b"}, {"a"},
])  # fmt: skip
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: list[object]) -> None:
    with pytest.raises(BadRequest, match=r"a list of texts|is text or token ids"):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 20 / 2},
        {"min_tokens": 0.5},
        {"stop": "end"},
        {"stop_token_ids": 5},
        {"bad_words": "fox"},
        {"logit_bias": {5: 1.0}},
        {"temperature": "0"},
        {"seed": object()},
    ],
)
def test_a_parameter_of_another_type_is_refused_and_harms_no_other_call(
    llm: LLM, wrong: dict[str, object]
) -> None:
    (expected,) = llm.generate(PROMPTS[0], GREEDY)
    with pytest.raises(BadRequest, match="sampling"):
        llm.generate(PROMPTS[0], SamplingParams(**wrong))  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="sampling"):
        llm.generate(PROMPTS[0], wrong)  # type: ignore[arg-type]
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected.token_ids


def test_parameters_may_be_another_librarys_numbers_and_lists(llm: LLM) -> None:
    own = SamplingParams(temperature=0.5, max_tokens=9, seed=3, stop_token_ids=(5, 6))
    others = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(9),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
        stop_token_ids=[5, 6],  # type: ignore[arg-type]
    )
    (expected,), (answer,) = llm.generate(PROMPTS[0], own), llm.generate(PROMPTS[0], others)
    assert answer.token_ids == expected.token_ids


def test_a_pool_too_small_for_all_changes_no_answer(llama_folder: Path, llm: LLM) -> None:
    sampled = SamplingParams(temperature=0.9, max_tokens=60, ignore_eos=True, seed=5)
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, sampled)]
    texts = [answer.text for answer in llm.generate(PROMPTS, sampled)]
    room: dict[str, object] = {"num_blocks": 9, "decode_batch": 4, "reserve_tokens": 1}
    with LLM(str(llama_folder), threads=1, context_tokens=128, **room) as small:
        answers = small.generate(PROMPTS, sampled)
        assert small._num_requests > len(PROMPTS)  # somebody gave way
        assert [answer.token_ids for answer in answers] == expected
        assert [answer.text for answer in answers] == texts
        assert {answer.finish_reason for answer in answers} == {"length"}


def test_once_closed_it_answers_nobody(llama_folder: Path) -> None:
    llm = LLM(str(llama_folder), threads=1, num_blocks=64)
    llm.close()
    llm.close()
    with pytest.raises(LocalProtocolError, match="is closed"):
        llm.generate(PROMPTS[0], GREEDY)


@pytest.mark.parametrize("num_submitted", [0, 1, 2])
def test_who_is_interrupted_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, num_submitted: int
) -> None:
    expected = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    submit, requests = llm._engine.submit, []

    def interrupted(request: object) -> None:
        if len(requests) == num_submitted:
            raise KeyboardInterrupt
        requests.append(request)
        submit(request)  # type: ignore[arg-type]

    monkeypatch.setattr(llm._engine, "submit", interrupted)
    long = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:3], long)
    monkeypatch.undo()
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected
    assert not llm._engine._live


def test_a_copy_of_the_process_is_told_that_nobody_computes_there(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    with llm._lock:  # as while another thread's prompts are answered
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(30)
                llm.close()
                llm.generate(PROMPTS[0], GREEDY)
            except LocalProtocolError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected


def test_a_copy_of_the_process_makes_its_own_on_one_thread_only(llama_folder: Path) -> None:
    """OpenMP would wait for ever for the threads that did not come along."""

    def made(threads: int) -> list[int]:
        with LLM(str(llama_folder), threads=threads, num_blocks=64) as llm:
            return llm.generate(PROMPTS[0], GREEDY)[0].token_ids

    expected = made(2)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler waits for Python to run
            signal.alarm(30)
            with pytest.raises(ConfigError, match="`spawn`, or give threads=1"):
                made(2)
            code = 0 if made(1) == expected else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert made(2) == expected


def test_what_a_script_tells_torch_to_make_by_default_changes_nothing(
    llama_folder: Path, llm: LLM
) -> None:
    (expected,) = llm.generate(PROMPTS[1], GREEDY)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")  # as it may be a GPU
    try:
        with LLM(str(llama_folder), threads=1, num_blocks=64) as made_then:
            (answer,) = made_then.generate(PROMPTS[1], GREEDY)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert answer.token_ids == expected.token_ids


def test_what_it_does_not_give_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="no logprobs"):
        llm.generate(PROMPTS[0], SamplingParams(logprobs=2))


@pytest.mark.parametrize("name", ["decode_batch", "threads", "num_blocks", "waiting_max"])
def test_options_are_checked_as_flags_are(llama_folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        LLM(str(llama_folder), **{name: -1})
    with pytest.raises(ConfigError, match="decode_batch must be"):
        LLM(str(llama_folder), decode_batch=None)
    with pytest.raises(TypeError, match="decode_bach"):
        LLM(str(llama_folder), decode_bach=1)
    with pytest.raises(TypeError, match="'cuda'; the nearest"):  # a set of options is none itself
        LLM(str(llama_folder), cuda=3)
    with pytest.raises(ConfigError, match="--num-blocks and --kv-memory"):
        LLM(str(llama_folder), num_blocks=10, kv_memory="2GiB")
    with pytest.raises(ConfigError, match="neuron-decode-buckets"):
        LLM(str(llama_folder), neuron_decode_buckets=["9", "5"])


def test_a_script_that_ends_while_it_computes_ends_in_order(llama_folder: Path) -> None:
    """The interpreter breaks off what is left of its threads: one in torch would take all down."""
    script = (
        "import atexit, sys, threading\n"
        "from neuron_di import LLM, SamplingParams\n"
        "atexit.register(lambda: print(llm._engine._thread.is_alive()))\n"
        "llm = LLM(sys.argv[1], threads=1, num_blocks=256)\n"
        "ask = (list(range(300)), SamplingParams(max_tokens=3000, ignore_eos=True))\n"
        "threading.Thread(target=llm.generate, args=ask, daemon=True).start()\n"
        "while not llm._engine.num_steps: pass\n"
    )
    command = [sys.executable, "-c", script, str(llama_folder)]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, b"False\n"), ended.stderr
