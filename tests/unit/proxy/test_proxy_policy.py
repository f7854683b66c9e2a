"""Which worker gets a request, by policy: as pure functions, and through the router."""

import itertools
import random
from collections import Counter

import msgspec
import pytest
from scripted_worker import make_record

from neuron_di.config import RoutingOptions, RoutingPolicy
from neuron_di.errors import CapacityError
from neuron_di.wire import SamplingParams
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.policy import POLICIES, least_loaded, power_of_two, round_robin
from neuron_di_proxy.route import Router

REQUEST = ChoiceRequest(
    endpoint="completions", model="tiny", prompt=msgspec.Raw(b'"hi"'), sampling=SamplingParams()
)
WORKERS = [make_record(f"d{n}", "decode", 4000 + n) for n in range(5)]


class World:
    """Workers as a router sees them. Each request stays, until `end` is called."""

    def __init__(self, policy, num_prefill, num_decode, *, slots=4):
        self.records = tuple(
            make_record(f"{role[0]}{n}", role, 4000 + n, slots=slots)
            for role, num in (("prefill", num_prefill), ("decode", num_decode))
            for n in range(1, num + 1)
        )
        self.num_open = Counter()
        self.unfit = set()
        self.router = Router(
            self, self, policy=POLICIES[policy], load_of=self.load_of, rng=random.Random(7)
        )

    def workers(self):
        return self.records

    def why_not(self, record):
        return "it is down" if record.worker_id in self.unfit else ""

    def load_of(self, record):
        return self.num_open[record.worker_id] / record.slots

    def begin(self, times=1):
        """The decode workers that so many requests go to."""
        chosen = []
        for _ in range(times):
            pair = self.router.pick("tiny", request=REQUEST)
            self.num_open[pair.prefill.worker_id] += 1
            self.num_open[pair.decode.worker_id] += 1
            chosen.append((pair.prefill.worker_id, pair.decode.worker_id))
        return [prefill for prefill, _ in chosen], [decode for _, decode in chosen]

    def end(self, worker_id, times=1):
        self.num_open[worker_id] -= times

    def join(self, worker_id, **changes):
        self.records += (make_record(worker_id, "decode", 5000, slots=4, **changes),)


def load_from(loads):
    return lambda record: loads[record.worker_id]


def test_every_name_has_a_policy_and_round_robin_is_the_default():
    assert set(POLICIES) == set(RoutingPolicy.__args__)
    assert RoutingOptions().routing == "round-robin"


def test_round_robin_is_the_order_itself():
    assert round_robin(WORKERS, None, None, None) is WORKERS  # nothing is looked at


def test_the_least_loaded_comes_first_and_of_equals_the_longest_unused():
    loads = {"d0": 0.5, "d1": 0.25, "d2": 2.0, "d3": 0.25, "d4": 0.0}
    ordered = least_loaded(WORKERS, load_from(loads), random.Random(0), REQUEST)
    assert [each.worker_id for each in ordered] == ["d4", "d1", "d3", "d0", "d2"]
    assert list(least_loaded(WORKERS, lambda _: 0.5, None, None)) == WORKERS
    assert [each.worker_id for each in WORKERS] == ["d0", "d1", "d2", "d3", "d4"]  # it is pure


@pytest.mark.parametrize("policy", [least_loaded, power_of_two])
def test_a_single_worker_is_not_weighed(policy):
    def fail(_):
        raise AssertionError("there is nothing to compare")

    assert list(policy(WORKERS[:1], fail, None, None)) == WORKERS[:1]
    assert list(policy([], fail, None, None)) == []


def test_power_of_two_takes_the_less_loaded_of_two_and_names_everybody():
    loads = {f"d{n}": n / 5 for n in range(5)}
    rng, firsts = random.Random(3), Counter()
    for _ in range(2000):
        ordered = list(power_of_two(WORKERS, load_from(loads), rng, None))
        assert sorted(each.worker_id for each in ordered) == ["d0", "d1", "d2", "d3", "d4"]
        assert loads[ordered[0].worker_id] < loads[ordered[1].worker_id]
        firsts[ordered[0].worker_id] += 1
    assert firsts["d4"] == 0  # the fullest of all never wins
    assert firsts["d0"] > firsts["d1"] > firsts["d2"] > firsts["d3"] > 0
    again = [list(power_of_two(WORKERS, load_from(loads), random.Random(3), None)) for _ in "ab"]
    assert again[0] == again[1]


def test_only_the_first_of_many_is_looked_for_and_all_are_named_in_order():
    workers = [make_record(f"d{n}", "decode", 4000 + n) for n in range(50)]
    loads = {f"d{n}": (n * 7 % 10) / 10 for n in range(50)}
    asked = []

    def load_of(record):
        asked.append(record)
        return loads[record.worker_id]

    ordered = iter(least_loaded(workers, load_of, None, None))
    assert next(ordered) is workers[0]
    assert len(asked) == 50
    assert [workers[0], *ordered] == sorted(workers, key=lambda r: loads[r.worker_id])
    assert len(asked) == 50


