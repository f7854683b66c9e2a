import pytest
from scripted_worker import make_record

from neuron_di.clock import now_s
from neuron_di.errors import CapacityError
from neuron_di_proxy import known_models
from neuron_di_proxy.known_models import ModelNotFound
from neuron_di_proxy.route import Route, Router
from neuron_di_proxy.workers import process_of


class FixedDirectory:
    def __init__(self, *records):
        self.records = records

    def workers(self):
        return tuple(self.records)


class Unfit:
    """Says of each worker that it is fit, but of those named in `reasons`."""

    def __init__(self, **reasons):
        self.reasons = reasons

    def why_not(self, record):
        return self.reasons.get(record.worker_id, "")


class BadPairs:
    def __init__(self, *pairs):
        self.pairs = pairs

    def has_failed(self, prefill, decode):
        return (prefill.worker_id, decode.worker_id) in self.pairs


def router_over(*records, pairs=None, **reasons):
    return Router(FixedDirectory(*records), Unfit(**reasons), pairs)


def pick_ids(router, times):
    pairs = [router.pick("tiny") for _ in range(times)]
    return [p.prefill.worker_id for p in pairs], [p.decode.worker_id for p in pairs]


def test_round_robin_over_2p3d_as_in_the_seed():
    directory = FixedDirectory(
        *(make_record(f"p{i}", "prefill") for i in (1, 2)),
        *(make_record(f"d{i}", "decode") for i in (1, 2, 3)),
    )
    prefills, decodes = pick_ids(Router(directory, Unfit()), 6)
    assert prefills == ["p1", "p2", "p1", "p2", "p1", "p2"]
    assert decodes == ["d1", "d2", "d3", "d1", "d2", "d3"]


def test_a_worker_that_joins_gets_the_next_request():
    directory = FixedDirectory(
        make_record("p1", "prefill"), make_record("d1", "decode"), make_record("d2", "decode")
    )
    router = Router(directory, Unfit())
    pick_ids(router, 4)
    directory.records += (make_record("d3", "decode"),)
    assert pick_ids(router, 4)[1] == ["d3", "d1", "d2", "d3"]


def test_workers_that_come_and_go_are_forgotten():
    directory = FixedDirectory()
    router = Router(directory, Unfit())
    for life in range(100):
        directory.records = (make_record("p1", "prefill"), make_record(f"d{life}", "decode"))
        router.pick("tiny")
    assert len(router._last_turn) <= 2 * len(directory.records)


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_only_ready_workers_are_picked(state):
    directory = FixedDirectory(
        make_record("p1", "prefill"),
        make_record("d1", "decode", state=state),
        make_record("d2", "decode"),
    )
    assert pick_ids(Router(directory, Unfit()), 2)[1] == ["d2", "d2"]


@pytest.mark.parametrize("field", ["model_digest", "layout_digest"])
def test_a_pair_agrees_on_weights_and_layout(field):
    directory = FixedDirectory(
        make_record("p1", "prefill"),
        make_record("p2", "prefill", **{field: "other"}),
        make_record("p3", "prefill", **{field: "nobody has this"}),
        make_record("d1", "decode"),
        make_record("d2", "decode", **{field: "other"}),
    )
    prefills, decodes = pick_ids(Router(directory, Unfit()), 4)
    assert list(zip(prefills, decodes, strict=True)) == [("p1", "d1"), ("p2", "d2")] * 2


def test_each_group_of_agreeing_workers_is_used_evenly():
    directory = FixedDirectory(
        *(make_record(f"p{g}", "prefill", model_digest=g) for g in "ab"),
        *(make_record(f"d{g}{i}", "decode", model_digest=g) for g in "ab" for i in (1, 2)),
    )
    assert sorted(set(pick_ids(Router(directory, Unfit()), 4)[1])) == ["da1", "da2", "db1", "db2"]


def test_a_worker_of_both_roles_serves_when_there_is_no_pair():
    both = make_record("b1", "both")
    directory = FixedDirectory(make_record("p1", "prefill"), both)
    router = Router(directory, Unfit())
    assert router.pick("tiny") == Route(both, both)
    decode = make_record("d1", "decode")
    directory.records += (decode,)
    assert router.pick("tiny") == Route(directory.records[0], decode)
    assert router.why_unserved() is None


def test_slots_are_those_of_workers_that_get_requests():
    directory = FixedDirectory(
        make_record("p1", "prefill", slots=9),
        make_record("d1", "decode", slots=4),
        make_record("b1", "both", slots=2),
        make_record("b2", "both", slots=3, model="other"),
    )
    assert Router(directory, Unfit()).num_slots() == 4 + 3
    assert Router(directory, Unfit(b2="ill")).num_slots() == 4
    assert Router(directory, Unfit(d1="ill")).num_slots() == 2 + 3
    directory.records = directory.records[1:]
    assert Router(directory, Unfit()).num_slots() == 4 + 2 + 3


