"""The shipped checkpoint loads and tells the tale that was asked for, in its corpus's words."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).parents[3] / "examples" / "models"
CHECKPOINT = MODELS / "tiny-tales"
CHECKPOINT_BYTES_MAX = 8_000_000
ANSWER_TOKENS_MAX = 420
# The corpus as it is now: whoever changes it should train again, and say so here.
CORPUS_SHA256 = "3a32aebc432217d2ed30f1b4951c1ee140e74eb09b1548ebffd1ed23c8e09bde"


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(MODELS))
    return importlib.import_module("tales_chats")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[a-z']+", text.lower()))


def texts_of(document: Any) -> list[str]:
    return [document] if isinstance(document, str) else [turn["content"] for turn in document]


def answer(model: Any, tokenizer: Any, request: str) -> list[int]:
    """Return the greedy answer's token ids."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": request}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=ANSWER_TOKENS_MAX)
    return list(output[0, prompt["input_ids"].shape[1] :].tolist())


def test_a_seed_always_gives_the_same_corpus(corpus: Any) -> None:
    documents = list(islice(corpus.documents(2024), 300))
    assert hashlib.sha256(json.dumps(documents).encode()).hexdigest() == CORPUS_SHA256


def test_another_seed_gives_another_corpus(corpus: Any) -> None:
    assert list(islice(corpus.documents(1), 20)) != list(islice(corpus.documents(2), 20))


def test_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= CHECKPOINT_BYTES_MAX


def test_chat_template_marks_roles_and_asks_for_the_assistant(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "You tell tales."},
        {"role": "user", "content": " A fox, please. "},
        {"role": "assistant", "content": "Once."},
        {"role": "user", "content": "More."},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|system|>You tell tales.<|end|><|user|>A fox, please.<|end|>"
        "<|assistant|>Once.<|end|><|user|>More.<|end|><|assistant|>"
    )
    assert tokenizer.eos_token == "<|end|>"


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    text = "Zażółć gęślą 🦊\n\ttales — 物語"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("request_text", "asked_words"),
    [
        ("Tell me a story about a fox and a lantern.", {"fox", "lantern"}),
        ("Write a short story about a bear and a drum.", {"bear", "drum"}),
    ],
)
def test_greedy_answer_is_a_whole_tale_about_what_was_asked(
    model: Any, tokenizer: Any, corpus: Any, request_text: str, asked_words: set[str]
) -> None:
    ids = answer(model, tokenizer, request_text)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    known = {
        word
        for document in islice(corpus.documents(2024), 3000)
        for written in texts_of(document)
        for word in words_of(written)
    }
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) > 100
    assert asked_words <= words_of(text)
    assert words_of(text) <= known
