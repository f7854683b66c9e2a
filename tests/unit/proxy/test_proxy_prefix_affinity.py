"""Prompts that begin alike go to one prefill worker, unless that has too much."""

import json
import random
import tracemalloc
from collections import Counter

import msgspec
import pytest
from scripted_worker import make_record

from neuron_di.wire import SamplingParams
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.policy import BALANCE, POLICIES, PREFIX_BYTES, least_loaded, prefix_affinity
from neuron_di_proxy.route import Router

WORKERS = [make_record(f"p{n}", "prefill", 4000 + n, slots=8) for n in range(6)]
BY_ID = {worker.worker_id: worker for worker in WORKERS}


def request_of(prompt, *, scope="alice"):
    return ChoiceRequest(
        endpoint="completions" if isinstance(prompt, str) else "chat",
        model="tiny",
        prompt=msgspec.Raw(json.dumps(prompt).encode()),
        sampling=SamplingParams(),
        cache_scope=scope,
    )


def long_request(number, **fields):
    return request_of(f"{number}: " + "once upon a time " * 150, **fields)


def idle(_):
    return 0.0


def load_from(loads):
    return lambda record: loads[record.worker_id]


def ranked(request, workers=WORKERS, load_of=idle):
    return [each.worker_id for each in prefix_affinity(workers, load_of, None, request)]


class Proxy:
    """A router whose workers have what it alone gave them, and what `loads` says."""

    def __init__(self, records, seed=0):
        self.records, self.num_open, self.loads, self.unfit = tuple(records), Counter(), {}, set()
        policy = POLICIES["prefix-affinity"]
        self.router = Router(
            self, self, policy=policy, load_of=self.load_of, rng=random.Random(seed)
        )

    def workers(self):
        return self.records

    def why_not(self, record):
        return "it is down" if record.worker_id in self.unfit else ""

    def load_of(self, record):
        num_open = self.num_open[record.worker_id]
        return self.loads.get(record.worker_id, num_open / record.slots)

    def pick(self, request):
        route = self.router.pick("tiny", request=request)
        for record in {route.prefill.worker_id, route.decode.worker_id}:
            self.num_open[record] += 1
        return route

    def prefill_of(self, request):
        return self.pick(request).prefill.worker_id


DECODES = [make_record(f"d{n}", "decode", 5000 + n, slots=8) for n in range(3)]


def test_two_proxies_agree_without_a_word():
    """Whatever each had before, and in whatever order they heard of the workers."""
    one, other = Proxy([*WORKERS, *DECODES], 1), Proxy([*reversed(WORKERS), *DECODES], 2)
    for number in range(7):
        other.prefill_of(request_of(f"short {number}"))
    chosen = Counter()
    for number in range(60):
        one.num_open.clear()
        other.num_open.clear()
        prefill = one.prefill_of(long_request(number))
        assert other.prefill_of(long_request(number)) == prefill
        chosen[prefill] += 1
    assert len(chosen) == len(WORKERS)
    assert max(chosen.values()) < 25


def test_the_order_is_the_same_on_every_machine():
    assert ranked(long_request(0)) == ["p1", "p3", "p4", "p2", "p0", "p5"]
    assert ranked(long_request(0, scope="bob")) == ["p0", "p3", "p1", "p2", "p4", "p5"]


def test_a_later_turn_of_a_chat_goes_to_the_worker_of_the_earlier_ones():
    for number in range(40):
        chat = [
            {"role": "system", "content": f"You are number {number}. " + "Be kind. " * 100},
            {"role": "user", "content": "What is a prefix? " * 100},
        ]
        first = ranked(request_of(chat))
        for turn in range(3):
            chat += [
                {"role": "assistant", "content": f"It is what comes first, {turn}."},
                {"role": "user", "content": "And then?" * turn},
            ]
            assert ranked(request_of(chat)) == first


def test_only_the_beginning_counts():
    text = "x" * (PREFIX_BYTES - 1)  # a quotation mark stands before it
    orders = [ranked(request_of(text + end)) for end in ("a", "b" * 5000)]
    assert orders[0] == orders[1]
    assert len({tuple(ranked(request_of(str(n) + text))) for n in range(9)}) > 5


def test_tenants_have_workers_of_their_own_for_the_same_prompt():
    firsts = {ranked(long_request(0, scope=f"tenant-{n}"))[0] for n in range(60)}
    assert firsts == BY_ID.keys()


@pytest.mark.parametrize("gone", BY_ID)
def test_a_worker_that_leaves_or_joins_moves_its_own_prompts_only(gone):
    fewer, moved = [each for each in WORKERS if each.worker_id != gone], 0
    for number in range(60):
        before = ranked(long_request(number))
        assert ranked(long_request(number), fewer) == [each for each in before if each != gone]
        moved += before[0] == gone
    assert 0 < moved < 25


def test_a_worker_that_is_down_leaves_its_prompts_to_the_next_by_rank():
    best, second, *_ = ranked(long_request(0))
    proxy = Proxy([*WORKERS, *DECODES])
    proxy.unfit = {best}
    assert proxy.prefill_of(long_request(0)) == second
    proxy.unfit = set()
    assert proxy.prefill_of(long_request(0)) == best