@pytest.mark.parametrize("policy", POLICIES)
def test_where_no_decode_worker_is_fit_each_is_asked_a_few_times_only(policy):
    """However many prefill workers there are: they would all get the same decode workers."""
    world, num_asked = World(policy, 100, 100), Counter()

    def why_not(record):
        num_asked[record.worker_id] += 1
        return "it is down" if record.role == "decode" else ""

    world.why_not = why_not
    with pytest.raises(CapacityError):
        world.begin()
    assert num_asked.most_common(1)[0][1] <= 8


def test_a_worker_is_found_in_its_list_by_itself_not_by_its_fields():
    class Odd(list):
        def remove(self, _):
            raise AssertionError("records are compared field by field")

    world = World("least-loaded", 1, 3)
    world.begin(3)
    ready = world.router._ready["tiny"]
    (lists,) = ready._decodes.values()
    odd = Odd(lists)
    ready._decodes = dict.fromkeys(ready._decodes, odd)
    ready.decodes_of = dict.fromkeys(ready.decodes_of, odd)
    world.end("d2")
    assert world.begin(1)[1] == ["d2"]
    assert odd[-1].worker_id == "d2"


def test_n26_two_prefill_and_three_decode_workers_in_turn():
    prefills, decodes = World("round-robin", 2, 3).begin(6)
    assert prefills == ["p1", "p2", "p1", "p2", "p1", "p2"]
    assert decodes == ["d1", "d2", "d3", "d1", "d2", "d3"]


def test_without_load_least_loaded_goes_round_as_well():
    world = World("least-loaded", 2, 3)
    prefills, decodes = world.begin(6)
    assert prefills == ["p1", "p2", "p1", "p2", "p1", "p2"]
    assert decodes == ["d1", "d2", "d3", "d1", "d2", "d3"]


def test_least_loaded_goes_where_requests_ended():
    world = World("least-loaded", 1, 3)
    world.begin(9)
    world.end("d2", 3)
    assert world.begin(3)[1] == ["d2", "d2", "d2"]
    assert world.begin(3)[1] == ["d1", "d3", "d2"]


def test_load_is_relative_to_slots():
    world = World("least-loaded", 1, 1, slots=4)
    world.join("large")
    world.records = (
        *world.records[:-1],
        msgspec.structs.replace(world.records[-1], slots=12),
    )
    assert Counter(world.begin(16)[1]) == {"d1": 4, "large": 12}


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_not_fit_gets_nothing_whatever_the_policy(policy):
    world = World(policy, 2, 3)
    world.unfit = {"p1", "d1", "d3"}
    assert set(map(tuple, world.begin(50))) == {("p2",) * 50, ("d2",) * 50}
    world.unfit.add("d2")
    with pytest.raises(CapacityError):
        world.begin()


@pytest.mark.parametrize("policy", POLICIES)
def test_n34_a_worker_that_joins_while_serving_carries_its_share(policy):
    """Requests end in the order in which they came. No burst: not two in a row by turns."""
    world = World(policy, 1, 3, slots=64)
    running = world.begin(30)[1]
    world.join("d4")
    world.records = tuple(msgspec.structs.replace(r, slots=64) for r in world.records)
    chosen = []
    for _ in range(400):
        world.end(running.pop(0))
        chosen += world.begin()[1]
        running.append(chosen[-1])
    assert chosen.index("d4") <= (10 if policy == "power-of-two" else 0)  # the next request
    assert 75 <= chosen.count("d4") <= 130
    assert 35 <= chosen[200:].count("d4") <= 65  # and its share from then on
    if policy == "round-robin":
        assert all(one != other for one, other in itertools.pairwise(chosen))
        assert chosen.count("d4") == 100


def test_who_was_away_for_long_gets_no_burst_afterwards():
    world = World("round-robin", 1, 3)
    world.unfit = {"d2"}
    world.begin(100)
    world.unfit = set()
    assert world.begin(6)[1] in (["d2", "d1", "d3"] * 2, ["d2", "d3", "d1"] * 2)


def test_two_workers_of_one_name_each_have_their_turn():
    world = World("round-robin", 1, 1)
    world.records += (make_record("d1", "decode", 6000, incarnation="another"),)
    chosen = [world.router.pick("tiny").decode.incarnation for _ in range(4)]
    assert sorted(chosen[:2]) == sorted(chosen[2:]) == ["another", "d1-life"]


def test_workers_whose_kv_is_moved_by_other_engines_make_no_pair():
    world = World("round-robin", 1, 1)
    world.join("d2", transfer=["tcp"])
    assert set(world.begin(4)[1]) == {"d1"}


def test_a_policy_sees_what_is_asked_for():
    world, seen = World("round-robin", 2, 2), []

    def curious(workers, load_of, rng, request):
        seen.append((len(workers), request))
        return reversed(workers)

    world.router._policy = curious
    world.begin()
    assert seen == [(2, REQUEST), (2, REQUEST)]
