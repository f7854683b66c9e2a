"""The worker's port: legs and HTTP side by side, and how each leg ends."""

import asyncio
import logging
import socket
import threading

import aiohttp
import pytest
from link_kit import WAIT_S, LinkServer, RawLink, next_status
from worker_kit import PROMPT, is_at_rest, prefill_leg, until

from neuron_di.errors import ConfigError, KvMissing
from neuron_di.obs.limited_logger import LINES_MAX
from neuron_di.types import WorkerId
from neuron_di.wire import (
    Failed,
    Finished,
    LegReceipt,
    Parked,
    encode_json,
    prefill_leg_decoder,
    status_decoder,
)
from neuron_di.wire.leg_link import CloseLeg, OpenLeg
from neuron_di.worker import leg_link_server
from neuron_di.worker.orders import Orders
from neuron_di.worker.server import LegAnswers, listening

RECEIPT = LegReceipt(worker_id=WorkerId("w"), role="both", pid=1)
FINISHED = Finished(reason="length", num_prompt=1, num_generated=1, receipt=RECEIPT)


async def events_of(link, number=0):
    """The rest of a leg: its token ids, and its other events."""
    token_ids, events = [], []
    while not (events and isinstance(events[-1], Failed | Finished)):
        told = await link.next()
        token_ids += [token_id for leg, _, token_id, _ in told.tokens if leg == number]
        events += [event for leg, event in told.events if leg == number]
    return token_ids, events


async def failure(run, *, kind="whole", document=None, **options):
    """What the proxy hears of a leg that `run` answers."""
    answers = LegAnswers({"whole": (prefill_leg_decoder, run)}, **options)
    if document is None:
        document = encode_json(prefill_leg("r"))
    async with LinkServer(open_here=answers.open) as server, RawLink(server.port) as link:
        link.send(OpenLeg(0, kind, document))
        _, (event,) = await events_of(link)
        return event


async def complete(leg):
    yield FINISHED


async def raises_an_error(leg):
    raise KvMissing("it is not here", param="p")
    yield


async def crashes(leg):
    raise ZeroDivisionError("a secret")
    yield


async def stops_short(leg):
    return
    yield


async def test_a_leg_that_fails_says_why():
    failed = await failure(raises_an_error)
    assert (failed.code, failed.message, failed.param) == ("kv_missing", "it is not here", "p")
    assert (failed.http_status, failed.fault) == (502, "peer")


async def test_many_legs_that_fail_do_not_fill_the_log(caplog):
    caplog.set_level(logging.INFO)
    answers = LegAnswers({"whole": (prefill_leg_decoder, raises_an_error)})
    document = encode_json(prefill_leg("r"))
    async with LinkServer(open_here=answers.open) as server, RawLink(server.port) as link:
        for number in range(50):
            link.send(OpenLeg(number, "whole", document))
            await events_of(link, number)
    assert sum(each.message == "leg_failed" for each in caplog.records) < 50


@pytest.mark.parametrize("run", [crashes, stops_short])
async def test_a_leg_that_ends_by_a_bug_says_only_that(run):
    failed = await failure(run)
    assert failed.code == "internal_error"
    assert "secret" not in failed.message


async def test_a_leg_that_gets_no_thread_may_go_on_elsewhere():
    async def starts_one(leg):
        before = threading.stack_size(1 << 48)  # more than there are addresses
        try:
            await asyncio.to_thread(int)
        finally:
            threading.stack_size(before)
        yield FINISHED

    failed = await failure(starts_one)
    assert (failed.code, failed.retryable) == ("worker_failed", True)
    assert "no further thread" in failed.message


async def test_a_worker_that_drains_refuses():
    assert (await failure(complete, is_draining=lambda: True)).code == "over_capacity"
    assert await failure(complete, is_draining=lambda: False) == FINISHED


async def test_a_leg_of_a_kind_that_this_worker_does_not_answer():
    failed = await failure(complete, kind="decode")
    assert (failed.code, failed.message) == ("worker_failed", "this worker answers no decode legs")


@pytest.mark.parametrize("document", [b"", b"nonsense", b"{}", b"\xff", b"[" * 100_000])
async def test_a_leg_that_cannot_be_read(document):
    assert (await failure(complete, document=document)).code == "remote_protocol_error"


