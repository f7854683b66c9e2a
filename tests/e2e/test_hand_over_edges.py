"""Where an answer ends or is cut right at the hand-over from prefill to decode."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from openai_kit import Answer, Client, gather
from oracle_kit import Greedy, Oracle
from process_kit import running_fleet
from safetensors.torch import load_file, save_file

from neuron_di.testing import write_random_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

CHAT = [{"role": "user", "content": "Tell me about blocks."}]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def words(oracle: Oracle) -> tuple[list[int], Greedy]:
    """A prompt whose greedy answer begins with two tokens of two plain characters or more."""
    for first in range(3, 400):
        greedy = oracle.greedy([first, first + 1], NUM_TOKENS)
        if all(
            len(label) >= 2 and label.isascii() and "\\" not in label for label in greedy.labels[:2]
        ):
            return [first, first + 1], greedy
    raise AssertionError("no prompt was found")


# Answers of one token: the decode worker hears that there is nothing to do, and does nothing.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["def main(", CHAT])
async def test_max_tokens_1(llama_1p1d: Client, prompt: Any, stream: bool) -> None:
    longer = await llama_1p1d.ask(prompt, max_tokens=4, ignore_eos=True)
    steps = (await llama_1p1d.until_idle())["decode-0"]["num_steps"]
    answer = await llama_1p1d.ask(prompt, max_tokens=1, ignore_eos=True, stream=stream)
    assert answer.labels == longer.labels[:1]
    assert answer.finish_reason == "length"
    await _check_no_decode(llama_1p1d, answer, steps)


@pytest.mark.parametrize("stream", [False, True])
async def test_first_token_is_a_stop_id(
    llama_1p1d: Client, words: tuple[list[int], Greedy], stream: bool
) -> None:
    prompt, greedy = words
    steps = (await llama_1p1d.until_idle())["decode-0"]["num_steps"]
    answer = await llama_1p1d.ask(
        prompt, max_tokens=9, stop_token_ids=[greedy.ids[0]], stream=stream
    )
    assert (answer.text, answer.finish_reason) == ("", "stop")
    await _check_no_decode(llama_1p1d, answer, steps)


async def test_second_token_is_a_stop_id(
    llama_1p1d: Client, words: tuple[list[int], Greedy]
) -> None:
    prompt, greedy = words
    answer = await llama_1p1d.ask(
        prompt, max_tokens=9, ignore_eos=True, stop_token_ids=[greedy.ids[1]], stream=True
    )
    assert (answer.text, answer.finish_reason) == (greedy.labels[0], "stop")
    assert answer.usage["completion_tokens"] == 2


# Stop strings: found wherever they lie, and nothing of them is ever sent.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("cut", "num_tokens"),
    [
        (lambda first, _: first[1:], 1),
        (lambda first, _: first, 1),
        (lambda first, second: first[-1] + second[0], 2),
        (lambda first, second: first + second, 2),
        (lambda _, second: second, 2),
    ],
    ids=["in-token-0", "all-of-token-0", "across", "both", "in-token-1"],
)
async def test_stop_string_at_the_hand_over(
    llama_1p1d: Client,
    words: tuple[list[int], Greedy],
    cut: Callable[[str, str], str],
    num_tokens: int,
    stream: bool,
) -> None:
    prompt, greedy = words
    stop = cut(greedy.labels[0], greedy.labels[1])
    answer = await llama_1p1d.ask(
        prompt, max_tokens=NUM_TOKENS, ignore_eos=True, stop=stop, stream=stream
    )
    assert answer.text == greedy.text[: greedy.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.usage["completion_tokens"] == num_tokens


async def test_stop_string_in_the_middle(
    llama_1p1d: Client, words: tuple[list[int], Greedy]
) -> None:
    prompt, greedy = words
    stop = greedy.text[len(greedy.text) // 2 :][:3]
    answer = await llama_1p1d.ask(
        prompt, max_tokens=NUM_TOKENS, ignore_eos=True, stop=["never said", stop], stream=True
    )
    assert answer.text == greedy.text[: greedy.text.index(stop)]
    assert answer.finish_reason == "stop"


async def test_stop_string_that_only_begins_is_sent_after_all(
    llama_1p1d: Client, words: tuple[list[int], Greedy]
) -> None:
    prompt, greedy = words
    stop = greedy.labels[0] + "\0"
    answer = await llama_1p1d.ask(
        prompt, max_tokens=NUM_TOKENS, ignore_eos=True, stop=stop, stream=True
    )
    assert answer.pieces[0] == "", "token 0 is held back by the prefill worker"
    assert answer.pieces[1].startswith(greedy.labels[0]), "and sent by the decode worker"
    assert (answer.text, answer.finish_reason) == (greedy.text, "length")


async def test_logprobs_are_hugging_faces(
    llama_1p1d: Client, words: tuple[list[int], Greedy], oracle: Oracle
) -> None:
    prompt, greedy = words
    for stream in (False, True):
        answer = await llama_1p1d.ask(prompt, max_tokens=3, ignore_eos=True, stream=stream, top=3)
        best = greedy.logprobs_0.topk(3)
        labels = [oracle.label(token_id) for token_id in best.indices.tolist()]
        assert set(answer.tops[0]) == set(labels)
        assert answer.logprobs[0] == pytest.approx(best.values[0].item(), abs=1e-4)
        for label, logprob in zip(labels, best.values.tolist(), strict=True):
            assert answer.tops[0][label] == pytest.approx(logprob, abs=1e-4)
        assert len(answer.tops) == 3


# A model that says single bytes: nearly every answer is cut within a character.


@pytest.fixture(scope="module")
def byte_speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokens are the bytes that lead two or continue any: 0xC2 to 0xDF, 0x80 to 0xBF."""
    folder = tmp_path_factory.mktemp("checkpoints") / "byte-speaker"
    write_random_checkpoint(folder, "llama")
    oracle = Oracle(folder)
    spoken = {bytes([byte]) for byte in (*range(0x80, 0xC0), *range(0xC2, 0xE0))}
    tensors = load_file(folder / "model.safetensors")
    is_spoken = [oracle.token_bytes(token) in spoken for token in range(oracle.num_vocab)]
    tensors["lm_head.weight"] *= torch.tensor(is_spoken).unsqueeze(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # What it says first to [3] ends every answer.
    first = Oracle(folder).greedy([3], 1).ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *first]}))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def byte_1p1d(byte_speaker: Path) -> AsyncIterator[Client]:
    async with running_fleet(byte_speaker) as client:
        yield client


