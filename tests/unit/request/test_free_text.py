import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kit import KINDS, make_tokenizer

from neuron_di.request.free_text import Marker
from neuron_di.request.grammar import GrammarCompiler
from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import Grammar

EOS = 0
MARK = "tt the t"  # overlaps with itself, and is in the middle of tokens
VOCABULARIES = {
    kind: Vocabulary(
        make_tokenizer(kind), num_vocab=make_tokenizer(kind).num_vocab, eos_token_ids=(EOS,)
    )
    for kind in KINDS
}
kinds = pytest.mark.parametrize("kind", KINDS)


def forbidden_naively(vocabulary, text, may_trail):
    """The definition: what would say something behind the marker that no grammar has seen."""
    found = {EOS}
    for token_id, piece in enumerate(vocabulary.token_bytes):
        _, marker, rest = (text + piece).partition(MARK.encode())
        if marker and rest and not (may_trail and rest.isspace()):
            found.add(token_id)
    return found


@kinds
@given(text=st.text(alphabet="the q", max_size=30), may_trail=st.booleans())
def test_nothing_unseen_comes_with_the_marker(kind, text, may_trail):
    if MARK in text:
        return
    vocabulary = VOCABULARIES[kind]
    marker = Marker(MARK, vocabulary, may_trail=may_trail)
    tail = text.encode()[-marker.num_tail :]
    expected = forbidden_naively(vocabulary, text.encode(), may_trail)
    assert set(marker.forbidden_after(tail).tolist()) == expected


def make_state(vocabulary, kind="choice", after=MARK):
    value = {"choice": json.dumps(["yes", "no"]), "json_object": ""}[kind]
    return GrammarCompiler(vocabulary).state_of(Grammar(kind=kind, value=value, after=after))


def num_allowed(state, vocabulary):
    raw_V = np.zeros(vocabulary.num_vocab, dtype=np.float32)
    return int(np.isfinite(state.masked(raw_V)).sum())


@kinds
@pytest.mark.parametrize("text", ["tt the t", "dog at the end: tttt the t", "你 tt the tt the t"])
def test_the_grammar_begins_behind_the_marker(kind, text):
    vocabulary = VOCABULARIES[kind]
    state = make_state(vocabulary)
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    end = next(
        n for n in range(len(ids) + 1)
        if MARK.encode() in b"".join(vocabulary.token_bytes[i] for i in ids[:n])
    )  # fmt: skip
    for token_id in ids[:end]:
        assert num_allowed(state, vocabulary) > 100
        assert not state.accept(token_id)
    assert num_allowed(state, vocabulary) < 10


def test_a_special_token_can_be_the_marker():
    vocabulary = VOCABULARIES["byte_level"]
    state = make_state(vocabulary, after="<|turn|>")
    assert not state.accept(1)
    assert num_allowed(state, vocabulary) < 10


def test_white_space_may_trail_where_json_follows():
    vocabulary = VOCABULARIES["byte_level"]
    ids = [i for i, piece in enumerate(vocabulary.token_bytes) if piece.endswith(b"o ")]
    raw_V = np.zeros(vocabulary.num_vocab, dtype=np.float32)
    (spaced,) = (i for i, piece in enumerate(vocabulary.token_bytes) if piece == b" spaced out ")
    for kind, is_allowed in (("json_object", True), ("choice", False)):
        state = make_state(vocabulary, kind, after="out")
        assert np.isfinite(state.masked(raw_V)[spaced]) == is_allowed
    assert not ids


@pytest.mark.parametrize(
    ("prompt", "is_behind"),
    [("the dog tt the t", True), ("tt the t \n\n", True), ("tt the t x", False), ("", False)],
)
def test_a_prompt_that_ends_with_the_marker_leaves_no_free_text(prompt, is_behind):
    vocabulary = VOCABULARIES["byte_level"]
    state = make_state(vocabulary)
    state.begin(vocabulary.tokenizer.encode(prompt))
    assert (num_allowed(state, vocabulary) < 10) == is_behind
