"""The cases of /v1/completions."""

from typing import Any

from neuron_di.testing.conformance.case import Case, Probe, completion
from neuron_di.testing.conformance.checks import (
    begins_with_prompt,
    choices_are_equal,
    choices_differ,
    ends,
    ends_at_stop,
    follows_bias,
    has,
    ids_are_among,
    is_full_length,
    num_generated_at_least,
    num_generated_is,
    num_prompt_is,
)

_SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}


def _first_char(probe: Probe) -> str:
    return probe.token_0.strip()[:1] or probe.token_0


def _across(probe: Probe) -> str:
    """The end of the first token and the beginning of the next."""
    at = len(probe.token_0)
    return probe.text[max(0, at - 1) : at + 2]


def _later(probe: Probe) -> str:
    at = len(probe.token_0)
    return probe.text[at + 2 : at + 6] or probe.text[-2:]


def _biased(probe: Probe) -> dict[str, int]:
    """Leaves nothing to draw but one token."""
    return {str(probe.ids[0]): 100}


def _word(probe: Probe) -> str:
    return probe.text.split()[0]


COMPLETION_CASES: tuple[Case, ...] = (
    # Length.
    completion("length-1", "one token: the prefill worker's is the whole answer", max_tokens=1,
               checks=(num_generated_is(1), ends("length", "stop"))),
    completion("length-2", "two tokens: one from each side of a hand-over", max_tokens=2),
    completion("length-default", "max_tokens is 16 where nothing is said", max_tokens=...),
    completion("length-64", "a longer answer", max_tokens=64),
    completion("length-ignore-eos", "goes on behind an end-of-text token", ignore_eos=True,
               max_tokens=96, checks=(is_full_length, num_generated_is(96))),
    completion("min-tokens", "does not end before", min_tokens=6,
               stop_token_ids=lambda probe: probe.ids[:1], checks=(num_generated_at_least(6),)),
    completion("min-tokens-certain", "where each token would be the end", min_tokens=6,
               logit_bias=_biased, stop_token_ids=lambda probe: probe.ids[:1],
               checks=(num_generated_at_least(6),)),
    # Stop.
    completion("stop-token-0", "a stop string that is the first token",
               stop=lambda probe: probe.token_0, checks=(ends_at_stop,)),
    completion("stop-in-token-0", "a stop string within the first token", stop=_first_char,
               checks=(ends_at_stop,)),
    completion("stop-across", "a stop string over the border of tokens 0 and 1", stop=_across,
               max_tokens=24, checks=(ends_at_stop,)),
    completion("stop-later", "a stop string behind the first token", stop=_later, max_tokens=24,
               checks=(ends_at_stop,)),
    completion("stop-list", "four stop strings, one of which occurs",
               stop=lambda probe: ["\x00", _later(probe), "\x01", "\x02"], max_tokens=24,
               checks=(ends_at_stop,)),
    completion("stop-null", "null means none", stop=None),
    completion("stop-included", "the stop string is kept", stop=_across, max_tokens=24,
               include_stop_str_in_output=True, checks=(ends_at_stop,)),
    completion("stop-never", "what looks like the beginning of a stop string is not lost",
               stop=lambda probe: probe.text[-2:] + "\x00"),
    completion("stop-token-id", "a stop token", stop_token_ids=lambda probe: probe.ids[2:3],
               checks=(ends("stop", "length"),)),
    completion("stop-token-id-certain", "a stop token that is sure to come", logit_bias=_biased,
               stop_token_ids=lambda probe: probe.ids[:1],
               checks=(ends("stop"), num_generated_is(1))),
    # Sampling.
    completion("seed", "a seeded draw", **_SAMPLED, max_tokens=16),
    completion("seed-negative", "any int64 is a seed", temperature=1.0, seed=-(1 << 63)),
    completion("top-p", "nucleus", **_SAMPLED, top_p=0.8, max_tokens=16),
    completion("top-k", "the k best", **_SAMPLED, top_k=5, max_tokens=16),
    completion("top-k-off", "-1 is off", **_SAMPLED, top_k=-1),
    completion("min-p", "relative to the best", **_SAMPLED, min_p=0.1, max_tokens=16),
    completion("top-k-1", "the best alone", **_SAMPLED, top_k=1, n=3,
               checks=(choices_are_equal,)),
    completion("top-p-best", "a nucleus of one", **_SAMPLED, top_p=1e-6, n=3,
               checks=(choices_are_equal,)),
    completion("min-p-1", "none but the best is likely enough", **_SAMPLED, min_p=1.0, n=3,
               checks=(choices_are_equal,)),
    completion("top-k-top-p-min-p", "all three", **_SAMPLED, top_k=20, top_p=0.9, min_p=0.02),
    completion("presence-penalty", "counts what was written", presence_penalty=1.5,
               max_tokens=32),
    completion("frequency-penalty", "counts how often", frequency_penalty=1.5, max_tokens=32),
    completion("repetition-penalty", "counts the prompt, too", repetition_penalty=1.3,
               max_tokens=32),
    completion("penalties-seeded", "all three, and a seed", **_SAMPLED, presence_penalty=0.5,
               frequency_penalty=0.5, repetition_penalty=1.1, max_tokens=32),
    completion("logit-bias", "one token only, the first too", return_token_ids=True,
               logit_bias=_biased, checks=(follows_bias,)),
    completion("allowed-token-ids", "some tokens only", **_SAMPLED, return_token_ids=True,
               allowed_token_ids=lambda probe: probe.ids, checks=(ids_are_among,)),
    completion("bad-words", "a word that is not written", bad_words=lambda probe: [_word(probe)],
               max_tokens=16),
    completion("skip-special-tokens", "shown or not", skip_special_tokens=False, max_tokens=32),
    completion("spaces-between-special", "the default", spaces_between_special_tokens=True),
    # Choices.
    completion("n-3", "three choices, seeded", **_SAMPLED, n=3, max_tokens=12,
               checks=(choices_differ,)),
    completion("n-3-greedy", "three equal choices", n=3, checks=(choices_are_equal,)),
    completion("n-2-logprobs", "each choice's own logprobs", **_SAMPLED, n=2, logprobs=2),
    completion("n-2-stop", "choices end at different times", **_SAMPLED, n=2, stop=[" ", ","],
               max_tokens=32),
    completion("best-of-n", "best_of that chooses nothing", **_SAMPLED, n=2, best_of=2,
               modes=("whole",)),
    completion("use-beam-search-off", "what is off is off", use_beam_search=False),
    completion("length-penalty", "means nothing without beams", length_penalty=1.0),
    # Prompts.
    completion("prompts-2", "two prompts", prompt=["The sun", "A small boat"]),
    completion("prompts-2-n-2", "index = prompt x n + choice", **_SAMPLED, n=2,
               prompt=["The sun", "A small boat"]),
    completion("prompt-ids", "token ids", prompt=lambda probe: probe.ids),
    completion("prompts-ids", "lists of token ids",
               prompt=lambda probe: [probe.ids, probe.ids[::-1]]),
    completion("prompt-unicode", "characters of up to four bytes",
               prompt="Füße, 東京, \U0001f9ed: é\u0301", max_tokens=24),
    completion("prompt-controls", "escapes in JSON", prompt='a\n\t"quoted"\\ \u2028 b'),
    completion("prompt-one-char", "the shortest", prompt="a"),
    completion("prompt-long", "as long as --long-prompt-chars says",
               prompt=lambda probe: ("word " * probe.long_prompt_chars)[: probe.long_prompt_chars],
               max_tokens=2),
    completion("truncate-prompt", "the last tokens only", truncate_prompt_tokens=3,
               checks=(num_prompt_is(3),)),
    completion("add-special-tokens-off", "no token before the prompt", add_special_tokens=False),
    # Logprobs.
    completion("logprobs-0", "the chosen token's alone", logprobs=0, checks=(has("logprobs"),)),
    completion("logprobs-1", "the first token's from whoever drew it", logprobs=1, max_tokens=1,
               checks=(has("logprobs"),)),
    completion("logprobs-5", "five alternatives", logprobs=5, checks=(has("logprobs"),)),
    completion("logprobs-seeded", "of what was drawn", **_SAMPLED, logprobs=3),
    completion("logprobs-stop", "a stop string hides text, not tokens", logprobs=1, stop=_across,
               max_tokens=24),
    completion("logprobs-token-ids", "tokens by their ids", logprobs=2,
               return_tokens_as_token_ids=True),
    completion("return-token-ids", "ids beside the text", return_token_ids=True,
               checks=(has("token_ids"),)),
    completion("prompt-logprobs", "of the prompt's tokens", prompt_logprobs=1, modes=("whole",)),
    # Echo.
    completion("echo", "the prompt first", echo=True, checks=(begins_with_prompt,)),
    completion("echo-logprobs", "the prompt's logprobs first", echo=True, logprobs=1,
               checks=(begins_with_prompt,)),
    completion("echo-0", "the prompt alone", echo=True, max_tokens=0,
               checks=(num_generated_is(0),)),
    completion("echo-0-logprobs", "a text's logprobs", echo=True, max_tokens=0, logprobs=1,
               modes=("whole",)),
    completion("echo-n-2", "before each choice", **_SAMPLED, echo=True, n=2,
               checks=(begins_with_prompt,)),
    # Streams.
    completion("stream-no-usage", "usage that nobody asked for", stream=True, stream_options=...,
               modes=("stream",)),
    completion("stream-usage-off", "said in so many words", modes=("stream",),
               stream_options={"include_usage": False}),
    completion("stream-usage-continuous", "usage in each chunk", modes=("stream",),
               stream_options={"include_usage": True, "continuous_usage_stats": True}),
    completion("stream-usage-n-2", "one report for all choices", **_SAMPLED, n=2,
               modes=("stream",)),
    # Accepted, and not about the answer.
    completion("user", "about the account", user="somebody"),
    completion("priority-0", "the default", priority=0),
    completion("session-id", "a hint at where KV lies", session_id="s-1"),
    # Offered by some: taken, or refused by name.
    completion("suffix", "writing between two texts", suffix=" The end."),
    completion("cache-salt", "a cache of one's own", cache_salt="salt"),
    completion("vllm-xargs", "of plug-ins", vllm_xargs={"name": "value"}),
    completion("prompt-embeds", "vectors for a prompt", prompt_embeds="AAAA"),
    completion("request-id-field", "an id in the body", request_id="conformance-1"),
    completion("stream-interval", "several tokens per chunk", stream_interval=2),
    completion("thinking-budget", "reasoning that is bounded", thinking_token_budget=8),
    completion("beam-search", "several hypotheses", use_beam_search=True, n=2, modes=("whole",)),
)  # fmt: skip
