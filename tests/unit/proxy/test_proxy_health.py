"""Who lives, on virtual time with the default limits: probes each 0.5 s, frozen after 2.5 s."""

import asyncio

import msgspec
import pytest
from virtual_cluster import one_by_one, two_by_two
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.errors import PeerGone, PeerTimeout, RemoteProtocolError
from neuron_di_proxy.breaker import FAILURES_MAX, OPEN_S

GONE = PeerGone("the connection ended")


class Losses(list):
    """What a leg was told, and when."""

    def __call__(self, error):
        self.append((type(error), now_s()))


def states(cluster):
    return {r.record.worker_id: r.state for r in cluster.health.reports()}


@virtual
async def test_a_worker_that_answers_is_up():
    async with one_by_one() as cluster:
        assert states(cluster) == {"p1": "new", "d1": "new"}
        assert cluster.health.is_usable(cluster.workers["d1"].record)  # innocent until asked
        await asyncio.sleep(0.1)
        assert states(cluster) == {"p1": "up", "d1": "up"}


@virtual
async def test_a_crash_is_confirmed_at_once_and_ends_open_legs():
    async with one_by_one() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        with cluster.health.watching(decode.record, lost):
            await asyncio.sleep(5.2)
            decode.kill()
            num_asked, killed_s = decode.num_asked, now_s()
            await asyncio.sleep(1.0)
            assert lost[0][0] is PeerGone
            assert lost[0][1] - killed_s <= 0.51
            assert len(lost) == 1  # and never again
            assert decode.num_asked >= num_asked + 2
        assert states(cluster)["d1"] == "down"
        assert "d1 is gone" in cluster.health.why_not(decode.record)


@virtual
async def test_one_broken_connection_is_no_crash():
    async with one_by_one() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        answers = [GONE]
        status = decode.status

        async def break_once(timeout_s):
            if answers:
                raise answers.pop()
            return await status(timeout_s)

        with cluster.health.watching(decode.record, lost):
            await asyncio.sleep(1.1)
            decode.status = break_once
            await asyncio.sleep(3.0)
        assert answers == lost == []
        assert states(cluster)["d1"] == "up"


@pytest.mark.parametrize("phase_s", [0.0, 0.1, 0.2, 0.3, 0.4, 0.499])
@virtual
async def test_a_frozen_worker_is_found_within_3_s(phase_s):
    async with one_by_one() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        with cluster.health.watching(decode.record, lost):
            await asyncio.sleep(10.0 + phase_s)
            decode.freeze()
            frozen_s = now_s()
            await asyncio.sleep(5.0)
        [(kind, lost_s)] = lost
        assert kind is PeerTimeout
        assert 2.0 <= lost_s - frozen_s <= 2.55  # less than 3 s, with room for a busy machine
        assert states(cluster)["d1"] == "frozen"
        decode.thaw()
        await asyncio.sleep(2.0)
        assert states(cluster)["d1"] == "up"
        with cluster.health.watching(decode.record, lost):
            assert len(lost) == 1  # what was is over


@virtual
async def test_a_worker_that_is_stuck_in_a_step_is_frozen_until_it_goes_on():
    async with one_by_one() as cluster:
        prefill, lost = cluster.workers["p1"], Losses()
        with cluster.health.watching(prefill.record, lost):
            await asyncio.sleep(1.1)
            prefill.says = {"is_stuck": True}
            await asyncio.sleep(3.0)
        assert [kind for kind, _ in lost] == [PeerTimeout]
        assert states(cluster) == {"p1": "frozen", "d1": "up"}
        assert "one step for too long" in cluster.health.why_not(prefill.record)
        prefill.says = {}
        await asyncio.sleep(1.0)
        assert states(cluster)["p1"] == "up"


@virtual
async def test_a_short_freeze_is_no_matter():
    async with one_by_one() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        with cluster.health.watching(decode.record, lost):
            for _ in range(5):
                await asyncio.sleep(3.0)
                decode.freeze()
                await asyncio.sleep(1.0)
                decode.thaw()
        assert lost == []


@virtual
async def test_answers_that_mean_nothing_are_no_answers():
    async def garbage(timeout_s):
        raise RemoteProtocolError("HTTP status 500")

    async with one_by_one() as cluster:
        await asyncio.sleep(1.0)
        cluster.workers["d1"].status = garbage
        await asyncio.sleep(3.1)
        assert states(cluster) == {"p1": "up", "d1": "frozen"}