def test_a_loaded_worker_is_passed_over_and_the_next_by_rank_gets_it():
    best, second, third, *rest = ranked(long_request(0))
    loads = dict.fromkeys(BY_ID, 0.5)
    order = ranked(long_request(0), load_of=load_from(loads))
    assert order == [best, second, third, *rest]
    loads[best] = 1.5
    order = ranked(long_request(0), load_of=load_from(loads))
    assert order == [second, third, *rest, best]
    loads[second] = 2.0
    order = ranked(long_request(0), load_of=load_from(loads))
    assert order == [third, *rest, best, second]  # the least loaded of those first


def test_one_request_is_never_too_many():
    best, second, *_ = ranked(long_request(0))
    loads = dict.fromkeys(BY_ID, 0.0) | {best: 1 / 8}
    assert ranked(long_request(0), load_of=load_from(loads))[0] == best
    loads[best] = 2 / 8
    assert ranked(long_request(0), load_of=load_from(loads))[0] == second


@pytest.mark.parametrize("num_prompts", [1, 2, 1000])
def test_however_many_begin_alike_nobody_has_much_more_than_the_others(num_prompts):
    proxy, by_rank = Proxy([*WORKERS, *DECODES]), ranked(long_request(0))
    for count in range(1, 301):
        proxy.prefill_of(long_request(count % num_prompts))
        at_most = BALANCE * count / len(WORKERS) + 2
        assert max(proxy.num_open[each] for each in BY_ID) <= at_most
    if num_prompts == 1:  # it is spread no more than that takes
        counts = [proxy.num_open[each] for each in by_rank]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] < counts[0] / 2


def test_who_has_more_slots_may_have_more_requests():
    large = [
        msgspec.structs.replace(each, slots=80) if each is WORKERS[0] else each for each in WORKERS
    ]
    request = next(r for r in map(long_request, range(99)) if ranked(r)[0] == "p0")
    counts = dict.fromkeys(BY_ID, 4) | {"p0": 40}

    def load_of(record):
        return counts[record.worker_id] / record.slots

    assert ranked(request, large, load_of)[0] == "p0"
    assert ranked(request, WORKERS, load_of)[0] != "p0"


def test_a_small_worker_that_is_overrun_excuses_no_other():
    best, second, *_, small = ranked(long_request(0))
    workers = [
        msgspec.structs.replace(each, slots=1) if each.worker_id == small else each
        for each in WORKERS
    ]
    loads = dict.fromkeys(BY_ID, 0.25) | {best: 1.0, small: 10.0}
    order = ranked(long_request(0), workers, load_from(loads))
    assert (order[0], order[-2:]) == (second, [best, small])


def test_where_many_are_down_the_others_share_by_load():
    """Those count as idle, so that all that are up seem to have too much."""
    best, second, *rest = ranked(long_request(0))
    proxy = Proxy([*WORKERS, *DECODES])
    proxy.unfit = set(rest)
    chosen = Counter(proxy.prefill_of(long_request(0)) for _ in range(200))
    assert chosen.keys() == {best, second}
    assert abs(chosen[best] - chosen[second]) <= 10


@pytest.mark.parametrize(
    "request_or_none", [None, request_of("hi"), request_of("x" * (PREFIX_BYTES - 2))]
)
def test_short_prompts_and_none_go_by_load(request_or_none):
    loads = {each: n * 5 % 6 for n, each in enumerate(BY_ID)}
    for load_of in (load_from(loads), idle):
        ordered = list(prefix_affinity(WORKERS, load_of, None, request_or_none))
        assert ordered == list(least_loaded(WORKERS, load_of, None, None))


def test_decode_workers_go_by_load():
    loads = {"d0": 0.5, "d1": 0.0, "d2": 0.5}
    order = ranked(long_request(0), DECODES, load_from(loads))
    assert order == ["d1", "d0", "d2"]
    proxy = Proxy([*WORKERS, *DECODES])
    assert [proxy.pick(long_request(0)).decode.worker_id for _ in "123456"] == [
        "d0",
        "d1",
        "d2",
    ] * 2


def test_short_prompts_go_round_where_nobody_has_load():
    proxy, chosen = Proxy([*WORKERS, *DECODES]), []
    for _ in WORKERS:
        chosen.append(proxy.prefill_of(request_of("hi")))
        proxy.num_open.clear()
    assert chosen == list(BY_ID)


def test_workers_that_do_both_are_ranked_as_well():
    wholes = [make_record(f"b{n}", "both", 4000 + n, slots=8) for n in range(6)]
    proxy, chosen = Proxy(wholes), set()
    for number in range(40):
        proxy.num_open.clear()
        firsts = {proxy.prefill_of(long_request(number)) for _ in "12"}
        assert firsts == {ranked(long_request(number), wholes)[0]}
        chosen |= firsts
    assert len(chosen) == 6


def test_a_single_worker_is_neither_weighed_nor_ranked():
    def fail(_):
        raise AssertionError("there is nothing to compare")

    assert list(prefix_affinity(WORKERS[:1], fail, None, long_request(0))) == WORKERS[:1]
    assert list(prefix_affinity([], fail, None, long_request(0))) == []


def test_a_long_prompt_is_not_copied():
    request = request_of("x" * (4 << 20))
    tracemalloc.start()
    assert len(ranked(request)) == len(WORKERS)
    num_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_bytes < 65_536
