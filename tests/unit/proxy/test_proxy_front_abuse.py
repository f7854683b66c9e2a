"""What abusive clients try with one connection, or many, at the front and at hypercorn's side.

The names begin with the abuse cases' numbers.
"""

import asyncio
import contextlib
import socket
import ssl
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import uvloop
from raw_http import RawClient, get, post
from running_proxy import AT_ONCE, RunningProxy, until
from scripted_worker import play_prefill, token

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy import socket_rest
from neuron_di_proxy.front_connection import PIPELINED_BYTES_MAX, FrontConnection

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy")

PATH = "/v1/completions"
WHOLE = {"model": "tiny", "prompt": "hi"}
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
STREAM = WHOLE | {"stream": True, "max_tokens": None}
HURRIED = FrontOptions(
    header_timeout_s=0.3, body_timeout_s=0.3, body_bytes_max=4096, connections_max=20
)


@pytest.fixture(scope="module")
def event_loop_policy():
    """The event loop that the proxy's process has; other tests run the front on asyncio's."""
    return uvloop.EventLoopPolicy()


@pytest.fixture(params=[True, False], ids=["front", "hypercorn"])
def takes_hot(request):
    return request.param


@pytest.fixture
async def hurried(takes_hot, playing, stack):
    """A proxy with little patience, both ways."""
    config = ProxyOptions(limits=replace(AT_ONCE, send_timeout_s=0.5), front=HURRIED)
    return await stack.enter_async_context(
        RunningProxy(config, playing.proxy.directory.records, takes_hot=takes_hot)
    )


@pytest.fixture
async def narrow(takes_hot, playing, stack):
    """One with patience, and few places."""
    front = FrontOptions(connections_max=HURRIED.connections_max)
    config = ProxyOptions(limits=AT_ONCE, front=front)
    return await stack.enter_async_context(
        RunningProxy(config, playing.proxy.directory.records, takes_hot=takes_hot)
    )


async def still_serves(proxy):
    async with RawClient(proxy.address) as raw:
        raw.send(post(PATH, WHOLE))
        return (await raw.response()).status == 200


async def refusal(proxy, data):
    """What is answered, and that the connection ends with it."""
    async with RawClient(proxy.address) as raw:
        raw.send(data)
        response = await raw.response()
        assert await raw.end() == b""
        return response


def all_keys(response):
    return set(response.error) == {"message", "type", "param", "code"}


async def test_b01_a_declared_body_over_the_limit_is_refused_before_it_is_read(hurried):
    response = await refusal(hurried, post(PATH, b"x" * 4097)[:-4097])
    assert (response.status, all_keys(response)) == (413, True)
    assert await still_serves(hurried)


async def test_b02_a_chunked_body_over_the_limit_is_refused_as_it_comes(hurried):
    response = await refusal(hurried, CHUNKED + b"800\r\n%b\r\n" % (b"x" * 0x800) * 3)
    assert (response.status, all_keys(response)) == (413, True)
    assert await still_serves(hurried)


@pytest.mark.parametrize("line", ["X: " + "y" * 70_000, "\r\n".join(["X: y"] * 1000)])
async def test_b03_a_large_head_or_many_headers_are_refused(hurried, line):
    response = await refusal(hurried, post(PATH, WHOLE, line))
    assert (response.status, all_keys(response)) == (431, True)
    assert await still_serves(hurried)


async def test_b03_a_head_without_an_end_is_refused_at_the_limit(hurried):
    response = await refusal(hurried, b"GET / HTTP/1.1\r\n" + b"X: yyyyyyy\r\n" * 2000)
    assert response.status == 431


async def test_a_client_that_speaks_tls_is_told_at_once_that_nobody_does(stack, playing):
    proxy = await stack.enter_async_context(  # one with much patience
        RunningProxy(ProxyOptions(limits=AT_ONCE), playing.proxy.directory.records)
    )
    hello = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="x")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    response = await refusal(proxy, hello.read())
    assert (response.status, all_keys(response)) == (400, True)
    assert b"http://" in response.body


async def test_b04_a_connection_without_bytes_is_ended(hurried):
    async with RawClient(hurried.address) as raw:
        assert await raw.end() == b""


async def test_b04_a_head_that_comes_slowly_is_given_up(hurried):
    async with RawClient(hurried.address) as raw:
        dripping = asyncio.create_task(drip(raw, post(PATH, WHOLE)))
        assert (await raw.response()).status == 408
        await raw.end()
        dripping.cancel()


async def test_b04_a_later_head_that_comes_slowly_is_given_up_too(hurried):
    async with RawClient(hurried.address) as raw:
        raw.send(get("/version"))  # from here on the connection is hypercorn's
        assert (await raw.response()).status == 200
        dripping = asyncio.create_task(drip(raw, get("/version")))
        await raw.end()
        dripping.cancel()


async def drip(raw, data):
    with contextlib.suppress(ConnectionError):
        for byte in data:
            raw.send(bytes([byte]))
            await asyncio.sleep(0.05)


async def test_b05_a_body_that_comes_slowly_is_given_up(hurried):
    request = post(PATH, WHOLE)
    async with RawClient(hurried.address) as raw:
        raw.send(request[:-20])
        dripping = asyncio.create_task(drip(raw, request[-20:]))
        response = await raw.response()
        assert (response.status, all_keys(response)) == (408, True)
        await raw.end()
        dripping.cancel()
    assert await hurried.num_running() == 0