@virtual
async def test_rare_questions_still_get_an_answer_before_a_worker_counts_as_frozen():
    async with one_by_one(probe_interval_s=10.0, freeze_timeout_s=1.0) as cluster:
        lost = Losses()
        with cluster.health.watching(cluster.workers["d1"].record, lost):
            await asyncio.sleep(100.0)
        assert lost == []


@pytest.mark.parametrize("says", [{"has_failed": True}, "restart"])
@virtual
async def test_a_worker_that_is_not_what_it_was_is_down(says):
    async with one_by_one() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        record = decode.record
        await asyncio.sleep(1.0)
        with cluster.health.watching(record, lost):
            if says == "restart":
                decode.restart()
            else:
                decode.says = says
            await asyncio.sleep(0.6)
            assert [kind for kind, _ in lost] == [PeerGone]
        assert not cluster.health.is_usable(record)
        if says == "restart":
            cluster.relist()
            assert cluster.health.is_usable(decode.record)
            await asyncio.sleep(1.1)
            assert states(cluster)["d1"] == "up"
            assert len(cluster.health._watches) == 2  # its predecessor is forgotten


@virtual
async def test_a_draining_worker_keeps_its_legs_and_gets_no_more(caplog):
    caplog.set_level("INFO")
    async with one_by_one() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        with cluster.health.watching(decode.record, lost):
            await asyncio.sleep(1.0)
            decode.record = msgspec.structs.replace(decode.record, state="draining")
            await asyncio.sleep(0.6)
        assert lost == []
        assert states(cluster)["d1"] == "draining"
        assert not cluster.health.is_usable(decode.record)
    told = [
        record.getMessage()
        for record in caplog.records
        if getattr(record, "event_fields", {}).get("worker") == "d1"
    ]
    assert told == ["worker_up", "worker_draining"]


@virtual
async def test_a_suspect_is_asked_at_once_and_gets_nothing_before_it_answers():
    async with one_by_one() as cluster:
        decode = cluster.workers["d1"]
        await asyncio.sleep(1.1)
        num_asked = decode.num_asked
        cluster.health.blame(decode.record, GONE)
        assert states(cluster)["d1"] == "suspect"
        assert not cluster.health.is_usable(decode.record)
        blamed_s = now_s()
        await cluster.health.wait_change(5.0)
        assert now_s() - blamed_s < 0.1
        assert decode.num_asked == num_asked + 1
        assert cluster.health.is_usable(decode.record)


@virtual
async def test_other_failures_make_no_suspect():
    async with one_by_one() as cluster:
        await asyncio.sleep(1.1)
        cluster.health.blame(cluster.workers["d1"].record, RemoteProtocolError("garbage"))
        assert states(cluster)["d1"] == "up"


@virtual
async def test_a_worker_that_fails_again_and_again_is_left_alone_and_tried_later():
    async with one_by_one() as cluster:
        decode = cluster.workers["d1"].record
        for _ in range(FAILURES_MAX):
            await asyncio.sleep(1.0)
            cluster.health.blame(decode, RemoteProtocolError("garbage"))
        assert states(cluster)["d1"] == "broken"
        assert "failed too often" in cluster.health.why_not(decode)
        await asyncio.sleep(OPEN_S)
        assert cluster.health.is_usable(decode)
        for state in ("broken", "up"):
            with cluster.health.watching(decode, Losses()) as praise:
                assert not cluster.health.is_usable(decode)  # one trial at a time
                praise()
                assert cluster.health.is_usable(decode)  # although its leg goes on
                assert states(cluster)["d1"] == state


@virtual
async def test_what_is_not_certain_feeds_no_breaker():
    async with one_by_one() as cluster:
        decode = cluster.workers["d1"].record
        for _ in range(2 * FAILURES_MAX):
            await asyncio.sleep(1.0)
            cluster.health.blame(decode, RemoteProtocolError("garbage"), is_certain=False)
        assert states(cluster)["d1"] == "up"