def test_where_the_only_pairs_have_failed_nothing_is_served():
    records = [make_record("p1", "prefill"), make_record("d1", "decode")]
    router = router_over(*records, pairs=BadPairs(("p1", "d1")))
    assert "can hand over to a decode worker" in router.why_unserved()
    assert router.pick("tiny").decode.worker_id == "d1"  # it is tried all the same
    more = [make_record("d2", "decode"), make_record("b1", "both")]
    for further in more:
        assert router_over(*records, further, pairs=BadPairs(("p1", "d1"))).why_unserved() is None


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ((), "no prefill and no decode worker is ready"),
        ((make_record("p1", "prefill"),), "no decode worker is ready"),
        ((make_record("d1", "decode"),), "no prefill worker is ready"),
        (
            (make_record("p1", "prefill"), make_record("d1", "decode", layout_digest="x")),
            "agree on weights, KV layout and transfer engine",
        ),
    ],
)
def test_what_is_missing_is_said(records, text):
    router = router_over(*records)
    with pytest.raises(CapacityError, match=text):
        router.pick("tiny")
    assert router.why_unserved() is not None


def test_a_model_that_no_worker_has_does_not_exist():
    router = router_over(make_record("p1", "prefill"), make_record("d1", "decode"))
    with pytest.raises(ModelNotFound):
        router.pick("large")


def test_a_model_whose_last_workers_went_a_while_ago_exists(monkeypatch):
    left = make_record("b1", "both")
    directory = FixedDirectory(left, make_record("b2", "both", model="large"))
    router = Router(directory, Unfit())
    assert router.pick("large").decode.worker_id == "b2"
    directory.records = (left,)
    for _ in range(2):
        with pytest.raises(CapacityError, match="no prefill and no decode worker is ready"):
            router.pick("large")
    with pytest.raises(CapacityError):
        router.any_worker("large")
    monkeypatch.setattr(known_models, "now_s", lambda: now_s() + known_models.MISSED_S)
    with pytest.raises(ModelNotFound):
        router.pick("large")


def test_models_are_named_once():
    router = router_over(
        make_record("p1", "prefill"),
        make_record("d1", "decode"),
        make_record("b1", "both", model="large"),
    )
    assert router.models() == ["large", "tiny"]


def two_by_two():
    return [
        *(make_record(name, "prefill") for name in ("p1", "p2")),
        *(make_record(name, "decode") for name in ("d1", "d2")),
    ]


def test_a_worker_that_is_not_fit_gets_nothing():
    router = router_over(*two_by_two(), p1="p1 is down", d2="d2 is frozen")
    assert pick_ids(router, 3) == (["p2"] * 3, ["d1"] * 3)


def test_why_nothing_can_be_served_names_the_workers_that_are_not_fit():
    router = router_over(*two_by_two(), d1="worker d1 is gone", d2="worker d2 is silent")
    with pytest.raises(CapacityError, match=r"no decode worker .*d1 is gone; worker d2 is silent"):
        router.pick("tiny")
    assert "d1 is gone" in router.why_unserved()


def test_what_is_to_be_avoided_is_taken_when_there_is_nothing_else():
    p1, p2, d1, d2 = two_by_two()
    router = router_over(p1, p2, d1, d2)
    for _ in range(3):
        assert router.pick("tiny", {process_of(p1), process_of(d1)}) == Route(p2, d2)
    assert router.pick("tiny", {process_of(p1), process_of(p2), process_of(d1)}).decode == d2
    only = router_over(p1, d1)
    assert only.pick("tiny", {process_of(p1), process_of(d1)}) == Route(p1, d1)


def test_of_workers_that_do_it_all_the_one_to_avoid_comes_last():
    b1, b2 = make_record("b1", "both"), make_record("b2", "both")
    router = router_over(b1, b2)
    assert [router.pick("tiny", {process_of(b1)}) for _ in range(2)] == [Route(b2, b2)] * 2


@pytest.mark.parametrize("others", [("prefill", "decode"), ("both",)])
def test_a_decode_worker_to_avoid_comes_last_though_its_prefill_worker_is_next(others):
    here = [make_record(role, role, transfer=["shm@here"]) for role in ("prefill", "decode")]
    there = [make_record(f"there-{role}", role, transfer=["shm@there"]) for role in others]
    for _ in range(3):
        route = router_over(*here, *there).pick("tiny", {process_of(here[1])})
        assert route == Route(there[0], there[-1])
    everybody = {process_of(record) for record in (*here, *there)}
    assert router_over(*here, *there).pick("tiny", everybody) == Route(*here)


def test_another_process_of_an_avoided_worker_is_welcome():
    p1, _, d1, d2 = two_by_two()
    avoid = {process_of(d1), process_of(d2)}
    reborn = make_record("d1", "decode", incarnation="another")
    router = router_over(p1, reborn, d2)
    assert router.pick("tiny", avoid).decode == router.pick("tiny", avoid).decode == reborn


