"""What the clients of a simulation ask for: a fixed set of requests and their right answers."""

import random
from dataclasses import dataclass
from functools import cache

from neuron_di.testing.fake_model import NUM_VOCAB
from neuron_di.testing.reference_run import Answer, reference_answer
from neuron_di.wire import SamplingParams

CONTEXT_TOKENS = 64
PROMPT_TOKENS_MAX = 32
NUM_REQUESTS = 600  # different ones; a simulation draws from them

_STOPS = ("stop", "aba", "ab", "b", "é")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request, and what its client must get if it gets an answer."""

    number: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    answer: Answer


@cache
def wanted(number: int) -> Wanted:
    """Request `number` of the set: the same in every run."""
    rng = random.Random(number)
    num_prompt = rng.choice((1, 2, 3, 5, 8, 13, rng.randint(14, PROMPT_TOKENS_MAX)))
    # The first ids name the request: no two prompts share the KV of a position.
    prompt_ids = (1 + number % (NUM_VOCAB - 1), 1 + number // (NUM_VOCAB - 1))[:num_prompt] + tuple(
        rng.randrange(1, NUM_VOCAB) for _ in range(num_prompt - 2)
    )
    sampling = _sampling(rng)
    answer = reference_answer(prompt_ids, sampling, context_tokens=CONTEXT_TOKENS)
    return Wanted(number, prompt_ids, sampling, answer)


def _sampling(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice((1, 2, 3, 4, 5, 6, 8, 12, 24))
    has_penalties = rng.random() < 0.2
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        top_k=rng.choice((0, 0, 10)),
        top_p=rng.choice((1.0, 1.0, 0.9)),
        seed=rng.getrandbits(32),
        presence_penalty=rng.choice((0.0, 0.5)) if has_penalties else 0.0,
        frequency_penalty=rng.choice((0.0, 1.0)) if has_penalties else 0.0,
        repetition_penalty=rng.choice((1.0, 1.3)) if has_penalties else 1.0,
        stop=tuple(rng.sample(_STOPS, rng.randint(1, 2))) if rng.random() < 0.25 else (),
        stop_token_ids=(rng.randrange(1, NUM_VOCAB),) if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((0, 2)) if rng.random() < 0.1 else None,
    )