async def test_a_worker_serves_legs_and_http_at_one_port(workers):
    worker = workers.start("both")
    async with listening(worker, "127.0.0.1", 0) as port, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{port}"
        async with RawLink(port) as link:
            link.send(OpenLeg(0, "whole", encode_json(prefill_leg("r", max_tokens=5))))
            token_ids, (finished,) = await events_of(link)
            assert (len(token_ids), finished.num_prompt) == (5, len(PROMPT))
            for _ in range(2):  # on one connection
                async with http.get(f"{url}/status") as response:
                    status = status_decoder.decode(await response.read())
                    assert status.record.worker_id == worker.worker_id
            async with http.get(f"{url}/legs/whole") as response:
                assert response.status == 404

            worker.set_state("draining")
            link.send(OpenLeg(1, "whole", encode_json(prefill_leg("t"))))
            _, (failed,) = await events_of(link, 1)
            assert (failed.code, failed.message) == ("over_capacity", "this worker is draining")


async def test_a_link_is_told_at_once_that_the_engine_has_failed(workers, monkeypatch):
    def fail():
        raise RuntimeError("a bug")

    monkeypatch.setattr(leg_link_server, "ALIVE_INTERVAL_S", 1000.0)  # not by the next look
    worker = workers.start("both")
    async with listening(worker, "127.0.0.1", 0) as port, RawLink(port) as link:
        first = await next_status(link)
        assert (first.record, first.has_failed) == (worker.record(), False)
        with monkeypatch.context() as patch:
            patch.setattr(worker._scheduler, "schedule", fail)
            link.send(OpenLeg(0, "whole", encode_json(prefill_leg("r", max_tokens=5))))
            while (status := (await link.next_frame()).status) is None:
                pass  # what its legs hear, before or after
            assert status.has_failed
    worker._scheduler._waiting._requests.clear()  # what the engine no longer touches


async def test_a_link_is_told_at_once_that_the_worker_drains(workers, monkeypatch):
    monkeypatch.setattr(leg_link_server, "ALIVE_INTERVAL_S", 1000.0)  # not by the next look
    worker = workers.start("both")
    async with listening(worker, "127.0.0.1", 0) as port, RawLink(port) as link:
        worker.set_state("ready")
        while (await next_status(link)).record.state != "ready":
            pass
        worker.set_state("draining")
        assert (await next_status(link)).record.state == "draining"


async def test_a_request_in_pieces_is_http(workers):
    worker = workers.start("both")
    async with listening(worker, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in (b"G", b"ET /status HT", b"TP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


BODY = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
DRAIN = BODY.replace(b"tokenize", b"drain")


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 100 + b"\r\n\r\n",
        b"GET /status HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
        BODY + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nnonsense\r\n",
        BODY + b"Content-Encoding: deflate\r\nContent-Length: 4\r\n\r\n\x78\x9c12",
        DRAIN + b"Content-Encoding: deflate\r\nContent-Length: 4\r\n\r\n\x78\x9c12",
    ],
)
async def test_what_is_no_http_is_the_senders_fault_and_does_not_fill_the_log(workers, caplog, raw):
    worker = workers.start("both")
    orders = Orders(lambda _: None, drain_timeout_s=1.0)
    async with listening(worker, "127.0.0.1", 0, orders=orders) as port:
        caplog.clear()
        for _ in range(LINES_MAX + 3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            async with asyncio.timeout(WAIT_S):
                assert (await reader.readline()).split()[1] == b"400"
                await reader.read()
            writer.close()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) <= LINES_MAX
    assert not any(record.exc_info for record in said)


async def parked_leg(link, number):
    """A leg that goes on until it is ended: its KV waits for a decode worker."""
    link.send(OpenLeg(number, "prefill", encode_json(prefill_leg(f"r{number}"))))
    while not any(isinstance(event, Parked) for _, event in (await link.next()).events):
        pass


async def test_a_leg_that_the_proxy_closes_lets_go(prefill):
    async with listening(prefill, "127.0.0.1", 0) as port, RawLink(port) as link:
        await parked_leg(link, 0)
        assert not is_at_rest(prefill)
        link.send(CloseLeg(0))
        await until(lambda: is_at_rest(prefill))
        await parked_leg(link, 1)
        link.writer.transport.abort()
        await until(lambda: is_at_rest(prefill))


async def test_when_it_ends_its_legs_have_let_go(prefill):
    async with listening(prefill, "127.0.0.1", 0) as port, RawLink(port) as link:
        await parked_leg(link, 0)
        assert len(prefill.legs) == 1
    assert len(prefill.legs) == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)


async def test_an_address_that_is_taken(workers):
    worker = workers.start("both")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: "):
            async with listening(worker, "127.0.0.1", port):
                pass


async def test_who_waits_for_a_body_has_a_deadline(workers, monkeypatch):
    monkeypatch.setattr("neuron_di.worker.server.BODY_TIMEOUT_S", 0.05)
    worker = workers.start("both")
    async with listening(worker, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(BODY + b"Content-Length: 9\r\n\r\n{")
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readline()).split()[1] == b"408"
        writer.close()
