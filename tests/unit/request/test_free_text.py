import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kit import KINDS, make_tokenizer

from neuron_di.errors import RemoteProtocolError
from neuron_di.request.free_text import Marker, StartTag
from neuron_di.request.grammar import GrammarCompiler
from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import Grammar

EOS = 0
START = "the q"
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


def make_state(vocabulary, kind="choice", end=MARK, choices=("yes", "no")):
    value = {"choice": json.dumps(choices), "json_object": ""}[kind]
    grammar = Grammar(kind=kind, value=value, reasoning=(START, end))
    return GrammarCompiler(vocabulary).state_of(grammar)


def make_inner_state(vocabulary, kind="choice", end=MARK):
    """Of an answer to a prompt that ends inside of reasoning."""
    state = make_state(vocabulary, kind, end)
    state.begin((), in_reasoning=True)
    return state


def allowed(state, vocabulary):
    raw_V = np.zeros(vocabulary.num_vocab, dtype=np.float32)
    return set(np.flatnonzero(np.isfinite(state.masked(raw_V))).tolist())


def num_allowed(state, vocabulary):
    return len(allowed(state, vocabulary))


def one_by_one(vocabulary, text):
    """Byte by byte."""
    of_byte = {piece: i for i, piece in reversed(list(enumerate(vocabulary.token_bytes)))}
    return [of_byte[bytes([byte])] for byte in text.encode()]


@kinds
@pytest.mark.parametrize("text", ["tt the t", "dog at the end: tttt the t", "你 tt the tt the t"])
def test_the_grammar_begins_behind_the_marker(kind, text):
    vocabulary = VOCABULARIES[kind]
    state = make_inner_state(vocabulary)
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
    state = make_inner_state(vocabulary, end="<|turn|>")
    assert not state.accept(1)
    assert num_allowed(state, vocabulary) < 10


def test_white_space_may_trail_where_json_follows():
    vocabulary = VOCABULARIES["byte_level"]
    ids = [i for i, piece in enumerate(vocabulary.token_bytes) if piece.endswith(b"o ")]
    raw_V = np.zeros(vocabulary.num_vocab, dtype=np.float32)
    (spaced,) = (i for i, piece in enumerate(vocabulary.token_bytes) if piece == b" spaced out ")
    for kind, is_allowed in (("json_object", True), ("choice", False)):
        state = make_inner_state(vocabulary, kind, end="out")
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
    may_begin = {vocabulary.token_bytes[i][:1] for i in allowed(state, vocabulary)}
    assert may_begin == ({b"y", b"n"} if is_behind else {b"y", b"n", b"t"})


def going_on_with(vocabulary, texts):
    """Ids of the tokens with which one of these texts begins."""
    return {
        token_id
        for token_id, piece in enumerate(vocabulary.token_bytes)
        if piece and any(text.startswith(piece) for text in texts)
    }


@kinds
@pytest.mark.parametrize("is_short", [True, False], ids=["short-tokens", "long-tokens"])
@pytest.mark.parametrize("choices", [("yes", "no"), ("the dog", "then"), ("t", "th")])
def test_an_answer_begins_with_the_start_tag_or_keeps_the_grammar(kind, choices, is_short):
    vocabulary = VOCABULARIES[kind]
    tag = START.encode()
    for text in (tag, *(choice.encode() for choice in choices)):
        state, begun = make_state(vocabulary, choices=choices), b""
        while begun != text:
            may_come = [tag, *(choice.encode() for choice in choices)]
            rests = [each[len(begun) :] for each in may_come if each.startswith(begun)]
            offered = allowed(state, vocabulary)
            assert offered - {EOS} <= going_on_with(vocabulary, rests)
            assert (EOS in offered) == (begun.decode() in choices)
            if tag.startswith(begun):
                assert going_on_with(vocabulary, [tag[len(begun) :]]) <= offered
            fitting = offered & going_on_with(vocabulary, [text[len(begun) :]])
            lengths = {token_id: len(vocabulary.token_bytes[token_id]) for token_id in fitting}
            token_id = (min if is_short else max)(fitting, key=lengths.__getitem__)
            assert not state.accept(token_id)
            begun += vocabulary.token_bytes[token_id]
        if text != tag:
            assert state.accept(EOS)
            continue
        assert num_allowed(state, vocabulary) > 100  # it is free, until the end tag
        for token_id in one_by_one(vocabulary, "dog" + MARK):
            assert not state.accept(token_id)
        firsts = {vocabulary.token_bytes[token_id][:1] for token_id in allowed(state, vocabulary)}
        assert firsts == {choice.encode()[:1] for choice in choices}


def test_what_is_neither_a_start_tag_nor_of_the_grammar_is_refused():
    vocabulary = VOCABULARIES["byte_level"]
    for text in ("x", "thx", "then"):
        state = make_state(vocabulary)
        *begun, last = one_by_one(vocabulary, text)
        for token_id in begun:
            assert not state.accept(token_id)
        with pytest.raises(RemoteProtocolError):
            state.accept(last)


def test_a_start_tag_that_the_model_cannot_write_is_not_begun():
    vocabulary = Vocabulary(
        VOCABULARIES["sentencepiece"].tokenizer, num_vocab=20, eos_token_ids=(EOS,)
    )
    assert b"~" not in b"".join(vocabulary.token_bytes)
    assert StartTag("abc", vocabulary).ids_behind(b"").size == 1
    assert StartTag("abc~", vocabulary).ids_behind(b"").size == 0
