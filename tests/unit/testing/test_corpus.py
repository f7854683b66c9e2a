"""Tokenizers of test checkpoints are trained on the same text everywhere."""

import hashlib

import pytest

from neuron_di.testing.corpus import corpus


def test_the_text_is_the_same_on_every_machine():
    """A change here changes what random models answer, and the ids in tests."""
    text = "".join(corpus(1 << 16))
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found == "9dc08656e2beae3a2eda63928f119d27b2f8da6d97c4d492ef956232d91a2e2d"


@pytest.mark.parametrize("num_chars", [1, 1000, 1 << 16])
def test_there_is_as_much_of_it_as_was_asked_for(num_chars):
    texts = list(corpus(num_chars))
    assert sum(map(len, texts[:-1])) < num_chars <= sum(map(len, texts))
    assert list(corpus(num_chars * 2))[: len(texts)] == texts
