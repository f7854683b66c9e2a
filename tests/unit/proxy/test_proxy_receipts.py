import msgspec
import pytest
from request_bodies import completion
from scripted_worker import finished, make_record, receipt, token

from neuron_di.clock import Deadline
from neuron_di.types import RequestId
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.receipts import Continued, ReceiptStore, RequestRecord
from neuron_di_proxy.route import Route

REQUEST = completion(max_tokens=5).choice(0)


def attempt(number=0, *, emitted=(), **changes):
    route = Route(
        make_record("p1", "prefill", **changes), make_record("d1", "decode", numerics="a")
    )
    return Attempt(
        request_id=RequestId("r1"),
        number=number,
        request=REQUEST,
        route=route,
        emitted=emitted,
        accepted_s=0.0,
        deadline=Deadline(60.0),
    )


def record(request_id="r1", *attempts):
    running = RequestRecord(request_id=RequestId(request_id), model="tiny", accepted_s=10.0)
    running.attempts.extend(attempts)
    return running


def test_latencies_are_the_clients():
    running = record()
    running.first_token_s, running.last_token_s, running.emitted = 10.5, 11.5, [1, 2, 3, 4, 5]
    sealed = running.seal("length")
    assert sealed.ttft_s == 0.5
    assert sealed.itl_mean_s == 0.25


def test_a_request_without_tokens_has_no_latencies():
    sealed = record().seal("error")
    assert (sealed.ttft_s, sealed.itl_mean_s, sealed.num_generated) == (None, None, 0)
    one = record()
    one.count_token(token(0))
    assert one.seal("cancelled").itl_mean_s is None


def test_a_request_that_found_no_worker_has_none():
    sealed = record().seal("error")
    assert (sealed.attempt, sealed.prefill_worker, sealed.decode_worker) == (None, None, None)
    assert sealed.attempts == []


def test_a_transfer_that_both_ends_report_is_counted_once():
    tried = attempt()
    tried.prefill = receipt("p1", "prefill", kv_bytes=100, transfer_s=0.1, verify_s=0.25)
    came = {"kv_bytes": 100, "link": "shm", "link_reason": "shm: chosen"}
    tried.decode = receipt("d1", "decode", transfer_s=0.2, verify_s=0.5, **came)
    running = record("r1", tried)
    running.finished = finished(3)
    sealed = running.seal("length")
    assert (sealed.kv_bytes, sealed.transfer_s) == (100, 0.2)
    assert (sealed.link, sealed.link_reason) == ("shm", "shm: chosen")
    assert sealed.verify_s == 0.75  # made at one end, compared at the other
    assert (sealed.num_prompt, sealed.num_generated) == (5, 3)
    assert (sealed.continued, sealed.grade) == (0, None)


def test_a_prompt_that_was_computed_counts_however_the_request_ends():
    lost, again = attempt(), attempt(1, emitted=(100,))
    lost.num_prompt, lost.num_cached = 5, 2
    again.num_prompt, again.num_cached = 5, 5
    running = record("r1", attempt(), lost, again)
    running.emitted = [100]
    sealed = running.seal("cancelled")
    assert (sealed.num_prompt, sealed.num_cached, sealed.num_generated) == (5, 2, 1)
    never = record("r1", attempt()).seal("cancelled")
    assert (never.num_prompt, never.num_cached) == (0, 0)


def test_the_one_receipt_of_a_worker_that_does_it_all_is_counted_once():
    tried = attempt()
    tried.prefill = tried.decode = receipt("b1", "both", verify_s=0.5)
    assert record("r1", tried).seal("length").verify_s == 0.5


def test_every_attempt_is_on_the_receipt():
    failed, last = attempt(numerics="a"), attempt(1, emitted=(100, 101))
    failed.num_tokens, failed.code, failed.blamed = 2, "peer_gone", failed.route.decode
    last.num_tokens = 1
    sealed = record("r1", failed, last).seal("length")
    assert [msgspec.structs.asdict(each) for each in sealed.attempts] == [
        {
            "attempt": 0,
            "prefill_worker": "p1",
            "decode_worker": "d1",
            "first_index": 0,
            "num_tokens": 2,
            "code": "peer_gone",
            "blamed": "d1",
        },
        {
            "attempt": 1,
            "prefill_worker": "p1",
            "decode_worker": "d1",
            "first_index": 2,
            "num_tokens": 1,
            "code": None,
            "blamed": None,
        },
    ]
    assert (sealed.attempt, sealed.continued) == (1, 1)


@pytest.mark.parametrize(
    ("workers", "grade"),
    [(("a", "a"), "exact"), (("b", "a"), "recomputed"), ((None, None), "recomputed")],
)
def test_a_continued_answer_is_exact_if_all_workers_round_alike(workers, grade):
    first, second = workers
    tries = [attempt(numerics=first), attempt(1, emitted=(1,), numerics=second)]
    for each in (tries, tries[::-1]):
        running = record("r1", *each)
        assert running.continued() == Continued(continued=1, grade=grade)


def test_a_retry_is_no_continuation():
    assert record("r1", attempt(), attempt(1)).continued() is None


@pytest.mark.parametrize("answer_id", ["r1", "cmpl-r1", "chatcmpl-r1"])
def test_a_receipt_is_found_by_the_answers_id(answer_id):
    store = ReceiptStore()
    store.add(record().seal("stop"))
    assert store.get(answer_id).request_id == "r1"
    assert store.get("r2") is None


def test_only_the_last_receipts_are_kept():
    store = ReceiptStore(receipts_max=3)
    for number in range(5):
        store.add(record(f"r{number}").seal("stop"))
    assert [store.get(f"r{number}") is not None for number in range(5)] == [False] * 2 + [True] * 3