def test_a_pair_that_failed_its_test_is_used_only_when_none_works():
    p1, p2, d1, d2 = two_by_two()
    bad = BadPairs(("p1", "d1"), ("p2", "d2"))
    prefills, decodes = pick_ids(router_over(p1, p2, d1, d2, pairs=bad), 4)
    assert list(zip(prefills, decodes, strict=True)) == [("p1", "d2"), ("p2", "d1")] * 2
    bad = BadPairs(("p1", "d1"), ("p1", "d2"))
    assert pick_ids(router_over(p1, p2, d1, d2, pairs=bad), 2)[0] == ["p2", "p2"]
    bad = BadPairs(("p1", "d1"))
    assert router_over(p1, d1, pairs=bad).pick("tiny") == Route(p1, d1)
    both = make_record("b1", "both")
    assert router_over(p1, d1, both, pairs=bad).pick("tiny") == Route(both, both)


def test_an_answer_goes_on_with_the_weights_it_began_with():
    records = [
        make_record(f"{role[0]}{digest}", role, model_digest=digest)
        for role in ("prefill", "decode")
        for digest in ("old", "new")
    ]
    router = router_over(*records)
    assert {router.pick("tiny", model_digest="old").prefill.worker_id for _ in range(3)} == {"pold"}
    with pytest.raises(CapacityError, match="weights"):
        router.pick("tiny", model_digest="lost")


def test_an_answer_goes_on_where_its_context_fits():
    sizes = {"p1": 2048, "p2": 4096, "d1": 4096, "d2": 1024}
    router = router_over(
        *(
            make_record(name, "prefill" if name[0] == "p" else "decode", context_tokens=size)
            for name, size in sizes.items()
        )
    )
    picked = [router.pick("tiny", context_tokens=4096) for _ in range(3)]
    assert {(r.prefill.worker_id, r.decode.worker_id) for r in picked} == {("p2", "d1")}
    with pytest.raises(CapacityError, match="context"):
        router.pick("tiny", context_tokens=4097)


def test_asking_a_worker_is_nobodys_turn():
    router = router_over(
        make_record("p1", "prefill"),
        make_record("p2", "prefill"),
        make_record("d1", "decode"),
        make_record("d2", "decode", state="draining"),
        make_record("b1", "both", model="other"),
        p2="frozen",
    )
    asked = [router.any_worker("tiny") for _ in range(4)]
    assert {record.worker_id for record in asked} == {"p1", "d1"}
    left = router.any_worker("tiny", avoid={process_of(asked[0])})
    assert left.worker_id != asked[0].worker_id
    with pytest.raises(CapacityError):
        router.any_worker("tiny", avoid={process_of(record) for record in asked})
    with pytest.raises(ModelNotFound):
        router.any_worker("none")

    asking = router_over(
        *(make_record(w, "prefill") for w in ("p1", "p2")), make_record("d1", "decode")
    )
    prefills = []
    for _ in range(4):
        asking.any_worker("tiny")
        prefills.append(asking.pick("tiny").prefill.worker_id)
    assert prefills == ["p1", "p2", "p1", "p2"]


class KeptView(FixedDirectory):
    """Gives the same tuple until `records` is set."""

    def workers(self):
        return self.records


class CountingFitness(Unfit):
    def __init__(self):
        super().__init__()
        self.num_asked = 0

    def why_not(self, record):
        self.num_asked += 1
        return super().why_not(record)


def test_a_pick_among_many_workers_looks_at_few():
    directory = KeptView(
        *(make_record(f"p{i:03}", "prefill") for i in range(100)),
        *(make_record(f"d{i:03}", "decode") for i in range(100)),
    )
    fitness = CountingFitness()
    router = Router(directory, fitness, BadPairs())
    prefills, decodes = pick_ids(router, 200)
    assert fitness.num_asked == 2 * 200
    assert prefills == [f"p{i % 100:03}" for i in range(200)]
    assert decodes == [f"d{i % 100:03}" for i in range(200)]


def test_turns_outlive_a_snapshot_and_fitness_is_asked_each_time():
    p1, p2, d1, d2 = two_by_two()
    directory, fitness = KeptView(p1, p2, d1, d2), Unfit()
    router = Router(directory, fitness)
    assert pick_ids(router, 3) == (["p1", "p2", "p1"], ["d1", "d2", "d1"])
    directory.records = (p1, p2, d1, d2, make_record("d3", "decode"))
    assert pick_ids(router, 3) == (["p2", "p1", "p2"], ["d3", "d2", "d1"])
    fitness.reasons["p1"] = "frozen"
    assert pick_ids(router, 2)[0] == ["p2", "p2"]
    fitness.reasons.clear()
    assert pick_ids(router, 2)[0] == ["p1", "p2"]
