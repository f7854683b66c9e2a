import pytest
from tokenizer_kit import make_tokenizer

from neuron_di.errors import BadRequest
from neuron_di.request import (
    OutputText,
    Request,
    accept_token,
    end_token_ids,
    resolve_max_tokens,
)
from neuron_di.types import RequestId
from neuron_di.wire import SamplingParams

EOS = 0


def test_max_tokens_fill_the_context_exactly():
    assert resolve_max_tokens(SamplingParams(max_tokens=6), 4, 10) == 6
    assert resolve_max_tokens(SamplingParams(max_tokens=None), 4, 10) == 6
    assert resolve_max_tokens(SamplingParams(max_tokens=None), 9, 10) == 1


@pytest.mark.parametrize(("max_tokens", "resolved"), [(5, 5), (7, 6), (None, 6)])
def test_a_limit_that_nobody_asked_for_is_cut_to_the_context(max_tokens, resolved):
    params = SamplingParams(max_tokens=max_tokens, fits_context=True)
    assert resolve_max_tokens(params, 4, 10) == resolved


@pytest.mark.parametrize(
    ("params", "num_prompt", "words", "field"),
    [
        (SamplingParams(), 0, "empty", "prompt"),
        (SamplingParams(max_tokens=1), 10, "the prompt has 10,", "prompt"),
        (SamplingParams(max_tokens=None), 99, "the prompt has 99,", "prompt"),
        (SamplingParams(max_tokens=7), 4, "max_tokens is 7, which can be at most 6", "max_tokens"),
        (
            SamplingParams(max_tokens=7, max_tokens_param="max_completion_tokens"),
            4,
            "max_completion_tokens is 7, which can be at most 6",
            "max_completion_tokens",
        ),
        (SamplingParams(max_tokens=None, min_tokens=7), 4, "more than the 6", "min_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(params, num_prompt, words, field):
    with pytest.raises(BadRequest, match=words) as caught:
        resolve_max_tokens(params, num_prompt, 10)
    assert caught.value.param == field
    # By this code, and by OpenAI's words, clients know that a shorter prompt would do.
    is_too_long = caught.value.message.startswith(
        "This model's maximum context length is 10 tokens: "
    )
    assert (caught.value.code == "context_length_exceeded") == is_too_long
    assert is_too_long == ("prompt has" in caught.value.message)


def run(text, eos_token_ids=(EOS,), **fields):
    """Generate the characters of `text` one by one ("$" is EOS) until the request ends."""
    params = SamplingParams(**{"max_tokens": 100, **fields})
    tokenizer = make_tokenizer("byte_level")
    output = OutputText(
        tokenizer,
        stop=params.stop,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        include_stop=params.include_stop_str_in_output,
    )
    request = Request(
        RequestId("r"), 0, prompt_ids=[5], sampling=params, max_tokens=params.max_tokens,
        output=output,
    )  # fmt: skip
    sent = ""
    for char in text:
        token_id = EOS if char == "$" else tokenizer.encode(char)[0]
        outcome = accept_token(request, token_id, eos_token_ids)
        sent += outcome.text
        if outcome.finish is not None:
            sent += outcome.finish.text
            return sent, outcome.finish.reason, outcome.finish.stop, len(request.generated)
    return sent, None, None, len(request.generated)


def id_of(char):
    return make_tokenizer("byte_level").encode(char)[0]


def test_eos_ends_a_request_and_has_no_text():
    assert run("ab$c") == ("ab", "stop", None, 3)
    assert run("$") == ("", "stop", None, 1)
    assert run("ab$c", skip_special_tokens=False) == ("ab", "stop", None, 3)


def test_ignored_eos_is_an_ordinary_token():
    assert run("ab$c", ignore_eos=True) == ("abc", None, None, 4)
    assert run("a$c", ignore_eos=True, skip_special_tokens=False) == ("a<|end|>c", None, None, 3)
    assert run("a$c", ignore_eos=True, stop_token_ids=(EOS,)) == ("a", "stop", EOS, 2)


def test_a_stop_token_ends_a_request_and_has_no_text():
    assert run("abc", stop_token_ids=(id_of("b"),)) == ("a", "stop", id_of("b"), 2)


def test_length_gives_back_what_was_held():
    assert run("abc", max_tokens=1) == ("a", "length", None, 1)
    assert run("abEN", max_tokens=4, stop=("END",)) == ("abEN", "length", None, 4)


def test_a_stop_string_is_cut_off_and_wins_over_the_length():
    assert run("abENDc", stop=("END",)) == ("ab", "stop", "END", 5)
    assert run("abENDc", stop=("END",), max_tokens=5) == ("ab", "stop", "END", 5)


def test_eos_gives_back_what_may_have_begun_a_stop_string():
    assert run("abEN$", stop=("END",)) == ("abEN", "stop", None, 5)


def test_half_a_character_at_the_end_may_complete_a_stop_string():
    tokenizer = make_tokenizer("byte_level")
    half = next(i for i in range(tokenizer.num_vocab) if tokenizer.token_bytes(i) == b"\xf0")
    output = OutputText(tokenizer, stop=("\ufffd",), skip_special_tokens=True, min_tokens=0)
    params = SamplingParams(max_tokens=1)
    request = Request(
        RequestId("r"), 0, prompt_ids=[5], sampling=params, max_tokens=1, output=output
    )
    outcome = accept_token(request, half, (EOS,))
    assert outcome.finish is not None
    assert (outcome.text, *outcome.finish) == ("", "stop", "\ufffd", "")


def test_what_ended_a_request_is_in_its_text_if_it_shall_be():
    include = {"include_stop_str_in_output": True}
    assert run("abENDc", stop=("END",), **include) == ("abEND", "stop", "END", 5)
    assert run("abc", stop_token_ids=(id_of("b"),), **include) == ("ab", "stop", id_of("b"), 2)
    assert run("ab$c", **include) == ("ab", "stop", None, 3)
    shown = {**include, "skip_special_tokens": False}
    assert run("ab$c", **shown) == ("ab<|end|>", "stop", None, 3)
    assert run("abEN$", stop=("END",), **shown) == ("abEN<|end|>", "stop", None, 5)


def test_nothing_ends_a_request_before_min_tokens_but_its_length():
    assert run("$$$$", min_tokens=2)[1:] == ("stop", None, 3)
    assert run("aaaa", min_tokens=2, stop_token_ids=(id_of("a"),)) == ("aa", "stop", id_of("a"), 3)
    assert run("aaaa", min_tokens=2, stop=("a",)) == ("a", "stop", "a", 2)
    assert run("aaaa", min_tokens=2, max_tokens=2) == ("aa", "length", None, 2)


def test_end_tokens_are_eos_and_stop_tokens():
    assert end_token_ids(SamplingParams(stop_token_ids=(7,)), (1, 2)) == (1, 2, 7)
    assert end_token_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), (1, 2)) == (7,)
