"""What the clients of a simulation ask for: a fixed set of requests and their right answers.

Most prompts have nothing in common. Those of a *family* begin alike: with one system prompt, as
the turns of a chat do, or word for word.
"""

import random
from dataclasses import dataclass
from functools import cache

from neuron_di.testing.fake_model import NUM_VOCAB
from neuron_di.testing.reference_run import Answer, reference_answer
from neuron_di.wire import SamplingParams

CONTEXT_TOKENS = 64
PROMPT_TOKENS_MAX = 32
NUM_REQUESTS = 600  # different ones; a simulation draws from them
NUM_FAMILIES, FAMILY_SIZE = 60, 10  # of those that begin alike: their numbers come after those
NUM_ALIKE = NUM_FAMILIES * FAMILY_SIZE
ALIKE_TOKENS_MAX = 40  # of a prompt
ALIKE_SHARES = (0.0, 0.3, 0.8)  # of a run's requests

_STOPS = ("stop", "aba", "ab", "b", "é")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request, and what its client must get if it gets an answer."""

    number: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    answer: Answer
    tenant: int  # of two


@cache
def wanted(number: int) -> Wanted:
    """Request `number` of the set: the same in every run."""
    if number >= NUM_REQUESTS:
        return _of_family(*divmod(number - NUM_REQUESTS, FAMILY_SIZE))
    rng = random.Random(number)
    num_prompt = rng.choice((1, 2, 3, 5, 8, 13, rng.randint(14, PROMPT_TOKENS_MAX)))
    # The first ids name the request: no two prompts share the KV of a position.
    prompt_ids = (1 + number % (NUM_VOCAB - 1), 1 + number // (NUM_VOCAB - 1))[:num_prompt] + tuple(
        rng.randrange(1, NUM_VOCAB) for _ in range(num_prompt - 2)
    )
    return _wanted(number, prompt_ids, rng, tenant=number % 2)


def some_alike(aside: random.Random, numbers: list[int]) -> list[int]:
    """These requests, or others in the place of some: of two families, in the order of a chat."""
    share = aside.choice(ALIKE_SHARES)
    families = aside.sample(range(NUM_FAMILIES), 2)
    places = [place for place in range(len(numbers)) if aside.random() < share]
    members = [NUM_REQUESTS + f * FAMILY_SIZE + m for m in range(FAMILY_SIZE) for f in families]
    chosen = dict(zip(places, members, strict=False))
    return [chosen.get(place, number) for place, number in enumerate(numbers)]


def _of_family(family: int, member: int) -> Wanted:
    """Requests of one family: each begins as the one before it, or as all do."""
    number = NUM_REQUESTS + family * FAMILY_SIZE + member
    rng = random.Random(number)
    kind = rng.random()
    before = wanted(number - 1) if member else None
    if before is None or kind < 0.3:
        size = (2, 5, 8, 12, 17, 24)[family % 6]
        prompt_ids = _words(random.Random(f"system prompt {family}"), size) + _words(rng, 3)
    elif kind < 0.7:  # the next turn of a chat
        answer_ids = tuple(token.token_id for token in before.answer.tokens)
        prompt_ids = before.prompt_ids + answer_ids + _words(rng, 2)
    elif kind < 0.85:  # another name, and the same words behind it
        prompt_ids = _words(rng, 1) + before.prompt_ids[1:]
    else:  # the same again
        prompt_ids = before.prompt_ids
    return _wanted(number, prompt_ids[:ALIKE_TOKENS_MAX], rng, tenant=int(rng.random() < 0.25))


def _words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, NUM_VOCAB) for _ in range(count))


def _wanted(number: int, prompt_ids: tuple[int, ...], rng: random.Random, *, tenant: int) -> Wanted:
    sampling = _sampling(rng)
    answer = reference_answer(prompt_ids, sampling, context_tokens=CONTEXT_TOKENS)
    return Wanted(number, prompt_ids, sampling, answer, tenant)


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
