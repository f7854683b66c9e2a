"""Greedy output is the same, token for token, from 1P1D, one process and Hugging Face."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai_kit import Answer, Client, gather
from oracle_kit import Greedy, Oracle, TextPrompt
from process_kit import running_fleet

from neuron_di.llm import LLM, Generation
from neuron_di.wire import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

NUM_TOKENS = 20
_TIES_ALLOWED = 0.01  # of all answers; none is expected


@dataclass(frozen=True, slots=True)
class Judged:
    """A checkpoint's prompts and what must come of them."""

    folder: Path
    oracle: Oracle
    prompts: list[TextPrompt]
    expected: list[Greedy]


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def judged(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Judged:
    folder = checkpoint(request.param)
    oracle = Oracle(folder)
    prompts = oracle.prompts(seed=7)
    expected = [oracle.greedy(prompt.ids, NUM_TOKENS) for prompt in prompts]
    return Judged(folder, oracle, prompts, expected)


@pytest.fixture(scope="module")
def one_process(judged: Judged) -> list[Generation]:
    """What the one-process engine makes of the prompts, all in one batch."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(judged.folder), threads=1) as llm:
        return llm.generate([prompt.ids for prompt in judged.prompts], sampling)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def one_p_one_d(judged: Judged) -> AsyncIterator[Client]:
    async with running_fleet(judged.folder) as client:
        yield client


async def test_one_process_equals_hugging_face(
    judged: Judged, one_process: list[Generation]
) -> None:
    ties = Ties()
    for generation, expected in zip(one_process, judged.expected, strict=True):
        labels = [judged.oracle.label(token_id) for token_id in generation.token_ids]
        ties.compare(labels, generation.text, expected)
    ties.check()


async def test_1p1d_equals_both(
    judged: Judged, one_process: list[Generation], one_p_one_d: Client
) -> None:
    """Each prompt on both endpoints, streaming and not, as text and as ids, among others."""
    cases = [
        (index, ask)
        for index, prompt in enumerate(judged.prompts)
        for ask in _asks(one_p_one_d, prompt, index)
    ]
    before = (await one_p_one_d.until_idle())["decode-0"]["num_steps"]
    answers = await gather(*(ask() for _, ask in cases))
    after = (await one_p_one_d.until_idle())["decode-0"]["num_steps"]

    ties = Ties()
    for (index, _), answer in zip(cases, answers, strict=True):
        _check_answer(answer, judged.prompts[index])
        # Bit for bit the same computation, whoever shares the batch: no tie excuses anything.
        ours = [judged.oracle.label(token_id) for token_id in one_process[index].token_ids]
        assert (answer.labels, answer.text) == (ours, one_process[index].text)
        ties.compare(answer.labels, answer.text, judged.expected[index])
    ties.check()
    num_decoded = len(cases) * (NUM_TOKENS - 1)
    assert after - before < num_decoded, "no step served two requests"


@pytest.mark.parametrize("judged", ["qwen3"], indirect=True)
async def test_2p3d_equals_both(judged: Judged, one_process: list[Generation]) -> None:
    async with running_fleet(judged.folder, prefill=2, decode=3) as client:
        asks = []
        for index, prompt in enumerate(judged.prompts):
            possible = _asks(client, prompt, index)
            asks.append(possible[index % len(possible)])
        answers = await gather(*(ask() for ask in asks))
        await client.until_idle()
        receipts = [await client.receipt(answer.answer_id) for answer in answers]
    ties = Ties()
    for index, answer in enumerate(answers):
        _check_answer(answer, judged.prompts[index])
        ours = [judged.oracle.label(token_id) for token_id in one_process[index].token_ids]
        assert (answer.labels, answer.text) == (ours, one_process[index].text)
        ties.compare(answer.labels, answer.text, judged.expected[index])
    ties.check()
    for receipt in receipts:
        assert receipt["prefill"]["worker_id"] == receipt["prefill_worker"]
        assert receipt["decode"]["worker_id"] == receipt["decode_worker"]
        assert (receipt["link"], receipt["kv_bytes"]) == ("handover", 0)
    assert {receipt["prefill_worker"] for receipt in receipts} == {"prefill-0", "prefill-1"}
    decodes = {receipt["decode_worker"] for receipt in receipts}
    assert decodes == {"decode-0", "decode-1", "decode-2"}


class Ties:
    """Compares with Hugging Face, and counts where the two best tokens were all but equal."""

    def __init__(self) -> None:
        self._num_compared = 0
        self._num_ties = 0

    def compare(self, labels: list[str], text: str, expected: Greedy) -> None:
        self._num_compared += 1
        if labels == expected.labels:
            assert text == expected.text
            return
        pairs = zip(labels, expected.labels, strict=True)
        first = next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
        assert expected.is_tie[first], f"token {first}: {labels} instead of {expected.labels}"
        self._num_ties += 1

    def check(self) -> None:
        assert self._num_ties <= _TIES_ALLOWED * self._num_compared


def _asks(client: Client, prompt: TextPrompt, index: int) -> list[Callable[[], Awaitable[Answer]]]:
    """The ways to ask for one prompt: prompts that are no chat have no messages."""
    params: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    forms = [prompt.text, prompt.ids] if index % 2 else [prompt.ids, prompt.text]
    asks = [
        lambda: client.ask(forms[0], **params),
        lambda: client.ask(forms[1], stream=True, **params),
    ]
    if prompt.messages is not None:
        messages = prompt.messages
        asks.append(lambda: client.ask(messages, **params))
        asks.append(lambda: client.ask(messages, stream=True, **params))
    return asks


def _check_answer(answer: Answer, prompt: TextPrompt) -> None:
    assert answer.usage["prompt_tokens"] == len(prompt.ids)
    assert answer.usage["completion_tokens"] == NUM_TOKENS
    assert answer.finish_reason == "length"
