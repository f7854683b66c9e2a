"""etcd3's names, from plain synchronous code, at a real etcd."""

import asyncio
import queue
import threading

import pytest
from etcd_kit import require_etcd, running_etcd

from neuron_di.errors import BadRequest, ConfigError, PeerGone, PeerRefused, PeerTimeout, TooLarge
from neuron_di.etcd.etcd3_names import DeleteEvent, PutEvent, client
from neuron_di.etcd.failures import HistoryGone


@pytest.fixture(scope="module")
def etcd():
    """It runs on a loop of its own: the tests are synchronous."""
    require_etcd()
    loop = asyncio.new_event_loop()
    running = running_etcd()
    yield loop.run_until_complete(running.__aenter__())
    loop.run_until_complete(running.__aexit__(None, None, None))
    loop.close()


@pytest.fixture
def etcd3(etcd):
    with client(port=etcd.members[0].port, host="127.0.0.1") as etcd3:
        etcd3.delete_prefix("")
        yield etcd3


def test_keys(etcd3):
    assert etcd3.get("/a") == (None, None)
    etcd3.put("/a", "1")
    value, metadata = etcd3.get("/a")
    assert (value, metadata.key, metadata.version, metadata.lease_id) == (b"1", b"/a", 1, 0)
    etcd3.put("/b", b"2")
    etcd3.put("/c/d", "3")
    assert [value for value, _ in etcd3.get_prefix("/c")] == [b"3"]
    assert [value for value, _ in etcd3.get_all()] == [b"1", b"2", b"3"]
    assert [value for value, _ in etcd3.get_all(sort_order="descend")] == [b"3", b"2", b"1"]
    assert [value for value, _ in etcd3.get_range("/a", "/c")] == [b"1", b"2"]
    assert (etcd3.delete("/a"), etcd3.delete("/a")) == (True, False)
    assert etcd3.delete_prefix("/") == 2
    assert etcd3.status().version >= "3.4"


def test_a_part_of_the_keys_does_not_pass_for_all(etcd3, monkeypatch):
    etcd3.put("/a", "1" * 1000)
    etcd3.put("/b", "2" * 1000)
    monkeypatch.setattr("neuron_di.etcd.client.LIST_BYTES_MAX", 1500)
    with pytest.raises(TooLarge, match="1 keys more than are read at once"):
        etcd3.get_all()
    assert [value for value, _ in etcd3.get_prefix("/b")] == [b"2" * 1000]


def test_leases(etcd3):
    lease = etcd3.lease(60)
    etcd3.put("/a", "1", lease=lease)
    etcd3.put("/b", "1", lease=lease.id)
    assert (lease.granted_ttl, sorted(lease.keys)) == (60, [b"/a", b"/b"])
    assert 0 < lease.remaining_ttl <= 60
    assert lease.refresh()[0].TTL == 60
    lease.revoke()
    assert etcd3.get("/a") == (None, None)
    assert [answer.TTL for answer in etcd3.refresh_lease(lease.id)] == [0]
    etcd3.revoke_lease(lease.id)
    with pytest.raises(PeerRefused, match="lease"):
        etcd3.put("/a", "1", lease=lease)


def test_transactions(etcd3):
    made = etcd3.transactions
    assert etcd3.put_if_not_exists("/a", "1")
    assert not etcd3.put_if_not_exists("/a", "2")
    assert etcd3.replace("/a", "1", "2")
    assert not etcd3.replace("/a", "1", "3")
    done, results = etcd3.transaction(
        compare=[made.value("/a") == "2", made.version("/a") > 1, made.create("/a") != 0],
        success=[made.get("/a"), made.delete("/a"), made.put("/b", "x")],
        failure=[made.put("/c", "x")],
    )
    assert done
    assert [value for value, _ in results[0]] == [b"2"]
    assert results[1].response_delete_range.deleted == 1
    assert [metadata.key for _, metadata in etcd3.get_all()] == [b"/b"]
    with pytest.raises(BadRequest):
        etcd3.transaction([made.mod("/a")])


def test_watches_go_on_after_a_restart_and_end_when_cancelled(etcd, etcd3):
    events, cancel = etcd3.watch_prefix("/w/", prev_kv=True)
    etcd3.put("/w/1", "a")
    assert next(events) == PutEvent(b"/w/1", b"a", events_revision(etcd3, "/w/1"), 1, None)
    etcd.members[0].kill()
    etcd.members[0].launch()
    put_again(etcd3, "/w/1", "b")
    event = next(events)
    assert (event.value, event.prev_value) == (b"b", b"a")
    etcd3.delete("/w/1")
    assert isinstance(next(events), DeleteEvent)
    cancel()
    assert list(events) == []


