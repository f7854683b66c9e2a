"""Which of the workers that could take a request get it: pure functions, one per policy.

A policy is given the workers of one kind (the prefill workers of a model, or the decode workers
that fit the chosen prefill worker), those not used for longest first, and says in which order
they are to be asked. The router takes the first of them that is fit, and so a policy neither
knows who is down nor has to look further than that. Where two workers are equal to it, the order
in which it was given them stands: workers without load get requests in turn, whatever the policy.

    round_robin    the one not used for longest (N-26). A worker that joins is next, once.
    least_loaded   the one with the fewest requests for its slots. One that joins gets all
                   requests until it has as many as the others: its slots are free.
    power_of_two   the less loaded of two drawn at random. Several proxies whose knowledge of each
                   other's requests is a second old do not all choose the same worker.

Load is what this proxy has open there now, and what others had by the worker's last word.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

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


POLICIES: dict[RoutingPolicy, Policy] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "power-of-two": power_of_two,
}
