import pytest
from tokenizer_kit import KINDS, make_tokenizer

from neuron_di.errors import BadRequest
from neuron_di.request.bad_words import BadWords

kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind, *words, num_vocab=10_000):
    return BadWords(words, make_tokenizer(kind), num_vocab)


def sequences(kind, words):
    encode = make_tokenizer(kind).encode
    plain = [word.lstrip(" ") or word for word in words]
    spelled = [text for word in plain for text in (word, " " + word)]
    return [encode(text, add_special_tokens=False) for text in spelled]


@kinds
@pytest.mark.parametrize("word", ["dog", " dog", "quick brown fox", "naïve", "x", "\n", "  "])
def test_a_word_is_never_completed(kind, word):
    bad_words = make(kind, "lazy", word)
    spelled = sequences(kind, ("lazy", word))
    answers = [prefix + ids[:n] for ids in spelled for n in range(len(ids)) for prefix in ([], [7])]
    for generated in [*answers, [*spelled[-1][:-1], 7]]:
        expected = {
            last for *before, last in spelled if generated[len(generated) - len(before) :] == before
        }
        assert set(bad_words.completed_by(generated)) == expected
    assert any(len(ids) == 1 for ids in spelled) == bool(bad_words.completed_by([]))


def test_other_tokens_may_come():
    bad_words = make("byte_level", "quick brown fox")
    assert bad_words.completed_by([]) == []
    assert bad_words.completed_by(make_tokenizer("byte_level").encode("quick")) == []
    (x,) = make_tokenizer("byte_level").encode("x")
    assert x in make("byte_level", "x").completed_by([1, 2])


def test_a_word_that_the_model_never_writes_forbids_nothing():
    tokenizer = make_tokenizer("byte_level")
    ids = [*tokenizer.encode("dog"), *tokenizer.encode(" dog")]
    bad_words = make("byte_level", "dog", num_vocab=min(ids))
    assert all(bad_words.completed_by([token_id]) == [] for token_id in ids)


def test_what_is_no_text_is_refused_by_name():
    with pytest.raises(BadRequest) as caught:
        make("byte_level", "\ud800")
    assert caught.value.param == "bad_words"
