"""What token 0 tells of the prompt, against transformers' log-softmax."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import Rig, of
from transformers import AutoModelForCausalLM

from neuron_di.engine import Broken, Emitted, PrefillParked
from neuron_di.engine.prompt_scores import _rank
from neuron_di.request import PromptWish
from neuron_di.testing import write_random_checkpoint
from neuron_di.wire import PromptReport, Token

PROMPT = [(7 * n) % 1900 + 100 for n in range(75)]
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores") / request.param
    write_random_checkpoint(folder, request.param)
    return folder


@pytest.fixture
def open_rigs() -> Iterator[list[Rig]]:
    rigs: list[Rig] = []
    yield rigs
    for rig in rigs:
        rig.backend.close()


def first_token(rig: Rig, wish: PromptWish | None, prompt: list[int] = PROMPT) -> Token:
    request = rig.request("r", prompt, max_tokens=2, logprobs=3, ignore_eos=True)
    request.prompt_wish = wish
    rig.engine.submit(request)
    for _ in range(100):
        events = of(rig.turn(), "r")
        if events:
            break
    assert isinstance(events[0], Emitted)
    if any(isinstance(event, PrefillParked) for event in events):
        rig.engine.release(request.key)
    rest = rig.turn_until_idle()
    assert all(e.token.prompt is None for e in rest if isinstance(e, Emitted))
    return events[0].token


def watch_rows(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of logits of each projection on the vocabulary from now on."""
    rows: list[int] = []
    transformer = rig.backend._transformer
    project = transformer._logits

    def watch(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.numel() // hidden.shape[-1])
        return project(hidden)

    monkeypatch.setattr(transformer, "_logits", watch)
    return rows


@pytest.mark.parametrize("role", ["prefill", "both"])
@pytest.mark.parametrize("chunk", [8, 40, 512])
def test_logprobs_equal_transformers(
    family_folder: Path, open_rigs: list[Rig], role: str, chunk: int
) -> None:
    open_rigs.append(rig := Rig(family_folder, role, chunk=chunk))
    token = first_token(rig, PromptWish("the text", 4))
    report = token.prompt
    assert report is not None
    assert (report.text, report.token_ids) == ("the text", PROMPT)
    assert report.logprobs is not None
    assert report.logprobs[0] is None
    assert len(report.logprobs) == len(PROMPT)

    model = AutoModelForCausalLM.from_pretrained(family_folder, dtype=torch.float32)
    with torch.inference_mode():
        expected_TV = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    for place, scores in enumerate(report.logprobs[1:], 1):
        assert scores is not None
        row_V = expected_TV[place - 1]
        assert scores.chosen.token_id == PROMPT[place]
        assert scores.chosen.logprob == pytest.approx(float(row_V[PROMPT[place]]), abs=TOLERANCE)
        assert scores.chosen.text == rig.tokenizer.token_text(PROMPT[place])
        tied = (row_V - row_V[PROMPT[place]]).abs() <= TOLERANCE
        above = int((row_V > row_V[PROMPT[place]]).sum())
        assert scores.rank is not None
        assert abs(scores.rank - 1 - above) < int(tied.sum())
        for rank, top in enumerate(scores.top, 1):
            assert top.token_id != PROMPT[place] or scores.rank == rank
        best = row_V.topk(4)
        assert [top.logprob for top in scores.top] == pytest.approx(
            best.values.tolist(), abs=TOLERANCE
        )
        for top in scores.top:
            assert top.logprob == pytest.approx(float(row_V[top.token_id]), abs=TOLERANCE)
            assert bytes(top.token_bytes) == rig.tokenizer.token_bytes(top.token_id)
    assert token.logprobs is not None  # the first token's own are as ever
    assert token.logprobs.chosen.logprob == pytest.approx(
        float(expected_TV[-1, token.token_id]), abs=TOLERANCE
    )


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_a_report_changes_nothing_else(
    family_folder: Path, open_rigs: list[Rig], role: str
) -> None:
    open_rigs.append(rig := Rig(family_folder, role, chunk=32))
    told, plain = first_token(rig, PromptWish("", 2)), first_token(rig, None)
    assert plain.prompt is None
    assert (told.token_id, told.logprobs) == (plain.token_id, plain.logprobs)  # bit for bit


def test_without_logprobs_no_logits_are_made(make_rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig("both", chunk=16)
    rows = watch_rows(rig, monkeypatch)
    token = first_token(rig, PromptWish("text"))
    assert token.prompt == PromptReport(text="text", token_ids=PROMPT)
    assert rows == [1], "the last position's only"
    unasked = first_token(rig, None)
    assert unasked.prompt is None
    assert rows == [1, 1]


def test_a_long_chunks_logits_are_made_a_few_rows_at_a_time(
    make_rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("both", chunk=512)
    rows = watch_rows(rig, monkeypatch)
    first_token(rig, PromptWish("text", 0))
    assert rows == [32, 32, 11, 1]


def test_a_prompt_of_one_token_has_no_logprobs(make_rig) -> None:
    rig = make_rig("prefill")
    report = first_token(rig, PromptWish("x", 5), [7]).prompt
    first = list(rig.tokenizer.token_bytes(7))
    assert report == PromptReport(text="x", token_ids=[7], logprobs=[None], first_bytes=first)


def test_probabilities_of_a_position_sum_to_one(make_rig) -> None:
    report = first_token(make_rig("both"), PromptWish("", 2048), PROMPT[:3]).prompt
    assert report is not None
    assert report.logprobs is not None
    for scores in report.logprobs[1:]:
        assert scores is not None
        assert sum(math.exp(top.logprob) for top in scores.top) == pytest.approx(1, abs=1e-3)


def test_a_request_that_fails_tells_nothing(make_rig) -> None:
    rig = make_rig("both")
    request = rig.request("r", PROMPT)
    request.prompt_wish = PromptWish("", 1)
    rig.backend.failures.append(RuntimeError("x"))
    rig.engine.submit(request)
    (event,) = rig.turn_until_idle()
    assert isinstance(event, Broken)


def test_an_answer_that_begins_in_reasoning_says_so_once(make_rig) -> None:
    rig = make_rig("both")
    request = rig.request("r", max_tokens=3, ignore_eos=True)
    request.begins_in_reasoning = True
    rig.engine.submit(request)
    tokens = [e.token for e in rig.turn_until_idle() if isinstance(e, Emitted)]
    assert [token.in_reasoning for token in tokens] == [True, False, False]


def test_of_equal_tokens_the_lower_id_ranks_first() -> None:
    row_V = np.array([1.0, 3.0, 2.0, 3.0, 2.0], dtype=np.float32)
    assert [_rank(row_V, token_id) for token_id in range(5)] == [5, 1, 3, 2, 4]