async def test_half_a_character_at_the_hand_over(byte_speaker: Path, byte_1p1d: Client) -> None:
    oracle = Oracle(byte_speaker)
    prompts = [[token, token + 7] for token in range(3, 53)]
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    whole = await gather(*(byte_1p1d.ask(prompt, **params) for prompt in prompts))
    streamed = await gather(*(byte_1p1d.ask(prompt, stream=True, **params) for prompt in prompts))
    num_completed = num_broken = 0
    for prompt, one, other in zip(prompts, whole, streamed, strict=True):
        greedy = oracle.greedy(prompt, NUM_TOKENS)
        assert one.labels == other.labels == greedy.labels
        said = [oracle.token_bytes(token) for token in greedy.ids]
        text = b"".join(said).decode("utf-8", "replace")
        assert one.text == other.text == text == greedy.text
        if said[0][0] >= 0xC2:
            assert other.pieces[0] == "", "half a character is not sent"
            num_completed += said[1][0] < 0xC0
            num_broken += said[1][0] >= 0xC2
    assert num_completed > 0, "no character was completed by the decode worker"
    assert num_broken > 0, "no half of a character stayed half"


async def test_stop_string_of_a_character_that_was_cut(
    byte_speaker: Path, byte_1p1d: Client
) -> None:
    oracle = Oracle(byte_speaker)
    for token in range(3, 103):
        greedy = oracle.greedy([token, token + 7], 2)
        if "\N{REPLACEMENT CHARACTER}" not in greedy.text:
            break
    assert len(greedy.text) == 1
    for stream in (False, True):
        answer = await byte_1p1d.ask(
            [token, token + 7], max_tokens=9, ignore_eos=True, stop=greedy.text, stream=stream
        )
        assert (answer.text, answer.finish_reason) == ("", "stop")
        assert answer.usage["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_first_token_is_eos(byte_1p1d: Client, stream: bool) -> None:
    steps = (await byte_1p1d.until_idle())["decode-0"]["num_steps"]
    answer = await byte_1p1d.ask([3], max_tokens=9, stream=stream)
    assert (answer.text, answer.finish_reason) == ("", "stop")
    await _check_no_decode(byte_1p1d, answer, steps)


async def _check_no_decode(client: Client, answer: Answer, steps_before: int) -> None:
    """The answer is one token, the decode worker computed nothing, and nobody holds a block."""
    assert answer.usage["completion_tokens"] == 1
    load = await client.until_idle()
    assert load["decode-0"]["num_steps"] == steps_before
    receipt = await client.receipt(answer.answer_id)
    assert receipt["decode"] is None
    assert receipt["kv_bytes"] == 0
    assert receipt["num_generated"] == 1
