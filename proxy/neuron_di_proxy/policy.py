"""Which of the workers that could take a request get it: pure functions, one per policy.

A policy is given the workers of one kind (the prefill workers of a model, or the decode workers
that fit the chosen prefill worker), those not used for longest first, and says in which order
they are to be asked. The router takes the first of them that is fit, and so a policy neither
knows who is down nor has to look further than that. Where two workers are equal to it, the order
in which it was given them stands: workers without load get requests in turn, whatever the policy.

    round_robin      the one not used for longest (N-26). A worker that joins is next, once.
    least_loaded     the one with the fewest requests for its slots. One that joins gets all
                     requests until it has as many as the others: its slots are free.
    power_of_two     the less loaded of two drawn at random. Several proxies whose knowledge of
                     each other's requests is a second old do not all choose the same worker.
    prefix_affinity  for prefill the one to which the prompt's beginning belongs, unless it is
                     loaded far above the average; for decode as least_loaded.

Load is what this proxy has open there now, and what others had by the worker's last word.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import mul

from xxhash import xxh3_64_intdigest

from neuron_di.config import RoutingPolicy
from neuron_di.wire import WorkerRecord
from neuron_di_proxy.choice_request import ChoiceRequest

# Requests for its slots: 1.0 is as many as a worker computes together.
LoadOf = Callable[[WorkerRecord], float]

# (workers, load of each, random numbers, what is asked for if that is known) -> best first.
# The order may be made as it is asked for: as a rule, only its first is.
Policy = Callable[
    [Sequence[WorkerRecord], LoadOf, random.Random, ChoiceRequest | None],
    Iterable[WorkerRecord],
]


FEW = 8  # workers that are sorted sooner than they are looked through
# Of a prompt's JSON. One that is no longer has, as a rule, too few tokens for a worker to keep.
PREFIX_BYTES = 2048
BALANCE = 1.25  # times the average load, and a request: a worker that has more is passed over


def round_robin(
    workers: Sequence[WorkerRecord],
    _load_of: LoadOf,
    _rng: random.Random,
    _request: ChoiceRequest | None,
) -> Iterable[WorkerRecord]:
    """As they were given."""
    return workers


def least_loaded(
    workers: Sequence[WorkerRecord],
    load_of: LoadOf,
    _rng: random.Random,
    _request: ChoiceRequest | None,
) -> Iterable[WorkerRecord]:
    """The least loaded first."""
    if len(workers) < FEW:
        return workers if len(workers) < 2 else sorted(workers, key=load_of)
    return _least_and_the_rest(workers, load_of)


def _least_and_the_rest(workers: Sequence[WorkerRecord], load_of: LoadOf) -> Iterator[WorkerRecord]:
    """As a rule the first is taken: the others are sorted when they are asked for."""
    loads = list(map(load_of, workers))
    first = loads.index(min(loads))
    yield workers[first]
    rest = sorted((load, at) for at, load in enumerate(loads) if at != first)
    yield from (workers[at] for _, at in rest)


def power_of_two(
    workers: Sequence[WorkerRecord],
    load_of: LoadOf,
    rng: random.Random,
    _request: ChoiceRequest | None,
) -> Iterable[WorkerRecord]:
    """Two at random, the less loaded of them first; then, where neither will do, the others."""
    return workers if len(workers) < 2 else _two_and_the_rest(workers, load_of, rng)


def _two_and_the_rest(
    workers: Sequence[WorkerRecord], load_of: LoadOf, rng: random.Random
) -> Iterator[WorkerRecord]:
    num = len(workers)
    one, other = int(rng.random() * num), int(rng.random() * (num - 1))  # `sample` takes long
    if other >= one:
        other += 1
    else:  # in the order given, so that of two with the same load the longer unused is taken
        one, other = other, one
    if load_of(workers[other]) < load_of(workers[one]):
        one, other = other, one
    yield workers[one]
    yield workers[other]
    yield from (worker for at, worker in enumerate(workers) if at not in (one, other))


def prefix_affinity(
    workers: Sequence[WorkerRecord],
    load_of: LoadOf,
    rng: random.Random,
    request: ChoiceRequest | None,
) -> Iterable[WorkerRecord]:
    """Prompts that begin alike to the same prefill worker, which may have KV of that.

    A later turn of a chat begins with the bytes of the earlier ones, and so comes to their worker.
    Each worker has a rank for each cache scope and beginning, by rendezvous hashing: all proxies
    agree on it, and a worker that leaves or joins moves no prompts but its own. The best by rank
    gets the request unless it has too much: consistent hashing with bounded loads, after Mirrokni,
    Thorup and Zadimoghaddam (2016).
    """
    if len(workers) < 2 or workers[0].role == "decode" or request is None:
        return least_loaded(workers, load_of, rng, request)
    prompt = memoryview(request.prompt)
    if prompt.nbytes <= PREFIX_BYTES:
        return least_loaded(workers, load_of, rng, request)
    scope = xxh3_64_intdigest(request.cache_scope.encode())
    return _by_rank(workers, load_of, xxh3_64_intdigest(prompt[:PREFIX_BYTES], scope))


def _by_rank(
    workers: Sequence[WorkerRecord], load_of: LoadOf, prefix: int
) -> Iterator[WorkerRecord]:
    """The best first; then those that have too much, the least loaded of them first.

    There is always one that has not. But it may be down, and count as idle: then the others'
    ranks must not bring all requests to one of them.
    """
    ranked = sorted(
        workers, key=lambda each: xxh3_64_intdigest(each.worker_id.encode(), prefix), reverse=True
    )
    loads, slots = list(map(load_of, ranked)), [max(1, each.slots) for each in ranked]
    average = sum(map(mul, loads, slots)) / sum(slots)
    passed_over = []
    for at, worker in enumerate(ranked):
        if loads[at] > BALANCE * average + 1 / slots[at]:
            passed_over.append(at)
        else:
            yield worker
    passed_over.sort(key=loads.__getitem__)
    yield from (ranked[at] for at in passed_over)


POLICIES: dict[RoutingPolicy, Policy] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "power-of-two": power_of_two,
    "prefix-affinity": prefix_affinity,
}