def test_an_etcd_that_was_wiped_ends_a_watch(etcd, etcd3):
    heard = queue.SimpleQueue()
    for _ in range(100):
        etcd3.put("/before", "x")
    etcd3.add_watch_callback("/w", heard.put)
    member = etcd.members[0]
    member.kill()
    member.wipe()
    member.launch()
    put_again(etcd3, "/w", "a")
    assert isinstance(heard.get(timeout=30), HistoryGone)


def events_revision(etcd3, key):
    return etcd3.get(key)[1].mod_revision


def put_again(etcd3, key, value):
    while True:
        try:
            return etcd3.put(key, value)
        except PeerGone:
            continue


def test_a_callback_may_call_the_client(etcd3):
    heard = queue.SimpleQueue()

    def answer(response):
        for event in response.events:
            etcd3.put("/answer", event.value)
            heard.put(event.key)

    watch_id = etcd3.add_watch_callback("/question", answer)
    etcd3.put("/question", "42")
    assert heard.get(timeout=30) == b"/question"
    assert etcd3.get("/answer")[0] == b"42"
    etcd3.cancel_watch(watch_id)
    etcd3.cancel_watch(watch_id)


def test_what_ends_a_watch_is_said(etcd3):
    etcd3.put("/a", "1")
    etcd3.compact(etcd3.put("/a", "2"))
    events, _ = etcd3.watch("/a", start_revision=1)
    with pytest.raises(HistoryGone):
        next(events)


def test_threads_share_a_client_and_nothing_is_left(etcd):
    with client(port=etcd.members[0].port, host="127.0.0.1") as etcd3:
        errors = []

        def work(number):
            try:
                for step in range(20):
                    etcd3.put(f"/t/{number}", str(step))
                    assert etcd3.get(f"/t/{number}")[0] == str(step).encode()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        events, _ = etcd3.watch("/never")
        for thread in threads:
            thread.join()
        assert errors == []
    assert list(events) == [], "closing the client ends its watches"
    assert not [each.name for each in threading.enumerate() if each.name.startswith("etcd")]
    etcd3.close()
    with pytest.raises(PeerGone, match="closed"):
        etcd3.get("/a")


def test_watches_that_end_leave_nothing(etcd3):
    for _ in range(3):
        _, cancel = etcd3.watch("/a")
        cancel()
    revision = etcd3.put("/a", "1")
    etcd3.compact(etcd3.put("/a", "2"))
    for _ in range(3):
        events, _ = etcd3.watch("/a", start_revision=revision)
        with pytest.raises(HistoryGone):
            list(events)
    while etcd3._watches:  # the last one ends once it was told
        threading.Event().wait(0.01)


@pytest.mark.parametrize("begin", ["watch", "watch_prefix", "add_watch_callback"])
def test_a_watch_that_cannot_begin_ends_at_its_time_out(begin):
    with client(host="127.0.0.1", port=1, timeout=0.3) as etcd3:
        arguments = ("/", print) if begin == "add_watch_callback" else ("/",)
        with pytest.raises(PeerTimeout, match=r"did not begin a watch within 0\.3 s"):
            getattr(etcd3, begin)(*arguments)


def test_a_call_of_another_thread_ends_when_the_client_is_closed(etcd):
    ended = []

    def call():
        try:
            etcd3.transaction([], [])
        except PeerGone as error:
            ended.append(error)

    etcd3 = client(port=etcd.members[0].port, host="127.0.0.1", timeout=60)
    etcd3.get("/a")
    etcd.members[0].freeze()
    try:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        while etcd3._client.num_attempts < 2:
            threading.Event().wait(0.01)
        etcd3.close()
        thread.join(30)
        assert len(ended) == 1
    finally:
        etcd.members[0].thaw()


def test_a_user_needs_a_password():
    with pytest.raises(ConfigError, match="needs a password"):
        client(user="worker")
    with pytest.raises(ConfigError, match="needs a password"):
        client(password="secret")


def test_there_is_no_lock(etcd3):
    with pytest.raises(NotImplementedError, match="lease is none"):
        etcd3.lock("name")