async def test_b06_idle_connections_keep_nobody_out(hurried, monkeypatch):
    """The oldest makes room."""
    monkeypatch.setattr(socket_rest, "QUIET_S", 0.0)
    async with AsyncExitStack() as stack:
        raws = []
        for _ in range(3 * HURRIED.connections_max):
            raws.append(await stack.enter_async_context(RawClient(hurried.address)))
            raws[-1].send(get("/live"))
            assert (await raws[-1].response()).status == 200
        assert await raws[0].end() == b""
        for raw in raws[-5:]:
            raw.send(post(PATH, WHOLE))
            assert (await raw.response()).status == 200


async def test_b06_who_has_a_request_is_not_ended_for_another(narrow, monkeypatch):
    monkeypatch.setattr(socket_rest, "QUIET_S", 0.0)
    async with AsyncExitStack() as stack:
        request = post(PATH, WHOLE)
        raws = [
            await stack.enter_async_context(RawClient(narrow.address))
            for _ in range(HURRIED.connections_max)
        ]
        for raw in raws:
            raw.send(request[:-5])
        for _ in range(3):
            one_more = await stack.enter_async_context(RawClient(narrow.address))
            one_more.send(request)
            assert await one_more.end() == b""
        for raw in raws:
            raw.send(request[-5:])
            assert (await raw.response()).status == 200
        last = await stack.enter_async_context(RawClient(narrow.address))
        last.send(request)
        assert (await last.response()).status == 200


async def test_b07_a_compressed_body_is_refused(hurried):
    async with RawClient(hurried.address) as raw:
        raw.send(post(PATH, b"\x1f\x8b", "Content-Encoding: gzip"))
        response = await raw.response()
    assert (response.status, all_keys(response)) == (415, True)
    assert response.error["code"] == "unsupported_content_encoding"


@pytest.mark.parametrize(
    "data",
    [
        post(PATH, b"0\r\n\r\n", "Transfer-Encoding: chunked"),
        post(PATH, WHOLE, "Content-Length: 3"),
        post(PATH, WHOLE).replace(b"\r\nHost", b"\nHost"),
        get("/health").replace(b"Host: a\r\n", b"Host: a\r\n Folded: x\r\n"),
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    ],
)
async def test_b08_what_could_be_read_in_two_ways_is_refused_and_ends_the_connection(hurried, data):
    response = await refusal(hurried, data + post(PATH, WHOLE))
    assert (response.status, all_keys(response)) == (400, True)
    assert await still_serves(hurried)


async def test_b08_chunks_that_are_none_end_the_connection(hurried):
    response = await refusal(hurried, CHUNKED + b"3\r\nabcdef\r\n0\r\n\r\n" + post(PATH, WHOLE))
    assert response.status == 400
    assert await still_serves(hurried)


# By its head alone, and the connection goes on: there is no body to lose one's place in.
REFUSED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Expect: x\r\n\r\n"
)
READ_BYTES_MAX = 256 << 10  # what both event loops give at once


@pytest.fixture
def connections(monkeypatch):
    """The front's connections, as they are made."""
    made, make = [], FrontConnection.connection_made

    def note(self, transport):
        made.append(self)
        make(self, transport)

    monkeypatch.setattr(FrontConnection, "connection_made", note)
    return made


async def test_requests_that_are_refused_at_once_do_not_pile_up(playing, monkeypatch):
    num_kept, take = [], FrontConnection.data_received

    def note(self, data):
        take(self, data)
        num_kept.append(len(self._received))

    monkeypatch.setattr(FrontConnection, "data_received", note)
    num = 30_000
    async with RawClient(playing.proxy.address) as raw:
        raw.send(REFUSED * num + get("/live"))
        answers = bytearray()
        while not answers.endswith(b'{"live":true}'):
            data = await raw.reader.read(1 << 20)
            assert data
            answers += data
    assert answers.count(b"HTTP/1.1 417 ") == num
    assert answers.count(b"HTTP/1.1 200 ") == 1
    assert max(num_kept) <= PIPELINED_BYTES_MAX + 2 * READ_BYTES_MAX


async def test_one_of_them_is_refused_in_each_turn_however_they_come(
    playing, connections, monkeypatch
):
    refused, refuse = [], FrontConnection._refuse

    def note(self, refusal, *, is_read):
        refused.append(refusal.status)
        refuse(self, refusal, is_read=is_read)

    monkeypatch.setattr(FrontConnection, "_refuse", note)
    async with RawClient(playing.proxy.address) as raw:
        raw.send(REFUSED)
        assert (await raw.response()).status == 417
        for _ in range(5):
            connections[-1].data_received(REFUSED * 2)
        for num in range(2, 12):
            assert refused == [417] * num
            connections[-1].resume_writing()
            await asyncio.sleep(0)
        for _ in range(10):
            assert (await raw.response()).status == 417


async def test_a_large_head_behind_one_of_them_is_read(stack, playing):
    front = FrontOptions(header_bytes_max=8 * PIPELINED_BYTES_MAX)
    config = ProxyOptions(limits=AT_ONCE, front=front)
    proxy = await stack.enter_async_context(RunningProxy(config, playing.proxy.directory.records))
    async with RawClient(proxy.address) as raw:
        raw.send(REFUSED * 2 + get("/live", "X: " + "y" * (7 * PIPELINED_BYTES_MAX)))
        for status in (417, 417, 200):
            assert (await raw.response()).status == status


async def test_b25_a_client_that_never_reads_frees_its_place(hurried, playing):
    async def endless(leg):
        index = 0
        while not leg.closed.is_set():
            index += 1
            await leg.send(*(token(index, "x" * 60_000) for _ in range(1)))
            await asyncio.sleep(0)

    playing.prefill.script = play_prefill
    playing.decode.script = endless
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with sock:
        sock.connect(hurried.address)
        sock.sendall(post(PATH, STREAM))
        leg = await playing.decode.next_leg()
        await leg.closed.wait()

        async def is_free():
            return await hurried.num_running() == 0

        await until(is_free)
