import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kit import KINDS, make_tokenizer

from neuron_di.request.vocabulary import MaskedRow, Vocabulary

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("extra", [-3, 0, 9])
@pytest.mark.parametrize("eos", [(), (0,), (1, 0), (0, 10_000)])
def test_the_librarys_tokens_are_the_models(kind, extra, eos):
    tokenizer = make_tokenizer(kind)
    num_vocab = tokenizer.num_vocab + extra
    vocabulary = Vocabulary(tokenizer, num_vocab=num_vocab, eos_token_ids=eos)
    library = vocabulary.for_grammars
    known = [token_id for token_id in eos if token_id < num_vocab]
    assert library.eos_tokens == (known or [num_vocab])
    assert vocabulary.eos_token_ids == tuple(known)
    for token_id in range(min(num_vocab, tokenizer.num_vocab)):
        if tokenizer.is_special(token_id) or token_id in known:
            assert library.is_special_token(token_id)
        elif tokenizer.token_bytes(token_id) != b"\xff":  # the library's own mark, and no UTF-8
            assert library.decode_bytes([token_id]) == tokenizer.token_bytes(token_id)
    assert library.vocab_size >= num_vocab


@kinds
@given(text=st.text(max_size=20))
def test_forced_text_is_spelt_exactly(kind, text):
    """Also by a tokenizer that begins every text with a space."""
    tokenizer = make_tokenizer(kind)
    vocabulary = Vocabulary(tokenizer, num_vocab=tokenizer.num_vocab, eos_token_ids=(0,))
    ids = vocabulary.for_grammars.tokenize_str(text)
    assert b"".join(vocabulary.token_bytes[token_id] for token_id in ids) == text.encode()


def test_forced_text_is_not_spelt_by_tokens_that_are_no_text():
    tokenizer = make_tokenizer("byte_level")
    (eos,) = (i for i in range(tokenizer.num_vocab) if tokenizer.token_bytes(i) == b"<tool>")
    vocabulary = Vocabulary(tokenizer, num_vocab=tokenizer.num_vocab, eos_token_ids=(0, eos))
    for text in ("<|turn|>", "a<|end|>b", "<tool>"):
        ids = vocabulary.for_grammars.tokenize_str(text)
        assert b"".join(vocabulary.token_bytes[token_id] for token_id in ids) == text.encode()
        assert not any(tokenizer.is_special(i) or i in (0, eos) for i in ids)


@given(num_vocab=st.integers(1, 100), seed=st.integers(0, 2**32 - 1))
def test_a_masked_row_keeps_what_the_bits_say(num_vocab, seed):
    random = np.random.default_rng(seed)
    row = MaskedRow(num_vocab)
    for _ in range(2):  # nothing is left of the first
        logits_V = random.normal(size=num_vocab).astype(np.float32)
        before = logits_V.copy()
        allowed = random.integers(0, 2, num_vocab).astype(bool)
        padded = np.pad(allowed, (0, 64 - num_vocab % 32), constant_values=True)
        bitmask = np.packbits(padded, bitorder="little").tobytes()
        expected = np.where(allowed, logits_V, -np.inf)
        assert np.array_equal(row.keep(logits_V, bitmask), expected)
        also = np.array([0, num_vocab - 1])
        expected[also] = logits_V[also]
        assert np.array_equal(row.keep(logits_V, bitmask, also), expected)
        dropped = row.drop(logits_V, also)
        assert np.isneginf(dropped[also]).all()
        assert np.array_equal(np.delete(dropped, also), np.delete(logits_V, also))
        assert np.array_equal(logits_V, before)
