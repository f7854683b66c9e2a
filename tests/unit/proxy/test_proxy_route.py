import pytest
from scripted_worker import make_record

from neuron_di.errors import CapacityError
from neuron_di_proxy.route import ModelNotFound, Pair, Router, Whole


class FixedDirectory:
    def __init__(self, *records):
        self.records = records

    def workers(self):
        return tuple(self.records)


def pick_ids(router, times):
    pairs = [router.pick("tiny") for _ in range(times)]
    return [p.prefill.worker_id for p in pairs], [p.decode.worker_id for p in pairs]


def test_round_robin_over_2p3d_as_in_the_seed():
    directory = FixedDirectory(
        *(make_record(f"p{i}", "prefill") for i in (1, 2)),
        *(make_record(f"d{i}", "decode") for i in (1, 2, 3)),
    )
    prefills, decodes = pick_ids(Router(directory), 6)
    assert prefills == ["p1", "p2", "p1", "p2", "p1", "p2"]
    assert decodes == ["d1", "d2", "d3", "d1", "d2", "d3"]


def test_a_worker_that_joins_gets_the_next_request():
    directory = FixedDirectory(
        make_record("p1", "prefill"), make_record("d1", "decode"), make_record("d2", "decode")
    )
    router = Router(directory)
    pick_ids(router, 4)
    directory.records += (make_record("d3", "decode"),)
    assert pick_ids(router, 4)[1] == ["d3", "d1", "d2", "d3"]


def test_workers_that_come_and_go_are_forgotten():
    directory = FixedDirectory()
    router = Router(directory)
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
    assert pick_ids(Router(directory), 2)[1] == ["d2", "d2"]


@pytest.mark.parametrize("field", ["model_digest", "layout_digest"])
def test_a_pair_agrees_on_weights_and_layout(field):
    directory = FixedDirectory(
        make_record("p1", "prefill"),
        make_record("p2", "prefill", **{field: "other"}),
        make_record("p3", "prefill", **{field: "nobody has this"}),
        make_record("d1", "decode"),
        make_record("d2", "decode", **{field: "other"}),
    )
    prefills, decodes = pick_ids(Router(directory), 4)
    assert list(zip(prefills, decodes, strict=True)) == [("p1", "d1"), ("p2", "d2")] * 2


def test_each_group_of_agreeing_workers_is_used_evenly():
    directory = FixedDirectory(
        *(make_record(f"p{g}", "prefill", model_digest=g) for g in "ab"),
        *(make_record(f"d{g}{i}", "decode", model_digest=g) for g in "ab" for i in (1, 2)),
    )
    assert sorted(set(pick_ids(Router(directory), 4)[1])) == ["da1", "da2", "db1", "db2"]


def test_a_worker_of_both_roles_serves_when_there_is_no_pair():
    both = make_record("b1", "both")
    directory = FixedDirectory(make_record("p1", "prefill"), both)
    router = Router(directory)
    assert router.pick("tiny") == Whole(both)
    decode = make_record("d1", "decode")
    directory.records += (decode,)
    assert router.pick("tiny") == Pair(directory.records[0], decode)
    assert router.why_unserved() is None


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ((), "no prefill and no decode worker is ready"),
        ((make_record("p1", "prefill"),), "no decode worker is ready"),
        ((make_record("d1", "decode"),), "no prefill worker is ready"),
        (
            (make_record("p1", "prefill"), make_record("d1", "decode", layout_digest="x")),
            "agree on its weights and KV layout",
        ),
    ],
)
def test_what_is_missing_is_said(records, text):
    router = Router(FixedDirectory(*records))
    with pytest.raises(CapacityError, match=text):
        router.pick("tiny")
    assert router.why_unserved() is not None


def test_a_model_that_no_worker_has_does_not_exist():
    router = Router(FixedDirectory(make_record("p1", "prefill"), make_record("d1", "decode")))
    with pytest.raises(ModelNotFound):
        router.pick("large")


def test_models_are_named_once():
    router = Router(
        FixedDirectory(
            make_record("p1", "prefill"),
            make_record("d1", "decode"),
            make_record("b1", "both", model="large"),
        )
    )
    assert router.models() == ["large", "tiny"]
