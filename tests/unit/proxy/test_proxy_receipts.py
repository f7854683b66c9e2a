import pytest
from scripted_worker import finished, receipt

from neuron_di.types import RequestId, WorkerId
from neuron_di_proxy.receipts import ReceiptStore, RequestRecord


def record(request_id="r1"):
    return RequestRecord(
        request_id=RequestId(request_id),
        attempt=0,
        model="tiny",
        prefill_worker=WorkerId("p1"),
        decode_worker=WorkerId("d1"),
        accepted_s=10.0,
    )


def test_latencies_are_the_clients():
    running = record()
    running.first_token_s, running.last_token_s, running.num_tokens = 10.5, 11.5, 5
    sealed = running.seal("length")
    assert sealed.ttft_s == 0.5
    assert sealed.itl_mean_s == 0.25


def test_a_request_without_tokens_has_no_latencies():
    sealed = record().seal("error")
    assert (sealed.ttft_s, sealed.itl_mean_s, sealed.num_generated) == (None, None, 0)
    one = record()
    one.count_token()
    assert one.seal("cancelled").itl_mean_s is None


def test_a_transfer_that_both_ends_report_is_counted_once():
    running = record()
    running.prefill = receipt("p1", "prefill", kv_bytes=100, transfer_s=0.1)
    running.decode = receipt("d1", "decode", kv_bytes=100, transfer_s=0.2)
    running.finished = finished(3)
    sealed = running.seal("length")
    assert (sealed.kv_bytes, sealed.transfer_s) == (100, 0.2)
    assert (sealed.num_prompt, sealed.num_generated) == (5, 3)


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