@virtual
async def test_a_slow_answer_is_waited_for_as_long_as_silence_is_borne():
    async def slow_status(timeout_s):
        if timeout_s < 1.5:
            await asyncio.sleep(timeout_s)
            raise PeerTimeout("too slow")
        await asyncio.sleep(1.5)  # under load, and well within freeze_timeout_s
        return await status(timeout_s)

    async with one_by_one() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        status, decode.status = decode.status, slow_status
        with cluster.health.watching(decode.record, lost):
            await asyncio.sleep(60.0)
        assert lost == []
        assert states(cluster)["d1"] == "up"


@pytest.mark.parametrize("end", ["dead", "slowly dead", "alive", "frozen"])
@virtual
async def test_whether_a_suspect_is_lost_is_known_after_its_answer(end):
    async def die_slowly(timeout_s):
        await asyncio.sleep(0.45)
        raise GONE

    async with one_by_one() as cluster:
        decode = cluster.workers["d1"]
        await asyncio.sleep(1.1)
        if end == "dead":
            decode.kill()
        elif end == "slowly dead":
            decode.status = die_slowly
        elif end == "frozen":
            decode.freeze()
        cluster.health.blame(decode.record, GONE)
        cluster.directory.records = []  # it is forgotten only after that
        asked_s = now_s()
        assert await cluster.health.is_lost(decode.record, 1.0) == ("dead" in end)
        waited_s = {"frozen": 1.0, "slowly dead": 0.9}.get(end, 0.0)
        assert now_s() - asked_s == pytest.approx(waited_s, abs=0.01)


@virtual
async def test_a_request_on_a_worker_that_is_down_hears_of_it_at_once():
    async with one_by_one() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        decode.kill()
        await asyncio.sleep(1.0)
        with cluster.health.watching(decode.record, lost):
            assert len(lost) == 1
            await asyncio.sleep(5.0)
        assert len(lost) == 1


@virtual
async def test_time_in_which_the_proxy_itself_was_stopped_is_nobodys_silence():
    async with two_by_two() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        status = decode.status

        async def slow_status(timeout_s):
            await asyncio.sleep(0.3)
            await asyncio.sleep(0.05)  # also after the proxy goes on, it takes a while to hear
            return await status(timeout_s)

        decode.status = slow_status
        with cluster.health.watching(decode.record, lost):
            for phase in range(40):
                await asyncio.sleep(2.0 + 0.025 * phase)
                asyncio.get_running_loop().now_s += 60.0  # as after SIGSTOP and SIGCONT
            await asyncio.sleep(5.0)
        assert lost == []
        assert set(states(cluster).values()) == {"up"}


@virtual
async def test_a_worker_that_the_directory_forgets_is_forgotten_without_legs_only():
    async with one_by_one() as cluster:
        decode = cluster.workers["d1"]
        await asyncio.sleep(1.0)
        with cluster.health.watching(decode.record, Losses()):
            cluster.directory.records = []
            await asyncio.sleep(5.0)
            num_asked = decode.num_asked
            assert num_asked > 8
        await asyncio.sleep(1.0)
        num_asked = decode.num_asked
        await asyncio.sleep(5.0)
        assert decode.num_asked == num_asked
        assert cluster.health._watches == {}


@virtual
async def test_a_leg_on_a_worker_that_was_never_listed_is_watched():
    async with one_by_one() as cluster:
        cluster.directory.records = []
        lost = Losses()
        with cluster.health.watching(cluster.workers["d1"].record, lost):
            await asyncio.sleep(2.0)
            cluster.workers["d1"].kill()
            await asyncio.sleep(1.0)
        assert len(lost) == 1


@virtual
async def test_a_directory_that_fails_stops_nothing():
    def fail():
        raise RuntimeError("no directory")

    async with one_by_one() as cluster:
        workers = cluster.directory.workers
        cluster.directory.workers = fail
        await asyncio.sleep(2.0)
        cluster.directory.workers = workers
        await asyncio.sleep(1.0)
        assert states(cluster) == {"p1": "up", "d1": "up"}


@virtual
async def test_nothing_is_asked_after_the_end():
    async with one_by_one() as cluster:
        await asyncio.sleep(1.0)
    num_asked = cluster.workers["d1"].num_asked
    await asyncio.sleep(10.0)
    assert cluster.workers["d1"].num_asked == num_asked
